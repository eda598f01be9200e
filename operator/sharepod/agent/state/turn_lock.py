"""Locks of the agent that serves a state directory, and of its next standby.

Has no slow imports: the first process of a container takes its turn before it loads the rest.
"""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path

SERVING, NEXT = "agent.lock", "next.lock"
"""Files of the locks in the state directory."""
KEPT_NAME = "turn"
"""Name of the serving agent's lock among the descriptors of the supervisor."""


def opened(path: Path) -> int:
    """Return a descriptor of a lock's file, which is created if it is missing. Raise `OSError`."""
    try:
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        if error.errno not in (errno.EROFS, errno.ENOSPC):
            raise
        # a file that an earlier agent has created is sufficient for a lock
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)


def taken(descriptor: int) -> bool:
    """Try to take a lock. Return whether this process holds it."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def released(descriptor: int) -> None:
    """Release a lock, for each process that has a copy of the descriptor."""
    fcntl.flock(descriptor, fcntl.LOCK_UN)
