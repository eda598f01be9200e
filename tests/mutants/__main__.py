"""Applies declared faults to copies of the tree, one at a time, and reports the faults that no test notices.

Exit status 1 if a fault survives, does not match its file any more, or breaks more than its tests; if the tests fail
without any fault; or if no fault is selected.

The processes of a test end with it, and all of them and the copies end with this program, also on Ctrl-C and SIGTERM.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import importlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import pytest
from slices import in_slice, parsed

_T = TypeVar("_T")

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).resolve().parent
LIST_OF_HOOK = "hook"

_TIMEOUT_S = 300
"""Seconds that the tests of one fault may take. They need far less, so only a hang reaches this timeout."""
_TEST_TIMEOUT_S = {"python": 20, LIST_OF_HOOK: 120}
"""Seconds that one test may take, by list. A test often shows a lost wake-up as a wait without end. The first test of
the hook also builds it from the sources of its tree."""
_PATIENCE = 6
"""Factor by which the timeouts are longer without a fault: then no test hangs, and all tests run in one go."""
_PASSED, _FAILED = 0, 1
"""Exit statuses of pytest. Any other status means that pytest could not run the tests."""
_PRELOADED = ("aiohttp", "hypothesis", "kopf", "kubernetes", "kubernetes_asyncio", "numpy", "prometheus_client",
              "pydantic_settings", "structlog", "yaml")  # fmt: skip
"""Modules that most tests import and no fault changes. They are imported once, before the processes of the tests are
forked."""


@dataclass(frozen=True)
class Mutant:
    """A declared fault."""

    of: str
    """Name of the list that declares the fault."""
    promise: str
    """Promise that the fault breaks."""
    file: Path
    """Path in the tree."""
    function: str
    """Qualified name of the function or method that the fault changes."""
    expression: str
    """Expression or statement that the function contains exactly once; in C, a text."""
    becomes: str
    """Text that replaces the expression."""
    tests: tuple[str, ...]
    """Arguments for pytest: the tests that must fail."""


def declared(names: Sequence[str]) -> list[Mutant]:
    """Read the declared faults of the lists with these names."""
    found = []
    for name in names:
        for entry in tomllib.loads((HERE / f"{name}.toml").read_text(encoding="utf-8"))["mutant"]:
            found.append(Mutant(name, **{**entry, "file": Path(entry["file"]), "tests": tuple(entry["tests"])}))
    return found


def with_fault(mutant: Mutant, source: str) -> str:
    """Return the source text of a file with the fault in it.

    Raises `LookupError` unless the file contains the function exactly once, and the function contains the expression
    exactly once.
    """
    if mutant.file.suffix == ".py":
        begin, end = _of_python(mutant, source)
        encoded = source.encode()
        return (encoded[:begin] + mutant.becomes.encode() + encoded[end:]).decode()
    begin, end = _of_c(mutant, source)
    return source[:begin] + mutant.becomes + source[end:]


def _of_python(mutant: Mutant, source: str) -> tuple[int, int]:
    """Return the position of the expression in the source, in bytes. The comparison ignores the layout."""
    lines = [0]
    for line in source.splitlines(keepends=True):
        lines.append(lines[-1] + len(line.encode()))
    scope: list[ast.AST] = [ast.parse(source)]
    for name in mutant.function.split("."):
        kinds = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
        scope = [child for node in scope for child in _below(node) if isinstance(child, kinds) and child.name == name]
    [statement] = ast.parse(mutant.expression).body
    wanted = ast.unparse(statement.value if isinstance(statement, ast.Expr) else statement)
    found = [
        node
        for function in _once(scope, f"function {mutant.function}")
        for node in ast.walk(function)
        if isinstance(node, ast.expr | ast.stmt) and ast.unparse(node) == wanted
    ]
    # A statement that consists of an expression is found twice; only one of the two counts.
    found = [node for node in found if not (isinstance(node, ast.Expr) and node.value in found)]
    [node] = _once(found, f"expression {mutant.expression!r} in {mutant.function}")
    assert node.end_lineno is not None, "the parser sets it"
    assert node.end_col_offset is not None, "the parser sets it"
    return lines[node.lineno - 1] + node.col_offset, lines[node.end_lineno - 1] + node.end_col_offset


def _below(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes of a scope, without the contents of its functions and classes."""
    for child in ast.iter_child_nodes(node):
        yield child
        if not isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield from _below(child)


def _of_c(mutant: Mutant, source: str) -> tuple[int, int]:
    """Return the position of the text in the function. The function's body ends at a brace at the beginning of
    a line."""
    bodies = []
    for head in re.finditer(rf"^\w[^;{{}}()]*\b{re.escape(mutant.function)}\([^;{{]*\)\s*\{{", source, re.MULTILINE):
        bodies.append((head.end(), source.index("\n}", head.end())))
    [(begin, end)] = _once(bodies, f"function {mutant.function}")
    if (count := source.count(mutant.expression, begin, end)) != 1:
        raise LookupError(f"text {mutant.expression!r} stands {count} times in {mutant.function}")
    at = source.index(mutant.expression, begin, end)
    return at, at + len(mutant.expression)


def _once(found: list[_T], what: str) -> list[_T]:
    if len(found) != 1:
        raise LookupError(f"{what} is there {len(found)} times instead of once")
    return found


def part(mutants: Sequence[Mutant], number: int, count: int) -> list[Mutant]:
    """Return slice `number` (from 1) of `count` slices of the faults; at least one fault."""
    chosen = [mutant for mutant in mutants if in_slice(f"{mutant.file} {mutant.promise}", number, count)]
    return chosen or list(mutants[:1])


class Tree:
    """Copy of the tree in which one fault at a time is tried. The tests run in a process of their own for each
    fault."""

    def __init__(self, folder: Path, *, hook: bool) -> None:
        self.folder = folder
        self._output = folder.with_name(f"{folder.name}.output")
        self._test_timeout_s = _TEST_TIMEOUT_S[LIST_OF_HOOK if hook else "python"]
        self._mutant: Mutant | None = None
        self._before = ""
        self._pid = 0
        self._deadline = 0.0
        listed = subprocess.run(
            ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
            cwd=ROOT, capture_output=True, text=True, check=True,
        )  # fmt: skip
        # With the files of bytecode. They are valid, because the copies keep the modification times of the sources.
        built = [
            path.relative_to(ROOT)
            for top in ("operator", "tests")
            for path in (ROOT / top).rglob("*")
            if path.suffix in (".so", ".pyc")
        ]
        for path in (*map(Path, listed.stdout.splitlines()), *built):
            if (ROOT / path).is_file():
                (folder / path).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / path, folder / path)
        (folder / ".venv").symlink_to(ROOT / ".venv")
        if hook:
            for built_there in ("doubles", "programs"):
                shutil.copytree(ROOT / "build" / built_there, folder / "build" / built_there, symlinks=True)

    @property
    def busy(self) -> bool:
        """Return whether tests run in this tree."""
        return self._pid != 0

    def start(self, tests: Sequence[str], mutant: Mutant | None) -> str | None:
        """Apply the fault, if one is given, and start the tests. Return the reason if that is not possible."""
        if mutant is not None:
            path = self.folder / mutant.file
            if not path.is_file():
                return "there is no such file: declare the fault again"
            before = path.read_text(encoding="utf-8")
            try:
                path.write_text(with_fault(mutant, before), encoding="utf-8")
            except (LookupError, SyntaxError) as error:
                return f"{error}: declare the fault again"
            self._mutant, self._before = mutant, before
        self._deadline = time.monotonic() + _TIMEOUT_S * (1 if mutant is not None else _PATIENCE)
        # Signals are blocked until the parent has stored its child's pid and the child has left the parent's cleaning
        # up.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
        self._pid = os.fork()
        if self._pid == 0:
            os.setpgid(0, 0)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            self._become_tests(tests)
        with contextlib.suppress(OSError):  # in both processes, so that the group exists whichever of them runs first
            os.setpgid(self._pid, self._pid)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        return None

    def ended(self) -> tuple[int, str] | None:
        """Return the exit status and the output of the tests once they have ended, and undo the fault. None while they
        run."""
        # WNOWAIT: the child is not reaped yet, so no other process group can get its number.
        over = os.waitid(os.P_PID, self._pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
        if not over and time.monotonic() < self._deadline:
            return None
        status = self._end()
        if self._mutant is not None:
            path = self.folder / self._mutant.file
            path.write_text(self._before, encoding="utf-8")
            if path.suffix == ".py":  # otherwise the build with the fault would count as up to date
                shutil.copystat(ROOT / self._mutant.file, path)
            self._mutant = None
        return os.waitstatus_to_exitcode(status), self._output.read_text(encoding="utf-8", errors="replace")

    def stop(self) -> None:
        """End the tests that run in this tree, if any do."""
        if self.busy:
            self._end()

    def _end(self) -> int:
        """Kill the remaining processes of the tests' process group. Return the wait status of the tests."""
        os.killpg(self._pid, signal.SIGKILL)
        _, status = os.waitpid(self._pid, 0)
        self._pid = 0
        return status

    def _become_tests(self, tests: Sequence[str]) -> None:
        """Run the tests in this process, and end it afterwards."""
        status = 70
        try:
            output = os.open(self._output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            os.dup2(output, 1)
            os.dup2(output, 2)
            os.chdir(self.folder)
            paths = [str(self.folder / name) for name in ("operator", "tests", "benchmarks")]
            sys.path[:] = [*paths, *(path for path in sys.path if not Path(path or ".").is_relative_to(ROOT)
                                     or Path(path).is_relative_to(ROOT / ".venv"))]  # fmt: skip
            os.environ["PYTHONPATH"] = os.pathsep.join(paths)
            os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
            sys.dont_write_bytecode = True
            status = int(pytest.main(
                ["-q", "-x", "-p", "no:cacheprovider", "-W", "ignore::pytest.PytestAssertRewriteWarning",
                 "--timeout", str(self._test_timeout_s * (1 if self._mutant is not None else _PATIENCE)),
                 # because an exception that a signal raises can be lost in a callback of an event loop
                 "--timeout-method", "thread",
                 *tests]
            ))  # fmt: skip
        finally:
            sys.stdout.flush()
            os._exit(status)


@dataclass(frozen=True)
class Attempt:
    """Tests to run in a tree, with one fault or without any."""

    tests: tuple[str, ...]
    mutant: Mutant | None

    @property
    def name(self) -> str:
        """Return the name of the attempt for the output."""
        return f"{self.mutant.file}: {self.mutant.promise}" if self.mutant is not None else "without any fault"

    def verdict(self, status: int, output: str) -> str | None:
        """Return the problem that the outcome shows. None if the outcome is as required."""
        if self.mutant is None:
            return None if status == _PASSED else f"without any fault: {output[-3000:]}"
        if status == _PASSED:
            return f"{self.name}\n  SURVIVES: {' '.join(self.tests)} passes although the promise is broken"
        return None if status == _FAILED else f"{self.name}\n  pytest ended with {status}: {output[-2000:]}"


def play(attempts: list[Attempt], trees: Sequence[Tree]) -> list[str]:
    """Make all attempts, one at a time in each tree. Return the problems."""
    wrong: list[str] = []
    under_way: dict[int, Attempt] = {}
    while attempts or under_way:
        for number, tree in enumerate(trees):
            if tree.busy:
                if (outcome := tree.ended()) is None:
                    continue
                attempt = under_way.pop(number)
                fault = attempt.verdict(*outcome)
                print("ok  " if fault is None else "BAD ", attempt.name, flush=True)
                if fault is not None:
                    wrong.append(fault)
            elif attempts:
                attempt = attempts.pop(0)
                if (fault := tree.start(attempt.tests, attempt.mutant)) is None:
                    under_way[number] = attempt
                else:
                    assert attempt.mutant is not None, "tests without a fault can always be started"
                    wrong.append(f"{attempt.mutant.file}: {attempt.mutant.promise}\n  {fault}")
        time.sleep(0.02)
    return wrong


def _exit_on_sigterm(number: int, _: object) -> None:
    """Raise SystemExit once. A second SIGTERM then does not interrupt the cleaning up."""
    signal.signal(number, signal.SIG_IGN)
    raise SystemExit(128 + number)


def main() -> int:
    """The program."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--lists", default="python", choices=("python", LIST_OF_HOOK, "all"), help="python (default), hook, or all"
    )
    parser.add_argument("--only", default="", help="only faults whose promise or file has this text")
    parser.add_argument("--slice", type=parsed, default=(1, 1), help="K/N: the K-th of N parts of them (1/1)")
    parser.add_argument("--workers", type=int, default=2, help="how many are tried at a time (default 2)")
    arguments = parser.parse_args()
    lists = ["python", LIST_OF_HOOK] if arguments.lists == "all" else [arguments.lists]
    mutants = [m for m in declared(lists) if arguments.only in m.promise or arguments.only in str(m.file)]
    if not mutants:
        print(f"no fault of {arguments.lists} has {arguments.only!r} in its promise or file", file=sys.stderr)
        return 1
    whole = len(mutants)
    mutants = part(mutants, *arguments.slice)
    if len(mutants) < whole:
        print(f"slice {arguments.slice[0]}/{arguments.slice[1]}: {len(mutants)} of {whole} faults", flush=True)
    signal.signal(signal.SIGTERM, _exit_on_sigterm)
    began = time.monotonic()
    for name in _PRELOADED:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    tests = sorted({test for mutant in mutants for test in mutant.tests})
    attempts = [Attempt(tuple(part), None) for part in (tests[::2], tests[1::2]) if part]
    attempts += [Attempt(mutant.tests, mutant) for mutant in mutants]
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        trees = [Tree(Path(folder, str(number)), hook=LIST_OF_HOOK in lists) for number in range(arguments.workers)]
        try:
            wrong = play(attempts, trees)
        finally:
            for tree in trees:
                tree.stop()
    for text in wrong:
        print(text, file=sys.stderr)
    print(f"{len(mutants)} faults tried in {time.monotonic() - began:.0f} s, {len(wrong)} wrong")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
