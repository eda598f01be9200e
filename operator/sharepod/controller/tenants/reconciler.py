"""Reconciler of one SharePod or plain Pod: takes a snapshot, gets the next step from `lifecycle`, performs it, writes
the status.

Guarantees:
- One tenant is handled at most once at a time.
- Every step can be repeated: the next reconciliation completes what a crash between any two calls left undone.
- Before the operator acts on the absence of an object, a GET confirms it, with two exceptions. A SharePod's deletion is
  confirmed once, and not at all if the watch has shown it. A row whose Pod was seen to end or to be deleted needs no
  GET, because the node's agent confirms the end before the share is released.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import structlog

from sharepod.api.sharepod import KIND
from sharepod.api.units import TenantId
from sharepod.controller import metrics
from sharepod.controller.apiserver.client import SHAREPODS, Client
from sharepod.controller.apiserver.events import Events
from sharepod.controller.apiserver.workqueue import WorkQueue
from sharepod.controller.decisions import claim_steps, lifecycle, steps
from sharepod.controller.decisions.advertised import LineOnNode
from sharepod.controller.decisions.ends import EndCause
from sharepod.controller.decisions.share_claim_steps import AllocateClaim, FreeClaim, MakeClaim, ShareClaimStep
from sharepod.controller.decisions.snapshot import TenantSnapshot
from sharepod.controller.decisions.steps import (
    Ending,
    EndRun,
    Finish,
    RemoveRow,
    TakeBackCause,
    TakeBackPod,
)
from sharepod.controller.placing.ledger_writer import LedgerWriter
from sharepod.controller.placing.loop import PlacementLoop
from sharepod.controller.settings import OperatorSettings
from sharepod.controller.state.cluster_state import ClusterState
from sharepod.controller.state.facts.sharepod_facts import SharePodFacts
from sharepod.controller.state.memos import BlockedReason, TenantMemo, TenantMemos
from sharepod.kube import ConflictError, NotFoundError

from . import quota_gate
from .confirmations import Confirmations
from .evictor import Evictor
from .line_pods import LinePods, is_line
from .pods import PodControl
from .quota_gate import QuotaGate
from .share_claim_writer import ShareClaimWriter
from .snapshots import LOOK_AGAIN_S, Snapshots, asks_for_another_share, seen_by_agent
from .status_writer import StatusWriter

log = structlog.get_logger(__name__)


_FOLLOWING: dict[type, tuple[type, ...]] = {
    steps.CreatePod: (steps.Place, MakeClaim),
    MakeClaim: (steps.Place,),
    AllocateClaim: (steps.OpenGate,),
    steps.OpenGate: (steps.Wait,),
}
"""Steps that may follow a step at once, in the same reconciliation: in between, no other party has to act and no status
has to be written."""
_FOLLOWED = tuple(_FOLLOWING)


class TenantReconciler:
    """Reconciler of tenants. A key is the uid of a SharePod or of a plain Pod.

    `clock`: monotonic seconds. `wall`: seconds since 1970. `advertises`: returns True if a node advertises enough of
    the resource line's resources for the shares in its ledger.
    """

    loop: PlacementLoop
    """Set once, before `run`."""
    on_lowered: Callable[[str], None] = staticmethod(lambda _node: None)
    """Called with a node on which a Pod's resource line exceeds its row, because the share was lowered."""

    def __init__(
        self,
        state: ClusterState,
        client: Client,
        ledger: LedgerWriter,
        pod_control: PodControl,
        events: Events,
        memos: TenantMemos,
        settings: OperatorSettings,
        clock: Callable[[], float],
        wall: Callable[[], float] = time.time,
        *,
        advertises: Callable[[str], bool],
    ) -> None:
        self._state = state
        self._client = client
        self._ledger = ledger
        self._pod_control = pod_control
        self.share_claims = ShareClaimWriter(state.seen_claims, client, pod_control, wall)
        self._confirmations = Confirmations(state, client, pod_control)
        self._events = events
        self._memos = memos
        self._settings = settings
        self._clock = clock
        self._snapshots = Snapshots(state, settings, clock, wall, advertises=advertises)
        self._evictor = Evictor(client, events, settings, clock)
        self.line_pods = LinePods(pod_control, events, clock)
        self._quota_gate = QuotaGate(client, clock)
        self.queue: WorkQueue[str] = WorkQueue("tenant", self.reconcile, settings.writers, state.namespace_of)
        self._status = StatusWriter(state, client, events, settings, clock, requeue_after=self.queue.add_after)

    async def run(self) -> None:
        """Reconcile tenants from the queue until cancelled."""
        await self.queue.run()

    def clear(self) -> None:
        """Drop pending work: leadership was lost."""
        self.queue.clear()
        self._pod_control.retries.clear()

    async def reconcile(self, tenant: str) -> None:
        """Perform the next step of one tenant. Raises `ApiError` and `NotLeadingError`."""
        memo = self._memos.of(tenant)
        # 1. Take a snapshot. A missing SharePod counts as deleted once a watch, a write or a GET has shown the
        # deletion.
        snapshot = self._snapshots.take(tenant, memo)
        if snapshot.sharepod is None and (snapshot.reserved or snapshot.pod is not None):
            memo.tenant_deleted = memo.tenant_deleted or self._state.saw_deleted(tenant)
            if not memo.tenant_deleted:
                memo.tenant_deleted = await self._is_deleted(snapshot, tenant)
                if not memo.tenant_deleted:
                    return
                snapshot = self._snapshots.take(tenant, memo)  # the state may have changed during the read
        # 2. Decide the next step, and 3. perform it. Some steps follow at once, such as the request for a place after
        # the creation of a Pod. Each further snapshot contains the watch events that arrived during the step before, so
        # these need no further reconciliation.
        step = lifecycle.decide(snapshot)
        finish = await self._act(snapshot, tenant, memo, step)
        while isinstance(step, _FOLLOWED) and finish is None and not memo.is_blocked(snapshot.now):
            snapshot = self._snapshots.take(tenant, memo)
            following = lifecycle.decide(snapshot)
            if type(following) not in _FOLLOWING.get(type(step), ()):
                self.queue.add(tenant)
                break
            self.queue.caught_up(tenant)
            step, finish = following, await self._act(snapshot, tenant, memo, following)
        if isinstance(step, steps.Forget):
            return
        self._tell_lowered(snapshot)
        # 4. Write the status as it is after the step. 5. Evict the Pod if the policy requires it.
        if not isinstance(step, steps.Wait | steps.Place):  # Wait and Place change nothing that a snapshot shows
            snapshot = self._snapshots.take(tenant, memo)
        sharepod = snapshot.sharepod
        if sharepod is not None and sharepod.plain:
            self.line_pods.announce(snapshot, memo)
            await self._evict(snapshot, sharepod, memo)
        elif sharepod is not None and not sharepod.deleting and not self._undecided(snapshot, memo, step):
            written = await self._status.sync(snapshot, sharepod, memo, finish)
            if finish is None:
                await self._evict(snapshot, sharepod, memo)
            elif written and isinstance(finish, EndRun):
                self._run_ended(memo, finish)

    def back_off_from_node(self, node: str, tenant: str, why: str) -> None:
        """Make a tenant avoid a node, because the API server refused to write the tenant's row into the ledger
        there."""
        memo, now = self._memos.of(tenant), self._clock()
        pause = memo.next_pause_s(self._settings.bind_timeout)
        memo.not_before = now + pause
        memo.avoid[node] = (f"has a ledger that could not be written: {why}", now + 2 * pause)

    def _tell_lowered(self, snapshot: TenantSnapshot) -> None:
        """Call `on_lowered` with each node where the Pod's resource line exceeds the tenant's row. Such a node must
        advertise more than its GPUs have.
        """
        if snapshot.pod is not None and snapshot.pod.carried:
            for reserved in snapshot.reserved:
                if LineOnNode(snapshot.pod.carried, reserved.written).beyond and reserved.written is not None:
                    self.on_lowered(reserved.node)

    def _run_ended(self, memo: TenantMemo, end: EndRun) -> None:
        """Count the end of a run. If the kubelet refused its Pod, make the next run avoid that node."""
        metrics.RUNS_ENDED.labels(end.cause).inc()
        if end.cause is EndCause.REJECTED and end.node is not None:
            until = self._clock() + end.pause_s + self._settings.bind_timeout
            memo.avoid[end.node] = (f"has a kubelet that refused its pod: {end.message}", until)

    @staticmethod
    def _undecided(snapshot: TenantSnapshot, memo: TenantMemo, step: steps.Step) -> bool:
        """Return True if the status has nothing to show yet: a row is unreadable, placement has not answered, or the
        decided row is not in the ledger yet.
        """
        if snapshot.unreadable_row:
            return True
        if isinstance(step, steps.CreatePod | MakeClaim):
            return snapshot.pod is not None and not memo.is_blocked(snapshot.now)
        if isinstance(step, steps.Place):
            return memo.refusal is None and (snapshot.sharepod is None or snapshot.sharepod.status.node is None)
        unwritten = all(reserved.written is None for reserved in snapshot.reserved)
        return (snapshot.pod is None or snapshot.pod.waits_for_share) and bool(snapshot.reserved) and unwritten

    async def _is_deleted(self, snapshot: TenantSnapshot, tenant: str) -> bool:
        """Read the SharePod or plain Pod live. Return True if it is deleted; else record it and return False."""
        name, namespace = self._name(snapshot)
        if is_line(snapshot, tenant):
            return await self._pod_control.absent(name, namespace, tenant) and self._state.asking(tenant) is None
        try:
            raw = await self._client.get(SHAREPODS, name, namespace)
        except NotFoundError:
            return True
        if str(raw["metadata"]["uid"]) != tenant:
            return True
        self._state.put_sharepod(raw, sure=True)
        return self._state.sharepods.get(tenant) is None  # if missing, the watch has shown a deletion after this answer

    @staticmethod
    def _name(snapshot: TenantSnapshot) -> tuple[str, str]:
        """Return (name, namespace) of the tenant's SharePod; its Pod has the same."""
        known = snapshot.sharepod or snapshot.pod
        if known is not None:
            return known.name, known.namespace
        return snapshot.reserved[0].wanted.pod_name, snapshot.reserved[0].wanted.namespace

    async def _act(self, snapshot: TenantSnapshot, tenant: str, memo: TenantMemo, step: steps.Step) -> Ending | None:
        """Perform the step. Return the end of the SharePod or of its run, if the step has confirmed one; else None."""
        log.debug("step", tenant=tenant, step=step)
        sharepod = snapshot.sharepod
        if not isinstance(step, steps.Place):
            await self._resize_or_leave(snapshot, tenant, memo)
        match step:
            case steps.Forget():
                self._state.lost_pods.pop(tenant, None)
                self._memos.forget(tenant)
                self._pod_control.retries.forget(tenant)
            case steps.Wait(until=float(until)):
                self.queue.add_after(tenant, until - snapshot.now)
            case steps.CreatePod():
                assert sharepod is not None
                return await self._create_pod(sharepod, memo, snapshot.now)
            case steps.Place():
                if self.line_pods.may_be_placed(sharepod, memo):
                    self.loop.want_place(tenant)
            case steps.OpenGate() | MakeClaim() | AllocateClaim() | FreeClaim():
                assert sharepod is not None
                if not await self._give(sharepod, step, memo, snapshot.now):
                    self.queue.add_after(tenant, LOOK_AGAIN_S)
            case steps.DeleteSharePod():
                assert sharepod is not None
                await self._delete_sharepod(sharepod)
            case steps.DeletePod(pod=pod):
                again = await self._pod_control.delete(pod, memo, snapshot.now)
                if again is not None:
                    self.queue.add_after(tenant, again)
            case TakeBackPod():
                await self._take_back(snapshot, memo, step)
                self.queue.add(tenant)
            case steps.LetPodGo(pod=pod):
                await self._pod_control.let_go(pod)
                self.queue.add(tenant)
            case steps.Unreserve(node=node):
                self._state.ledgers.unreserve(node, tenant)
                self.queue.add(tenant)
            case steps.BeginRelease(node=node):
                await self._begin_release(snapshot, tenant, node)
            case RemoveRow():
                await self._remove_if_confirmed(snapshot, tenant, memo, step)
            case Finish() | EndRun():
                if await self._confirmations.ended(snapshot, tenant, *self._name(snapshot), step):
                    return await self.line_pods.ended(snapshot, memo, step)
                self.queue.add_after(tenant, LOOK_AGAIN_S)
        return None

    async def _create_pod(self, sharepod: SharePodFacts, memo: TenantMemo, now: float) -> Finish | None:
        was_refused = memo.blocked is not None
        finish = await self._pod_control.create(sharepod, memo, now)
        if memo.blocked is not None:
            self.queue.add_after(sharepod.uid, memo.blocked.until - now)
        elif was_refused:
            self._try_others(sharepod)
        return finish

    async def _give(
        self, sharepod: SharePodFacts, step: steps.OpenGate | ShareClaimStep, memo: TenantMemo, now: float
    ) -> bool:
        """Perform a step by which a Pod gets its share. Return True if it is done."""
        if isinstance(step, steps.OpenGate):
            return await self._pod_control.open_gate(sharepod, step.pod, step.node, step.row, memo, now)
        return await self.share_claims.act(sharepod, step, memo, now)

    def _try_others(self, sharepod: SharePodFacts) -> None:
        """Retry other refused Pods of the namespace at once, because this SharePod's Pod was accepted."""

        def waits(tenant: str) -> bool:
            blocked = self._memos.of(tenant).blocked if self._state.sharepods.get(tenant) is not None else None
            return blocked is not None and blocked.reason is BlockedReason.FORBIDDEN and blocked.pod is None

        for tenant in self._pod_control.retries.taken(sharepod.namespace, sharepod.uid, waits):
            blocked = self._memos.of(tenant).blocked
            assert blocked is not None
            blocked.until = self._clock()
            self.queue.add(tenant)

    async def _begin_release(self, snapshot: TenantSnapshot, tenant: str, node: str) -> None:
        if (
            _saw_end(snapshot)
            or _has_successor(snapshot, node)
            or await self._pod_control.absent(*self._name(snapshot), tenant)
        ):
            self._state.cluster.set_releasing(node, TenantId(tenant))
            self._ledger.add(node)
        else:
            self.queue.add_after(tenant, LOOK_AGAIN_S)

    async def _remove_if_confirmed(
        self, snapshot: TenantSnapshot, tenant: str, memo: TenantMemo, step: RemoveRow
    ) -> None:
        sharepod = snapshot.sharepod
        counts = sharepod is not None and not (sharepod.deleting or sharepod.plain)
        if sharepod is not None and counts and not await self._status.totals_are_written(snapshot, sharepod, memo):
            self.queue.add_after(tenant, LOOK_AGAIN_S)
            return
        if self._ledger.leaving(step.node, tenant):
            return
        if await self._confirmations.may_remove(snapshot, tenant, *self._name(snapshot), step):
            name, namespace = self._name(snapshot)
            self._ledger.release(step.node, tenant, f"{namespace}/{name}", step.text, step.reason.released_by)
        else:
            self.queue.add_after(tenant, LOOK_AGAIN_S)

    async def _delete_sharepod(self, sharepod: SharePodFacts) -> None:
        """Delete a SharePod whose ttlSecondsAfterFinished has passed, unless it has changed since it was read."""
        version = str(sharepod.version)
        try:
            await self._client.delete(
                SHAREPODS, sharepod.name, sharepod.namespace, uid=sharepod.uid, resource_version=version
            )
        except (ConflictError, NotFoundError):
            self.queue.add_after(sharepod.uid, LOOK_AGAIN_S)
        else:
            log.info("deleted a SharePod that had ended", sharepod=f"{sharepod.namespace}/{sharepod.name}")

    async def _resize_or_leave(self, snapshot: TenantSnapshot, tenant: str, memo: TenantMemo) -> None:
        """Enqueue the tenant in the placement loop if it requests another share than it has, and no quota prevents
        that. Otherwise remove it from the loop's queues.
        """
        sharepod = snapshot.sharepod
        if sharepod is not None and asks_for_another_share(self._state, snapshot, memo):
            uncounted = await self._quota_gate.refusal(snapshot)
            if uncounted is not None:
                self.loop.leave(tenant)
                memo.resize_refusal, memo.resize_asked = uncounted, None
                self.queue.add_after(tenant, quota_gate.LOOK_AGAIN_S)
                return
            memo.resize_counted = sharepod.gpu
            self.loop.want_resize(tenant, sharepod.generation)
        else:
            memo.resize_refusal = None
            self.loop.leave(tenant)

    async def _take_back(self, snapshot: TenantSnapshot, memo: TenantMemo, step: TakeBackPod) -> None:
        pod = step.pod
        if not await self._pod_control.take_back(pod):
            return
        refused = step.cause is TakeBackCause.PLACE and claim_steps.names_claims(step.message)
        # If the Pod uses another claim too, kube-scheduler's refusal may be about that claim.
        if pod.claim is not None and refused and not pod.other_claims:
            self.share_claims.on_denied(f"kube-scheduler did not take an allocated claim: {step.message}")
        now, settings = self._clock(), self._settings
        match step.cause:
            case TakeBackCause.SCHEDULER | TakeBackCause.CLAIM:
                memo.not_before = now + memo.next_pause_s(settings.bind_timeout)
            case TakeBackCause.PLACE if pod.pin is not None:
                until = now + memo.next_pause_s(settings.bind_timeout)
                memo.avoid[pod.pin] = (f"was refused by kube-scheduler: {step.message}", until)
        name = f"{pod.namespace}/{pod.name}"
        log.info("took the pod back", tenant=pod.tenant, pod=name, node=pod.pin, why=step.message)
        if snapshot.sharepod is not None and snapshot.sharepod.plain:
            self.line_pods.taken_back(snapshot.sharepod, step, memo)
        elif snapshot.sharepod is not None:
            where = f" from {pod.pin}" if pod.pin is not None else ""
            text = f"took the pod back{where}; the SharePod will be placed again: {step.message}"
            self._events.warning(KIND, snapshot.sharepod, "PodTakenBack", "Bind", text)

    async def _evict(self, snapshot: TenantSnapshot, sharepod: SharePodFacts, memo: TenantMemo) -> None:
        """Evict the Pod if its share is not enforced and the policy requires it."""
        known = memo.eviction.done if memo.eviction is not None else None
        again = await self._evictor.check(sharepod, snapshot.pod, seen_by_agent(self._state, snapshot), memo)
        if again is not None:
            self.queue.add_after(sharepod.uid, again)
        elif memo.eviction is not None and memo.eviction.done not in (None, known):
            self.queue.add(sharepod.uid)  # so that the status shows the eviction


def _has_successor(snapshot: TenantSnapshot, node: str) -> bool:
    """Return True if the tenant's present Pod is another one than the row on that node names. As both have the same
    name, the row's Pod is deleted.
    """
    pod, rows = snapshot.pod, (item.written for item in snapshot.reserved if item.node == node)
    return pod is not None and any(row is not None and row.pod_uid not in (None, pod.uid) for row in rows)


def _saw_end(snapshot: TenantSnapshot) -> bool:
    """Return True if the tenant's Pod was seen to end or to be deleted."""
    if snapshot.pod is not None:
        return snapshot.pod.ended
    return snapshot.lost is not None and snapshot.lost.deleting
