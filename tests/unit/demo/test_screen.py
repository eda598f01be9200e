"""Output of the demo: it prints the remaining time, and progress overwrites no permanent line."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path

from harness.releases import CONTAINERD, KUBERNETES
from minutes import steps
from screen import Phase, Screen

FIRST, SECOND, THIRD = Phase("first", 10), Phase("second", 20), Phase("third", 30)


class Clock:
    """Clock that a test sets."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def _screen(out: io.StringIO) -> tuple[Screen, Clock]:
    clock = Clock()
    return Screen((FIRST, SECOND, THIRD), clock=clock, out=out), clock


def test_what_is_left_counts_down_within_a_phase_and_never_below_the_phases_to_come() -> None:
    screen, clock = _screen(io.StringIO())
    screen.begin(FIRST)
    assert screen.left() == "about 60 s left"
    clock.now += 4
    assert screen.left() == "about 56 s left"
    clock.now += 40
    assert screen.left() == "about 50 s left"
    screen.begin(SECOND)
    clock.now += 5
    assert screen.left() == "about 45 s left"


def test_the_plan_has_the_duration_of_a_phase_that_takes_longer_the_first_time() -> None:
    screen = Screen((replace(FIRST, usual_s=200), SECOND), clock=Clock(), out=io.StringIO())
    screen.begin(FIRST)
    assert screen.left() == "about 220 s left"


def test_another_plan_tells_what_is_left_of_it() -> None:
    screen, clock = _screen(io.StringIO())
    screen.begin(FIRST)
    clock.now += 4
    screen.follow((SECOND, THIRD))
    assert screen.left() == "about 0 s left"
    screen.begin(THIRD)
    assert screen.left() == "about 30 s left"


def test_without_a_terminal_progress_is_lines_and_only_where_it_is_asked_for() -> None:
    out = io.StringIO()
    screen, clock = _screen(out)
    screen.begin(SECOND)
    for second in range(1, 5):
        clock.now += 1
        screen.progress(f"measured {second} of 4 s", plain=second == 2)
    assert out.getvalue() == "\n[  0.0 s, about 50 s left] second\n  measured 2 of 4 s; about 48 s left\n"


def test_on_a_terminal_the_next_line_takes_the_place_of_the_progress() -> None:
    out = Terminal()
    screen, _ = _screen(out)
    screen.begin(THIRD)
    screen.progress("measured 1 of 2 s")
    screen.progress("measured 2 of 2 s")
    screen.write("shares")
    screen.write("more")
    erase = "\r\x1b[K"
    assert out.getvalue().partition("third\n")[2] == (
        f"{erase}  measured 1 of 2 s; about 30 s left{erase}  measured 2 of 2 s; about 30 s left{erase}shares\nmore\n"
    )


def test_the_end_of_a_run_prints_its_durations() -> None:
    out = io.StringIO()
    screen, clock = _screen(out)
    for phase, seconds in ((FIRST, 3), (SECOND, 4)):
        screen.begin(phase)
        clock.now += seconds
    screen.end()
    assert out.getvalue().partition("] done\n")[2].split() == (
        ["PHASE", "TOOK", "first", "3.0", "s", "second", "4.0", "s", "all", "7.0", "s"]
    )


def test_the_minutes_name_what_is_still_to_do(tmp_path: Path) -> None:
    assert [step.what.partition(",")[0] for step in steps(tmp_path, ("kubelet",), containerd=True, images=True)] == [
        "Python packages into .venv",
        "hook",
        f"Kubernetes {KUBERNETES} from source: kubelet",
        f"{CONTAINERD.name} from source",
        "Debian packages and wheels of SharePod's images",
    ]
    for path in (".venv/installed", "build/shim.built", "build/doubles.built"):
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / path).touch()
    assert steps(tmp_path, (), containerd=False, images=False) == []
