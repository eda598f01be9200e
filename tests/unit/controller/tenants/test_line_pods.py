"""A plain Pod that is its own tenant, from its first reconciliation until nothing of it is left, over the API server
double.
"""

from __future__ import annotations

from typing import Any

import pytest
from sharepod.api.objects import JOB_TRACKING, TAKEN_BACK
from sharepod.api.pods.line_volume import with_volume
from sharepod.controller.decisions.advertised import SOON_S
from sharepod.kube import Json
from unit.controller.acting_world import NAMESPACE, World
from unit.controller.tenants.server_history import gates

UNSCHEDULABLE = [{"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "no cpu"}]
LINE = {"sharepod.dev/gpu-milli": "400", "sharepod.dev/gpu-memory-mib": "1024"}


def line_pod(
    world: World,
    *,
    name: str = "one",
    owner: str | None = None,
    annotations: Json | None = None,
    line: Json = LINE,
    **spec: Any,
) -> str:
    """Create a Pod with a line as admission changes it. Return its uid, which is the tenant's id."""
    world.operator.line_policy.in_force = True
    containers = [{"name": "main", "image": "i", "resources": {"limits": line, "requests": line}}]
    metadata: Json = {"name": name, "annotations": annotations or {}}
    if owner is not None:
        metadata["ownerReferences"] = [{"kind": "ReplicaSet", "name": "r", "uid": owner, "controller": True}]
    body: Json = {"metadata": metadata, "spec": {"containers": containers, **spec}}
    patch = with_volume(body, "nvidia")
    patched = patch["metadata"]
    body["metadata"] |= {
        "labels": patched["labels"],
        "annotations": {**metadata["annotations"], **patched["annotations"]},
    }
    body["spec"] |= patch["spec"]
    made = world.server.storage.create(world.kind("pods"), NAMESPACE, body)
    uid = str(made["metadata"]["uid"])
    if name == "one":
        world.tenant = uid
    return uid


async def opened(world: World, **options: Any) -> str:
    """Create a Pod whose gate is open; return its uid."""
    tenant = line_pod(world, **options)
    await world.look()
    await world.until(lambda: tenant in world.rows())
    assert gates(world) == ["sharepod.dev/share"], "the row comes first"
    await world.look()
    assert gates(world) == []
    return tenant


@pytest.mark.promise("operator-line-volume")
async def test_the_row_is_the_pods_own_and_then_the_gate_is_opened_in_one_patch(world: World) -> None:
    world.node()
    tenant = await opened(world)
    row = world.rows()[tenant]
    assert (row["podUID"], row["podName"], row["requestMilli"], row["memory"]) == (tenant, "one", 400, 1 << 30)
    pod = world.read("pods")
    assert pod is not None
    assert pod["metadata"]["annotations"]["sharepod.dev/gpus"] == ",".join(row["gpus"])
    (patch,) = world.server.made("patch", "pods")
    assert "affinity" in str(patch.body)
    await world.until(lambda: bool(world.notes("Placed")))
    assert world.server.made("patch", "sharepods") == []


@pytest.mark.promise("operator-line-volume-end")
@pytest.mark.parametrize("ends", ["Succeeded", "Failed", "deleted", "lost"])
async def test_a_share_ends_in_two_steps_however_its_pod_does(world: World, ends: str) -> None:
    world.node()
    tenant = await opened(world)
    world.pod_phase("Running")
    await world.look()
    if ends in ("Succeeded", "Failed"):
        world.pod_phase(ends)
    else:
        world.delete("pods")
        if ends == "deleted":
            await world.look()
            assert world.rows()[tenant]["state"] == "Reserved", "it may have processes"
        world.pod_gone()
    await world.look()
    await world.until(lambda: world.rows()[tenant]["state"] == "Releasing")
    await world.look()
    assert tenant in world.rows(), "its agent has not confirmed the release"
    world.report({"id": tenant, "drained": True})
    await world.look()
    await world.until(lambda: tenant not in world.rows())


@pytest.mark.promise("operator-line-volume-end")
async def test_one_deleted_behind_its_gate_gives_its_row_back(world: World) -> None:
    world.node()
    tenant = line_pod(world)
    await world.look()
    await world.until(lambda: tenant in world.rows())
    world.delete("pods")  # no container runs yet, so the Pod is deleted at once
    await world.look()
    await world.until(lambda: world.rows()[tenant]["state"] == "Releasing")
    world.report({"id": tenant, "drained": True})
    await world.look()
    await world.until(lambda: tenant not in world.rows())


@pytest.mark.promise("operator-line-volume-refused")
async def test_what_admission_lets_through_and_cannot_be_meant_is_told_and_never_placed(world: World) -> None:
    world.node()
    sums = [{"name": "first", "image": "i", "resources": {"limits": {"sharepod.dev/gpu-milli": "1500"}}}]
    tenant = line_pod(world, initContainers=sums)
    await world.look()
    await world.until(lambda: bool(world.notes("Invalid")))
    assert tenant not in world.rows()
    assert gates(world) == ["sharepod.dev/share"]


@pytest.mark.promise("operator-line-volume-elsewhere")
async def test_one_that_fits_nowhere_on_its_node_is_taken_back_and_the_next_one_stays_away(world: World) -> None:
    world.node()
    tenant = await opened(world, owner="replicas")
    world.change("pods", "one", lambda item: item.update(status={"conditions": UNSCHEDULABLE}), status=True)
    await world.look()
    world.now += world.settings.bind_timeout + 1
    world.renew()
    for _ in range(6):
        await world.look()
    assert world.read("pods") is None, "its controller makes another"
    await world.until(lambda: world.rows()[tenant]["state"] == "Releasing")
    world.report({"id": tenant, "drained": True})
    await world.look()
    await world.until(lambda: tenant not in world.rows())
    (note,) = world.notes("PodTakenBack")
    assert "its controller makes another: no cpu" in note
    following = line_pod(world, owner="replicas")
    await world.look()
    await world.until_answered(following)
    assert "node-a" in world.memos.of(following).avoid
    assert following not in world.rows()


def of_job(world: World, finalizers: list[str], api: str = "batch/v1") -> None:
    """Make the Pod a Pod of a Job."""
    owner = {"apiVersion": api, "kind": "Job", "name": "j", "uid": "job", "controller": True}
    change = {"ownerReferences": [owner], "finalizers": finalizers}
    world.change("pods", "one", lambda item: item["metadata"].update(change))


@pytest.mark.promise("operator-line-job-taken-back")
async def test_a_job_does_not_count_its_withdrawn_pod(world: World) -> None:
    world.node()
    await opened(world)
    of_job(world, [JOB_TRACKING, "example.com/mine"])
    world.change("pods", "one", lambda item: item.update(status={"conditions": UNSCHEDULABLE}), status=True)
    await world.look()
    world.now += world.settings.bind_timeout + 1
    world.renew()
    await world.look()
    metadata = (world.read("pods") or {})["metadata"]
    assert metadata["deletionTimestamp"]
    assert metadata["finalizers"] == ["example.com/mine", TAKEN_BACK]


@pytest.mark.promise("operator-line-job-taken-back")
@pytest.mark.parametrize(("api", "counted"), [("batch/v1", [JOB_TRACKING]), ("batch.example.com/v1", [])])
async def test_a_job_counts_its_pod_again_that_was_bound_after_all(world: World, api: str, counted: list[str]) -> None:
    world.node()
    await opened(world)
    of_job(world, ["example.com/mine", TAKEN_BACK], api)
    world.change("pods", "one", lambda item: item["spec"].update(nodeName="node-a"))
    await world.look()
    assert (world.read("pods") or {})["metadata"]["finalizers"] == ["example.com/mine", *counted]


@pytest.mark.promise("operator-line-volume-lost")
@pytest.mark.parametrize(("budget", "calls"), [(False, ["evict"]), (True, ["evict", "delete"])])
async def test_one_whose_row_is_gone_is_ended_and_its_job_can_tell_why(
    world: World, budget: bool, calls: list[str]
) -> None:
    world.node()
    await opened(world)
    if budget:
        world.server.disrupted.add((NAMESPACE, "one"))
    world.pod_phase("Running")
    await world.look()
    world.change("gpunodes", "node-a", lambda item: item["spec"].update(tenants=[]))
    await world.look()
    deleted = (world.read("pods") or {"metadata": {"deletionTimestamp": "deleted"}})["metadata"].get(
        "deletionTimestamp"
    )
    assert deleted
    assert [verb for verb in ("evict", "delete") if world.server.made(verb, "pods")] == calls
    await world.until(lambda: bool(world.notes("ReservationLost")))


@pytest.mark.promise("operator-line-volume-resize")
async def test_the_annotation_lowers_the_share_and_its_memory_stays(world: World) -> None:
    world.node()
    tenant = await opened(world, line={"sharepod.dev/gpu-milli": "400"})
    memory = world.rows()[tenant]["memory"]
    world.pod_phase("Running")
    await world.look()
    changed: list[str] = []
    world.state.on_tenant_changed = changed.append
    world.change(
        "pods", "one", lambda item: item["metadata"]["annotations"].update({"sharepod.dev/gpu-request": "0.2"})
    )
    await world.relist()
    assert tenant in changed
    await world.look()
    await world.until(lambda: world.rows()[tenant]["requestMilli"] == 200)
    assert world.rows()[tenant]["memory"] == memory


@pytest.mark.promise("operator-line-capacity-least")
async def test_a_pod_whose_row_was_given_away_while_it_hangs_is_advertised_on_top(world: World) -> None:
    world.node()
    world.nodes.lines_in_force = True
    await world.look_at_node()
    tenant = await opened(world)
    world.pod_phase("Running")
    world.delete("pods")
    world.change("gpunodes", "node-a", lambda item: item["spec"].update(tenants=[]))
    await world.look_at_node()
    assert tenant not in world.rows()
    assert (world.read("nodes", "node-a") or {})["status"]["allocatable"]["sharepod.dev/gpu-milli"] == "1400"
    world.pod_gone()
    await world.look_at_node()
    assert (world.read("nodes", "node-a") or {})["status"]["allocatable"]["sharepod.dev/gpu-milli"] == "1000"


@pytest.mark.promise("operator-line-room-first")
@pytest.mark.parametrize("writes", [True, False])
async def test_a_gate_opens_once_the_node_advertises_what_a_lowered_share_carries_or_cannot(
    world: World, writes: bool
) -> None:
    world.node()
    world.nodes.lines_in_force = True
    await world.look_at_node()
    lowered = await opened(world, line={"sharepod.dev/gpu-milli": "800", "sharepod.dev/gpu-memory-mib": "1024"})
    world.pod_phase("Running")
    world.change(
        "pods", "one", lambda item: item["metadata"]["annotations"].update({"sharepod.dev/gpu-request": "0.2"})
    )
    await world.look()
    await world.until(lambda: world.rows()[lowered]["requestMilli"] == 200)
    world.nodes.queue.clear()
    second = line_pod(world, name="two", line={**LINE, "sharepod.dev/gpu-milli": "800"})
    await world.look(second)
    await world.until(lambda: second in world.rows())
    await world.look(second)
    assert gates(world, "two") == ["sharepod.dev/share"], "kube-scheduler would find no room, and evict for it"
    assert world.due_in("node-a", world.nodes.queue) == 0
    assert world.looks_again(SOON_S, second)
    if writes:
        await world.look_at_node()
    else:
        world.now += 5.0
    await world.look(second)
    assert gates(world, "two") == []


@pytest.mark.promise("operator-line-room-first")
@pytest.mark.parametrize("what", ["a row given away", "a kubelet that registers again"])
async def test_a_gate_waits_where_more_is_needed_or_less_is_advertised_than_for_the_last_one(
    world: World, what: str
) -> None:
    world.node()
    world.nodes.lines_in_force = True
    await world.look_at_node()
    await opened(world)
    world.pod_phase("Running")
    await world.look()
    if what == "a row given away":
        world.delete("pods")
        world.change("gpunodes", "node-a", lambda item: item["spec"].update(tenants=[]))
    else:
        allocatable = {"cpu": "8", "memory": "64Gi", "pods": "110"}
        world.change("nodes", "node-a", lambda item: item["status"].update(allocatable=allocatable), status=True)
    second = line_pod(world, name="two")
    await world.look(second)
    await world.until(lambda: second in world.rows())
    await world.look(second)
    assert gates(world, "two") == ["sharepod.dev/share"]
    await world.look_at_node()
    await world.look(second)
    assert gates(world, "two") == []


@pytest.mark.promise("operator-line-volume-in-use")
async def test_none_is_placed_while_nodes_do_not_advertise_the_line(world: World) -> None:
    world.node()
    world.tenants.line_pods.in_force = lambda: False
    tenant = line_pod(world)
    await world.look()
    await world.until(lambda: bool(world.notes("Waiting")))
    assert tenant not in world.rows()
    world.tenants.line_pods.in_force = lambda: True
    await world.look()
    await world.until(lambda: tenant in world.rows())
