"""A run that ends and is followed by another run, over the API server in memory."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
from sharepod.kube import Json
from unit.controller.acting_world import World, acting_world

READY = [{"type": "Ready", "status": "True"}]
DRAINED = {"type": "DisruptionTarget", "status": "True", "reason": "EvictionByEvictionAPI", "message": "drained"}


@pytest.fixture
async def world() -> AsyncIterator[World]:
    async with acting_world() as made:
        made.node("node-a")
        made.node("node-b")
        yield made


def node_of(world: World) -> str:
    return next(name for name in ("node-a", "node-b") if world.tenant in world.rows(name))


def pod_uid(world: World) -> str:
    uid: str = (world.read("pods") or {"metadata": {"uid": ""}})["metadata"]["uid"]
    return uid


def cordon(world: World, name: str) -> None:
    taint = {"key": "node.kubernetes.io/unschedulable", "effect": "NoSchedule"}
    world.change("nodes", name, lambda item: item["spec"].update(unschedulable=True, taints=[taint]))


async def drain(world: World) -> str:
    """Drain the node of the SharePod, as `kubectl drain` does; return the node."""
    node = node_of(world)
    cordon(world, node)
    world.change("pods", "one", lambda item: item["status"].update(conditions=[DRAINED]), status=True)
    world.delete("pods")
    await world.look()
    return node


async def comes_back(world: World, node: str) -> None:
    """End the Pod as the kubelet does, confirm the release as the agent does, and wait until the SharePod runs
    again."""
    world.pod_gone()
    await world.look()
    await world.look()
    await world.until(lambda: world.rows(node)[world.tenant]["state"] == "Releasing")
    await world.look()
    assert world.read("pods") is None, "not before its agent has confirmed that nothing is left"
    world.report({"id": world.tenant, "drained": True}, node=node)
    await world.look()
    await world.until(lambda: world.tenant not in world.rows(node))


@pytest.mark.promise("operator-comes-back")
async def test_a_drained_sharepod_runs_again_on_another_node_under_its_name(world: World) -> None:
    await world.running(restartPolicy="Always")
    former = pod_uid(world)
    world.now += 3600
    node = await drain(world)
    assert world.status()["phase"] == "Running", "until it is deleted"
    await comes_back(world, node)
    await world.look()
    await world.until(lambda: any(world.tenant in world.rows(name) for name in ("node-a", "node-b")))
    assert node_of(world) != node
    await world.look()
    await world.look()
    assert pod_uid(world) not in ("", former)
    world.pod_phase("Running", node=node_of(world), conditions=READY)
    await world.look()
    status = world.status()
    assert (status["phase"], status["restarts"], status["podUID"]) == ("Running", 1, pod_uid(world))
    last = status["lastEnd"]
    assert (last["podUID"], last["node"], last["cause"], last["attempts"]) == (former, node, "Drained", 1)
    assert last["endedAt"] == last["retryAt"], "a first disruption is followed by the next run at once"
    assert world.condition("PodReady")["status"] == "True"
    await world.until(lambda: bool(world.notes("Drained")))


async def ends_by_force(world: World, node: str) -> None:
    """Delete the Pod without a grace period, and wait until its row is Releasing."""
    world.delete("pods")
    world.pod_gone()
    for _ in range(3):
        await world.look()
    await world.until(lambda: world.rows(node)[world.tenant]["state"] == "Releasing")


async def runs_again(world: World, node: str) -> None:
    """Wait until the next run is placed on the node and runs."""
    for _ in range(2):
        await world.look()
    await world.until(lambda: world.rows(node).get(world.tenant, {}).get("state") == "Reserved")
    for _ in range(3):
        await world.look()
    world.pod_phase("Running", node=node, conditions=READY)
    await world.look()


@pytest.mark.promise("operator-comes-back")
async def test_an_agents_report_on_one_run_releases_no_other(world: World) -> None:
    cordon(world, "node-b")
    await world.running(restartPolicy="Always")
    node = node_of(world)
    world.now += 3600
    await ends_by_force(world, node)
    await world.look()
    world.report({"id": world.tenant, "drained": True}, node=node)
    await world.look()
    await world.look()
    await world.until(lambda: world.tenant not in world.rows(node))
    await runs_again(world, node)
    world.now += 3600
    await ends_by_force(world, node)  # the agent's reports do not reach the API server, so the last report stays
    for _ in range(4):
        await world.look()
    assert world.rows(node)[world.tenant]["state"] == "Releasing"
    assert world.read("pods") is None


@pytest.mark.promise("operator-comes-back")
async def test_a_run_on_a_node_that_was_registered_anew_is_released_by_its_new_ledger(world: World) -> None:
    cordon(world, "node-b")
    await world.running(restartPolicy="Always")
    node = node_of(world)
    world.memo.release_generation[node] = ("uid of the former ledger", 1000)
    await ends_by_force(world, node)
    await world.look()
    world.report({"id": world.tenant, "drained": True}, node=node)
    await world.look()
    await world.until(lambda: world.tenant not in world.rows(node))


@pytest.mark.promise("operator-back-off")
async def test_a_run_that_failed_is_followed_by_another_after_a_pause_that_outlives_the_operator(world: World) -> None:
    await world.running(restartPolicy="OnFailure")
    former, node = pod_uid(world), node_of(world)
    world.pod_phase("Failed", node=node, reason="UnexpectedAdmissionError", message="no device")
    await world.look()
    assert world.status()["lastEnd"]["cause"] == "Rejected"
    assert world.condition("PodReady")["message"] == "no device"
    await world.look()
    await world.until(lambda: world.rows(node)[world.tenant]["state"] == "Releasing")
    await world.look()
    assert world.condition("Placed")["reason"] == "Releasing"
    world.report({"id": world.tenant, "drained": True}, node=node)
    await world.look()
    await world.until(lambda: world.tenant not in world.rows(node))
    await world.look()
    assert world.condition("Placed")["reason"] == "BackOff"
    assert world.status()["phase"] == "Pending"
    assert pod_uid(world) == former, "its log can be read until the next run"
    world.memos.clear()
    world.now += 9
    await world.look()
    assert pod_uid(world) == former
    assert world.looks_again(1.0)
    world.now += 1
    await world.look()
    await world.look()
    assert pod_uid(world) not in ("", former)


async def test_what_a_lost_node_is_waited_for_is_shown_and_how_to_end_it(world: World) -> None:
    await world.running(restartPolicy="Always")
    node = node_of(world)

    def silent(item: Json) -> None:
        item["status"]["conditions"] = [{"type": "Ready", "status": "Unknown"}]

    world.change("nodes", node, silent, status=True)
    world.delete("pods")
    world.now += 2
    await world.look()
    pod_ready = world.condition("PodReady")
    assert pod_ready["reason"] == "PodDeleting"
    assert f"kubectl delete node {node}" in pod_ready["message"]
    assert "out-of-service" in pod_ready["message"]
    world.pod_gone()  # the Pod is deleted by force
    await world.look()
    await world.look()
    await world.until(lambda: world.rows(node)[world.tenant]["state"] == "Releasing")
    world.now += 2
    await world.look()
    assert world.condition("Placed")["reason"] == "NodeUnreachable"
    assert world.read("pods") is None
    taint = {"key": "node.kubernetes.io/out-of-service", "effect": "NoExecute"}
    world.change("nodes", node, lambda item: item["spec"].update(taints=[taint]))
    await world.look()
    await world.until(lambda: world.tenant not in world.rows(node))
    await world.look()
    await world.until(lambda: world.tenant in world.rows("node-b" if node == "node-a" else "node-a"))


@pytest.mark.promise("operator-one-run-at-a-time")
async def test_whenever_the_operator_dies_one_pod_at_a_time_and_each_end_counted_once(world: World) -> None:
    await world.running(restartPolicy="Always")
    node = await drain(world)
    world.pod_gone()

    def died() -> None:
        world.memos.clear()
        world.state.lost_pods.clear()

    reported = False
    for _ in range(20):
        died()
        await world.look()
        if world.rows(node).get(world.tenant, {}).get("state") == "Releasing" and not reported:
            world.report({"id": world.tenant, "drained": True}, node=node)
            reported = True
    assert world.status()["lastEnd"]["attempts"] == 1
    created = [change.after for change in world.server.storage.history if change.kind.plural == "pods"]
    uids = {item["metadata"]["uid"] for item in created if item is not None}
    assert len(uids) == 2


@pytest.mark.promise("operator-ttl")
async def test_a_sharepod_that_has_ended_is_deleted_when_its_time_is_over(world: World) -> None:
    await world.running(ttlSecondsAfterFinished=60)
    assert "ttlSecondsAfterFinished" not in (world.read("pods") or {})["spec"]
    node = node_of(world)
    world.pod_phase("Succeeded", node=node)
    await world.look()
    await world.look()
    await world.until(lambda: world.rows(node)[world.tenant]["state"] == "Releasing")
    world.report({"id": world.tenant, "drained": True}, node=node)
    await world.look()
    await world.until(lambda: world.tenant not in world.rows(node))
    world.memos.clear()
    world.now += 59
    await world.look()
    assert world.read("sharepods") is not None
    assert world.looks_again(1.0)
    world.now += 1
    await world.look()
    assert world.read("sharepods") is None


@pytest.mark.promise("operator-ttl")
@pytest.mark.parametrize(("set_s", "restarted", "left_s"), [(-7200, False, 60), (7200, False, 60), (-7200, True, 60)])
async def test_a_clock_that_is_set_keeps_a_sharepod_that_has_ended_no_longer(
    world: World, set_s: float, restarted: bool, left_s: float
) -> None:
    await world.running(ttlSecondsAfterFinished=60)
    node = node_of(world)
    world.pod_phase("Succeeded", node=node)
    await world.look()
    await world.look()
    await world.until(lambda: world.rows(node)[world.tenant]["state"] == "Releasing")
    world.report({"id": world.tenant, "drained": True}, node=node)
    await world.look()
    await world.until(lambda: world.tenant not in world.rows(node))
    world.clock_set = set_s
    if restarted:
        world.memos.clear()
    await world.look()
    world.now += left_s - 1
    await world.look()
    assert world.read("sharepods") is not None
    world.now += 1
    await world.look()
    assert world.read("sharepods") is None


@pytest.mark.promise("operator-not-started")
async def test_a_pod_whose_image_cannot_be_pulled_releases_its_share_and_reports_why(world: World) -> None:
    await world.placed(restartPolicy="Always")
    await world.look()
    node = node_of(world)
    waiting = {"name": "main", "state": {"waiting": {"reason": "ImagePullBackOff", "message": "not found"}}}
    world.pod_phase("Pending", node=node, containerStatuses=[waiting])
    await world.look()
    world.now += 1800
    await world.look()
    last = world.status()["lastEnd"]
    assert last["cause"] == "NotStarted"
    assert "not found" in last["message"]
    await world.look()
    world.pod_gone()
    await world.look()
    await world.until(lambda: world.rows(node)[world.tenant]["state"] == "Releasing")


async def test_a_row_that_an_admin_removed_costs_one_run(world: World) -> None:
    await world.running(restartPolicy="Always")
    node, former = node_of(world), pod_uid(world)
    world.change("gpunodes", node, lambda item: item["spec"].update(tenants=[]))
    await world.look()
    assert world.status()["lastEnd"]["cause"] == "ReservationLost"
    await world.look()
    assert (world.read("pods") or {})["metadata"].get("deletionTimestamp")
    world.pod_gone()
    await world.look()
    await world.until(lambda: pod_uid(world) not in ("", former))


async def test_force_release_gives_away_what_a_sharepod_between_two_runs_had(world: World) -> None:
    await world.running(restartPolicy="Always")
    node = node_of(world)
    world.delete("pods")
    world.pod_gone()
    await world.look()
    await world.look()
    await world.until(lambda: world.rows(node)[world.tenant]["state"] == "Releasing")
    forced: dict[str, Any] = {"sharepod.dev/force-release": world.tenant}
    world.change("gpunodes", node, lambda item: item["metadata"].update(annotations=forced))
    await world.look_at_node(node)
    assert world.notes("ForceReleaseRefused") == []
    await world.look()
    await world.until(lambda: world.tenant not in world.rows(node))


@pytest.mark.promise("operator-gpu-gone")
@pytest.mark.parametrize("ready", [True, False])
async def test_a_sharepod_whose_gpu_is_gone_is_told_and_leaves_it_once_its_pod_is_not_ready(
    world: World, ready: bool
) -> None:
    await world.running(restartPolicy="Always")
    node = node_of(world)
    world.now += 60
    world.renew(node)
    serves = {"type": "AgentReady", "status": "True", "reason": "Serving", "message": ""}
    world.change("gpunodes", node, lambda item: item["status"].update(gpus=[], conditions=[serves]), status=True)
    if ready:
        world.change("pods", "one", lambda item: item["status"].update(conditions=READY), status=True)
    for _ in range(3):
        await world.look()
    by_type = {item["type"]: item for item in world.status()["conditions"]}
    assert by_type["GPUHealthy"]["status"] == "False"
    assert f"{node} is missing" in by_type["GPUHealthy"]["message"]
    ended = world.status().get("lastEnd", {}).get("cause")
    assert ended == (None if ready else "GpuFailed")
