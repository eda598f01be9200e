"""Processor time that the host of a virtual machine took from it (steal time). Tests of time shares use it to judge a
measurement.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

_STOLEN = 8
"""Index of the field `steal` in the first line of /proc/stat: time that the host took from all processors, in ticks."""


class Stolen:
    """Part of the processors' time that the host has taken since this object was created."""

    def __init__(self) -> None:
        self._ticks, self._begin = _stolen_ticks(), time.monotonic()

    def part(self) -> float:
        """Return the part so far, from 0 to 1. 0 if the host does not report steal time."""
        seconds = (_stolen_ticks() - self._ticks) / os.sysconf("SC_CLK_TCK")
        return seconds / (time.monotonic() - self._begin) / (os.cpu_count() or 1)


def _stolen_ticks() -> int:
    return int(Path("/proc/stat").read_text().split("\n", 1)[0].split()[_STOLEN])
