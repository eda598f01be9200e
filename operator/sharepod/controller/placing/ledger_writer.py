"""Ledger writer: writes the decided rows into `spec` of the GPUNodes.

Guarantees:
- At most one write per GPUNode is in flight. Decisions that are made during a write go into the next write.
- Each write is a JSON Patch that tests the GPUNode's uid and the generation of the spec from which the patch was
  computed. So a writer with an old ledger changes nothing.
- If the API server refuses a write although the GPUNode has not changed, an Event reports it. New reservations in that
  write are dropped, and `on_refused` makes their tenants avoid the node. The other changes are retried with back-off.
- An unreadable ledger is never written.
- If a decision is withdrawn, its share becomes free only once no write that contains it can still succeed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import structlog

from sharepod.api.gpunode import KIND, PluginHolder, Pool, Tenant
from sharepod.backoff import Backoff
from sharepod.controller import metrics
from sharepod.controller.apiserver.client import GPUNODES, Client, NotLeadingError
from sharepod.controller.apiserver.events import Events
from sharepod.controller.apiserver.workqueue import WorkQueue
from sharepod.controller.state.cluster_state import ClusterState
from sharepod.controller.state.facts.node_facts import GpuNodeFacts
from sharepod.kube import ApiError, InvalidError, Json, NotFoundError

from .pools import InPool, next_pool

_BACKOFF = Backoff(1.0, 300.0)
"""Pause before a refused write is retried, in seconds: first and longest."""

log = structlog.get_logger(__name__)


class LedgerWriter:
    """Writer of all ledgers.

    `add` and `remove` return at once. The result appears in the cluster state once it is written.

    Args:
        state: The cluster state: source of the decisions, and store of the written ledgers.
        client: The API server.
        events: Recorder of Events for refused writes.
        workers: Number of ledgers written at the same time.
    """

    def __init__(self, state: ClusterState, client: Client, events: Events, workers: int) -> None:
        self._state = state
        self._client = client
        self._events = events
        self._queue: WorkQueue[str] = WorkQueue("ledger", self._write, workers)
        self._leaving: dict[str, set[str]] = {}
        self._refusals: dict[str, int] = {}
        self._unknown: dict[str, int] = {}
        """Generation on which a write with a lost answer was based, by node. Until the generation grows, that write may
        still succeed."""
        self.holders_of: Callable[[GpuNodeFacts], tuple[PluginHolder, ...]] = lambda base: base.spec.holders
        """Returns the rows of plugin holders that a ledger should contain. May be replaced before `run`."""
        self.on_removed: Callable[[str, str], None] = lambda node, tenant: None
        self.on_refused: Callable[[str, str, str], None] = lambda node, tenant, why: None

    async def run(self) -> None:
        """Write the enqueued ledgers until cancelled."""
        await self._queue.run()

    def add(self, node: str) -> None:
        """Enqueue a write of the decisions for this node."""
        self._queue.add(node)

    def release(self, node: str, tenant: str, title: str, why: str, by: str) -> None:
        """Enqueue the removal of a row, count it and log it. With `by` "override", also write an Event on the GPUNode.

        `title`: text that names the row's owner. `by`: value of the metric's label.
        """
        log.info("share leaves its node", tenant=tenant, node=node, why=why)
        metrics.RELEASES.labels(by).inc()
        gpunode = self._state.gpunodes.named(node)
        if by == "override" and gpunode is not None:
            text = f"gave away the share of {title} ({tenant}): {why}"
            self._events.warning("GPUNode", gpunode, "ShareGivenAway", "Release", text)
        self.remove(node, tenant)

    def remove(self, node: str, tenant: str) -> None:
        """Enqueue the removal of a row. Its share becomes free once the removal is written."""
        self._leaving.setdefault(node, set()).add(tenant)
        self._queue.add(node)

    def leaving(self, node: str, tenant: str) -> bool:
        """Return True if the removal of this row is enqueued or in flight."""
        return tenant in self._leaving.get(node, ())

    def abandon(self) -> None:
        """Drop all decisions that are not written yet: this process no longer leads."""
        self._queue.clear()
        self._leaving.clear()
        self._refusals.clear()
        names = {node.name for node in self._state.cluster.nodes()} | {item.name for item in self._state.gpunodes}
        for name in names:
            for decided in self._state.cluster.pending(name):
                self._state.cluster.revert(name, decided.tenant)

    async def _write(self, node: str) -> None:
        base = self._state.gpunodes.named(node)
        if base is None:
            self._drop(node, "its GPUNode is deleted")
            return
        if base.ledger_error is not None:
            self._drop_fresh(base, base.ledger_error)
            self._again(node)
            return
        leaving = self._leaving.get(node, set())
        in_pool = self._pool(base)
        operations = patch(
            base,
            changed=[row.row() for row in self._state.cluster.pending(node)],
            leaving=leaving,
            pool=in_pool.pool,
            leaving_pool=in_pool.leaving,
            holders=self.holders_of(base),
        )
        if not operations:
            self._refusals.pop(node, None)
            self._removed(node, leaving - base.rows.keys())
            self._nothing_in_flight(base)
            return
        try:
            answer = await self._client.patch_json(GPUNODES, node, operations)
        except InvalidError as error:
            if await self._refused(base, error):
                return
        except NotFoundError:
            await self._read(base)
        except NotLeadingError:
            self.abandon()
            raise
        except ApiError:
            metrics.LEDGER_WRITES.labels("unknown").inc()
            self._unknown[node] = base.generation
            await self._read(base)
            raise
        else:
            self._refusals.pop(node, None)
            metrics.LEDGER_WRITES.labels("written").inc()
            metrics.LEDGER_CHANGES.inc(len(operations) - 2)
            self._state.put_gpunode(answer)
            self._removed(node, leaving - {str(row["id"]) for row in answer["spec"].get("tenants") or ()})
            if (written := self._state.gpunodes.named(node)) is not None:
                self._nothing_in_flight(written)
        if self._state.cluster.pending(node) or self._leaving.get(node):
            self._queue.add(node)

    def _nothing_in_flight(self, base: GpuNodeFacts) -> None:
        """Free the shares of withdrawn decisions once no write that contains them can succeed.

        A write tests the generation of the GPUNode. So a write whose answer was lost may still succeed, until the
        generation has grown. The shares stay reserved until then.
        """
        if base.generation > self._unknown.get(base.name, -1):
            self._unknown.pop(base.name, None)
            if self._state.cluster.nothing_in_flight(base.name):
                self._state.on_room_changed()

    def _pool(self, base: GpuNodeFacts) -> InPool:
        """Return the pool to write for a node. While the ledger has tenants or plugin holders the pool stays, because
        each pool has its own way to end them.
        """
        node = self._state.nodes.named(base.name)
        label = Pool(node.pool) if node is not None and node.pool in tuple(Pool) else None
        if label is base.spec.pool:
            return InPool(label)
        pending = bool(self._state.cluster.pending(base.name))
        return next_pool(base, label, occupied=pending or self._state.seen_claims.scheduled_on(base.name))

    async def _refused(self, base: GpuNodeFacts, error: InvalidError) -> bool:
        """Find out why the API server refused a patch. Return True if it refuses the patch itself, and False if the
        GPUNode had changed since it was read, so that a new patch may succeed.
        """
        await self._read(base)
        now = self._state.gpunodes.named(base.name)
        if now is None or now.uid != base.uid or now.generation != base.generation:
            metrics.LEDGER_WRITES.labels("conflict").inc()
            return False
        metrics.LEDGER_WRITES.labels("defect").inc()
        log.error("ledger write refused though nothing had changed", node=base.name, error=str(error))
        self._events.warning(
            KIND, base, "LedgerWriteRefused", "Reserve", f"the API server refused a reservation: {error.message}"
        )
        self._drop_fresh(now, error.message)
        self._again(base.name)
        return True

    def _again(self, node: str) -> None:
        """If a node has pending changes, enqueue its next write after a growing pause."""
        if self._state.cluster.pending(node) or self._leaving.get(node):
            count = self._refusals[node] = self._refusals.get(node, 0) + 1
            self._queue.add_after(node, _BACKOFF.pause_s(count))

    def _drop_fresh(self, base: GpuNodeFacts, why: str) -> None:
        """Withdraw the decided reservations of a node that are not in its ledger. Pending changes of existing rows
        stay.
        """
        for decided in self._state.cluster.pending(base.name):
            if decided.tenant not in base.rows:
                log.warning("dropped a decision", node=base.name, tenant=decided.tenant, why=why)
                self.on_refused(base.name, decided.tenant, why)
                self._state.ledgers.revert(base.name, decided.tenant)

    async def _read(self, base: GpuNodeFacts) -> None:
        try:
            self._state.put_gpunode(await self._client.get(GPUNODES, base.name))
        except NotFoundError:
            self._state.drop_gpunode(base.uid)

    def _drop(self, node: str, why: str) -> None:
        """Drop all pending changes of this node, and enqueue the affected tenants."""
        self._refusals.pop(node, None)
        self._unknown.pop(node, None)
        leaving = self._leaving.pop(node, set())
        for decided in self._state.cluster.pending(node):
            log.warning("dropped a decision", node=node, tenant=decided.tenant, why=why)
            self._state.ledgers.revert(node, decided.tenant)
        for tenant in leaving:
            self._state.on_tenant_changed(tenant)

    def _removed(self, node: str, tenants: Iterable[str]) -> None:
        for tenant in list(tenants):
            self._leaving.get(node, set()).discard(tenant)
            self._state.ledgers.unreserve(node, tenant)
            self.on_removed(node, tenant)
            self._state.on_tenant_changed(tenant)
            self._state.on_room_changed()
        if not self._leaving.get(node):
            self._leaving.pop(node, None)


def patch(
    base: GpuNodeFacts,
    *,
    changed: Sequence[Tenant],
    leaving: Iterable[str],
    pool: Pool,
    leaving_pool: bool = False,
    holders: tuple[PluginHolder, ...] = (),
) -> list[Json]:
    """Return the JSON Patch that writes the `changed` rows, removes the rows of `leaving`, and sets pool and holders.
    Its first two operations test uid and generation. Return an empty list if `base` needs no change.
    """
    leaving = set(leaving)
    known = base.rows
    operations: list[Json] = []
    if base.spec.pool is not pool:
        operations.append({"op": "add", "path": "/spec/pool", "value": pool.value})
    if base.spec.leaving is not leaving_pool:
        operations.append({"op": "add", "path": "/spec/leaving", "value": leaving_pool})
    if base.spec.holders != holders:
        operations.append({"op": "add", "path": "/spec/holders", "value": [row.dump() for row in holders]})
    places: Mapping[str, int] = {row.id: place for place, row in enumerate(base.spec.tenants)}
    fresh = [row for row in changed if row.id not in known and row.id not in leaving]
    operations += [
        {"op": "replace", "path": f"/spec/tenants/{places[row.id]}", "value": row.dump()}
        for row in changed
        if row.id in known and row.id not in leaving and known[row.id] != row
    ]
    operations += [
        {"op": "remove", "path": f"/spec/tenants/{place}"}
        for row, place in sorted(places.items(), key=lambda item: -item[1])
        if row in leaving
    ]
    if base.has_tenants:
        operations += [{"op": "add", "path": "/spec/tenants/-", "value": row.dump()} for row in fresh]
    elif fresh:
        operations.append({"op": "add", "path": "/spec/tenants", "value": [row.dump() for row in fresh]})
    if not operations:
        return []
    return [
        {"op": "test", "path": "/metadata/uid", "value": base.uid},
        {"op": "test", "path": "/metadata/generation", "value": base.generation},
        *operations,
    ]
