"""Atomic replacement: a reader finds the old file or the new one, whatever happens in between."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from sharepod.agent.state import files

_KILLED_BEFORE_RENAME = """
import os, signal, sys
from pathlib import Path
from sharepod.agent.state import files
Path.replace = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
files.replace(Path(sys.argv[1]), b"new")
"""


def test_the_new_content_and_mode_are_in_place(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "ledger.json"
    files.replace(path, b"old")
    files.replace(path, b"new", mode=0o600)
    assert path.read_bytes() == b"new"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert list(path.parent.iterdir()) == [path]


def test_a_process_killed_between_write_and_rename_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "ledger.json"
    files.replace(path, b"old")
    killed = subprocess.run([sys.executable, "-c", _KILLED_BEFORE_RENAME, str(path)], timeout=30, check=False)
    assert killed.returncode == -signal.SIGKILL
    assert path.read_bytes() == b"old"
    files.replace(path, b"newer")
    assert path.read_bytes() == b"newer"
    assert list(tmp_path.iterdir()) == [path], "what the killed process left behind is removed"


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "ledger.json"
    files.replace(path, b"old")

    def full_disk(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full_disk)
    with pytest.raises(OSError, match="No space left"):
        files.replace(path, b"new")
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_durable_file_is_flushed_before_the_rename_and_its_folder_after(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "ledger.json"
    flushed: list[tuple[str, bool]] = []
    fsync = os.fsync

    def record(descriptor: int) -> None:
        flushed.append((Path(f"/proc/self/fd/{descriptor}").readlink().name, path.exists()))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", record)
    files.replace(path, b"new")
    assert flushed == [(".ledger.json.new", False), (tmp_path.name, True)]


def test_a_file_that_need_not_last_costs_no_flush(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_flush(_: int) -> None:
        raise AssertionError("flushed")

    monkeypatch.setattr(os, "fsync", no_flush)
    path = tmp_path / "limits"
    files.replace(path, b"new", durable=False)
    assert path.read_bytes() == b"new"


def test_a_link_takes_the_place_of_a_file(tmp_path: Path) -> None:
    hook, target = tmp_path / "hook.so", tmp_path / "libsharepod.so"
    hook.write_bytes(b"hook")
    target.write_bytes(b"older hook")
    with files.replacing(target) as fresh:
        os.link(hook, fresh)
    assert target.samefile(hook)


def test_a_block_that_raises_replaces_nothing(tmp_path: Path) -> None:
    path = tmp_path / "handover"
    path.write_bytes(b"old")

    def fill(fresh: Path) -> None:
        fresh.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space left"), files.replacing(path) as fresh:
        fill(fresh)
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]
