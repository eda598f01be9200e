"""docs/promises.py: every promise of the docs has a test or benchmark, and every mark names a promise."""

from __future__ import annotations

import json
from pathlib import Path

import promises
import pytest

PAGE = """# Design

## Time

A tenant gets its share. <!-- promise: time-share --> It waits otherwise.
"""
TEST = """import pytest

@pytest.mark.promise("time-share")
def test_a_share() -> None: ...
"""
BENCHMARK = """PROMISES = {"time-share": ("max", "share_error")}

def main():
    write("shares", rows)
"""
MAKEFILE = "bench-shares: shim\n\t@$(BIN)/python benchmarks/shares.py\n"
RESULT = {
    "name": "shares",
    "commit": "abc1234",
    "rows": [
        {"case": "two", "metric": "share_error", "unit": "points", "value": 0.25},
        {"case": "ten", "metric": "share_error", "unit": "points", "value": 0.75},
        {"case": "ten", "metric": "wait", "unit": "ms", "value": 9},
    ],
}


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """Return a checkout with one promise, and a test that holds the promise."""
    for path, text in (("docs/design.md", PAGE), ("tests/unit/test_shares.py", TEST), ("Makefile", MAKEFILE)):
        _write(tmp_path, path, text)
    assert promises.main(["--check"], tmp_path) == 0
    return tmp_path


def test_each_promise_of_this_checkout_is_held(capsys: pytest.CaptureFixture[str]) -> None:
    assert promises.main(["--check"]) == 0, capsys.readouterr().err


def test_a_promise_stands_in_its_room_with_its_test_and_command(tree: Path) -> None:
    assert promises.main([], tree) == 0
    assert (
        (tree / "build" / "promises.md")
        .read_text()
        .endswith(
            "## Time shares\n\n| promise | held by | run | last figure |\n|---|---|---|---|\n"
            "| A tenant gets its share. ([design.md](../docs/design.md#time)) "
            r"| [unit/test\_shares.py::test\_a\_share](../tests/unit/test_shares.py) "
            "| `make promise ID=time-share` |  |\n"
        )
    )


@pytest.mark.parametrize(
    ("path", "text", "message"),
    [
        ("tests/unit/test_shares.py", "", "docs/design.md: promise time-share is held by no test and no benchmark"),
        (
            "tests/test_b.py",
            TEST.replace("-share", "-lost"),
            "test_b.py::test_a_share names the promise time-lost, which",
        ),
        ("SECURITY.md", PAGE, "promise time-share is made twice: SECURITY.md and docs/design.md"),
        ("tests/test_b.py", TEST.replace("@", "@pytest.mark.xfail\n@"), "expected to fail, so it holds no promise"),
        ("tests/test_b.py", TEST.replace("@", "@pytest.mark.skip\n@"), "is skipped or expected"),
        ("tests/test_b.py", "pytestmark = pytest.mark.skip\n" + TEST, "its tests are skipped or expected to fail"),
        ("tests/b.py", TEST, "tests/b.py: pytest does not collect this file"),
        ("docs/b.md", "It is so. <!--promise: time-a-->\n", "`<!--promise: time-a-->` is no anchor: write it as"),
        ("docs/b.md", "It is so. <!-- promise: share -->\n", "`<!-- promise: share -->` is no anchor"),
        ("docs/b.md", "It is so. <!-- promise: tmie-a -->\n", "`<!-- promise: tmie-a -->` is no anchor"),
        ("docs/b.md", "It is so.\n\n<!-- promise: time-a -->\n", "anchor of time-a stands behind no sentence"),
        ("tests/test_b.py", TEST.replace("test_a", "a"), "tests/test_b.py: line 3: mark.promise is on no test"),
        (
            "tests/test_b.py",
            TEST.replace('"time-share"', "NAME"),
            "tests/test_b.py: line 3: the ID of a promise is a str",
        ),
        (
            "benchmarks/b.py",
            'PROMISES = {"time-lost": ("max", "m")}',
            "b.py names the promise time-lost, which no page",
        ),
        ("benchmarks/b.py", 'PROMISES = {"time-share": ("mean", "m")}', "b.py: PROMISES is"),
        ("benchmarks/b.py", BENCHMARK, "promises.toml lacks max share_error of benchmarks/b.py for time-share"),
        ("docs/promises.toml", '[time-share]\n"b.py" = "max m: 1"', "b.py does not name that promise"),
    ],
)
def test_an_inconsistent_promise_is_reported(
    tree: Path, path: str, text: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    _write(tree, path, text)
    assert promises.main(["--check"], tree) == 1
    assert message in capsys.readouterr().err


def test_a_benchmark_holds_a_promise_by_its_last_figure(tree: Path) -> None:
    (tree / "tests" / "unit" / "test_shares.py").unlink()
    _write(tree, "benchmarks/shares.py", BENCHMARK)
    _write(tree, "build/results/shares.json", json.dumps(RESULT))
    _write(tree, "build/results/other.json", json.dumps(RESULT | {"name": "other", "commit": "0000000"}))
    assert promises.main(["--figures"], tree) == 0
    (row,) = [line for line in (tree / "build" / "promises.md").read_text().splitlines() if "its share" in line]
    assert row.endswith("| `time-share`<br>`make bench-shares` | 0.75 points (ten, at abc1234) |")


def test_a_figure_stays_while_there_is_no_newer_one_and_goes_with_its_promise(tree: Path) -> None:
    _write(tree, "benchmarks/shares.py", BENCHMARK)
    _write(tree, "build/results/shares.json", json.dumps(RESULT))
    assert promises.main(["--figures"], tree) == 0
    (tree / "build" / "results" / "shares.json").unlink()
    assert promises.main(["--figures"], tree) == 0
    assert "0.75 points" in (tree / "docs" / "promises.toml").read_text()
    _write(tree, "benchmarks/shares.py", BENCHMARK.replace("share_error", "wait"))
    assert promises.main(["--check"], tree) == 1
    (tree / "benchmarks" / "shares.py").unlink()
    assert promises.main(["--figures"], tree) == 0
    assert "0.75 points" not in (tree / "docs" / "promises.toml").read_text()


def test_the_tests_of_a_promise_are_printed_for_make(tree: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _write(tree, "tests/unit/test_whole.py", 'import pytest\n\npytestmark = pytest.mark.promise("time-share")\n')
    assert promises.main(["--tests", "time-share"], tree) == 0
    assert capsys.readouterr().out == "tests/unit/test_shares.py::test_a_share tests/unit/test_whole.py\n"
    assert promises.main(["--tests", "time-lost"], tree) == 1


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("One is. Two\nis `x`. <!-- promise: time-a -->", "Two is `x`."),
        ("One is. <!-- promise: time-b --> Two is. <!-- promise: time-a -->", "Two is."),
        ("One is. Two is. <!-- promise: time-a, 2 sentences -->", "One is. Two is."),
        ("Above.\n\n- **TS1 name.** It is [so](x.md). <!-- promise: time-a -->", "**TS1 name.** It is so."),
        ("Above. One of:\n\n- it is;\n- so\n  is it; <!-- promise: time-a -->", "One of: so is it"),
        ("1. One:\n   - It is\n     so. <!-- promise: time-a -->", "It is so."),
        ("# Head\nIt is so. <!-- promise: time-a -->", "It is so."),
        ("| `limit` | 0 to 1 | So. More <!-- promise: time-a --> | 1 |", "`limit`: More"),
        ("| It is so <!-- promise: time-a --> | 1 |", "It is so"),
    ],
)
def test_a_promise_is_the_sentence_before_its_anchor(tmp_path: Path, text: str, sentence: str) -> None:
    _write(tmp_path, "docs/a.md", text)
    assert [found.sentence for found in promises.find(tmp_path).promises if found.id == "time-a"] == [sentence]


def _write(root: Path, path: str, text: str) -> None:
    (root / path).parent.mkdir(parents=True, exist_ok=True)
    (root / path).write_text(text)
