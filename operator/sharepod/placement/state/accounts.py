"""The books of one node: its rows, what they take of each GPU, and what pods take of the node.

Guarantees: what a row takes is the most that the ledger can turn out to say of it, in time and in memory: a raise is
taken when it is decided, and a lowering is given away only once it has been written. A row that is releasing takes all
it had. Rows and pods of a node that is not known (any more) are kept.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import dataclass

from sharepod.api.gpunode import Mode
from sharepod.api.units import WHOLE_GPU, GpuUuid, TenantId, format_fraction
from sharepod.placement.wording import size_up

from .topology import Topology
from .types import GpuState, LabelKey, NodeState, Overcommit, Reservation, Resources, in_order, label_key


class Row:
    """One tenant's reservation: `written` as the ledger has it (None: not yet), `wanted` as it was decided since.

    `since` is the row whose decision this one follows: that one may be on its way to the ledger (`in_flight`), so it
    counts too.
    """

    __slots__ = ("gpus", "in_flight", "memory", "request", "wanted", "written")

    def __init__(self, wanted: Reservation, written: Reservation | None, *, since: Row | None = None) -> None:
        self.wanted = wanted
        self.written = written
        self.in_flight = since is not None
        base = written or wanted
        self.request: int = max(wanted.request, base.request, since.request if since else 0)
        self.memory: int = max(wanted.memory, base.memory, since.memory if since else 0)
        self.gpus: tuple[GpuUuid, ...] = tuple(dict.fromkeys((*wanted.gpus, *base.gpus)))

    @property
    def pending(self) -> bool:
        """Something was decided that the ledger does not say yet."""
        return self.wanted != self.written

    @property
    def left(self) -> bool:
        """The ledger has it as releasing: whatever becomes of this operator, it belongs to no group any more."""
        return self.wanted.releasing and self.written is not None and self.written.releasing


class GpuAccount:
    """What is left of one GPU and who is on it. Read-only outside this module.

    `exclusions`: the exclusion label of each tenant, None for one without; `apart`: the anti-affinity labels on it;
    `head_tenant`: the one tenant that may come, or whoever has a higher priority than `head_priority`.
    """

    __slots__ = (
        "apart",
        "exclusions",
        "exclusive",
        "free_memory",
        "free_milli",
        "head_priority",
        "head_tenant",
        "index",
        "node",
        "owners",
        "rows",
        "state",
        "tenants",
    )

    def __init__(self, node: str, state: GpuState) -> None:
        self.node = node
        self.state = state
        self.index = state.index
        self.rows: dict[TenantId, Row] = {}
        self.head_tenant: TenantId | None = None
        self.head_priority = 0
        self.recount()

    @property
    def name(self) -> str:
        """As users read it: `node-a GPU 1`."""
        return f"{self.node} GPU {self.index}"

    def recount(self) -> None:
        """Adds its rows up anew."""
        milli = memory = 0
        exclusions: set[LabelKey | None] = set()
        apart: set[LabelKey] = set()
        owners: dict[str, int] = {}
        self.exclusive = False
        for row in self.rows.values():
            tenant = row.wanted
            milli += row.request
            memory += row.memory
            exclusions.add(label_key(tenant.namespace, tenant.labels.exclusion))
            key = label_key(tenant.namespace, tenant.labels.anti_affinity)
            if key is not None:
                apart.add(key)
            if tenant.owner is not None and not tenant.releasing:
                owners[tenant.owner] = owners.get(tenant.owner, 0) + 1
            if tenant.mode is Mode.EXCLUSIVE:
                self.exclusive = True
        self.tenants = len(self.rows)
        self.free_milli = WHOLE_GPU - milli
        self.free_memory = self.state.memory - memory
        self.exclusions = exclusions
        self.apart = apart
        self.owners: Mapping[str, int] = owners

    def overcommit(self) -> Overcommit | None:
        """What is wrong with this GPU's rows, where they came from a ledger that promises too much."""
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
        tenants = ", ".join(sorted(f"{row.wanted.namespace}/{row.wanted.pod_name}" for row in self.rows.values()))
        text = f"{self.name} is over-committed: {' and '.join(faults)}; tenants: {tenants}"
        return Overcommit(node=self.node, gpu=self.state.uuid, text=text)


@dataclass(frozen=True, slots=True)
class PodUsage:
    resources: Resources
    tenant: TenantId | None


@dataclass(frozen=True, slots=True)
class Taken:
    """How many pods a node has and what they leave of it, which is negative where it is over-used."""

    pods: int
    free: Resources


class NodeAccount:
    """The books of one node. `state` is None while the node is not known; `generation` is that of the ledger last read;
    `holders` are those in flight, each with the tenant that waits on it."""

    __slots__ = (
        "_kinds",
        "_taken",
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

    def __init__(self, name: str) -> None:
        self.name = name
        self.state: NodeState | None = None
        self.uid: str | None = None
        self.generation = 0
        self.rows: dict[TenantId, Row] = {}
        self.pods: dict[str, PodUsage] = {}
        self.holders: dict[str, TenantId] = {}
        self.gpus: tuple[GpuAccount, ...] = ()
        self.gpus_by_uuid: dict[GpuUuid, GpuAccount] = {}
        self.topology: Topology | None = None
        self._taken: Taken | None = None
        self._kinds: tuple[tuple[GpuAccount, ...], ...] | None = None

    @property
    def empty(self) -> bool:
        return self.state is None and not (self.rows or self.pods or self.holders or self.generation)

    def set_state(self, state: NodeState | None) -> None:
        before = self.state.gpus if self.state else ()
        self.state = state
        self._taken = None
        gpus = state.gpus if state else ()
        if gpus == before:
            return
        self._kinds = None
        self.gpus = tuple(GpuAccount(self.name, gpu) for gpu in in_order(gpus))
        self.gpus_by_uuid = {account.state.uuid: account for account in self.gpus}
        self.topology = Topology.of([account.state for account in self.gpus])
        for tenant, row in self.rows.items():
            for uuid in row.gpus:
                if uuid in self.gpus_by_uuid:
                    self.gpus_by_uuid[uuid].rows[tenant] = row
        for account in self.gpus:
            account.recount()

    def put(self, tenant: TenantId, row: Row | None) -> None:
        """Sets, replaces or (None) removes the row of a tenant."""
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
        self._taken = self._kinds = None

    def reserve_for_head(self, gpus: Container[GpuUuid], tenant: TenantId | None, priority: int) -> None:
        """These of its GPUs are kept for this tenant, and no others for anybody."""
        for gpu in self.gpus:
            gpu.head_tenant = tenant if gpu.state.uuid in gpus else None
            gpu.head_priority = priority
        self._kinds = None

    def set_pod(self, uid: str, usage: PodUsage | None) -> None:
        if usage is None:
            self.pods.pop(uid, None)
        else:
            self.pods[uid] = usage
        self._taken = None

    def kinds(self) -> tuple[tuple[GpuAccount, ...], ...]:
        """Its GPUs, those together that differ in nothing but their UUID and index: idle ones of one model and size."""
        if self._kinds is None:
            kinds: dict[object, list[GpuAccount]] = {}
            for gpu in self.gpus:
                state = gpu.state
                kind = (
                    state.uuid
                    if gpu.tenants
                    else (state.model, state.memory, state.available, state.held, gpu.head_tenant)
                )
                kinds.setdefault(kind, []).append(gpu)
            self._kinds = tuple(tuple(gpus) for gpus in kinds.values())
        return self._kinds

    def idle(self) -> int:
        """How many of its GPUs have no tenant."""
        return sum(len(gpus) for gpus in self.kinds() if not gpus[0].tenants)

    def replicas_of(self, owner: str | None) -> int:
        """How many tenants of one owner are here and are not releasing."""
        if owner is None:
            return 0
        rows = self.rows.values()
        return sum(1 for row in rows if row.wanted.owner == owner and not row.wanted.releasing)

    def taken(self) -> Taken:
        """What pods take of the node, with those that reservations will still bring."""
        if self._taken is None:
            total, count = Resources(), len(self.pods)
            seen = set()
            for pod in self.pods.values():
                total += pod.resources
                if pod.tenant is not None:
                    seen.add(pod.tenant)
            for tenant, row in self.rows.items():
                if tenant not in seen and not row.wanted.releasing:
                    total += row.wanted.needs
                    count += 1
            allocatable = self.state.allocatable if self.state else Resources()
            self._taken = Taken(count, allocatable - total)
        return self._taken
