"""One node: its GPUNode is created and deleted with it, admins get advice, and force-release is carried out or
refused."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from functools import partial
from typing import Any

import pytest
from doubles.apiserver.errors import already_exists
from sharepod.api.objects import CORDONED_ANNOTATION, FORCE_RELEASE_ANNOTATION, POOL_LABEL
from sharepod.api.resource_line import MEMORY, MILLI, RESOURCES
from sharepod.controller.nodes import CONDITION_AGENT_ALIVE
from sharepod.controller.state.facts.node_facts import GpuNodeFacts
from sharepod.kube import Json
from unit.controller.acting_world import World, acting_world
from unit.controller.tenants.claim_steps import running

MOST_WORDS = 25
"""Most words in the sentence of an Event."""


@pytest.fixture
async def world() -> AsyncIterator[World]:
    async with acting_world() as made:
        yield made
        for event in made.server.storage.select(made.kind("events"), ""):
            note = event["note"]
            assert len(note.split()) <= MOST_WORDS, f"{event['reason']}: {note}"
            assert ". " not in note, f"an Event is one sentence: {note}"


def label(world: World, **labels: str) -> None:
    world.change("nodes", "node-a", lambda item: item["metadata"].update(labels=labels))


def agent_alive(world: World) -> Json:
    found = (world.read("gpunodes", "node-a") or {}).get("status") or {}
    condition: Json = {item["type"]: item for item in found.get("conditions", ())}.get(CONDITION_AGENT_ALIVE, {})
    return condition


def force(world: World, value: str) -> None:
    annotations = {FORCE_RELEASE_ANNOTATION: value}
    world.change("gpunodes", "node-a", lambda item: item["metadata"].update(annotations=annotations))


def notes(world: World, reason: str) -> list[str]:
    return world.notes(reason)


def has_events(world: World, reason: str, count: int) -> bool:
    return len(notes(world, reason)) == count


def cordon(world: World, value: str) -> None:
    annotations = {CORDONED_ANNOTATION: value}
    world.change("gpunodes", "node-a", lambda item: item["metadata"].update(annotations=annotations))


async def test_a_node_of_the_pool_gets_a_gpunode(world: World) -> None:
    world.node(gpunode=False)
    await world.look_at_node()
    assert (world.read("gpunodes", "node-a") or {})["spec"]["pool"] == "dedicated"
    assert world.state.gpunodes.named("node-a") is not None
    await world.look_at_node()
    assert len(world.server.made("create", "gpunodes")) == 1


@pytest.mark.promise("node-cordon-unknown")
async def test_a_cordon_of_no_gpu_is_named_once_in_an_event(world: World) -> None:
    world.node()
    for value, events in (("0,7", 1), ("0,7", 1), ("gpu-8,0", 2), ("0", 2), ("9", 3)):
        cordon(world, value)
        await world.look_at_node()
        await world.until(partial(has_events, world, "CordonUnknown", events))
    first, *_ = notes(world, "CordonUnknown")
    assert 'annotation sharepod.dev/cordoned: "7" is no GPU of the node; write an index or UUID' in str(first)


@pytest.mark.promise("install-other-nodes")
@pytest.mark.parametrize("labels", [{}, {POOL_LABEL: "swimming"}])
async def test_a_node_of_no_pool_gets_none(world: World, labels: dict[str, str]) -> None:
    world.node(gpunode=False)
    label(world, **labels)
    await world.look_at_node()
    assert world.read("gpunodes", "node-a") is None


async def test_a_misspelt_pool_is_reported_on_the_node_with_the_likely_name(world: World) -> None:
    world.node(gpunode=False)
    label(world, **{POOL_LABEL: "dedicted"})
    await world.look_at_node()
    await world.until(lambda: bool(world.notes("PoolUnknown")))
    (text,) = world.notes("PoolUnknown")
    assert '"dedicted" is not a pool' in text
    assert f"kubectl label node node-a --overwrite {POOL_LABEL}=dedicated" in text


async def test_a_gpunode_of_another_operator_is_taken_in(world: World) -> None:
    world.node()
    await world.relist()
    known = world.state.gpunodes.named("node-a")
    assert known is not None
    world.state.drop_gpunode(known.uid)
    world.state.gpunodes._ended.clear()  # the state is now as if the watch had never shown the end
    await world.nodes.reconcile("node-a")
    assert world.state.gpunodes.named("node-a") == known


async def test_a_gpunode_goes_with_its_node_once_its_ledger_is_empty(world: World) -> None:
    world.node()
    await world.placed()
    world.server.storage.delete(world.kind("nodes"), "", "node-a")
    await world.look_at_node()
    assert world.read("gpunodes", "node-a") is not None, "it has a tenant"
    assert world.state.gone_nodes == {"node-a"}
    assert world.looks_again(1.0, "node-a", world.nodes.queue), "no watch shows it if it comes back without its label"
    world.delete("sharepods")
    await world.look()
    await world.look()
    await world.until(lambda: world.rows()[world.tenant]["state"] == "Releasing")
    await world.look()
    await world.until(lambda: not world.rows())
    await world.look_at_node()
    assert world.read("gpunodes", "node-a") is None
    (deleted,) = world.server.made("delete", "gpunodes")
    assert deleted.body["preconditions"].keys() == {"uid", "resourceVersion"}


async def test_a_gpunode_changed_since_it_was_read_is_not_deleted(world: World) -> None:
    world.node()
    world.server.storage.delete(world.kind("nodes"), "", "node-a")
    await world.relist()
    world.report()
    await world.nodes.reconcile("node-a")
    assert world.read("gpunodes", "node-a") is not None
    assert world.looks_again(1.0, "node-a", world.nodes.queue)
    await world.look_at_node()
    assert world.read("gpunodes", "node-a") is None
    await world.look_at_node()
    assert len(world.server.made("delete", "gpunodes")) == 2, "there is nothing left to delete"


@pytest.mark.promise("operator-statement")
async def test_a_gpunode_goes_only_once_what_it_has_counted_is_written_down(world: World) -> None:
    written: list[bool] = [False, True]

    async def take_in(gpunodes: Iterable[GpuNodeFacts]) -> bool:
        assert [node.name for node in gpunodes] == ["node-a"]
        return written.pop(0)

    world.nodes.take_in = take_in
    world.node()
    counted = {"series": "a", "namespace": "team", "model": "T", "since": "2026-01-01T00:00:00.000Z"}
    world.server.storage.update(
        world.kind("gpunodes"),
        "",
        "node-a",
        lambda item: {**item, "status": {**item["status"], "consumption": [counted]}},
        status=True,
    )
    label(world)
    await world.look_at_node()
    assert world.read("gpunodes", "node-a") is not None
    assert world.looks_again(1.0, "node-a", world.nodes.queue)
    await world.look_at_node()
    assert world.read("gpunodes", "node-a") is None


async def test_a_node_that_left_the_pool_without_tenants_loses_its_gpunode(world: World) -> None:
    world.node()
    label(world)
    await world.look_at_node()
    assert world.read("gpunodes", "node-a") is None


@pytest.mark.promise("node-away")
async def test_a_node_that_left_the_pool_with_tenants_reports_the_remedy(world: World) -> None:
    world.node()
    await world.placed()
    label(world)
    await world.look_at_node()
    assert (agent_alive(world)["status"], agent_alive(world)["reason"]) == ("False", "PoolLabelGone")
    assert POOL_LABEL in agent_alive(world)["message"]
    await world.until(lambda: len(world.notes("AgentAway")) == 1)
    before = world.server.storage.version
    await world.look_at_node()
    assert world.server.storage.version == before, "written once"
    label(world, **{POOL_LABEL: "dedicated"})
    await world.nodes.reconcile("node-a")
    assert world.state.nodes.named("node-a") is not None, "the live read has brought it"


def advertise(world: World, **resources: str) -> None:
    def add(item: Json) -> None:
        item["status"]["allocatable"] = {"cpu": "8", "memory": "64Gi", "pods": "110", **resources}

    world.change("nodes", "node-a", add, status=True)


def unavailable(world: World) -> str | None:
    """Return the reason why placement skips the node. None if it does not."""
    account = world.state.cluster.node("node-a")
    assert account is not None
    assert account.state is not None
    return account.state.unavailable


def conditions(world: World) -> dict[str, tuple[str, str]]:
    """Return (status, reason) of the conditions of the node's GPUNode, by type."""
    found = (world.read("gpunodes", "node-a") or {}).get("status") or {}
    return {item["type"]: (item["status"], item["reason"]) for item in found.get("conditions", ())}


@pytest.mark.promise("install-device-plugin")
@pytest.mark.parametrize("resource", ["nvidia.com/gpu", "nvidia.com/gpu.shared", "nvidia.com/mig-1g.10gb"])
async def test_a_node_with_gpus_of_a_device_plugin_takes_no_tenant_and_reports_it(resource: str, world: World) -> None:
    world.node()
    advertise(world, **{resource: "4"})
    await world.look_at_node()
    assert conditions(world)["DevicePluginPresent"] == ("True", "ResourceAdvertised")
    await world.until(lambda: len(world.notes("DevicePluginPresent")) == 1)
    assert resource in (unavailable(world) or "")
    await world.look_at_node()
    assert len(world.notes("DevicePluginPresent")) == 1, "reported once"
    advertise(world, **{resource: "0"})
    await world.look_at_node()
    assert conditions(world)["DevicePluginPresent"] == ("False", "NoResource")
    assert unavailable(world) is None


async def test_a_device_plugin_beside_an_agent_that_is_away_shows_both(world: World) -> None:
    world.node(alive=False)
    advertise(world, **{"nvidia.com/gpu": "1"})
    await world.look_at_node()
    world.now += world.settings.agent_duration + 1
    await world.look_at_node()
    shown = conditions(world)
    assert shown["DevicePluginPresent"] == ("True", "ResourceAdvertised")
    assert shown["AgentAlive"] == ("False", "LeaseNotRenewed")


async def test_a_node_without_a_device_plugin_or_of_its_own_pool_shows_nothing(world: World) -> None:
    world.node()
    await world.look_at_node()
    assert "DevicePluginPresent" not in conditions(world)
    advertise(world, **{"nvidia.com/gpu": "1"})
    label(world, **{POOL_LABEL: "device-plugin"})
    await world.look_at_node()
    assert "DevicePluginPresent" not in conditions(world)


async def test_a_changed_pool_is_written_into_the_ledger(world: World) -> None:
    world.node()
    label(world, **{POOL_LABEL: "device-plugin"})
    await world.look_at_node()
    await world.until(lambda: (world.read("gpunodes", "node-a") or {})["spec"]["pool"] == "device-plugin")


@pytest.mark.promise("operator-scheduler-pool-leaves")
async def test_a_node_leaves_pool_scheduler_once_its_agent_has_withdrawn_its_devices(world: World) -> None:
    world.node()
    label(world, **{POOL_LABEL: "scheduler"})
    await world.look_at_node()

    def spec() -> Json:
        found: Json = (world.read("gpunodes", "node-a") or {})["spec"]
        return found

    await world.until(lambda: spec()["pool"] == "scheduler")
    label(world, **{POOL_LABEL: "dedicated"})
    await world.look_at_node()
    await world.until(lambda: bool(spec().get("leaving")))
    assert world.looks_again(1.0, "node-a", world.nodes.queue)
    await world.look_at_node()
    assert spec()["pool"] == "scheduler", "its agent has not confirmed that it withdrew its devices"
    withdrawn = {"type": "SlicesPublished", "status": "False", "reason": "Withdrawn"}
    world.report(conditions=[withdrawn])
    await world.look_at_node()
    await world.until(lambda: (spec()["pool"], spec().get("leaving")) == ("dedicated", False))


async def test_a_node_of_pool_scheduler_that_loses_its_label_with_tenants_takes_no_more(world: World) -> None:
    world.node()
    await world.placed()
    world.change("gpunodes", "node-a", lambda item: item["spec"].update(pool="scheduler"))
    label(world)
    await world.look_at_node()
    await world.until(lambda: bool((world.read("gpunodes", "node-a") or {})["spec"].get("leaving")))


@pytest.mark.promise("operator-scheduler-pool-one-allocator")
async def test_a_node_where_kube_scheduler_gives_shares_away_advertises_nothing_for_lines(world: World) -> None:
    world.node()
    world.nodes.lines_in_force = True
    await world.look_at_node()
    assert advertises(world)["allocatable"][MILLI] == "1000"
    label(world, **{POOL_LABEL: "scheduler"})
    await world.look_at_node()
    await world.until(lambda: (world.read("gpunodes", "node-a") or {})["spec"]["pool"] == "scheduler")
    await world.look_at_node()
    assert advertises(world)["allocatable"] == {MILLI: "0", MEMORY: "0"}


@pytest.mark.promise("node-gpu-events")
@pytest.mark.parametrize(
    ("broken", "reason"),
    [
        ({"health": "Unhealthy", "reason": "XID 79"}, "GpuFailed"),
        ({"shareable": False, "reason": "MIG is on"}, "GpuNotShareable"),
    ],
)
async def test_an_unusable_gpu_is_reported_once_and_so_is_its_recovery(
    world: World, broken: dict[str, Any], reason: str
) -> None:
    world.node()
    for fields in (broken, broken, {}, {}):
        gpus = [world.gpu("node-a", **fields)]
        world.report(gpus=gpus)
        await world.look_at_node()
    await world.until(lambda: bool(world.notes("GpuRecovered")))
    assert len(world.notes("GpuRecovered")) == 1
    (note,) = world.notes(reason)
    assert "GPU-node-a-0" in note
    assert broken["reason"] in note


async def test_force_release_of_a_running_sharepod_is_refused_by_name(world: World) -> None:
    world.node()
    await world.running()
    force(world, f"{world.tenant}, unknown")
    await world.look_at_node()
    await world.until(lambda: any("n/one" in note for note in world.notes("ForceReleaseRefused")))
    annotations = (world.read("gpunodes", "node-a") or {})["metadata"]["annotations"]
    assert FORCE_RELEASE_ANNOTATION in annotations, "it stays until it has done its work"
    assert world.tenant in world.rows()


async def test_force_release_of_a_claim_whose_pod_runs_is_refused_by_the_pods_name(world: World) -> None:
    world.node()
    await running(world)
    force(world, world.claim_uid())
    await world.look_at_node()
    await world.until(lambda: any("Pod n/user" in note for note in world.notes("ForceReleaseRefused")))
    await world.look_at_claim()
    assert world.claim_uid() in world.rows()


async def test_force_release_of_ended_tenants_waits_for_their_rows_then_the_annotation_goes(world: World) -> None:
    world.node()
    await world.running()
    world.delete("sharepods")
    await world.look()
    force(world, world.tenant)
    looked_at: list[str] = []
    world.state.on_tenant_changed = looked_at.append
    await world.look_at_node()
    assert world.tenant in looked_at
    assert FORCE_RELEASE_ANNOTATION in (world.read("gpunodes", "node-a") or {})["metadata"]["annotations"]
    await world.look()
    await world.until(lambda: not world.rows())
    await world.look_at_node()
    assert FORCE_RELEASE_ANNOTATION not in (world.read("gpunodes", "node-a") or {})["metadata"]["annotations"]
    assert world.notes("ForceReleaseRefused") == []


async def test_an_annotation_that_has_changed_meanwhile_is_looked_at_again(world: World) -> None:
    world.node()
    force(world, "first")
    await world.relist()
    force(world, "second")
    await world.nodes.reconcile("node-a")
    assert (world.read("gpunodes", "node-a") or {})["metadata"]["annotations"][FORCE_RELEASE_ANNOTATION] == "second"
    assert world.looks_again(1.0, "node-a", world.nodes.queue)
    await world.look_at_node()
    assert FORCE_RELEASE_ANNOTATION not in (world.read("gpunodes", "node-a") or {})["metadata"]["annotations"]


@pytest.mark.promise("node-away")
async def test_an_agent_that_is_away_gets_a_condition_with_advice_and_loses_it_when_back(world: World) -> None:
    world.node(alive=False)
    await world.look_at_node()
    assert agent_alive(world) == {}, "a new agent needs time to start"
    assert world.looks_again(world.settings.agent_duration + 0.1, "node-a", world.nodes.queue)
    world.now += world.settings.agent_duration
    await world.look_at_node()
    assert (agent_alive(world)["status"], agent_alive(world)["reason"]) == ("False", "LeaseNotRenewed")
    assert "kubectl -n system get pods" in agent_alive(world)["message"]
    await world.until(lambda: len(world.notes("AgentAway")) == 1)
    before = world.server.storage.version
    await world.look_at_node()
    assert world.server.storage.version == before, "written once"
    world.renew()
    await world.look_at_node()
    assert (agent_alive(world)["status"], agent_alive(world)["reason"]) == ("True", "LeaseRenewed")
    assert len(world.notes("AgentAway")) == 1


async def test_a_node_that_is_not_ready_is_not_blamed_on_its_agent(world: World) -> None:
    world.node(alive=False)
    world.change("nodes", "node-a", lambda item: item["status"].update(conditions=[]), status=True)
    world.now += 1000
    await world.look_at_node()
    await world.look_at_node()
    assert agent_alive(world) == {}


async def test_the_condition_of_the_operator_leaves_the_agents_report_alone(world: World) -> None:
    world.node(alive=False)
    await world.look_at_node()
    world.now += world.settings.agent_duration
    await world.look_at_node()
    status = (world.read("gpunodes", "node-a") or {})["status"]
    assert status["gpus"][0]["uuid"] == "GPU-node-a-0"
    assert agent_alive(world)["observedGeneration"] == 1


async def test_agents_that_come_or_go_bring_their_nodes_to_the_queue(world: World) -> None:
    world.node()
    world.node("node-b", alive=False)
    await world.relist()
    world.nodes.check_agents(acting=True)
    assert world.due_in("node-a", world.nodes.queue) == 0
    assert world.due_in("node-b", world.nodes.queue) is None
    world.nodes.queue.clear()
    world.nodes.check_agents(acting=True)
    assert world.due_in("node-a", world.nodes.queue) is None
    world.now += 21
    world.nodes.check_agents(acting=True)
    assert world.due_in("node-a", world.nodes.queue) == 0
    unavailable = world.state.cluster.node("node-a")
    assert unavailable is not None
    assert unavailable.state is not None
    assert "no agent" in str(unavailable.state.unavailable)


async def test_a_gpunode_is_created_once_by_two_operators(world: World) -> None:
    world.node()
    await world.relist()
    known = world.state.gpunodes.named("node-a")
    assert known is not None
    world.state.drop_gpunode(known.uid)
    world.server.fail("create", "gpunodes", refusal=already_exists("gpunodes", "node-a"))
    await world.nodes.reconcile("node-a")
    assert world.read("gpunodes", "node-a") is not None


def advertises(world: World) -> Json:
    found: Json = (world.read("nodes", "node-a") or {})["status"]
    return {kind: {name: found.get(kind, {}).get(name) for name in RESOURCES} for kind in ("capacity", "allocatable")}


@pytest.mark.promise("operator-line-capacity")
async def test_a_node_advertises_the_lines_resources_once_and_again_after_their_removal(world: World) -> None:
    world.node(gpus=2)
    await world.look_at_node()
    assert not world.server.made("patch", "nodes"), "it is not known whether lines are turned into claims"
    world.nodes.lines_in_force = True
    await world.look_at_node()
    await world.look_at_node()
    amounts = {MILLI: "2000", MEMORY: "32768"}
    assert advertises(world) == {"capacity": amounts, "allocatable": amounts}
    world.nodes.lines_in_force = None  # as after a restart of the operator
    await world.look_at_node()
    world.nodes.lines_in_force = True
    assert len(world.server.made("patch", "nodes")) == 1
    without = {"cpu": "8", "memory": "64Gi", "pods": "110"}
    ready = {"allocatable": without, "capacity": without, "conditions": [{"type": "Ready", "status": "True"}]}
    world.change("nodes", "node-a", lambda item: item.update(status=ready), status=True)
    await world.look_at_node()
    assert advertises(world) == {"capacity": amounts, "allocatable": amounts}


async def test_a_node_that_has_left_the_pool_advertises_the_line_until_its_tenants_have_ended(world: World) -> None:
    world.node(gpus=2)
    world.nodes.lines_in_force = True
    await world.look_at_node()
    await world.placed()
    label(world)
    await world.look_at_node()
    assert advertises(world)["allocatable"] == {MILLI: "2000", MEMORY: "32768"}
    world.change("gpunodes", "node-a", lambda item: item["spec"].update(tenants=[]))
    await world.relist()
    await world.look_at_node()
    nothing = dict.fromkeys(RESOURCES)
    assert advertises(world) == {"capacity": nothing, "allocatable": nothing}
    assert (world.read("nodes", "node-a") or {})["status"]["allocatable"]["cpu"] == "8", "the rest is the kubelet's"
    assert world.read("gpunodes", "node-a") is None


@pytest.mark.promise("operator-line-never-unclaimed")
async def test_a_node_advertises_nothing_where_lines_are_not_turned_into_claims(world: World) -> None:
    world.node()
    world.nodes.lines_in_force = False
    await world.look_at_node()
    assert not world.server.made("patch", "nodes")
    world.nodes.lines_in_force = True
    await world.look_at_node()
    world.nodes.lines_in_force = False
    await world.look_at_node()
    assert advertises(world)["allocatable"] == {MILLI: "0", MEMORY: "0"}
