"""Topology: several GPUs of one tenant are near each other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sharepod.api.gpunode import Mode
from sharepod.api.sharepod import PlacementPolicy
from sharepod.api.units import GpuUuid
from sharepod.placement.state.topology import Topology
from sharepod.placement.state.types import GpuState, NodeState
from unit.placement.world import ask, cluster_of, gpu, node, put

POLICIES = list(PlacementPolicy)


def linked(name: str, count: int, pairs: Mapping[tuple[int, int], str], numa: Sequence[int] = ()) -> NodeState:
    """Return a node whose GPUs are connected by `pairs` of indexes. Only one GPU of a pair names the link."""
    states = []
    for index in range(count):
        links = tuple((GpuUuid(f"GPU-{name}-{other}"), kind) for (one, other), kind in pairs.items() if one == index)
        states.append(replace(gpu(name, index), links=links, numa_node=numa[index] if numa else None))
    return node(name, states)


def indexes(uuids: Sequence[GpuUuid]) -> list[int]:
    return [int(uuid.rsplit("-", 1)[1]) for uuid in uuids]


@pytest.mark.promise("placement-nearest")
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("mode", list(Mode))
def test_linked_gpus_are_preferred(policy: PlacementPolicy, mode: Mode) -> None:
    cluster = cluster_of(linked("node-a", 4, {(0, 3): "NVLINK", (1, 2): "NVLINK"}))
    chosen = put(cluster, ask("t", 1000, count=2, placement=policy, mode=mode))
    assert indexes(chosen.gpus) in ([0, 3], [1, 2])
    other = put(cluster, ask("u", 1000, count=2, placement=policy, mode=mode))
    assert sorted(indexes(chosen.gpus) + indexes(other.gpus)) == [0, 1, 2, 3]


@pytest.mark.promise("placement-nearest")
def test_without_links_the_same_numa_node_is_preferred() -> None:
    cluster = cluster_of(linked("node-a", 4, {}, numa=(0, 1, 0, 1)))
    put(cluster, ask("small", 1000))
    assert indexes(put(cluster, ask("pair", 1000, count=2)).gpus) == [1, 3]


def test_the_same_numa_node_is_preferred_once_packing_has_learned_a_demand() -> None:
    cluster = cluster_of(linked("node-a", 4, {}, numa=(0, 1, 0, 1)))
    request = ask("pair", 500, count=2)
    for _ in range(64):
        cluster.engine.packing.arrived(request)
    cluster.engine.packing.renew()
    put(cluster, ask("small", 600))
    assert indexes(put(cluster, ask("pair", 500, count=2)).gpus) == [1, 3]


def test_a_worse_link_is_better_than_none_in_common() -> None:
    cluster = cluster_of(linked("node-a", 3, {(0, 1): "PHB", (0, 2): "SYS", (1, 2): "SYS"}))
    assert indexes(put(cluster, ask("pair", 300, count=2)).gpus) == [0, 1]


@pytest.mark.promise("placement-spread-first")
def test_replicas_are_spread_before_gpus_are_near() -> None:
    cluster = cluster_of(linked("node-a", 4, {(0, 1): "NVLINK", (1, 3): "PIX"}))
    put(cluster, ask("r1", 100, owner="rs", uuids=["GPU-node-a-0"]))
    replica = ask("r2", 100, count=2, owner="rs", placement=PlacementPolicy.SPREAD)
    assert indexes(put(cluster, replica).gpus) == [1, 3], "0 has a replica already"
    whole = ask("r3", 100, count=3, owner="rs", placement=PlacementPolicy.SPREAD)
    assert 2 in indexes(put(cluster, whole).gpus), "the GPU without a replica is among them"


def test_where_all_connections_are_alike_nothing_is_preferred() -> None:
    assert Topology.of([gpu("node-a", index) for index in range(8)]) is None
    same = tuple(replace(gpu("node-a", index), numa_node=0) for index in range(8))
    assert Topology.of(same) is None


@st.composite
def nodes_with_links(draw: st.DrawFn) -> tuple[GpuState, ...]:
    count = draw(st.integers(2, 6))
    kinds = st.sampled_from([None, "NVLINK", "PIX", "PXB", "PHB", "NODE", "SYS"])
    links: dict[int, list[tuple[GpuUuid, str]]] = {index: [] for index in range(count)}
    for one, other in combinations(range(count), 2):
        kind = draw(kinds)
        if kind is not None:
            links[one].append((GpuUuid(f"GPU-n-{other}"), kind))
    return tuple(
        replace(gpu("n", index), links=tuple(links[index]), numa_node=draw(st.sampled_from([None, 0, 1])))
        for index in range(count)
    )


@pytest.mark.promise("placement-nearest")
@given(nodes_with_links(), st.integers(2, 6))
def test_no_other_set_is_nearer(states: tuple[GpuState, ...], count: int) -> None:
    topology = Topology.of(states)
    uuids = [state.uuid for state in states]
    if topology is None or count > len(uuids):
        return
    chosen = topology.nearest(uuids, count)
    assert len(set(chosen)) == count
    assert topology.distance(chosen) == min(topology.distance(some) for some in combinations(uuids, count))


@pytest.mark.promise("placement-nearest")
def test_of_sixteen_gpus_a_group_that_is_linked_is_found() -> None:
    island = (2, 3, 6, 9, 11, 12, 13, 15)
    pairs = dict.fromkeys(combinations(island, 2), "NVLINK")
    state = linked("big", 16, pairs)
    topology = Topology.of(state.gpus)
    assert topology is not None
    assert indexes(sorted(topology.nearest([gpu.uuid for gpu in state.gpus], 8), key=lambda uuid: indexes([uuid]))) == [
        *island
    ]
