"""Pytest plugin: durations of tests, printed by folder and kept in build/results/durations.json.

- The duration of a test is the time in seconds that its setup, call and teardown took. A setup of more than
  `LEAST_SETUP_S` is stored as a separate figure, because it starts processes for all tests of a file.
- A run replaces the durations of its own tests. Other durations stay while their test file exists.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path

import pytest
from results import RESULTS, ROOT, Row, store

NAME = "durations"
LEAST_SETUP_S = 0.5
_FOLDER_PARTS = 3
"""Most parts of a folder's path in the printed table, as in tests/unit/agent."""


class Durations:
    """Recorder of one run. It runs in the process that reports: xdist's controller, or the only process."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = defaultdict(float)
        self._setups: dict[str, float] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Add the duration of one phase of a test."""
        self._seconds[report.nodeid] += report.duration
        if report.when == "setup":
            self._setups[report.nodeid] = report.duration

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Print a line for each folder, and keep the durations."""
        if not self._seconds:
            return
        terminalreporter.section("durations")
        for folder, (count, seconds) in by_folder(self._seconds).items():
            terminalreporter.write_line(f"{seconds:8.1f} s  {count:5d} tests  {folder}")
        self.keep()

    def keep(self) -> None:
        """Replace the durations of the run's tests in the file of kept durations."""
        rows = [
            *_replaced("duration", self._seconds),
            *_replaced("setup", {test: setup for test, setup in self._setups.items() if setup > LEAST_SETUP_S}),
        ]
        store(NAME, rows)


def _replaced(metric: str, seconds: Mapping[str, float]) -> list[Row]:
    """Return the stored rows of a metric, updated with the new durations. Rows of tests whose file no longer exists are
    dropped."""
    kept = {test: lasted for test, lasted in read(metric=metric).items() if (ROOT / test.partition("::")[0]).is_file()}
    return [Row(test, metric, "s", round(lasted, 3)) for test, lasted in sorted({**kept, **seconds}.items())]


def pytest_configure(config: pytest.Config) -> None:
    """Register the recorder in the process that reports, if tests run."""
    if not hasattr(config, "workerinput") and not config.option.collectonly:
        config.pluginmanager.register(Durations(), "sharepod-durations")


def by_folder(seconds: Mapping[str, float]) -> dict[str, tuple[int, float]]:
    """Return the number of tests and their duration in seconds for each folder, the longest first."""
    sums: dict[str, tuple[int, float]] = {}
    for test, each in seconds.items():
        parent = Path(test.partition("::")[0]).parent
        folder = "/".join(parent.parts[:_FOLDER_PARTS])
        count, total = sums.get(folder, (0, 0.0))
        sums[folder] = (count + 1, total + each)
    return dict(sorted(sums.items(), key=lambda item: -item[1][1]))


def read(*, metric: str = "duration") -> dict[str, float]:
    """Return the kept figures of a metric in seconds, by test. Empty if no run has kept any."""
    path = RESULTS / f"{NAME}.json"
    if not path.is_file():
        return {}
    rows = json.loads(path.read_text(encoding="utf-8"))["rows"]
    return {row["case"]: row["value"] for row in rows if row["metric"] == metric}
