"""Routes of changes: the queues that receive the key of a changed object.

Guarantees:
- Nothing is enqueued while this process does not act; everything is enqueued when it begins to.
- A key with a change goes before the keys of a resync.
- In a full pass, tenants without a share go first: a new leader places before it has handled all running tenants.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from sharepod.api.units import TenantId

from .apiserver.workqueue import WorkQueue
from .nodes import NodeReconciler
from .placing.loop import PlacementLoop
from .plugin_gpus import HolderReconciler
from .self_test_claims import SelfTestClaims
from .state.cluster_state import ClusterState
from .tenants.claim_reconciler import ClaimReconciler
from .tenants.line_templates import LineTemplates
from .tenants.reconciler import TenantReconciler

_TURN_S = 0.005
"""Seconds of enqueuing tenants before other tasks get a turn: 10,000 take 30 ms."""


class Routes:
    """Routes to the queues of all reconcilers. `acts`: returns whether this process acts."""

    def __init__(
        self,
        state: ClusterState,
        loop: PlacementLoop,
        *,
        tenants: TenantReconciler,
        claims: ClaimReconciler,
        nodes: NodeReconciler,
        holders: HolderReconciler,
        line_templates: LineTemplates,
        self_test_claims: SelfTestClaims,
        acts: Callable[[], bool],
    ) -> None:
        self._state = state
        self._loop = loop
        self._tenants = tenants
        self._claims = claims
        self._nodes = nodes
        self._holders = holders
        self._line_templates = line_templates
        self._self_test_claims = self_test_claims
        self._acts = acts

    def tenant_changed(self, tenant: str) -> None:
        """Enqueue a tenant: a SharePod or a claim."""
        if self._acts():
            self._queue_of(tenant).add(tenant)

    def _waits(self, tenant: str) -> bool:
        asking = self._state.asking(tenant)
        ended = asking is not None and asking.ended
        return not ended and not self._state.cluster.reservations_of(TenantId(tenant))

    def _queue_of(self, tenant: str) -> WorkQueue[str]:
        return self._claims.queue if self._state.is_claim(tenant) else self._tenants.queue

    def ledger_changed(self, node: str) -> None:
        """Enqueue a node."""
        if self._acts():
            self._nodes.queue.add(node)

    def holders_changed(self, node: str) -> None:
        """Enqueue the holders of a node."""
        if self._acts():
            self._holders.queue.add(node)

    def row_removed(self, node: str) -> None:
        """Enqueue a node and its holders: a tenant has left its ledger."""
        self.ledger_changed(node)
        self.holders_changed(node)

    def node_changed(self, name: str) -> None:
        """Enqueue a node and its holders, and update refusals that count it if it was deleted."""
        self.ledger_changed(name)
        self.holders_changed(name)
        if self._state.nodes.named(name) is None:
            self._loop.node_left()

    def all_nodes_changed(self) -> None:
        """Enqueue every Node."""
        for node in self._state.nodes:
            self.ledger_changed(node.name)

    def claim_lacking(self, namespace: str) -> None:
        """Enqueue the claim templates of a namespace: a Pod waits for one."""
        if self._acts():
            self._line_templates.want(namespace)

    def self_test_changed(self, claim: str) -> None:
        """Enqueue a claim of a node's self-test."""
        if self._acts():
            self._self_test_claims.queue.add(claim)

    async def look_at_all(self) -> None:
        """Enqueue everything once, after changed keys. Yields to other tasks; ends once this process does not act."""
        tenants = self._state.tenants()
        waiting = {tenant for tenant in tenants if self._waits(tenant)}
        for tenant in waiting:
            self._queue_of(tenant).add(tenant)
        turn = time.monotonic() + _TURN_S
        for tenant in tenants - waiting:
            if time.monotonic() > turn:
                await asyncio.sleep(0)
                if not self._acts():
                    return
                turn = time.monotonic() + _TURN_S
            self._queue_of(tenant).add_resync(tenant)
        for name in {item.name for item in self._state.nodes} | {item.name for item in self._state.gpunodes}:
            self._nodes.queue.add_resync(name)
            self._holders.queue.add_resync(name)
        seen = self._state.seen_claims
        for namespace in {*seen.lacking(), *(pod.namespace for pod in seen.without_claim())}:
            self._line_templates.want(namespace)
        self._self_test_claims.look_at_all()
        self._loop.room_changed()
