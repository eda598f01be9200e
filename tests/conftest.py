"""Distribution of tests over several workers (`pytest --numprocesses`): which stay together.

Tests of tests/cluster, tests/hook and tests/attack stay with their file, which shares what it has started; so do all
tests of admission, and all that need the machine's one real node. Every other test goes wherever there is room.

The control planes' collector of garbage runs less often than by default (GOGC): a sixth to a fifth less processor time.

With `--one-in N` only one in so many of the files of tests/cluster and tests/node takes part, which the commit chooses:
each starts an API server of its own.

Properties are tried on the same examples in every run; `--hypothesis-profile=anew` draws others. They are not judged by
how long the machine takes for an example: it may be busy.
"""

from __future__ import annotations

import os
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from slices import chosen, commit

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
        "--one-in",
        type=int,
        default=1,
        help="only one in so many files of tests/cluster and tests/node (default 1: all)",
    )


def pytest_configure() -> None:
    """Undo what a shell does to commands that it starts in the background: they and their children ignore Ctrl-C. Let
    programs in Go that tests start use more memory before they collect garbage, up to 2 GiB each.
    """
    os.environ.setdefault("GOGC", "400")
    os.environ.setdefault("GOMEMLIMIT", "2GiB")
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Choose files. Scale the number of examples, also where a test sets it itself, which no profile of hypothesis
    changes.
    """
    _choose_files(config, items)
    percent = config.getoption("examples_percent")
    functions = {function for item in items if hasattr(function := getattr(item, "obj", None), _SETTINGS)}
    for function in functions if percent != 100 else ():
        own = getattr(function, _SETTINGS)
        setattr(function, _SETTINGS, settings(own, max_examples=max(1, own.max_examples * percent // 100)))


def pytest_report_header(config: pytest.Config) -> str | None:
    """The line that says what `--one-in` leaves out."""
    left_out = _left_out(config)
    if not left_out:
        return None
    one_in = config.getoption("one_in")
    return f"one in {one_in} files of tests/cluster and tests/node, seed {commit()}; not {', '.join(left_out)}"


def _choose_files(config: pytest.Config, items: list[pytest.Item]) -> None:
    left_out = set(_left_out(config))
    config.hook.pytest_deselected(items=[item for item in items if _file(item) in left_out])
    items[:] = [item for item in items if _file(item) not in left_out]


def _left_out(config: pytest.Config) -> list[str]:
    one_in = config.getoption("one_in")
    if one_in < 1:
        raise pytest.UsageError("--one-in has to be at least 1")
    seed = commit() if one_in > 1 else ""
    return [path for path in _cluster_files() if not chosen(path, one_in, seed)]


def _cluster_files() -> list[str]:
    here = Path(__file__).parent
    found = sorted([*here.glob("cluster/test_*.py"), *here.glob("node/test_*.py")])
    return [path.relative_to(here.parent).as_posix() for path in found]


def _file(item: pytest.Item) -> str:
    return item.nodeid.partition("::")[0]


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Say of each class of attempts in tests/attack how many were made, and how many were neither refused nor found."""
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
except ImportError:  # then nothing is shared
    LoadScopeScheduling = object


class Together(LoadScopeScheduling):
    """Hands out tests in the order in which they were found, those that belong together to one worker."""

    def _split_scope(self, nodeid: str) -> str:
        path = nodeid.partition("::")[0]
        if path.startswith("tests/node/"):
            return "node"
        if path.startswith("tests/cluster/test_admission"):
            return "admission"
        return path if path.startswith(("tests/cluster/", "tests/hook/", "tests/attack/")) else nodeid


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Together:
    config.option.loadscopereorder = False
    return Together(config, log)
