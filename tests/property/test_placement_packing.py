"""What packing by usable capacity promises: it ranks and hides no place, and it gives the same answer again."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st
from property.placement_requests import UNIT, node_states, requests
from sharepod.api.sharepod import PlacementPolicy
from sharepod.api.units import GpuUuid, TenantId
from sharepod.placement.engine import find, find_host
from sharepod.placement.filters import gpu as gpu_filters
from sharepod.placement.filters import node as node_filters
from sharepod.placement.state.cluster import Cluster
from sharepod.placement.state.types import Assignment, PlacementRequest, PodNeeds, Resources


def _places(cluster: Cluster, request: PlacementRequest) -> dict[str, set[GpuUuid]]:
    """By node the GPUs that pass every filter, where they are enough, by asking each of them."""
    node_checks = [check.passes for check in node_filters.STATIC + node_filters.DYNAMIC]
    checks = [check.passes for check in gpu_filters.static(request) + gpu_filters.dynamic(request)]
    found = {}
    for node in cluster.nodes():
        gpus = {gpu.state.uuid for gpu in node.gpus if all(passes(gpu) for passes in checks)}
        if len(gpus) >= request.gpu.count and all(passes(node, request) for passes in node_checks):
            found[node.name] = set(gpus)
    return found


@st.composite
def histories(draw: st.DrawFn) -> tuple[Cluster, list[PlacementRequest]]:
    """A cluster that knows some demand, with requests to come; none of them in an affinity group."""
    cluster = Cluster()
    for name in draw(st.permutations(["node-a", "node-b", "node-c"])):
        cluster.upsert_node(draw(node_states(name)))
    asked = []
    for number, drawn in enumerate(draw(st.lists(requests, min_size=2, max_size=14))):
        labels = drawn.gpu.labels.model_copy(update={"affinity": None})
        gpu = replace(drawn.gpu, labels=labels, placement=PlacementPolicy.BINPACK)
        asked.append(replace(drawn, gpu=gpu, tenant=TenantId(f"t{number}"), name=f"t{number}"))
    return cluster, asked


def _settle(cluster: Cluster, request: PlacementRequest) -> Assignment | None:
    cluster.packing.arrived(request)
    if cluster.packing.due:
        cluster.packing.renew()
    answer = find(cluster, request)
    if answer is not None:
        cluster.reserve(answer.node, answer.reservation(request))
    return answer


@settings(max_examples=80, deadline=None)
@given(histories(), st.data())
def test_packing_finds_a_place_exactly_where_the_filters_leave_one(
    history: tuple[Cluster, list[PlacementRequest]], data: st.DataObject
) -> None:
    cluster, asked = history
    placed: list[tuple[str, TenantId]] = []
    for request in asked:
        cluster.packing.arrived(request)
        if cluster.packing.due:
            cluster.packing.renew()
        places = _places(cluster, request)
        answer = find(cluster, request)
        assert (answer is None) == (not places)
        if answer is not None:
            assert set(answer.gpus) <= places[answer.node]
            assert len(answer.gpus) == request.gpu.count
            cluster.reserve(answer.node, answer.reservation(request))
            placed.append((answer.node, request.tenant))
        leaves = data.draw(st.booleans())
        if placed and leaves:
            leaving = data.draw(st.integers(0, len(placed) - 1))
            cluster.release(*placed.pop(leaving))
        if data.draw(st.integers(0, 4)) == 0:
            cluster.upsert_node(data.draw(node_states("node-b")))


@settings(max_examples=30, deadline=None)
@given(histories())
def test_a_decision_does_not_depend_on_what_was_asked_before_without_being_placed(
    history: tuple[Cluster, list[PlacementRequest]],
) -> None:
    """Scores that were kept from one decision to the next are those that would be made anew."""
    cluster, asked = history
    for request in asked:
        for other in asked[:3]:
            find(cluster, other)
        kept = find(cluster, request)
        cluster.packing.forget()
        assert find(cluster, request) == kept
        _settle(cluster, request)


@settings(max_examples=30, deadline=None)
@given(histories(), st.integers(0, 30_000))
def test_a_pod_without_gpus_finds_a_node_where_one_takes_it(
    history: tuple[Cluster, list[PlacementRequest]], cpu: int
) -> None:
    cluster, asked = history
    for request in asked:
        _settle(cluster, request)
    needs = PodNeeds(resources=Resources(cpu, UNIT if cpu % 2 else 0))
    places = {node.name for node in cluster.nodes() if node_filters.takes_pod(node, needs)}
    host = find_host(cluster, needs)
    assert (host is None) == (not places)
    assert host is None or host in places
