"""Strategies for the properties of placement: small nodes, and requests that often compete with each other."""

from __future__ import annotations

from collections.abc import Callable
from itertools import combinations

from hypothesis import strategies as st
from sharepod.api.gpunode import Latency, Mode, SchedulingLabels
from sharepod.api.sharepod import GpuRequest, PlacementPolicy
from sharepod.api.units import Bytes, GpuUuid, Milli, TenantId
from sharepod.placement.holders import DEVICE_PLUGIN_RESOURCE
from sharepod.placement.state.types import (
    GpuState,
    NodeRequirement,
    NodeSelectorTerm,
    NodeState,
    PlacementRequest,
    PodNeeds,
    Resources,
    Taint,
    Toleration,
)

UNIT = 1 << 20
CPU = 1_000
HUGE = "hugepages-2Mi"
CORDONED = Taint("node.kubernetes.io/unschedulable")

labels = st.sampled_from([None] * 8 + ["x", "y"])
groups = st.sampled_from([None] * 4 + ["x", "y"])
shares = st.sampled_from([0, 1, 100, 200, 300, 333, 500, 700, 1000])
sizes = st.sampled_from([None, 1 * UNIT, 3 * UNIT, 20 * UNIT, 45 * UNIT, 100 * UNIT])

Terms = tuple[NodeSelectorTerm, ...]


def _term(key: str, operator: str, *values: str) -> NodeSelectorTerm:
    return NodeSelectorTerm(expressions=(NodeRequirement(key, operator, values),))


AFFINITIES: dict[Terms, Callable[[NodeState], bool]] = {
    (): lambda node: True,
    (_term("zone", "In", "a", "c"),): lambda node: node.labels["zone"] == "a",
    (_term("tier", "Gt", "1"),): lambda node: "tier" in node.labels and int(node.labels["tier"]) > 1,
    (
        NodeSelectorTerm(fields=(NodeRequirement("metadata.name", "In", ("n0",)),)),
        _term("tier", "DoesNotExist"),
    ): lambda node: node.name == "n0" or "tier" not in node.labels,
    (
        NodeSelectorTerm(
            expressions=(NodeRequirement("zone", "NotIn", ("a",)), NodeRequirement("tier", "Exists")),
        ),
    ): lambda node: node.labels["zone"] != "a" and "tier" in node.labels,
}
"""For each required node affinity: its meaning as a predicate on a node."""


@st.composite
def gpu_requests(draw: st.DrawFn) -> GpuRequest:
    mode = draw(st.sampled_from([Mode.SHARED] * 9 + [Mode.EXCLUSIVE]))
    request = 1000 if mode is Mode.EXCLUSIVE else draw(shares)
    memory = None if mode is Mode.EXCLUSIVE else draw(sizes)
    if request == 0 and memory is None:
        memory = UNIT
    return GpuRequest(
        request_milli=Milli(request),
        limit_milli=Milli(1000),
        memory=None if memory is None else Bytes(memory),
        count=draw(st.sampled_from([1, 1, 1, 2, 3])),
        mode=mode,
        latency=Latency.NORMAL if request in (0, 1000) else draw(st.sampled_from([Latency.NORMAL] * 3 + [*Latency])),
        labels=SchedulingLabels(affinity=draw(groups), anti_affinity=draw(labels), exclusion=draw(labels)),
        placement=draw(st.sampled_from(PlacementPolicy)),
        models=draw(st.sampled_from([()] * 12 + [("big",), ("big",), ("none",)])),
        uuids=draw(st.sampled_from([()] * 16 + [("GPU-n0-0", "GPU-n0-1", "GPU-n1-0"), ("GPU-n2-3",)])),
    )


resources = st.builds(
    Resources,
    st.sampled_from([0, 0, 0, CPU, 3 * CPU]),
    st.sampled_from([0, 0, 0, 0, UNIT, 8 * UNIT]),
    st.sampled_from([{}] * 7 + [{HUGE: 1}]),
)

pods = st.builds(
    PodNeeds,
    resources=resources,
    node_selector=st.sampled_from([{}, {}, {}, {}, {"zone": "a"}]),
    node_affinity_terms=st.sampled_from([()] * 16 + list(AFFINITIES)),
    tolerations=st.sampled_from([(), (Toleration("gpu", "Exists"),), (Toleration(operator="Exists"),)]),
)

requests = st.builds(
    PlacementRequest,
    tenant=st.just(TenantId("")),
    name=st.just(""),
    namespace=st.sampled_from(["one", "one", "two"]),
    gpu=gpu_requests(),
    owner=st.sampled_from([None, "a", "b"]),
    pod=pods,
    priority=st.sampled_from([0, 0, 5]),
    avoid=st.sampled_from([{}] * 9 + [{"n0": "was refused by kube-scheduler"}]),
)


@st.composite
def node_states(draw: st.DrawFn, name: str) -> NodeState:
    kinds = draw(
        st.lists(
            st.sampled_from([("big", 100), ("big", 50), ("small", 50)]),
            min_size=draw(st.sampled_from([4, 3, 2, 0])),
            max_size=4,
        )
    )
    plugin = draw(st.sampled_from([False] * 4 + [True]))
    held = draw(st.integers(0, len(kinds))) if plugin else len(kinds)
    links: dict[int, tuple[tuple[GpuUuid, str], ...]] = {}
    if draw(st.booleans()):
        for one, other in combinations(range(len(kinds)), 2):
            if kind := draw(st.sampled_from([None, None, "NVLINK", "PIX", "SYS"])):
                links[one] = (*links.get(one, ()), (GpuUuid(f"GPU-{name}-{other}"), kind))
    extended = {HUGE: 2, DEVICE_PLUGIN_RESOURCE: len(kinds) - held} if plugin else {HUGE: 2}
    return NodeState(
        name=name,
        labels={"zone": draw(st.sampled_from(["a", "a", "b"])), **draw(st.sampled_from([{}, {"tier": "2"}]))},
        taints=draw(st.sampled_from([()] * 5 + [(Taint("gpu"),), (Taint("x", effect="PreferNoSchedule"),)])),
        allocatable=Resources(
            draw(st.sampled_from([20 * CPU, 20 * CPU, 2 * CPU])), draw(st.sampled_from([99, 99, 9])) * UNIT, extended
        ),
        pods=draw(st.sampled_from([110, 110, 5])),
        unavailable=draw(st.sampled_from([None] * 7 + ["is not ready"])),
        device_plugin=plugin,
        gpus=tuple(
            GpuState(
                uuid=GpuUuid(f"GPU-{name}-{index}"),
                index=index,
                model=kind,
                memory=Bytes(size * UNIT),
                available=draw(st.sampled_from([True] * 9 + [False])),
                reason="it is unhealthy",
                held=index < held,
                taken=index >= held and draw(st.sampled_from([False] * 3 + [True])),
                links=links.get(index, ()),
                numa_node=index % 2 if links else None,
            )
            for index, (kind, size) in enumerate(kinds)
        ),
    )
