"""Ledgers: keeps placement's model equal to the rows of the GPUNodes, plus the decisions that are not written yet.

Guarantees:
- The reservation of a written row ends only by a write of the ledger. A decision that is not written yet can be
  withdrawn.
- A decision that conflicts with the write of another operator is withdrawn. Its own write would fail, as the generation
  has changed.
- A row that becomes unreadable keeps its last readable value.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import structlog

from sharepod.api.gpunode import Tenant
from sharepod.api.units import TenantId
from sharepod.placement.state.cluster import Cluster
from sharepod.placement.state.types import Reservation, Resources

from .claims_seen import ClaimsSeen
from .facts.node_facts import GpuNodeFacts
from .facts.sharepod_facts import SharePodFacts
from .store import Store

log = structlog.get_logger(__name__)


class Ledgers:
    """Ledgers of all nodes.

    Args:
        cluster: The model of nodes and reservations that placement uses.
        gpunodes: GPUNodes as last read.
        asking: Returns a tenant's SharePod or plain Pod; None for a claim.
        claims: Claims and the Pods that use them. `asking` and `claims` supply facts about a tenant that its row does
            not contain: its owner, and its Pod's resource requests.
        on_tenant_changed: Called with each tenant whose reservation has changed.
        on_room_changed: Called when capacity may have become free.
    """

    def __init__(
        self,
        cluster: Cluster,
        gpunodes: Store[GpuNodeFacts],
        asking: Callable[[str], SharePodFacts | None],
        claims: ClaimsSeen,
        *,
        on_tenant_changed: Callable[[str], None],
        on_room_changed: Callable[[], None],
    ) -> None:
        self._cluster = cluster
        self._gpunodes = gpunodes
        self._asking = asking
        self._claims = claims
        self._on_tenant_changed = on_tenant_changed
        self._on_room_changed = on_room_changed
        self._unreadable: dict[str, frozenset[str]] = {}

    def with_known_rows(self, item: GpuNodeFacts) -> GpuNodeFacts:
        """Return the GPUNode with each unreadable row replaced by the last readable version of that row."""
        before = self._gpunodes.get(item.uid)
        if item.unreadable:
            self._unreadable[item.name] = item.unreadable
            known = tuple(row for row in (before.spec.tenants if before else ()) if row.id in item.unreadable)
            return replace(item, spec=item.spec.model_copy(update={"tenants": (*item.spec.tenants, *known)}))
        self._unreadable.pop(item.name, None)
        return item

    def unreadable_row(self, tenant: str) -> bool:
        """Return True if any ledger has an unreadable row of this tenant, so that its share is unknown."""
        return any(tenant in tenants for tenants in self._unreadable.values())

    def load(self, item: GpuNodeFacts) -> None:
        """Load the rows of a ledger into placement's model.

        Withdraw the decisions that conflict with these rows, as another operator has written them. Log overcommitted
        GPUs.
        """
        rows = []
        for row in item.spec.tenants:
            owner, needs = self._owner_and_needs(row.id)
            rows.append(self._reservation(item.name, row, owner, needs))
        faults = self._cluster.load(item.name, rows, item.generation, uid=item.uid)
        written = item.rows
        for decided in self._cluster.pending(item.name):
            row_now = written.get(decided.tenant)
            if row_now is not None and tuple(row_now.gpus) != decided.gpus:
                self._take_back(item.name, decided)
        for fault in faults:
            for decided in self._cluster.pending(item.name):
                over = any(left.gpu == fault.gpu for left in self._cluster.overcommits(item.name))
                if over and fault.gpu in decided.gpus and (decided.tenant not in written or not decided.releasing):
                    self._take_back(item.name, decided)
        for left in self._cluster.overcommits(item.name):
            log.error("GPU is overcommitted", node=item.name, gpu=left.gpu, error=left.text)
        self._on_room_changed()

    def _reservation(self, node: str, row: Tenant, owner: str | None, needs: Resources) -> Reservation:
        """Return the reservation of a row. If nothing has changed, it is the same Python object as before."""
        known = self._cluster.written(node, TenantId(row.id))
        if known is not None and known.read_from is row and known.owner == owner and known.needs == needs:
            return known
        return Reservation.of_row(row, owner=owner, needs=needs)

    def remove(self, item: GpuNodeFacts) -> None:
        """Remove the ledger of a deleted GPUNode from placement's model."""
        tenants = {*item.rows, *(row.tenant for row in self._cluster.reservations(item.name))}
        self._cluster.drop_ledger(item.name)
        self._unreadable.pop(item.name, None)
        for tenant in tenants:
            self._on_tenant_changed(tenant)

    def unreserve(self, node: str, tenant: str) -> None:
        """Drop a reservation that was only decided. Do nothing if the ledger as last read has its row."""
        gpunode = self._gpunodes.named(node)
        if gpunode is None or tenant not in gpunode.rows:
            self._cluster.release(node, TenantId(tenant))
            self._on_room_changed()

    def _take_back(self, node: str, decided: Reservation) -> None:
        log.info("took a decision back: another operator wrote first", node=node, tenant=decided.tenant)
        self.revert(node, decided.tenant)

    def revert(self, node: str, tenant: TenantId) -> None:
        """Withdraw a decision that was not written. Its capacity becomes free, and its tenant is enqueued."""
        self._cluster.revert(node, tenant)
        self._on_tenant_changed(tenant)
        self._on_room_changed()

    def unenforced(self) -> int:
        """Return the number of tenants whose agents report that the share is not enforced."""
        return sum(seen.enforced is False for item in self._gpunodes for seen in item.status.tenants)

    def _owner_and_needs(self, tenant: str) -> tuple[str | None, Resources]:
        """Return (owner, resource requests of its Pod) of a tenant. Of the claims of one Pod, only the first has the
        requests."""
        if (sharepod := self._asking(tenant)) is not None:
            return sharepod.owner, sharepod.needs.resources
        claim = self._claims.claims.get(tenant)
        pod = next(iter(self._claims.users(claim)), None) if claim is not None else None
        if pod is None or pod.asks is None:
            return None, Resources()
        first = next(self._claims.of_pod(pod), None)
        return pod.owner, pod.asks.resources if first is claim else Resources()
