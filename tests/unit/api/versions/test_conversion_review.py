"""Answers to ConversionReviews: all objects or the reason, and CRDs with several versions."""

from __future__ import annotations

from typing import Any

import pytest
from doubles import second_version
from sharepod.api.bounds import MAX_MESSAGE
from sharepod.api.crd.definitions import gpunode_crd
from sharepod.api.crd.served_versions import with_versions
from sharepod.api.versions.conversion_review import ReviewError, answer
from sharepod.api.versions.kind_versions import VERSIONS, KindVersions, Version, convert, kept_annotation

Json = dict[str, Any]

KINDS = second_version.kinds()


def review(*objects: Any, to: str = "sharepod.dev/v1test") -> Json:
    request = {"uid": "r-1", "desiredAPIVersion": to, "objects": list(objects)}
    return {"apiVersion": "apiextensions.k8s.io/v1", "kind": "ConversionReview", "request": request}


def sharepod(**gpu: Any) -> Json:
    return {
        "apiVersion": "sharepod.dev/v1alpha1",
        "kind": "SharePod",
        "metadata": {"name": "train", "namespace": "team"},
        "spec": {"gpu": gpu},
    }


def response_of(reviewed: Json) -> Json:
    response: Json = reviewed["response"]
    assert response["uid"] == "r-1"
    return response


def test_objects_come_back_in_their_order_in_the_version_that_was_asked_for() -> None:
    reviewed = answer(review(sharepod(request=0.4, memory="4Gi", latency="Normal"), sharepod(request=0.5)), KINDS)
    assert reviewed["response"]["result"] == {"status": "Success"}
    first, second = response_of(reviewed)["convertedObjects"]
    assert first["apiVersion"] == second["apiVersion"] == "sharepod.dev/v1test"
    assert first["spec"]["gpu"] == {"guaranteed": 0.4, "memoryAmount": 4, "memoryUnit": "Gi"}
    assert second["spec"]["gpu"] == {"guaranteed": 0.5, "memoryUnit": ""}
    assert first["metadata"] == {"name": "train", "namespace": "team"}


def test_a_field_that_the_other_version_lacks_is_kept_in_an_annotation_and_comes_back() -> None:
    there = convert(sharepod(request=0.4, latency="Interactive", memory="4096.0Mi"), "v1test", KINDS)
    assert there["spec"]["gpu"] == {"guaranteed": 0.4, "memoryAmount": 4 << 30, "memoryUnit": ""}
    assert set(there["metadata"]["annotations"]) == {kept_annotation("v1alpha1")}
    assert convert(there, "v1alpha1", KINDS) == sharepod(request=0.4, latency="Interactive", memory="4096.0Mi")


def test_what_the_other_version_changes_counts_and_what_it_cannot_say_stays() -> None:
    there = convert(sharepod(request=0.4, latency="Interactive", memory="4096.0Mi"), "v1test", KINDS)
    there["spec"]["gpu"] |= {"guaranteed": 0.6, "memoryAmount": 2, "memoryUnit": "Gi"}
    back = convert(there, "v1alpha1", KINDS)
    assert back["spec"]["gpu"] == {"request": 0.6, "latency": "Interactive", "memory": "2Gi"}


def test_rows_of_a_ledger_are_found_again_where_rows_came_and_went_meanwhile() -> None:
    rows = [
        {"id": name, "namespace": "team", "podName": name, "requestMilli": 100, "latency": "Interactive"}
        for name in ("a", "b", "c")
    ]
    node = {
        "apiVersion": "sharepod.dev/v1alpha1",
        "kind": "GPUNode",
        "metadata": {"name": "n"},
        "spec": {"tenants": rows},
    }
    there = convert(node, "v1test", KINDS)
    kept = there["spec"]["tenants"]
    assert kept[0] == {"id": "a", "pod": "team/a", "guaranteedMilli": 100}
    there["spec"]["tenants"] = [{"id": "new", "pod": "team/new", "guaranteedMilli": 1}, kept[2], kept[0]]
    back = convert(there, "v1alpha1", KINDS)["spec"]["tenants"]
    assert [(row["id"], row.get("latency")) for row in back] == [
        ("new", None),
        ("c", "Interactive"),
        ("a", "Interactive"),
    ]


def test_many_rows_that_were_edited_keep_what_fits() -> None:
    rows = [
        {"id": f"t{number}", "namespace": "x/y", "podName": "p", "requestMilli": 100, "latency": "Interactive"}
        for number in range(200)
    ]
    node = {
        "apiVersion": "sharepod.dev/v1alpha1",
        "kind": "GPUNode",
        "metadata": {"name": "n"},
        "spec": {"tenants": rows},
    }
    there = convert(node, "v1test", KINDS)
    for number in (3, 77, 150):
        there["spec"]["tenants"][number]["pod"] = "other/pod"
    back = convert(there, "v1alpha1", KINDS)["spec"]["tenants"]
    assert [row["namespace"] for row in back if row["podName"] == "pod"] == ["other"] * 3
    assert sum(row["namespace"] == "x/y" for row in back) == 197
    assert sum(row.get("latency") == "Interactive" for row in back) == 200


@pytest.mark.promise("install-conversion-message")
@pytest.mark.parametrize(
    ("bad", "to", "words"),
    [
        ({"apiVersion": "sharepod.dev/v9", "kind": "SharePod", "metadata": {}}, None, "Update the operator before"),
        ({"apiVersion": "sharepod.dev/v1alpha1", "kind": "Pod", "metadata": {}}, None, "no conversion from Pod"),
        ({"apiVersion": "sharepod.dev/v1alpha1", "kind": "SharePod"}, None, "metadata is missing"),
        ({"apiVersion": 7, "kind": ["x" * 100_000], "metadata": 1}, None, "no conversion"),
        ("text", None, "whole objects"),
        (None, None, "whole objects"),
        (sharepod(), "sharepod.dev/v9", "Update the operator before"),
        (sharepod(), "other.group/v1test", "correct the CRD"),
        (sharepod(), "x" * 100_000, "correct the CRD"),
    ],
)
def test_an_object_that_cannot_be_converted_is_named_with_what_to_do(bad: Any, to: str | None, words: str) -> None:
    response = response_of(answer(review(sharepod(request=1), bad, to=to or "sharepod.dev/v1test"), KINDS))
    assert response["convertedObjects"] == []
    assert response["result"]["status"] == "Failure"
    assert words in response["result"]["message"]
    assert len(response["result"]["message"]) <= MAX_MESSAGE


def test_a_conversion_that_fails_names_its_object() -> None:
    def fail(_body: Json) -> Json:
        raise KeyError("nothing")

    broken = Version(name="v1test", to_hub=fail, from_hub=fail, definition=fail)
    kinds = {"SharePod": KindVersions(kind="SharePod", further=(broken,))}
    response = response_of(answer(review(sharepod()), kinds))
    assert "SharePod team/train: cannot be converted from v1alpha1 to v1test" in response["result"]["message"]
    assert "Correct or delete it in v1alpha1" in response["result"]["message"]


@pytest.mark.parametrize(
    "text",
    [None, [], "x", {}, review() | {"kind": "x"}, review() | {"apiVersion": "v1beta1"}, review() | {"request": {}}],
)
def test_what_is_no_review_is_told_so(text: Any) -> None:
    with pytest.raises(ReviewError):
        answer(text, KINDS)


def test_with_one_version_the_crd_stays_as_it_is() -> None:
    crd = gpunode_crd()
    assert with_versions(crd, VERSIONS["GPUNode"]) is crd
    assert "conversion" not in crd["spec"]


def test_a_second_version_comes_with_the_webhook_and_one_version_is_stored() -> None:
    crd = with_versions(gpunode_crd(), second_version.kinds(stored="v1test", hub_served=False)["GPUNode"])
    versions = {entry["name"]: entry for entry in crd["spec"]["versions"]}
    assert {name: (entry["served"], entry["storage"]) for name, entry in versions.items()} == {
        "v1alpha1": (False, False),
        "v1test": (True, True),
    }
    assert crd["spec"]["conversion"]["webhook"]["clientConfig"]["service"]["name"] == "sharepod-conversion"
    rows = [
        entry["schema"]["openAPIV3Schema"]["properties"]["spec"]["properties"]["tenants"]["items"]["properties"]
        for entry in versions.values()
    ]
    assert "requestMilli" in rows[0]
    assert "guaranteedMilli" in rows[1]
