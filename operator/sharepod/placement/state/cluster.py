"""The model that placement decides over: nodes, GPUs, what pods take, and every reservation, decided or written.

Guarantees: `reserve` and `resize` never promise more of a GPU than there is, whatever is still on its way to the
ledger; what a ledger says is believed even where it promises too much, and reported. Nothing here waits or writes: a
caller reserves, writes, and then says `confirm`, or `revert` where the write failed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from sharepod.api.gpunode import Mode
from sharepod.api.sharepod import GpuRequest
from sharepod.api.units import Bytes, GpuUuid, Milli, TenantId, format_fraction
from sharepod.placement.binpack.packing import Packing
from sharepod.placement.resizing import refuse_resize
from sharepod.placement.wording import size_down, size_up

from .accounts import NodeAccount, PodUsage, Row
from .types import LabelKey, NodeState, Overcommit, PlacementError, Refusal, Reservation, Resources, label_key

Group = tuple[str, frozenset[GpuUuid]]
"""Where members of an affinity group are: a node and their GPUs."""


@dataclass(frozen=True, slots=True)
class HeadReservation:
    """GPUs of one node that are kept for one who has waited long: nobody else of its `priority`, or of a lower one, is
    placed on them."""

    tenant: TenantId
    node: str
    gpus: frozenset[GpuUuid]
    priority: int = 0


class Cluster:
    """All nodes by name, whether their Node, their ledger or only their pods have been seen."""

    def __init__(self) -> None:
        self._nodes: dict[str, NodeAccount] = {}
        self._nodes_of: dict[TenantId, dict[str, None]] = {}
        self._node_of_pod: dict[str, str] = {}
        self._groups: dict[LabelKey, Counter[Group]] = {}
        self._replicas: dict[str, Counter[str]] = {}
        self._grown: dict[str, int] = {}
        self._regrouped: dict[LabelKey, int] = {}
        self.room_version = 0
        """Counts the changes that may have made room for somebody."""
        self.head_reservation: HeadReservation | None = None
        self.packing = Packing(self._nodes.get, lambda: self._nodes)

    # Nodes and pods, as they are seen

    def upsert_node(self, state: NodeState) -> None:
        self._node(state.name).set_state(state)
        self._mark_head_reservation(state.name)
        self._has_grown(state.name)

    def remove_node(self, name: str) -> None:
        """The Node is gone. Its ledger is kept until `drop_ledger`: a node registered again has its tenants still."""
        node = self._nodes.get(name)
        if node is not None:
            node.set_state(None)
            self.packing.touch(name)
            self._forget_if_empty(node)

    def set_pod_usage(self, node: str, pod_uid: str, resources: Resources, *, tenant: TenantId | None = None) -> None:
        """A pod that is bound or pinned to the node and has not ended. With `tenant` it stands in place of what that
        tenant's reservation was assumed to need."""
        if self._node_of_pod.get(pod_uid, node) != node:
            self.remove_pod(pod_uid)
        self._node_of_pod[pod_uid] = node
        account, usage = self._node(node), PodUsage(resources, tenant)
        before = account.pods.get(pod_uid)
        if before == usage:
            return
        account.set_pod(pod_uid, usage)
        if before is None and tenant is None:
            self.packing.touch(node)  # it only takes
        else:
            self._has_grown(node)

    def remove_pod(self, pod_uid: str) -> None:
        """The pod is gone or has ended. Unknown pods are none of this model's."""
        name = self._node_of_pod.pop(pod_uid, None)
        if name is not None:
            node = self._nodes[name]
            node.set_pod(pod_uid, None)
            self._has_grown(name)
            self._forget_if_empty(node)

    # Holders, on nodes where NVIDIA's device plugin owns the GPUs

    def start_holder(self, node: str, holder: str, tenant: TenantId) -> None:
        """A holder is to be made on this node: its GPU is spoken for, and its tenant waits on it."""
        self._node(node).holders[holder] = tenant

    def end_holder(self, node: str, holder: str) -> None:
        """It is no longer in flight: its Pod is counted like any other by now, or it was given up."""
        account = self._nodes.get(node)
        if account is not None and account.holders.pop(holder, None) is not None:
            self._has_grown(node)
            self._forget_if_empty(account)

    # Decisions

    def reserve(self, node: str, reservation: Reservation) -> None:
        """Takes a share, at once. Raises `PlacementError`, and changes nothing, if the tenant has a reservation, the
        node or a GPU is not known, or a GPU has too little left."""
        if reservation.tenant in self._nodes_of:
            raise PlacementError(f"tenant {reservation.tenant} has a reservation on {self._where(reservation.tenant)}")
        account = self._nodes.get(node)
        if account is None or account.state is None:
            raise PlacementError(f"node {node} is not known")
        if not reservation.gpus or len(set(reservation.gpus)) != len(reservation.gpus):
            raise PlacementError(f"a reservation is of one or more distinct GPUs, not {list(reservation.gpus)}")
        for uuid in reservation.gpus:
            self._check_room(account, uuid, reservation)
        self._put(account, reservation.tenant, Row(reservation, None))
        self.packing.settle()

    def resize(
        self, tenant: TenantId, *, request: Milli, limit: Milli, memory: Bytes | None, in_use: int = 0
    ) -> Reservation | Refusal:
        """Another share on the same GPUs; `memory` None: request x the memory of the GPU; `in_use`: bytes
        that it was last seen to use of one. Returns the row to write, or why it cannot be; then nothing has changed.
        Raises `PlacementError` for a tenant without a reservation, an Exclusive one, or a limit below the request."""
        node, row = self._only_row(tenant)
        if row.wanted.mode is Mode.EXCLUSIVE:
            raise PlacementError(f"tenant {tenant} is Exclusive: there is no share to change")
        if not 0 <= request <= limit <= 1000 or limit == 0:
            raise PlacementError(f"request {request} and limit {limit} thousandths are no share")
        asked = GpuRequest(request=request, limit=limit, memory=memory)
        capacities = [node.gpus_by_uuid[uuid].state.memory for uuid in row.gpus if uuid in node.gpus_by_uuid]
        # Without the GPU in the inventory its memory is not known: the bytes granted stay as they are.
        amount = memory if memory is not None else min(map(asked.memory_on, capacities), default=row.wanted.memory)
        wanted = replace(row.wanted, request=request, limit=limit, memory=amount)
        refusal = refuse_resize(node, row, wanted, in_use)
        if refusal is None:
            self._put(node, tenant, Row(wanted, row.written, since=row))
            return wanted
        return refusal

    def set_releasing(self, node: str, tenant: TenantId) -> Reservation:
        """The first of the two steps that end a reservation; it takes all it had until `release`. Returns the row to
        write. Raises `PlacementError` where there is no such row."""
        account, row = self._row(node, tenant)
        wanted = replace(row.wanted, releasing=True)
        self._put(account, tenant, Row(wanted, row.written, since=row))
        return wanted

    # GPUs that are kept

    def reserve_for_head(self, kept: HeadReservation | None) -> None:
        """Keeps these GPUs for one tenant, and no others for anybody; None: none at all. Whoever is there stays."""
        before, self.head_reservation = self.head_reservation, kept
        for item in (before, kept):
            if item is not None:
                self._mark_head_reservation(item.node)
                self._has_grown(item.node)

    # What became of them

    def confirm(self, node: str, reservation: Reservation, generation: int) -> None:
        """The ledger has this row now; `generation` is the GPUNode's after the write. What was decided meanwhile
        stays."""
        account = self._nodes.get(node)
        if account is None:
            return
        row = account.rows.get(reservation.tenant)
        stale = generation < account.generation
        account.generation = max(account.generation, generation)
        if row is not None and not (stale and row.written is not None):
            self._put(account, reservation.tenant, Row(row.wanted, reservation))

    def revert(self, node: str, tenant: TenantId) -> None:
        """The write failed for good: back to what the ledger says, which is nothing for a row that was never
        written."""
        account = self._nodes.get(node)
        row = account.rows.get(tenant) if account else None
        if account is None or row is None:
            return
        written = row.written
        self._put(account, tenant, Row(_remembering(written, written, row), written) if written else None)

    def nothing_in_flight(self, node: str) -> bool:
        """No write is on its way to this ledger. What was decided and taken back before it was written takes nothing
        any more; returns whether there was such a thing."""
        account = self._nodes.get(node)
        rows = account.rows.items() if account is not None else ()
        stale = [(tenant, row) for tenant, row in rows if row.in_flight and not row.pending]
        for tenant, row in stale:
            self._put(self._nodes[node], tenant, Row(row.wanted, row.written))
        return bool(stale)

    def release(self, node: str, tenant: TenantId, generation: int | None = None) -> None:
        """The row is no longer in the ledger (`generation`: the GPUNode's after that write), or never was. Its share is
        free. Releasing what is not there changes nothing."""
        account = self._nodes.get(node)
        if account is None:
            return
        account.generation = max(account.generation, generation or 0)
        if tenant in account.rows:
            self._put(account, tenant, None)

    # Ledgers, as they are read

    def load(
        self, node: str, rows: Iterable[Reservation], generation: int, *, uid: str | None = None
    ) -> tuple[Overcommit, ...]:
        """What a GPUNode says, at this generation of it. One that is older than what is known is ignored, unless it is
        of another GPUNode of that name (`uid`), which counts its generations anew. What has been decided and not
        confirmed stays decided. Never raises; returns which GPUs are over-committed."""
        account = self._node(node)
        if uid is not None and uid != account.uid:
            account.uid, account.generation = uid, 0
        if generation < account.generation:
            return self.overcommits(node)
        account.generation = generation
        read = {row.tenant: row for row in rows}
        for tenant, known in list(account.rows.items()):
            if tenant not in read and known.written is not None:
                self._put(account, tenant, None)
        for tenant, written in read.items():
            row = account.rows.get(tenant)
            wanted = row.wanted if row is not None and (row.pending or row.in_flight) else written
            wanted = _remembering(wanted, written, row)
            if row is None or row.written != written or not _same(row.wanted, wanted):
                on_its_way = row is not None and wanted != written
                self._put(account, tenant, Row(wanted, written, since=row if on_its_way else None))
        return self.overcommits(node)

    def drop_ledger(self, node: str) -> None:
        """The GPUNode is gone: so are its rows, decided ones included, and its count of generations."""
        account = self._nodes.get(node)
        if account is None:
            return
        for tenant in list(account.rows):
            self._put(account, tenant, None)
        account.generation, account.uid = 0, None
        self._forget_if_empty(account)

    # Reading

    def nodes(self) -> Iterator[NodeAccount]:
        """The nodes that are known, in no order."""
        return (node for node in self._nodes.values() if node.state is not None)

    def node(self, name: str) -> NodeAccount | None:
        node = self._nodes.get(name)
        return node if node is not None and node.state is not None else None

    def reservations(self, node: str) -> tuple[Reservation, ...]:
        """The rows of a node as they are wanted, by tenant."""
        account = self._nodes.get(node)
        rows = account.rows if account else {}
        return tuple(rows[tenant].wanted for tenant in sorted(rows))

    def reservations_of(self, tenant: TenantId) -> tuple[tuple[str, Reservation], ...]:
        """Where a tenant has a reservation. More than one: two operators decided, and all but one have to be
        released."""
        return tuple((name, self._nodes[name].rows[tenant].wanted) for name in sorted(self._nodes_of.get(tenant, ())))

    def pending(self, node: str) -> tuple[Reservation, ...]:
        """The rows that the ledger does not say yet, by tenant."""
        account = self._nodes.get(node)
        rows = account.rows if account else {}
        return tuple(rows[tenant].wanted for tenant in sorted(rows) if rows[tenant].pending)

    def groups(self, key: LabelKey) -> tuple[Group, ...]:
        """Where the members of an affinity group are. One that is ended is a member until the ledger has it as
        releasing: a successor that did not find it so would see the group split. More than one only where a ledger
        said so."""
        return tuple(sorted(self._groups.get(key, ()), key=lambda group: (group[0], sorted(group[1]))))

    def replicas(self, owner: str | None) -> tuple[str, ...]:
        """The nodes with tenants of this owner that are not releasing."""
        return tuple(sorted(self._replicas.get(owner, ()))) if owner is not None else ()

    def overcommits(self, node: str | None = None) -> tuple[Overcommit, ...]:
        names = sorted(self._nodes) if node is None else [node]
        accounts = (gpu for name in names if name in self._nodes for gpu in self._nodes[name].gpus)
        return tuple(fault for fault in (gpu.overcommit() for gpu in accounts) if fault is not None)

    def grown_since(self, moment: int) -> tuple[str, ...]:
        """The nodes where there may be more room than there was at that moment (`room_version`, then)."""
        return tuple(_newest(self._grown, moment))

    def regrouped_since(self, key: LabelKey, moment: int) -> bool:
        """Whether this affinity group has begun, ended or moved since."""
        return self._regrouped.get(key, 0) > moment

    # Inside

    def _has_grown(self, name: str) -> None:
        """The node may have more room than before, or another kind of room."""
        self.room_version += 1
        self._grown.pop(name, None)
        self._grown[name] = self.room_version
        self.packing.touch(name)

    def _mark_head_reservation(self, name: str) -> None:
        node, kept = self._nodes.get(name), self.head_reservation
        if node is not None and kept is not None and kept.node == name:
            node.reserve_for_head(kept.gpus, kept.tenant, kept.priority)
        elif node is not None:
            node.reserve_for_head((), None, 0)

    def _node(self, name: str) -> NodeAccount:
        return self._nodes.setdefault(name, NodeAccount(name))

    def _forget_if_empty(self, node: NodeAccount) -> None:
        if node.empty:
            self._nodes.pop(node.name, None)

    def _put(self, node: NodeAccount, tenant: TenantId, row: Row | None) -> None:
        """The one place where a row changes: keeps the indexes in step."""
        before = node.rows.get(tenant)
        taken = row is not None and before is None
        if before is not None:
            self._count_group(node.name, before, -1)
            self._count_replica(node.name, before.wanted, -1)
        node.put(tenant, row)
        if taken:
            self.packing.touch(node.name)
        else:
            self._has_grown(node.name)
        if row is not None:
            self._count_group(node.name, row, 1)
            self._count_replica(node.name, row.wanted, 1)
            self._nodes_of.setdefault(tenant, {})[node.name] = None
        elif tenant in self._nodes_of:
            self._nodes_of[tenant].pop(node.name, None)
            if not self._nodes_of[tenant]:
                del self._nodes_of[tenant]

    def _count_group(self, node: str, row: Row, change: int) -> None:
        reservation = row.wanted
        key = label_key(reservation.namespace, reservation.labels.affinity)
        if key is None or row.left:
            return
        members = self._groups.setdefault(key, Counter())
        group = (node, frozenset(reservation.gpus))
        members[group] += change
        if not members[group]:
            del members[group]
        if (change > 0 and members[group] == change) or group not in members:
            self.room_version += 1
            self._regrouped[key] = self.room_version
        if not members:
            del self._groups[key]

    def _count_replica(self, node: str, reservation: Reservation, change: int) -> None:
        owner = reservation.owner
        if owner is None or reservation.releasing:
            return
        nodes = self._replicas.setdefault(owner, Counter())
        nodes[node] += change
        if not nodes[node]:
            del nodes[node]
        if not nodes:
            del self._replicas[owner]

    def _row(self, node: str, tenant: TenantId) -> tuple[NodeAccount, Row]:
        account = self._nodes.get(node)
        if account is None or tenant not in account.rows:
            raise PlacementError(f"tenant {tenant} has no reservation on {node}")
        return account, account.rows[tenant]

    def _only_row(self, tenant: TenantId) -> tuple[NodeAccount, Row]:
        names = list(self._nodes_of.get(tenant, ()))
        if len(names) != 1:
            where = self._where(tenant) if names else "no node"
            raise PlacementError(f"tenant {tenant} has a reservation on {where}: there is not one share to change")
        return self._row(names[0], tenant)

    def _where(self, tenant: TenantId) -> str:
        return " and ".join(sorted(self._nodes_of[tenant]))

    @staticmethod
    def _check_room(node: NodeAccount, uuid: GpuUuid, asked: Reservation) -> None:
        gpu = node.gpus_by_uuid.get(uuid)
        if gpu is None:
            raise PlacementError(f"node {node.name} has no GPU {uuid}")
        where = gpu.name
        if gpu.exclusive or (asked.mode is Mode.EXCLUSIVE and gpu.tenants):
            raise PlacementError(f"{where} has {gpu.tenants} tenants: an Exclusive one shares with nobody")
        if asked.request > gpu.free_milli:
            free = format_fraction(max(gpu.free_milli, 0))
            raise PlacementError(f"{where} has {free} of its time free, {format_fraction(asked.request)} is asked")
        if asked.memory > gpu.free_memory:
            free = size_down(max(gpu.free_memory, 0))
            raise PlacementError(f"{where} has {free} of memory free, {size_up(asked.memory)} is asked")


def _remembering(wanted: Reservation, written: Reservation, row: Row | None) -> Reservation:
    """`wanted` with what the ledger does not hold: as it was read along with the ledger, else as it was known
    before."""
    before = row.wanted if row is not None else written
    owner = written.owner if written.owner is not None else before.owner
    needs = written.needs if written.needs != Resources() else before.needs
    return replace(wanted, owner=owner, needs=needs)


def _same(one: Reservation, other: Reservation) -> bool:
    """Equal in what the ledger does not hold, too."""
    return one == other and one.owner == other.owner and one.needs == other.needs


def _newest(marks: dict[str, int], moment: int) -> Iterator[str]:
    """Of marks that were set in this order, those after the moment, the last first."""
    for name in reversed(marks):
        if marks[name] <= moment:
            return
        yield name
