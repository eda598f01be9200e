"""The runs of pytest in `make test`, `make test-all` and `.ci/run` contain the tests that the documentation
promises."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = {path.relative_to(ROOT).parts[1] for path in (ROOT / "tests").rglob("test_*.py")}
"""Folders below tests/ that contain tests."""
SELECTIONS = {"-k", "--slice", "--examples-percent", "--deselect", "--ignore"}
"""Options of pytest that leave out tests or examples."""


def pytests(*arguments: str) -> list[list[str]]:
    """Return the arguments of each run of pytest that `make` with these arguments starts, if none fails."""
    outside = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS", "PYTEST"))}
    printed = subprocess.run(
        ["make", "--dry-run", "--always-make", *arguments],
        cwd=ROOT, env=outside, capture_output=True, text=True, check=True, timeout=60,
    ).stdout.replace("\\\n", " ")  # fmt: skip
    commands = [shlex.split(first) for first in re.findall(r"-m pytest (.*?)(?: \|\||\n)", printed)]
    return [command for command in commands if "--last-failed" not in command]


def marks(run: list[str]) -> str:
    return run[run.index("-m") + 1]


def folders(run: list[str]) -> set[str]:
    """Return the folders of tests/ of which a run contains all tests."""
    return {path.split("/")[1] for path in run if path.startswith("tests/") and "::" not in path}


def selected(run: list[str]) -> list[str]:
    """Return the single tests and files in a run's arguments."""
    return [path for path in run if (path.startswith("tests/") and path.endswith(".py")) or "::" in path]


def files_with_tests_alone(*folders: str) -> list[str]:
    paths = [path for folder in folders for path in sorted((ROOT / "tests" / folder).rglob("*.py"))]
    return [str(path.relative_to(ROOT)) for path in paths if re.search(r"pytest\.mark\.alone", path.read_text())]


def ci_lines() -> list[str]:
    return (ROOT / ".ci" / "run").read_text(encoding="utf-8").splitlines()


def test_make_test_runs_all_unit_and_property_tests_and_the_quick_ones() -> None:
    quick = [line for line in (ROOT / "tests" / "quick.txt").read_text().splitlines() if not line.startswith("#")]
    runs = pytests("test")
    assert [marks(run) for run in runs] == ["not alone", "alone and paired", "alone and not paired"]
    assert {"unit", "property"} <= folders(runs[0])
    assert selected(runs[0]) == quick
    for run in runs[1:]:
        assert sorted(selected(run)) == sorted(quick + files_with_tests_alone("unit", "property"))
    for run in runs:
        assert not {"-k", "--slice", "--deselect", "--ignore"} & set(run)


def test_make_test_all_runs_every_test_with_all_examples() -> None:
    runs = pytests("test-all")
    assert [marks(run) for run in runs] == ["not alone", "alone and paired", "alone and not paired"]
    for run in runs:
        assert folders(run) == FOLDERS
        assert run[run.index("--slice") + 1] == "1/1"
        assert not (SELECTIONS - {"--slice"}) & set(run)


def test_make_test_all_runs_a_slice() -> None:
    assert all(run[run.index("--slice") + 1] == "3/8" for run in pytests("test-all", "SLICE=3/8"))


def test_ci_leaves_out_only_what_make_coverage_has_run() -> None:
    lines = ci_lines()
    (covered,) = pytests("coverage")
    assert folders(covered) == {"unit"}
    assert marks(covered) == "not alone"
    assert not SELECTIONS & set(covered)
    of_tests = [line for line in lines if re.match("make test(-all)? ", line)]
    assert [shlex.split(line)[1:] for line in of_tests] == [
        ["test", "TESTED=tests/unit"],
        ["test-all", "SLICE=commit/8", "TESTED=tests/unit"],
    ]
    assert all(lines.index("make coverage") < lines.index(line) for line in of_tests)
    for line, whole in zip(of_tests, (pytests("test"), pytests("test-all")), strict=True):
        narrowed = pytests(*shlex.split(line)[1:])
        unit = {argument for run in narrowed for argument in run if argument.startswith("tests/unit")}
        assert unit == ({"tests/unit/monitoring"} if "test-all" in line else set()), (
            "they are skipped without Prometheus"
        )
        assert [folders(run) - {"unit"} for run in narrowed] == [folders(run) - {"unit"} for run in whole]
