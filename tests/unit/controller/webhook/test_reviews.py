"""Kopf gets only the parts of a reviewed Pod that decide the patch. Its patch of these parts is a valid patch of the
whole Pod."""

from __future__ import annotations

import copy
import json
from typing import Any

import jsonpatch
import kopf
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kopf._cogs.structs.references import Insights, Resource
from kopf._core.engines.admission import serve_admission_request
from kopf._core.reactor.inventory import ResourceMemories
from sharepod.api.claims.line_claim import with_claim
from sharepod.api.pods.line_volume import with_volume
from sharepod.controller.handlers import give_claim
from sharepod.controller.webhook.reviews import (
    MOST_CONTAINERS,
    MOST_LISTED,
    MOST_PARTS,
    TooManyPartsError,
    left_of,
    refusal,
)

LINE = {"sharepod.dev/gpu-milli": "400"}
_claims = st.lists(st.sampled_from([{"name": "sharepod"}, {"name": "other"}]), max_size=3)
_named = st.lists(
    st.sampled_from(
        [{"name": "A"}, {"name": "B", "value": "c"}, {"name": "NVIDIA_VISIBLE_DEVICES"}, {"name": "sharepod-gpu"}]
    ),
    max_size=3,
)
_gates = st.lists(st.sampled_from([{"name": "other"}, {"name": "sharepod.dev/share"}]), max_size=2)
_resources = st.fixed_dictionaries(
    {}, optional={"limits": st.sampled_from([{}, {"cpu": "1"}, LINE, {"cpu": "1", **LINE}]), "claims": _claims}
)
_container = st.fixed_dictionaries(
    {"name": st.sampled_from("ab")}, optional={"resources": _resources, "env": _named, "volumeMounts": _named}
)
_spec = st.fixed_dictionaries(
    {"containers": st.lists(_container, max_size=3)},
    optional={
        "initContainers": st.lists(_container, max_size=2),
        "resourceClaims": _claims,
        "nodeName": st.just("n"),
        "volumes": _named,
        "schedulingGates": _gates,
        "runtimeClassName": st.sampled_from(["nvidia", "other"]),
    },
)
_labels = st.dictionaries(
    st.sampled_from(["a", "sharepod.dev/line", "sharepod.dev/tenant"]), st.sampled_from(["true", "b", "line"])
)
_annotations = st.dictionaries(st.sampled_from(["a", "sharepod.dev/gpus", "kubeshare/gpu-mode"]), st.just("Exclusive"))
_metadata = st.fixed_dictionaries(
    {},
    optional={
        "name": st.just("p"),
        "generateName": st.just("p-"),
        "labels": _labels,
        "annotations": _annotations,
    },
)
_pods = st.fixed_dictionaries({"spec": _spec}, optional={"metadata": _metadata})


def review(pod: Any) -> dict[str, Any]:
    pods = {"group": "", "version": "v1", "resource": "pods"}
    return {"request": {"uid": "u", "operation": "CREATE", "resource": pods, "object": pod}}


def patched(pod: dict[str, Any], by: dict[str, Any], *, volume: bool = False) -> dict[str, Any]:
    """Return the Pod after the patch that Kopf creates when it is given the review `by`."""
    patch = with_volume(by, "nvidia") if volume else with_claim(by)
    operations = kopf.Patch(patch, body=kopf.Body(by)).as_json_patch()
    return dict(jsonpatch.apply_patch(copy.deepcopy(pod), operations))


@pytest.mark.promise("operator-line-webhook-bounded")
@given(_pods)
def test_the_patch_of_what_is_left_is_one_of_the_whole_pod(pod: dict[str, Any]) -> None:
    pod = {"metadata": {}, **pod}  # the API server always sends this field
    assert patched(pod, left_of(review(pod))["request"]["object"]) == patched(pod, pod)
    left = left_of(review(pod), volume=True)["request"]["object"]
    assert patched(pod, left, volume=True) == patched(pod, pod, volume=True)


@pytest.mark.promise("operator-line-webhook-bounded")
@pytest.mark.promise("operator-line-volume-bounded")
def test_a_pod_with_too_many_parts_is_refused_wherever_they_are() -> None:
    claims = [{"name": "a"}] * (MOST_PARTS + 1)
    specs: tuple[dict[str, Any], ...] = (
        {"containers": [{}] * MOST_PARTS, "initContainers": [{}]},
        {"resourceClaims": claims},
        {"containers": [{"resources": {"limits": LINE, "claims": claims}}]},
    )
    for spec in specs:
        with pytest.raises(TooManyPartsError):
            left_of(review({"spec": spec}))
    assert refusal(review({}))["response"]["allowed"] is False
    left_of(review({"spec": {"containers": [{}] * MOST_PARTS}}))
    many = [{"name": "A"}] * (MOST_LISTED + 1)
    crowds: tuple[dict[str, Any], ...] = (
        {"volumes": many},
        {"containers": [{"env": many}]},
        {"initContainers": [{"volumeMounts": many}]},
        {"containers": [{}] * (MOST_CONTAINERS + 1)},
    )
    for spec in crowds:
        with pytest.raises(TooManyPartsError):
            left_of(review({"spec": spec}), volume=True)
        left_of(review({"spec": spec}))
    assert refusal(review({}), volume=True)["response"]["allowed"] is False


@pytest.mark.promise("operator-line-webhook-bounded")
@given(st.recursive(st.none() | st.integers() | st.text(max_size=3), lambda inner: st.lists(inner, max_size=3) | inner))
def test_no_pod_makes_it_raise_anything_else(value: Any) -> None:
    pods = [
        {"metadata": value, "spec": value},
        {"metadata": {"labels": value, "name": value}, "spec": {"containers": value}},
    ]
    pods += [{"spec": {"containers": [value, {"resources": value}], "resourceClaims": value}}]
    pods += [{"spec": {"initContainers": [{"resources": {"limits": LINE, "claims": value}}]}}]
    for pod in pods:
        assert json.dumps(with_claim(left_of(review(pod))["request"]["object"]))  # nothing raises
        assert json.dumps(with_volume(left_of(review(pod), volume=True)["request"]["object"], "nvidia"))
    for other in (value, {"request": value}):
        with pytest.raises(ValueError, match="not about a new Pod"):
            left_of(other)


@pytest.mark.promise("operator-line-webhook-bounded")
async def test_kopf_answers_what_is_left_and_remembers_nothing() -> None:
    pods = Resource("", "v1", "pods", kind="Pod", namespaced=True, preferred=True, verbs=frozenset({"list"}))
    insights, memories, registry = Insights(), ResourceMemories(), kopf.OperatorRegistry()
    insights.webhook_resources.add(pods)
    kopf.on.mutate("", "v1", "pods", id="line", operations=["CREATE"], registry=registry)(give_claim)
    pod = {"metadata": {"uid": "1", "generateName": "p-"}, "spec": {"containers": [{"resources": {"limits": LINE}}]}}
    answer = await serve_admission_request(
        left_of(review(pod)),
        settings=kopf.OperatorSettings(),
        memories=memories,
        memobase=kopf.Memo(),
        registry=registry,
        insights=insights,
        indices={},
    )
    assert answer["response"]["allowed"] is True
    assert "patch" in answer["response"]
    assert not list(memories.iter_all_memories())
