"""`make test` runs all tests, and CI leaves out of it only those that it has just run by another command; on a slow
machine fewer examples of each property and every second file that starts a cluster, too."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = {path.relative_to(ROOT).parts[1] for path in (ROOT / "tests").rglob("test_*.py")}
"""Folders of tests/ that have tests."""


def pytests(*arguments: str) -> list[list[str]]:
    """The arguments of each run of pytest that `make` with these arguments would begin with, if none fails."""
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
    return {path.split("/")[1] for path in run if path.startswith("tests/")}


def test_make_test_runs_every_test() -> None:
    shared, paired, alone, _ = pytests("test")
    assert marks(shared) == "not alone"
    assert folders(shared) == FOLDERS
    assert marks(paired) == "alone and paired"
    assert folders(paired) == {"hook"}, "where tests are marked `paired`"
    assert marks(alone) == "alone and not paired"
    assert not folders(alone), "those of pyproject.toml: all"
    assert not {"-k", "--one-in", "--examples-percent", "--deselect", "--ignore"} & {*shared, *paired, *alone}


def test_ci_leaves_out_of_make_test_only_what_make_coverage_has_run() -> None:
    lines = (ROOT / ".ci" / "run").read_text(encoding="utf-8").splitlines()
    (last,) = [line for line in lines if line.startswith("make test")]
    assert lines.index("make coverage") < lines.index(last)
    *arguments, examples, files = shlex.split(last)[1:]
    assert arguments == ["test", "TESTED=tests/unit"]
    assert examples == "EXAMPLES=$examples", "fewer of each property on a slow machine"
    assert files == "ONE_IN=$files", "fewer that start a cluster there"
    assert [line for line in lines if "files=" in line] == [
        "one_in=3 examples=100 files=",
        "    one_in=10 examples=25 files=2",
    ]
    whole, (covered,) = pytests("test"), pytests("coverage")
    narrowed = pytests(*arguments)
    assert folders(whole[0]) - folders(narrowed[0]) == folders(covered) == {"unit"}
    assert marks(covered) == marks(whole[0])
    assert "tests/unit" in covered
    assert not {"-k", "--examples-percent", "--deselect", "--ignore"} & set(covered)
    assert narrowed[1:] == whole[1:]
    assert pytests(*arguments, "ONE_IN=") == narrowed
    half = ["--one-in", "2"]
    shared = ["--numprocesses", "4", *half, *narrowed[0][2:]]
    assert pytests(*arguments, "ONE_IN=2") == [shared, narrowed[1], [*half, *narrowed[2]], narrowed[3]]
    fewer = ["--numprocesses", "4", "--examples-percent", "25", *narrowed[0][2:]]
    assert pytests(*arguments, "EXAMPLES=25") == [fewer, *narrowed[1:]]
