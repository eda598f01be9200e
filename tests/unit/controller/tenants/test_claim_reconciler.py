"""One ResourceClaim from its first reconciliation to its allocation, with an API server that refuses and loses
answers."""

from __future__ import annotations

from typing import Any

import pytest
from doubles.apiserver.errors import Refused
from sharepod.api.objects import CLAIM_FINALIZER
from sharepod.api.units import TenantId
from sharepod.kube import InvalidError, Json, UnavailableError
from unit.controller.acting_world import NAMESPACE, World
from unit.controller.tenants.claim_steps import UNSCHEDULABLE, allocated, placed, running, until_gone
from unit.controller.tenants.server_history import versions


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
        versions(world, "resourceclaims", lambda item: CLAIM_FINALIZER in item["metadata"].get("finalizers", ())),
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
    assert len(world.server.made("patch", "resourceclaims")) == writes, "an unchanged status is not written again"


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
async def test_a_claim_is_placed_on_a_node_that_its_pod_accepts(world: World) -> None:
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
    await world.claims.reconcile(world.claim_uid())  # the watch has not shown the operator's own writes yet
    await world.claims.reconcile(world.claim_uid())
    await world.look_at_claim(times=2)
    assert world.claim_uid() in world.rows()
    assert world.allocation() is not None


@pytest.mark.promise("operator-claim-crash")
async def test_a_successor_finds_the_row_by_the_claims_uid_and_goes_on(world: World) -> None:
    world.node()
    world.claim()
    world.pod_with("share")
    await placed(world)
    world.memos.clear()
    world.state.seen_claims.forget_unused()  # as in a new process, which does not know the earlier decisions
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
    world.state.seen_claims.forget_unused()
    await world.look_at_claim(times=2)
    assert world.rows()[world.claim_uid()]["state"] == "Reserved"
    assert world.allocation() is not None


async def test_a_row_of_a_claim_that_no_list_has_shown_yet_stays(world: World) -> None:
    world.node()
    await running(world)
    seen = world.state.seen_claims
    seen.drop_claim(world.claim_uid())
    assert world.state.is_claim(world.claim_uid()), "its row names it"
    # a GET of a kind that is not served returns 404, as for a deleted claim
    world.server.unserved.add("resourceclaims")
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
    await world.until(lambda: len(world.notes("Invalid")) == 2)
    assert all("allocationMode" in note and "ExactCount" in note for note in world.notes("Invalid"))
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
    await world.until(lambda: len(world.notes("NoRoom")) == 2)
    assert any("timeMilli 300 would fit now" in note for note in world.notes("NoRoom"))
    assert not any("spec.gpu" in note for note in world.notes("NoRoom"))
    world.delete("pods", "one")
    await world.look_at_claim("first", times=2)
    await placed(world)
    await world.look_at_claim(times=2)
    await world.until(lambda: len(world.notes("Placed")) >= 1)


@pytest.mark.promise("operator-claim-foreign")
async def test_a_foreign_allocation_gets_no_row_and_its_owner_an_event(world: World) -> None:
    world.node()
    world.claim()
    world.pod_with("share")
    result = {"request": "gpu", "driver": "nic.example", "pool": "p", "device": "d"}
    foreign = {"devices": {"results": [result]}, "allocationTimestamp": "2026-01-01T00:00:00Z"}
    world.change("resourceclaims", "share", lambda item: item.update(status={"allocation": foreign}), status=True)
    await world.look_at_claim(times=2)
    assert world.rows() == {}
    assert world.allocation() == foreign
    await world.until(lambda: bool(world.notes("ForeignAllocation")))


@pytest.mark.promise("operator-claim-node-name")
async def test_a_pod_with_node_name_gets_no_share_and_an_event_with_the_remedy(world: World) -> None:
    world.node()
    world.claim()
    world.pod_with("share", nodeName="node-a")
    await world.look_at_claim(times=2)
    assert world.rows() == {}
    assert world.allocation() is None
    await world.until(lambda: len(world.notes("ReservationLost")) == 2)
    of_claim, of_pod = sorted(world.notes("ReservationLost"), key=len)
    assert "without spec.nodeName" in of_claim
    assert of_pod == f"claim share: {of_claim}"


@pytest.mark.promise("operator-claim-resize")
async def test_the_annotation_lowers_and_raises_the_share_in_place(world: World) -> None:
    world.node()
    await running(world)
    uid = world.claim_uid()
    memory = world.rows()[uid]["memory"]
    for text, milli in (("0.2", 200), ("0.4", 400)):
        annotations = {"sharepod.dev/gpu-request": text}
        world.change("resourceclaims", "share", lambda item, a=annotations: item["metadata"].update(annotations=a))  # type: ignore[misc]
        await world.look_at_claim()
        await world.until(lambda milli=milli: world.rows()[uid]["requestMilli"] == milli)  # type: ignore[misc]
        await world.look_at_claim()
        (shown,) = (world.read("resourceclaims", "share") or {})["status"]["devices"]
        assert shown["data"]["requestMilli"] == milli
    assert world.rows()[uid]["memory"] == memory, "time alone"


@pytest.mark.promise("operator-claim-resize-refused")
@pytest.mark.parametrize("text", ["0.5", "a lot"])
async def test_an_annotation_that_cannot_be_meant_keeps_the_share_and_is_shown(world: World, text: str) -> None:
    world.node()
    await running(world)

    def conditions() -> Json:
        (shown,) = (world.read("resourceclaims", "share") or {})["status"]["devices"]
        assert shown["data"]["requestMilli"] == 400
        return {item["type"]: item for item in shown["conditions"]}

    for asked, shows in (({"sharepod.dev/gpu-request": text}, True), ({}, False)):
        world.change(
            "resourceclaims",
            "share",
            lambda item, a=asked: item["metadata"].update(annotations=a),  # type: ignore[misc]
        )
        await world.look_at_claim(times=2)
        assert world.rows()[world.claim_uid()]["requestMilli"] == 400
        assert ("Resized" in conditions()) is shows
        if shows:
            assert (conditions()["Resized"]["status"], conditions()["Resized"]["reason"]) == ("False", "Invalid")
            assert "gpu-request" in conditions()["Resized"]["message"]


@pytest.mark.promise("operator-claim-resize-refused")
async def test_a_raise_without_room_keeps_the_share_and_reports_it(world: World) -> None:
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


@pytest.mark.promise("operator-claim-attachable")
async def test_a_claim_is_placed_only_on_nodes_that_can_attach_it(world: World) -> None:
    world.node("node-a")
    broken = {"type": "CDIDevices", "status": "False", "reason": "DevicesMissing", "message": "install nvidia-ctk"}
    world.change("gpunodes", "node-a", lambda item: item["status"].update(conditions=[broken]), status=True)
    world.claim()
    world.pod_with("share")
    await world.look_at_claim()
    await world.until_answered(world.claim_uid())
    await world.look_at_claim()
    await world.until(lambda: bool(world.notes("NoRoom")))
    assert "install nvidia-ctk" in world.notes("NoRoom")[0]
    world.node("old")
    world.change("gpunodes", "old", lambda item: item["status"].pop("conditions"), status=True)
    world.node("node-b")
    await placed(world)
    assert world.claim_uid() in world.rows("node-b")


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
