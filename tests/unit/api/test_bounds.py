"""Bounds of objects: a violation is found in bounded time, and a message quotes only a short part of a value."""

from __future__ import annotations

from typing import Any

import pytest
from sharepod.api.bounds import MAX_DEPTH, MAX_TEXT, MAX_VALUES, beyond, clipped, quoted


def nested(levels: int, inner: Any = 1) -> Any:
    for _ in range(levels):
        inner = {"a": inner}
    return inner


@pytest.mark.parametrize(
    ("value", "why"),
    [
        (nested(MAX_DEPTH), None),
        (nested(MAX_DEPTH + 1), f"is nested more than {MAX_DEPTH} levels deep"),
        (nested(100_000), f"is nested more than {MAX_DEPTH} levels deep"),
        ({"a": [1] * (MAX_VALUES - 1)}, None),
        ({"a": [1] * MAX_VALUES}, f"has more than {MAX_VALUES} values"),
        ({"a": [{"b": 1}] * (MAX_VALUES // 2)}, f"has more than {MAX_VALUES} values"),
        ({"a": "x" * (MAX_TEXT - 1)}, None),
        ({"a": ["x" * MAX_TEXT]}, f"has more than {MAX_TEXT} characters of text"),
        ({"x" * (MAX_TEXT + 1): 1}, f"has more than {MAX_TEXT} characters of text"),
    ],
    ids=lambda value: str(value)[:20] if isinstance(value, str) or value is None else "",
)
def test_an_object_beyond_a_bound_is_told_which(value: Any, why: str | None) -> None:
    assert beyond(value) == why


def test_a_message_quotes_the_beginning_of_a_long_value_and_the_kind_of_a_large_one() -> None:
    assert quoted("4GB") == "'4GB'"
    assert quoted(0.5) == "0.5"
    assert quoted("1" * 1_000_000) == f"'{'1' * 64}'… (1000000 characters)"
    assert len(quoted(10**300)) == 64
    assert quoted({"a": 1}) == "a map"
    assert quoted([1]) == "a list"


def test_a_truncated_text_is_marked() -> None:
    assert clipped("abc", 3) == "abc"
    assert clipped("abcd", 3) == "ab…"
