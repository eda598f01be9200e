"""End of one run of a SharePod: its cause and what follows. Pure.

A run is the life of one Pod whose scheduling gate was opened. What follows a run depends only on its cause of end and
the SharePod's restartPolicy, by one table (`sequel`).

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
"""Seconds of running after which a failure counts as the first again, as the kubelet counts crashes of a container."""
_LASTING_DISRUPTED_S = 60.0
"""Seconds of running after which a disruption counts as the first again. Shorter than for failures: while an
administrator drains node after node, a SharePod may be disrupted every few minutes without a fault of its own."""


class EndReason(StrEnum):
    """Reason of a SharePod's end in conditions and Events. For a Pod that the kubelet ended, the kubelet's reason may
    stand instead."""

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
    """Kind of object whose absence means the end of a run. A live read must confirm the absence before the end is
    written."""

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
    """The kubelet evicted the Pod (memory or disk pressure, shutdown), or the operator, as `unenforced_policy` asks."""
    DRAINED = "Drained"
    """Evicted by the Eviction API (`kubectl drain`), or by a NoExecute taint."""
    PREEMPTED = "Preempted"
    """The Pod was evicted for a Pod of higher priority, by kube-scheduler or by the operator."""
    MOVED = "Moved"
    """The operator restarted it on other GPUs to free its place for a waiting request."""
    DELETED = "Deleted"
    """A user or controller deleted the Pod."""
    NODE_LOST = "NodeLost"
    """The Pod's Node was deleted, or has the taint out-of-service."""
    GPU_FAILED = "GpuFailed"
    """A GPU of the Pod failed, and the Pod was not ready."""
    RESERVATION_LOST = "ReservationLost"
    """The ledger no longer has the Pod's row."""


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
"""Causes that are no fault of the program or its node. After the first such end, the next run begins without a
pause."""

PREEMPTED = "PreemptionByScheduler"
"""Reason of the condition DisruptionTarget of a preempted Pod, as kube-scheduler writes it."""
MOVED = "MovedByOperator"
"""Value that replaces the reason of a moved Pod's condition DisruptionTarget. That reason is EvictionByEvictionAPI, as
if `kubectl drain` had evicted the Pod."""
_BY_DISRUPTION = {
    "EvictionByEvictionAPI": EndCause.DRAINED,
    "DeletionByTaintManager": EndCause.DRAINED,
    PREEMPTED: EndCause.PREEMPTED,
    MOVED: EndCause.MOVED,
    "DeletionByPodGC": EndCause.NODE_LOST,
    "TerminationByKubelet": EndCause.EVICTED,
}
"""Cause by the reason of the Pod's condition DisruptionTarget."""

_BY_KUBELET = {
    "DeadlineExceeded": EndCause.DEADLINE,
    "Evicted": EndCause.EVICTED,
    "Terminated": EndCause.EVICTED,
    "NodeShutdown": EndCause.EVICTED,
    "Shutdown": EndCause.EVICTED,
    "NodeLost": EndCause.NODE_LOST,
}
"""Cause by the reason in a failed Pod's status. Any other reason means that the kubelet refused the Pod."""


class Sequel(Enum):
    """Consequence of the end of a run."""

    SUCCEEDED = "the SharePod has succeeded"
    FAILED = "the SharePod has failed"
    ANOTHER_RUN = "the SharePod is placed again"


@dataclass(frozen=True, slots=True)
class RunEnd:
    """End of a run. `reason`: reason of the SharePod's end, if no other run follows: an `EndReason` or the kubelet's
    reason.
    """

    cause: EndCause
    reason: str
    message: str
    absence: Absence | None = field(default=None, compare=False)
    """Object whose absence a live read must confirm before the end is written. None if nothing is to be confirmed."""


def sequel(cause: EndCause, policy: RestartPolicy) -> Sequel:
    """Return the consequence of the end of a run.

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
    """Return the number of consecutive short runs, including the run that has just ended after `ran_s` seconds. After a
    long run the count starts at 1 again. `attempts`: the number before that run.
    """
    lasting = _LASTING_DISRUPTED_S if cause in _DISRUPTIONS else _LASTING_S
    return 1 if ran_s >= lasting else attempts + 1


def pause_s(cause: EndCause, attempts: int) -> float:
    """Return the seconds from the end of a run until the next may begin. `attempts`: see `attempts_after`."""
    if attempts <= 1 and cause in _DISRUPTIONS:
        return 0.0
    return _BACKOFF.pause_s(attempts)


def end_of(pod: PodFacts) -> RunEnd:
    """Return the end of a run from its Pod, which is in a terminal phase.

    A Pod whose deletion was requested before its containers ended counts as deleted, whatever their exit codes.
    Kubernetes' Job controller does the same.
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
    """Return the reason that the SharePod of a disrupted Pod shows."""
    return _OWN_REASONS.get(disruption_cause(pod), EndReason.EVICTED)


_OWN_REASONS = {EndCause.PREEMPTED: EndReason.PREEMPTED, EndCause.MOVED: EndReason.MOVED}
"""Reason by cause, for disruptions that serve another request. Every other disruption has the reason Evicted."""
_REASONS: dict[str, EndCause] = {
    EndReason.EVICTED: EndCause.EVICTED,
    EndReason.PREEMPTED: EndCause.PREEMPTED,
    EndReason.MOVED: EndCause.MOVED,
}
"""Cause by the reason that PodReady has while a disrupted Pod is being deleted. So the cause outlives the Pod."""


def end_of_lost(status: SharePodStatus, lost: PodFacts | None, *, node_lost: bool) -> RunEnd:
    """Return the end of a run whose Pod no longer exists, from the Pod's last known state or the stored condition
    PodReady. Without either, the Pod counts as deleted.

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
    """Return a kubelet's reason, such as `OutOfephemeral-storage`, as a valid reason of a condition. Other characters
    become underscores.
    """
    kept = re.sub(r"[^A-Za-z0-9_]", "_", reason)[:_REASON_LIMIT]
    return kept if re.match("[A-Za-z]", kept) else EndReason.POD_FAILED
