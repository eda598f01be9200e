"""Compact forms of objects: equal to their input, and smaller."""

from __future__ import annotations

import json
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sharepod.api.gpunode import Tenant
from sharepod.api.objects import Condition
from sharepod.api.sharepod import SharePodStatus
from sharepod.controller.state.reading import compact
from sharepod.controller.state.reading.compact import (
    once_in_all,
    packed,
    remembered,
    shared,
    unpacked,
    with_parts_once,
    without_notes,
)

_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=10,
)


@given(_JSON)
def test_what_is_shared_equals_what_was_given(value: object) -> None:
    assert shared(value) == value


_TEXT = st.text(st.characters(exclude_categories=()), max_size=5)
_NUMBER = st.integers() | st.floats(allow_nan=False, allow_infinity=False)
_NUMBERS = _NUMBER | st.sampled_from([2**63, 2**64, -(2**63) - 1, 18446744073709552000, 1e21, -0.0])


@given(
    st.dictionaries(_TEXT, st.recursive(_TEXT | _NUMBERS | st.booleans(), lambda inner: st.lists(inner, max_size=3)))
)
def test_a_packed_value_is_unpacked_unchanged(value: dict[str, object]) -> None:
    assert repr(unpacked(packed(value))) == repr(value)


def test_a_text_that_no_object_has_any_longer_is_not_kept() -> None:
    kept = once_in_all("".join(["5f1e", "4a77", "9c04"]))
    assert sys.getrefcount(kept) < 10, "in Python 3.12 an interned text is immortal"


def test_where_python_frees_no_text_the_latest_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compact, "_texts", {})
    monkeypatch.setattr(compact, "_TEXTS", 3)
    first = remembered("".join(["4a", "77"]))
    assert remembered("".join(["4a", "77"])) is first
    for number in range(9):
        remembered(f"uid-{number}")
        assert len(compact._texts) <= 3
    assert remembered("".join(["4a", "77"])) == first


def test_field_names_and_short_texts_of_two_objects_are_one_text() -> None:
    text = json.dumps({"gpus": ["GPU-1"], "conditions": [{"type": "Ready", "message": "all is well " * 9}]})
    one, other = (shared(json.loads(text)) for _ in range(2))
    assert next(iter(one)) is next(iter(other))
    assert one["gpus"][0] is other["gpus"][0]
    (of_one,), (of_other,) = one["conditions"], other["conditions"]
    assert of_one["type"] is of_other["type"]
    assert of_one["message"] is not of_other["message"]


def test_models_without_notes_equal_those_with_them_and_can_be_copied() -> None:
    raw = {
        "phase": "Running",
        "conditions": [
            {"type": "Ready", "status": "True", "reason": "Running", "message": "", "observedGeneration": 1}
        ],
    }
    plain, slim = SharePodStatus.model_validate(raw), without_notes(SharePodStatus.model_validate(raw))
    assert slim == plain
    assert slim.dump() == plain.dump()
    assert slim.conditions[0].__pydantic_fields_set__ is slim.__pydantic_fields_set__
    copied = slim.model_copy(update={"phase": None})
    assert copied.__pydantic_fields_set__ is not slim.__pydantic_fields_set__
    assert not slim.__pydantic_fields_set__, "a copy does not change what all share"


def test_a_model_takes_less_without_notes() -> None:
    condition = Condition(type="Ready", status="True", reason="Running")
    assert sys.getsizeof(condition.__pydantic_fields_set__) > 200
    row = {
        "id": "u",
        "namespace": "n",
        "podName": "p",
        "gpus": ["GPU-1"],
        "requestMilli": 1,
        "limitMilli": 1,
        "memory": 1,
    }
    read = without_notes(Tenant.model_validate(row))
    assert read.labels.__pydantic_fields_set__ is without_notes(condition).__pydantic_fields_set__


def test_equal_parts_of_two_models_are_one_and_others_stay_as_they_are() -> None:
    ready = {"type": "Ready", "status": "True", "reason": "Running", "message": ""}
    granted = {"requestMilli": 400, "limitMilli": 1000, "memory": 1 << 30}
    raws = [
        {"granted": granted, "conditions": [ready, {**ready, "type": "Placed", "message": message}]}
        for message in ("here", "there")
    ]
    one, other = (with_parts_once(SharePodStatus.model_validate(raw)) for raw in raws)
    assert [one.dump(), other.dump()] == [SharePodStatus.model_validate(raw).dump() for raw in raws]
    assert one.granted is other.granted
    assert one.conditions[0] is other.conditions[0]
    assert one.conditions[1] != other.conditions[1]
