"""One tenant that the API server or kube-scheduler refuses: names that are taken, policies, quotas, ledgers, nodes."""

from __future__ import annotations

import asyncio
from contextlib import suppress

import pytest
from doubles.apiserver.errors import Refused, not_found
from doubles.apiserver.kinds import Kind
from sharepod.api.objects import TAKEN_BACK
from sharepod.controller.apiserver.client import GPUNODES, NotLeadingError
from sharepod.kube import ForbiddenError, Json
from unit.controller.acting_world import NAMESPACE, World, acting
from unit.controller.tenants.server_history import gates

UNSCHEDULABLE = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/1 nodes fit"}
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
"""Answers by which policies and webhooks deny a Pod."""


async def test_a_taken_name_is_reported_and_reserves_no_share(world: World) -> None:
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
    assert world.memo.blocked.until == world.now + 1.0, "it will be deleted soon"
    world.pod_gone()
    world.now += 1
    await world.look()
    assert gates(world) == ["sharepod.dev/share"]


async def test_a_former_pod_deleted_before_the_call_is_no_obstacle(world: World) -> None:
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
    await world.until(lambda: bool(world.notes("PodForbidden")))
    assert world.rows() == {}, "no share is held while it is blocked"
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
    await world.until(lambda: bool(world.notes("PodForbidden")))
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


@pytest.mark.promise("operator-paced-retries")
async def test_where_one_pod_is_no_longer_forbidden_others_are_tried_at_once(world: World) -> None:
    world.node()
    tenants = [world.sharepod(name) for name in ("one", "two", "three", "four")]
    for tenant in tenants:
        world.server.fail("create", "pods", refusal=Refused(403, "Forbidden", "exceeded quota: gpu"))
        await world.look(tenant)
    world.now += 2
    await world.look(tenants[0])
    assert [world.due_in(tenant) for tenant in tenants[1:3]] == [0.0, 0.0]
    assert world.due_in(tenants[3]) != 0.0, "two at a time"
    await world.look(tenants[1])
    assert world.due_in(tenants[3]) == 0.0, "each that is taken brings others"


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
    """Create a Pod that kube-scheduler has refused for `bind_timeout`. Return its uid and node."""
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


@pytest.mark.promise("operator-not-started")
async def test_a_pod_that_no_scheduler_has_looked_at_is_not_refused_by_one(world: World) -> None:
    """The API server's message about the gate stays in the Pod's condition after the gate is open."""
    world.node("node-a")
    await world.placed()
    await world.look()
    gated = UNSCHEDULABLE | {"reason": "SchedulingGated", "message": "Scheduling is blocked due to scheduling gates"}
    world.now += 1
    world.change("pods", "one", lambda item: item.update(status={"conditions": [gated]}), status=True)
    await world.look()
    assert world.condition("PodReady")["message"] == "kube-scheduler has not bound the pod yet"
    assert world.status()["summary"] == "Pending"
    world.now += world.settings.bind_timeout
    world.renew("node-a")
    await world.look()
    assert not (world.read("pods") or {})["metadata"].get("finalizers")
    assert world.looks_again(world.settings.start_timeout - world.settings.bind_timeout - 1)


async def test_a_pod_refused_by_kube_scheduler_is_withdrawn_and_placed_elsewhere(world: World) -> None:
    uid, here = await refused(world)
    await world.look()
    assert (world.read("pods") or {})["metadata"]["finalizers"] == [TAKEN_BACK]
    assert world.looks_again(0)
    assert here in world.memo.avoid
    await world.until(lambda: bool(world.notes("PodTakenBack")))
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
            await asyncio.sleep(0.01)  # the ledger writer runs in this time
        status = successor.status()
        assert status["phase"] != "Failed", status
        assert (successor.read("pods") or {})["metadata"]["uid"] not in ("", uid)
    assert world.died


@pytest.mark.promise("operator-bound-stays")
async def test_a_pod_bound_before_its_withdrawal_is_kept(world: World) -> None:
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


async def test_a_ledger_that_refuses_a_reservation_is_stayed_away_from(world: World) -> None:
    world.node()

    def refuse(kind: Kind, before: Json | None, after: Json) -> None:
        if kind.plural == "gpunodes" and after["spec"].get("tenants"):
            raise Refused(422, "Invalid", "ledger is sealed")

    world.server.storage.admit = refuse
    await world.gated()
    world.place()
    await world.until(lambda: bool(world.notes("LedgerWriteRefused")))
    assert world.memo.not_before == world.now + world.settings.bind_timeout
    assert "ledger is sealed" in world.memo.avoid["node-a"][0]
    await world.look()
    assert world.rows() == {}


async def test_a_refusal_of_the_api_server_reaches_the_queue(world: World) -> None:
    world.node()
    await world.placed()
    await world.look()
    world.now += 1
    world.server.fail("patch", "sharepods", refusal=Refused(403, "Forbidden", "no"))
    with pytest.raises(ForbiddenError):
        await world.look()
    await world.client.get(GPUNODES, "node-a")
