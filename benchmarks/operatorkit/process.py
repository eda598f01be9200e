"""Processor time, memory and stalls of a process, from outside."""

from __future__ import annotations

import os
import threading
import time
import urllib.request
from pathlib import Path
from types import TracebackType
from typing import Self

from harness.cluster import Cluster

_PROBE_S = 0.02
"""Seconds between two probes."""


def cpu_of(pid: int) -> float:
    """Return the processor time of a process so far, in seconds."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def rss_of(pid: int, field: str = "VmRSS") -> float:
    """Return the resident memory of a process in MB; `field` VmHWM: the most that it ever was."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024 / 1e6
    raise ValueError(f"/proc/{pid}/status has no {field}")


def server_cpu(cluster: Cluster) -> float:
    """Return the processor time of a cluster's API server so far, in seconds."""
    lines = cluster.kubectl("get", "--raw", "/metrics").stdout.splitlines()
    return next(float(line.split()[1]) for line in lines if line.startswith("process_cpu_seconds_total "))


class Stalls:
    """Longest time in which the process at `url` did not answer a request that takes it well below a millisecond.

    Its event loop stood still for that long, or other processes had both processors. Use it in a `with` block.
    """

    def __init__(self, url: str) -> None:
        self._url = url
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._probe, daemon=True)
        self.longest = 0.0
        """Seconds."""

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stopped.set()
        self._thread.join(timeout=60)

    def _probe(self) -> None:
        while not self._stopped.wait(_PROBE_S):
            begun = time.monotonic()
            try:
                with urllib.request.urlopen(self._url, timeout=30) as answer:
                    answer.read()
            except OSError:
                continue
            self.longest = max(self.longest, time.monotonic() - begun)
