"""Lists and events as text: cut at any position, with fields in either order, and with unreadable objects."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sharepod.kube import Unreadable, json_text
from sharepod.kube.json_text import ListText, NotAListError, NotAnEventError, item_metadata, parse_event

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
ITEMS = st.lists(st.dictionaries(st.text(max_size=6), VALUES, max_size=4), max_size=6)


def read(text: str, cuts: list[int]) -> tuple[list[Any], dict[str, Any]]:
    """Return (items, metadata) of a list whose text arrives in pieces, cut at these positions."""
    found: list[Any] = []
    reader, last = ListText(), 0
    for cut in [*sorted(min(cut, len(text)) for cut in cuts), len(text)]:
        found += reader.feed(text[last:cut])
        last = cut
    found += reader.close()
    return found, reader.metadata


def deep(levels: int) -> str:
    return '{"a":' * levels + '"}]\\\\\\"{["' + "}" * levels


def item(spec: str, name: str = "bad", fields: str = "") -> str:
    """Return an object as the API server writes it. By default its managedFields nest as deep as its spec."""
    metadata = (
        f'{{"managedFields":[{{"fieldsV1":{fields or spec}}}],"name":"{name}","uid":"u-{name}","labels":{{"a":"b"}}}}'
    )
    return f'{{"apiVersion":"v1","kind":"K","metadata":{metadata},"spec":{spec}}}'


@given(items=ITEMS, first=st.booleans(), indent=st.sampled_from([None, 2]), cuts=st.lists(st.integers(0, 400)))
def test_a_list_is_read_wherever_it_is_cut(
    items: list[dict[str, Any]], first: bool, indent: int | None, cuts: list[int]
) -> None:
    metadata = {"resourceVersion": "7", "continue": "x"}
    fields: dict[str, Any] = {"kind": "L", "metadata": metadata, "items": items}
    if not first:
        fields = {"items": items, "kind": "L", "metadata": metadata}
    assert read(json.dumps(fields, indent=indent), cuts) == (items, metadata)


@pytest.mark.parametrize("step", [1 << 20, 9_999, 97])
def test_an_object_that_is_nested_too_deep_costs_itself_alone(step: int) -> None:
    items = f'{{"metadata":{{"name":"one"}}}},{item(deep(50_000))},{{"b":2}}'
    text = f'{{"items":[{items}],"metadata":{{"resourceVersion":"3"}}}}'
    found, metadata = read(text, list(range(0, len(text), step)))
    assert found[0] == {"metadata": {"name": "one"}}
    assert found[2] == {"b": 2}
    assert isinstance(found[1], Unreadable)
    assert found[1].why == "is nested too deep"
    assert found[1].metadata == {"name": "bad", "uid": "u-bad", "labels": {"a": "b"}}
    assert metadata == {"resourceVersion": "3"}


@pytest.mark.parametrize("step", [49_999, 1 << 30])
@pytest.mark.parametrize("written", ['x\\\\\\"{', "\\u003c", "-1e5."])
def test_an_object_that_is_too_large_is_passed_over_and_no_more_of_it_is_held(
    monkeypatch: pytest.MonkeyPatch, written: str, step: int
) -> None:
    monkeypatch.setattr(json_text, "OBJECT_LIMIT", 1 << 20)
    reader = ListText()
    large = item(f'"{written * 500_000}"', "large", "{}")
    text = f'{{"items":[{large},{{"b":2}}],"metadata":{{}}}}'
    found: list[Any] = []
    held = 0
    for at in range(0, len(text), step):
        found += reader.feed(text[at : at + step])
        held = max(held, len(reader._text))
    found += reader.close()
    assert [getattr(each, "metadata", each) for each in found] == [
        {"name": "large", "uid": "u-large", "labels": {"a": "b"}},
        {"b": 2},
    ]
    assert held < 1_200_000


def test_a_number_that_is_too_long_costs_its_object_alone() -> None:
    found, _ = read(f'{{"items":[{item("9" * 5000)},{{"b":2}}],"metadata":{{}}}}', [])
    assert isinstance(found[0], Unreadable)
    assert found[0].metadata["name"] == "bad"
    assert found[1] == {"b": 2}


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        '{"items":[{"a":1}',
        '{"items":[{"a":1},oops],"metadata":{}}',
        '{"kind":"Status","metadata":{},"status":"Success"}',
        '{"items":{},"metadata":{"resourceVersion":"9"}}',
        "<html>",
    ],
)
def test_anything_else_is_no_list(text: str) -> None:
    with pytest.raises(NotAListError):
        read(text, [])


def test_a_list_may_have_null_for_no_items() -> None:
    assert read('{"metadata":{"resourceVersion":"9"},"items":null}', []) == ([], {"resourceVersion": "9"})


@pytest.mark.parametrize("spec", [deep(50_000), "9" * 5000])
def test_an_event_that_cannot_be_read_names_its_object(spec: str) -> None:
    event = parse_event(f'{{"type":"ADDED","object":{item(spec)}}}'.encode())
    assert isinstance(event, tuple)
    assert event[0] == "ADDED"
    assert event[1].metadata["uid"] == "u-bad"


def test_of_an_event_that_is_too_large_its_beginning_is_enough() -> None:
    line = f'{{"type":"DELETED","object":{item(deep(20))}}}'.encode()
    event = parse_event(line[: line.index(b'"spec"') + 9], whole=False)
    assert isinstance(event, tuple)
    assert (event[0], event[1].metadata["name"]) == ("DELETED", "bad")


@pytest.mark.parametrize("line", [b"oops", b"[]", b'{"type":"ADDED","object":1}', b'{"object":{}}', b'{"type":"ADDED"'])
def test_anything_else_is_no_event(line: bytes) -> None:
    with pytest.raises(NotAnEventError):
        parse_event(line)


@given(text=st.text(alphabet='{}[]",:\\ametadata1 '))
def test_metadata_of_any_text_is_a_dict(text: str) -> None:
    assert isinstance(item_metadata('{"metadata":' + text), dict)


@given(value=VALUES, cuts=st.lists(st.integers(0, 200)), stretch=st.integers(1, 30))
def test_a_value_is_passed_over_to_its_end_in_stretches_of_any_size(value: Any, cuts: list[int], stretch: int) -> None:
    written = json.dumps({"a": [value, value], "}]": value}, ensure_ascii=False)
    text, at, ended = written + ',"next":{}}', 0, False
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(json_text, "_STRETCH", stretch)
        skipped = json_text._Skipped("")
        for cut in sorted({min(cut, len(written)) for cut in cuts} | {len(text)}):
            at, ended = skipped.feed(text[:cut], at)
            assert ended == (cut >= len(written))
            if ended:
                break
    assert (at, ended) == (len(written), True)


def test_of_an_object_that_nests_deep_few_brackets_are_read_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Any user may write 1 MiB of brackets into the managedFields of a Pod, and change them repeatedly. So the reader
    skips them by searches, and reads few characters one by one."""
    fields = f'{{"f:deep":{deep(2_000)},' + ",".join(f'"f:{number:x}":{{}}' for number in range(80_000)) + "}"
    turns = 0
    turn = json_text._Skipped._turn

    def counted(self: json_text._Skipped, character: str) -> None:
        nonlocal turns
        turns += 1
        turn(self, character)

    monkeypatch.setattr(json_text._Skipped, "_turn", counted)
    event = parse_event(f'{{"type":"MODIFIED","object":{item("{}", fields=fields)}}}'.encode())
    assert isinstance(event, dict)
    assert event["object"]["metadata"] == {"name": "bad", "uid": "u-bad", "labels": {"a": "b"}, "managedFields": []}
    assert turns < 3 * json_text._STRETCH, "of half a million"


@pytest.mark.promise("operator-managed-fields")
@pytest.mark.parametrize("step", [1 << 20, 9_999, 97])
def test_managed_fields_that_nest_too_deep_cost_nobody(step: int) -> None:
    """A Pod with such managedFields must still count on its node. Otherwise other Pods would be placed where there is
    no room."""
    pod = item('{"nodeName":"n","containers":[]}', "pod", fields=deep(50_000))
    event = parse_event(f'{{"type":"ADDED","object":{pod}}}'.encode())
    assert isinstance(event, dict)
    assert (event["type"], event["object"]["spec"]["nodeName"]) == ("ADDED", "n")
    text = f'{{"items":[{pod},{item(deep(50_000))},{pod}],"metadata":{{"resourceVersion":"3"}}}}'
    found, _ = read(text, list(range(0, len(text), step)))
    assert found == [event["object"], found[1], event["object"]]
    assert isinstance(found[1], Unreadable)
