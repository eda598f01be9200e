"""Parts of a JSON value by their places in its text."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sharepod.kube.json_spans import elements, members

DEEP = "[" * 20_000 + "]" * 20_000

values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=20,
)


@given(value=st.dictionaries(st.text(), values), blanks=st.sampled_from([None, 1]))
def test_each_part_is_found_where_it_stands(value: dict[str, Any], blanks: int | None) -> None:
    text = f" {json.dumps(value, indent=blanks)}"
    assert {key: json.loads(text[begin:end]) for key, begin, end in members(text, 0)} == value
    text = json.dumps(list(value.values()), indent=blanks)
    assert [json.loads(text[begin:end]) for begin, end in elements(text, 0)] == list(value.values())


def test_a_part_that_nests_too_deep_to_be_parsed_is_one_like_others() -> None:
    text = f'{{"a": 1, "deep": {DEEP} , "b": [2]}}'
    found = {key: text[begin:end] for key, begin, end in members(text, 0)}
    assert found == {"a": "1", "deep": DEEP, "b": "[2]"}


@pytest.mark.parametrize(
    "text", ["", "1", "[1]", "{", '{"a"', '{"a":', '{"a":1', '{"a" 1}', '{"a":1 "b":2}', "{a:1}", f'{{"a": {DEEP[:-1]}']
)
def test_what_is_no_object_is_said_to_be_none(text: str) -> None:
    with pytest.raises(ValueError):
        list(members(text, 0))
