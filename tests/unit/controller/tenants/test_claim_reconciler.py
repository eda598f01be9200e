"""One ResourceClaim from its first look to its last, over an API server that refuses and loses answers."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
from doubles.apiserver.errors import Refused
from sharepod.api.units import TenantId
from sharepod.controller.apiserver.client import CLAIMS
from sharepod.controller.state.facts.claim_facts import FINALIZER
from sharepod.controller.tenants.snapshots import LOOK_AGAIN_S
from sharepod.kube import InvalidError, Json, UnavailableError
from unit.controller.acting_world import NAMESPACE, World, acting_world

UNSCHEDULABLE = {"type": "PodScheduled", "status": "False", "message": "0/2 nodes are available: 2 Insufficient cpu."}


@pytest.fixture
async def world() -> AsyncIterator[World]:
    async with acting_world() as made:
        yield made


async def placed(world: World, *claims: str, pod: str = "user") -> None:
    """Wait until the claims have their rows, decided on by their leader."""
    for claim in claims or ("share",):
        await world.look_at_claim(claim)
    wanted = {world.claim_uid(claim) for claim in claims or ("share",)}

    def written() -> bool:
        return wanted <= {row for node in world._nodes() for row in world.rows(node)}

    await world.until(written)


async def allocated(world: World, **claim: Any) -> None:
    """A claim that a Pod waits for, with its row and its allocation."""
    world.claim(**claim)
    world.pod_with("share")
    await placed(world)
    await world.look_at_claim()
    assert world.allocation() is not None


async def running(world: World) -> None:
    """A claim whose Pod runs."""
    await allocated(world)
    world.binds()
    await world.look_at_claim()


def versions(world: World, plural: str, what: Any) -> list[int]:
    return [
        change.version
        for change in world.server.storage.history
        if change.kind.plural == plural and change.after is not None and what(change.after)
    ]


async def lets_go(world: World, claim: str = "share") -> None:
    """The second part of taking an allocation back, after kube-scheduler could see the first."""
    await world.look_at_claim(claim)
    world.now += LOOK_AGAIN_S
    await world.look_at_claim(claim, times=2)


async def until_gone(world: World, node: str = "node-a") -> None:
    await world.until(lambda: world.claim_uid() not in world.rows(node))


@pytest.mark.promise("operator-claim-row-first")
async def test_a_claim_gets_a_row_then_its_finalizer_then_its_allocation(world: World) -> None:
    world.node()
    await allocated(world)
    uid = world.claim_uid()
    row = world.rows()[uid]
    assert (row["claim"], row["namespace"], row["requestMilli"]) == ({"name": "share", "uid": uid}, NAMESPACE, 400)
    assert "podUID" not in row
    found = world.allocation()
    assert found is not None
    result = {"request": "gpu", "driver": "gpu.sharepod.dev", "pool": "node-a", "device": row["gpus"][0].lower()}
    assert found["devices"]["results"] == [result]
    here = {"key": "metadata.name", "operator": "In", "values": ["node-a"]}
    assert found["nodeSelector"]["nodeSelectorTerms"] == [{"matchFields": [here]}]
    assert found["allocationTimestamp"]
    order = [
        versions(world, "gpunodes", lambda item: item["spec"].get("tenants")),
        versions(world, "resourceclaims", lambda item: FINALIZER in item["metadata"].get("finalizers", ())),
        versions(world, "resourceclaims", lambda item: (item.get("status") or {}).get("allocation")),
    ]
    assert order[0][0] < order[1][0] < order[2][0]


async def test_the_share_is_shown_in_the_claims_status_by_the_same_write(world: World) -> None:
    world.node()
    await allocated(world)
    (shown,) = (world.read("resourceclaims", "share") or {})["status"]["devices"]
    assert shown["data"] == {"requestMilli": 400, "limitMilli": 1000, "memory": 1 << 30}
    (condition,) = shown["conditions"]
    assert (condition["type"], condition["status"]) == ("Granted", "True")
    assert condition["message"].startswith("request 0.4")
    writes = len(world.server.made("patch", "resourceclaims"))
    await world.look_at_claim(times=3)
    assert len(world.server.made("patch", "resourceclaims")) == writes, "what is shown already is not written again"


@pytest.mark.promise("operator-claim-waits-for-pod")
async def test_a_claim_without_a_pod_that_waits_gets_no_share(world: World) -> None:
    world.node()
    world.claim()
    await world.look_at_claim()
    assert world.loop.waiting() == ()
    world.pod_with("share", schedulingGates=[{"name": "example.com/hold"}])
    await world.look_at_claim()
    assert world.loop.waiting() == (), "a pod behind a gate does not wait for a node"
    world.change("pods", "user", lambda item: item["spec"].pop("schedulingGates"))
    await placed(world)


async def test_a_claim_of_a_template_is_known_by_its_owner_before_the_pods_status_names_it(world: World) -> None:
    world.node()
    listed = [{"name": "gpu", "resourceClaimTemplateName": "shares"}]
    body: Json = {"metadata": {"name": "user"}, "spec": {"resourceClaims": listed, "containers": [{"name": "main"}]}}
    pod = world.server.storage.create(world.kind("pods"), NAMESPACE, body)
    owner = {"apiVersion": "v1", "kind": "Pod", "name": "user", "uid": pod["metadata"]["uid"], "controller": True}
    world.claim()
    world.change(
        "resourceclaims",
        "share",
        lambda item: item["metadata"].update(
            ownerReferences=[owner], annotations={"resource.kubernetes.io/pod-claim-name": "gpu"}
        ),
    )
    await placed(world)


@pytest.mark.promise("operator-claim-pod-needs")
async def test_a_claim_goes_where_its_pod_can_go(world: World) -> None:
    world.node("node-a")
    world.node("node-b")
    world.claim()
    world.pod_with("share", nodeSelector={"kubernetes.io/hostname": "node-b"})
    await placed(world)
    assert world.claim_uid() in world.rows("node-b")


@pytest.mark.promise("operator-claim-refused-node")
async def test_a_place_that_kube_scheduler_takes_away_is_given_back_at_once_and_avoided(world: World) -> None:
    world.node("node-a")
    await allocated(world)
    world.change("pods", "user", lambda item: item.update(status={"conditions": [UNSCHEDULABLE]}), status=True)
    world.deallocates()
    await world.look_at_claim()
    await until_gone(world)
    assert all(
        row["state"] == "Reserved"
        for change in world.server.storage.history
        if change.kind.plural == "gpunodes" and change.after is not None
        for row in change.after["spec"].get("tenants") or ()
    ), "in one step: no pod was ever there"
    world.node("node-b")
    await placed(world)
    assert world.claim_uid() in world.rows("node-b")
    why, until = world.memos.of(world.claim_uid()).avoid["node-a"]
    assert "Insufficient cpu" in why
    assert until == world.now + world.settings.bind_timeout


async def test_the_echo_of_an_own_write_is_no_refusal(world: World) -> None:
    world.node()
    world.claim()
    world.pod_with("share")
    await placed(world)
    await world.claims.reconcile(world.claim_uid())  # it has not seen its own writes again
    await world.claims.reconcile(world.claim_uid())
    await world.look_at_claim(times=2)
    assert world.claim_uid() in world.rows()
    assert world.allocation() is not None


@pytest.mark.promise("operator-claim-two-steps")
async def test_a_claim_that_was_used_ends_in_two_steps(world: World) -> None:
    world.node()
    await running(world)
    world.server.storage.finish_deletion(world.kind("pods"), NAMESPACE, "user")
    world.deallocates()
    await world.look_at_claim()
    uid = world.claim_uid()
    await world.until(lambda: world.rows()[uid]["state"] == "Releasing")
    await world.look_at_claim(times=2)
    assert uid in world.rows(), "its agent has not said yet that nothing is left"
    world.report({"id": uid, "drained": True})
    await world.look_at_claim()
    await until_gone(world)


@pytest.mark.promise("operator-claim-two-steps")
async def test_a_pod_that_came_and_went_between_two_looks_counts_as_one_that_used_the_claim(world: World) -> None:
    world.node()
    await allocated(world)
    world.binds()
    world.server.storage.finish_deletion(world.kind("pods"), NAMESPACE, "user")
    world.deallocates()
    world.pod_with("share", name="next")
    await world.look_at_claim()
    await world.until(lambda: world.rows()[world.claim_uid()]["state"] == "Releasing")


async def test_what_a_list_may_have_missed_counts_as_use(world: World) -> None:
    world.node()
    await allocated(world)
    await world.watches.claims.list_all()
    world.deallocates()
    await world.look_at_claim()
    await world.until(lambda: world.rows()[world.claim_uid()]["state"] == "Releasing")


@pytest.mark.promise("operator-claim-again")
async def test_a_claim_is_placed_for_its_next_pod_only_once_its_old_row_is_gone(world: World) -> None:
    world.node()
    await running(world)
    world.server.storage.finish_deletion(world.kind("pods"), NAMESPACE, "user")
    world.deallocates()
    world.pod_with("share", name="next")
    await world.look_at_claim()
    uid = world.claim_uid()
    await world.until(lambda: world.rows()[uid]["state"] == "Releasing")
    await world.look_at_claim(times=2)
    assert world.allocation() is None
    world.report({"id": uid, "drained": True})
    await world.look_at_claim()
    await until_gone(world)
    await placed(world)
    await world.look_at_claim()
    assert world.rows()[uid]["state"] == "Reserved"
    assert world.allocation() is not None


async def test_a_claim_by_name_is_reserved_for_the_pod_that_waits_with_its_allocation(world: World) -> None:
    world.node()
    await allocated(world)
    found = world.read("resourceclaims", "share") or {}
    uid = (world.read("pods", "user") or {})["metadata"]["uid"]
    assert found["status"]["reservedFor"] == [{"name": "user", "resource": "pods", "uid": uid}]
    world.deallocates()
    await world.look_at_claim()
    await until_gone(world)
    states = {
        row["state"]
        for change in world.server.storage.history
        if change.kind.plural == "gpunodes" and change.after is not None
        for row in change.after["spec"].get("tenants") or ()
    }
    assert states == {"Reserved"}, "a pod that waits has used nothing"


async def test_two_pods_on_one_claim_are_one_tenant_until_the_last_has_gone(world: World) -> None:
    world.node()
    await running(world)
    world.pod_with("share", name="second")
    await world.look_at_claim()
    world.binds("second")
    world.server.storage.finish_deletion(world.kind("pods"), NAMESPACE, "user")
    await world.look_at_claim(times=2)
    assert list(world.rows()) == [world.claim_uid()]
    assert world.rows()[world.claim_uid()]["state"] == "Reserved"


@pytest.mark.promise("operator-claim-unwanted")
async def test_an_allocation_that_no_pod_waits_for_any_more_is_taken_back(world: World) -> None:
    world.node()
    await allocated(world)
    world.change("resourceclaims", "share", lambda item: item["status"].pop("reservedFor"), status=True)
    world.delete("pods", "user")
    await world.look_at_claim(times=2)
    assert world.allocation() is None
    await until_gone(world)
    assert world.memos.of(world.claim_uid()).avoid == {}


@pytest.mark.promise("operator-claim-bind-timeout")
async def test_an_allocation_is_taken_back_from_a_pod_that_kube_scheduler_refuses(world: World) -> None:
    world.node()
    await allocated(world)
    await world.look_at_claim()
    world.change("pods", "user", lambda item: item.update(status={"conditions": [UNSCHEDULABLE]}), status=True)
    await world.look_at_claim()
    world.now += world.settings.bind_timeout - 1
    await world.look_at_claim()
    assert world.allocation() is not None
    world.now += 1
    await world.look_at_claim()
    found = world.read("resourceclaims", "share") or {}
    assert "reservedFor" not in found["status"]
    await world.look_at_claim()
    assert world.allocation() is not None, "kube-scheduler may bind the pod until it has seen that"
    await lets_go(world)
    assert world.allocation() is None
    await until_gone(world)
    assert "node-a" in world.memos.of(world.claim_uid()).avoid


async def test_what_kube_scheduler_said_before_the_allocation_is_no_refusal_of_it(world: World) -> None:
    world.node()
    world.claim()
    before = UNSCHEDULABLE | {"message": "cannot allocate all claims"}
    world.pod_with("share")
    world.change("pods", "user", lambda item: item.update(status={"conditions": [before]}), status=True)
    await placed(world)
    await world.look_at_claim(times=2)
    world.now += world.settings.bind_timeout
    await world.look_at_claim()
    assert world.allocation() is not None


async def test_an_allocation_that_kube_scheduler_has_just_given_to_a_pod_is_not_taken_back(world: World) -> None:
    world.node()
    await allocated(world)
    world.delete("pods", "user")
    await world.see_claims()
    world.pod_with("share", name="next")
    consumer = {"resource": "pods", "name": "next", "uid": "u"}
    world.change("resourceclaims", "share", lambda item: item["status"].update(reservedFor=[consumer]), status=True)
    await world.claims.reconcile(world.claim_uid())  # it has not seen the next pod
    assert world.allocation() is not None


async def test_a_deleted_claim_gives_its_share_back(world: World) -> None:
    world.node()
    await allocated(world)
    world.delete("pods", "user")
    world.delete("resourceclaims", "share")
    world.deallocates()  # kube-controller-manager, which removes the finalizer too
    world.change("resourceclaims", "share", lambda item: item["metadata"].update(finalizers=[]))
    assert world.read("resourceclaims", "share") is None
    await world.look_at_claim()
    uid = world.claim_uid()
    await world.until(lambda: world.rows()[uid]["state"] == "Releasing")
    world.report({"id": uid, "drained": True})
    await world.look_at_claim()
    await until_gone(world)
    await world.look_at_claim()
    assert not world.state.is_claim(world.claim_uid())


@pytest.mark.promise("operator-claim-crash")
async def test_a_successor_finds_the_row_by_the_claims_uid_and_goes_on(world: World) -> None:
    world.node()
    world.claim()
    world.pod_with("share")
    await placed(world)
    world.memos.clear()
    world.state.seen_claims.doubt()  # another process: it knows nothing of what this one has decided
    await world.look_at_claim()
    uid = world.claim_uid()
    await world.until(lambda: world.rows()[uid]["state"] == "Releasing")
    world.report({"id": uid, "drained": True})
    await world.look_at_claim()
    await until_gone(world)
    await placed(world)
    await world.look_at_claim()
    assert world.allocation() is not None


async def test_a_successor_leaves_a_claim_alone_that_is_in_use(world: World) -> None:
    world.node()
    await running(world)
    world.memos.clear()
    world.state.seen_claims.doubt()
    await world.look_at_claim(times=2)
    assert world.rows()[world.claim_uid()]["state"] == "Reserved"
    assert world.allocation() is not None


async def test_a_row_of_a_claim_that_no_list_has_shown_yet_stays(world: World) -> None:
    world.node()
    await running(world)
    seen = world.state.seen_claims
    seen.drop_claim(world.claim_uid())
    assert world.state.is_claim(world.claim_uid()), "its row names it"
    world.server.unserved.add("resourceclaims")  # a GET says 404 as for a claim that is gone
    await world.claims.reconcile(world.claim_uid())
    ((_, row),) = world.state.cluster.reservations_of(TenantId(world.claim_uid()))
    assert not row.releasing


async def test_a_lost_answer_of_the_allocation_is_read_before_anything_is_written_again(world: World) -> None:
    world.node()
    world.claim()
    world.pod_with("share")
    await placed(world)
    await world.see_claims()
    write = world.client.patch_status

    async def lost(*args: Any, **options: Any) -> Json:
        await write(*args, **options)
        raise UnavailableError("patch", 0, "TimeoutError", "no answer in time")

    world.client.patch_status = lost  # type: ignore[method-assign]
    with pytest.raises(UnavailableError):
        await world.claims.reconcile(world.claim_uid())
    world.client.patch_status = write  # type: ignore[method-assign]
    writes = len(world.server.made("patch", "resourceclaims"))
    await world.look_at_claim(times=2)
    assert world.allocation() is not None
    assert world.claim_uid() in world.rows()
    assert len(world.server.made("patch", "resourceclaims")) == writes


async def test_an_invalid_claim_says_field_and_fix_on_the_claim_and_its_pod(world: World) -> None:
    world.node()
    world.claim(allocationMode="All")
    world.pod_with("share")
    await world.look_at_claim()
    await world.until(lambda: len(world.told("Invalid")) == 2)
    assert all("allocationMode" in note and "ExactCount" in note for note in world.told("Invalid"))
    about = {item["regarding"]["kind"]: item["regarding"]["apiVersion"] for item in _events(world, "Invalid")}
    assert about == {"ResourceClaim": "resource.k8s.io/v1", "Pod": "v1"}
    assert world.rows() == {}


def _events(world: World, reason: str) -> list[Json]:
    return [item for item in world.server.storage.select(world.kind("events"), "") if item["reason"] == reason]


@pytest.mark.promise("operator-claim-told")
async def test_a_claim_without_room_says_why_in_its_own_words_and_then_that_it_is_placed(world: World) -> None:
    world.node()
    world.claim("first", 700)
    world.pod_with("first", name="one")
    await placed(world, "first")
    world.claim(time_milli=400)
    world.pod_with("share")
    await world.look_at_claim()
    await world.until_answered(world.claim_uid())
    await world.look_at_claim()
    await world.until(lambda: len(world.told("NoRoom")) == 2)
    assert any("timeMilli 300 would fit now" in note for note in world.told("NoRoom"))
    assert not any("spec.gpu" in note for note in world.told("NoRoom"))
    world.delete("pods", "one")
    await world.look_at_claim("first", times=2)
    await placed(world)
    await world.look_at_claim(times=2)
    await world.until(lambda: len(world.told("Placed")) >= 1)


@pytest.mark.promise("operator-claim-foreign")
async def test_an_allocation_by_somebody_else_gets_no_row_and_its_owner_is_told(world: World) -> None:
    world.node()
    world.claim()
    world.pod_with("share")
    result = {"request": "gpu", "driver": "nic.example", "pool": "p", "device": "d"}
    foreign = {"devices": {"results": [result]}, "allocationTimestamp": "2026-01-01T00:00:00Z"}
    world.change("resourceclaims", "share", lambda item: item.update(status={"allocation": foreign}), status=True)
    await world.look_at_claim(times=2)
    assert world.rows() == {}
    assert world.allocation() == foreign
    await world.until(lambda: bool(world.told("ForeignAllocation")))


async def test_an_allocation_of_ours_without_a_row_is_taken_back_and_placed_anew(world: World) -> None:
    world.node()
    await allocated(world)
    world.change("gpunodes", "node-a", lambda item: item["spec"].update(tenants=[]))
    await lets_go(world)
    assert world.allocation() is None
    await placed(world)


@pytest.mark.promise("operator-claim-resize")
async def test_the_annotation_lowers_and_raises_the_share_in_place(world: World) -> None:
    world.node()
    await running(world)
    uid = world.claim_uid()
    memory = world.rows()[uid]["memory"]
    for said, milli in (("0.2", 200), ("0.4", 400)):
        annotations = {"sharepod.dev/gpu-request": said}
        world.change("resourceclaims", "share", lambda item, a=annotations: item["metadata"].update(annotations=a))  # type: ignore[misc]
        await world.look_at_claim()
        await world.until(lambda milli=milli: world.rows()[uid]["requestMilli"] == milli)  # type: ignore[misc]
        await world.look_at_claim()
        (shown,) = (world.read("resourceclaims", "share") or {})["status"]["devices"]
        assert shown["data"]["requestMilli"] == milli
    assert world.rows()[uid]["memory"] == memory, "time alone"


async def test_a_raise_without_room_keeps_the_share_and_says_so(world: World) -> None:
    world.node()
    await running(world)
    lower = {"sharepod.dev/gpu-request": "0.1"}
    world.change("resourceclaims", "share", lambda item: item["metadata"].update(annotations=lower))
    await world.look_at_claim()
    await world.until(lambda: world.rows()[world.claim_uid()]["requestMilli"] == 100)
    await world.look_at_claim()
    world.claim("other", 800)
    world.pod_with("other", name="neighbour")
    await placed(world, "other")
    world.change("resourceclaims", "share", lambda item: item["metadata"].update(annotations={}))
    await world.look_at_claim()
    await world.until_answered(world.claim_uid())
    await world.look_at_claim()
    (shown,) = (world.read("resourceclaims", "share") or {})["status"]["devices"]
    resized = {item["type"]: item for item in shown["conditions"]}["Resized"]
    assert (resized["status"], resized["reason"]) == ("False", "NoRoom")
    assert shown["data"]["requestMilli"] == 100


@pytest.mark.promise("operator-claim-together")
async def test_claims_of_one_pod_go_to_one_node_or_none_is_placed(world: World) -> None:
    world.node("node-a")
    world.claim("first", 600)
    world.claim("second", 600)
    world.pod_with("first", "second")
    await world.look_at_claim("first")
    await world.look_at_claim("second")
    await world.until_answered(world.claim_uid("first"))
    assert world.rows() == {}, "one of them alone would fit"
    world.node("node-b", gpus=2)
    await placed(world, "first", "second")
    await world.look_at_claim("first")
    await world.look_at_claim("second")
    found = [world.allocation(name) for name in ("first", "second")]
    assert [item["devices"]["results"][0]["pool"] for item in found if item is not None] == ["node-b", "node-b"]
    gpus = [row["gpus"] for row in world.rows("node-b").values()]
    assert sorted(gpus) == [["GPU-node-b-0"], ["GPU-node-b-1"]]


async def test_a_pod_with_a_claim_that_is_not_there_gets_no_share_for_the_other(world: World) -> None:
    world.node()
    world.claim()
    world.pod_with("share", "later")
    await world.look_at_claim()
    assert world.loop.waiting() == ()
    world.claim("later")
    await placed(world, "share", "later")


async def test_when_one_claim_of_a_pod_loses_its_place_the_other_goes_too(world: World) -> None:
    world.node("node-a", gpus=2)
    world.claim("first")
    world.claim("second")
    world.pod_with("first", "second")
    await placed(world, "first", "second")
    for name in ("first", "second"):
        await world.look_at_claim(name)
    world.deallocates("first")
    await world.look_at_claim("first")
    await lets_go(world, "second")
    await world.look_at_claim("first")
    assert world.allocation("second") is None
    await world.until(lambda: world.rows() == {})
    world.node("node-b", gpus=2)
    await placed(world, "first", "second")
    assert len(world.rows("node-b")) == 2


async def test_a_pod_is_placed_beside_the_claim_that_it_shares(world: World) -> None:
    world.node("node-a")
    await running(world)
    world.node("node-b")
    world.claim("own", 100)
    world.pod_with("share", "own", name="second")
    await placed(world, "own")
    assert world.claim_uid("own") in world.rows("node-a")


async def test_a_claim_that_cannot_be_read_any_more_keeps_its_share(world: World) -> None:
    world.node()
    await running(world)
    found = world.read("resourceclaims", "share") or {}
    seen = world.state.seen_claims
    seen.drop_claim(found["metadata"]["uid"], 0)
    fresh = {**found["metadata"], "resourceVersion": str(world.server.storage.version + 1)}
    seen.put_unreadable_claim(fresh, "is too deep")
    await world.claims.reconcile(world.claim_uid())
    assert world.rows()[world.claim_uid()]["state"] == "Reserved"


async def test_a_claim_is_read_live_before_its_row_goes_if_no_watch_showed_its_end(world: World) -> None:
    world.node()
    await running(world)
    await world.watches.claims.list_all()
    uid = world.claim_uid()
    world.state.seen_claims.drop_claim(uid, 0)
    world.state.seen_claims.claims.drop(uid, 0)
    await world.claims.reconcile(uid)
    assert world.rows()[uid]["state"] == "Reserved"
    assert await world.client.get(CLAIMS, "share", NAMESPACE)


@pytest.mark.promise("operator-claim-attachable")
async def test_a_claim_goes_to_nodes_alone_that_can_attach_it(world: World) -> None:
    world.node("node-a")
    broken = {"type": "CDIDevices", "status": "False", "reason": "DevicesMissing", "message": "install nvidia-ctk"}
    world.change("gpunodes", "node-a", lambda item: item["status"].update(conditions=[broken]), status=True)
    world.claim()
    world.pod_with("share")
    await world.look_at_claim()
    await world.until_answered(world.claim_uid())
    await world.look_at_claim()
    await world.until(lambda: bool(world.told("NoRoom")))
    assert "install nvidia-ctk" in world.told("NoRoom")[0]
    world.node("old")
    world.change("gpunodes", "old", lambda item: item["status"].pop("conditions"), status=True)
    world.node("node-b")
    await placed(world)
    assert world.claim_uid() in world.rows("node-b")


@pytest.mark.promise("operator-claim-one-each")
async def test_a_container_with_two_claims_is_told_that_it_can_have_one(world: World) -> None:
    world.node("node-a", gpus=2)
    world.claim("first")
    world.claim("second")
    container = {"name": "main", "image": "i", "resources": {"claims": [{"name": "c0"}, {"name": "c1"}]}}
    world.pod_with("first", "second", containers=[container])
    await world.look_at_claim("first")
    await world.look_at_claim("second")
    await world.until(lambda: len(world.told("Waiting")) == 4)
    assert all("container main uses two claims" in note for note in world.told("Waiting"))
    assert world.rows() == {}


async def test_an_allocation_that_the_api_server_calls_invalid_is_an_error_that_the_queue_backs_off_from(
    world: World,
) -> None:
    world.node()
    world.claim()
    world.pod_with("share")
    await placed(world)

    def refuse(kind: Any, before: Json | None, after: Json) -> None:
        if kind.plural == "resourceclaims" and (after.get("status") or {}).get("allocation"):
            raise Refused(422, "Invalid", "status.allocation: Invalid value", fields=("status.allocation",))

    world.server.storage.admit = refuse
    with pytest.raises(InvalidError):
        await world.look_at_claim()
    assert world.claim_uid() in world.rows()
    world.server.storage.admit = lambda kind, before, after: None
    await world.look_at_claim()
    assert world.allocation() is not None
