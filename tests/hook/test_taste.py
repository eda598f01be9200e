"""Promises of `make taste`: without a terminal the shares are as requested, keys and edits move the bars, and nothing
is left.
"""

from __future__ import annotations

import contextlib
import os
import pty
import re
import select
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from hook.world.agent_node import ROOT

TASTE = [sys.executable, str(ROOT / "demo" / "taste.py")]
PATIENCE_S = 40.0
_STYLE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


def _environment(directory: Path, columns: int = 150) -> dict[str, str]:
    paths = f"{ROOT / 'tests'}:{ROOT / 'benchmarks'}"
    return dict(os.environ) | {
        "PYTHONPATH": paths,
        "TMPDIR": str(directory),
        "TERM": "xterm",
        "COLUMNS": str(columns),
        "LINES": "24",
    }


@pytest.fixture
def short(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Directory with a short path, because it contains sockets. It must be empty at the end."""
    directory = Path(f"/tmp/t{os.getpid()}")
    directory.mkdir()
    yield directory
    directory.rmdir()  # fails if anything was left


class _Screen:
    """A run of taste on a terminal of its own."""

    def __init__(self, directory: Path, columns: int = 150) -> None:
        self._terminal, inner = pty.openpty()
        self.process = subprocess.Popen(
            TASTE, stdin=inner, stdout=inner, stderr=inner, env=_environment(directory, columns), start_new_session=True
        )
        os.close(inner)
        self.shown = ""

    def wait_for(self, pattern: str) -> None:
        """Read until the pattern appears after the output that earlier calls read. AssertionError if it does not
        appear.
        """
        deadline, fresh = time.monotonic() + PATIENCE_S, ""
        while not re.search(pattern, fresh):
            assert time.monotonic() < deadline, f"{pattern} was not shown within {PATIENCE_S:g} s: {fresh[-2000:]}"
            fresh = _STYLE.sub("", fresh + self._read())
        self.shown += fresh

    def _read(self) -> str:
        """Return the output of at most the next 0.2 s."""
        if select.select([self._terminal], [], [], 0.2)[0]:
            with contextlib.suppress(OSError):
                return os.read(self._terminal, 1 << 16).decode(errors="replace")
        return ""

    def press(self, key: str) -> None:
        os.write(self._terminal, key.encode())

    def close(self) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGINT)
        deadline = time.monotonic() + PATIENCE_S
        while self.process.poll() is None and time.monotonic() < deadline:  # unread output would block its end
            self._read()
        self.process.wait(1)
        os.close(self._terminal)


@pytest.fixture
def screen(short: Path, double: Path) -> Iterator[_Screen]:
    started = _Screen(short)
    yield started
    started.close()


def test_without_a_terminal_the_shares_are_as_asked_within_eight_seconds(short: Path, double: Path) -> None:
    taste = subprocess.Popen(
        TASTE,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=_environment(short),
        start_new_session=True,
    )
    try:
        shown, _ = taste.communicate(timeout=PATIENCE_S)
    finally:
        if taste.poll() is None:
            os.killpg(taste.pid, signal.SIGINT)  # this also ends its agent and its programs
            taste.wait(PATIENCE_S)
    assert taste.returncode == 0, shown
    assert shown.startswith("simulated GPU, real agent and hook")
    assert re.search(r"alpha: asked 50.0%, got \d\d\.\d% of", shown)
    assert re.search(r"gamma: asked 20.0%, needs 10.0%, got \d+\.\d% of", shown)


def test_eighty_columns_hold_the_bars_of_all_three_programs(short: Path, double: Path) -> None:
    narrow = _Screen(short, columns=80)
    try:
        narrow.wait_for(r"gamma +20% +1?\d\.\d% [^\r\n]* 2\.0 of 4\.0 GiB")
        block = (ROOT / "README.md").read_text().partition("$ make taste\n")[2].partition("\n\n")[0]
        for line in textwrap.dedent(block).splitlines():
            if re.match("program|gamma computes|a, b:", line):
                narrow.wait_for(f"{re.escape(line)} *\r?\n")
    finally:
        narrow.close()


def test_a_key_moves_a_tenth_of_the_gpu(screen: _Screen) -> None:
    screen.wait_for(r"alpha +50%")
    screen.press("b")
    screen.wait_for(r"alpha +40%")
    screen.press("q")
    screen.wait_for("nothing is left behind")
    assert screen.process.wait(PATIENCE_S) == 0


def test_each_of_several_quick_keys_moves_and_edits_stay(screen: _Screen, short: Path) -> None:
    screen.wait_for(r"alpha +50%")
    (file,) = short.glob("taste-*/tenants.yaml")
    file.write_text("# mine\n" + file.read_text().replace("limitMilli: 1000", "limitMilli: 950", 1))
    screen.press("aaa")
    screen.wait_for(r"alpha +80%")
    assert file.read_text().startswith("# mine\n")
    assert "limitMilli: 950" in file.read_text()


def test_a_refusal_of_one_tenant_stays_while_the_other_changes(screen: _Screen, short: Path) -> None:
    screen.wait_for(r"alpha +50%")
    (file,) = short.glob("taste-*/tenants.yaml")
    wrong = file.read_text().replace("limitMilli: 1000", "limitMilli: 300", 1)
    file.write_text(wrong.replace("requestMilli: 300", "requestMilli: 200"))
    screen.wait_for(r"beta +20%")
    screen.wait_for("not followed.*alpha.*limitMilli 300")


def test_a_memory_refusal_is_shown(screen: _Screen) -> None:
    screen.wait_for(r"alpha +50%")
    screen.press("m")
    screen.wait_for("a second process of alpha requested 4.0 GiB, 1.0 GiB were free: out of memory")


def test_an_edited_file_is_followed_and_a_wrong_one_is_named(screen: _Screen, short: Path) -> None:
    screen.wait_for(r"alpha +50%")
    (file,) = short.glob("taste-*/tenants.yaml")
    right = file.read_text()
    file.write_text(right.replace("requestMilli: 500", "requestMilli: 6000"))
    screen.wait_for("not followed.*requestMilli")
    file.write_text(right.replace("limitMilli: 1000", "limitMilli: 300", 1))
    screen.wait_for("not followed.*limitMilli 300")
    file.write_text(right.replace("requestMilli: 500", "requestMilli: 200"))
    screen.wait_for(r"alpha +20%")
    os.killpg(screen.process.pid, signal.SIGINT)
    screen.wait_for("nothing is left behind")
    assert screen.process.wait(PATIENCE_S) == 0


def test_a_closed_terminal_and_signals_while_it_ends_leave_nothing(screen: _Screen) -> None:
    screen.wait_for(r"alpha +50%")
    # the signal goes only to this process, because the agent would reload its settings
    os.kill(screen.process.pid, signal.SIGHUP)
    for _ in range(3):
        time.sleep(0.02)
        os.kill(screen.process.pid, signal.SIGINT)
    assert screen.process.wait(PATIENCE_S) == 0
