"""Small clusters and requests for the tests of placement. A test sets only the values that matter to it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from sharepod.api.gpunode import Latency, Mode, SchedulingLabels
from sharepod.api.sharepod import GpuRequest, PlacementPolicy
from sharepod.api.units import WHOLE_GPU, Bytes, GpuUuid, Milli, TenantId
from sharepod.placement.engine import Engine
from sharepod.placement.state.cluster import Cluster
from sharepod.placement.state.types import (
    Assignment,
    GpuState,
    NodeState,
    PlacementRequest,
    PodNeeds,
    Refusal,
    Reservation,
    Resources,
    Taint,
)

GI = 1 << 30


def gpu(node: str, index: int, *, memory: int = 80 * GI, model: str = "A100", broken: str | None = None) -> GpuState:
    return GpuState(
        uuid=GpuUuid(f"GPU-{node}-{index}"),
        index=index,
        model=model,
        memory=Bytes(memory),
        available=broken is None,
        reason=broken or "",
    )


def node(
    name: str = "node-a",
    gpus: int | Sequence[GpuState] = 1,
    *,
    labels: Mapping[str, str] | None = None,
    taints: tuple[Taint, ...] = (),
    unavailable: str | None = None,
    cpu: int = 64_000,
    memory: int = 512 * GI,
    extended: Mapping[str, int] | None = None,
    pods: int = 110,
) -> NodeState:
    return NodeState(
        name=name,
        labels=labels or {},
        taints=taints,
        unavailable=unavailable,
        allocatable=Resources(cpu, memory, extended or {}),
        pods=pods,
        gpus=tuple(gpu(name, index) for index in range(gpus)) if isinstance(gpus, int) else tuple(gpus),
    )


class ClusterWithEngine(Cluster):
    """A cluster, and the engine that decides over it."""

    def __init__(self, *, interactive_per_gpu: int = 1, max_excluded_gpus: int | None = None) -> None:
        super().__init__(interactive_per_gpu=interactive_per_gpu, max_excluded_gpus=max_excluded_gpus)
        self.engine = Engine(self)

    def read_back(self, node: str, written: Reservation, generation: int) -> None:
        """Load the node's ledger with this row as just written, and all other rows unchanged."""
        account = self.accounts[node]
        rows = {tenant: row.written for tenant, row in account.rows.items() if row.written is not None}
        self.load(node, {**rows, written.tenant: written}.values(), generation)


def cluster_of(
    *nodes: NodeState, interactive_per_gpu: int = 1, max_excluded_gpus: int | None = None
) -> ClusterWithEngine:
    cluster = ClusterWithEngine(interactive_per_gpu=interactive_per_gpu, max_excluded_gpus=max_excluded_gpus)
    for state in nodes:
        cluster.upsert_node(state)
    return cluster


def ask(
    tenant: str = "t",
    request: int = 500,
    *,
    memory: int | None = None,
    count: int = 1,
    mode: Mode = Mode.SHARED,
    affinity: str | None = None,
    anti_affinity: str | None = None,
    exclusion: str | None = None,
    placement: PlacementPolicy = PlacementPolicy.BINPACK,
    uuids: Sequence[str] = (),
    models: Sequence[str] = (),
    namespace: str = "team",
    owner: str | None = None,
    pod: PodNeeds | None = None,
    avoid: Mapping[str, str] | None = None,
) -> PlacementRequest:
    exclusive = mode is Mode.EXCLUSIVE
    return PlacementRequest(
        tenant=TenantId(tenant),
        namespace=namespace,
        name=tenant,
        owner=owner,
        gpu=GpuRequest(
            request_milli=WHOLE_GPU if exclusive else Milli(request),
            limit_milli=WHOLE_GPU,
            memory=None if memory is None else Bytes(memory),
            count=count,
            mode=mode,
            labels=SchedulingLabels(affinity=affinity, anti_affinity=anti_affinity, exclusion=exclusion),
            placement=placement,
            uuids=tuple(uuids),
            models=tuple(models),
        ),
        pod=pod or PodNeeds(),
        avoid=avoid or {},
    )


def interactive(request: PlacementRequest) -> PlacementRequest:
    """Return the same request, of latency Interactive."""
    return replace(request, gpu=replace(request.gpu, latency=Latency.INTERACTIVE))


def put(cluster: ClusterWithEngine, request: PlacementRequest) -> Assignment:
    """Place a request and reserve its place. Fails if it is refused."""
    answer = cluster.engine.place(request)
    assert isinstance(answer, Assignment), answer.message
    cluster.engine.reserve(request, answer)
    return answer


def refused(cluster: ClusterWithEngine, request: PlacementRequest) -> Refusal:
    """Return the refusal of a request. Fails if it has a place."""
    answer = cluster.engine.place(request)
    assert isinstance(answer, Refusal), answer
    return answer


def row(
    tenant: str = "t", request: int = 500, *, gpus: Sequence[str] = ("GPU-node-a-0",), memory: int = 4 * GI
) -> Reservation:
    return Reservation(
        tenant=TenantId(tenant),
        namespace="team",
        pod_name=tenant,
        gpus=tuple(GpuUuid(uuid) for uuid in gpus),
        request_milli=Milli(request),
        limit_milli=WHOLE_GPU,
        memory=Bytes(memory),
    )
