"""The runner of the declared faults reports every fault that it could not try, and leaves no process or file behind."""

from __future__ import annotations

import os
import select
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from textwrap import dedent

import pytest
from mutants.__main__ import Mutant, declared, part, with_fault

MUTANTS = Path(__file__).resolve().parents[1] / "mutants"
RUNNER = """
import sys, time, types
from pathlib import Path
import mutants.__main__ as runner
runner._PRELOADED = ()
late = Path("late")
runner.time = types.SimpleNamespace(monotonic=lambda: 1e6 if late.exists() else 0.0, sleep=time.sleep)
sys.exit(runner.main())
"""
"""Runs the runner with a clock that the test controls: once the file `late` exists, the time of every test is over."""
TEST = """
    import os, signal, subprocess, product

    def test_it():
        if not product.fault():
            return
        end = os.open(os.environ["ALIVE"], os.O_WRONLY)
        subprocess.Popen(["sleep", "15"], pass_fds=[end], stdin=subprocess.DEVNULL)
        os.write(end, b"started")
        if product.fault() == "fails":
            raise AssertionError
        signal.pause()
"""
"""Test that starts a process under a fault, and then fails or hangs. Both processes hold the pipe ALIVE open."""
PATIENCE_S = 30
"""Seconds to wait for an event that usually takes less than a second. Longer than any process here lives if nothing
ends it."""
AT_ONCE_S = 5
"""Seconds within which killed processes must exit. Shorter than any process here lives if nothing ends it."""


class Tree:
    """Tree with one source, one test of it and declared faults, and a run of the runner in it.

    Args:
        folder: folder of the tree
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.temporary = folder.with_name("temporary")
        self.temporary.mkdir()
        self._alive = folder.with_name("alive")
        os.mkfifo(self._alive)
        self.alive = os.open(self._alive, os.O_RDONLY | os.O_NONBLOCK)
        shutil.copytree(MUTANTS, folder / "tests" / "mutants", ignore=shutil.ignore_patterns("__pycache__", "*.toml"))
        shutil.copy(MUTANTS.parent / "slices.py", folder / "tests")
        (folder / "tests" / "product.py").write_text('def fault():\n    return ""\n')
        (folder / "tests" / "test_product.py").write_text(dedent(TEST))
        (folder / ".gitignore").write_text("late\n")
        subprocess.run(["git", "init", "--quiet"], cwd=folder, check=True)

    def declare(self, *, file: str = "tests/product.py", becomes: str = "fails") -> None:
        (self.folder / "tests" / "mutants" / "python.toml").write_text(f"""
            [[mutant]]
            promise = "it holds"
            file = "{file}"
            function = "fault"
            expression = '""'
            becomes = '"{becomes}"'
            tests = ["tests/test_product.py"]
            """)

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-c", RUNNER, "--workers", "1", *arguments],
            cwd=self.folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            env={**os.environ, "PYTHONPATH": "tests", "TMPDIR": str(self.temporary), "ALIVE": str(self._alive),
                 "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTEST_PLUGINS": "pytest_timeout"},
        )  # fmt: skip

    def run(self, *arguments: str) -> tuple[int, str]:
        with self.start(*arguments) as runner:
            output, _ = runner.communicate(timeout=PATIENCE_S)
        return runner.returncode, output

    def read_output(self, within_s: float) -> bytes | None:
        """Return the output of the test's processes; empty once all have ended, None after the timeout."""
        return os.read(self.alive, 100) if select.select([self.alive], [], [], within_s)[0] else None


@pytest.fixture
def tree(tmp_path: Path) -> Iterator[Tree]:
    (tmp_path / "tree").mkdir()
    made = Tree(tmp_path / "tree")
    yield made
    os.close(made.alive)


def test_each_fault_belongs_to_one_slice() -> None:
    faults = declared(["python", "hook"])
    slices = [part(faults, number, 3) for number in (1, 2, 3)]
    assert sorted(fault.promise for each in slices for fault in each) == sorted(fault.promise for fault in faults)
    assert all(len(faults) / 4 < len(each) < len(faults) / 2 for each in slices)


def test_a_selection_of_nothing_fails(tree: Tree) -> None:
    tree.declare()
    assert tree.run("--only", "zzz") == (1, "no fault of python has 'zzz' in its promise or file\n")


def test_a_declared_fault_of_a_deleted_file_is_an_error(tree: Tree) -> None:
    tree.declare(file="tests/missing.py")
    status, output = tree.run()
    assert status == 1
    assert "tests/missing.py: it holds\n  there is no such file: declare the fault again" in output
    assert "1 faults tried" in output


def test_a_process_that_a_noticing_test_leaves_ends_with_the_test(tree: Tree) -> None:
    tree.declare(becomes="fails")
    status, output = tree.run()
    assert status == 0, output
    assert tree.read_output(AT_ONCE_S) == b"started"
    assert tree.read_output(AT_ONCE_S) == b""


def test_a_test_that_hangs_ends_with_its_processes_when_its_time_is_over(tree: Tree) -> None:
    tree.declare(becomes="hangs")
    with tree.start() as runner:
        assert tree.read_output(PATIENCE_S) == b"started"
        (tree.folder / "late").touch()
        output, _ = runner.communicate(timeout=PATIENCE_S)
    assert (runner.returncode, "pytest ended with -9" in output) == (1, True), output
    assert tree.read_output(AT_ONCE_S) == b""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_runner_with_its_processes_and_copies(tree: Tree, number: signal.Signals) -> None:
    tree.declare(becomes="hangs")
    with tree.start() as runner:
        assert tree.read_output(PATIENCE_S) == b"started"
        runner.send_signal(number)
        runner.communicate(timeout=PATIENCE_S)
    assert runner.returncode != 0
    assert tree.read_output(AT_ONCE_S) == b""
    assert list(tree.temporary.iterdir()) == []


def test_every_declared_fault_can_be_applied() -> None:
    root = MUTANTS.parents[1]
    for mutant in declared(("python", "hook")):
        source = (root / mutant.file).read_text(encoding="utf-8")
        assert with_fault(mutant, source) != source, mutant.promise


def fault(file: str, function: str, expression: str) -> Mutant:
    return Mutant("python", "it holds", Path(file), function, expression, "0", ())


PYTHON = """
class Bucket:
    def take(self, n):
        def inner():
            return n + 1
        if (n
                > self.left):
            self.wake()
        return inner()

def take(n):
    return "ä", n + 1
"""
C = """
static int first(int n) {
    return n + 1;
}

int second(int n,
           int m)
{
    return n + 1;
}
"""


@pytest.mark.parametrize(
    ("file", "function", "expression", "before", "after"),
    [
        ("a.py", "take", "n + 1", '"ä", n + 1', '"ä", 0'),
        ("a.py", "Bucket.take.inner", "n+1", "return n + 1\n        if", "return 0\n        if"),
        ("a.py", "Bucket.take", "n > self.left", "(n\n                > self.left)", "(0)"),
        ("a.py", "Bucket.take", "self.wake()", "self.wake()", "0"),
        ("a.c", "first", "n + 1", "return n + 1;\n}\n\nint", "return 0;\n}\n\nint"),
        ("a.c", "second", "n + 1;", "{\n    return n + 1;\n}\n", "{\n    return 0\n}\n"),
    ],
)
def test_a_fault_changes_one_expression_of_its_function(
    file: str, function: str, expression: str, before: str, after: str
) -> None:
    source = PYTHON if file.endswith(".py") else C
    expected = source.replace(before, after) if source.count(before) == 1 else after.join(source.rsplit(before, 1))
    assert with_fault(fault(file, function, expression), source) == expected


@pytest.mark.parametrize(
    ("file", "function", "expression", "message"),
    [
        ("a.py", "give", "n", "function give is there 0 times"),
        ("a.py", "take", "n + 2", "expression 'n \\+ 2' in take is there 0 times"),
        ("a.py", "Bucket.take", "n", "there 2 times"),
        ("a.c", "third", "n", "function third is there 0 times"),
        ("a.c", "first", "m", "text 'm' stands 0 times in first"),
    ],
)
def test_a_fault_that_fits_no_single_place_is_refused(file: str, function: str, expression: str, message: str) -> None:
    with pytest.raises(LookupError, match=message):
        with_fault(fault(file, function, expression), PYTHON if file.endswith(".py") else C)
