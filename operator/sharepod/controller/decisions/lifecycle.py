"""The next step for one SharePod or plain Pod, from a snapshot of its objects. Pure.

The Pod is created first, behind a scheduling gate. So the API server checks it (quota, Pod Security, priority,
policies) before a share is reserved. Then the share is reserved for that Pod, and the gate is opened.

The end of a run leads to the end of the SharePod or to another run (`ends.sequel`). Between two runs:
1. The former Pod, recorded in `status.lastEnd`, is deleted.
2. Its reservation is released.
3. After a pause the next Pod is created.

Guarantees, in any order of events:
- L1 one run at a time: a gate is opened only where the ledger, as stored in the API server, has a Reserved row for that
  very Pod. A Pod is created only while neither the ledger nor `status.podUID` records a Pod. So no work of
  restartPolicy Never runs twice.
- L2 an end is recorded first: a terminal phase, or the end of a run, is written before the release of the reservation
  begins.
- L3 an unreadable row decides nothing: no step is taken while a row of the tenant is unreadable. An unreadable status
  of a SharePod allows no conclusion from the absence of its Pod.
- L4 no share of a live process is released. A row is removed only in one of three cases. Its agent has confirmed that
  no process is left; an override applies (Node deleted, out-of-service taint, force-release); or no Pod of the tenant
  was ever bound to that node.
- L5 a Pod is withdrawn only while it is not bound. The withdrawn Pod disappears only after its row and `status.podUID`
    are removed. So if the operator dies before, the next operator does not mistake the absence for the end of a run.
- L6 no idle share: a share is requested only while a Pod of the tenant waits behind its gate, and not in a namespace in
  deletion. A share that the API server refuses for the Pod is released.
- L7 the quota counts the share: a waiting Pod whose line is smaller than its SharePod's present request is withdrawn.
  The next Pod has the larger line.
- L8 no eviction for a resource line: a gate opens only once the node advertises enough for the lines of all shares
  there, including lowered shares. So kube-scheduler can bind the Pod without preemption.

If a Pod's GPUs are attached by a claim, `share_claim_steps` decides the steps of that claim (guarantees AC1 to AC3
there).
"""

from __future__ import annotations

from sharepod.api.resource_line import carried
from sharepod.api.sharepod import RestartPolicy
from sharepod.controller.state.facts.pod_facts import DEFAULT_SCHEDULER, PodFacts
from sharepod.controller.state.facts.sharepod_facts import SharePodFacts
from sharepod.controller.state.reading.timestamps import seconds

from . import ends, share_claim_steps
from .advertised import SOON_S
from .ends import Absence, EndCause, EndReason, RunEnd, Sequel
from .snapshot import ReservationSnapshot, TenantSnapshot
from .steps import (
    BeginRelease,
    ClearPodUid,
    CreatePod,
    DeletePod,
    DeleteSharePod,
    EndRun,
    Finish,
    Forget,
    LetPodGo,
    OpenGate,
    Place,
    RemovalReason,
    RemoveRow,
    Step,
    TakeBackCause,
    TakeBackPod,
    Unreserve,
    Wait,
)

_UNFINISHED = frozenset({EndReason.EVICTED, EndReason.PREEMPTED, EndReason.POD_LOST, EndReason.RESERVATION_LOST})
"""Reasons of ends that were no decision of the work itself. The message of such an end contains `_ADVICE`."""
_CLOCK_SKEW_S = 60.0
"""Largest expected difference between the clocks of two machines, in seconds."""
_ADVICE = "; restartPolicy Never allows no second run: create the SharePod again"
"""Remedy in the message of an interrupted SharePod with restartPolicy Never."""


def decide(snapshot: TenantSnapshot) -> Step:
    """Return the next step for a tenant."""
    if snapshot.unreadable_row:  # L3
        return Wait()
    sharepod, pod = snapshot.sharepod, snapshot.pod
    if pod is not None and pod.marked and pod.node is not None:  # the Pod was bound before its withdrawal took effect
        return LetPodGo(pod)
    if pod is not None and pod.taken_back:
        return _taken_back(snapshot, sharepod, pod)
    if sharepod is None or sharepod.deleting or sharepod.ended:
        return _end(snapshot)
    if snapshot.between_runs:
        return _between_runs(snapshot, sharepod)
    if snapshot.pod is not None and snapshot.pod.waits_for_share and not snapshot.pod.deleting:
        return _behind_gate(snapshot, sharepod, snapshot.pod)
    if snapshot.pod is not None:
        return _with_pod(snapshot, sharepod, snapshot.pod)
    if not sharepod.readable:  # L3
        return Wait()
    return _without_pod(snapshot, sharepod)


def _taken_back(snapshot: TenantSnapshot, sharepod: SharePodFacts | None, pod: PodFacts) -> Step:
    """Return the next step for a withdrawn Pod. Its row is removed first, then `status.podUID`, then the Pod."""
    if sharepod is None or sharepod.deleting or sharepod.ended or snapshot.between_runs:
        return LetPodGo(pod)
    waits = False
    for reserved in snapshot.reserved:
        if not reserved.releasing:
            waits = True
            if (step := _drop(reserved, sharepod.status.former_pod)) is not None:
                return step
    if waits or not sharepod.readable:
        return Wait()
    return ClearPodUid() if sharepod.status.pod_uid == pod.uid else LetPodGo(pod)


def _end(snapshot: TenantSnapshot) -> Step:
    """Return the next step for a SharePod that is deleted or has ended."""
    if _left_alone(snapshot):
        return Wait()
    step = _release(snapshot)
    if step is not None:
        return step
    sharepod = snapshot.sharepod
    ttl_s = sharepod.ttl_s if sharepod is not None and not sharepod.deleting else None
    if ttl_s is not None and snapshot.ended_since is not None:
        due = snapshot.ended_since + ttl_s
        return Wait(due) if snapshot.now < due else DeleteSharePod()
    return Forget() if snapshot.pod is None else Wait()


def _left_alone(snapshot: TenantSnapshot) -> bool:
    """Return True if the SharePod was deleted without its Pod (`--cascade=orphan`). The Pod keeps its share until the
    Pod ends.
    """
    sharepod, pod = snapshot.sharepod, snapshot.pod
    if pod is None or pod.node is None or pod.ended or pod.deleting:
        return False
    leaves = pod.orphaned if sharepod is None else sharepod.deleting and sharepod.leaves_pod
    rows = (item for item in snapshot.reserved if item.node == pod.node and not item.forced)
    return leaves and any(item.written is not None and not item.releasing for item in rows)


def _between_runs(snapshot: TenantSnapshot, sharepod: SharePodFacts) -> Step:
    """Return the next step for a SharePod after a run: remove its Pod and rows, then begin the next run."""
    step = _release(snapshot)
    if step is not None:
        return step
    if sharepod.error is not None or snapshot.namespace_ends or not sharepod.readable:
        return Wait()
    last = sharepod.status.last_end
    due = (seconds(last.retry_at) or 0.0) if last is not None else 0.0
    left = due - snapshot.wall
    # no pause is longer, so a clock that was set back delays no run
    if 0 < left <= ends.LONGEST_PAUSE_S + _CLOCK_SKEW_S:
        return Wait(snapshot.now + left)
    if snapshot.pod is not None:  # the ended Pod was kept until now for its log
        return Wait() if snapshot.pod.deleting else DeletePod(snapshot.pod)
    if snapshot.now < snapshot.blocked_until:
        return Wait(snapshot.blocked_until)
    return CreatePod()  # L1


def _release(snapshot: TenantSnapshot) -> Step | None:
    """Return the next step towards the removal of the Pod and all reservations: first the Pod, then the rows. None once
    no reservation is left, and no Pod that has not ended."""
    for reserved in snapshot.reserved:
        if reserved.written is None:
            return Unreserve(reserved.node)
    pod = snapshot.pod
    stuck = pod is not None and not pod.ended
    if pod is not None and not pod.ended and not pod.deleting:
        return DeletePod(pod)
    for reserved in snapshot.reserved:
        if reserved.forced:
            return RemoveRow(reserved.node, RemovalReason.FORCED)
        if stuck:
            continue
        if not reserved.releasing:
            if reserved.wanted.releasing:
                continue  # the decision to release is not written to the ledger yet
            return BeginRelease(reserved.node)
        if reserved.confirmed is not None:
            return RemoveRow(reserved.node, reserved.confirmed)
    return Wait() if snapshot.reserved or stuck else None


def _behind_gate(snapshot: TenantSnapshot, sharepod: SharePodFacts, pod: PodFacts) -> Step:
    """Return the next step for a SharePod whose Pod waits for a share: reserve a share, then open the gate."""
    if sharepod.gpu is not None and pod.carried and not pod.carried.covers(carried(sharepod.gpu)):  # L7
        return TakeBackPod(pod, "the SharePod requests more than this pod's quota line counts")
    mine: ReservationSnapshot | None = None
    former = sharepod.status.former_pod
    refused = snapshot.now < snapshot.refused_until
    may_have = not refused and not snapshot.namespace_ends  # L6
    for reserved in _kept_first(snapshot.reserved):
        ends = reserved.releasing or reserved.wanted.releasing
        its = reserved.wanted.pod_uid == pod.uid and share_claim_steps.names_claim(
            reserved.wanted.claim, pod, snapshot.claim
        )
        if mine is None and its and not ends and may_have:
            mine = reserved
        elif (step := _drop(reserved, former)) is not None:
            return step
    if mine is None:
        if sharepod.error is None and may_have and not pod.foreign_gates and not snapshot.reserved:
            if snapshot.claim is not None and snapshot.claim.deleting:
                return Wait()  # the next Pod is created once this Pod is deleted
            return share_claim_steps.before_place(pod, snapshot.claim) or Place()
        return Wait(snapshot.refused_until) if refused else Wait()
    if mine.written is None or mine.written.pod_uid != pod.uid:
        return Wait()  # the row is not written to the ledger yet
    step = share_claim_steps.before_gate(pod, snapshot.claim, mine.node, mine.written)
    if step is None and not snapshot.advertised:  # L8
        return Wait(snapshot.now + SOON_S)
    return step or OpenGate(pod, mine.node, mine.written)  # L1


def _kept_first(reserved: tuple[ReservationSnapshot, ...]) -> list[ReservationSnapshot]:
    """Sort reservations so that the first is to be kept, by an order in which every operator agrees."""
    return sorted(reserved, key=lambda item: (item.written is None, item.releasing, item.node))


def _drop(reserved: ReservationSnapshot, former: str | None) -> Step | None:
    """Return the next step towards the removal of a reservation that was made for another Pod than the present one.
    None while a write or the agent's confirmation is pending.

    `former`: uid of the last run's Pod. Its processes may still run, so its row becomes Releasing first.
    """
    if reserved.written is None:
        return Unreserve(reserved.node)
    if former is not None and reserved.written.pod_uid == former and not reserved.releasing:
        return BeginRelease(reserved.node) if not reserved.wanted.releasing else None
    if not reserved.releasing:
        return RemoveRow(reserved.node, RemovalReason.NEVER_BOUND)
    confirmed = reserved.confirmed or (RemovalReason.DRAINED if reserved.forced else None)
    return RemoveRow(reserved.node, confirmed) if confirmed is not None else None


def _with_pod(snapshot: TenantSnapshot, sharepod: SharePodFacts, pod: PodFacts) -> Step:
    """Return the next step for a SharePod whose Pod exists and does not wait for its share."""
    if pod.ended:
        end = ends.end_of(pod)
        if snapshot.gpu_failed and end.cause is EndCause.CONTAINER_FAILED:
            end = RunEnd(EndCause.GPU_FAILED, end.reason, end.message)
        return _conclude(snapshot, sharepod, end, pod.uid)
    if pod.deleting:
        if any(reserved.forced for reserved in snapshot.reserved):
            given = "an admin gave its share away while its pod was being deleted"
            reason = ends.disruption_reason(pod) if pod.disrupted else EndReason.POD_LOST
            cause = ends.disruption_cause(pod) if pod.disrupted else EndCause.DELETED
            return _conclude(snapshot, sharepod, RunEnd(cause, reason, given), pod.uid)
        return Wait()
    return _on_node(snapshot, sharepod, pod)


def _on_node(snapshot: TenantSnapshot, sharepod: SharePodFacts, pod: PodFacts) -> Step:
    """Return the next step for a SharePod with a live Pod that is bound to a node."""
    place = pod.node or pod.pin
    here: ReservationSnapshot | None = None
    for reserved in snapshot.reserved:
        if reserved.node == place:
            here = reserved
        elif reserved.written is not None and reserved.written.pod_uid == sharepod.status.former_pod is not None:
            if (step := _drop(reserved, sharepod.status.former_pod)) is not None:
                return step
        elif reserved.written is None:
            return Unreserve(reserved.node)
        elif not reserved.releasing:
            return RemoveRow(reserved.node, RemovalReason.POD_ELSEWHERE, str(place))
        elif reserved.confirmed is not None:
            return RemoveRow(reserved.node, reserved.confirmed)
    if here is None or here.releasing:
        if pod.node is None:
            return TakeBackPod(pod, "its reservation is lost")
        lost = RunEnd(
            EndCause.RESERVATION_LOST,
            EndReason.RESERVATION_LOST,
            f"the ledger of {place} no longer has a reservation for it",
            Absence.ROW,
        )
        return _conclude(snapshot, sharepod, lost, pod.uid)
    if pod.node is None and here.override is not None:
        return TakeBackPod(pod, here.override.value)  # no scheduler can bind the Pod to this node
    if pod.node is not None and snapshot.gpu_failed and not pod.ready and _follows(sharepod, EndCause.GPU_FAILED):
        failed = f"a GPU of {pod.node} has failed, and the pod is not ready"
        return _conclude(snapshot, sharepod, RunEnd(EndCause.GPU_FAILED, EndReason.POD_FAILED, failed), pod.uid)
    return _until_started(snapshot, sharepod, pod) if here.written is not None else Wait()


def _until_started(snapshot: TenantSnapshot, sharepod: SharePodFacts, pod: PodFacts) -> Step:
    """Return the next step for a SharePod whose Pod has a share, until a container of it has started: wait, or give up
    after `bind_timeout` or `start_timeout`.
    """
    due = float("inf")
    if (why := share_claim_steps.lost(pod, snapshot.claim)) is not None:
        return TakeBackPod(pod, why, TakeBackCause.CLAIM)
    if pod.node is None and snapshot.unbound_since is not None:
        due = snapshot.unbound_since + snapshot.bind_timeout
        if snapshot.now >= due:
            return TakeBackPod(pod, pod.unschedulable)  # L5: the caller deletes this version of the Pod only
    elif snapshot.unstarted_since is not None:
        foreign = pod.node is None and pod.scheduler != DEFAULT_SCHEDULER
        patience = snapshot.bind_timeout if foreign else snapshot.start_timeout
        due = snapshot.unstarted_since + patience
        if snapshot.now >= due and pod.node is None:
            text = f"the scheduler {pod.scheduler} has not looked at it for {patience:.0f} s"
            return TakeBackPod(pod, text, TakeBackCause.SCHEDULER)
        if snapshot.now >= due:
            why = f": {pod.waiting}" if pod.waiting else ""
            text = f"no container of it was started on {pod.node} for {snapshot.start_timeout:.0f} s{why}"
            return _conclude(snapshot, sharepod, RunEnd(EndCause.NOT_STARTED, EndReason.NOT_STARTED, text), pod.uid)
    return Wait(due) if due < float("inf") else Wait()


def _without_pod(snapshot: TenantSnapshot, sharepod: SharePodFacts) -> Step:
    """Return the next step for a SharePod without a Pod."""
    former = sharepod.status.former_pod
    for reserved in snapshot.reserved:  # a row of an earlier run, which a restored backup of etcd has brought back
        of_former = former is not None and reserved.written is not None and reserved.written.pod_uid == former
        if of_former and (step := _drop(reserved, former)) is not None:
            return step
    if sharepod.status.pod_uid is not None:
        return _lost(snapshot, sharepod, sharepod.status.pod_uid)
    if snapshot.lost is not None and snapshot.lost.node is not None:
        # the Pod was bound, but deleted before `podUID` was written to the status
        return _lost(snapshot, sharepod, snapshot.lost.uid)
    for reserved in snapshot.reserved:
        on_record = reserved.written.pod_uid if reserved.written is not None and not reserved.releasing else None
        if on_record not in (None, former):
            # this Pod was deleted, but its gate may have been opened before, so a run may have begun
            return _lost(snapshot, sharepod, on_record)
    for reserved in _kept_first(snapshot.reserved):
        if (step := _drop(reserved, former)) is not None:
            return step
    if snapshot.reserved or sharepod.error is not None or snapshot.namespace_ends:
        return Wait()
    if snapshot.now < snapshot.blocked_until:
        return Wait(snapshot.blocked_until)
    return CreatePod()  # L1


def _lost(snapshot: TenantSnapshot, sharepod: SharePodFacts, pod_uid: str) -> Step:
    """Return the step that records the end of a run whose Pod was deleted."""
    node_lost = any(reserved.override is not None for reserved in snapshot.reserved)
    end = ends.end_of_lost(sharepod.status, snapshot.lost, node_lost=node_lost)
    return _conclude(snapshot, sharepod, end, pod_uid)


def _follows(sharepod: SharePodFacts, cause: EndCause) -> bool:
    """Return True if another run follows a run that ended for this cause."""
    return ends.sequel(cause, sharepod.restart_policy) is Sequel.ANOTHER_RUN


def _conclude(snapshot: TenantSnapshot, sharepod: SharePodFacts, end: RunEnd, pod_uid: str) -> Step:
    """Return the step that records the end of a run: `Finish` if the SharePod ends too, `EndRun` if another run
    follows.
    """
    following = ends.sequel(end.cause, sharepod.restart_policy)
    if following is not Sequel.ANOTHER_RUN:
        advice = _ADVICE if sharepod.restart_policy is RestartPolicy.NEVER and end.reason in _UNFINISHED else ""
        return Finish(ends.phase_after(following), end.reason, end.message + advice, end.absence)
    last = sharepod.status.last_end
    started = seconds(sharepod.status.start_time)
    if started is None and snapshot.pod is not None:
        started = seconds(snapshot.pod.started)
    ran_s = snapshot.wall - started if started is not None else 0.0
    attempts = ends.attempts_after(end.cause, ran_s, last.attempts if last is not None else 0)
    known = [snapshot.pod.node if snapshot.pod is not None else None, sharepod.status.node]
    known += [reserved.node for reserved in snapshot.reserved]
    return EndRun(
        cause=end.cause,
        message=end.message,
        pod_uid=pod_uid,
        node=next((node for node in known if node), None),
        attempts=attempts,
        pause_s=ends.pause_s(end.cause, attempts),
        absence=end.absence,
    )
