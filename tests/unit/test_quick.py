"""tests/quick.txt: `make test` tests each promise once."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from promises import find
from quick import LONGEST_S, Selection, read, select, slow_holders, text

ROOT = Path(__file__).resolve().parents[2]


def functions(path: Path) -> set[str]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}


def test_the_list_names_tests_that_exist() -> None:
    for test in read().tests:
        file, _, function = test.partition("::")
        assert (ROOT / file).is_file(), test
        assert not function or function in functions(ROOT / file), test


def test_each_promise_is_held_by_make_test_or_named_as_left_out() -> None:
    """A new promise fails this test until `python tests/quick.py`, or a line by hand, adds its test."""
    listed = read()
    unheld = {
        promise: tests
        for promise, tests in slow_holders().items()
        if promise not in listed.left_out
        and not any(test in listed.tests or test.partition("::")[0] in listed.tests for test in tests)
    }
    assert unheld == {}


def test_a_promise_that_is_left_out_exists() -> None:
    assert set(read().left_out) <= set(find(ROOT).tests)


@pytest.mark.parametrize(
    ("seconds", "setups", "chosen"),
    [
        ({"a::x": 3.0, "a::y": 2.0, "b::z": 9.0}, {}, ("a::y",)),  # the cheapest
        ({"a::x": 3.0, "a::y": 3.0, "b::z": 1.0}, {"b": 9.0}, ("a::x",)),  # the set-up of a test counts, too
    ],
)
def test_the_cheapest_test_of_a_promise_is_chosen(
    seconds: dict[str, float], setups: dict[str, float], chosen: tuple[str, ...]
) -> None:
    assert select({"p": list(seconds)}, seconds, setups) == Selection(chosen, ())


def test_a_test_that_holds_two_promises_goes_before_two_tests() -> None:
    seconds = {"a::both": 3.0, "a::one": 2.0, "a::other": 2.0}
    holders = {"p": ["a::both", "a::one"], "q": ["a::both", "a::other"]}
    assert select(holders, seconds, {}).tests == ("a::both",)


def test_a_promise_whose_tests_are_all_long_is_left_out() -> None:
    assert select({"p": ["a::x"]}, {"a::x": LONGEST_S + 1}, {}) == Selection((), ("p",))


def test_the_list_is_read_as_it_was_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    selection = Selection(("tests/cluster/test_x.py::test_y",), ("time-guarantee",))
    monkeypatch.setattr("quick.QUICK", tmp_path / "quick.txt")
    (tmp_path / "quick.txt").write_text(text(selection))
    assert read() == selection
