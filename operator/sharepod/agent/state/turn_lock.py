"""Locks by which one agent serves a state directory, and one standby is next.

This module has no slow imports, because the first process of a container takes the lock before it imports the rest.
"""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path

SERVING, NEXT = "agent.lock", "next.lock"
"""Files of the locks in the state directory."""
KEPT_NAME = "turn"
"""Name under which the supervisor keeps the descriptor of the serving agent's lock."""


def opened(path: Path) -> int:
    """Return a descriptor of a lock file, which is created if it is missing. Raise `OSError`."""
    try:
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        if error.errno not in (errno.EROFS, errno.ENOSPC):
            raise
        # On a read-only or full disk, open the file that an earlier agent has created: a lock needs no write.
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)


def taken(descriptor: int) -> bool:
    """Try to take a lock. Return whether this process holds it."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def released(descriptor: int) -> None:
    """Release a lock, for all processes that share its descriptor."""
    fcntl.flock(descriptor, fcntl.LOCK_UN)
