"""Holders on nodes of NVIDIA's device plugin: created, held, returned, withdrawn and lost, with a crash between any two
steps.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest
from doubles.apiserver.errors import Refused
from doubles.apiserver.server import api_server
from sharepod.api.objects import HOLDER_FOR_ANNOTATION, HOLDER_LABEL, POOL_LABEL
from sharepod.api.units import GpuUuid, TenantId
from sharepod.controller.apiserver.client import NotLeadingError
from sharepod.controller.state.holders_seen import WantedHolder
from sharepod.kube import ApiError, Json
from sharepod.placement.state.cluster_view import HeadReservation
from unit.controller.acting_world import PATIENCE_S, World, acting, acting_world

GPU = "GPU-node-a-0"


@pytest.fixture
async def world() -> AsyncIterator[World]:
    async with acting_world() as made:
        plugin_node(made)
        yield made


def plugin_node(world: World, name: str = "node-a", gpus: int = 1) -> None:
    """Create a node of pool `device-plugin` whose plugin has assigned no GPU."""
    world.node(name, gpus)
    labels = {POOL_LABEL: "device-plugin", "kubernetes.io/hostname": name}
    world.change("nodes", name, lambda item: item["metadata"].update(labels=labels))
    world.change(
        "nodes", name, lambda item: item["status"]["allocatable"].update({"nvidia.com/gpu": str(gpus)}), status=True
    )
    world.change("gpunodes", name, lambda item: item.update(spec={"pool": "device-plugin"}))
    kubelet_gives(world, name)


def holder_pods(world: World, node: str = "node-a") -> list[Json]:
    pods = world.server.storage.select(world.kind("pods"), "system")
    return [pod for pod in pods if HOLDER_LABEL in pod["metadata"].get("labels", {}) and node in str(pod["spec"])]


def holders(world: World, node: str = "node-a") -> list[str]:
    """Return the states of the holders in the ledger."""
    rows = (world.read("gpunodes", node) or {})["spec"].get("holders", ())
    return [row["state"] for row in rows]


def change_holder(world: World, pod: Json, status: bool = False, **fields: Json) -> None:
    def changed(item: Json) -> Json:
        return item | {name: {**(item.get(name) or {}), **field} for name, field in fields.items()}

    world.server.storage.update(world.kind("pods"), "system", pod["metadata"]["name"], changed, status=status)


def kubelet_gives(world: World, node: str = "node-a", pod: Json | None = None, *, taken: bool = False) -> None:
    """Assign the node's GPU as the kubelet does, and report it as the agent does. `pod`: Pod of the holder that gets
    the GPU. None: no holder has it. `taken`: another pod gets the GPU."""
    if pod is not None:
        change_holder(world, pod, spec={"nodeName": node})
    whose = {"holder": pod["metadata"]["uid"]} if pod else {}
    gpu = world.gpu(node, held=pod is not None, taken=taken, **whose)
    world.change("gpunodes", node, lambda item: item["status"].update(gpus=[gpu]), status=True)


def kubelet_ends(world: World, pod: Json) -> None:
    world.server.storage.finish_deletion(world.kind("pods"), "system", pod["metadata"]["name"])


async def wanted(world: World) -> Json:
    """Create a SharePod that waits, and a holder for it. Return the holder's Pod."""
    await world.gated(restartPolicy="Always")
    world.place()
    await world.until_answered(world.tenant)
    await world.look_at_holders()
    (pod,) = holder_pods(world)
    return pod


async def held(world: World, *, placing: bool = True) -> Json:
    """Create a holder that has a GPU by the ledger; return its Pod. `placing`: its tenant is placed on the GPU."""
    pod = await wanted(world)
    world._placing = placing
    await world.look_at_holders()
    await world.until(lambda: holders(world) == ["Pending"])
    kubelet_gives(world, "node-a", pod)
    await world.look_at_holders()
    await world.until(lambda: holders(world) == ["Held"])
    return pod


@pytest.mark.promise("placement-holder")
async def test_a_sharepod_gets_a_gpu_that_a_holder_takes_for_it(world: World) -> None:
    pod = await held(world)
    assert pod["metadata"]["annotations"][HOLDER_FOR_ANNOTATION] == world.tenant
    assert pod["spec"]["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] == "1"
    await world.relist()
    await world.until(lambda: world.tenant in world.rows())
    assert world.rows()[world.tenant]["gpus"] == [GPU]
    assert len(holder_pods(world)) == 1


@pytest.mark.promise("node-plugin-health")
@pytest.mark.parametrize("offered", [False, True], ids=["by the plugin's word", "by the agent's own"])
async def test_an_unhealthy_gpu_stops_holders_only_where_the_plugin_could_give_it(world: World, offered: bool) -> None:
    ill = {"health": "Unhealthy", "shareable": False, "offered": offered, "held": False}
    gpus = [world.gpu("node-a", held=False, offered=True), world.gpu("node-a", 1, **ill)]
    world.change("gpunodes", "node-a", lambda item: item["status"].update(gpus=gpus), status=True)
    await world.gated()
    world.place()
    await world.until_answered(world.tenant)
    await world.look_at_holders()
    assert len(holder_pods(world)) == int(not offered)


@pytest.mark.promise("placement-holder-idle")
async def test_a_holder_with_a_tenant_stays(world: World) -> None:
    await held(world)
    await world.until(lambda: world.tenant in world.rows())
    for _ in range(2):
        world.now += world.settings.holder_idle + 1
        await world.look_at_holders()
    assert holders(world) == ["Held"]


@pytest.mark.promise("placement-holder-idle")
async def test_a_holder_without_tenants_is_given_back_after_a_while_row_before_pod(world: World) -> None:
    pod = await held(world, placing=False)
    await world.look_at_holders()
    assert world.due_in("node-a", world.holders.queue) is not None
    world.now += world.settings.holder_idle + 1
    await world.look_at_holders()
    await world.until(lambda: holders(world) == ["Releasing"])
    assert not world.server.made("delete", "pods")
    await world.look_at_holders()
    assert "deletionTimestamp" in holder_pods(world)[0]["metadata"]
    kubelet_ends(world, pod)
    await world.look_at_holders()
    await world.until(lambda: holders(world) == [])


@pytest.mark.promise("placement-holder-demand")
async def test_an_idle_holder_goes_back_at_once_where_a_pod_waits_for_a_whole_gpu(world: World) -> None:
    await held(world, placing=False)
    await world.look_at_holders()
    native_waits(world)
    world.now += 3
    assert world.settings.holder_idle > 3
    await world.look_at_holders()
    await world.until(lambda: holders(world) == ["Releasing"])


def native_waits(world: World) -> None:
    container = {"name": "main", "image": "i", "resources": {"limits": {"nvidia.com/gpu": "1"}}}
    body = {"metadata": {"name": "native"}, "spec": {"containers": [container]}}
    world.server.storage.create(world.kind("pods"), "team", body)


def keep_for(world: World, whom: str, tenant: str = "comes") -> None:
    place = HeadReservation(TenantId(tenant), "node-a", frozenset({GpuUuid(GPU)}))
    if whom == "head of queue":
        world.state.cluster.reserve_for_head(place)
    else:
        world.state.cluster.keep(place)


@pytest.mark.promise("placement-holder-kept")
@pytest.mark.parametrize("native", [False, True], ids=["no pod", "a native pod"])
@pytest.mark.parametrize("whom", ["head of queue", "tenant that moves"])
async def test_a_holder_whose_gpu_is_kept_for_a_tenant_stays_until_it_is_kept_no_longer(
    world: World, whom: str, native: bool
) -> None:
    await held(world, placing=False)
    keep_for(world, whom)
    await world.look_at_holders()
    if native:
        native_waits(world)
    stays = whom == "tenant that moves" or not native
    for _ in range(3):
        world.now += world.settings.holder_idle + 1
        await world.look_at_holders()
    if stays:
        assert holders(world) == ["Held"]
        assert world.due_in("node-a", world.holders.queue) is not None, "it is looked at again"
        world.state.cluster.give_up(TenantId("comes"))
        world.state.cluster.reserve_for_head(None)
        await world.look_at_holders()
    await world.until(lambda: holders(world) == ["Releasing"])


async def test_a_gpu_that_is_to_be_given_back_takes_no_tenant_before_the_ledger_says_so(world: World) -> None:
    await held(world, placing=False)
    await world.look_at_holders()
    account = world.state.cluster.node("node-a")
    assert account is not None
    assert account.gpus[0].state.held
    world.now += world.settings.holder_idle + 1
    world.state.holders.giving_back.clear()
    gpunode = world.state.gpunodes.named("node-a")
    assert gpunode is not None
    world.holders._give_back(gpunode)
    assert not account.gpus[0].state.held


@pytest.mark.promise("placement-holder-withdrawn")
async def test_a_holder_that_gets_no_gpu_is_withdrawn_and_its_tenant_placed_elsewhere(world: World) -> None:
    await wanted(world)
    await world.look_at_holders()
    await world.until(lambda: holders(world) == ["Pending"])
    plugin_node(world, "node-b")
    await world.look_at_holders()
    world.now += world.settings.holder_pending + 1
    world.renew("node-a")
    world.renew("node-b")
    await world.look_at_holders()
    await world.until(lambda: holders(world) == ["Releasing"])
    await world.until(lambda: len(world.notes("HolderWithdrawn")) == 1)
    await world.look_at_holders()
    assert holder_pods(world) == [], "an unbound holder is deleted at once"
    await world.look_at_holders("node-b")
    (second,) = holder_pods(world, "node-b")
    assert second["metadata"]["annotations"][HOLDER_FOR_ANNOTATION] == world.tenant


@pytest.mark.promise("placement-holder-lost")
@pytest.mark.parametrize("how", ["deleted", "failed", "taken"])
async def test_tenants_of_a_gpu_with_a_lost_holder_are_ended(world: World, how: str) -> None:
    pod = await held(world)
    await world.until(lambda: world.tenant in world.rows())
    await world.look()
    await world.look()
    world.pod_phase("Running")
    await world.look()
    name = pod["metadata"]["name"]
    if how == "deleted":
        world.server.storage.delete(world.kind("pods"), "system", name)
    elif how == "failed":
        failed = {"phase": "Failed", "reason": "UnexpectedAdmissionError"}
        world.server.storage.update(
            world.kind("pods"), "system", name, lambda item: item | {"status": failed}, status=True
        )
    else:
        kubelet_gives(world, taken=True)
    await world.look_at_holders()
    await world.until(lambda: holders(world) == ["Releasing"])
    await world.look_at_holders()
    await world.until(lambda: "deletionTimestamp" in ((world.read("pods") or {"metadata": {}})["metadata"]))
    # one Event about the GPUNode, one about the SharePod
    await world.until(lambda: len(world.notes("HolderLost")) == 2)


@pytest.mark.promise("placement-holder-lost")
@pytest.mark.parametrize("known", [True, False], ids=["by the kubelet", "nothing is known"])
async def test_a_holder_that_the_kubelet_shows_with_no_gpu_for_long_has_lost_it(world: World, known: bool) -> None:
    await held(world)
    await world.until(lambda: world.tenant in world.rows())
    kubelet_gives(world)
    if not known:
        silent = {"type": "AgentReady", "status": "False", "reason": "DevicePluginUnusable", "message": "silent"}
        world.change("gpunodes", "node-a", lambda item: item["status"].update(conditions=[silent]), status=True)
    await world.look_at_holders()
    assert holders(world) == ["Held"], "a kubelet that starts shows its pods a moment later"
    assert world.looks_again(world.settings.holder_pending, "node-a", world.holders.queue)
    world.now += world.settings.holder_pending + 1
    world.renew()
    await world.look_at_holders()
    await asyncio.sleep(0.1)
    assert holders(world) == (["Releasing"] if known else ["Held"])


def driver_shows(world: World, *gpus: Json) -> None:
    world.change("gpunodes", "node-a", lambda item: item["status"].update(gpus=list(gpus)), status=True)


@pytest.mark.promise("placement-holder-gone")
@pytest.mark.parametrize("others", [0, 1], ids=["no GPU", "another GPU"])
async def test_a_holder_whose_gpu_is_gone_from_the_agents_report_has_lost_it_and_its_tenants_are_ended(
    world: World, others: int
) -> None:
    pod = await held(world)
    await world.until(lambda: world.tenant in world.rows())
    await world.look()
    await world.look()
    world.pod_phase("Running")
    await world.look()
    driver_shows(world, *(world.gpu("node-a", 7, held=False) for _ in range(others)))
    await world.look_at_holders()
    assert world.looks_again(world.settings.holder_pending, "node-a", world.holders.queue)
    world.now += world.settings.holder_pending + 1
    world.renew()
    await world.look_at_holders()
    await world.until(lambda: holders(world) == ["Releasing"])
    await world.look_at_holders()
    await world.until(lambda: "deletionTimestamp" in ((world.read("pods") or {"metadata": {}})["metadata"]))
    await world.until(lambda: len(world.notes("HolderLost")) == 2)
    assert all(f"no longer reports {GPU}" in note for note in world.notes("HolderLost"))
    assert "deletionTimestamp" in holder_pods(world)[0]["metadata"]
    kubelet_ends(world, pod)
    driver_shows(world, world.gpu("node-a", held=False))
    await world.look_at_holders()
    assert holders(world) == ["Releasing"], "its tenant's row is there"


@pytest.mark.promise("placement-holder-gone")
@pytest.mark.parametrize("how", ["comes back", "agent away", "nothing is known"])
async def test_a_gpu_that_is_gone_from_the_report_for_a_moment_or_by_no_agents_word_is_not_lost(
    world: World, how: str
) -> None:
    pod = await held(world)
    await world.until(lambda: world.tenant in world.rows())
    driver_shows(world)
    if how == "nothing is known":
        silent = {"type": "AgentReady", "status": "False", "reason": "InventoryUnavailable", "message": "silent"}
        world.change("gpunodes", "node-a", lambda item: item["status"].update(conditions=[silent]), status=True)
    for _ in range(3):
        await world.look_at_holders()
        world.now += world.settings.holder_pending - 1
        if how != "agent away":
            world.renew()
        if how == "comes back":
            kubelet_gives(world, "node-a", pod)
            await world.look_at_holders()
            driver_shows(world)
    if how == "agent away":
        await world.look_at_holders()
        assert world.looks_again(world.settings.holder_pending, "node-a", world.holders.queue)
    await asyncio.sleep(0.1)
    assert holders(world) == ["Held"]


@pytest.mark.promise("placement-holder-lost")
async def test_a_pod_with_the_name_of_a_holder_that_is_gone_inherits_nothing_of_it(world: World) -> None:
    pod = await held(world)
    await world.until(lambda: world.tenant in world.rows())
    name, pods = pod["metadata"]["name"], world.kind("pods")
    world.server.storage.delete(pods, "system", name)
    kubelet_ends(world, pod)
    metadata = {key: pod["metadata"][key] for key in ("name", "labels", "annotations")}
    second = world.server.storage.create(pods, "system", {"metadata": metadata, "spec": pod["spec"]})
    kubelet_gives(world, "node-a", pod=second)
    await world.look_at_holders()
    await world.until(lambda: holders(world) == ["Releasing", "Pending"])


@pytest.mark.parametrize("namespace", ["n", "team", "sharepod-system"])
async def test_a_labelled_pod_of_another_namespace_than_the_operators_is_no_holder(
    world: World, namespace: str
) -> None:
    pod = await held(world)
    metadata = {**pod["metadata"], "name": "sharepod-holder-forged"}
    for field in ("uid", "resourceVersion", "namespace"):
        metadata.pop(field)
    forged = world.server.storage.create(world.kind("pods"), namespace, {"metadata": metadata, "spec": pod["spec"]})
    world.state.other_pods.put(forged)
    await world.look_at_holders()
    await asyncio.sleep(0.05)
    assert holders(world) == ["Held"]
    assert world.state.holders.there(forged["metadata"]["uid"]) is None


BROKEN_WEBHOOK = Refused(500, "InternalError", 'failed calling webhook "somebodys": connection refused')


@pytest.mark.promise("placement-holder-lost")
async def test_tenants_of_a_lost_holder_are_ended_though_no_holder_can_be_created(world: World) -> None:
    pod = await held(world)
    await world.until(lambda: world.tenant in world.rows())
    await world.look()
    await world.look()
    world.pod_phase("Running")
    await world.look()
    world.server.fail("create", "pods", refusal=BROKEN_WEBHOOK, times=1000)
    world.state.holders.want([WantedHolder(name="another", node="node-a", tenant="waits")])
    world.server.storage.delete(world.kind("pods"), "system", pod["metadata"]["name"])
    for _ in range(2):
        with pytest.raises(ApiError):
            await world.look_at_holders()
        await world.until(lambda: holders(world) == ["Releasing"])
    await world.until(lambda: "deletionTimestamp" in ((world.read("pods") or {"metadata": {}})["metadata"]))


@pytest.mark.promise("placement-holder-withdrawn")
async def test_a_holder_that_cannot_be_created_is_given_up_and_its_tenant_placed_elsewhere(world: World) -> None:
    await world.gated()
    broken = world.server.fail("create", "pods", refusal=BROKEN_WEBHOOK, times=1000)
    world.place()
    await world.until_answered(world.tenant)
    with pytest.raises(ApiError):
        await world.look_at_holders()
    plugin_node(world, "node-b")
    world.now += world.settings.holder_pending + 1
    world.renew("node-a")
    world.renew("node-b")
    await world.look_at_holders()
    await world.until(lambda: len(world.notes("HolderRefused")) == 1)
    world.server.faults.remove(broken)
    await world.look_at_holders("node-b")
    (second,) = holder_pods(world, "node-b")
    assert second["metadata"]["annotations"][HOLDER_FOR_ANNOTATION] == world.tenant


@pytest.mark.promise("placement-holder-crash")
@pytest.mark.parametrize("writes", range(6))
async def test_an_operator_that_dies_between_any_two_writes_leaves_no_holder_to_its_successor(writes: int) -> None:
    async with api_server() as server:
        async with acting(server) as first:
            plugin_node(first)
            await first.gated(restartPolicy="Always")
            first.place()
            await first.until_answered(first.tenant)
            first._placing = False
            first.writes_left = writes
            with contextlib.suppress(ApiError, NotLeadingError):
                for _ in range(8):
                    await a_minute(first)
        async with acting(server, after=first) as second:
            second._placing = False
            async with asyncio.timeout(6 * PATIENCE_S):
                while holders(second) or holder_pods(second):
                    await a_minute(second)
    assert first.died


async def a_minute(world: World) -> None:
    """Let a minute pass: the kubelet assigns GPUs to holders and ends deleted holders; the operator reconciles
    and writes."""
    for pod in holder_pods(world):
        if "deletionTimestamp" in pod["metadata"]:
            kubelet_ends(world, pod)
            kubelet_gives(world)
        elif "nodeName" not in pod["spec"]:
            kubelet_gives(world, "node-a", pod)
    world.now += world.settings.holder_idle + 1
    world.renew()
    await world.look_at_holders()
    await asyncio.sleep(0.05)
