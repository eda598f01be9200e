"""A claim that kube-scheduler allocates, from its allocation to its end, over the API server double."""

from __future__ import annotations

import pytest
from sharepod.kube import Json
from unit.controller.acting_world import NAMESPACE, World


async def scheduled(
    world: World, name: str = "share", pod: str = "user", *, milli: int = 400, binds: bool = True
) -> str:
    """Create a claim that kube-scheduler has allocated for a Pod; return its uid. `binds`: True if it has also bound
    the Pod."""
    uid = world.claim(name, milli, deviceClassName="scheduler.sharepod.dev")
    world.pod_with(name, name=pod)
    given(world, name, milli=milli)
    if binds:
        world.binds(pod, name)
    await world.look_at_claim(name)
    return uid


def of_pool(world: World, pool: str = "scheduler") -> None:
    """Put a node into a pool: its label and its ledger."""
    world.node()
    world.change("nodes", "node-a", lambda item: item["metadata"]["labels"].update({"sharepod.dev/pool": pool}))
    world.change("gpunodes", "node-a", lambda item: item["spec"].update(pool=pool))


def given(world: World, name: str = "share", *, milli: int = 400) -> None:
    """Allocate a claim, as kube-scheduler does."""
    consumed = {"timeMilli": str(milli), "limitMilli": "1k", "memory": "1Gi", "tenants": "1"}
    result = {"request": "gpu", "driver": "scheduler.sharepod.dev", "pool": "node-a", "device": "gpu-node-a-0"}
    allocation = {"devices": {"results": [{**result, "consumedCapacity": consumed}]}}
    world.change("resourceclaims", name, lambda item: item.update(status={"allocation": allocation}), status=True)


def entries(world: World, name: str = "share") -> list[str]:
    """Return the resources of the entries in the claim's `status.reservedFor`."""
    status: Json = (world.read("resourceclaims", name) or {}).get("status") or {}
    return [item["resource"] for item in status.get("reservedFor") or ()]


@pytest.mark.promise("operator-scheduler-pool-row", "operator-scheduler-pool-hold")
async def test_a_share_is_entered_held_released_in_two_steps_and_let_go(world: World) -> None:
    of_pool(world)
    uid = await scheduled(world)
    await world.until(lambda: uid in world.rows())
    row = world.rows()[uid]
    assert (row["requestMilli"], row["limitMilli"], row["memory"], row["gpus"]) == (
        400,
        1000,
        1 << 30,
        ["GPU-node-a-0"],
    )
    await world.look_at_claim(times=2)
    assert entries(world) == ["pods", "gpunodes"]
    world.server.storage.finish_deletion(world.kind("pods"), NAMESPACE, "user")
    world.change(
        "resourceclaims",
        "share",
        lambda item: item["status"].update(reservedFor=item["status"]["reservedFor"][1:]),
        status=True,
    )  # kube-controller-manager does the same
    await world.look_at_claim()
    await world.until(lambda: world.rows()[uid]["state"] == "Releasing")
    await world.look_at_claim(times=2)
    assert entries(world) == ["gpunodes"]
    assert world.allocation() is not None
    world.report({"id": uid, "drained": True})
    await world.look_at_claim()
    await world.until(lambda: uid not in world.rows())
    await world.look_at_claim(times=2)
    assert (entries(world), world.allocation()) == ([], None)


async def test_before_its_pod_is_bound_a_claim_is_not_held(world: World) -> None:
    of_pool(world)
    uid = await scheduled(world, binds=False)
    pod = str((world.read("pods", "user") or {})["metadata"]["uid"])
    world.reserve("share", pod, "user")
    await world.look_at_claim()
    await world.until(lambda: uid in world.rows())
    await world.look_at_claim(times=2)
    assert entries(world) == ["pods"]


@pytest.mark.promise("operator-scheduler-pool-over-commit")
async def test_a_share_beyond_what_is_left_is_not_entered_and_told_and_entered_once_there_is_room(world: World) -> None:
    of_pool(world)
    first = await scheduled(world, "first", "one", milli=700)
    await world.until(lambda: first in world.rows())
    await scheduled(world, "second", "two", milli=700)
    await world.look_at_claim("second", times=3)
    assert list(world.rows()) == [first]
    assert any("0.3 of its time free, 0.7 is asked" in note for note in world.notes("ReservationLost"))


@pytest.mark.promise("operator-scheduler-pool-one-allocator")
async def test_on_a_node_of_another_pool_nothing_is_entered(world: World) -> None:
    of_pool(world, "dedicated")
    uid = await scheduled(world)
    await world.look_at_claim(times=3)
    assert uid not in world.rows()
    assert any("of pool dedicated" in note for note in world.notes("ReservationLost"))


@pytest.mark.promise("operator-scheduler-pool-device-plugin")
async def test_where_the_device_plugin_gives_the_gpus_away_nothing_is_entered_before_it_is_gone(world: World) -> None:
    of_pool(world)
    plugin = {"nvidia.com/gpu.shared": "4"}
    world.change("nodes", "node-a", lambda item: item["status"]["allocatable"].update(plugin), status=True)
    uid = await scheduled(world)
    await world.look_at_claim(times=3)
    assert uid not in world.rows()
    notes = world.notes("ReservationLost")
    assert any("advertises nvidia.com/gpu.shared; keep NVIDIA's device plugin off" in note for note in notes)
    none_left = dict.fromkeys(plugin, "0")
    world.change("nodes", "node-a", lambda item: item["status"]["allocatable"].update(none_left), status=True)
    await world.look_at_claim(times=3)
    await world.until(lambda: uid in world.rows())


@pytest.mark.promise("operator-scheduler-pool-hold")
async def test_a_share_that_is_entered_once_its_pod_is_on_the_node_ends_in_two_steps(world: World) -> None:
    """The claim is being deleted, so it has no hold. The watch of claims shows the end before the watch of Pods
    does."""
    of_pool(world)
    uid = world.claim("share", 400, deviceClassName="scheduler.sharepod.dev")
    world.pod_with("share", name="user")
    given(world)
    world.binds()
    world.change("resourceclaims", "share", lambda item: item["metadata"].update(deletionTimestamp="now"))
    await world.look_at_claim()
    await world.until(lambda: uid in world.rows())
    world.deallocates()
    world.server.storage.finish_deletion(world.kind("pods"), NAMESPACE, "user")
    await world.look_at_claim(times=2)
    await world.until(lambda: world.rows().get(uid, {}).get("state") == "Releasing")


async def test_a_pod_that_waits_for_a_gpu_that_is_gone_or_a_node_without_a_pool_is_told_what_to_do(
    world: World,
) -> None:
    of_pool(world)
    world.change("gpunodes", "node-a", lambda item: item["status"].update(gpus=[]), status=True)
    await scheduled(world)
    await world.look_at_claim(times=3)
    assert any("has no GPU gpu-node-a-0: delete the pod" in note for note in world.notes("ReservationLost"))
    world.change("nodes", "node-a", lambda item: item["metadata"]["labels"].pop("sharepod.dev/pool"))
    await world.look_at_claim(times=3)
    assert any(
        "is deleted or has lost the label sharepod.dev/pool: put it back" in note
        for note in world.notes("ReservationLost")
    )
