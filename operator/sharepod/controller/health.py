"""Health of the operator: results of its probes, its gauges, and a check that its watches are fresh enough to place.

Guarantees:
- The health probe fails only if a restart of the process can help.
- The process ends, with a log line, if for `_REJECTED_S` the API server has rejected its credentials or presented an
  untrusted certificate.
- While stale watches stop placement, the status of each waiting SharePod reports it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping

import structlog

from sharepod.api.sharepod import Phase
from sharepod.placement.state.types import Outlook, Refusal

from . import metrics
from .apiserver.client import Client
from .apiserver.leadership import Leadership
from .apiserver.watch_freshness import BELIEF_S
from .apiserver.watches import Watches
from .apiserver.workqueue import WorkQueue
from .placing.loop import PlacementLoop
from .state.cluster_state import ClusterState
from .state.memos import TenantMemos
from .state.placement_view import agent_unready

_STALLED_S = 30.0
"""Seconds without a call of `look` after which the health probe fails: longer than any step of a working event loop."""
_REJECTED_S = 60.0
"""Longest time in seconds for which the credentials or the certificate may be rejected before the process ends. A
restarted process reads both again. The kubelet replaces a token long before it expires."""

log = structlog.get_logger(__name__)


class RejectedError(Exception):
    """Rejected credentials, or an untrusted certificate of the API server, for more than `_REJECTED_S`."""


class OperatorHealth:
    """Health of the operator.

    Args:
        state: The cluster state.
        watches: The watches, for their freshness.
        clients: All clients of the API server.
        leadership: The leader election, which knows whether this process leads.
        loop: The placement loop, which is woken once the watches are fresh again.
        memos: The tenants' memos, in which the reason for the wait is recorded.
        queues: The work queues, by their names in the gauges.
        acts: Returns True while this process acts as the leader.
        enqueue_tenant: Called with each tenant whose status must change.
        webhook_unready: Returns why the webhook does not serve; None if it does, or is off.
        clock: Seconds that include suspension of the machine.
    """

    def __init__(
        self,
        state: ClusterState,
        watches: Watches,
        clients: tuple[Client, ...],
        leadership: Leadership,
        loop: PlacementLoop,
        memos: TenantMemos,
        *,
        queues: Mapping[str, WorkQueue[str]],
        acts: Callable[[], bool],
        enqueue_tenant: Callable[[str], None],
        webhook_unready: Callable[[], str | None],
        clock: Callable[[], float],
    ) -> None:
        self._state = state
        self._watches = watches
        self._clients = clients
        self._leadership = leadership
        self._loop = loop
        self._memos = memos
        self._queues = queues
        self._acts = acts
        self._enqueue_tenant = enqueue_tenant
        self._webhook_unready = webhook_unready
        self._clock = clock
        self._believed = True
        self.looked_at = clock()
        """Time of the last call of `look`, which proves that the event loop ran at that time."""

    def look(self) -> None:
        """Check the credentials and the freshness of the watches. The caller must call this about once a second. Raise
        `RejectedError` if the process must end.
        """
        self.looked_at = self._clock()
        self._check_credentials()
        self.check_beliefs()

    def _check_credentials(self) -> None:
        seconds = max(client.rejected_for_s for client in self._clients)
        if seconds > _REJECTED_S:
            raise RejectedError(
                f"the API server has rejected the credentials (401), or shown a certificate that is not trusted, for "
                f"{seconds:.0f} s; check the ServiceAccount's token and CA, or the kubeconfig"
            )

    def check_beliefs(self) -> None:
        """Compare the watches' freshness with the last call. If all are fresh again, wake the placement loop. If one is
        stale, log that, and report it to the waiting tenants.
        """
        believed = self._watches.believed()
        if believed and not self._believed:
            log.info("watches are heard again: placing")
            self._loop.room_changed()
        elif not believed and self._acts():
            kinds = self._watches.stale()
            if self._believed:
                log.warning("watches are silent: placing nothing", kinds=kinds)
            self._tell_waiting(kinds)
        self._believed = believed

    def _tell_waiting(self, kinds: list[str]) -> None:
        """Record the stale watches as refusal of each waiting tenant that has none, and enqueue the tenant for its
        status."""
        late = ", ".join(kinds)
        headline = f"no watch event of {late} for {BELIEF_S:.0f} s; the operator places nothing until there is one"
        for tenant in self._loop.waiting():
            memo = self._memos.of(tenant)
            if memo.refusal is None:
                memo.refusal = Refusal(outlook=Outlook.UNSEEN, headline=headline)
                self._enqueue_tenant(tenant)

    # Probes and metrics

    def measure(self) -> None:
        """Update the gauges that are computed at each scrape."""
        for watch in self._watches.freshness():
            metrics.WATCH_AGE_SECONDS.labels(watch.kind).set(watch.silent_s)
        phases = Counter(item.status.phase for item in self._state.sharepods)
        for phase in Phase:
            metrics.SHAREPODS.labels(phase.value).set(phases[phase])
        metrics.LONGEST_WAIT_SECONDS.set(self._loop.longest_wait_s())
        metrics.AGENTS_UNREADY.set(sum(agent_unready(item) is not None for item in self._state.gpunodes))
        metrics.UNENFORCED.set(self._state.ledgers.unenforced())
        metrics.OVERCOMMITS.set(len(self._state.cluster.overcommits()))
        for name, queue in self._queues.items():
            metrics.QUEUE_DEPTH.labels(name).set(len(queue))
            metrics.QUEUE_AGE_SECONDS.labels(name).set(queue.oldest_s())

    def unready(self) -> str | None:
        """Return why the operator is not ready: kinds that are not listed yet, or a webhook that does not serve. None
        if it is ready.
        """
        return self._watches.unready() or self._webhook_unready()

    def leads(self) -> bool:
        """Return whether this process leads."""
        return self._leadership.acting()

    def healthy(self) -> str:
        """Return a short text for the health probe. Raise `RuntimeError` if a restart can help."""
        silent = self._clock() - self.looked_at
        if silent > _STALLED_S:
            raise RuntimeError(f"the event loop has stood still for {silent:.0f} s")
        if (why := self._watches.blind()) is not None:
            raise RuntimeError(why)
        return "leads" if self.leads() else "stands by"
