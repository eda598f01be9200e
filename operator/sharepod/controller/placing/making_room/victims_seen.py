"""Facts about tenants with a share that preemption needs to choose victims.

Guarantees:
- A Pod is one victim together with all its claims. A claim that several Pods may use is never a victim.
- A tenant counts as leaving, so that requests wait for its capacity, in two cases:
  - Its Pod is being deleted and will end within `_LONGEST_GRACE_S`. This counts until `_STUCK_S` after the grace
    period.
  - Its Pod is deleted. This counts until the row has stayed for `_ROW_STUCK_S`: a process that never ends keeps the
    row.
- If a needed fact about a tenant is unknown, the tenant is no victim.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence

from sharepod.api.units import WHOLE_GPU, TenantId
from sharepod.budgets.standing import Standing
from sharepod.controller.state.cluster_state import ClusterState
from sharepod.controller.state.facts.claim_facts import ClaimPodFacts
from sharepod.controller.state.facts.pod_facts import PodFacts
from sharepod.controller.state.reading.timestamps import seconds
from sharepod.placement.preemption.victims import Unit, VictimFacts, Victims, victims_of
from sharepod.placement.state.accounts import NodeAccount
from sharepod.placement.state.types import Reservation

_SLICE = 20
"""Number of nodes that are read before other tasks get a turn: about 10 ms of work with 30 tenants each."""
_STUCK_S = 60.0
"""Seconds after its grace period for which a Pod still counts as leaving. The kubelet needs some seconds to confirm the
end; a node that does not answer never confirms it."""
_LONGEST_GRACE_S = 3600.0
"""Longest rest of a grace period, in seconds, for which requests wait. Pods may have grace periods of years."""
_ROW_STUCK_S = 120.0
"""Seconds for which a row counts as leaving after its Pod's deletion. Its agent confirms within seconds that no process
is left, unless a process hangs in the driver."""
_PROTECTED_S = 30.0
"""Seconds for which a Pod counts as protected after a PodDisruptionBudget has refused its eviction."""


class VictimsSeen:
    """Collector of the facts about possible victims.

    Args:
        state: The cluster state.
        clock: Monotonic seconds.
        wall: Time of day, seconds since the epoch.
        standing: Returns the standing of a namespace.
    """

    def __init__(
        self,
        state: ClusterState,
        clock: Callable[[], float],
        wall: Callable[[], float],
        standing: Callable[[str], Standing],
    ) -> None:
        self._state = state
        self._clock = clock
        self._wall = wall
        self._standing = standing
        self._protected: dict[str, float] = {}
        """Time until which the eviction of a Pod is not tried again, by the Pod's uid."""
        self._evicted: dict[str, float] = {}
        """Time until which a Pod with an accepted eviction counts as leaving, by the Pod's uid. It bridges the time
        until the watch shows the deletion."""
        self._ending: dict[TenantId, float] = {}
        """Time at which a tenant was first seen without a Pod, but with a row, by tenant."""

    def refused(self, pod: str) -> None:
        """Record that a PodDisruptionBudget has refused the eviction of a Pod."""
        self._protected[pod] = self._clock() + _PROTECTED_S

    def evicted(self, pod: str) -> None:
        """Record that the API server has accepted the eviction of a Pod."""
        self._evicted[pod] = self._clock() + _STUCK_S

    def leaves(self, tenant: str) -> bool:
        """Return True if all Pods of a tenant are ending or have ended, or the tenant has no Pod."""
        return all(pod.deleting or pod.ended or pod.uid in self._evicted for pod in self.pods_of(tenant))

    async def lowest(self) -> int:
        """Return the lowest effective priority of all tenants with a share. Yields to other tasks."""
        found = 1 << 40
        for number, node in enumerate(list(self._state.cluster.nodes())):
            if number % _SLICE == _SLICE - 1:
                await asyncio.sleep(0)
            for tenant in node.rows:
                pods = self.pods_of(tenant)
                for pod in pods:
                    found = min(found, self._standing(pod.namespace).effective_priority(pod.priority))
                if not pods:
                    found = min(found, self._gone(tenant).priority)
        return found

    def goes_within(self, tenant: str, seconds_: float) -> bool:
        """Return True if no Pod of a tenant has a grace period longer than `seconds_`."""
        return all(pod.grace_s <= seconds_ for pod in self.pods_of(tenant))

    def slow_pods(self, tenants: Iterable[str]) -> frozenset[str]:
        """Return the uids of the tenants' Pods with a grace period of more than `_LONGEST_GRACE_S`."""
        pods = (pod for tenant in tenants for pod in self.pods_of(tenant))
        return frozenset(pod.uid for pod in pods if pod.grace_s > _LONGEST_GRACE_S)

    def goes_slowly(self, uid: str) -> bool:
        """Return True if a Pod was evicted, still exists, and has more than `_LONGEST_GRACE_S` left."""
        pod = self._state.pods.get(uid) or self._state.seen_claims.pods.get(uid)
        if pod is None or pod.ended:
            return False
        if not pod.deleting:
            return uid in self._evicted
        ends_by = seconds(pod.ends_by)
        return ends_by is not None and ends_by - self._wall() > _LONGEST_GRACE_S

    async def look(self) -> Victims:
        """Return all tenants as possible victims, with the tenants that are leaving. Yields to other tasks."""
        now = self._clock()
        self._protected = {pod: until for pod, until in self._protected.items() if until > now}
        self._evicted = {pod: until for pod, until in self._evicted.items() if until > now}
        units: dict[TenantId, Unit] = {}
        leaving: dict[TenantId, int] = {}
        ending: set[TenantId] = set()
        nodes = list(self._state.cluster.nodes())
        for first in range(0, len(nodes), _SLICE):
            slice_ = nodes[first : first + _SLICE]
            some = self._on_nodes(slice_)
            units |= some.units
            leaving |= some.leaving
            ending |= self._ending_on(slice_)
            await asyncio.sleep(0)
        self._ending = {tenant: self._ending.get(tenant, now) for tenant in ending}
        stuck = frozenset(tenant for tenant, since in self._ending.items() if now - since > _ROW_STUCK_S)
        return Victims(units, {one: priority for one, priority in leaving.items() if one not in stuck}, stuck)

    def _on_nodes(self, nodes: Sequence[NodeAccount]) -> Victims:
        """Return the victims on these nodes. All claims of a Pod are on one node, so no victim is split."""
        facts: dict[TenantId, VictimFacts] = {}
        for node in nodes:
            for tenant, row in node.rows.items():
                fact = self.fact(tenant, row.wanted)
                if fact is not None:
                    facts[tenant] = fact
        return victims_of(facts)

    def _ending_on(self, nodes: Sequence[NodeAccount]) -> set[TenantId]:
        """Return the tenants on these nodes whose rows are being released, or of which only the row is left."""
        rows = ((tenant, row.wanted) for node in nodes for tenant, row in node.rows.items())
        return {tenant for tenant, row in rows if row.releasing or self._is_gone(tenant)}

    def _is_gone(self, tenant: str) -> bool:
        claim = self._state.seen_claims.claims.get(tenant)
        return (claim is None or claim.deleting) and not self.pods_of(tenant)

    def pods_of(self, tenant: str) -> tuple[PodFacts | ClaimPodFacts, ...]:
        """Return the Pods that end when a tenant is preempted."""
        claim = self._state.seen_claims.claims.get(tenant)
        if claim is not None:
            return tuple(pod for pod in self._state.seen_claims.users(claim) if pod.node is not None)
        pod = self._state.pod_of(tenant)
        return (pod,) if pod is not None else ()

    def _gone(self, tenant: TenantId) -> VictimFacts:
        """Return the facts of a tenant whose Pod is deleted. It counts as leaving, because its row will be removed once
        the agent finds no process of it.
        """
        lost = self._state.lost_pods.get(tenant)
        priority = self._standing(lost.namespace).effective_priority(lost.priority) if lost is not None else 0
        return VictimFacts(unit=tenant, priority=priority, leaving=True)

    def ran_for(self, tenant: TenantId) -> float:
        """Return the seconds since the first of a tenant's Pods started. 0 if none has started."""
        began = [at for pod in self.pods_of(tenant) if (at := seconds(pod.started)) is not None]
        return max(0.0, self._wall() - min(began)) if began else 0.0

    def fact(self, tenant: TenantId, row: Reservation) -> VictimFacts | None:
        """Return the facts of one tenant. None if the tenant cannot be a victim."""
        pods = self.pods_of(tenant)
        claim = self._state.seen_claims.claims.get(tenant)
        if self._is_gone(tenant):
            return self._gone(tenant)
        if len(pods) != 1 or (claim is not None and claim.made_for != pods[0].uid):
            return None
        pod = pods[0]
        if pod.ended or (isinstance(pod, PodFacts) and pod.waits_for_share):
            return None
        standing, wall = self._standing(pod.namespace), self._wall()
        leaving = pod.deleting or pod.uid in self._evicted
        ends_by = seconds(pod.ends_by)
        if pod.deleting and (ends_by is None or not -_STUCK_S <= ends_by - wall <= _LONGEST_GRACE_S):
            return None
        started = int(seconds(pod.started) or wall)
        share = row.request_milli * len(row.gpus)
        return VictimFacts(
            unit=pod.uid,
            priority=standing.effective_priority(pod.priority),
            over_budget_milli=standing.over_budget_milli,
            started=started,
            lost_seconds=max(0, int(wall) - started) * share // WHOLE_GPU,
            protected=pod.uid in self._protected,
            lowerable=row.request_milli > 0,
            slow=pod.grace_s > _LONGEST_GRACE_S,
            leaving=leaving,
        )
