"""Work per change of claims and of the Pods that use them: it grows only with the change, also for hostile objects."""

from __future__ import annotations

import sys
from collections.abc import Callable
from itertools import count
from typing import Any

import pytest
from sharepod.controller.decisions.claim_status import unlisted
from sharepod.controller.decisions.claim_steps import ClaimSnapshot
from sharepod.controller.state.claims_seen import ClaimsSeen
from sharepod.controller.state.facts.claim_facts import MADE_FOR, MAX_CLAIMS, claim_pod_facts

Json = dict[str, Any]
_versions = count(1)
_MANY = 400
"""Number of entries of a Pod, or of claims or Pods. Kubernetes bounds the entries of a Pod only by the size of
an object."""


def claim(name: str, *, owner: str | None = None) -> Json:
    metadata: Json = {"uid": name, "name": name, "namespace": "a", "resourceVersion": str(next(_versions))}
    if owner is not None:
        metadata["ownerReferences"] = [{"kind": "Pod", "uid": owner, "name": owner, "controller": True}]
        metadata["annotations"] = {MADE_FOR: "entry-none"}
    exactly = {"deviceClassName": "sharepod.dev", "capacity": {"requests": {"timeMilli": "400"}}}
    return {"metadata": metadata, "spec": {"devices": {"requests": [{"name": "gpu", "exactly": exactly}]}}}


def pod(uid: str, entries: int, *, template: str | None = None, containers: int = 1, listed: int = 0) -> Json:
    """Return a Pod. Each of its containers lists the last `listed` of its entries."""
    names = [f"entry-{number}" for number in range(entries)]
    used = [{"name": name} for name in names[entries - listed :]]
    claims: list[Json] = [
        {"name": name, **({"resourceClaimTemplateName": template} if template else {"resourceClaimName": f"c{number}"})}
        for number, name in enumerate(names)
    ]
    return {
        "metadata": {"uid": uid, "name": uid, "namespace": "a", "resourceVersion": str(next(_versions))},
        "spec": {
            "resourceClaims": claims,
            "containers": [
                {"name": f"main-{number}", "resources": {"claims": list(used)}} for number in range(containers)
            ],
        },
    }


def steps(work: Callable[[], object]) -> int:
    """Return how many Python functions were entered while some work was done. Each step of a generator counts."""
    entered = 0

    def note(_frame: object, event: str, _argument: object) -> None:
        nonlocal entered
        entered += event == "call"

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        work()
    finally:
        sys.setprofile(before)
    return entered


@pytest.mark.promise("operator-claim-hostile", "operator-one-object-one-owner")
@pytest.mark.parametrize("entries", [MAX_CLAIMS, _MANY])
def test_to_read_a_pod_costs_what_its_lists_have_and_not_their_product(entries: int) -> None:
    """Otherwise a user who may create Pods could stop the operator: a Pod of a megabyte, with 2,048 entries and 62
    containers that list half of them, took two seconds at each change."""
    few = steps(lambda: claim_pod_facts(pod("p", entries, containers=1, listed=2)))
    more = steps(lambda: claim_pod_facts(pod("p", entries, containers=60, listed=2)))
    assert more - few < 60 * 40, "each container is looked at once, however many claims the Pod has"


@pytest.mark.promise("operator-claim-hostile", "operator-one-object-one-owner")
def test_a_claim_that_comes_is_told_to_those_that_it_may_be_placed_with_once_each() -> None:
    changed: list[str] = []
    seen = ClaimsSeen(changed.append)
    for number in range(10):
        seen.put_pod(pod(f"many-{number}", MAX_CLAIMS + 1))
        seen.put_pod(pod(f"few-{number}", MAX_CLAIMS))
    for number in range(1, MAX_CLAIMS + 1):
        seen.put_claim(claim(f"c{number}"))
    changed.clear()
    seen.put_claim(claim("c0"))
    assert sorted(changed) == sorted(["c0", *(f"c{number}" for number in range(MAX_CLAIMS))])
    changed.clear()
    seen.drop_claim("c0")
    assert sorted(changed) == sorted(["c0", *(f"c{number}" for number in range(1, MAX_CLAIMS))])


@pytest.mark.promise("operator-claim-hostile", "operator-one-object-one-owner")
def test_claims_that_are_said_to_be_of_a_pod_cost_nothing_for_each_of_its_entries() -> None:
    """Any user may write owner references. Without the bound, each entry of a Pod was compared with each claim that
    names the Pod as its owner."""

    def cost(claims: int) -> int:
        seen = ClaimsSeen(lambda uid: None)
        for number in range(claims):
            seen.put_claim(claim(f"forged-{number}", owner="p"))
        return steps(lambda: seen.put_pod(pod("p", _MANY, template="shares")))

    assert cost(_MANY) - cost(0) < 40 * _MANY


@pytest.mark.promise("operator-claim-hostile", "operator-one-object-one-owner")
def test_whether_a_claim_is_listed_is_known_without_a_look_at_the_other_entries_of_its_pods() -> None:
    def cost(entries: int) -> int:
        seen = ClaimsSeen(lambda uid: None)
        for number in range(20):
            seen.put_pod(pod(f"p{number}", entries, containers=2, listed=1))
        seen.put_claim(claim("c0"))
        known = seen.claims.get("c0")
        assert known is not None
        snapshot = ClaimSnapshot(claim=known, pods=seen.users(known))
        assert (unlisted(snapshot) is not None) == (entries <= MAX_CLAIMS)
        return steps(lambda: unlisted(snapshot))

    assert cost(_MANY) <= cost(MAX_CLAIMS)


def test_a_claim_that_one_container_lists_by_another_name_of_the_pods_is_listed() -> None:
    body = pod("p", 3, listed=1)
    body["spec"]["resourceClaims"][0]["resourceClaimName"] = "c2"
    assert claim_pod_facts(body).unlisted == {"c1"}


def test_a_claim_whose_annotation_names_another_entry_is_known_by_that_alone() -> None:
    seen = ClaimsSeen(lambda uid: None)
    seen.put_pod(pod("p", 2, template="shares"))
    made = claim("x", owner="p")
    made["metadata"]["annotations"] = {MADE_FOR: "entry-0"}
    seen.put_claim(made)
    known = seen.pods.get("p")
    assert known is not None
    assert [item.uid for item in seen.of_pod(known)] == ["x"]
    moved = claim("x", owner="p")
    seen.put_claim(moved)
    assert not list(seen.of_pod(known))
    seen.drop_claim("x")
    assert not seen._made, "nothing of it is kept"
