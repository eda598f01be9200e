"""Cache of the harness for programs that take minutes to build, and the lock against two builds at once.

Guarantees:
- All files are below one directory that the user can delete at any time.
- A finished entry appears under its name by rename, so it is always whole.
- Only the holder of the lock writes, and the kernel releases the lock when its holder exits.
"""

from __future__ import annotations

import fcntl
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from harness.errors import HarnessError


def cache_dir() -> Path:
    """Return the directory: $SHAREPOD_CACHE, else $XDG_CACHE_HOME/sharepod, else ~/.cache/sharepod. Create it if it is
    missing."""
    if own := os.environ.get("SHAREPOD_CACHE"):
        path = Path(own)
    elif xdg := os.environ.get("XDG_CACHE_HOME"):
        path = Path(xdg) / "sharepod"
    else:
        path = Path.home() / ".cache" / "sharepod"
    path = path.expanduser().absolute()
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise HarnessError(
            f"cannot make {path}: {error}; set SHAREPOD_CACHE to a directory that can be written"
        ) from error
    return path


def acquire(path: Path, *, what: str, timeout: float) -> int:
    """Take the lock file `path`; return its descriptor. The lock lasts as long as any copy of the descriptor is open.

    `what` names the other process's work for the waiting user. If another process holds the lock for `timeout` seconds
    (0: no waiting), raises HarnessError, which names that process.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    deadline = time.monotonic() + timeout
    logged = False
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except BlockingIOError:
            holder = os.pread(descriptor, 32, 0).decode(errors="replace").strip() or "unknown"
            if time.monotonic() >= deadline:
                os.close(descriptor)
                raise HarnessError(f"{path} is held by process {holder}: {what}") from None
            if not logged:
                print(f"waiting for process {holder}: {what}", file=sys.stderr, flush=True)
                logged = True
            time.sleep(0.1)
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
    return descriptor


@contextmanager
def exclusive(path: Path, *, what: str, timeout: float) -> Iterator[None]:
    """Hold the lock file `path` for the block; see `acquire`."""
    descriptor = acquire(path, what=what, timeout=timeout)
    try:
        yield
    finally:
        os.close(descriptor)
