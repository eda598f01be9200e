"""Facts of Nodes and GPUNodes, read from objects of the API server.

Guarantees:
- These functions do not raise for any object with a uid and a name. An unreadable Node or GPUNode gets `error`, and
  nothing is placed there.
- All readable parts of a GPUNode are read. Unknown fields of a newer API version are ignored.
- The ids of unreadable rows are kept in `unreadable`, so that such a row does not count as missing.
- Unreadable consumption is ignored; it does not keep tenants from the node.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from sharepod.api.bounds import MAX_CONDITIONS, MAX_VALUES, clipped
from sharepod.api.consumption import MAX_CONSUMPTION, TAKEN_IN_ANNOTATION, TIMESTAMP_PATTERN, Consumption
from sharepod.api.gpunode import (
    CONDITION_AGENT_READY,
    Gpu,
    GPUNodeSpec,
    GPUNodeStatus,
    PluginHolder,
    Pool,
    Tenant,
    TenantStatus,
    cordoned,
)
from sharepod.api.objects import (
    FORCE_RELEASE_ANNOTATION,
    MAX_GPUS,
    MAX_TENANTS,
    POOL_LABEL,
    Condition,
)
from sharepod.api.pods.pod import GPU_RESOURCE_PATTERN
from sharepod.controller.state.reading.entries import Entries, entries, with_lists
from sharepod.controller.state.reading.fitting import CONDITIONS, texts
from sharepod.placement.state.needs import parse_allocatable, parse_taints
from sharepod.placement.state.types import Resources, Taint

from .object_facts import Json, ObjectFacts, common, mapping, whole_number

OUT_OF_SERVICE_TAINT = "node.kubernetes.io/out-of-service"
_UNKNOWN = Resources(1 << 62, 1 << 62)
"""Resources of an unreadable Node: so large that no tenant is reported as never fitting there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeFacts(ObjectFacts):
    """Facts of a Node in a pool. `pods`: number of pods that it can run."""

    labels: Mapping[str, str]
    taints: tuple[Taint, ...]
    pool: str
    ready: bool
    allocatable: Resources
    pods: int
    error: str | None

    @property
    def plugin_resources(self) -> tuple[str, ...]:
        """Names of NVIDIA's device plugin resources that the Node advertises."""
        return tuple(
            name
            for name, amount in sorted(self.allocatable.extended.items())
            if amount > 0 and re.match(GPU_RESOURCE_PATTERN, name)
        )

    @property
    def double_booked(self) -> bool:
        """True if all GPUs of the Node belong to SharePod by its pool, while NVIDIA's device plugin offers them to
        other Pods."""
        return self.pool in (Pool.DEDICATED, Pool.SCHEDULER) and bool(self.plugin_resources)

    @property
    def out_of_service(self) -> bool:
        """True if an administrator has tainted the Node as out of service, and so asserts that no process runs
        there."""
        return any(taint.key == OUT_OF_SERVICE_TAINT for taint in self.taints)


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuNodeLists:
    """Entries of the lists of one version of a GPUNode, as read."""

    rows: Entries[Tenant] = field(default_factory=Entries)
    holders: Entries[PluginHolder] = field(default_factory=Entries)
    gpus: Entries[Gpu] = field(default_factory=Entries)
    tenants: Entries[TenantStatus] = field(default_factory=Entries)
    conditions: Entries[Condition] = field(default_factory=Entries)
    consumption: Entries[Consumption] = field(default_factory=Entries)


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuNodeFacts(ObjectFacts):
    """Facts of a GPUNode."""

    generation: int
    spec: GPUNodeSpec
    status: GPUNodeStatus
    has_tenants: bool
    """True if the field `spec.tenants` exists."""
    forced: frozenset[str]
    """Tenants that the annotation force-release lists."""
    taken_in: frozenset[str]
    """Closed series of consumption that statements have stored, as the operator's annotation lists them for the
    agent."""
    error: str | None
    """Error in reading the GPUNode; nothing is placed on the node then. None if it was read."""
    cordoned: frozenset[str] = frozenset()
    """UUIDs and indexes of the GPUs that an administrator has cordoned."""
    ledger_error: str | None = None
    """Error in reading its spec; nothing is written to the GPUNode then. None if the spec was read."""
    unreadable: frozenset[str] = frozenset()
    """Tenants whose rows are unreadable."""
    lists: GpuNodeLists = field(default_factory=GpuNodeLists, repr=False, compare=False)
    """Its lists as read, so that the reader of the next version can reuse unchanged entries."""

    rows: Mapping[str, Tenant] = field(init=False, repr=False, compare=False)
    """Rows of the ledger by tenant, in their order."""

    gpus: Mapping[str, Gpu] = field(init=False, repr=False, compare=False)
    """GPUs that the agent reports, by UUID."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "rows", {row.id: row for row in self.spec.tenants})
        object.__setattr__(self, "gpus", {gpu.uuid: gpu for gpu in self.status.gpus})

    def seen(self, tenant: str) -> TenantStatus | None:
        """Return the agent's report of a tenant. None if there is none."""
        known = self.lists.tenants.read.get(tenant)
        return known[1] if known is not None else None

    def missing_gpus(self, gpus: Iterable[str]) -> tuple[str, ...]:
        """Return the given GPUs that the agent does not report. Empty while the agent does not report that it
        serves."""
        missing = tuple([uuid for uuid in gpus if uuid not in self.gpus])
        if not missing:
            return ()
        serves = (item.type == CONDITION_AGENT_READY and item.status == "True" for item in self.status.conditions)
        return missing if self.error is None and any(serves) else ()


def node_facts(raw: Json) -> NodeFacts:
    """Return the facts of a Node."""
    metadata, status = mapping(raw.get("metadata")), mapping(raw.get("status"))
    error: str | None = None
    labels = mapping(metadata.get("labels"))
    taints: tuple[Taint, ...] = ()
    allocatable, pods, ready = Resources(), 0, False
    if len(labels) > MAX_VALUES or not all(isinstance(value, str) for value in labels.values()):
        error, labels = f"has {len(labels)} labels, which cannot be read", texts(labels)
    try:
        taints = parse_taints(mapping(raw.get("spec")))
        allocatable, pods = parse_allocatable(status)
        conditions = {item.get("type"): item for item in CONDITIONS(status.get("conditions")) or ()}
        ready = (conditions.get("Ready") or {}).get("status") == "True"
    except Exception as found:  # nothing is placed there until the Node is readable
        error, allocatable = clipped(f"cannot be read: {found}"), _UNKNOWN
    return NodeFacts(
        **common(metadata),
        labels=labels,
        taints=taints,
        pool=str(labels.get(POOL_LABEL) or ""),
        ready=ready,
        allocatable=allocatable,
        pods=pods,
        error=error,
    )


def gpunode_facts(raw: Json, before: GpuNodeFacts | None = None) -> GpuNodeFacts:
    """Return the facts of a GPUNode. `before`: facts of an earlier version, whose unchanged entries are reused."""
    metadata = mapping(raw.get("metadata"))
    spec_raw, status_raw = mapping(raw.get("spec")), mapping(raw.get("status"))
    was = before.lists if before is not None else GpuNodeLists()
    faults: list[str] = []
    rows = entries(Tenant, spec_raw, "tenants", MAX_TENANTS, faults, was.rows)
    holders = entries(PluginHolder, spec_raw, "holders", MAX_GPUS, faults, was.holders)
    spec = with_lists(GPUNodeSpec, spec_raw, faults, tenants=rows.models, holders=holders.models)
    ledger_faults = len(faults)
    gpus = entries(Gpu, status_raw, "gpus", MAX_GPUS, faults, was.gpus)
    tenants = entries(TenantStatus, status_raw, "tenants", MAX_TENANTS, faults, was.tenants)
    conditions = entries(Condition, status_raw, "conditions", MAX_CONDITIONS, faults, was.conditions)
    consumption = entries(Consumption, status_raw, "consumption", MAX_CONSUMPTION, [], was.consumption)
    as_of = status_raw.get("consumptionAt")
    status = with_lists(
        GPUNodeStatus,
        {name: value for name, value in status_raw.items() if name != "consumptionAt"},
        faults,
        gpus=gpus.models,
        tenants=tenants.models,
        conditions=conditions.models,
        consumption=consumption.models,
        consumption_at=as_of if isinstance(as_of, str) and re.match(TIMESTAMP_PATTERN, as_of) else None,
    )
    error = clipped(f"has a GPUNode that cannot be read (upgrade the operator?): {faults[0]}") if faults else None
    annotations = texts(metadata.get("annotations"))
    forced = annotations.get(FORCE_RELEASE_ANNOTATION, "")
    return GpuNodeFacts(
        **common(metadata),
        generation=whole_number(metadata.get("generation")),
        spec=spec,
        status=status,
        has_tenants="tenants" in spec_raw,
        taken_in=frozenset(annotations.get(TAKEN_IN_ANNOTATION, "").split(",", MAX_CONSUMPTION)),
        forced=frozenset(part.strip() for part in forced.split(",", MAX_TENANTS)[:MAX_TENANTS] if part.strip()),
        error=error,
        cordoned=cordoned(annotations),
        ledger_error=error if ledger_faults else None,
        unreadable=rows.unreadable,
        lists=GpuNodeLists(
            rows=rows,
            holders=holders,
            gpus=gpus,
            tenants=tenants,
            conditions=conditions,
            consumption=consumption,
        ),
    )
