"""Durations of tests, as the plugin stores them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import durations
import pytest

TESTS = Path(__file__).resolve().parents[1]


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(durations, "ROOT", tmp_path)
    monkeypatch.setattr(durations, "RESULTS", tmp_path)
    monkeypatch.setattr("results.RESULTS", tmp_path)
    return tmp_path / "durations.json"


def record(*reports: tuple[str, str, float]) -> None:
    recorder = durations.Durations()
    for test, when, duration in reports:
        recorder.pytest_runtest_logreport(
            pytest.TestReport(test, ("f", 0, "f"), {}, "passed", None, when, duration=duration)  # type: ignore[arg-type]
        )
    recorder.keep()


def test_a_duration_is_the_sum_of_set_up_call_and_teardown(kept: Path) -> None:
    (kept.parent / "a.py").touch()
    record(("a.py::x", "setup", 2.0), ("a.py::x", "call", 0.25), ("a.py::x", "teardown", 1.0))
    assert durations.read() == {"a.py::x": 3.25}
    assert durations.read(metric="setup") == {"a.py::x": 2.0}


def test_a_run_replaces_its_own_durations_and_drops_those_of_removed_files(kept: Path) -> None:
    for name in ("a.py", "b.py"):
        (kept.parent / name).touch()
    record(("a.py::x", "call", 1.0), ("b.py::y", "call", 2.0), ("c.py::z", "call", 3.0))
    record(("a.py::x", "call", 4.0))
    assert durations.read() == {"a.py::x": 4.0, "b.py::y": 2.0}


def test_folders_are_listed_with_the_longest_first() -> None:
    seconds = {"tests/unit/a/b/c/test_x.py::x": 1.0, "tests/unit/a/test_y.py::y": 2.0, "tests/hook/test_z.py::z": 9.0}
    assert durations.by_folder(seconds) == {"tests/hook": (1, 9.0), "tests/unit/a": (2, 3.0)}


def test_the_plugin_keeps_the_durations_of_all_workers(tmp_path: Path) -> None:
    """A run with xdist writes one file with the duration of each test."""
    (tmp_path / "test_two.py").write_text("def test_a(): pass\ndef test_b(): pass\n")
    program = (
        "import sys, pathlib, results, durations, pytest\n"
        "results.RESULTS = durations.RESULTS = durations.ROOT = pathlib.Path.cwd()\n"
        "sys.exit(pytest.main(['-q', '-p', 'durations', '-n', '2', 'test_two.py']))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=tmp_path, capture_output=True, text=True, check=False, timeout=60,
        env={"PATH": "/usr/bin:/bin", "PYTHONPATH": f"{TESTS}:{TESTS.parent / 'benchmarks'}"},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads((tmp_path / "durations.json").read_text())["rows"]
    assert [row["case"] for row in rows if row["metric"] == "duration"] == [
        "test_two.py::test_a",
        "test_two.py::test_b",
    ]
