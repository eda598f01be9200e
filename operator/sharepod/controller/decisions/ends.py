"""End of one run of a SharePod: its cause and its consequence. Pure.

A run is the life of one Pod whose gate was opened. The consequence of its end depends only on the cause and the
SharePod's restartPolicy, by one table (`sequel`).

Guarantees:
- RE1 Never runs once: with restartPolicy Never no run follows another.
- RE2 completed work is not repeated: with OnFailure no run follows a completed run.
- RE3 bounded pauses: a pause is at most `LONGEST_PAUSE_S`. After a run that lasted long enough, the next pause is the
  shortest again.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from enum import Enum, StrEnum

from sharepod.api.sharepod import CONDITION_POD_READY, Phase, RestartPolicy, SharePodStatus
from sharepod.backoff import Backoff
from sharepod.controller.state.facts.pod_facts import PodFacts

_REASON_LIMIT = 128
"""Longest reason in characters: the limit of events.k8s.io/v1."""
LONGEST_PAUSE_S = 360.0
"""Longest pause between two runs: six minutes, as for a Job."""
_BACKOFF = Backoff(10.0, LONGEST_PAUSE_S)
"""Pause between two runs, in seconds: first and longest, as for a Job."""
_LASTING_S = 600.0
"""Seconds of running after which a failure counts as the first again. The kubelet counts crashes of a container in the
same way."""
_LASTING_DISRUPTED_S = 60.0
"""Seconds of running after which a disruption counts as the first again. If an admin drains nodes one after the other,
a SharePod may move every few minutes through no fault of its work."""


class EndReason(StrEnum):
    """Reason of a SharePod's end in conditions and Events; a kubelet's own reason may replace it."""

    COMPLETED = "Completed"
    EVICTED = "Evicted"
    PREEMPTED = "Preempted"
    INVALID = "Invalid"
    MOVED = "Moved"
    NOT_STARTED = "NotStarted"
    POD_FAILED = "PodFailed"
    POD_LOST = "PodLost"
    POD_REFUSED = "PodRefused"
    RESERVATION_LOST = "ReservationLost"


class Absence(Enum):
    """Object from whose absence an end follows. A live read must confirm the absence before the end is written."""

    POD = "pod"
    ROW = "row"


class EndCause(StrEnum):
    """Cause of the end of a run, as users see it in `status.lastEnd.cause`."""

    COMPLETED = "Completed"
    """All containers ended with exit code 0."""
    CONTAINER_FAILED = "ContainerFailed"
    """The Pod failed because a container failed."""
    DEADLINE = "DeadlineExceeded"
    """The Pod ran for its activeDeadlineSeconds."""
    REJECTED = "Rejected"
    """The kubelet refused the Pod that was bound to its node."""
    NOT_STARTED = "NotStarted"
    """No container of the Pod was started within `start_timeout`, for example because an image cannot be pulled."""
    EVICTED = "Evicted"
    """The kubelet evicted the Pod (memory or disk pressure, shutdown), or the operator did, by `unenforced_policy`."""
    DRAINED = "Drained"
    """Evicted by the Eviction API (`kubectl drain`), or by a NoExecute taint."""
    PREEMPTED = "Preempted"
    """The Pod was evicted for a Pod of higher priority, by kube-scheduler or by the operator."""
    MOVED = "Moved"
    """The operator restarts it on other GPUs to free a place for a waiting request."""
    DELETED = "Deleted"
    """A user or controller deleted the Pod."""
    NODE_LOST = "NodeLost"
    """The Pod's Node was deleted, or has the taint out-of-service."""
    GPU_FAILED = "GpuFailed"
    """One of the GPUs failed, and the Pod is not ready."""
    RESERVATION_LOST = "ReservationLost"
    """The ledger no longer contains the row."""


_DISRUPTIONS = frozenset(
    {
        EndCause.DRAINED,
        EndCause.PREEMPTED,
        EndCause.MOVED,
        EndCause.DELETED,
        EndCause.NODE_LOST,
        EndCause.GPU_FAILED,
        EndCause.RESERVATION_LOST,
    }
)
"""Causes outside the work and its place. After the first such end the next run begins without a pause."""

PREEMPTED = "PreemptionByScheduler"
"""Reason of the condition DisruptionTarget of a preempted Pod, as kube-scheduler writes it."""
MOVED = "MovedByOperator"
"""End cause of a moved Pod. Its condition DisruptionTarget has only the reason EvictionByEvictionAPI."""
_BY_DISRUPTION = {
    "EvictionByEvictionAPI": EndCause.DRAINED,
    "DeletionByTaintManager": EndCause.DRAINED,
    PREEMPTED: EndCause.PREEMPTED,
    MOVED: EndCause.MOVED,
    "DeletionByPodGC": EndCause.NODE_LOST,
    "TerminationByKubelet": EndCause.EVICTED,
}
"""By Kubernetes' reason of the Pod's condition DisruptionTarget: the cause."""

_BY_KUBELET = {
    "DeadlineExceeded": EndCause.DEADLINE,
    "Evicted": EndCause.EVICTED,
    "Terminated": EndCause.EVICTED,
    "NodeShutdown": EndCause.EVICTED,
    "Shutdown": EndCause.EVICTED,
    "NodeLost": EndCause.NODE_LOST,
}
"""By a failed Pod's own reason: the cause. Every other reason means that the kubelet refused the Pod."""


class Sequel(Enum):
    """Consequence of the end of a run."""

    SUCCEEDED = "the SharePod has succeeded"
    FAILED = "the SharePod has failed"
    ANOTHER_RUN = "the SharePod is placed again"


@dataclass(frozen=True, slots=True)
class RunEnd:
    """End of a run. `reason`: reason of the SharePod's end if the SharePod ends too: an `EndReason`, or a kubelet's
    reason.
    """

    cause: EndCause
    reason: str
    message: str
    absence: Absence | None = field(default=None, compare=False)
    """Object whose absence a live read must confirm."""


def sequel(cause: EndCause, policy: RestartPolicy) -> Sequel:
    """Return the consequence of a run's end.

    | cause               | Never     | OnFailure   | Always      |
    |---------------------|-----------|-------------|-------------|
    | completed           | succeeded | succeeded   | another run |
    | deadline exceeded   | failed    | failed      | failed      |
    | any other           | failed    | another run | another run |
    """
    if cause is EndCause.DEADLINE:
        return Sequel.FAILED
    if cause is EndCause.COMPLETED and policy is not RestartPolicy.ALWAYS:
        return Sequel.SUCCEEDED
    return Sequel.FAILED if policy is RestartPolicy.NEVER else Sequel.ANOTHER_RUN


def attempts_after(cause: EndCause, ran_s: float, attempts: int) -> int:
    """Return the number of consecutive short runs, including the run that lasted `ran_s`. `attempts`: the number before
    that run.
    """
    lasting = _LASTING_DISRUPTED_S if cause in _DISRUPTIONS else _LASTING_S
    return 1 if ran_s >= lasting else attempts + 1


def pause_s(cause: EndCause, attempts: int) -> float:
    """Return the seconds from the end of a run until the next may begin. `attempts`: see `attempts_after`."""
    if attempts <= 1 and cause in _DISRUPTIONS:
        return 0.0
    return _BACKOFF.pause_s(attempts)


def end_of(pod: PodFacts) -> RunEnd:
    """Return how a Pod in a terminal phase ended.

    If its deletion was requested before its containers ended, it counts as deleted, whatever their exit codes. Jobs do
    the same.
    """
    deleted = pod.deleting and (pod.restarts or not pod.ended_first)
    if pod.phase == "Succeeded" and not deleted:
        return RunEnd(EndCause.COMPLETED, EndReason.COMPLETED, "all containers ended with exit code 0")
    if pod.disrupted and (pod.deleting or pod.phase == "Failed"):
        return RunEnd(disruption_cause(pod), disruption_reason(pod), pod.disrupted)
    if pod.reason == EndReason.EVICTED:
        return RunEnd(EndCause.EVICTED, EndReason.EVICTED, pod.message or "the kubelet evicted the pod")
    if deleted:
        return RunEnd(EndCause.DELETED, EndReason.POD_LOST, "the pod was deleted before it had ended")
    cause = _BY_KUBELET.get(pod.reason, EndCause.REJECTED) if pod.reason else EndCause.CONTAINER_FAILED
    return RunEnd(cause, _condition_reason(pod.reason), pod.message or "a container failed")


def disruption_cause(pod: PodFacts) -> EndCause:
    """Return the cause by which a disrupted Pod ends."""
    return _BY_DISRUPTION.get(pod.disrupted_by, EndCause.EVICTED)


def disruption_reason(pod: PodFacts) -> EndReason:
    """Return the reason that a disrupted Pod's SharePod shows."""
    return _OWN_REASONS.get(disruption_cause(pod), EndReason.EVICTED)


_OWN_REASONS = {EndCause.PREEMPTED: EndReason.PREEMPTED, EndCause.MOVED: EndReason.MOVED}
"""For each cause: reason of a disruption in favour of another request. Every other disruption has the reason
Evicted."""
_REASONS: dict[str, EndCause] = {
    EndReason.EVICTED: EndCause.EVICTED,
    EndReason.PREEMPTED: EndCause.PREEMPTED,
    EndReason.MOVED: EndCause.MOVED,
}
"""By the reason in a SharePod's condition while its disrupted Pod is being deleted: the cause."""


def end_of_lost(status: SharePodStatus, lost: PodFacts | None, *, node_lost: bool) -> RunEnd:
    """Return the end of a run whose Pod no longer exists. It follows from the Pod's last known state; without one, the
    Pod counts as lost.

    Args:
        status: The SharePod's status.
        lost: The Pod's last known facts; None if unknown.
        node_lost: True if the Pod's node is deleted or out of service.
    """
    if lost is not None and status.pod_uid in (None, lost.uid):
        if lost.ended:
            end = end_of(lost)
            return RunEnd(end.cause, end.reason, end.message, Absence.POD)
        if lost.disrupted:
            return RunEnd(disruption_cause(lost), disruption_reason(lost), lost.disrupted, Absence.POD)
    for condition in status.conditions if status.pod_uid is not None else ():
        if condition.type == CONDITION_POD_READY and condition.reason in _REASONS:
            return RunEnd(_REASONS[condition.reason], condition.reason, condition.message, Absence.POD)
    cause = EndCause.NODE_LOST if node_lost else EndCause.DELETED
    return RunEnd(cause, EndReason.POD_LOST, "the pod was deleted before it had ended", Absence.POD)


def phase_after(following: Sequel) -> Phase:
    """Return the terminal phase in which a SharePod ends."""
    return Phase.SUCCEEDED if following is Sequel.SUCCEEDED else Phase.FAILED


def _condition_reason(reason: str) -> str:
    """Return a kubelet's reason, such as `OutOfephemeral-storage`, in characters that are valid in a condition's
    reason.
    """
    kept = re.sub(r"[^A-Za-z0-9_]", "_", reason)[:_REASON_LIMIT]
    return kept if re.match("[A-Za-z]", kept) else EndReason.POD_FAILED
