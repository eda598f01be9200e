"""Promises of packing by usable capacity: it only ranks places, never excludes one, and gives the same answer for the
same state.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from property.placement_requests import UNIT, node_states, requests
from reference.pods_without_gpus import find_node, takes_pod
from sharepod.api.sharepod import PlacementPolicy
from sharepod.api.units import GpuUuid, TenantId
from sharepod.placement.filters import gpu as gpu_filters
from sharepod.placement.filters import node as node_filters
from sharepod.placement.state.types import Assignment, PlacementRequest, PodNeeds, Resources
from unit.placement.world import ClusterWithEngine

_ENDED = object()


def _places(cluster: ClusterWithEngine, request: PlacementRequest) -> dict[str, set[GpuUuid]]:
    """Return by node the GPUs that pass every filter, where they are as many as requested. Each filter is called
    directly, without packing.
    """
    node_checks = [check.passes for check in node_filters.STATIC + node_filters.DYNAMIC]
    checks = [check.passes for check in gpu_filters.static(request) + gpu_filters.dynamic(request)]
    found = {}
    for node in cluster.nodes():
        gpus = {gpu.state.uuid for gpu in node.gpus if all(passes(gpu) for passes in checks)}
        if len(gpus) >= request.gpu.count and all(passes(node, request) for passes in node_checks):
            found[node.name] = set(gpus)
    return found


@st.composite
def histories(draw: st.DrawFn) -> tuple[ClusterWithEngine, list[PlacementRequest]]:
    """Draw a cluster, and requests to be placed in it, none of them in an affinity group."""
    cluster = ClusterWithEngine(interactive_per_gpu=draw(st.integers(1, 3)))
    for name in draw(st.permutations(["node-a", "node-b", "node-c"])):
        cluster.upsert_node(draw(node_states(name)))
    asked = []
    for number, drawn in enumerate(draw(st.lists(requests, min_size=2, max_size=14))):
        labels = drawn.gpu.labels.model_copy(update={"affinity": None})
        gpu = replace(drawn.gpu, labels=labels, placement=PlacementPolicy.BINPACK)
        asked.append(replace(drawn, gpu=gpu, tenant=TenantId(f"t{number}"), name=f"t{number}"))
    return cluster, asked


def _settle(cluster: ClusterWithEngine, request: PlacementRequest) -> Assignment | None:
    cluster.engine.packing.arrived(request)
    if cluster.engine.packing.due:
        cluster.engine.packing.renew()
    answer = cluster.engine.find(request)
    if answer is not None:
        cluster.engine.reserve(request, answer)
    return answer


@pytest.mark.promise("placement-complete")
@settings(max_examples=80, deadline=None)
@given(histories(), st.data())
def test_packing_finds_a_place_exactly_where_the_filters_leave_one(
    history: tuple[ClusterWithEngine, list[PlacementRequest]], data: st.DataObject
) -> None:
    cluster, asked = history
    placed: list[tuple[str, TenantId]] = []
    for request in asked:
        cluster.engine.packing.arrived(request)
        if cluster.engine.packing.due:
            cluster.engine.packing.renew()
        places = _places(cluster, request)
        answer = cluster.engine.find(request)
        assert (answer is None) == (not places)
        if answer is not None:
            assert set(answer.gpus) <= places[answer.node]
            assert len(answer.gpus) == request.gpu.count
            cluster.engine.reserve(request, answer)
            placed.append((answer.node, request.tenant))
        leaves = data.draw(st.booleans())
        if placed and leaves:
            leaving = data.draw(st.integers(0, len(placed) - 1))
            cluster.release(*placed.pop(leaving))
        if data.draw(st.integers(0, 4)) == 0:
            cluster.upsert_node(data.draw(node_states("node-b")))


@settings(max_examples=30, deadline=None)
@given(histories())
def test_a_decision_does_not_depend_on_earlier_unplaced_requests(
    history: tuple[ClusterWithEngine, list[PlacementRequest]],
) -> None:
    """Decisions about other requests fill the engine's cache of scores. They must not change this decision."""
    cluster, asked = history
    for request in asked:
        for other in asked[:3]:
            cluster.engine.find(other)
        kept = cluster.engine.find(request)
        cluster.engine.packing._scores.clear()
        assert cluster.engine.find(request) == kept
        _settle(cluster, request)


@settings(max_examples=25, deadline=None)
@given(histories(), st.data())
def test_a_gpus_weight_follows_its_labels_whatever_happens_while_weights_are_renewed(
    history: tuple[ClusterWithEngine, list[PlacementRequest]], data: st.DataObject
) -> None:
    cluster, asked = history
    packing, renewal = cluster.engine.packing, None
    placed: list[tuple[str, TenantId]] = []
    for number, drawn in enumerate(asked * 2):
        request = replace(drawn, tenant=TenantId(f"tenant-{number}"))
        packing.arrived(request)
        renewal = renewal or packing.renewal()
        for _ in range(data.draw(st.integers(0, 9))):
            if next(renewal, _ENDED) is _ENDED:
                renewal = packing.renewal()
        answer = cluster.engine.find(request)
        if answer is not None:
            cluster.engine.reserve(request, answer)
            placed.append((answer.node, request.tenant))
        leaves = data.draw(st.booleans())
        if placed and leaves:
            cluster.release(*placed.pop(0))
        if data.draw(st.integers(0, 4)) == 0:
            cluster.upsert_node(data.draw(node_states("node-b")))
        packing.settle()
        columns = packing.columns
        for account in cluster.nodes():
            node = columns.positions[account.name]
            for position, gpu in enumerate(account.gpus):
                shares = columns.combinations.shares
                worth = shares.worth(gpu.exclusions, gpu.anti_affinity, full=gpu.interactive_full)
                expected = worth if gpu.tenants else 1.0
                assert columns.worth[node, position] == pytest.approx(expected)


@settings(max_examples=30, deadline=None)
@given(histories(), st.integers(0, 30_000))
def test_a_pod_without_gpus_is_bound_where_a_node_accepts_it(
    history: tuple[ClusterWithEngine, list[PlacementRequest]], cpu: int
) -> None:
    cluster, asked = history
    for request in asked:
        _settle(cluster, request)
    needs = PodNeeds(resources=Resources(cpu, UNIT if cpu % 2 else 0))
    places = {node.name for node in cluster.nodes() if takes_pod(node, needs)}
    host = find_node(cluster.engine, needs)
    assert (host is None) == (not places)
    assert host is None or host in places
