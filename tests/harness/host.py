"""Processor time that the host of a virtual machine took from it: a yardstick for tests of shares of time."""

from __future__ import annotations

import os
import time
from pathlib import Path

_STOLEN = 8
"""Field of the first line of /proc/stat: time that the host took from all processors, in ticks."""


class Stolen:
    """Part of the processors' time that the host took, from when this is made."""

    def __init__(self) -> None:
        self._ticks, self._begin = _stolen_ticks(), time.monotonic()

    def part(self) -> float:
        """Return the part so far, between 0 and 1; 0 if the host reports none."""
        seconds = (_stolen_ticks() - self._ticks) / os.sysconf("SC_CLK_TCK")
        return seconds / (time.monotonic() - self._begin) / (os.cpu_count() or 1)


def _stolen_ticks() -> int:
    return int(Path("/proc/stat").read_text().split("\n", 1)[0].split()[_STOLEN])
