"""Accounts of one node: its rows of the ledger, the amounts of each GPU that they reserve, and the resources of the
node that pods take.

Guarantees:
- A row counts with the largest time and memory that the ledger may still contain for it. A raise counts as soon as it
  is decided, a lowering only once it is written. (CS1 of cluster.py depends on this.)
- A releasing row counts in full.
- Rows and pods of a node whose Node object is unknown are kept.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from sharepod.api.gpunode import Latency, Mode
from sharepod.api.units import WHOLE_GPU, GpuUuid, TenantId, format_fraction
from sharepod.placement.wording import size_down, size_up

from .exclusions import HALF_A_GPU, ExcludedGpus
from .topology import Topology
from .types import (
    GpuState,
    LabelKey,
    NodeState,
    Overcommit,
    PlacementError,
    PlacementRequest,
    Reservation,
    Resources,
    in_order,
    label_key,
    sum_of,
)


class Row:
    """One tenant's reservation: as the ledger has it, and as decided since.

    Args:
        wanted: the latest decision.
        written: the reservation in the ledger; None: the ledger has no such row yet.
        since: the row whose decision this one follows. That decision may still be in flight to the ledger
        (`in_flight`), so it counts too.

    `request_milli`, `memory` (bytes) and `gpus` are the amounts that count: the largest of the three rows.
    """

    __slots__ = ("gpus", "in_flight", "memory", "pending", "request_milli", "wanted", "written")

    def __init__(self, wanted: Reservation, written: Reservation | None, *, since: Row | None = None) -> None:
        self.wanted = wanted
        self.written = written
        self.in_flight = since is not None
        self.pending = wanted is not written and wanted != written
        """True while the ledger differs from the decision."""
        base = written or wanted
        self.request_milli: int = max(wanted.request_milli, base.request_milli, since.request_milli if since else 0)
        self.memory: int = max(wanted.memory, base.memory, since.memory if since else 0)
        self.gpus: tuple[GpuUuid, ...] = tuple(dict.fromkeys((*wanted.gpus, *base.gpus)))

    @property
    def left(self) -> bool:
        """True once the ledger has the row as releasing. From then on, neither this operator nor a successor counts the
        tenant as a member of its affinity group."""
        return self.wanted.releasing and self.written is not None and self.written.releasing


class GpuAccount:
    """Account of one GPU: its free amounts and its tenants. Read-only outside this module.

    Args:
        node: Name of the node.
        state: The GPU as its agent reports it.
        interactive_most: Most interactive tenants that a GPU takes.
        excluded: Count of excluded GPUs; this one adds to it.

    - `free_milli` (thousandths of its time) and `free_memory` (bytes) are negative where the GPU is over-committed.
    - `exclusions`: the exclusion label of each tenant, None for a tenant without one.
    - `anti_affinity`: the anti-affinity labels of its tenants.
    - `owners`: number of tenants that are not releasing, by owner.
    - `head_tenant`: the tenant that this GPU is reserved for, at the head of the queue or by a preemption; `kept_from`
      tests for which requests.
    - `interactive_room`: number of further interactive tenants that it takes.
    - `excluded_for`: the namespace for which the GPU counts in `excluded`; None: for none.
    """

    __slots__ = (
        "anti_affinity",
        "excluded",
        "excluded_for",
        "exclusions",
        "exclusive",
        "free_memory",
        "free_milli",
        "head_open_to",
        "head_priority",
        "head_tenant",
        "index",
        "interactive_most",
        "interactive_room",
        "node",
        "owners",
        "rows",
        "state",
        "tenants",
    )

    def __init__(self, node: str, state: GpuState, interactive_most: int, excluded: ExcludedGpus) -> None:
        self.interactive_most = interactive_most
        self.excluded = excluded
        self.excluded_for: str | None = None
        self.node = node
        self.state = state
        self.index = state.index
        self.rows: dict[TenantId, Row] = {}
        self.head_tenant: TenantId | None = None
        self.head_priority = 0
        self.head_open_to: str | None = None
        self.recount()

    def kept_from(self, request: PlacementRequest) -> bool:
        """Return whether the request may not use this GPU, because the GPU is reserved for another tenant of the same
        or a higher priority.

        A reservation that is open to the request's namespace excludes it only if its priority is higher.
        """
        if self.head_tenant in (None, request.tenant) or self.head_priority < request.priority:
            return False
        return self.head_open_to != request.namespace or self.head_priority > request.priority

    @property
    def interactive_full(self) -> bool:
        """True if the GPU takes no further interactive tenant."""
        return not self.interactive_room

    @property
    def has_interactive(self) -> bool:
        """True if one of its tenants is interactive."""
        return self.interactive_room < self.interactive_most

    @property
    def name(self) -> str:
        """The GPU's name in messages to users: `node-a GPU 1`."""
        return f"{self.node} GPU {self.index}"

    def recount(self) -> None:
        """Compute all sums and sets from the GPU's rows again."""
        milli = memory = interactive = 0
        exclusions: set[LabelKey | None] = set()
        anti_affinity: set[LabelKey] = set()
        owners: dict[str, int] = {}
        self.exclusive = False
        for row in self.rows.values():
            tenant = row.wanted
            milli += row.request_milli
            memory += row.memory
            exclusions.add(label_key(tenant.namespace, tenant.labels.exclusion))
            key = label_key(tenant.namespace, tenant.labels.anti_affinity)
            if key is not None:
                anti_affinity.add(key)
            if tenant.owner is not None and not tenant.releasing:
                owners[tenant.owner] = owners.get(tenant.owner, 0) + 1
            if tenant.mode is Mode.EXCLUSIVE:
                self.exclusive = True
            interactive += tenant.latency is Latency.INTERACTIVE
        self.interactive_room = max(self.interactive_most - interactive, 0)
        self.tenants = len(self.rows)
        self.free_milli = WHOLE_GPU - milli
        self.free_memory = self.state.memory - memory
        self.exclusions = exclusions
        self.anti_affinity = anti_affinity
        self.owners: Mapping[str, int] = owners
        if self.excluded.most is not None:
            only = next(iter(exclusions)) if len(exclusions) == 1 and milli < HALF_A_GPU else None
            self.count_for(only[0] if only is not None else None)

    def count_for(self, namespace: str | None) -> None:
        """Set the namespace for which the GPU counts in `excluded`. None: no namespace excludes others from it."""
        before, self.excluded_for = self.excluded_for, namespace
        if before != namespace:
            if before is not None:
                self.excluded.count(before, -1)
            if namespace is not None:
                self.excluded.count(namespace, 1)

    def overcommit(self) -> Overcommit | None:
        """Return the amounts by which the GPU is over-committed. None if it is not. Only a loaded ledger can
        over-commit a GPU (CS2 of cluster.py)."""
        faults = []
        if self.exclusive and self.tenants > 1:
            faults.append(f"an Exclusive tenant shares it with {self.tenants - 1} more")
        elif self.free_milli < 0:
            faults.append(f"requests add up to {format_fraction(WHOLE_GPU - self.free_milli)}")
        if self.free_memory < 0:
            held = self.state.memory - self.free_memory
            faults.append(f"memory adds up to {size_up(held)} of {size_up(self.state.memory)}")
        if not faults:
            return None
        tenants = ", ".join(sorted(row.wanted.title for row in self.rows.values()))
        text = f"{self.name} is over-committed: {' and '.join(faults)}; tenants: {tenants}"
        return Overcommit(node=self.node, gpu=self.state.uuid, text=text)


@dataclass(frozen=True, slots=True)
class PodUsage:
    """Usage of one pod: the resources that it takes of its node. `tenant`: the tenant whose pod it is; None: no
    tenant's."""

    resources: Resources
    tenant: TenantId | None


@dataclass(frozen=True, slots=True)
class Taken:
    """Sum over the pods of a node: their number, and the resources that they leave free (negative if more is requested
    than the node has)."""

    pods: int
    free: Resources


class NodeAccount:
    """Account of one node.

    - `state` is None while the node is unknown.
    - `uid` and `generation`: of the GPUNode as last loaded.
    - `holders`: for each pending holder, the tenant that waits for it.
    - `interactive_per_gpu`: most interactive tenants that a GPU takes.
    - `excluded`: count of excluded GPUs, to which the node's GPUs add.
    - `derived`: cache of values computed from the rows and GPUs (`policies.least_spread`), by owner. Cleared when these
      change.
    """

    __slots__ = (
        "_excluded",
        "_interactive_per_gpu",
        "_interchangeable",
        "_taken",
        "derived",
        "generation",
        "gpus",
        "gpus_by_uuid",
        "holders",
        "name",
        "pods",
        "rows",
        "state",
        "topology",
        "uid",
    )

    def __init__(self, name: str, *, interactive_per_gpu: int, excluded: ExcludedGpus) -> None:
        self.name = name
        self._excluded = excluded
        self._interactive_per_gpu = interactive_per_gpu
        self.state: NodeState | None = None
        self.uid: str | None = None
        self.generation = 0
        self.rows: dict[TenantId, Row] = {}
        self.pods: dict[str, PodUsage] = {}
        self.holders: dict[str, TenantId] = {}
        self.gpus: tuple[GpuAccount, ...] = ()
        self.gpus_by_uuid: dict[GpuUuid, GpuAccount] = {}
        self.topology: Topology | None = None
        self.derived: dict[str, tuple[int, ...]] = {}
        self._taken: Taken | None = None
        self._interchangeable: tuple[tuple[GpuAccount, ...], ...] | None = None

    @property
    def empty(self) -> bool:
        """True if nothing of the node is known: no state, rows, pods, holders or generation."""
        return self.state is None and not (self.rows or self.pods or self.holders or self.generation)

    def copy(self) -> NodeAccount:
        """Return an independent copy of the account."""
        excluded = self._excluded.overlay()
        for gpu in self.gpus:
            if gpu.excluded_for is not None:
                excluded.count(gpu.excluded_for, -1)  # `set_state` and `put` count it again for the copy
        other = NodeAccount(self.name, interactive_per_gpu=self._interactive_per_gpu, excluded=excluded)
        other.set_state(self.state)
        other.pods, other.holders = dict(self.pods), dict(self.holders)
        for tenant, row in self.rows.items():
            other.put(tenant, row)
        for mine, theirs in zip(other.gpus, self.gpus, strict=True):
            mine.head_tenant, mine.head_priority = theirs.head_tenant, theirs.head_priority
            mine.head_open_to = theirs.head_open_to
        return other

    def set_state(self, state: NodeState | None) -> None:
        """Replace the state of the Node. None: the Node is unknown from now on."""
        before = self.state.gpus if self.state else ()
        self.state = state
        self._taken = None
        gpus = state.gpus if state else ()
        if gpus == before:
            return
        self.derived.clear()
        self._interchangeable = None
        for account in self.gpus:
            account.count_for(None)
        most, excluded = self._interactive_per_gpu, self._excluded
        self.gpus = tuple(GpuAccount(self.name, gpu, most, excluded) for gpu in in_order(gpus))
        self.gpus_by_uuid = {account.state.uuid: account for account in self.gpus}
        self.topology = Topology.of([account.state for account in self.gpus])
        for tenant, row in self.rows.items():
            for uuid in row.gpus:
                if uuid in self.gpus_by_uuid:
                    self.gpus_by_uuid[uuid].rows[tenant] = row
        for account in self.gpus:
            account.recount()

    def put(self, tenant: TenantId, row: Row | None) -> None:
        """Set or replace the row of a tenant. None: remove it."""
        self.derived.clear()
        before = self.rows.pop(tenant, None)
        if row is not None:
            self.rows[tenant] = row
        touched = dict.fromkeys((*(before.gpus if before else ()), *(row.gpus if row else ())))
        for uuid in touched:
            account = self.gpus_by_uuid.get(uuid)
            if account is None:
                continue
            account.rows.pop(tenant, None)
            if row is not None and uuid in row.gpus:
                account.rows[tenant] = row
            account.recount()
        self._taken = self._interchangeable = None

    def mark_kept(self, gpus: Mapping[GpuUuid, tuple[TenantId, int, str | None]]) -> None:
        """Mark these GPUs of the node, and no others, as reserved. `gpus`: for each: (tenant, priority, namespace to
        which the reservation is open)."""
        for gpu in self.gpus:
            gpu.head_tenant, gpu.head_priority, gpu.head_open_to = gpus.get(gpu.state.uuid, (None, 0, None))
        self._interchangeable = None

    def set_pod(self, uid: str, usage: PodUsage | None) -> None:
        """Set a pod's usage. None: remove it."""
        if usage is None:
            self.pods.pop(uid, None)
        else:
            self.pods[uid] = usage
        self._taken = None

    def interchangeable(self) -> tuple[tuple[GpuAccount, ...], ...]:
        """Group idle GPUs that differ only in UUID and index, so that decisions check one of them."""
        if self._interchangeable is None:
            groups: dict[object, list[GpuAccount]] = {}
            for gpu in self.gpus:
                state = gpu.state
                kept = gpu.head_tenant, gpu.head_priority, gpu.head_open_to
                alike = (state.model, state.memory, state.available, state.held, kept)
                key = state.uuid if gpu.tenants else alike
                groups.setdefault(key, []).append(gpu)
            self._interchangeable = tuple(tuple(gpus) for gpus in groups.values())
        return self._interchangeable

    def check_room(self, uuid: GpuUuid, asked: Reservation) -> None:
        """Raise `PlacementError` unless this GPU has room for the reservation. Each row counts with its largest
        amounts."""
        gpu = self.gpus_by_uuid.get(uuid)
        if gpu is None:
            raise PlacementError(f"node {self.name} has no GPU {uuid}")
        where = gpu.name
        if gpu.exclusive or (asked.mode is Mode.EXCLUSIVE and gpu.tenants):
            raise PlacementError(f"{where} has {gpu.tenants} tenants: an Exclusive tenant shares with none")
        if asked.latency is Latency.INTERACTIVE and gpu.interactive_full:
            raise PlacementError(f"{where} has as many Interactive tenants as a GPU takes")
        if asked.request_milli > gpu.free_milli:
            free = format_fraction(max(gpu.free_milli, 0))
            raise PlacementError(
                f"{where} has {free} of its time free, {format_fraction(asked.request_milli)} is asked"
            )
        if asked.memory > gpu.free_memory:
            free = size_down(max(gpu.free_memory, 0))
            raise PlacementError(f"{where} has {free} of memory free, {size_up(asked.memory)} is asked")

    def idle(self) -> int:
        """Count the GPUs without a tenant."""
        return sum(len(gpus) for gpus in self.interchangeable() if not gpus[0].tenants)

    def replicas_of(self, owner: str | None) -> int:
        """Count the tenants of one owner that are not releasing."""
        if owner is None:
            return 0
        rows = self.rows.values()
        return sum(1 for row in rows if row.wanted.owner == owner and not row.wanted.releasing)

    def taken(self) -> Taken:
        """Sum the resources of the node's pods. A reservation without known pod counts as expected."""
        if self._taken is None:
            parts, count = [pod.resources for pod in self.pods.values()], len(self.pods)
            seen = {pod.tenant for pod in self.pods.values()}
            for tenant, row in self.rows.items():
                wanted = row.wanted
                if tenant not in seen and not wanted.releasing:
                    parts.append(wanted.needs)
                    several = wanted.claim is not None and wanted.pod_uid is None  # one Pod may have several claims
                    count += not several or wanted.needs != Resources()
            allocatable = self.state.allocatable if self.state else Resources()
            self._taken = Taken(count, allocatable - sum_of(parts))
        return self._taken
