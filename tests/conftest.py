"""Selection and distribution of tests.

- `--slice K/N` runs the K-th of N parts of the test files, each file whole.
- `--examples-percent P` tries P percent of the examples of each property, at least one. The cases of a parametrized
  test of tests/property are examples, too.
- With `--numprocesses`, tests of tests/cluster, tests/hook and tests/attack stay with their file, which shares what it
  has started. So do all tests of admission, and all tests that need the machine's one real node.
- Control planes collect garbage less often than by default (GOGC), which saves a sixth of their processor time.
- Properties try the same examples in every run; `--hypothesis-profile=anew` draws others. No property has a deadline.
"""

from __future__ import annotations

import functools
import os
import signal
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import pytest
import structlog
from hypothesis import HealthCheck, settings
from slices import in_slice, parsed, spread

settings.register_profile("anew", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("repeatable", settings.get_profile("anew"), derandomize=True)
settings.load_profile("repeatable")

_SETTINGS = "_hypothesis_internal_use_settings"
"""Attribute in which hypothesis keeps the settings of a test."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--examples-percent", type=int, default=100, help="how many of the examples of each property to try (100)"
    )
    parser.addoption(
        "--slice",
        type=parsed,
        default=(1, 1),
        help="K/N: the K-th of N parts of the test files; commit/N: the commit chooses (1/1)",
    )


def pytest_configure() -> None:
    """Handle SIGINT again, which commands ignore, with their children, when a shell starts them in the background. Let
    Go programs of the tests use more memory before they collect garbage, up to 2 GiB each. Log tracebacks without local
    variables, whose rendering by `rich` takes a tenth of a second each.
    """
    structlog.configure(
        processors=[
            structlog.processors.add_log_level,
            structlog.dev.ConsoleRenderer(colors=False, exception_formatter=structlog.dev.plain_traceback),
        ]
    )
    os.environ.setdefault("GOGC", "400")
    os.environ.setdefault("GOMEMLIMIT", "2GiB")
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Select the files of the slice. Scale the number of examples of each property, also where the test sets the number
    itself, which a profile of hypothesis would not change.
    """
    left_out = [item for item in items if not in_slice(_file(item), *config.getoption("slice"))]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if in_slice(_file(item), *config.getoption("slice"))]
    percent = config.getoption("examples_percent")
    if percent != 100:
        chosen = _some_examples(items, percent)
        config.hook.pytest_deselected(items=[item for item in items if item.nodeid not in chosen])
        items[:] = [item for item in items if item.nodeid in chosen]
    functions = {function for item in items if hasattr(function := getattr(item, "obj", None), _SETTINGS)}
    for function in functions if percent != 100 else ():
        own = getattr(function, _SETTINGS)
        setattr(function, _SETTINGS, settings(own, max_examples=max(1, own.max_examples * percent // 100)))


def _some_examples(items: list[pytest.Item], percent: int) -> set[str]:
    """Return the names of the tests without the cases of properties that `percent` leaves out."""
    cases: dict[str, list[str]] = defaultdict(list)
    for item in items:
        name, has_cases, _ = item.nodeid.partition("[")
        is_property = name.startswith("tests/property/") and has_cases
        cases[name if is_property else item.nodeid].append(item.nodeid)
    return {case for each in cases.values() for case in spread(each, percent)}


def pytest_report_header(config: pytest.Config) -> str | None:
    """Return the line that names the slice of a run."""
    number, count = config.getoption("slice")
    return f"slice {number}/{count} of the test files" if count > 1 else None


def _file(item: pytest.Item) -> str:
    return item.nodeid.partition("::")[0]


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Print for each class of attempts in tests/attack how many were made, and how many were neither refused nor
    found."""
    tried: dict[str, Counter[str]] = {}
    for outcome in ("passed", "failed", "skipped"):
        for report in terminalreporter.stats.get(outcome, ()):
            path = report.nodeid.partition("::")[0]
            if "tests/attack/" in path and (report.when == "call" or outcome == "skipped"):
                tried.setdefault(Path(path).stem.removeprefix("test_"), Counter())[outcome] += 1
    if tried:
        terminalreporter.section("attempts of an attacker")
    for kind, count in sorted(tried.items()):
        made = count["passed"] + count["failed"]
        skipped = f", {count['skipped']} skipped" if count["skipped"] else ""
        terminalreporter.write_line(f"{kind.replace('_', ' ')}: {made} made, {count['failed']} succeeded{skipped}")


try:
    from xdist.scheduler import LoadScopeScheduling
except ImportError:  # xdist is not installed, so tests are not distributed to workers
    LoadScopeScheduling = object


class Together(LoadScopeScheduling):
    """Scheduler that assigns tests in the order in which they were found. Tests that belong together get one worker."""

    def _split_scope(self, nodeid: str) -> str:
        path = nodeid.partition("::")[0]
        if path.startswith("tests/node/"):
            return "node"
        if not path.startswith(("tests/cluster/", "tests/hook/", "tests/attack/")):
            return nodeid
        return _cluster_of(path) or path


@functools.cache
def _cluster_of(path: str) -> str | None:
    """Return the name of the cluster that a file shares with others. None if it has its own, or needs none."""
    text = (Path(__file__).parents[1] / path).read_text(encoding="utf-8")
    if "server: Cluster" in text:
        return f"admission of {Path(path).parent.name}"
    if "shared_cluster" in text or ("world: World" in text and "def world(" not in text):
        return f"world {1 if in_slice(path, 1, 2) else 2}"
    return None


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Together:
    config.option.loadscopereorder = False
    return Together(config, log)
