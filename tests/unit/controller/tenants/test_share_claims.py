"""A SharePod whose Pod's GPUs are attached by a claim: creation and allocation of the claim, and faults."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress

import pytest
from doubles.apiserver.errors import Refused
from sharepod.api.claims.share_claims import build_claim
from sharepod.api.objects import CLAIM_FINALIZER
from sharepod.controller.apiserver.client import NotLeadingError
from sharepod.controller.tenants.share_claim_writer import NOT_SERVED
from sharepod.kube import Json, UnavailableError
from unit.controller.acting_world import NAMESPACE, World, acting, acting_world
from unit.controller.tenants.server_history import gates, versions


@pytest.fixture
async def world() -> AsyncIterator[World]:
    async with acting_world(attach="claims") as made:
        yield made


def claims(world: World) -> list[Json]:
    return world.server.storage.select(world.kind("resourceclaims"), "")


def the_claim(world: World) -> Json:
    (found,) = claims(world)
    return found


@pytest.mark.promise("operator-share-claim-order")
async def test_the_claim_is_made_after_the_pod_allocated_after_the_row_and_before_the_gate_opens(world: World) -> None:
    world.node(gpus=2)
    await world.placed(request=0.3, gpu={"count": 2})
    pod, claim = world.read("pods") or {}, the_claim(world)
    assert pod["spec"]["resourceClaims"] == [{"name": "sharepod-gpu", "resourceClaimName": claim["metadata"]["name"]}]
    (owner,) = claim["metadata"]["ownerReferences"]
    assert (owner["kind"], owner["uid"], owner["controller"]) == ("Pod", pod["metadata"]["uid"], True)
    assert claim["metadata"]["finalizers"] == [CLAIM_FINALIZER]
    row = world.rows()[world.tenant]
    assert row["claim"] == {"name": claim["metadata"]["name"], "uid": claim["metadata"]["uid"]}
    assert (row["podUID"], row["podName"]) == (pod["metadata"]["uid"], "one")
    assert not claim.get("status"), "no allocation before the row"
    await world.look()
    results = the_claim(world)["status"]["allocation"]["devices"]["results"]
    assert [item["device"] for item in results] == [uuid.lower() for uuid in row["gpus"]]
    assert gates(world) == []
    order = [
        versions(world, "pods", lambda item: True)[0],
        versions(world, "resourceclaims", lambda item: True)[0],
        versions(world, "gpunodes", lambda item: item["spec"].get("tenants"))[0],
        versions(world, "resourceclaims", lambda item: (item.get("status") or {}).get("allocation"))[0],
        versions(world, "pods", lambda item: not item["spec"].get("schedulingGates"))[0],
    ]
    assert order == sorted(order)


@pytest.mark.promise("operator-share-claim-writes")
async def test_a_life_to_running_takes_two_writes_more_and_no_read(world: World) -> None:
    world.node()
    await world.running(started="2026-01-01T00:00:00Z")
    await world.until(lambda: len(world.notes("Started")) == 1)
    writes = [(call.verb, call.kind.plural) for call in world.server.calls if call.verb not in ("list", "watch", "get")]
    writes.remove(("create", "events"))
    assert writes == [
        ("create", "pods"),
        ("create", "resourceclaims"),
        ("patch", "gpunodes"),
        ("patch", "resourceclaims"),
        ("patch", "pods"),
        ("patch", "sharepods"),
    ]
    assert world.server.made("get", "pods") == world.server.made("get", "resourceclaims") == []


async def test_only_a_node_that_attaches_by_claims_takes_it(world: World) -> None:
    world.node("node-a")
    missing = {
        "type": "CDIDevices",
        "status": "False",
        "reason": "DevicesMissing",
        "message": "no CDI device for GPU 0",
    }
    world.change("gpunodes", "node-a", lambda item: item["status"].update(conditions=[missing]), status=True)
    await world.gated()
    world.place()
    await world.until_answered(world.tenant)
    await world.look()
    assert "no CDI device for GPU 0" in world.condition("Placed")["message"]
    world.node("node-b")
    await world.look()
    await world.until(lambda: world.tenant in world.rows("node-b"))


@pytest.mark.promise("operator-share-claim-again")
async def test_a_deleted_claim_is_created_again_and_gets_the_row(world: World) -> None:
    world.node()
    await world.placed()
    former = the_claim(world)["metadata"]
    world.delete("resourceclaims", former["name"])
    world.server.storage.finish_deletion(world.kind("resourceclaims"), NAMESPACE, former["name"])
    for _ in range(6):
        await world.look()
    claim = the_claim(world)
    assert claim["metadata"]["uid"] != former["uid"]
    await world.until(lambda: (world.rows().get(world.tenant) or {}).get("claim", {}).get("uid") != former["uid"])
    for _ in range(4):
        await world.look()
    assert world.rows()[world.tenant]["claim"]["uid"] == claim["metadata"]["uid"]
    assert gates(world) == []
    assert len(world.server.made("create", "pods")) == 1


@pytest.mark.promise("operator-share-claim-again")
@pytest.mark.parametrize("what", ["deletes it", "takes its allocation"])
async def test_a_pod_that_loses_its_claim_before_binding_is_withdrawn(world: World, what: str) -> None:
    denied: list[str] = []
    world.tenants.share_claims.on_denied = denied.append
    world.node()
    await world.placed()
    await world.look()
    former, uid = the_claim(world)["metadata"], (world.read("pods") or {})["metadata"]["uid"]
    if what == "deletes it":
        world.delete("resourceclaims", former["name"])
    else:
        world.deallocates(former["name"])
    for _ in range(6):
        await world.look()
        await asyncio.sleep(0.01)
    assert (world.read("pods") or {}).get("metadata", {}).get("uid") != uid
    assert any(former["name"] in note for note in world.notes("PodTakenBack"))
    assert denied == [], "a right on a namespace's claims proves no right in the cluster"
    world.now += world.settings.bind_timeout
    world.renew()
    await world.look()
    world.place()
    await world.until(lambda: world.tenant in world.rows())
    await world.look()
    assert gates(world) == []
    assert world.rows()[world.tenant]["claim"]["uid"] != former["uid"]


async def test_a_claim_that_is_being_deleted_is_waited_for_without_a_share(world: World) -> None:
    world.node()
    await world.placed()
    world.delete("resourceclaims", the_claim(world)["metadata"]["name"])  # the finalizer of the claim keeps it
    await world.look()
    await world.until(lambda: world.tenant not in world.rows())
    await world.look()
    assert gates(world) == ["sharepod.dev/share"]
    assert len(world.server.made("create", "resourceclaims")) == 1
    assert world.rows() == {}


@pytest.mark.promise("operator-share-claim-crash")
async def test_a_claim_whose_making_was_never_answered_is_found_made(world: World) -> None:
    world.node()
    world.server.fail("create", "resourceclaims", refusal=Refused(503, "ServiceUnavailable", "no"), times=9)
    with pytest.raises(UnavailableError):
        await world.gated()
    made = build_claim(
        (world.read("pods") or {})["spec"]["resourceClaims"][0]["resourceClaimName"],
        NAMESPACE,
        "one",
        (world.read("pods") or {})["metadata"]["uid"],
        1,
    )
    world.server.storage.create(world.kind("resourceclaims"), NAMESPACE, made)
    world.server.faults.clear()
    await world.tenants.reconcile(world.tenant)
    world.place()
    await world.until(lambda: world.tenant in world.rows())
    await world.look()
    assert gates(world) == []
    assert len(claims(world)) == 1


async def test_a_claim_of_that_name_that_is_anothers_is_named_and_takes_no_share(world: World) -> None:
    world.node()
    world.server.fail("create", "resourceclaims", refusal=Refused(503, "ServiceUnavailable", "no"), times=9)
    with pytest.raises(UnavailableError):
        await world.gated()
    name = (world.read("pods") or {})["spec"]["resourceClaims"][0]["resourceClaimName"]
    stranger = build_claim(name, NAMESPACE, "another", "another", 1)
    world.server.storage.create(world.kind("resourceclaims"), NAMESPACE, stranger)
    world.server.faults.clear()
    world.place()
    await world.look()
    assert f"the ResourceClaim {name}" in world.condition("PodReady")["message"]
    assert "delete it" in world.condition("PodReady")["message"]
    assert world.rows() == {}


@pytest.mark.promise("operator-share-claim-denied")
@pytest.mark.parametrize("verb", ["create", "patch"])
async def test_a_claim_that_is_denied_costs_its_sharepod_alone_and_is_tried_again(world: World, verb: str) -> None:
    denied: list[str] = []
    world.tenants.share_claims.on_denied = denied.append
    fault = world.server.fail(
        verb, "resourceclaims", refusal=Refused(403, "Forbidden", "exceeded quota: devices"), times=99
    )
    world.node()
    if verb == "create":
        await world.gated()
        world.place()
    else:
        await world.placed()
        await world.look()
    await world.look()
    assert world.condition("PodReady")["reason"] == "PodForbidden"
    assert "exceeded quota" in world.condition("PodReady")["message"]
    await world.until(lambda: world.tenant not in world.rows())
    assert gates(world) == ["sharepod.dev/share"]
    assert bool(denied) is (verb == "patch"), "a refused creation proves nothing about allocations"
    fault.times = 0
    world.now += 60
    world.renew()
    await world.look()
    await world.look()
    await world.until(lambda: world.tenant in world.rows())
    await world.look()
    assert gates(world) == []


async def test_a_cluster_without_claims_is_reported_with_the_remedy(world: World) -> None:
    refusal = Refused(404, "NotFound", "the server could not find the requested resource")
    world.server.fail("create", "resourceclaims", refusal=refusal, times=99)
    world.node()
    await world.gated()
    await world.look()
    assert NOT_SERVED in world.condition("PodReady")["message"]
    assert world.rows() == {}


@pytest.mark.promise("operator-share-claim-place")
async def test_an_allocation_for_a_place_that_was_lost_is_taken_back_before_the_next(world: World) -> None:
    world.node()
    await world.placed()
    fault = world.server.fail("patch", "pods", refusal=Refused(403, "Forbidden", "no"), times=99)
    await world.look()
    assert the_claim(world)["status"]["allocation"]
    await world.look()
    await world.until(lambda: world.tenant not in world.rows())
    world.change("gpunodes", "node-a", lambda item: item["status"]["gpus"][0].update(shareable=False), status=True)
    world.node("node-b")
    fault.times = 0
    world.now += 60
    world.renew("node-b")
    world.renew()
    await world.look()
    assert "allocation" not in the_claim(world).get("status", {})
    await world.look()
    await world.until(lambda: world.tenant in world.rows("node-b"))
    await world.look()
    (result,) = the_claim(world)["status"]["allocation"]["devices"]["results"]
    assert result["pool"] == "node-b"
    assert gates(world) == []


@pytest.mark.promise("operator-share-claim-crash")
@pytest.mark.parametrize("writes", range(7))
async def test_an_operator_that_dies_after_any_write_is_followed_by_one_that_goes_on(writes: int) -> None:
    async with acting_world(attach="claims") as first:
        first.node()
        first.writes_left = writes
        first.sharepod()
        for _ in range(6):
            with suppress(NotLeadingError):
                await first.look()
            await asyncio.sleep(0.01)  # the ledger writer runs in this time
        async with acting(first.server, first, attach="claims") as second:
            for _ in range(30):
                second.renew()
                await second.look()
                if gates(second) == []:
                    break
                second.now += 10
                await asyncio.sleep(0.01)
            assert gates(second) == []
            claim = the_claim(second)
            row = second.rows()[second.tenant]
            assert row["claim"]["uid"] == claim["metadata"]["uid"]
            assert claim["status"]["allocation"]["devices"]["results"][0]["device"] == row["gpus"][0].lower()
            assert len(second.server.storage.select(second.kind("pods"), "")) == 1


@pytest.mark.parametrize(
    ("message", "own", "reported"),
    [
        ("0/1 nodes are available: 1 Insufficient cpu.", [], False),
        ("0/1 nodes: 1 cannot allocate all claims.", [], True),
        ("0/1 nodes: 1 cannot allocate all claims.", [{"name": "nic", "resourceClaimName": "nic"}], False),
    ],
)
async def test_kube_scheduler_that_does_not_take_an_allocated_claim_is_told_of(
    world: World, message: str, own: list[Json], reported: bool
) -> None:
    """No report if the Pod has other claims, because kube-scheduler's message may be about them."""
    denied: list[str] = []
    world.tenants.share_claims.on_denied = denied.append
    world.node()
    await world.placed(**({"resourceClaims": own} if own else {}))
    await world.look()
    refused = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": message}
    world.change("pods", "one", lambda item: item.update(status={"conditions": [refused]}), status=True)
    await world.look()
    world.now += world.settings.bind_timeout
    await world.look()
    assert world.read("pods") is None or "deletionTimestamp" in (world.read("pods") or {})["metadata"]
    assert bool(denied) is reported


async def test_without_the_setting_a_pod_has_a_volume_and_no_claim() -> None:
    async with acting_world() as world:
        world.node()
        await world.placed()
        assert "resourceClaims" not in (world.read("pods") or {})["spec"]
        assert claims(world) == []
        assert "claim" not in world.rows()[world.tenant]
