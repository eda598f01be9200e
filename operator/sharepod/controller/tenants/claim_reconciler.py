"""Reconciler of one claim: takes a snapshot, gets the next step from `claim_steps`, performs it, and writes Events for
the claim's owner.

Guarantees:
- One claim is handled at most once at a time.
- Every step can be repeated: the next reconciliation completes what a crash between any two calls left undone.
- A claim's deletion is confirmed by a GET before its row's release begins, unless the watch has shown the deletion.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import islice

import structlog

from sharepod.api.claims import claims
from sharepod.api.objects import DEVICE_CLASS
from sharepod.api.units import TenantId
from sharepod.controller import metrics
from sharepod.controller.apiserver.client import Client
from sharepod.controller.apiserver.events import Events
from sharepod.controller.apiserver.workqueue import WorkQueue
from sharepod.controller.decisions import claim_steps, scheduled_claim_steps
from sharepod.controller.decisions.claim_status import LOST, Note, notes, unlisted
from sharepod.controller.decisions.claim_steps import ClaimSnapshot, ClaimStep, holds
from sharepod.controller.decisions.scheduled_claim_steps import Adopt, HoldClaim, LetClaimGo, ScheduledClaimStep
from sharepod.controller.decisions.snapshot import ReservationSnapshot
from sharepod.controller.decisions.steps import BeginRelease, Forget, Place, RemovalReason, RemoveRow, Unreserve, Wait
from sharepod.controller.placing.claim_requests import group_of, next_turn, waiting_pod
from sharepod.controller.placing.ledger_writer import LedgerWriter
from sharepod.controller.placing.loop import PlacementLoop
from sharepod.controller.settings import OperatorSettings
from sharepod.controller.state.cluster_state import ClusterState
from sharepod.controller.state.facts.claim_facts import MAX_CLAIMS, ClaimFacts, ClaimPodFacts
from sharepod.controller.state.facts.pod_facts import DEFAULT_SCHEDULER
from sharepod.controller.state.memos import TenantMemo, TenantMemos
from sharepod.placement.state.types import Refusal

from .claim_writer import ClaimWriter
from .scheduled_shares import ScheduledShares
from .snapshots import LOOK_AGAIN_S, Snapshots

log = structlog.get_logger(__name__)

MOST_TOLD = 256
"""Number of Pods that get the Events of one claim, waiting Pods first. Kubernetes reserves a claim for at most 256 Pods
at a time."""


class ClaimReconciler:
    """Reconciler of claims by uid.

    `clock`: monotonic seconds. `wall`: seconds since the epoch. `listed`: returns True once all claims were listed.
    `advertises`: returns True if a node advertises enough of the resource line's resources for the shares in its
    ledger.
    """

    loop: PlacementLoop
    """Set once, before `run`."""
    on_share_of_line: Callable[[str], None]
    """Set once, before `run`. Called with a node on which the share of a resource line may have changed."""

    def __init__(
        self,
        state: ClusterState,
        client: Client,
        ledger: LedgerWriter,
        events: Events,
        memos: TenantMemos,
        settings: OperatorSettings,
        clock: Callable[[], float],
        wall: Callable[[], float] = time.time,
        *,
        listed: Callable[[], bool],
        advertises: Callable[[str], bool],
    ) -> None:
        self._state = state
        self._ledger = ledger
        self._events = events
        self._memos = memos
        self._settings = settings
        self._clock = clock
        self._listed = listed
        """Before it returns True, a claim that is missing in the cluster state may exist."""
        self._writer = ClaimWriter(state.seen_claims, client, wall)
        self._scheduled = ScheduledShares(state, ledger, self._writer)
        self._snapshots = Snapshots(state, settings, clock, wall, advertises=advertises)
        self.queue: WorkQueue[str] = WorkQueue("claim", self.reconcile, settings.writers, state.namespace_of)

    async def run(self) -> None:
        """Reconcile claims from the queue until cancelled."""
        await self.queue.run()

    async def reconcile(self, uid: str) -> None:
        """Perform the next step of one claim. Raises `ApiError` and `NotLeadingError`."""
        memo = self._memos.of(uid)
        # 1. Take a snapshot. A claim that is missing counts as deleted once the watch or a GET has shown the
        # deletion.
        snapshot = self._take(uid, memo)
        if snapshot.claim is None and snapshot.reserved:
            if not await self._is_deleted(uid, snapshot.reserved, memo):
                return
            snapshot = self._take(uid, memo)
        # 2. Decide the next step, and 3. perform it.
        scheduled = snapshot.claim is not None and snapshot.claim.scheduled
        step = scheduled_claim_steps.next_step(snapshot) if scheduled else claim_steps.next_step(snapshot)
        await self._act(snapshot, uid, memo, step)
        if isinstance(step, Wait) and snapshot.claim is not None:
            turn_s = next_turn(self._state, snapshot.claim)
            if turn_s is not None:
                self.queue.add_after(uid, turn_s)
        # 4. Show the share in the claim's status, and report obstacles by Events.
        if isinstance(step, Wait | Place | Adopt):
            await self._show(snapshot, uid, memo)

    # Known state

    def _take(self, uid: str, memo: TenantMemo) -> ClaimSnapshot:
        """Return the present facts of a claim. Record in its memo when each lasting state began, such as "refused by
        kube-scheduler".
        """
        seen, now, mine = self._state.seen_claims, self._clock(), memo.claim
        claim = seen.claims.get(uid)
        reserved = self._snapshots.reserved(uid, memo)
        pods = seen.users(claim) if claim is not None else ()
        pod = waiting_pod(self._state, claim) if claim is not None else None
        if pod is not None and pods[0] is not pod:  # this Pod decides the claim's request, so it comes first
            pods = (pod, *(other for other in pods if other is not pod))
        if claim is not None and claim.allocation is not None:
            mine.allocated = mine.allocated or any(holds(item, claim.allocation) for item in reserved)
        elif not reserved:
            mine.allocated = mine.give_up = mine.taken_back = False
            mine.withdrawn = None
        if claim is None or claim.allocation is None or pod is None:
            mine.waits = mine.refused_since = None
        elif mine.waits is None or mine.waits[0] != pod.uid:
            mine.waits, mine.refused_since = (pod.uid, now, pod.unschedulable), None
        elif not pod.unschedulable:
            mine.refused_since = None
        elif mine.refused_since is None and pod.unschedulable != mine.waits[2]:
            mine.refused_since = now
        due, overdue = float("inf"), ""
        if pod is not None and mine.refused_since is not None:
            due = mine.refused_since + self._settings.bind_timeout
            overdue = f"was refused by kube-scheduler: {pod.unschedulable}"
        elif pod is not None and mine.waits is not None:
            said_before = mine.waits[2]
            # kube-scheduler's message is the same if it cannot allocate a claim of another driver that this Pod uses.
            elsewhere = _for_something_else(said_before) or (bool(said_before) and seen.needs_others(pod))
            due = mine.waits[1] + self._patience_s(pod, elsewhere=elsewhere)
            overdue = f"was given a pod that the scheduler {pod.scheduler} has not bound"
            if elsewhere:
                overdue = f"was refused by kube-scheduler: {said_before}"
        group = group_of(self._state, claim, pod) if claim is not None and pod is not None else None
        return ClaimSnapshot(
            claim=claim,
            pods=pods,
            reserved=reserved,
            leads=bool(group) and group is not None and group[0].uid == uid,
            unused=seen.unused(uid),
            allocated=mine.allocated,
            give_up=mine.give_up,
            due=due,
            overdue=overdue,
            unseen=mine.refused_since is None,
            unreadable_row=self._state.ledgers.unreadable_row(uid),
            namespace_ends=claim is not None and claim.namespace in self._state.ending_namespaces,
            advertised=claim is None
            or claim.allocation is not None
            or not claim.by_line
            or self._snapshots.advertised(reserved),
            now=now,
        )

    def _patience_s(self, pod: ClaimPodFacts, *, elsewhere: bool) -> float:
        """Return the seconds for which a Pod that is not bound may keep its place.

        `elsewhere`: True if kube-scheduler refused the Pod before it got the place, for a cause that the place does not
        remove.
        """
        foreign = pod.scheduler != DEFAULT_SCHEDULER
        return self._settings.bind_timeout if foreign or elsewhere else self._settings.start_timeout

    async def _is_deleted(self, uid: str, reserved: tuple[ReservationSnapshot, ...], memo: TenantMemo) -> bool:
        """Return True if a claim that has a row is deleted, as its watch or a GET has shown."""
        memo.tenant_deleted = memo.tenant_deleted or self._state.seen_claims.saw_deleted(uid)
        if not memo.tenant_deleted:
            if not self._listed():
                self.queue.add_after(uid, LOOK_AGAIN_S)
                return False
            row = reserved[0].wanted
            name = row.claim.name if row.claim is not None else ""
            memo.tenant_deleted = await self._writer.deleted(name, row.namespace, uid)
        return memo.tenant_deleted

    # Actions

    async def _act(
        self, snapshot: ClaimSnapshot, uid: str, memo: TenantMemo, step: ClaimStep | ScheduledClaimStep
    ) -> None:
        log.debug("step", claim=uid, step=step)
        if not isinstance(step, Place):
            self._resize_or_leave(snapshot, uid, memo)
        match step:
            case Forget():
                self._memos.forget(uid)
                self._state.seen_claims.forgotten(uid)
            case Wait(until=float(until)):
                self.queue.add_after(uid, until - snapshot.now)
            case Place():
                self.loop.want_place(uid)
            case claim_steps.Allocate(claim=claim, node=node, row=row, consumer=consumer):
                memo.claim.allocated = await self._writer.allocate(claim, node, row, consumer)
                if memo.claim.allocated:
                    self.queue.add(uid)
                else:
                    self.queue.add_after(uid, LOOK_AGAIN_S / 20)
            case claim_steps.Deallocate(claim=claim, node=avoided, message=message, unseen=unseen):
                if await self._may_deallocate(claim, memo, snapshot.now) and await self._writer.deallocate(claim):
                    if unseen and memo.claim.waits is not None:
                        held_s = snapshot.due - memo.claim.waits[1]
                        memo.not_before = self._clock() + memo.next_pause_s(min(self._settings.bind_timeout, held_s))
                    self._taken_back(snapshot, claim, memo, avoided, message)
                    self.queue.add(uid)
            case Adopt() | HoldClaim() | LetClaimGo():
                if await self._scheduled.act(step, memo, snapshot.now):
                    self.queue.add(uid)
                else:
                    self.queue.add_after(uid, LOOK_AGAIN_S)
            case Unreserve(node=node):
                self._state.ledgers.unreserve(node, uid)
                self.queue.add(uid)
            case BeginRelease(node=node):
                self._state.cluster.set_releasing(node, TenantId(uid))
                self._ledger.add(node)
            case RemoveRow():
                self._remove(snapshot, uid, memo, step)

    async def _may_deallocate(self, claim: ClaimFacts, memo: TenantMemo, now: float) -> bool:
        """Remove the Pods of a claim from `status.reservedFor`. Return True once `LOOK_AGAIN_S` has passed since then:
        kube-scheduler has seen the removal by then, and can no longer bind the Pod.
        """
        mine = memo.claim
        if claim.consumers:
            mine.withdrawn = now if await self._writer.withdraw(claim) else None
        left = 0.0 if mine.withdrawn is None else mine.withdrawn + LOOK_AGAIN_S - now
        if claim.consumers or left > 0:
            self.queue.add_after(claim.uid, LOOK_AGAIN_S if claim.consumers else left)
            return False
        return True

    def _taken_back(
        self, snapshot: ClaimSnapshot, claim: ClaimFacts, memo: TenantMemo, node: str | None, message: str
    ) -> None:
        """Record and log that an allocation was removed. If `node` is given, make all claims of the Pod avoid it for
        some time.
        """
        log.info("took an allocation back", claim=f"{claim.namespace}/{claim.name}", node=node, why=message)
        metrics.PODS_TAKEN_BACK.inc()
        memo.claim.taken_back = True
        if node is not None and not memo.claim.give_up:
            text = f"took the allocation back; the claim will be placed again: {node} {message}"
            self._tell(snapshot, claim, Note(True, "AllocationTakenBack", "Bind", text))
            memo.claim.waited = True
            self._avoid(claim, memo, node, message)

    def _avoid(self, claim: ClaimFacts, memo: TenantMemo, node: str, message: str) -> None:
        """Make all claims of a Pod avoid a node that it does not fit. The other claims give up their places there."""
        until = self._clock() + memo.next_pause_s(self._settings.bind_timeout)
        pod = waiting_pod(self._state, claim)
        siblings = self._state.seen_claims.of_pod(pod) if pod is not None else iter((claim,))
        for sibling in siblings:
            other = self._memos.of(sibling.uid)
            other.avoid[node] = (message, until)
            if sibling.uid != claim.uid:
                other.claim.give_up = True
                self.queue.add(sibling.uid)

    def _remove(self, snapshot: ClaimSnapshot, uid: str, memo: TenantMemo, step: RemoveRow) -> None:
        if self._ledger.leaving(step.node, uid):
            return
        if snapshot.claim is not None and self._was_refused(snapshot, memo, step):
            self._avoid(snapshot.claim, memo, step.node, _refused(snapshot))
        title = next((item.wanted.title for item in snapshot.reserved if item.node == step.node), uid)
        self._ledger.release(step.node, uid, f"claim {title}", step.text, step.reason.released_by)

    @staticmethod
    def _was_refused(snapshot: ClaimSnapshot, memo: TenantMemo, step: RemoveRow) -> bool:
        """Return True if a row is removed because kube-scheduler has deallocated the claim itself, as its Pod does not
        fit the node.
        """
        mine, claim = memo.claim, snapshot.claim
        if claim is None or claim.allocation is not None or not snapshot.waited_for:
            return False
        ours = mine.taken_back or mine.give_up or step.node in memo.avoid
        return step.reason is RemovalReason.NEVER_BOUND and mine.allocated and not ours

    def _resize_or_leave(self, snapshot: ClaimSnapshot, uid: str, memo: TenantMemo) -> None:
        """Enqueue the claim in the placement loop if its annotation requests another share than it has. Otherwise
        remove it from the loop's queues.
        """
        claim = snapshot.claim
        row = next((item for item in snapshot.reserved if item.written is not None and not item.releasing), None)
        asked = claim.request if claim is not None and claim.allocation is not None else None
        if asked is not None and row is not None and row.wanted.request_milli != asked.gpu.request_milli:
            self.loop.want_resize(uid, asked.gpu.request_milli)
        else:
            memo.resize_refusal = None
            self.loop.leave(uid)

    # Notifications

    async def _show(self, snapshot: ClaimSnapshot, uid: str, memo: TenantMemo) -> None:
        """Write the share into the claim's status, and Events about the claim and the Pods that wait for it."""
        claim = snapshot.claim
        if claim is None:
            return
        row = next(
            (item for item in snapshot.reserved if claim.allocation is not None and holds(item, claim.allocation)), None
        )
        if row is not None and row.written is not None and not claim.deleting:
            await self._writer.show(claim, row.node, row.written, claim.error or memo.resize_refusal)
            if claim.by_line:
                for pod in snapshot.pods:
                    await self._writer.name_gpus(pod, row.written)
                self.on_share_of_line(row.node)
        if (idle := unlisted(snapshot)) is not None:
            self._tell(snapshot, claim, idle)
        refusal, blocked = memo.refusal, memo.claim.not_entered if claim.scheduled else None
        if snapshot.waited_for and not snapshot.leads and not snapshot.reserved and not claim.scheduled:
            refusal, blocked = self._of_leader(claim)
        for note in notes(snapshot, refusal, blocked, waited=memo.claim.waited):
            memo.claim.waited = note.warning
            self._tell(snapshot, claim, note)

    def _of_leader(self, claim: ClaimFacts) -> tuple[Refusal | None, str | None]:
        """Return (refusal, obstacle): why a claim has no place. For claims whose places are requested by another claim
        of the Pod, the leading one.

        The refusal is the leading claim's, the obstacle a reason why no place is requested. Both are None while
        placement has not answered yet.
        """
        pod = waiting_pod(self._state, claim)
        if pod is None:
            return None, None
        if len(pod.entries) > MAX_CLAIMS:
            return None, f"its pod has {len(pod.entries)} claims; write at most {MAX_CLAIMS}"
        if not self._state.seen_claims.complete(pod):
            return None, None
        if (container := self._state.seen_claims.crowded(pod)) is not None:
            return None, (
                f"container {container} uses two claims of class {DEVICE_CLASS}; write one claim with count, or use "
                "each claim in a separate container"
            )
        for other in self._state.seen_claims.of_pod(pod):
            if other.uid == claim.uid:
                continue
            if other.error is not None:
                return None, f"claim {other.name} of the same pod is invalid: {other.error}"
            refusal = self._memos.of(other.uid).refusal
            if refusal is not None:
                return refusal, None
        return None, None

    def _tell(self, snapshot: ClaimSnapshot, claim: ClaimFacts, note: Note) -> None:
        emit = self._events.warning if note.warning else self._events.normal
        emit(claims.KIND, claim, note.reason, note.action, note.message)
        for pod in islice(snapshot.pods, MOST_TOLD):
            if pod.waits or (note.reason == LOST and pod.runs):
                text = note.message if claim.by_line else f"claim {claim.name}: {note.message}"
                emit("Pod", pod, note.reason, note.action, text)


def _for_something_else(refusal: str) -> bool:
    """Return True if kube-scheduler has refused a Pod for another cause than its claims. An allocation does not remove
    that cause, so kube-scheduler will not retry the Pod because of it."""
    return bool(refusal) and not claim_steps.names_claims(refusal)


def _refused(snapshot: ClaimSnapshot) -> str:
    """Return why kube-scheduler has deallocated a claim, as the end of a sentence that begins "the node"."""
    reason = next((pod.unschedulable for pod in snapshot.pods if pod.waits), "")
    why = f": {reason}" if reason and "cannot allocate all claims" not in reason else ", where the pod does not fit"
    return f"was refused by kube-scheduler{why}"
