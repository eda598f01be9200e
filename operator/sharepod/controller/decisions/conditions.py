"""Conditions of a SharePod's status. Pure: from the inputs of one status to its conditions.

Guarantees:
- Every condition has a reason. The message of a condition that reports a problem contains a remedy.
- A message has no control characters, because other users' terminals print it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from sharepod.api.bounds import shown
from sharepod.api.gpunode import BYPASSES, FindingReason, Gpu, Health, Mode, Tenant, TenantStatus
from sharepod.api.sharepod import (
    CONDITION_ENFORCED,
    CONDITION_GPU_HEALTHY,
    CONDITION_PLACED,
    CONDITION_POD_READY,
    CONDITION_READY,
    CONDITION_RECONCILING,
    CONDITION_RESIZED,
    CONDITION_STALLED,
    KeptPlace,
    Phase,
    RestartPolicy,
    SharePodConsumption,
    SharePodStatus,
)
from sharepod.api.units import format_fraction
from sharepod.controller.state.facts.pod_facts import DEFAULT_SCHEDULER, PodFacts
from sharepod.controller.state.facts.sharepod_facts import SharePodFacts
from sharepod.controller.state.memos import Blocked
from sharepod.placement.state.types import Refusal
from sharepod.placement.wording import size_near

from .ends import EndReason, disruption_reason
from .snapshot import TenantSnapshot
from .steps import EndRun, Finish

Json = dict[str, Any]
Status = Literal["True", "False", "Unknown"]

_BETWEEN = ("Releasing", "NodeUnreachable", "BackOff")
"""Reasons of the condition Placed that a SharePod has between two runs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StatusInputs:
    """All inputs from which the status of one SharePod is composed."""

    snapshot: TenantSnapshot
    node: str | None
    """Node of the tenant's row."""
    row: Tenant | None
    """The tenant's row as stored in the API server."""
    gpus: Sequence[Gpu] | None
    """The row's GPUs as that node's agent reports them. None if the agent reports nothing."""
    seen: TenantStatus | None
    """The agent's report of the tenant."""
    refusal: Refusal | None
    """Last refusal of a place. None if there is none."""
    resize_refusal: Refusal | None
    """Refusal of the last requested change of the share. None if there is none."""
    resizing: bool
    """True if the SharePod requests another share than it has."""
    blocked: Blocked | None
    """Reason why its Pod cannot be created, or cannot get its share, for now. None if there is none."""
    usage_due: bool
    """True if the usage in the status may be written again: it has changed enough, and enough time has passed."""
    now: str
    """Time of day, RFC 3339, for `lastTransitionTime`."""
    missing_gpus: tuple[str, ...] = ()
    """UUIDs of the row's GPUs that the node's agent no longer reports."""
    consumed: SharePodConsumption | None = None
    """Totals of GPU time to write now. None: the stored totals stay."""
    moves_to: KeptPlace | None = None
    """Place that is reserved for the SharePod while the operator moves it there."""
    unreachable: str | None = None
    """Node that does not answer, so the tenant's Pod cannot end there, or its share cannot be released. None if there
    is none."""


class Stated(NamedTuple):
    """One condition, from which `status.compose` makes the API's form: it adds time and generation."""

    type: str
    status: Status
    reason: str
    message: str = ""


def _condition(kind: str, status: Status, reason: str, message: str = "") -> Stated:
    return Stated(kind, status, reason, shown(message[:32768]))


def _former(was: SharePodStatus, kind: str) -> Stated | None:
    for item in was.conditions:
        if item.type == kind:
            return Stated(kind, item.status, item.reason, item.message)
    return None


def _placed(sharepod: SharePodFacts, inputs: StatusInputs, gpus: Sequence[Json]) -> Stated | None:
    if sharepod.error is not None and inputs.row is None and not sharepod.ended:
        return _condition(CONDITION_PLACED, "False", "Invalid", str(sharepod.error))
    if inputs.row is not None:
        which = ", ".join(str(gpu["index"]) for gpu in gpus)
        text = f"{'GPUs' if len(gpus) > 1 else 'GPU'} {which} of {inputs.node}: {share(inputs.row)}"
        return _condition(CONDITION_PLACED, "True", "Reserved", text)
    if inputs.snapshot.namespace_ends and not sharepod.ended:
        text = f"the namespace {sharepod.namespace} is being deleted: nothing in it gets a share"
        return _condition(CONDITION_PLACED, "False", "NamespaceTerminating", text)
    if inputs.blocked is not None and inputs.snapshot.pod is None and not sharepod.ended:
        text = "waits until its pod can be created: see condition PodReady"
        return _condition(CONDITION_PLACED, "False", "Waiting", text)
    if inputs.refusal is not None:
        return _condition(CONDITION_PLACED, "False", inputs.refusal.outlook.value, inputs.refusal.message)
    former = _former(sharepod.status, CONDITION_PLACED)
    if sharepod.ended or (former is not None and former.status != "True" and former.reason not in _BETWEEN):
        return former
    if inputs.snapshot.pod is not None and inputs.snapshot.pod.foreign_gates:
        return _condition(CONDITION_PLACED, "False", "Waiting", "another scheduling gate holds its pod: see PodReady")
    text = "waits for placement"
    if _refused_share(inputs):
        text = "waits until its pod may have a share: see condition PodReady"
    return _condition(CONDITION_PLACED, "False", "Waiting", text)


def granted(row: Tenant) -> Json:
    """Return a row's share in the form of `status.granted`."""
    return {"requestMilli": row.request_milli, "limitMilli": row.limit_milli, "memory": row.memory}


def share(row: Tenant) -> str:
    """Return a row's share as text, in the units of the spec."""
    if row.mode is Mode.EXCLUSIVE:
        return "the whole GPU" if len(row.gpus) == 1 else "whole GPUs"
    each = "" if len(row.gpus) == 1 else " on each"
    return (
        f"request {format_fraction(row.request_milli)}, limit {format_fraction(row.limit_milli)}, "
        f"memory {size_near(row.memory)}{each}"
    )


def _pod_ready(was: SharePodStatus, inputs: StatusInputs, finish: Finish | None) -> Stated | None:
    pod = inputs.snapshot.pod
    kind = CONDITION_POD_READY
    if finish is not None:
        return _condition(kind, "False", finish.reason, finish.message)
    former = _former(was, kind)
    if was.ended:
        return former
    if pod is None:
        if inputs.blocked is not None:
            return _condition(kind, "False", inputs.blocked.reason, inputs.blocked.message)
        if was.pod_uid is not None:
            return former
        return _condition(kind, "False", "NoPod", "")
    if pod.disrupted:
        return _condition(kind, "False", disruption_reason(pod), pod.disrupted)
    if pod.deleting:
        return _pod_going(pod, inputs)
    if pod.waits_for_share:
        return _pod_gated(pod, inputs)
    if pod.node is None:
        return _condition(kind, "False", "NotScheduled", pod.unschedulable or _unseen(pod))
    if pod.ready:
        return _condition(kind, "True", "Ready")
    return _condition(kind, "False", "ContainersNotReady", pod.waiting)


def _unseen(pod: PodFacts) -> str:
    """Return the message for a Pod that has a share and that no scheduler has handled."""
    if pod.scheduler == DEFAULT_SCHEDULER:
        return "kube-scheduler has not bound the pod yet"
    return f"the scheduler {pod.scheduler} has not bound the pod yet: check that a scheduler of that name runs"


def _pod_gated(pod: PodFacts, inputs: StatusInputs) -> Stated:
    """Return the condition PodReady of a SharePod whose Pod waits for its share."""
    if inputs.blocked is not None and _refused_share(inputs):
        return _condition(CONDITION_POD_READY, "False", inputs.blocked.reason, inputs.blocked.message)
    text = "the pod waits for its share; kube-scheduler sees it once it has one"
    if pod.foreign_gates:
        gates = ", ".join(pod.foreign_gates)
        text = f"the pod waits until its scheduling gate {gates}, not SharePod's, is removed; it gets a share then"
    return _condition(CONDITION_POD_READY, "False", "SchedulingGated", text)


def _refused_share(inputs: StatusInputs) -> bool:
    """Return True if the API server has refused the patch that opens the gate of the present Pod."""
    pod = inputs.snapshot.pod
    return inputs.blocked is not None and pod is not None and inputs.blocked.pod == pod.uid


def _pod_going(pod: PodFacts, inputs: StatusInputs) -> Stated:
    """Return the condition PodReady of a SharePod whose Pod is being deleted."""
    if pod.taken_back:
        text = "the pod was withdrawn before it ran and is being deleted; the SharePod is placed again"
        return _condition(CONDITION_POD_READY, "False", "PodTakenBack", text)
    text = "the pod is being deleted; its share is released when it has ended"
    if inputs.unreachable is not None:
        text = unreachable(inputs.unreachable)
    return _condition(CONDITION_POD_READY, "False", "PodDeleting", text)


def enforced(was: SharePodStatus, inputs: StatusInputs) -> Stated | None:
    """Return the condition Enforced: whether the hook limits the tenant. None without a Pod, before the SharePod has
    ended."""
    row, pod, seen = inputs.row, inputs.snapshot.pod, inputs.seen
    if row is None or pod is None or pod.node is None:
        return _former(was, CONDITION_ENFORCED) if pod is not None or was.ended else None
    if row.mode is Mode.EXCLUSIVE:
        return _condition(CONDITION_ENFORCED, "True", "Exclusive", "no other tenant uses its GPUs")
    findings = seen.findings if seen is not None else ()
    messages = {finding.reason: finding.message for finding in findings}
    message = "; ".join(finding.message for finding in findings)
    if seen is None or (seen.enforced is None and FindingReason.PROCESSES_NOT_TOLD not in messages):
        message = "; ".join(filter(None, ("no process of the pod has used CUDA yet", message)))
        return _condition(CONDITION_ENFORCED, "Unknown", "NoCudaCall", message)
    if seen.enforced is None:
        return _condition(CONDITION_ENFORCED, "Unknown", FindingReason.PROCESSES_NOT_TOLD.value, message)
    if seen.enforced:
        return _condition(CONDITION_ENFORCED, "True", "HookConnected", message)
    reason = next((reason for reason in BYPASSES if reason in messages), FindingReason.PROCESS_WITHOUT_HOOK)
    text = message or (
        "a process of the pod uses the GPU without the hook, so its share is not enforced; "
        "images built on musl (Alpine) do not load it: use one built on glibc"
    )
    return _condition(CONDITION_ENFORCED, "False", reason.value, text)


def gpu_healthy(was: SharePodStatus, inputs: StatusInputs, over: bool) -> Stated | None:
    """Return the condition GPUHealthy. None as long as no GPU of the SharePod has ever failed. `over`: True if the
    SharePod has ended.
    """
    former = _former(was, CONDITION_GPU_HEALTHY)
    if inputs.row is None or inputs.gpus is None or over:
        return former
    failed = [gpu for gpu in inputs.gpus if gpu.health is Health.UNHEALTHY]
    if failed or inputs.missing_gpus:
        ill = (f"GPU {gpu.index} of {inputs.node} has failed: {gpu.reason}" for gpu in failed)
        lost = (f"{uuid} of {inputs.node} is missing: its agent no longer reports it" for uuid in inputs.missing_gpus)
        which = "; ".join((*ill, *lost))
        advice = "Programs on it may fail or hang; delete the pod for another GPU"
        if inputs.snapshot.sharepod is not None and inputs.snapshot.sharepod.restart_policy is RestartPolicy.NEVER:
            advice = "Programs on it may fail or hang; create the SharePod again for another GPU"
        return _condition(CONDITION_GPU_HEALTHY, "False", "GpuFailed", f"{which}. {advice}")
    return _condition(CONDITION_GPU_HEALTHY, "True", "GpuRecovered") if former is not None else None


def resized(sharepod: SharePodFacts, inputs: StatusInputs, over: bool) -> Stated | None:
    """Return the condition Resized, the answer to a changed share in the spec. None if the share was never changed.
    `over`: True if the SharePod has ended.
    """
    was = sharepod.status
    former = _former(was, CONDITION_RESIZED)
    if inputs.row is None or over:
        return former
    if sharepod.error is not None:
        return _condition(CONDITION_RESIZED, "False", "Invalid", f"{sharepod.error}; keeps {share(inputs.row)}")
    if inputs.resizing:
        refusal = inputs.resize_refusal
        seen = was.observed_generation == sharepod.generation
        if refusal is None and seen and former is not None and former.status == "False":
            return former
        if refusal is None:
            text = f"the change waits for its answer; it keeps {share(inputs.row)} until then"
            return _condition(CONDITION_RESIZED, "Unknown", "Waiting", text)
        return _condition(CONDITION_RESIZED, "False", refusal.outlook.value, refusal.message)
    changed = was.granted is not None and was.granted.dump() != granted(inputs.row)
    if changed or (former is not None and former.status != "True"):
        return _condition(CONDITION_RESIZED, "True", "Granted", share(inputs.row))
    return former


def between_runs(inputs: StatusInputs, last: Json | None) -> tuple[Stated | None, ...]:
    """Return the conditions (Placed, PodReady) between two runs. `last`: `lastEnd` of the status."""
    return _next_place(inputs, last), _ended_run(last)


def of_run(
    sharepod: SharePodFacts, inputs: StatusInputs, gpus: Sequence[Json], finish: Finish | EndRun | None
) -> tuple[Stated | None, ...]:
    """Return the conditions (Placed, PodReady) of a SharePod that waits, runs or has ended. `gpus`: `gpus` of the
    status.
    """
    end = finish if isinstance(finish, Finish) else None
    return _placed(sharepod, inputs, gpus), _pod_ready(sharepod.status, inputs, end)


_STALLING = frozenset({"Invalid", "NeverFits", "AffinityConflict", "PodNameTaken"})
"""Reasons of the conditions Placed and PodReady that last until a user changes something."""


def overall(phase: Phase, placed: Stated | None, pod_ready: Stated | None) -> tuple[Stated, ...]:
    """Return the condition Ready. If it is False, also return Reconciling or Stalled, as kstatus defines them."""
    if phase is Phase.SUCCEEDED:
        text = pod_ready.message if pod_ready is not None else ""
        return (_condition(CONDITION_READY, "True", EndReason.COMPLETED, text),)
    if pod_ready is not None and pod_ready.status == "True":
        return (_condition(CONDITION_READY, "True", "Ready"),)
    cause = pod_ready
    if phase is not Phase.FAILED and placed is not None and placed.status != "True" and placed.reason != "Waiting":
        cause = placed
    reason, message = (cause.reason, cause.message) if cause is not None else ("Waiting", "")
    stalled = phase is Phase.FAILED or reason in _STALLING
    kind = CONDITION_STALLED if stalled else CONDITION_RECONCILING
    return (_condition(CONDITION_READY, "False", reason, message), _condition(kind, "True", reason, message))


def _next_place(inputs: StatusInputs, last: Json | None) -> Stated:
    """Return the condition Placed between two runs: the reason why the next run has not started."""
    if inputs.unreachable is not None:
        return _condition(CONDITION_PLACED, "False", "NodeUnreachable", unreachable(inputs.unreachable))
    pod = inputs.snapshot.pod
    if inputs.row is not None or (pod is not None and not pod.ended):
        text = f"waits until nothing of its last run is left on {inputs.node or (last or {}).get('node') or 'its node'}"
        return _condition(CONDITION_PLACED, "False", "Releasing", text)
    if inputs.snapshot.namespace_ends:
        text = "the namespace is being deleted: nothing in it gets a share"
        return _condition(CONDITION_PLACED, "False", "NamespaceTerminating", text)
    if inputs.blocked is not None:
        text = f"waits until the pod of its next run can be created: {inputs.blocked.message}"
        return _condition(CONDITION_PLACED, "False", "Waiting", text)
    if pod is not None and pod.deleting:
        text = f"waits until the pod of its last run, {pod.name}, is deleted; see its finalizers"
        return _condition(CONDITION_PLACED, "False", "PodTerminating", text)
    attempts, retry_at = (last or {}).get("attempts", 1), (last or {}).get("retryAt")
    text = f"is placed again at {retry_at}; runs in a row that did not last: {attempts}"
    return _condition(CONDITION_PLACED, "False", "BackOff", text)


def _ended_run(last: Json | None) -> Stated:
    """Return the condition PodReady between two runs: how the last run ended."""
    known = last or {}
    return _condition(CONDITION_POD_READY, "False", known.get("cause") or EndReason.POD_LOST, known.get("message", ""))


def unreachable(node: str) -> str:
    """Return the message for a SharePod on an unreachable node, with the remedy for an administrator."""
    return (
        f"{node} does not answer; waits until it does, or until kubectl delete node {node} or kubectl taint node "
        f"{node} node.kubernetes.io/out-of-service=nodeshutdown:NoExecute"
    )
