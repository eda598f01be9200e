"""Routes of changes: enqueue the key of a changed object in the queue of its reconciler.

Guarantees:
- Nothing is enqueued while this process does not act. Everything is enqueued when it begins to act.
- Keys of changed objects precede the keys of a resync.
- A full pass enqueues tenants without a share first. So a new leader places them before it handles running tenants.
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
"""Seconds of enqueuing tenants before other tasks get a turn: 10,000 tenants take 30 ms in all."""


class Routes:
    """Routes to the queues of all reconcilers. `acts`: returns True while this process acts as the leader."""

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
        """Enqueue a tenant: a SharePod, plain Pod or claim."""
        if self._acts():
            self._queue_of(tenant).add(tenant)

    def _waits(self, tenant: str) -> bool:
        asking = self._state.asking(tenant)
        ended = asking is not None and asking.ended
        return not ended and not self._state.cluster.reservations_of(TenantId(tenant))

    def _queue_of(self, tenant: str) -> WorkQueue[str]:
        return self._claims.queue if self._state.is_claim(tenant) else self._tenants.queue

    def ledger_changed(self, node: str) -> None:
        """Enqueue a node, whose reconciler compares its GPUNode with its Node."""
        if self._acts():
            self._nodes.queue.add(node)

    def holders_changed(self, node: str) -> None:
        """Enqueue a node for the reconciler of its plugin holders."""
        if self._acts():
            self._holders.queue.add(node)

    def row_removed(self, node: str) -> None:
        """Enqueue a node for both reconcilers, because a tenant has left its ledger."""
        self.ledger_changed(node)
        self.holders_changed(node)

    def node_changed(self, name: str) -> None:
        """Enqueue a node for both reconcilers. If the node was deleted, compute again the refusals that count it."""
        self.ledger_changed(name)
        self.holders_changed(name)
        if self._state.nodes.named(name) is None:
            self._loop.node_left()

    def all_nodes_changed(self) -> None:
        """Enqueue every Node."""
        for node in self._state.nodes:
            self.ledger_changed(node.name)

    def claim_lacking(self, namespace: str) -> None:
        """Enqueue a namespace for the reconciler of claim templates, because a Pod there waits for its claim."""
        if self._acts():
            self._line_templates.want(namespace)

    def self_test_changed(self, claim: str) -> None:
        """Enqueue the claim by which an agent tests its node."""
        if self._acts():
            self._self_test_claims.queue.add(claim)

    async def look_at_all(self) -> None:
        """Enqueue everything once, behind changed keys. Yields to other tasks; stops when this process no longer
        acts."""
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
