"""Claims and the Pods that use them: the users of a claim, its use since its reservation, and the cache."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count
from typing import Any

import pytest
from sharepod.api.resource_line import Carried
from sharepod.controller.state.claims_seen import ClaimsSeen
from sharepod.controller.state.facts.claim_facts import claim_facts

_versions = count(1)


def claim(name: str = "c", *, owner: str | None = None, used_by: Sequence[str] = (), **annotations: str) -> Any:
    metadata: dict[str, Any] = {"uid": name, "name": name, "namespace": "a", "resourceVersion": str(next(_versions))}
    metadata["annotations"] = annotations
    if owner is not None:
        reference = {"apiVersion": "v1", "kind": "Pod", "uid": owner, "name": owner, "controller": True}
        metadata["ownerReferences"] = [reference]
    exactly = {"deviceClassName": "sharepod.dev", "capacity": {"requests": {"timeMilli": "400"}}}
    consumers = [{"resource": "pods", "name": uid, "uid": uid} for uid in used_by]
    spec = {"devices": {"requests": [{"name": "gpu", "exactly": exactly}]}}
    return {"metadata": metadata, "spec": spec, "status": {"reservedFor": consumers}}


def pod(uid: str, *names: str, node: str | None = None, priority: int = 0) -> Any:
    return {
        "metadata": {"uid": uid, "name": uid, "namespace": "a", "resourceVersion": str(next(_versions))},
        "spec": {
            "nodeName": node,
            "priority": priority,
            "containers": [{"name": "main"}],
            "resourceClaims": [{"name": f"entry-{name}", "resourceClaimName": name} for name in names or ("c",)],
        },
        "status": {"phase": "Running" if node else "Pending"},
    }


@pytest.fixture
def seen() -> ClaimsSeen:
    return ClaimsSeen(lambda uid: None)


def users(seen: ClaimsSeen, name: str = "c") -> list[str]:
    known = seen.claims.get(name)
    assert known is not None
    return [user.uid for user in seen.users(known)]


@pytest.mark.promise("operator-claim-no-over-commit")
def test_a_pod_that_names_a_claim_uses_it_whoever_the_claim_says_it_was_made_for(seen: ClaimsSeen) -> None:
    seen.put_claim(claim(owner="other"))
    seen.put_pod(pod("other"))
    seen.put_pod(pod("mine"))
    seen.booked("c")
    assert users(seen) == ["mine", "other"]
    seen.put_claim(claim(owner="other", used_by=["mine"]))
    assert seen.unused("c"), "it waits for a node"
    seen.put_pod(pod("mine", node="node-a"))
    assert not seen.unused("c")
    seen.drop_pod("mine")
    assert not seen.unused("c"), "its processes may live on"


@pytest.mark.promise("operator-claim-no-over-commit")
@pytest.mark.parametrize("named", [(), ("d",)], ids=["a pod that is not known", "a pod that is not seen to name it"])
def test_a_claim_given_to_a_pod_that_is_not_seen_to_wait_for_it_counts_as_used(
    seen: ClaimsSeen, named: tuple[str, ...]
) -> None:
    seen.put_claim(claim())
    if named:
        seen.put_pod(pod("stranger", *named))
    seen.booked("c")
    seen.put_claim(claim(used_by=["stranger"]))
    assert not seen.unused("c")


def test_a_claim_given_to_a_pod_that_goes_while_it_waits_counts_as_used(seen: ClaimsSeen) -> None:
    seen.put_claim(claim())
    seen.put_pod(pod("p"))
    seen.booked("c")
    seen.put_claim(claim(used_by=["p"]))
    assert seen.unused("c")
    seen.drop_pod("p")
    assert not seen.unused("c"), "it may have been bound as it left our sight"


def test_a_pending_pods_new_tolerations_reach_its_claims() -> None:
    changed: list[str] = []
    seen = ClaimsSeen(changed.append)
    seen.put_claim(claim())
    seen.put_pod(pod("p"))
    changed.clear()
    seen.put_pod(pod("p"))
    assert changed == [], "nothing has changed"
    more = pod("p")
    more["spec"]["tolerations"] = [{"key": "gpu", "operator": "Exists"}]
    seen.put_pod(more)
    assert changed == ["c"]


def test_users_are_in_order_after_each_change(seen: ClaimsSeen) -> None:
    seen.put_claim(claim())
    for uid, priority in (("a", 0), ("b", 5)):
        seen.put_pod(pod(uid, priority=priority))
    assert users(seen) == ["b", "a"]
    seen.put_pod(pod("a", priority=9))
    assert users(seen) == ["a", "b"]
    seen.put_pod(pod("a", priority=9, node="node-a"))
    assert users(seen) == ["b", "a"], "waiting Pods come first"
    seen.put_pod(pod("c", "c", "d"))
    assert users(seen) == ["b", "c", "a"]
    seen.drop_pod("b")
    assert users(seen) == ["c", "a"]
    seen.put_claim(claim(owner="a"))
    assert users(seen) == ["c", "a"]


def test_nothing_is_kept_of_owners_that_a_claim_had_nor_of_claims_that_nobody_used(seen: ClaimsSeen) -> None:
    for number in range(100):
        seen.put_claim(claim(owner=f"owner-{number}"))
    assert len(seen._made) == 1
    seen.booked("c")
    seen.drop_claim("c", deleted=True)
    seen.forgotten("c")
    assert not seen._made
    assert not seen._unused
    assert not seen._sorted


def test_annotations_of_others_are_not_kept_and_ours_are() -> None:
    written = {"example.com/large": "x" * 100_000, "sharepod.dev/gpu-models": "A100"}
    facts = claim_facts(claim(**written))
    assert facts.request is not None
    assert facts.asks["metadata"]["annotations"] == {"sharepod.dev/gpu-models": "A100"}


def line_claim(name: str, owner: str | None) -> Any:
    """Return a claim as kube-controller-manager creates it from the template without sizes."""
    made = claim(name, owner=owner, **{"resource.kubernetes.io/pod-claim-name": "sharepod"})
    exactly = {"deviceClassName": "sharepod.dev", "allocationMode": "ExactCount", "count": 1}
    made["spec"] = {"devices": {"requests": [{"name": "line", "exactly": exactly}]}}
    return made


def line_pod(uid: str, made: str | None, milli: str = "400", node: str | None = None, **annotations: str) -> Any:
    """Return a Pod with a line. Its status names the claim `made`."""
    found = pod(uid, node=node)
    found["metadata"]["annotations"] = annotations
    found["spec"]["containers"][0]["resources"] = {"limits": {"sharepod.dev/gpu-milli": milli}}
    found["spec"]["resourceClaims"] = [{"name": "sharepod", "resourceClaimTemplateName": "sharepod"}]
    if made is not None:
        found["status"]["resourceClaimStatuses"] = [{"name": "sharepod", "resourceClaimName": made}]
    return found


def size(seen: ClaimsSeen, name: str = "l") -> int | str | None:
    """Return the thousandths of a claim, the reason why it has none, or None while this is not known."""
    known = seen.claims.get(name)
    assert known is not None
    if known.request is not None:
        return known.request.gpu.request_milli
    return str(known.error) if known.error is not None else None


@pytest.mark.promise("operator-line-bound")
@pytest.mark.parametrize("claim_first", [True, False])
def test_a_claim_without_sizes_has_those_of_its_pods_line_whatever_is_seen_first(
    seen: ClaimsSeen, claim_first: bool
) -> None:
    changed: list[str] = []
    seen._on_changed = changed.append
    if claim_first:
        seen.put_claim(line_claim("l", "p"))
        assert size(seen) is None
        seen.put_pod(line_pod("p", "l"))
    else:
        seen.put_pod(line_pod("p", "l"))
        seen.put_claim(line_claim("l", "p"))
    assert size(seen) == 400
    assert users(seen, "l") == ["p"]
    assert changed[-1] == "l"


def test_until_the_pods_status_names_the_claim_nothing_is_known_of_its_size(seen: ClaimsSeen) -> None:
    seen.put_pod(line_pod("p", None))
    seen.put_claim(line_claim("l", "p"))
    assert size(seen) is None
    seen.put_pod(line_pod("p", "l"))
    assert size(seen) == 400


@pytest.mark.promise("operator-line-resize")
def test_another_request_by_annotation_is_told_and_sizes_the_claim_anew(seen: ClaimsSeen) -> None:
    changed: list[str] = []
    seen.put_pod(line_pod("p", "l"))
    seen.put_claim(line_claim("l", "p"))
    seen._on_changed = changed.append
    seen.put_pod(line_pod("p", "l", **{"sharepod.dev/gpu-request": "0.1"}))
    assert (size(seen), changed) == (100, ["l"])


@pytest.mark.promise("operator-line-forged-claim")
def test_a_claim_that_is_not_the_one_of_its_owners_line_is_for_nothing(seen: ClaimsSeen) -> None:
    seen.put_pod(line_pod("p", "l"))
    seen.put_pod(pod("plain"))
    for name, owner in (("second", "p"), ("of-a-pod-without-a-line", "plain"), ("without-owner", None)):
        seen.put_claim(line_claim(name, owner))
        assert "metadata.ownerReferences" in str(size(seen, name))
    assert "uses the claim l" in str(size(seen, "second"))


@pytest.mark.promise("operator-line-claim-of-another")
def test_a_pod_that_names_the_claim_of_anothers_line_is_no_user_of_it(seen: ClaimsSeen) -> None:
    seen.put_pod(line_pod("p", "l"))
    seen.put_claim(line_claim("l", "p"))
    seen.put_pod(pod("guest", "l"))
    assert users(seen, "l") == ["p"]


def test_a_line_that_cannot_be_meant_refuses_the_claim_in_its_words(seen: ClaimsSeen) -> None:
    seen.put_pod(line_pod("p", "l", milli="1500"))
    seen.put_claim(line_claim("l", "p"))
    assert "1500 is neither" in str(size(seen))


def test_namespaces_whose_pods_lack_their_claims_are_reported_and_listed(seen: ClaimsSeen) -> None:
    wanted: list[str] = []
    seen.on_claim_lacking = wanted.append
    seen.put_pod(line_pod("p", None))
    assert (seen.lacking(), wanted) == (("a",), ["a"])
    seen.put_pod(line_pod("p", "l"))
    assert seen.lacking() == ()
    seen.put_pod(line_pod("q", None))
    seen.drop_pod("q")
    assert seen.lacking() == ()


@pytest.mark.parametrize("request_now", ["0.1", "0.9"], ids=["a lowered share", "more than the line, which is refused"])
def test_bound_pods_with_a_line_are_known_by_node_and_carry_it_whatever_is_asked_now(
    seen: ClaimsSeen, request_now: str
) -> None:
    seen.put_pod(line_pod("p", "l", node="node-a", **{"sharepod.dev/gpu-request": request_now}))
    seen.put_pod(pod("other", node="node-a"))
    assert [(found.uid, found.carried) for found in seen.bound_lines("node-a")] == [("p", Carried(400, 0))]
    seen.drop_pod("p")
    assert list(seen.bound_lines("node-a")) == []


def test_a_pod_whose_name_another_has_by_now_uses_no_claim_and_lacks_none(seen: ClaimsSeen) -> None:
    changed: list[str] = []
    seen.put_pod(line_pod("p", None, node="node-a"))
    seen.put_pod(line_pod("q", None))
    seen.put_claim(claim())
    seen.put_pod(pod("user"))
    seen._on_changed = changed.append
    for former in ("p", "q", "user"):
        named_so = pod(f"{former}-2", "others")
        named_so["metadata"]["name"] = former
        seen.put_pod(named_so)
    assert (seen.lacking(), list(seen.bound_lines("node-a")), users(seen), changed) == ((), [], [], ["c"])
    assert ("a", "c") not in seen._users, "nothing is kept of it"


@pytest.mark.promise("operator-line-template", "operator-line-bound")
@pytest.mark.parametrize("claim_first", [True, False])
def test_a_claim_for_a_line_that_says_a_size_of_its_own_is_for_nothing_until_it_is_made_again(
    claim_first: bool, seen: ClaimsSeen
) -> None:
    """A template named `sharepod` may be older than the policy that reserves this name. With its claims, each Pod would
    get a share of another size than its line."""
    changed: list[str] = []
    seen.on_claim_lacking = changed.append
    sized = claim("l", owner="p", **{"resource.kubernetes.io/pod-claim-name": "sharepod"})
    if claim_first:
        seen.put_claim(sized)
        seen.put_pod(line_pod("p", None, milli="100"))
    else:
        seen.put_pod(line_pod("p", None, milli="100"))
        seen.put_claim(sized)
    assert "delete the claim" in str(size(seen)), "also before the Pod's status names it"
    seen.put_pod(line_pod("p", "l", milli="100"))
    assert "delete the claim" in str(size(seen))
    assert seen.lacking() == ("a",), "its template is looked at, and replaced"
    changed.clear()
    seen.drop_claim("l", deleted=True)
    assert changed == ["a"]
    assert [user.uid for user in seen.without_claim()] == ["p"]
    made = line_claim("new", "p")
    made["metadata"]["name"] = "l"
    seen.put_claim(made)
    seen.put_pod(line_pod("p", "l", milli="100"))
    assert (size(seen, "new"), seen.lacking()) == (100, ())


def test_another_claim_of_a_pod_with_a_line_has_its_own_size(seen: ClaimsSeen) -> None:
    mine = line_pod("p", "l", milli="100")
    mine["spec"]["resourceClaims"].append({"name": "other", "resourceClaimTemplateName": "mine"})
    seen.put_pod(mine)
    seen.put_claim(claim("c", owner="p", **{"resource.kubernetes.io/pod-claim-name": "other"}))
    assert (size(seen, "c"), seen.lacking()) == (400, ())


def test_a_claim_of_another_namespace_is_not_a_pods_whatever_owner_it_names(seen: ClaimsSeen) -> None:
    """Any user may write owner references with any uid. They identify a claim only until the Pod's status names it."""
    mine = pod("p")
    mine["spec"]["resourceClaims"] = [{"name": "gpu", "resourceClaimTemplateName": "shares"}]
    seen.put_pod(mine)
    forged = claim("forged", owner="p", **{"resource.kubernetes.io/pod-claim-name": "gpu"})
    forged["metadata"]["namespace"] = "b"
    seen.put_claim(forged)
    known = seen.pods.get("p")
    assert known is not None
    assert (list(seen.of_pod(known)), seen.complete(known), users(seen, "forged")) == ([], False, [])
    seen.put_claim(claim("made", owner="p", **{"resource.kubernetes.io/pod-claim-name": "gpu"}))
    assert [item.uid for item in seen.of_pod(known)] == ["made"]
    assert (seen.complete(known), users(seen, "made"), users(seen, "forged")) == (True, ["p"], [])


def test_a_claim_whose_class_is_not_ours_is_told_of_once_its_share_of_our_gpus_is_taken_back() -> None:
    """An administrator's class may select devices of pool `scheduler`, so a claim of any class may hold a share."""
    changed: list[str] = []
    seen = ClaimsSeen(changed.append)
    result = {"request": "gpu", "driver": "scheduler.sharepod.dev", "pool": "node-a", "device": "gpu-0"}
    consumed = {"timeMilli": "400", "limitMilli": "1k", "memory": "1Gi"}
    given = {"devices": {"results": [{**result, "consumedCapacity": consumed}]}}

    def of_another_class(**status: Any) -> Any:
        read = claim()
        read["spec"]["devices"]["requests"][0]["exactly"]["deviceClassName"] = "example.com"
        return read | {"status": status}

    seen.put_claim(of_another_class())
    assert changed == []
    seen.put_claim(of_another_class(allocation=given))
    assert changed == ["c"]
    seen.put_claim(of_another_class())
    assert changed == ["c", "c"], "kube-scheduler has taken it back: its row is to go"
    seen.drop_claim("c", deleted=True)
    assert changed == ["c"] * 3
