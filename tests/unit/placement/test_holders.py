"""Nodes whose GPUs belong to NVIDIA's device plugin: a tenant gets the GPU of a holder, or a new holder is
requested."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from sharepod.api.gpunode import Mode
from sharepod.api.objects import MAX_HELD_LABEL
from sharepod.api.units import Bytes, GpuUuid, TenantId
from sharepod.placement.holders import DEVICE_PLUGIN_RESOURCE
from sharepod.placement.state.types import Assignment, NewHolder, NodeState, PodNeeds, Refusal, Resources
from sharepod.placement.state.whole_gpu_pods import WholeGpuPods
from unit.placement.world import GI, ask, cluster_of, gpu, node, put, refused


def plugin_node(
    name: str = "node-p", *, held: int = 0, gpus: int = 4, models: tuple[str, ...] = (), memory: tuple[int, ...] = ()
) -> NodeState:
    """Return a node of the device plugin. `held` of its GPUs belong to holders, whose Pods count like any other Pod."""
    states = [
        replace(
            gpu(name, index, model=(models or ("A100",) * gpus)[index], memory=(memory or (80 * GI,) * gpus)[index]),
            held=index < held,
        )
        for index in range(gpus)
    ]
    left = {DEVICE_PLUGIN_RESOURCE: gpus - held}
    return replace(node(name, states, extended=left), device_plugin=True)


def test_what_a_holder_has_comes_first() -> None:
    cluster = cluster_of(plugin_node(held=1))
    answer = cluster.engine.place_or_hold(ask("t", 500))
    assert isinstance(answer, Assignment)
    assert answer.gpus == (GpuUuid("GPU-node-p-0"),)


def test_a_dedicated_gpu_comes_before_a_new_holder() -> None:
    cluster = cluster_of(plugin_node("a-plugin"), node("b-dedicated"))
    answer = cluster.engine.place_or_hold(ask("t", 500))
    assert isinstance(answer, Assignment)
    assert answer.node == "b-dedicated"


def test_a_new_holder_is_asked_for_where_the_plugin_has_a_free_gpu() -> None:
    cluster = cluster_of(plugin_node(held=1))
    put(cluster, ask("first", 700))
    assert cluster.engine.place_or_hold(ask("second", 500)) == NewHolder(node="node-p", count=1, memory=Bytes(40 * GI))


def test_what_is_not_held_is_never_given_to_a_tenant() -> None:
    cluster = cluster_of(plugin_node())
    refusal = refused(cluster, ask("t", 500))
    assert "4 GPUs are with NVIDIA's device plugin and no holder has them" in refusal.message


def test_of_several_gpus_only_the_missing_ones_need_holders() -> None:
    cluster = cluster_of(plugin_node(held=2))
    put(cluster, ask("first", 700))
    assert cluster.engine.place_or_hold(ask("three", 500, count=3)) == NewHolder(
        node="node-p", count=2, memory=Bytes(40 * GI)
    )


def test_the_node_with_the_fewest_gpus_left_to_give_gets_the_holder() -> None:
    cluster = cluster_of(plugin_node("a"), plugin_node("b", gpus=2))
    answer = cluster.engine.place_or_hold(ask("t", 500))
    assert isinstance(answer, NewHolder)
    assert answer.node == "b"


def test_gpus_that_others_use_by_the_plugin_are_not_asked_for() -> None:
    cluster = cluster_of(plugin_node(gpus=2))
    for number in range(2):
        cluster.set_pod_usage("node-p", f"native-{number}", Resources(extended={DEVICE_PLUGIN_RESOURCE: 1}))
    assert isinstance(cluster.engine.place_or_hold(ask("t", 500)), Refusal)
    cluster.remove_pod("native-0")
    assert isinstance(cluster.engine.place_or_hold(ask("t", 500)), NewHolder)


@pytest.mark.promise("placement-holder-unknown")
def test_no_holder_is_asked_for_where_the_plugin_offers_a_gpu_that_the_agent_does_not_report() -> None:
    seen = plugin_node(gpus=2)
    cluster = cluster_of(replace(seen, gpus=seen.gpus[:1]))
    assert isinstance(cluster.engine.place_or_hold(ask("t", 500)), Refusal)
    cluster.upsert_node(seen)
    assert isinstance(cluster.engine.place_or_hold(ask("t", 500)), NewHolder)


def whole(gpus: int = 1, **needs: Any) -> PodNeeds:
    """Return the needs of a pending pod that requests `gpus` whole GPUs of the device plugin."""
    return PodNeeds(resources=Resources(extended={DEVICE_PLUGIN_RESOURCE: gpus}), **needs)


@pytest.mark.promise("placement-holder-demand")
def test_what_a_waiting_pod_could_have_whole_is_left_to_it() -> None:
    cluster = cluster_of(plugin_node(gpus=2))
    cluster.set_whole_gpu_pod("native-1", whole())
    assert isinstance(cluster.engine.place_or_hold(ask("t", 500)), NewHolder)
    cluster.set_whole_gpu_pod("native-2", whole())
    assert isinstance(cluster.engine.place_or_hold(ask("t", 500)), Refusal)
    cluster.set_whole_gpu_pod("native-2", None)
    assert isinstance(cluster.engine.place_or_hold(ask("t", 500)), NewHolder)


@pytest.mark.promise("placement-holder-demand")
@pytest.mark.parametrize(
    "needs", [whole(3), whole(2, node_selector={"zone": "another"})], ids=["too many", "elsewhere"]
)
def test_a_pod_that_cannot_have_a_nodes_gpus_keeps_none_of_them(needs: PodNeeds) -> None:
    cluster = cluster_of(plugin_node(gpus=2))
    cluster.set_whole_gpu_pod("native", needs)
    assert isinstance(cluster.engine.place_or_hold(ask("t", 500)), NewHolder)


@pytest.mark.promise("placement-holder-demand-many")
def test_pods_that_ask_the_same_are_looked_at_once_and_a_node_once_for_each_change() -> None:
    pods, state, room = WholeGpuPods(), plugin_node(), Resources(extended={DEVICE_PLUGIN_RESOURCE: 4})
    asked: list[PodNeeds] = []

    def could(_: NodeState, room: Resources, needs: PodNeeds) -> bool:
        asked.append(needs)
        return needs.resources.extended[DEVICE_PLUGIN_RESOURCE] <= room.extended[DEVICE_PLUGIN_RESOURCE]

    def answer(room: Resources) -> tuple[int, int]:
        """Return (number of GPUs that pods could have of this room, number of different needs compared to count it)."""
        asked.clear()
        found = pods.could_have(state, room, DEVICE_PLUGIN_RESOURCE, could)
        return found, len(asked)

    for number in range(100):
        pods.set(f"one-{number}", whole())
        pods.set(f"two-{number}", whole(2))
    pods.set("elsewhere", whole(2, node_selector={"zone": "another"}))
    assert answer(room) == (302, 3)
    assert answer(room) == (302, 0)
    assert answer(Resources(extended={DEVICE_PLUGIN_RESOURCE: 1})) == (100, 3)
    assert not pods.set("one-0", whole()), "nothing new"
    assert answer(Resources(extended={DEVICE_PLUGIN_RESOURCE: 1})) == (100, 0)
    assert pods.set("one-0", whole(2))
    assert pods.set("elsewhere", None)
    assert not pods.set("elsewhere", None)
    assert answer(room) == (301, 2)
    for number in range(100):
        pods.set(f"two-{number}", None)
    assert answer(room) == (101, 2)
    assert len(pods) == 100


@pytest.mark.promise("placement-holder-cap")
@pytest.mark.parametrize(
    ("most", "held", "more"), [("2", 1, True), ("2", 2, False), ("0", 0, False), ("two", 0, False)]
)
def test_a_node_has_no_more_gpus_held_than_its_label_says(most: str, held: int, more: bool) -> None:
    state = plugin_node(held=held)
    cluster = cluster_of(replace(state, labels={**state.labels, MAX_HELD_LABEL: most}))
    for number in range(held):
        put(cluster, ask(f"full-{number}", 1000))
    answer = cluster.engine.place_or_hold(ask("t", 500))
    assert isinstance(answer, NewHolder if more else Refusal)


@pytest.mark.promise("placement-holder-cap")
def test_holders_on_their_way_count_against_the_label() -> None:
    state = plugin_node()
    cluster = cluster_of(replace(state, labels={**state.labels, MAX_HELD_LABEL: "1"}))
    cluster.start_holder("node-p", "holder", TenantId("first"))
    assert isinstance(cluster.engine.place_or_hold(ask("t", 500)), Refusal)


def test_a_holder_in_flight_has_spoken_for_its_gpu_and_its_tenant_waits() -> None:
    cluster = cluster_of(plugin_node(gpus=2))
    cluster.start_holder("node-p", "h1", TenantId("t"))
    assert isinstance(cluster.engine.place_or_hold(ask("t", 500)), Refusal)
    assert isinstance(cluster.engine.place_or_hold(ask("u", 500)), NewHolder)
    cluster.start_holder("node-p", "h2", TenantId("u"))
    assert isinstance(cluster.engine.place_or_hold(ask("v", 500)), Refusal)
    cluster.end_holder("node-p", "h1")
    assert isinstance(cluster.engine.place_or_hold(ask("t", 500)), NewHolder)


def test_the_kubelet_chooses_so_every_gpu_it_could_give_has_to_suit() -> None:
    mixed = cluster_of(plugin_node(gpus=2, models=("A100", "T4")))
    assert isinstance(mixed.engine.place_or_hold(ask("t", 500, models=["A100"])), Refusal)
    assert isinstance(mixed.engine.place_or_hold(ask("t", 500)), NewHolder)
    small = cluster_of(plugin_node(gpus=2, memory=(80 * GI, 16 * GI)))
    assert isinstance(small.engine.place_or_hold(ask("t", 500, memory=20 * GI)), Refusal)
    named = cluster_of(plugin_node(gpus=2))
    assert isinstance(named.engine.place_or_hold(ask("t", 500, uuids=["GPU-node-p-0"])), Refusal)


def test_a_member_of_a_group_that_runs_never_gets_a_holder_of_its_own() -> None:
    cluster = cluster_of(plugin_node(held=1))
    put(cluster, ask("first", 700, affinity="g"))
    assert isinstance(cluster.engine.place_or_hold(ask("second", 500, affinity="g")), Refusal)


def test_an_exclusive_one_takes_whole_held_gpus_or_asks_for_holders() -> None:
    cluster = cluster_of(plugin_node(held=1))
    put(cluster, ask("first", 100))
    answer = cluster.engine.place_or_hold(ask("whole", mode=Mode.EXCLUSIVE))
    assert isinstance(answer, NewHolder)
    assert answer.count == 1
