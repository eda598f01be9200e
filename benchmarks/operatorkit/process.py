"""Processor time and memory of a process, from outside."""

from __future__ import annotations

import os
from pathlib import Path

from harness.cluster import Cluster


def cpu_of(pid: int) -> float:
    """Return the processor time of a process so far, in seconds."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def rss_of(pid: int, field: str = "VmRSS") -> float:
    """Return the resident memory of a process in MB. With `field` VmHWM: its maximum so far."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024 / 1e6
    raise ValueError(f"/proc/{pid}/status has no {field}")


def server_cpu(cluster: Cluster) -> float:
    """Return the processor time of a cluster's API server so far, in seconds."""
    lines = cluster.kubectl("get", "--raw", "/metrics").stdout.splitlines()
    return next(float(line.split()[1]) for line in lines if line.startswith("process_cpu_seconds_total "))
