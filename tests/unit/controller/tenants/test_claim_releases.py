"""The end of one ResourceClaim's share: released after use, withdrawn, given to the next Pod, deleted."""

from __future__ import annotations

import pytest
from sharepod.controller.apiserver.client import CLAIMS
from unit.controller.acting_world import NAMESPACE, World
from unit.controller.tenants.claim_steps import UNSCHEDULABLE, allocated, lets_go, placed, running, until_gone


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
    assert uid in world.rows(), "its agent has not confirmed the release"
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
async def test_a_claim_is_placed_for_its_next_pod_only_once_its_old_row_is_removed(world: World) -> None:
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
async def test_an_allocation_without_a_waiting_pod_is_withdrawn(world: World) -> None:
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


@pytest.mark.promise("operator-unknown-scheduler")
async def test_an_allocation_of_a_pod_whose_scheduler_does_not_exist_is_taken_back_for_a_while(world: World) -> None:
    world.node()
    world.claim()
    world.pod_with("share", schedulerName="unknown")
    await placed(world)
    await world.look_at_claim(times=2)
    assert world.allocation() is not None
    world.now += world.settings.bind_timeout
    await world.look_at_claim()
    await lets_go(world)
    assert world.allocation() is None
    memo = world.memos.of(world.claim_uid())
    assert memo.not_before == world.now + world.settings.bind_timeout


async def placed_after_refusal(world: World, why: str) -> None:
    """Place the claim of a Pod after kube-scheduler has refused the Pod for this reason."""
    world.node()
    world.claim()
    world.pod_with("share")
    refused = {**UNSCHEDULABLE, "message": why}
    world.change("pods", "user", lambda item: item.update(status={"conditions": [refused]}), status=True)
    await placed(world)
    await world.look_at_claim(times=2)


@pytest.mark.promise("operator-claim-refused-before")
async def test_a_pod_that_kube_scheduler_refuses_for_the_same_reason_as_before_its_share_gives_it_back(
    world: World,
) -> None:
    await placed_after_refusal(world, 'persistentvolumeclaim "none" not found')
    world.now += world.settings.bind_timeout - 1
    await world.look_at_claim()
    assert world.allocation() is not None
    world.now += 1
    await world.look_at_claim()
    await lets_go(world)
    assert world.allocation() is None
    memo = world.memos.of(world.claim_uid())
    assert memo.not_before == world.now + world.settings.bind_timeout


async def test_a_pod_that_kube_scheduler_refused_for_want_of_its_claim_waits_until_kube_scheduler_is_back(
    world: World,
) -> None:
    await placed_after_refusal(world, "0/1 nodes are available: 1 cannot allocate all claims.")
    world.now += world.settings.start_timeout - 1
    await world.look_at_claim(times=2)
    assert world.allocation() is not None


@pytest.mark.promise("operator-claim-refused-before")
async def test_a_pod_that_waits_for_a_claim_of_another_driver_gives_its_share_back(world: World) -> None:
    world.node()
    world.claim()
    world.claim("nic", deviceClassName="nic.example")
    world.pod_with("share", "nic")
    refused = {**UNSCHEDULABLE, "message": "0/1 nodes are available: 1 cannot allocate all claims."}
    world.change("pods", "user", lambda item: item.update(status={"conditions": [refused]}), status=True)
    await placed(world)
    await world.look_at_claim(times=2)
    assert world.allocation() is not None
    world.now += world.settings.bind_timeout
    await world.look_at_claim()
    await lets_go(world)
    assert world.allocation() is None
    assert world.memos.of(world.claim_uid()).not_before == world.now + world.settings.bind_timeout


@pytest.mark.promise("operator-unbound-node-gone")
async def test_a_pod_whose_scheduler_does_not_exist_goes_elsewhere_as_soon_as_its_node_is_deleted(world: World) -> None:
    world.node()
    world.claim()
    world.pod_with("share", schedulerName="unknown")
    await placed(world)
    await world.look_at_claim(times=2)
    world.node("node-b")
    world.delete("nodes", "node-a")
    await world.look_at_node()
    await world.look_at_claim()
    await lets_go(world)
    assert world.allocation() is None
    await until_gone(world)
    await placed(world)
    await world.look_at_claim()
    assert world.claim_uid() in world.rows("node-b")
    allocation = world.allocation()
    assert allocation is not None
    assert "node-b" in str(allocation["nodeSelector"])


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
    await world.claims.reconcile(world.claim_uid())  # the watch has not shown the next Pod yet
    assert world.allocation() is not None


async def test_a_deleted_claim_gives_its_share_back(world: World) -> None:
    world.node()
    await allocated(world)
    world.delete("pods", "user")
    world.delete("resourceclaims", "share")
    world.deallocates()  # as kube-controller-manager does, which also removes the finalizer
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


async def test_an_allocation_of_ours_without_a_row_is_taken_back_and_placed_anew(world: World) -> None:
    world.node()
    await allocated(world)
    world.change("gpunodes", "node-a", lambda item: item["spec"].update(tenants=[]))
    await lets_go(world)
    assert world.allocation() is None
    await placed(world)


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
