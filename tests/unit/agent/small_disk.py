"""Small disk for a test: a tmpfs that the test can fill and make read-only. Needs the right to mount."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

_SIZE = "512k"
_PIECE = b"x" * 4096


class SmallDisk:
    """Small tmpfs mounted at `path`."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def fill(self) -> None:
        with (self.path / "filler").open("ab", buffering=0) as file, contextlib.suppress(OSError):
            while file.write(_PIECE):
                pass

    def empty(self) -> None:
        (self.path / "filler").unlink()

    @contextlib.contextmanager
    def read_only(self) -> Iterator[None]:
        """In the block, the disk is read-only, except for files that are already open."""
        _mount("--bind", str(self.path), str(self.path))
        try:
            _mount("-o", "remount,bind,ro", str(self.path))
            yield
        finally:
            _unmount(self.path)


@contextlib.contextmanager
def small_disk(path: Path) -> Iterator[SmallDisk]:
    """Mount a disk at `path`, which is created. Skip the test if mounting is not allowed."""
    path.mkdir()
    try:
        _mount("-t", "tmpfs", "-o", f"size={_SIZE}", "tmpfs", str(path))
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("no disk can be mounted here: that takes root")
    try:
        yield SmallDisk(path)
    finally:
        _unmount(path)


def _unmount(path: Path) -> None:
    subprocess.run(["umount", "-l", str(path)], check=True, timeout=20)


def _mount(*arguments: str) -> None:
    subprocess.run(["mount", *arguments], check=True, capture_output=True, timeout=20)
