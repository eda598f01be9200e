"""Cluster state for placement: nodes, GPUs, usage of pods, and every reservation, decided or written.

Guarantees:
- CS1 no-over-commit (LE2 of docs/design.md): `reserve` and `change_share` never promise more of a GPU than there is.
  Each row counts with the most that the ledger may still contain for it.
- CS2 ledger-is-believed: `load` accepts a ledger even if it over-commits a GPU, and reports that.
- CS3 decisions-stand: loading a ledger never drops a decision that is not written yet.
- No method waits or writes. The caller reserves, writes the ledger, and passes the ledger that it then reads to `load`.
  After a failed write it calls `revert`.
- Subscribers are notified of every change of a node.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace

from sharepod.api.units import TenantId

from .accounts import NodeAccount, PodUsage, Row
from .cluster_view import ClusterView, HeadReservation
from .types import NodeState, Overcommit, PlacementError, PodNeeds, Reservation, Resources, label_key


class Cluster(ClusterView):
    """All nodes by name, including nodes of which only the ledger or pods are known.

    `interactive_per_gpu`: most tenants of latency Interactive that a GPU takes. `max_excluded_gpus`: see
    `ExcludedGpus`.
    """

    def subscribe(self, touched: Callable[[str], None]) -> None:
        """Call `touched(node name)` after each change of a node's resources or usage, from now on."""
        self._subscribers.append(touched)

    def on_released(self, released: Callable[[TenantId, Row], None]) -> None:
        """Call `released(tenant, its last row)` after the release of each share, from now on."""
        self._on_released.append(released)

    def upsert_node(self, state: NodeState) -> None:
        """Set the state of a Node. Waiting requests are then tried on it again."""
        self._node(state.name).set_state(state)
        self._mark_excluding_fewer()
        if state.device_plugin:
            self._plugin_nodes.add(state.name)
        else:
            self._plugin_nodes.discard(state.name)
        self._mark_head_reservation(state.name)
        self._has_grown(state.name)

    def remove_node(self, name: str) -> None:
        """Remove a deleted Node. Its ledger is kept until `drop_ledger`: a node that registers again still has its
        tenants."""
        node = self._nodes.get(name)
        self._plugin_nodes.discard(name)
        if node is not None:
            node.set_state(None)
            self._mark_excluding_fewer()
            self._touch(name)
            self._forget_if_empty(node)

    def set_pod_usage(self, node: str, pod_uid: str, resources: Resources, *, tenant: TenantId | None = None) -> None:
        """Count a pod that is bound or pinned to the node and has not ended.

        The pod of a `tenant` replaces the assumed needs of that tenant's reservation.
        """
        if self._node_of_pod.get(pod_uid, node) != node:
            self.remove_pod(pod_uid)
        self._node_of_pod[pod_uid] = node
        account, usage = self._node(node), PodUsage(resources, tenant)
        before = account.pods.get(pod_uid)
        if before == usage:
            return
        account.set_pod(pod_uid, usage)
        if before is None and tenant is None:
            self._touch(node)  # less room than before, so no waiting request needs a new decision
        else:
            self._has_grown(node)

    def remove_pod(self, pod_uid: str) -> None:
        """Stop counting a deleted or ended pod. Unknown pods are ignored."""
        name = self._node_of_pod.pop(pod_uid, None)
        if name is not None:
            node = self._nodes[name]
            node.set_pod(pod_uid, None)
            self._has_grown(name)
            self._forget_if_empty(node)

    def set_whole_gpu_pod(self, pod_uid: str, needs: PodNeeds | None) -> bool:
        """Record that a pod waits for whole GPUs of the device plugin; None: it no longer does. Return True if that is
        a change."""
        new = self.whole_gpu_pods.set(pod_uid, needs)
        if new and needs is None:
            for name in self._plugin_nodes:
                self._has_grown(name)
        return new

    def start_holder(self, node: str, holder: str, tenant: TenantId) -> None:
        """Record a pending holder on this node, and the waiting tenant that is to get its GPU. A holder counts before
        its Pod exists. `holder`: the UID of its Pod, or another name while the UID is unknown."""
        self._node(node).holders[holder] = tenant

    def holders(self, node: str) -> dict[str, TenantId]:
        """Return, for each pending holder on a node, the tenant that is to get the holder's GPU. A holder is pending
        until NVIDIA's device plugin has given its Pod a GPU."""
        account = self._nodes.get(node)
        return dict(account.holders) if account is not None else {}

    def end_holder(self, node: str, holder: str) -> None:
        """Drop a holder that is no longer pending: it has a GPU, or was cancelled."""
        account = self._nodes.get(node)
        if account is not None and account.holders.pop(holder, None) is not None:
            self._has_grown(node)
            self._forget_if_empty(account)

    # Decisions

    def reserve(self, node: str, reservation: Reservation) -> None:
        """Reserve a share, which counts from now on (CS1).

        Raises `PlacementError`, and changes nothing, if the tenant has a reservation, the node or a GPU is unknown, or
        a GPU has too little room.
        """
        if reservation.tenant in self._nodes_of:
            raise PlacementError(f"tenant {reservation.tenant} has a reservation on {self._where(reservation.tenant)}")
        account = self._nodes.get(node)
        if account is None or account.state is None:
            raise PlacementError(f"node {node} is not known")
        if not reservation.gpus or len(set(reservation.gpus)) != len(reservation.gpus):
            raise PlacementError(f"a reservation is of one or more distinct GPUs, not {list(reservation.gpus)}")
        for uuid in reservation.gpus:
            account.check_room(uuid, reservation)
        self._put(account, reservation.tenant, Row(reservation, None))

    def change_share(self, wanted: Reservation) -> None:
        """Replace the share of a tenant on its present GPUs. The caller has checked that it fits (CS1).

        Raises `PlacementError` unless the tenant has exactly one reservation.
        """
        node, row = self.only_row(wanted.tenant)
        self._put(node, wanted.tenant, Row(wanted, row.written, since=row))

    def set_releasing(self, node: str, tenant: TenantId) -> Reservation:
        """Mark a reservation as releasing, the first of the two steps that end it. It counts in full until `release`.

        Returns the row to write. Raises `PlacementError` if there is no such row.
        """
        account, row = self._row(node, tenant)
        wanted = replace(row.wanted, releasing=True)
        self._put(account, tenant, Row(wanted, row.written, since=row))
        return wanted

    def reserve_for_head(self, reservation: HeadReservation | None) -> None:
        """Replace the head-of-queue reservation. None: reserve no GPUs."""
        before, self.head_reservation = self.head_reservation, reservation
        for item in (before, reservation):
            if item is not None:
                self._mark_head_reservation(item.node)
                self._has_grown(item.node)

    def keep(self, reservation: HeadReservation) -> None:
        """Reserve GPUs for a tenant for which other tenants are being preempted, in addition to the head-of-queue
        reservation. This replaces the tenant's earlier reservation of this kind. If two reservations contain one GPU,
        the reservation of higher priority applies."""
        self.give_up(reservation.tenant)
        self._kept[reservation.tenant] = reservation
        self._mark_head_reservation(reservation.node)
        self._has_grown(reservation.node)

    def give_up(self, tenant: TenantId) -> None:
        """Drop the reservation that `keep` has made for a tenant."""
        before = self._kept.pop(tenant, None)
        if before is not None:
            self._mark_head_reservation(before.node)
            self._has_grown(before.node)

    # Results of the decisions

    def revert(self, node: str, tenant: TenantId) -> None:
        """Undo a decision whose write failed permanently: the ledger's row counts again. A row that was never written
        is dropped."""
        account = self._nodes.get(node)
        row = account.rows.get(tenant) if account else None
        if account is None or row is None:
            return
        written = row.written
        self._put(account, tenant, Row(_remembering(written, written, row), written) if written else None)

    def nothing_in_flight(self, node: str) -> bool:
        """Stop counting decisions undone during their write. Call this when no write to this
        node's ledger is in flight. Returns True if any row is now counted with less."""
        account = self._nodes.get(node)
        rows = account.rows.items() if account is not None else ()
        stale = [(tenant, row) for tenant, row in rows if row.in_flight and not row.pending]
        for tenant, row in stale:
            self._put(self._nodes[node], tenant, Row(row.wanted, row.written))
        return bool(stale)

    def release(self, node: str, tenant: TenantId, generation: int | None = None) -> None:
        """Free the share of a row that is no longer in the ledger, or never was. An unknown row is ignored.

        Args:
            generation: Generation of the GPUNode after the write that removed the row, so that an older ledger cannot
            restore it.
        """
        account = self._nodes.get(node)
        if account is None:
            return
        account.generation = max(account.generation, generation or 0)
        if tenant in account.rows:
            self._put(account, tenant, None)

    def load(
        self, node: str, rows: Iterable[Reservation], generation: int, *, uid: str | None = None
    ) -> tuple[Overcommit, ...]:
        """Load the ledger of a GPUNode, of this generation (CS2, CS3). Returns the over-committed GPUs.

        A ledger older than the loaded one is ignored. Exception: `uid` shows another GPUNode of this name, whose
        generations start again.
        """
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
            if row is not None and row.written is written and not row.pending and not row.in_flight:
                continue  # the row is unchanged
            wanted = row.wanted if row is not None and (row.pending or row.in_flight) else written
            wanted = _remembering(wanted, written, row)
            if row is None or row.written != written or not _same(row.wanted, wanted):
                on_its_way = row is not None and wanted != written
                self._put(account, tenant, Row(wanted, written, since=row if on_its_way else None))
        return self.overcommits(node)

    def invalidate_ledgers(self) -> None:
        """Load the next ledger of each GPUNode whatever its generation."""
        for account in self._nodes.values():
            account.generation = 0

    def drop_ledger(self, node: str) -> None:
        """Drop all rows of a deleted GPUNode, including decided ones, and its generation."""
        account = self._nodes.get(node)
        if account is None:
            return
        for tenant in list(account.rows):
            self._put(account, tenant, None)
        account.generation, account.uid = 0, None
        self._forget_if_empty(account)

    # Inside

    def _touch(self, name: str) -> None:
        for touched in self._subscribers:
            touched(name)

    def _has_grown(self, name: str) -> None:
        """Record that waiting requests may now fit on a node."""
        self.room_version += 1
        self._grown.pop(name, None)
        self._grown[name] = self.room_version
        self._touch(name)

    def _mark_head_reservation(self, name: str) -> None:
        node = self._nodes.get(name)
        if node is not None:
            here = sorted((item for item in self.kept() if item.node == name), key=lambda item: item.priority)
            node.mark_kept({uuid: (item.tenant, item.priority, item.open_to) for item in here for uuid in item.gpus})

    def _node(self, name: str) -> NodeAccount:
        account = self._nodes.get(name)
        if account is None:
            per_gpu = self._interactive_per_gpu
            account = self._nodes[name] = NodeAccount(name, interactive_per_gpu=per_gpu, excluded=self.excluded)
        return account

    def _forget_if_empty(self, node: NodeAccount) -> None:
        if node.empty:
            self._nodes.pop(node.name, None)

    def _put(self, node: NodeAccount, tenant: TenantId, row: Row | None) -> None:
        """Set a row, or remove it (None), and update every index over rows. No other method changes a row."""
        before = node.rows.get(tenant)
        taken = row is not None and before is None
        if before is not None:
            self._count_group(node.name, before, -1)
            self._count_replica(node.name, before.wanted, -1)
            self._count_excluding(node.name, before.wanted, -1)
        node.put(tenant, row)
        self._mark_excluding_fewer()
        if taken:
            self._touch(node.name)
        else:
            self._has_grown(node.name)
        if row is not None:
            self._count_group(node.name, row, 1)
            self._count_replica(node.name, row.wanted, 1)
            self._count_excluding(node.name, row.wanted, 1)
            self._nodes_of.setdefault(tenant, {})[node.name] = None
        elif tenant in self._nodes_of:
            self._nodes_of[tenant].pop(node.name, None)
            if not self._nodes_of[tenant]:
                del self._nodes_of[tenant]
        if before is not None and row is None:
            for released in self._on_released:
                released(tenant, before)

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

    def _count_excluding(self, node: str, reservation: Reservation, change: int) -> None:
        key = label_key(reservation.namespace, reservation.labels.exclusion)
        if key is None:
            return
        nodes = self._excluding.setdefault(key, Counter())
        nodes[node] += change
        if not nodes[node]:
            del nodes[node]
        if not nodes:
            del self._excluding[key]

    def _mark_excluding_fewer(self) -> None:
        """Record the namespaces that exclude others from fewer GPUs than before: their waiting requests may now exclude
        others from another GPU."""
        while self.excluded.fallen:
            self.room_version += 1
            self._excluding_fewer[self.excluded.fallen.pop()] = self.excluding_fewer_at = self.room_version


def _remembering(wanted: Reservation, written: Reservation, row: Row | None) -> Reservation:
    """Return `wanted` with the owner and needs of the row, which the ledger does not contain. They come from objects
    that were read with the ledger (`written`), or else from the earlier row."""
    before = row.wanted if row is not None else written
    owner = written.owner if written.owner is not None else before.owner
    needs = written.needs if written.needs != Resources() else before.needs
    return replace(wanted, owner=owner, needs=needs)


def _same(one: Reservation, other: Reservation) -> bool:
    """Return whether two rows are equal, including the fields that the ledger does not contain."""
    return one == other and one.owner == other.owner and one.needs == other.needs
