"""One tenant from its first look to its last, over an API server that answers late, refuses, and loses answers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any

import pytest
from doubles.apiserver.errors import Refused, not_found
from doubles.apiserver.kinds import Kind
from sharepod.api.objects import TAKEN_BACK
from sharepod.controller.apiserver.client import GPUNODES, NotLeadingError
from sharepod.kube import ForbiddenError, Json, UnavailableError
from unit.controller.acting_world import NAMESPACE, World, acting, acting_world

UNSCHEDULABLE = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/1 nodes fit"}


@pytest.fixture
async def world() -> AsyncIterator[World]:
    async with acting_world() as made:
        yield made


_POLICY = "pods \"one\" is forbidden: ValidatingAdmissionPolicy 'p' with binding 'b' denied request: no"
_WEBHOOK = 'admission webhook "w.example.com" denied the request: no'
_SILENT = 'Internal error occurred: failed calling webhook "w.example.com": connection refused'
DENIALS = [
    Refused(422, "Invalid", _POLICY),
    Refused(401, "Unauthorized", _POLICY),
    Refused(413, "RequestEntityTooLarge", _POLICY),
    Refused(400, "BadRequest", _WEBHOOK),
    Refused(422, "Invalid", _WEBHOOK, fields=("spec",)),
    Refused(500, "InternalError", _SILENT),
]
"""Ways in which policies and webhooks deny a Pod."""


def versions(world: World, plural: str, what: Any) -> list[int]:
    """The versions at which `what` first held of each object of a kind, in order."""
    return [
        change.version
        for change in world.server.storage.history
        if change.kind.plural == plural and change.after is not None and what(change.after)
    ]


def gates(world: World) -> list[str]:
    """The scheduling gates of the Pod `one`."""
    return [gate["name"] for gate in (world.read("pods") or {})["spec"].get("schedulingGates", ())]


async def test_a_sharepod_gets_a_gated_pod_then_a_row_then_an_open_gate_then_a_status(world: World) -> None:
    world.node()
    await world.gated()
    made = world.read("pods")
    assert made is not None
    assert gates(world) == ["sharepod.dev/share"]
    (created,) = world.server.made("create", "pods")
    assert created.query == {"fieldValidation": "Strict"}
    assert world.rows() == {}, "the pod comes first"
    world.place()
    await world.until(lambda: world.tenant in world.rows())
    row = world.rows()[world.tenant]
    assert row["podUID"] == made["metadata"]["uid"]
    assert gates(world) == ["sharepod.dev/share"], "the gate opens only once the row is written"
    assert world.status() == {}, "nothing is shown before the ledger has it"
    await world.look()
    opened = world.read("pods")
    assert opened is not None
    assert gates(world) == []
    assert opened["metadata"]["annotations"]["sharepod.dev/gpus"] == ",".join(row["gpus"])
    assert (world.status()["phase"], world.status()["podUID"]) == ("Placed", made["metadata"]["uid"])
    assert world.condition("Placed")["reason"] == "Reserved"
    world.pod_phase("Running", conditions=[{"type": "Ready", "status": "True"}])
    await world.look()
    assert world.status()["phase"] == "Running"
    assert world.condition("PodReady")["status"] == "True"


@pytest.mark.promise("operator-five-writes")
async def test_a_life_to_running_takes_five_writes_an_event_and_no_read(world: World) -> None:
    world.node()
    await world.running(started="2026-01-01T00:00:00Z")
    await world.until(lambda: len(world.told("Started")) == 1)
    writes = [(call.verb, call.kind.plural) for call in world.server.calls if call.verb not in ("list", "watch", "get")]
    writes.remove(("create", "events"))
    assert writes == [
        ("create", "pods"),
        ("patch", "gpunodes"),
        ("patch", "pods"),
        ("patch", "sharepods"),
        ("patch", "sharepods"),
    ]
    assert world.server.made("get", "pods") == []


async def test_a_pod_that_waits_for_room_says_so_and_is_made_again_if_somebody_deletes_it(world: World) -> None:
    await world.gated()
    world.place()
    while world.tenant not in world.answered:
        await world.look()
    await world.look()
    assert (world.status()["phase"], world.status()["podName"]) == ("Pending", "one")
    assert "podUID" not in world.status(), "it has not run"
    assert world.condition("PodReady")["reason"] == "SchedulingGated"
    former = (world.read("pods") or {})["metadata"]["uid"]
    world.delete("pods")
    await world.look()
    await world.look()
    assert (world.read("pods") or {})["metadata"]["uid"] != former
    assert world.status()["phase"] == "Pending"


@pytest.mark.promise("operator-deletion-calls")
async def test_a_pod_is_deleted_once_while_its_watch_has_not_shown_it(world: World) -> None:
    world.node()
    await world.running()
    world.delete("sharepods")
    await world.look()
    await world.tenants.reconcile(world.tenant)
    assert len(world.server.made("delete", "pods")) == 1
    assert world.looks_again(within=10)
    world.now += 10
    await world.tenants.reconcile(world.tenant)
    assert len(world.server.made("delete", "pods")) == 2, "the watch has shown nothing for long: asked for again"


@pytest.mark.promise("operator-pod-first")
async def test_placement_goes_by_the_pod_as_admission_made_it(world: World) -> None:
    world.node("node-a")
    world.node("node-b")
    await world.gated()
    world.change("pods", "one", lambda item: item["spec"].update(nodeSelector={"kubernetes.io/hostname": "node-b"}))
    await world.look()
    world.place()
    await world.until(lambda: world.tenant in world.rows("node-b"))


async def test_a_gate_that_somebody_opened_is_not_opened_again(world: World) -> None:
    world.node()
    await world.placed()
    await world.relist()
    world.change("pods", "one", lambda item: item["spec"].pop("schedulingGates"))
    await world.tenants.reconcile(world.tenant)
    assert world.looks_again(1.0)
    pod = world.state.pod_of(world.tenant)
    assert pod is not None
    assert not pod.waits_for_share, "the refused patch is followed by a live read"
    assert (world.read("pods") or {})["metadata"]["annotations"]["sharepod.dev/gpus"] == "void"


async def test_what_the_answer_to_an_opened_gate_shows_besides_is_looked_at(world: World) -> None:
    world.node()
    await world.placed()
    await world.relist()
    world.change("pods", "one", lambda item: item.update(status={"phase": "Failed", "reason": "Shutdown"}), status=True)
    await world.tenants.reconcile(world.tenant)
    assert gates(world) == []
    assert world.looks_again(0)
    await world.look()
    assert world.status()["phase"] == "Failed"


async def test_a_pod_whose_row_is_on_record_is_not_made_again(world: World) -> None:
    world.node()
    await world.placed()
    world.delete("pods")
    await world.look()
    assert (world.status()["phase"], world.condition("PodReady")["reason"]) == ("Failed", "PodLost")


async def test_looking_again_changes_nothing(world: World) -> None:
    world.node()
    await world.running()
    before = world.server.storage.version
    for _ in range(3):
        await world.look()
    assert world.server.storage.version == before


async def test_an_end_is_on_record_before_the_release_begins(world: World) -> None:
    world.node()
    await world.running()
    world.pod_phase("Succeeded")
    await world.look()
    assert world.status()["phase"] == "Succeeded"
    assert world.rows()[world.tenant]["state"] == "Reserved"
    await world.look()
    await world.until(lambda: world.rows()[world.tenant]["state"] == "Releasing")
    ended = versions(world, "sharepods", lambda item: (item.get("status") or {}).get("phase") == "Succeeded")
    released = versions(
        world, "gpunodes", lambda item: any(row["state"] == "Releasing" for row in item["spec"].get("tenants", ()))
    )
    assert ended[0] < released[0]


@pytest.mark.promise("operator-released-means-gone")
async def test_a_share_is_given_away_once_the_agent_has_confirmed_that_nothing_is_left(world: World) -> None:
    world.node()
    await world.running()
    world.pod_phase("Succeeded")
    await world.look()
    await world.look()
    await world.until(lambda: world.rows()[world.tenant]["state"] == "Releasing")
    await world.look()
    assert world.tenant in world.rows(), "its agent has not said anything yet"
    world.report({"id": world.tenant, "drained": True})
    await world.look()
    await world.until(lambda: world.tenant not in world.rows())
    assert world.status()["phase"] == "Succeeded"
    world.delete("sharepods")
    world.delete("pods")
    await world.look()
    assert world.memo.status_written is None, "nothing is remembered of a tenant that is gone"


async def test_a_report_of_an_earlier_ledger_confirms_nothing(world: World) -> None:
    world.node()
    await world.running()
    world.report({"id": world.tenant, "drained": True})
    world.pod_phase("Failed", message="boom")
    await world.look()
    await world.look()
    await world.until(lambda: world.rows()[world.tenant]["state"] == "Releasing")
    for _ in range(3):
        await world.look()
    assert world.tenant in world.rows()
    assert world.condition("PodReady")["message"] == "boom"


async def test_a_deleted_sharepod_ends_its_pod_first_then_its_share(world: World) -> None:
    world.node()
    await world.running()
    uid = (world.read("pods") or {})["metadata"]["uid"]
    world.delete("sharepods")
    await world.look()
    (deleted,) = world.server.made("delete", "pods")
    assert deleted.body["preconditions"] == {"uid": uid}
    await world.look()
    assert world.rows()[world.tenant]["state"] == "Reserved", "its pod is still there"
    world.pod_gone()
    await world.look()
    await world.until(lambda: world.rows()[world.tenant]["state"] == "Releasing")


async def test_a_release_does_not_begin_under_a_pod_that_only_the_api_server_knows(world: World) -> None:
    world.node()
    await world.running()
    world.delete("sharepods")
    await world.relist()
    world.loses_sight_of_the_pod()
    await world.tenants.reconcile(world.tenant)
    assert world.looks_again(1.0)
    assert world.rows()[world.tenant]["state"] == "Reserved"
    assert world.state.pod_of(world.tenant) is not None, "the live read has brought it"


async def test_a_sharepod_that_only_a_watch_has_lost_is_not_gone(world: World) -> None:
    world.node()
    await world.running()
    world.state.drop_sharepod(world.tenant, int((world.read("sharepods") or {})["metadata"]["resourceVersion"]))
    await world.tenants.reconcile(world.tenant)
    assert world.state.sharepods.get(world.tenant) is not None
    assert world.server.made("delete", "pods") == []


async def test_the_end_of_a_sharepod_is_confirmed_once_and_that_of_its_pod_was_seen(world: World) -> None:
    """A deletion takes five looks: each had asked for the SharePod again."""
    world.node()
    await world.running()
    world.delete("sharepods")
    before = len(world.server.calls)
    for _ in range(3):
        await world.look()
    world.pod_gone()
    await world.look()
    await world.until(lambda: world.rows()[world.tenant]["state"] == "Releasing")
    for drained in (False, True):
        world.report({"id": world.tenant, "drained": drained})
        await world.look()
    await world.until(lambda: world.tenant not in world.rows())
    made = [f"{call.verb} {call.kind.plural}" for call in world.server.calls[before:] if call.verb != "list"]
    assert sorted(made) == ["delete pods", "get sharepods", "patch gpunodes", "patch gpunodes"]


async def test_a_pod_that_has_left_the_watch_but_was_not_deleted_is_asked_for(world: World) -> None:
    """A watch says "deleted" of a Pod that only lost its label, too."""
    world.node()
    await world.running()
    world.delete("sharepods")
    world.state.drop_sharepod(world.tenant, world.server.storage.version, deleted=True)
    pod = world.read("pods") or {}
    world.state.drop_pod(pod["metadata"]["uid"], pod, int(pod["metadata"]["resourceVersion"]))
    await world.tenants.reconcile(world.tenant)
    assert len(world.server.made("get", "pods")) == 1
    assert world.rows()[world.tenant]["state"] == "Reserved", "it is there"


@pytest.mark.promise("operator-restored-backup")
async def test_a_pod_of_a_history_that_no_longer_exists_is_not_lost_but_made_again(world: World) -> None:
    world.node()
    world.sharepod()
    backup = world.server.storage.backup()
    await world.look()
    await world.until(lambda: world.tenant in world.rows())
    await world.look()
    world.pod_phase("Running", node="node-a")
    await world.look()
    assert world.status()["phase"] == "Running"
    world.server.storage.restore(backup)
    world.memos.clear()
    await world.relist()
    assert world.tenant not in world.state._pods_of, "nothing of that Pod is left"
    await world.look()
    await world.until(lambda: world.tenant in world.rows())
    await world.look()
    assert world.status()["phase"] == "Placed"
    assert world.read("pods") is not None


async def test_a_deletion_that_the_watch_has_shown_is_not_asked_for(world: World) -> None:
    world.node()
    await world.running()
    world.delete("sharepods")
    world.state.drop_sharepod(world.tenant, world.server.storage.version, deleted=True)
    await world.tenants.reconcile(world.tenant)
    assert world.server.made("get", "sharepods") == []
    assert len(world.server.made("delete", "pods")) == 1


async def test_a_pod_is_ended_whose_sharepod_was_replaced_by_another_of_that_name(world: World) -> None:
    world.node()
    await world.running()
    former = world.tenant
    world.delete("sharepods")
    world.sharepod()
    assert world.tenant != former
    await world.look(former)
    assert len(world.server.made("delete", "pods")) == 1
    world.pod_gone()
    await world.look(former)
    await world.until(lambda: world.rows()[former]["state"] == "Releasing")


async def test_a_row_without_any_sharepod_or_pod_is_released(world: World) -> None:
    world.node()
    row = {
        "id": "stray",
        "namespace": NAMESPACE,
        "podName": "stray",
        "state": "Reserved",
        "gpus": ["GPU-node-a-0"],
        "requestMilli": 100,
        "limitMilli": 100,
        "memory": 1 << 30,
    }
    world.change("gpunodes", "node-a", lambda item: item["spec"].update(tenants=[row]))
    await world.look("stray")
    await world.until(lambda: world.rows()["stray"]["state"] == "Releasing")


async def test_a_pod_that_was_created_with_its_answer_lost_is_adopted(world: World) -> None:
    world.node()
    world.sharepod()
    world.server.fail("create", "pods", lose_answer=True)
    with pytest.raises(UnavailableError):
        await world.look()
    assert "podUID" not in world.status()
    await world.look()
    await world.until(lambda: world.tenant in world.rows())
    await world.look()
    assert world.status()["podUID"] == (world.read("pods") or {})["metadata"]["uid"]
    assert len(world.server.storage.select(world.kind("pods"), "")) == 1


@pytest.mark.promise("operator-crash")
async def test_a_pod_of_another_operator_is_adopted_not_created_twice(world: World) -> None:
    await world.gated()
    memo = world.memo
    world.state.drop_pod((world.read("pods") or {})["metadata"]["uid"])
    world.state.pods._ended.clear()  # the end was never seen
    world.state.lost_pods.clear()
    await world.tenants.reconcile(world.tenant)
    assert len(world.server.made("create", "pods")) == 2
    assert len(world.server.storage.select(world.kind("pods"), "")) == 1
    assert world.state.pod_of(world.tenant) is not None
    assert memo.blocked is None


async def test_a_name_that_is_taken_is_said_and_takes_no_share(world: World) -> None:
    world.node()
    stranger = {"metadata": {"name": "one"}, "spec": {"containers": [{"name": "x"}]}}
    world.server.storage.create(world.kind("pods"), NAMESPACE, stranger)
    await world.gated()
    assert world.condition("PodReady")["reason"] == "PodNameTaken"
    assert "see condition PodReady" in world.condition("Placed")["message"]
    assert world.looks_again(2.0)
    await world.look()
    assert len(world.server.made("create", "pods")) == 1, "not tried again before its time"
    for pause in (2, 4, 8, 16, 32, 60, 60):
        assert world.memo.blocked is not None
        assert world.memo.blocked.until == world.now + pause
        world.now += pause
        world.renew()
        await world.look()
    assert world.rows() == {}
    assert world.tenant not in world.loop.waiting()
    world.delete("pods")
    world.now += 60
    world.renew()
    await world.look()
    assert gates(world) == ["sharepod.dev/share"]
    assert world.memo.blocked is None


async def test_a_former_pod_of_the_name_is_waited_for(world: World) -> None:
    world.node()
    former = {"metadata": {"name": "one"}, "spec": {"containers": [{"name": "x"}], "nodeName": "node-a"}}
    world.server.storage.create(world.kind("pods"), NAMESPACE, former)
    world.delete("pods")
    await world.gated()
    assert world.condition("PodReady")["reason"] == "PodTerminating"
    assert world.memo.blocked is not None
    assert world.memo.blocked.until == world.now + 1.0, "it will be gone soon"
    world.pod_gone()
    world.now += 1
    await world.look()
    assert gates(world) == ["sharepod.dev/share"]


async def test_a_former_pod_that_went_meanwhile_is_no_obstacle(world: World) -> None:
    world.node()
    world.sharepod()
    world.server.fail("create", "pods", refusal=Refused(409, "AlreadyExists", 'pods "one" already exists'))
    await world.look()
    assert world.memo.blocked is None
    await world.look()
    assert world.read("pods") is not None


@pytest.mark.promise("operator-pod-first", "operator-forbidden")
@pytest.mark.parametrize(
    "refusal", [Refused(403, "Forbidden", "exceeded quota: gpu"), not_found("namespaces", "n"), *DENIALS]
)
async def test_a_pod_that_is_forbidden_is_tried_again_until_it_is_not(world: World, refusal: Refused) -> None:
    world.node()
    world.sharepod()
    world.server.fail("create", "pods", refusal=refusal)
    await world.look()
    assert world.condition("PodReady")["reason"] == "PodForbidden"
    assert refusal.message in world.condition("PodReady")["message"]
    await world.until(lambda: bool(world.told("PodForbidden")))
    assert world.rows() == {}, "no share is held meanwhile"
    world.now += 2
    await world.look()
    assert world.read("pods") is not None
    assert world.memo.blocked is None


@pytest.mark.promise("operator-forbidden-share")
@pytest.mark.parametrize(
    "refusal",
    [
        Refused(403, "Forbidden", "pods may not choose nodes"),
        Refused(422, "Invalid", "metadata.annotations: Too long", fields=("metadata.annotations",)),
        *DENIALS,
    ],
)
async def test_a_share_that_the_pod_may_not_have_goes_back_and_is_tried_again(world: World, refusal: Refused) -> None:
    world.node()
    await world.placed(request=0.6)
    world.server.fail("patch", "pods", refusal=refusal)
    await world.look()
    assert gates(world) == ["sharepod.dev/share"]
    assert world.condition("PodReady")["reason"] == world.condition("Ready")["reason"] == "PodForbidden"
    assert refusal.message in world.condition("PodReady")["message"]
    await world.until(lambda: bool(world.told("PodForbidden")))
    await world.look()
    await world.until(lambda: not world.rows())
    other = world.sharepod("other", request=0.6)
    await world.look(other)
    await world.until(lambda: other in world.rows())
    await world.look()
    assert world.tenant not in world.loop.waiting(), "no share is asked for before its time"
    assert "see condition PodReady" in world.condition("Placed")["message"]
    assert world.status()["summary"] == "PodForbidden"
    assert "podUID" not in world.status()
    world.now += 2
    world.node("node-b")
    await world.look()
    await world.until(lambda: world.tenant in world.rows("node-b"))
    await world.look()
    assert gates(world) == []
    assert world.memo.blocked is None


async def test_a_share_that_the_pod_may_never_have_is_tried_after_growing_pauses(world: World) -> None:
    world.node()
    await world.placed()
    pauses = []
    for _ in range(7):
        world.server.fail("patch", "pods", refusal=Refused(403, "Forbidden", "pods may not choose nodes"))
        await world.look()
        assert world.memo.blocked is not None
        pauses.append(world.memo.blocked.until - world.now)
        await world.look()
        await world.until(lambda: not world.rows())
        world.now = world.memo.blocked.until
        world.renew()
        await world.look()
        await world.until(lambda: world.tenant in world.rows())
    assert pauses == pytest.approx([2, 4, 8, 16, 32, 60, 60])


@pytest.mark.promise("operator-forbidden")
async def test_a_pod_that_stays_forbidden_is_tried_after_growing_pauses(world: World) -> None:
    world.node()
    world.sharepod()
    pauses = []
    for tries in range(1, 9):
        world.server.fail("create", "pods", refusal=Refused(403, "Forbidden", "exceeded quota: gpu"))
        await world.look()
        assert len(world.server.made("create", "pods")) == tries
        assert world.memo.blocked is not None
        pauses.append(world.memo.blocked.until - world.now)
        world.now = world.memo.blocked.until
    assert pauses == pytest.approx([2, 4, 8, 16, 32, 60, 60, 60])


@pytest.mark.promise("operator-refused")
async def test_a_pod_that_the_api_server_refuses_for_good_ends_its_sharepod(world: World) -> None:
    world.node()
    world.sharepod()
    image = "spec.containers[0].image"
    refusal = Refused(422, "Invalid", f"{image}: Required value", fields=(image,))
    world.server.fail("create", "pods", refusal=refusal)
    await world.look()
    assert world.status()["phase"] == "Failed"
    assert world.condition("PodReady")["reason"] == "PodRefused"
    assert "image: Required value" in world.condition("PodReady")["message"]
    await world.look()
    assert world.rows() == {}


async def refused(world: World) -> tuple[str, str]:
    """A Pod that kube-scheduler has refused for long enough; its uid and node."""
    for name in ("node-a", "node-b"):
        world.node(name)
    await world.placed()
    await world.look()
    (here,) = [name for name in ("node-a", "node-b") if world.rows(name)]
    uid = (world.read("pods") or {})["metadata"]["uid"]
    world.now += 1
    world.change("pods", "one", lambda item: item.update(status={"conditions": [UNSCHEDULABLE]}), status=True)
    await world.look()
    assert world.condition("PodReady")["reason"] == "NotScheduled"
    assert world.looks_again(world.settings.bind_timeout)
    world.now += world.settings.bind_timeout
    world.renew("node-a")
    world.renew("node-b")
    return uid, here


async def test_a_pod_that_kube_scheduler_refuses_is_taken_back_and_placed_elsewhere(world: World) -> None:
    uid, here = await refused(world)
    await world.look()
    assert (world.read("pods") or {})["metadata"]["finalizers"] == [TAKEN_BACK]
    assert world.looks_again(0)
    assert here in world.memo.avoid
    await world.until(lambda: bool(world.told("PodTakenBack")))
    assert world.condition("PodReady")["reason"] == "PodTakenBack"
    await world.look()
    await world.until(lambda: not world.rows(here))
    assert "podUID" not in world.status()
    await world.look()
    assert world.read("pods") is None
    await world.look()
    await world.look()
    (elsewhere,) = {"node-a", "node-b"} - {here}
    await world.until(lambda: world.tenant in world.rows(elsewhere))
    await world.look()
    assert (world.read("pods") or {})["metadata"]["uid"] != uid


@pytest.mark.promise("operator-taken-back-crash")
@pytest.mark.parametrize("writes", range(6))
async def test_whenever_the_operator_dies_while_it_takes_a_pod_back_no_run_was_lost(world: World, writes: int) -> None:
    uid, _ = await refused(world)
    world.writes_left = writes
    for _ in range(6):
        with suppress(NotLeadingError):
            await world.look()
    async with acting(world.server, after=world) as successor:
        for _ in range(30):
            successor.renew("node-a")
            successor.renew("node-b")
            await successor.look()
            if successor.rows("node-a").keys() | successor.rows("node-b").keys() == {world.tenant}:
                pod = successor.read("pods")
                if pod is not None and pod["metadata"]["uid"] != uid:
                    break
            successor.now += 10
            await asyncio.sleep(0.01)  # its ledger's writer has its turn
        status = successor.status()
        assert status["phase"] != "Failed", status
        assert (successor.read("pods") or {})["metadata"]["uid"] not in ("", uid)
    assert world.died


@pytest.mark.promise("operator-bound-stays")
async def test_a_pod_that_was_bound_meanwhile_is_not_taken_back(world: World) -> None:
    world.node()
    await world.placed()
    await world.look()
    world.change("pods", "one", lambda item: item.update(status={"conditions": [UNSCHEDULABLE]}), status=True)
    await world.look()
    world.now += world.settings.bind_timeout
    await world.relist()
    world.change("pods", "one", lambda item: item["spec"].update(nodeName="node-a"))
    await world.tenants.reconcile(world.tenant)
    found = world.read("pods")
    assert found is not None
    assert "deletionTimestamp" not in found["metadata"]
    assert "finalizers" not in found["metadata"]


async def test_another_share_is_granted_in_place(world: World) -> None:
    world.node()
    await world.running()
    world.change("sharepods", "one", lambda item: item["spec"]["gpu"].update(request=0.6))
    await world.look()
    await world.until(lambda: world.rows()[world.tenant]["requestMilli"] == 600)
    await world.look()
    assert world.condition("Resized")["reason"] == "Granted"
    assert world.status()["granted"]["requestMilli"] == 600
    assert len(world.server.made("create", "pods")) == 1


async def test_a_share_that_does_not_fit_is_refused_until_the_wish_is_withdrawn(world: World) -> None:
    world.node()
    await world.running()
    neighbour = world.sharepod("two", request=0.5)
    await world.look(neighbour)
    await world.look(neighbour)
    await world.until(lambda: neighbour in world.rows())
    world.change("sharepods", "one", lambda item: item["spec"]["gpu"].update(request=0.9))
    await world.look()
    while world.tenant not in world.answered:
        await world.look()
    world.now += 1
    await world.look()
    assert world.condition("Resized")["status"] == "False"
    assert world.rows()[world.tenant]["requestMilli"] == 400
    world.change("sharepods", "one", lambda item: item["spec"]["gpu"].update(request=0.4))
    world.now += 1
    await world.look()
    assert world.memo.resize_refusal is None
    assert world.condition("Resized")["status"] == "True"


async def test_a_pod_without_its_row_ends_only_after_a_live_read_misses_it_too(world: World) -> None:
    world.node()
    await world.running()
    kept = (world.read("gpunodes", "node-a") or {})["spec"]["tenants"]
    world.change("gpunodes", "node-a", lambda item: item["spec"].update(tenants=[]))
    await world.relist()
    world.change("gpunodes", "node-a", lambda item: item["spec"].update(tenants=kept))
    await world.tenants.reconcile(world.tenant)
    assert world.status()["phase"] == "Running"
    assert world.looks_again(1.0)
    world.change("gpunodes", "node-a", lambda item: item["spec"].update(tenants=[]))
    await world.look()
    assert world.status()["phase"] == "Failed"
    assert world.condition("PodReady")["reason"] == "ReservationLost"


async def test_a_pod_that_vanished_ends_its_sharepod_only_if_the_api_server_misses_it_too(world: World) -> None:
    world.node()
    await world.running()
    world.loses_sight_of_the_pod()
    await world.tenants.reconcile(world.tenant)
    assert world.status()["phase"] == "Running"
    world.delete("pods")
    world.pod_gone()
    await world.look()
    assert (world.status()["phase"], world.condition("PodReady")["reason"]) == ("Failed", "PodLost")


@pytest.mark.promise("operator-override-node")
async def test_a_share_on_a_node_that_is_gone_is_given_away_and_an_admin_told(world: World) -> None:
    world.node()
    await world.running()
    world.delete("sharepods")
    world.delete("pods")
    world.pod_gone()
    world.server.storage.delete(world.kind("nodes"), "", "node-a")
    await world.look_at_node()
    await world.look()
    await world.until(lambda: world.rows()[world.tenant]["state"] == "Releasing")
    await world.look()
    await world.until(lambda: world.tenant not in world.rows())
    await world.until(lambda: any("the Node is gone" in note for note in world.told("ShareGivenAway")))


async def test_a_share_on_a_node_that_came_back_is_not_given_away(world: World) -> None:
    world.node()
    await world.running()
    world.delete("sharepods")
    world.delete("pods")
    world.pod_gone()
    await world.look()
    await world.until(lambda: world.rows()[world.tenant]["state"] == "Releasing")
    await world.relist()
    node = world.state.nodes.named("node-a")
    assert node is not None
    world.state.drop_node(node.uid, node.version)
    world.state.node_is_gone("node-a")
    await world.tenants.reconcile(world.tenant)
    assert world.looks_again(1.0)
    assert world.tenant in world.rows()
    assert world.state.gone_nodes == set()


async def test_a_row_is_removed_by_one_write_however_often_it_is_looked_at(world: World) -> None:
    world.node()
    await world.running()
    world.delete("sharepods")
    world.delete("pods")
    world.pod_gone()
    world.change("nodes", "node-a", lambda item: item["spec"].update(taints=[OUT_OF_SERVICE]))
    await world.look()
    await world.until(lambda: world.rows()[world.tenant]["state"] == "Releasing")
    before = len(world.server.made("patch", "gpunodes"))
    await world.relist()
    for _ in range(3):
        await world.tenants.reconcile(world.tenant)
    await world.until(lambda: world.tenant not in world.rows())
    assert len(world.server.made("patch", "gpunodes")) == before + 1
    await world.until(lambda: any("out of service" in note for note in world.told("ShareGivenAway")))


OUT_OF_SERVICE = {"key": "node.kubernetes.io/out-of-service", "effect": "NoExecute"}


async def test_a_ledger_that_refuses_a_reservation_is_stayed_away_from(world: World) -> None:
    world.node()

    def refuse(kind: Kind, before: Json | None, after: Json) -> None:
        if kind.plural == "gpunodes" and after["spec"].get("tenants"):
            raise Refused(422, "Invalid", "ledger is sealed")

    world.server.storage.admit = refuse
    await world.gated()
    world.place()
    await world.until(lambda: bool(world.told("LedgerWriteRefused")))
    assert world.memo.not_before == world.now + world.settings.bind_timeout
    assert "ledger is sealed" in world.memo.avoid["node-a"][0]
    await world.look()
    assert world.rows() == {}


async def test_nothing_is_concluded_while_a_row_cannot_be_read(world: World) -> None:
    world.node()
    await world.running()
    raw = world.read("gpunodes", "node-a") or {}
    raw["spec"]["tenants"][0]["state"] = "Borrowed"
    raw["metadata"]["resourceVersion"] = str(world.server.storage.version + 1)
    world.state.put_gpunode(raw)
    world.delete("pods")
    world.pod_gone()
    world.state.drop_pod((world.state.pod_of(world.tenant) or _absent()).uid)
    before = world.server.storage.version
    await world.tenants.reconcile(world.tenant)
    assert world.server.storage.version == before
    assert world.status()["phase"] == "Running"


def _absent() -> Any:
    raise AssertionError("no such pod")


async def test_a_decision_for_a_sharepod_that_is_gone_is_forgotten(world: World) -> None:
    world.node()
    held = world.server.fail("patch", "gpunodes", refusal=Refused(503, "ServiceUnavailable", "try again"), times=99)
    await world.gated()
    world.place()
    while not world.state.cluster.reservations("node-a"):
        await world.look()
    world.delete("sharepods")
    await world.look()
    assert not world.state.cluster.reservations("node-a")
    assert world.looks_again(0)
    held.times = 0


async def test_an_invalid_sharepod_says_what_is_wrong_and_takes_nothing(world: World) -> None:
    world.node()
    world.sharepod(gpu={"limit": 0.2})
    await world.look()
    placed = world.condition("Placed")
    assert (placed["status"], placed["reason"]) == ("False", "Invalid")
    assert "limit" in placed["message"]
    assert world.rows() == {}


async def test_force_release_gives_a_share_away_under_a_pod_that_hangs(world: World) -> None:
    world.node()
    await world.running()
    world.delete("sharepods")
    await world.look()
    world.change(
        "gpunodes",
        "node-a",
        lambda item: item["metadata"].update(annotations={"sharepod.dev/force-release": world.tenant}),
    )
    await world.look()
    await world.until(lambda: world.tenant not in world.rows())
    await world.until(lambda: any("force-release" in note for note in world.told("ShareGivenAway")))


async def test_a_pod_whose_share_is_not_enforced_is_evicted_and_its_sharepod_says_so() -> None:
    async with acting_world(unenforced_policy="Evict", unenforced_grace=30) as world:
        world.node()
        await world.running()
        finding = {"reason": "ProcessWithoutHook", "message": "process 7 uses the GPU without the hook"}
        world.now += 1
        world.report({"id": world.tenant, "enforced": False, "findings": [finding]})
        await world.look()
        assert world.looks_again(30)
        assert world.condition("Enforced")["reason"] == "ProcessWithoutHook"
        world.now += 30
        await world.look()
        assert len(world.server.made("evict", "pods")) == 1
        assert world.looks_again(0), "to show it"
        await world.look()
        assert world.condition("PodReady")["reason"] == "Evicted"
        world.pod_gone()
        await world.look()
        assert (world.status()["phase"], world.condition("PodReady")["reason"]) == ("Failed", "Evicted")


async def test_a_refusal_of_the_api_server_reaches_the_queue(world: World) -> None:
    world.node()
    await world.placed()
    world.server.fail("patch", "sharepods", refusal=Refused(403, "Forbidden", "no"))
    with pytest.raises(ForbiddenError):
        await world.look()
    await world.client.get(GPUNODES, "node-a")
