"""Which start of the node this is: what is kept of processes and devices is true for one only."""

from __future__ import annotations

from functools import cache
from pathlib import Path

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@cache
def boot_id() -> str:
    """The kernel's name of it; empty where it does not tell."""
    try:
        return _BOOT_ID.read_text().strip()
    except OSError:
        return ""
