"""Conversion between versions of the API: no object loses anything on its way to another version and back, whatever it
holds, and nobody changes an object by an annotation.

The second version is the tests' own, `doubles/second_version.py`.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from doubles import second_version
from hypothesis import given, settings
from hypothesis import strategies as st
from property.schema_objects import as_stored, bodies
from sharepod.api.crd.definitions import gpunode_crd, sharepod_crd
from sharepod.api.crd.served_versions import with_versions
from sharepod.api.versions.kept_fields import entries, same
from sharepod.api.versions.kind_versions import MAX_ANNOTATIONS, KindVersions, convert, kept_annotation

Json = dict[str, Any]

ROOT = Path(__file__).resolve().parents[2]
KINDS = second_version.kinds()
PAIRS = [("v1alpha1", "v1test"), ("v1test", "v1alpha1")]

JSON = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(-9, 9), st.floats(allow_nan=False), st.text(max_size=4)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(
            st.sampled_from(["spec", "gpu", "tenants", "memory", "request", "pod", "id", "x", "status"]),
            inner,
            max_size=4,
        ),
    ),
    max_leaves=12,
)


def _schemas() -> dict[tuple[str, str], Json]:
    """Schema of each version of each kind."""
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    checked_in = yaml.load((ROOT / "crds" / "sharepods.yaml").read_text(), Loader=loader)["spec"]["versions"][0]
    pod = checked_in["schema"]["openAPIV3Schema"]["properties"]["spec"]
    few = ("containers", "restartPolicy", "nodeSelector", "tolerations")
    pod["properties"] = {name: pod["properties"][name] for name in few}
    crds = {"SharePod": sharepod_crd(pod), "GPUNode": gpunode_crd()}
    return {
        (kind, entry["name"]): entry["schema"]["openAPIV3Schema"]
        for kind, crd in crds.items()
        for entry in with_versions(crd, KINDS[kind])["spec"]["versions"]
    }


SCHEMAS = _schemas()
BODIES = {which: bodies(schema) for which, schema in SCHEMAS.items()}


def made(kind: str, version: str, body: Json, annotations: dict[str, str] | None = None) -> Json:
    metadata: Json = {"name": "a", "uid": "u"} | ({"annotations": annotations} if annotations else {})
    return {"apiVersion": f"sharepod.dev/{version}", "kind": kind, "metadata": metadata, **body}


def converted(item: Json, to: str, kinds: dict[str, KindVersions] = KINDS) -> Json:
    """Convert as an API server does: by JSON; what the version does not know is pruned, its defaults are filled."""
    result: Json = json.loads(json.dumps(convert(json.loads(json.dumps(item)), to, kinds)))
    return as_stored(result, SCHEMAS[item["kind"], to if (item["kind"], to) in SCHEMAS else "v1test"])


def body_of(item: Json) -> Json:
    return {name: value for name, value in item.items() if name not in ("apiVersion", "kind", "metadata")}


@pytest.mark.promise("install-versions-lossless")
@pytest.mark.parametrize(("source", "target"), PAIRS)
@pytest.mark.parametrize("kind", ["SharePod", "GPUNode"])
@given(data=st.data())
@settings(max_examples=60)
def test_an_object_converted_to_another_version_and_back_is_the_same(
    kind: str, source: str, target: str, data: st.DataObject
) -> None:
    schema = SCHEMAS[kind, source]
    before = as_stored(made(kind, source, data.draw(BODIES[kind, source]), {"a": "b"}), schema)
    there = converted(before, target)
    assert there["metadata"]["name"] == "a"
    back = converted(there, source)
    back["metadata"]["annotations"].pop(kept_annotation(target), None)  # of defaults that the other version filled in
    assert same(back, before)


@pytest.mark.parametrize(("source", "target"), PAIRS)
@pytest.mark.parametrize("kind", ["SharePod", "GPUNode"])
@given(data=st.data())
@settings(max_examples=40)
def test_a_converted_object_has_the_defaults_of_its_version(
    kind: str, source: str, target: str, data: st.DataObject
) -> None:
    """An API server fills none after a conversion: rules that compare an object with its former self would see a field
    come that nobody wrote."""
    before = as_stored(made(kind, source, data.draw(BODIES[kind, source])), SCHEMAS[kind, source])
    there = convert(before, target, KINDS)
    assert same(as_stored(there, SCHEMAS[kind, target]), there)


@pytest.mark.parametrize("kind", ["SharePod", "GPUNode"])
@given(data=st.data())
@settings(max_examples=40)
def test_three_versions_lose_nothing_of_each_other(kind: str, data: st.DataObject) -> None:
    (one,) = KINDS[kind].further
    other = replace(
        one,
        name="v2test",
        to_hub=lambda body: one.to_hub(_without_labels(body)),
        from_hub=lambda body: _v2(body, one.from_hub),
    )
    kinds = {kind: replace(KINDS[kind], further=(one, other))}
    schema = SCHEMAS[kind, "v1test"]
    before = as_stored(made(kind, "v1test", data.draw(BODIES[kind, "v1test"])), schema)
    there = json.loads(json.dumps(convert(before, "v2test", kinds)))
    assert same(convert(there, "v1test", kinds), before)
    by_the_hub = convert(convert(before, "v1alpha1", kinds), "v2test", kinds)
    assert same(convert(convert(by_the_hub, "v1alpha1", kinds), "v1test", kinds), before)


def _without_labels(body: Json) -> Json:
    return {name: value for name, value in body.items() if name != "status"}


def _v2(body: Json, from_hub: Callable[[Json], Json]) -> Json:
    return _without_labels(from_hub(body))


@given(data=st.data(), text=st.one_of(st.text(max_size=9), JSON.map(json.dumps)))
@settings(max_examples=150)
def test_an_annotation_changes_nothing_that_the_readers_version_can_say(data: st.DataObject, text: str) -> None:
    """Somebody writes kept fields into an object by hand: any text, any JSON, or entries for real places."""
    places = [["spec", "gpu", name] for name in ("request", "memory", "latency", "count")] + [["spec", "gpu"], ["spec"]]
    real: st.SearchStrategy[list[Json]] = st.lists(
        st.fixed_dictionaries(
            {"at": st.sampled_from(places)},
            optional={"value": st.sampled_from([0.9, "9Gi", "Interactive", 3, None, {}])},
        ),
        min_size=1,
        max_size=4,
    )
    forged = data.draw(st.one_of(st.just(text), real.map(json.dumps)))
    body = data.draw(BODIES["SharePod", "v1test"])
    honest = convert(made("SharePod", "v1test", body), "v1alpha1", KINDS)
    lied_to = convert(made("SharePod", "v1test", body, {kept_annotation("v1alpha1"): forged}), "v1alpha1", KINDS)
    (version,) = KINDS["SharePod"].further
    assert same(version.from_hub(body_of(lied_to)), version.from_hub(body_of(honest)))


@given(body=st.dictionaries(st.sampled_from(["spec", "status", "x"]), JSON, max_size=3), kept=JSON)
@pytest.mark.parametrize(("source", "target"), PAIRS)
@pytest.mark.parametrize("kind", ["SharePod", "GPUNode"])
@settings(max_examples=60)
def test_no_object_however_wrong_fails_to_be_converted(
    kind: str, source: str, target: str, body: Json, kept: Any
) -> None:
    item = made(kind, source, body, {kept_annotation(target): json.dumps(kept)})
    there = convert(item, target, KINDS)
    assert there["apiVersion"] == f"sharepod.dev/{target}"
    del item["metadata"]["annotations"]
    assert same(convert(convert(item, target, KINDS), source, KINDS), item)


@given(have=st.dictionaries(st.text(max_size=2), JSON), want=st.dictionaries(st.text(max_size=2), JSON))
def test_entries_are_the_same_whatever_order_the_fields_have(have: Json, want: Json) -> None:
    backwards = dict(reversed(want.items()))
    assert entries(have, want) == entries(dict(reversed(have.items())), backwards)


def test_the_largest_annotations_leave_room_for_nothing_and_are_kept_themselves() -> None:
    notes = {"a": "x" * (MAX_ANNOTATIONS - 1)}
    item = made("SharePod", "v1alpha1", {"spec": {"gpu": {"request": 0.4, "latency": "Interactive"}}}, notes)
    there = convert(item, "v1test", KINDS)
    assert there["metadata"]["annotations"] == notes
    assert there["spec"]["gpu"] == {"guaranteed": 0.4, "memoryUnit": ""}
