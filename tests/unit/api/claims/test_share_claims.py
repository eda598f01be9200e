"""Claims of SharePods' Pods: their content, and other objects that resemble them."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from sharepod.api.claims.share_claims import build_claim, claim_name, is_share_claim

MADE = build_claim("one-0badcafe", "n", "one", "pod-1", 2)


def test_a_claim_says_its_number_of_gpus_and_belongs_to_its_pod() -> None:
    (request,) = MADE["spec"]["devices"]["requests"]
    assert request == {
        "name": "sharepod",
        "exactly": {"deviceClassName": "sharepod.dev", "allocationMode": "ExactCount", "count": 2},
    }
    (owner,) = MADE["metadata"]["ownerReferences"]
    assert (owner["kind"], owner["name"], owner["uid"], owner["controller"]) == ("Pod", "one", "pod-1", True)


@pytest.mark.parametrize("pod", ["a", "a" * 253, "a" * 239 + "." + "b" * 13, "x-" * 126 + "x"])
def test_a_claims_name_is_a_valid_one_for_each_pod(pod: str) -> None:
    name = claim_name(pod, "0badcafe")
    assert len(name) <= 253
    assert name.endswith("-0badcafe")
    assert ".-" not in name
    assert "--" not in name


def changed(**exactly: Any) -> dict[str, Any]:
    claim = copy.deepcopy(MADE)
    claim["spec"]["devices"]["requests"][0]["exactly"].update(exactly)
    return claim


def named(name: object) -> dict[str, Any]:
    claim = copy.deepcopy(MADE)
    claim["spec"]["devices"]["requests"][0]["name"] = name
    return claim


def test_the_mark_is_the_request_without_capacity() -> None:
    assert is_share_claim(MADE)
    assert is_share_claim(changed(capacity={}))
    assert not is_share_claim(changed(capacity={"requests": {"timeMilli": "400"}}))
    assert not is_share_claim(changed(deviceClassName="other"))
    assert not is_share_claim(named("line"))


@pytest.mark.parametrize(
    "spec", [None, [], {}, {"devices": None}, {"devices": {"requests": {}}}, {"devices": {"requests": [None]}}]
)
def test_what_has_no_shape_has_no_mark(spec: object) -> None:
    assert not is_share_claim({"spec": spec})
    assert not is_share_claim(named(None))
    assert not is_share_claim(changed() | {"spec": {"devices": {"requests": [{"name": "sharepod", "exactly": 1}]}}})
