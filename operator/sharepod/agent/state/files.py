"""Atomic replacement of files.

Guarantees:
- A reader of a path finds all of the old content or all of the new, even if this process is killed at any moment. The
  caller ensures one writer per path at a time.
- With `durable`, this also holds after a power cut, and the new content is on disk once `replace` has returned.
- A failed replacement leaves the old file as it was. The leftovers of a killed process are removed by the next
  replacement.

Durability costs two fsyncs (file and folder), each a few milliseconds, up to tens of milliseconds on a busy disk.
Callers therefore run in a thread, never between a client's frame and its answer, and request durability only for
content that has no other source.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol


class KeptFiles(Protocol):
    """Files by which an agent leaves state to the next agent, by name. The methods do I/O, so call them from a
    thread."""

    def read(self, name: str) -> bytes:
        """Return the content of a file. Raise `FileNotFoundError` if the file does not exist, else `OSError`."""

    def replace(self, name: str, content: bytes, *, durable: bool = True) -> None:
        """Replace a file, or create it. `durable`: flush it to disk. Raise `OSError`."""


class FolderFiles:
    """Files of one folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def read(self, name: str) -> bytes:
        """Return the content of a file."""
        return (self._folder / name).read_bytes()

    def replace(self, name: str, content: bytes, *, durable: bool = True) -> None:
        """Replace a file, or create it."""
        replace(self._folder / name, content, durable=durable)


def replace(path: Path, content: bytes, *, mode: int = 0o644, durable: bool = True) -> None:
    """Replace the file at `path`, or create it, with `content`; create missing folders. Raise `OSError`.

    Args:
        path: the file to replace.
        content: the whole new content.
        mode: permission bits of the new file, regardless of the umask.
        durable: flush file and folder to disk before returning.
    """
    path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
    with replacing(path) as fresh, fresh.open("xb") as file:
        file.write(content)
        file.flush()
        os.fchmod(file.fileno(), mode)
        if durable:
            os.fsync(file.fileno())
    if durable:
        _sync_folder(path.parent)


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a free path in the folder of `path`. The block must create a file there, which is then renamed to `path`.

    Used for links, sockets and mapped files, which cannot be written by content. Nothing is flushed. If the block
    raises, the old file at `path` stays. Raise `OSError`.
    """
    fresh = path.with_name(f".{path.name}.new")
    fresh.unlink(missing_ok=True)
    try:
        yield fresh
        fresh.replace(path)
    finally:
        fresh.unlink(missing_ok=True)


@contextlib.contextmanager
def short_path(folder: Path) -> Iterator[Path]:
    """Yield a short path of the folder, for Unix sockets in it: their paths have at most 107 bytes. Raise `OSError`."""
    fd = os.open(folder, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield Path(f"/proc/self/fd/{fd}")
    finally:
        os.close(fd)


def _sync_folder(folder: Path) -> None:
    """Flush the folder's entries. Otherwise a power cut may undo a rename."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
