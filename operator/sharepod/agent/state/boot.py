"""Identity of the node's current boot. The agent stores it with records about processes and devices, because these are
valid for one boot only."""

from __future__ import annotations

from functools import cache
from pathlib import Path

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@cache
def boot_id() -> str:
    """Return Linux' boot id; empty if it cannot be read."""
    try:
        return _BOOT_ID.read_text().strip()
    except OSError:
        return ""
