"""Slices of a suite."""

from __future__ import annotations

import argparse

import pytest
from slices import in_slice, parsed, spread

NAMES = [f"tests/cluster/test_{number}.py" for number in range(200)]


@pytest.mark.parametrize("count", [1, 2, 8])
def test_each_name_belongs_to_one_slice(count: int) -> None:
    for name in NAMES:
        assert sum(in_slice(name, number, count) for number in range(1, count + 1)) == 1


def test_no_slice_has_more_than_twice_its_part() -> None:
    assert all(sum(in_slice(name, number, 8) for name in NAMES) <= 2 * len(NAMES) / 8 for number in range(1, 9))


def test_the_commit_chooses_one_slice() -> None:
    number, count = parsed("commit/8")
    assert count == 8
    assert 1 <= number <= 8
    assert parsed("commit/8") == (number, count)


@pytest.mark.parametrize("text", ["", "3", "0/8", "9/8", "-1/8", "3/0", "commit/0", "head/8", "1/8 "])
def test_a_text_that_is_no_slice_is_refused(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="write K/N with K from 1 to N"):
        parsed(text)


@pytest.mark.parametrize(
    ("percent", "chosen"), [(100, [*"abcdefghij"]), (20, ["a", "f"]), (34, ["a", "d", "g"]), (1, ["a"])]
)
def test_some_names_are_at_even_distances(percent: int, chosen: list[str]) -> None:
    assert spread([*"abcdefghij"], percent) == chosen
    assert spread(["only"], percent) == ["only"]
    assert spread([], percent) == []
