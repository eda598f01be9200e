"""Preemptor: carries out preemptions that placement has decided. It evicts the victims' Pods, and writes Events for the
waiting tenant and the victims.

Guarantees:
- Before the first eviction, a dry run of the Eviction API must have succeeded for each victim's Pod. If a
    PodDisruptionBudget forbids any, no Pod is evicted and other victims are searched.
- A Pod is evicted by the Eviction API, by its uid, with its own grace period. A PodDisruptionBudget is always obeyed.
- No Pod is evicted for a tenant that no longer waits.
- Namespaces take turns: the admission webhook of one namespace delays only evictions there.
- The Events of a tenant never name objects of another namespace.
- After a crash between any two calls, each victim's Pod is either ending or unchanged, so the next operator can
  continue.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from http import HTTPStatus

import structlog

from sharepod.api.units import TenantId
from sharepod.controller import metrics
from sharepod.controller.apiserver.client import Client
from sharepod.controller.apiserver.events import Events
from sharepod.controller.apiserver.workqueue import WorkQueue
from sharepod.controller.placing.making_room.moving import OngoingMove
from sharepod.controller.placing.making_room.preemptions import OngoingPreemption, Preemptions
from sharepod.controller.placing.making_room.victims_seen import VictimsSeen
from sharepod.controller.state.cluster_state import ClusterState
from sharepod.controller.state.facts.claim_facts import ClaimPodFacts
from sharepod.controller.state.facts.object_facts import ObjectFacts
from sharepod.controller.state.facts.pod_facts import PodFacts
from sharepod.controller.state.memos import Eviction, TenantMemos
from sharepod.kube import ApiError, ConflictError, NotFoundError
from sharepod.placement.state.types import PlacementRequest
from sharepod.placement.wording import counted

_WORKERS = 8
"""Number of preemptions that are carried out at the same time."""

log = structlog.get_logger(__name__)

AnyPod = PodFacts | ClaimPodFacts


class Preemptor:
    """Executor of preemptions. Keys of its queue are the preempting tenants. `clock`: monotonic seconds."""

    def __init__(
        self,
        state: ClusterState,
        client: Client,
        events: Events,
        memos: TenantMemos,
        preemptions: Preemptions,
        seen: VictimsSeen,
        clock: Callable[[], float],
    ) -> None:
        self._state = state
        self._client = client
        self._events = events
        self._memos = memos
        self._preemptions = preemptions
        self._seen = seen
        self._clock = clock
        self.queue: WorkQueue[str] = WorkQueue("preemption", self._carry_out, _WORKERS, self._owner_of)

    def begin(self, preemption: OngoingPreemption) -> None:
        """Write the Events of a new preemption, and enqueue its evictions."""
        request, plan = preemption.request, preemption.plan
        for tenant in plan.lower:
            metrics.VICTIMS.labels("lowered").inc()
            text = (
                f"has request 0 until there is room again: {_for_whom(request, self._namespace_of(tenant))} takes its "
                f"time on {plan.node}; it keeps its memory and runs in idle time"
            )
            self._tell(tenant, "Lowered", "Lower", text)
        if plan.move_to is None:
            self._tell_preemptor(preemption)
        else:
            moved = self._named(request.namespace, plan.evict)
            text = f"keeps {counted(len(plan.gpus), 'GPU')} of {plan.node} for it, and moves {moved}"
            self._tell(request.tenant, "Moving", "Move", text)
        if plan.evict:
            self.queue.add(request.tenant)

    async def run(self) -> None:
        """Carry out preemptions until cancelled."""
        await self.queue.run()

    async def _carry_out(self, tenant: str) -> None:
        """Evict the victims of one preemption, after a dry run for each. Raises `ApiError`; the queue then tries
        again."""
        for dry_run in (True, False):
            for victim, pod in self._victims(tenant):
                preemption = self._preemptions.of(tenant)
                if preemption is None:
                    return
                try:
                    await self._client.evict(pod.name, pod.namespace, uid=pod.uid, dry_run=dry_run)
                except (NotFoundError, ConflictError):
                    continue  # the Pod was deleted or replaced: the watch reports it
                except ApiError as error:
                    if error.status != HTTPStatus.TOO_MANY_REQUESTS:  # a PodDisruptionBudget forbids the eviction
                        raise
                    log.info("eviction refused", pod=f"{pod.namespace}/{pod.name}", error=error.message)
                    self._preemptions.refused(tenant, pod.uid)
                    return
                if not dry_run:
                    self._evicted(preemption, victim, pod)

    def _owner_of(self, tenant: str) -> str:
        """Return the namespace of the first victim, as the owner of the key in the queue. So a slow webhook there
        delays only that namespace's evictions.
        """
        preemption = self._preemptions.of(tenant)
        victims = preemption.plan.evict if preemption is not None else ()
        return self._namespace_of(victims[0]) if victims else ""

    def _victims(self, tenant: str) -> Sequence[tuple[str, AnyPod]]:
        """Return (tenant, Pod) for each Pod to evict that is not ending yet. A Pod with several claims occurs once."""
        preemption = self._preemptions.of(tenant)
        found: dict[str, tuple[str, AnyPod]] = {}
        for victim in preemption.plan.evict if preemption is not None else ():
            for pod in self._seen.pods_of(victim):
                if not (pod.deleting or pod.ended):
                    found.setdefault(pod.uid, (victim, pod))
        return list(found.values())

    def moved(self, move: OngoingMove, node: str) -> None:
        """Write Events on a moved tenant, which now has a place on `node`, and on the tenant for which it moved."""
        mover, waits = move.mover, move.waits
        if waits is None:
            self._tell(mover.tenant, "Moved", "Move", f"has a place on {node} now")
            return
        made_room = f"it made room on {move.node} for {_whom(waits, mover.namespace)}"
        self._tell(mover.tenant, "Moved", "Move", f"has a place on {node} now; {made_room}")
        who = mover.name if mover.namespace == waits.namespace else "a tenant of another namespace"
        self._tell(waits.tenant, "Moved", "Move", f"{who} made room on {move.node} and has another place now")

    def _evicted(self, preemption: OngoingPreemption, victim: str, pod: AnyPod) -> None:
        """Record that the eviction of a victim's Pod was accepted, and write Events."""
        request, node, to = preemption.request, preemption.plan.node, preemption.plan.move_to
        self._seen.evicted(pod.uid)
        metrics.VICTIMS.labels("moved" if to is not None else "evicted").inc()
        if to is not None:
            text = f"restarted on {to.node}: it makes room on {node} for {_whom(request, pod.namespace)}"
        else:
            text = f"preempted on {node} by {_for_whom(request, pod.namespace)}"
        log.info("preempts", tenant=victim, pod=f"{pod.namespace}/{pod.name}", by=request.tenant, node=node)
        memo = self._memos.of(victim)
        kept = self._preemptions.moving.kept_place(TenantId(victim)) if to is not None else None
        memo.eviction = Eviction(pod=pod.uid, since=self._clock(), done=text, preempted=to is None, move_to=kept)
        if to is not None:
            self._tell(victim, "Moving", "Move", text)
        else:
            self._tell(victim, "Preempted", "Preempt", text)
        self._state.on_tenant_changed(victim)

    def _tell_preemptor(self, preemption: OngoingPreemption) -> None:
        """Write the Event on the waiting tenant: the tenants with a lowered share, the evicted tenants, and the
        ending tenants for which it waits."""
        request, plan = preemption.request, preemption.plan
        parts = []
        for verb, tenants in (("lowers", plan.lower), ("evicts", plan.evict), ("waits for", plan.leaving)):
            if tenants:
                parts.append(f"{verb} {self._named(request.namespace, tenants)} of lower priority")
        text = f"keeps {counted(len(plan.gpus), 'GPU')} of {plan.node} for it, and {' and '.join(parts)}"
        self._tell(request.tenant, "Preempting", "Preempt", text)

    def _named(self, namespace: str, tenants: Sequence[str]) -> str:
        """Return tenants as text for readers in a namespace: tenants of that namespace by name, the others as a
        number."""
        own = sorted(self._name_of(tenant) for tenant in tenants if self._namespace_of(tenant) == namespace)
        others = len(tenants) - len(own)
        words = own[:4] if len(own) <= 4 else [*own[:4], f"{len(own) - 4} more of this namespace"]
        if others:
            words.append(f"{counted(others, 'tenant')} of other namespaces")
        return ", ".join(words)

    def _name_of(self, tenant: str) -> str:
        pods = self._seen.pods_of(tenant)
        if pods:
            return pods[0].name
        rows = (row for _, row in self._state.cluster.reservations_of(TenantId(tenant)))
        return next((row.title.partition("/")[2] for row in rows), tenant)

    def _namespace_of(self, tenant: str) -> str:
        return self._state.namespace_of(tenant)

    def _tell(self, tenant: str, reason: str, action: str, text: str) -> None:
        for kind, about in self._subjects(tenant):
            self._events.normal(kind, about, reason, action, text)

    def _subjects(self, tenant: str) -> Iterator[tuple[str, ObjectFacts]]:
        """Yield the objects on which a tenant's Events are written: its SharePod, or the Pods of its claim."""
        sharepod = self._state.asking(tenant)
        if sharepod is not None:
            yield sharepod.kind, sharepod
            return
        claim = self._state.seen_claims.claims.get(tenant)
        for pod in self._state.seen_claims.users(claim) if claim is not None else ():
            yield "Pod", pod


def _whom(request: PlacementRequest, namespace: str) -> str:
    """Return the waiting tenant as text for readers in a namespace: by name only in its own namespace."""
    return request.name if request.namespace == namespace else "a tenant of another namespace"


def _for_whom(request: PlacementRequest, namespace: str) -> str:
    """Return the preempting tenant as text for readers in a namespace: by name only in its own namespace."""
    if request.namespace == namespace:
        return f"{request.name} of higher priority"
    return "a tenant of higher priority of another namespace"
