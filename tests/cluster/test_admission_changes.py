"""Changes of an existing SharePod: which fields may change."""

from __future__ import annotations

import re

import pytest
from cluster.admission import refusal, sharepod
from cluster.malformed_case import CONTAINER, UUID
from harness.api import JSON_PATCH, ApiError
from harness.cluster import Cluster
from harness.installation import SHAREPODS
from sharepod.api.sharepod import CHANGEABLE


def assert_fixed(message: str, field: str, mutable: str) -> None:
    """Assert that a refusal states that the field is immutable, which fields are mutable, and the remedy."""
    block, name = field.rsplit(".", 1)
    changed = rf"{re.escape(field)}: (Invalid value: .*)?cannot be changed \(only {mutable}"
    presence = rf"{re.escape(block)}: Invalid value: .*{name} cannot be added or removed \(only {mutable}"
    assert re.search(f"{changed}|{presence}", message), message
    assert "delete the SharePod and create it again" in message


@pytest.mark.promise("operator-immutable")
def test_request_limit_and_memory_may_change_and_nothing_else(server: Cluster) -> None:
    path = f"{SHAREPODS}/change"
    server.api.create(SHAREPODS, sharepod("change", {"request": 0.3, "affinity": "a"}, nodeSelector={"a": "b"}))
    changed = server.api.patch(path, {"spec": {"gpu": {"request": 0.4, "limit": 0.8, "memory": "2Gi"}}})
    assert changed["spec"]["gpu"]["limit"] == 0.8
    server.api.patch(path, {"spec": {"gpu": {"limit": None}}})
    for movable in (True, False, None):
        server.api.patch(path, {"spec": {"gpu": {"movable": movable}}})
    server.api.patch(path, {"spec": {"gpu": {"count": 1}}})  # its default
    server.api.patch(path, {"metadata": {"labels": {"a": "b"}, "annotations": {"note": "x"}}})
    for field, value in {
        "count": 2,
        "mode": "Exclusive",
        "affinity": "b",
        "antiAffinity": "c",
        "placement": "Spread",
        "uuids": [UUID],
    }.items():
        cleared = {"request": None, "limit": None, "memory": None} if field == "mode" else {}
        message = refusal(server.api, path, {"spec": {"gpu": {field: value, **cleared}}})
        assert_fixed(message, f"spec.gpu.{field}", re.escape(CHANGEABLE))
    assert_fixed(
        refusal(server.api, path, {"spec": {"gpu": {"affinity": None}}}), "spec.gpu.affinity", re.escape(CHANGEABLE)
    )
    for pod_field, pod_value in {
        "nodeSelector": {"a": "c"},
        "hostNetwork": True,
        "priorityClassName": "system-node-critical",
        "volumes": [{"name": "v", "emptyDir": {}}],
        "initContainers": [{**CONTAINER, "name": "first"}],
        "tolerations": [],
        "containers": [{**CONTAINER, "image": "other"}],
    }.items():
        assert_fixed(
            refusal(server.api, path, {"spec": {pod_field: pod_value}}), f"spec.{pod_field}", re.escape(CHANGEABLE)
        )
    more = {"containers": [CONTAINER, {**CONTAINER, "name": "more"}]}
    assert_fixed(refusal(server.api, path, {"spec": more}), "spec.containers", "gpu.request")
    assert_fixed(refusal(server.api, path, {"spec": {"nodeSelector": None}}), "spec.nodeSelector", "gpu.request")
    for ttl in (60, 0, None):
        server.api.patch(path, {"spec": {"ttlSecondsAfterFinished": ttl}})
    removed = {"metadata": {"annotations": {"gemini/gpu_request": "0.5"}}, "spec": {"gpu": None}}
    assert re.search("spec.gpu: .*cannot be added to or taken from", refusal(server.api, path, removed))


@pytest.mark.promise("operator-immutable")
def test_amounts_of_resources_which_the_schema_cannot_compare_are_the_policys(server: Cluster) -> None:
    path = f"{SHAREPODS}/amounts"
    amounts = {"resources": {"limits": {"memory": "1Gi"}}}
    server.api.create(SHAREPODS, sharepod("amounts", {"request": 0.3}, containers=[{**CONTAINER, **amounts}]))
    limit = "/spec/containers/0/resources/limits/memory"
    patch = [{"op": "replace", "path": limit, "value": "2Gi"}]
    message = refusal(server.api, path, patch, content_type=JSON_PATCH)
    assert re.search("spec.containers: .*cannot be changed", message)
    message = refusal(server.api, path, {"spec": {"overhead": {"cpu": "1"}}})
    assert "spec.overhead: cannot be changed" in message


@pytest.mark.promise("operator-immutable")
def test_annotations_for_request_limit_and_memory_may_change_and_no_others(server: Cluster) -> None:
    path = f"{SHAREPODS}/annotated"
    server.api.create(SHAREPODS, sharepod("annotated", annotations={"gemini/gpu_request": "0.5", "gemini/GPUID": "a"}))
    server.api.patch(path, {"metadata": {"annotations": {"gemini/gpu_request": "0.6", "gemini/gpu_limit": "0.9"}}})
    for change in ({"gemini/GPUID": "b"}, {"gemini/GPUID": None}, {"gemini/sched_exclusion": "x"}):
        message = refusal(server.api, path, {"metadata": {"annotations": change}})
        assert f"metadata.annotations[{next(iter(change))}]: cannot be changed" in message


def test_a_raise_of_an_annotation_is_checked_like_a_new_one(server: Cluster) -> None:
    path = f"{SHAREPODS}/raised"
    server.api.create(SHAREPODS, sharepod("raised", annotations={"gemini/gpu_request": "0.5"}))
    message = refusal(server.api, path, {"metadata": {"annotations": {"gemini/gpu_request": "1.5"}}})
    assert "metadata.annotations[gemini/gpu_request]: 1.5 is more than one GPU" in message


def test_no_policy_keeps_a_finalizer_from_being_removed(server: Cluster) -> None:
    path = f"{SHAREPODS}/finalized"
    body = sharepod("finalized", {"request": 0.5})
    body["metadata"]["finalizers"] = ["example.com/wait"]
    server.api.create(SHAREPODS, body)
    server.api.delete(path)
    server.api.patch(path, {"metadata": {"annotations": {"gemini/gpu_request": "wrong"}, "finalizers": None}})
    with pytest.raises(ApiError) as refused:
        server.api.get(path)
    assert refused.value.code == 404
