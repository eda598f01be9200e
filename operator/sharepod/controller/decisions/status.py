"""Status of a SharePod as it should be, as the API takes it (`SharePodStatus.dump`). Pure.

Guarantees:
- Every condition has a reason; a condition that is not as a user would wish has a message that says what would help.
- A status that says the same makes an empty patch.
- A terminal phase stays.
- Inputs with the same `looked_at` make the same status, but for the time of day.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from sharepod.api.gpunode import FindingReason, Gpu, Health, Mode, Tenant, TenantStatus
from sharepod.api.sharepod import (
    CONDITION_ENFORCED,
    CONDITION_GPU_HEALTHY,
    CONDITION_PLACED,
    CONDITION_POD_READY,
    CONDITION_RESIZED,
    GpuRequest,
    Phase,
    SharePodStatus,
    Usage,
)
from sharepod.api.units import format_fraction
from sharepod.controller.state.facts import PodFacts, SharePodFacts
from sharepod.controller.state.memos import Blocked
from sharepod.placement.state.types import Refusal
from sharepod.placement.wording import size_down

from .lifecycle import EndReason, Finish, TenantSnapshot

Json = dict[str, Any]
Status = Literal["True", "False", "Unknown"]

MINOR = frozenset({"conditions", "usage", "observedGeneration"})
"""Fields of the status that only explain: nothing is decided by them."""
USAGE_STEP_MILLI = 50
"""Least change of usage that is written, in thousandths: five points of the GPU's time, or of the memory granted.
Metrics and GPUNode show smaller ones.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class StatusInputs:
    """Everything that a status is made of."""

    snapshot: TenantSnapshot
    node: str | None
    """Node of its row."""
    row: Tenant | None
    """Its row as the API server has it."""
    gpus: Sequence[Gpu] | None
    """The row's GPUs as the agent of that node reports them; None if it reports nothing."""
    seen: TenantStatus | None
    """The agent's report of the tenant."""
    refusal: Refusal | None
    """Last refusal of a place; None if there is none."""
    resize_refusal: Refusal | None
    """Refusal of the last change of its share; None if there is none."""
    resizing: bool
    """True if the SharePod asks for another share than it was granted."""
    blocked: Blocked | None
    """Reason that its Pod cannot be created for now; None if it can."""
    usage_due: bool
    """Usage has moved, and may be written now."""
    now: str
    """Time of day, RFC 3339, for `lastTransitionTime`."""


class Stated(NamedTuple):
    """Content of a condition; `compose` adds since when it stands, and of which generation it is."""

    type: str
    status: Status
    reason: str
    message: str = ""


def compose(sharepod: SharePodFacts, inputs: StatusInputs, finish: Finish | None = None) -> Json:
    """Return the status as it should be now; with `finish`, in that terminal phase."""
    was = sharepod.status
    pod, row = inputs.snapshot.pod, inputs.row
    phase = finish.phase if finish else was.phase if sharepod.ended else _phase(pod, row)
    over = phase in (Phase.SUCCEEDED, Phase.FAILED)
    gpus = _gpus(was, row, inputs.gpus or ()) if row is not None else [gpu.dump() for gpu in was.gpus] if over else []
    stated = (
        _placed(sharepod, inputs, gpus),
        _pod_ready(was, inputs, finish),
        _enforced(was, inputs),
        _gpu_healthy(was, inputs, over),
        _resized(sharepod, inputs, over),
    )
    status: Json = {
        "phase": phase.value,
        "node": inputs.node if row is not None else was.node if over else None,
        "gpus": gpus,
        "gpuIndexes": ",".join(str(gpu["index"]) for gpu in gpus) or None,
        "podName": pod.name if pod is not None else was.pod_name if over else None,
        "podUID": pod.uid if pod is not None and not pod.waits_for_share else was.pod_uid,
        "granted": _granted(row) if row is not None else was.granted.dump() if over and was.granted else None,
        "share": _shown(row, sharepod.gpu) if row is not None or not over else was.share.dump() if was.share else None,
        "usage": None if over else _usage(was, inputs.seen, inputs.usage_due),
        "conditions": [_dated(was, item, inputs.now, sharepod.generation) for item in stated if item is not None],
        "observedGeneration": sharepod.generation,
    }
    return {key: value for key, value in status.items() if value is not None}


def looked_at(sharepod: SharePodFacts, inputs: StatusInputs, finish: Finish | None = None) -> tuple[object, ...]:
    """Return everything that `compose` looks at, but for the time of day, cheap to compare."""
    seen = inputs.seen
    return (
        sharepod,
        inputs.snapshot.pod,
        inputs.snapshot.namespace_ends,
        inputs.node,
        inputs.row,
        inputs.gpus,
        (seen.connected, seen.enforced, seen.findings) if seen is not None else None,
        (seen.held_milli, seen.memory) if seen is not None and inputs.usage_due else None,
        inputs.usage_due,
        inputs.refusal,
        inputs.resize_refusal,
        inputs.resizing,
        inputs.blocked,
        finish,
    )


def major(sharepod: SharePodFacts, inputs: StatusInputs, finish: Finish | None = None) -> tuple[object, ...]:
    """Return what the fields that decide something are made of: of the rest come conditions, usage and
    `observedGeneration` alone."""
    pod = inputs.snapshot.pod
    return (
        (pod.name, pod.uid, pod.phase, pod.waits_for_share) if pod is not None else None,
        inputs.node,
        inputs.row,
        inputs.gpus,
        sharepod.gpu,
        finish,
    )


def usage_moved(was: Usage | None, seen: TenantStatus | None, row: Tenant | None) -> bool:
    """Return whether the usage that an agent reports is worth a write.

    Args:
        was: Usage as it was last written.
        seen: The agent's report of the tenant.
        row: The tenant's row, by whose memory a change of memory is measured.
    """
    if seen is None or row is None:
        return was is not None
    if was is None:
        return seen.connected
    moved = abs(seen.memory - was.memory)
    return abs(seen.held_milli - was.held_milli) >= USAGE_STEP_MILLI or (
        moved > 0 and moved * 1000 >= row.memory * USAGE_STEP_MILLI
    )


def difference(written: Mapping[str, Any], wanted: Mapping[str, Any]) -> Json:
    """Return the merge patch from a status as it was read to the one that should be; empty if they say the same.

    The order of conditions says nothing: server-side apply keeps the one that it finds.
    """
    changes: Json = {key: value for key, value in wanted.items() if written.get(key) != value}
    if "conditions" in changes and _by_type(written.get("conditions")) == _by_type(changes["conditions"]):
        del changes["conditions"]
    changes |= {key: None for key in written if key not in wanted}
    for key in ("usage", "granted", "share"):  # merged field by field: nothing of the former value may stay
        if isinstance(changes.get(key), dict):
            changes[key] = dict.fromkeys(written.get(key) or {}) | changes[key]
    return changes


def _by_type(conditions: object) -> list[Json]:
    """Return conditions in the order of their types; what is no list of them is as it is."""
    if not isinstance(conditions, list) or not all(isinstance(item, dict) for item in conditions):
        return [{"": conditions}]
    return sorted(conditions, key=lambda item: str(item.get("type")))


def _phase(pod: PodFacts | None, row: Tenant | None) -> Phase:
    if pod is not None and pod.phase == "Running":
        return Phase.RUNNING
    return Phase.PLACED if row is not None else Phase.PENDING


def gpus_of(row: Tenant, gpus: Sequence[Gpu]) -> tuple[Gpu, ...]:
    """Return those of a node's GPUs that a row is for."""
    return tuple(gpu for gpu in gpus if gpu.uuid in row.gpus)


def _gpus(was: SharePodStatus, row: Tenant, reported: Sequence[Gpu]) -> list[Json]:
    known = {gpu.uuid: gpu.dump() for gpu in was.gpus if gpu.uuid in row.gpus} | {
        str(gpu.uuid): {"uuid": str(gpu.uuid), "index": gpu.index, "model": gpu.model} for gpu in reported
    }
    return [known[uuid] for uuid in row.gpus if uuid in known]


def _granted(row: Tenant) -> Json:
    return {"requestMilli": row.request_milli, "limitMilli": row.limit_milli, "memory": row.memory}


def _shown(row: Tenant | None, request: GpuRequest | None) -> Json | None:
    if row is not None:
        share, memory = (row.request_milli, row.limit_milli), size_down(row.memory)
    elif request is not None:
        share = (request.request_milli, request.limit_milli)
        memory = size_down(request.memory) if request.memory is not None else ""
    else:
        return None
    return {"request": format_fraction(share[0]), "limit": format_fraction(share[1]), "memory": memory}


def _usage(was: SharePodStatus, seen: TenantStatus | None, due: bool) -> Json | None:
    if not due:
        return was.usage.dump() if was.usage is not None else None
    if seen is None or (was.usage is None and not seen.connected):
        return None
    return {"heldMilli": seen.held_milli, "memory": seen.memory}


def _condition(kind: str, status: Status, reason: str, message: str = "") -> Stated:
    return Stated(kind, status, reason, message[:32768])


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
    if inputs.refusal is not None:
        return _condition(CONDITION_PLACED, "False", inputs.refusal.outlook.value, inputs.refusal.message)
    former = _former(sharepod.status, CONDITION_PLACED)
    if sharepod.ended or (former is not None and former.status != "True"):
        return former
    no_pod = inputs.blocked is not None and inputs.snapshot.pod is None
    text = "waits until its pod can be created: see condition PodReady" if no_pod else "waits for placement"
    return _condition(CONDITION_PLACED, "False", "Waiting", text)


def share(row: Tenant) -> str:
    """Return a row's share as users write it."""
    if row.mode is Mode.EXCLUSIVE:
        return "the whole GPU" if len(row.gpus) == 1 else "whole GPUs"
    each = "" if len(row.gpus) == 1 else " on each"
    return (
        f"request {format_fraction(row.request_milli)}, limit {format_fraction(row.limit_milli)}, "
        f"memory {size_down(row.memory)}{each}"
    )


def _pod_ready(was: SharePodStatus, inputs: StatusInputs, finish: Finish | None) -> Stated | None:
    pod = inputs.snapshot.pod
    kind = CONDITION_POD_READY
    if finish is not None:
        return _condition(kind, "False", finish.reason, finish.message)
    former = _former(was, kind)
    if was.phase in (Phase.SUCCEEDED, Phase.FAILED):
        return former
    if pod is None:
        if inputs.blocked is not None:
            return _condition(kind, "False", inputs.blocked.reason, inputs.blocked.message)
        if was.pod_uid is not None:
            return former
        return _condition(kind, "False", "NoPod", "")
    if pod.disrupted:
        return _condition(kind, "False", EndReason.EVICTED, pod.disrupted)
    if pod.deleting:
        return _condition(kind, "False", "PodDeleting", "the pod is being deleted; its share is kept until it is gone")
    if pod.waits_for_share:
        return _condition(
            kind, "False", "SchedulingGated", "the pod waits for its share; kube-scheduler sees it once it has one"
        )
    if pod.node is None:
        return _condition(
            kind, "False", "NotScheduled", pod.unschedulable or "kube-scheduler has not bound the pod yet"
        )
    if pod.ready:
        return _condition(kind, "True", "Ready")
    return _condition(kind, "False", "ContainersNotReady", pod.waiting)


def _enforced(was: SharePodStatus, inputs: StatusInputs) -> Stated | None:
    row, pod, seen = inputs.row, inputs.snapshot.pod, inputs.seen
    if row is None or pod is None or pod.node is None:
        return (
            _former(was, CONDITION_ENFORCED)
            if pod is not None or was.phase in (Phase.SUCCEEDED, Phase.FAILED)
            else None
        )
    if row.mode is Mode.EXCLUSIVE:
        return _condition(CONDITION_ENFORCED, "True", "Exclusive", "no other tenant uses its GPUs")
    findings = seen.findings if seen is not None else ()
    said = {finding.reason: finding.message for finding in findings}
    message = "; ".join(finding.message for finding in findings)
    if seen is None or (seen.enforced is None and FindingReason.PROCESSES_NOT_TOLD not in said):
        message = "; ".join(filter(None, ("no process of the pod has used CUDA yet", message)))
        return _condition(CONDITION_ENFORCED, "Unknown", "NoCudaCall", message)
    if seen.enforced is None:
        return _condition(CONDITION_ENFORCED, "Unknown", FindingReason.PROCESSES_NOT_TOLD.value, message)
    if seen.enforced:
        return _condition(CONDITION_ENFORCED, "True", "HookConnected", message)
    grave = (FindingReason.PROCESS_WITHOUT_HOOK, FindingReason.BUSY_BEYOND_HELD)
    reason = next((reason for reason in grave if reason in said), FindingReason.PROCESS_WITHOUT_HOOK)
    text = message or (
        "a process of the pod uses the GPU without the hook, so its share is not enforced; "
        "images built on musl (Alpine) do not load it: use one built on glibc"
    )
    return _condition(CONDITION_ENFORCED, "False", reason.value, text)


def _gpu_healthy(was: SharePodStatus, inputs: StatusInputs, over: bool) -> Stated | None:
    former = _former(was, CONDITION_GPU_HEALTHY)
    if inputs.row is None or inputs.gpus is None or over:
        return former
    failed = [gpu for gpu in inputs.gpus if gpu.health is Health.UNHEALTHY]
    if failed:
        which = "; ".join(f"GPU {gpu.index} of {inputs.node} has failed: {gpu.reason}" for gpu in failed)
        advice = "what runs there may fail or hang; to have it placed on another GPU, create the SharePod again"
        return _condition(CONDITION_GPU_HEALTHY, "False", "GpuFailed", f"{which}. {advice}")
    return _condition(CONDITION_GPU_HEALTHY, "True", "GpuRecovered") if former is not None else None


def _resized(sharepod: SharePodFacts, inputs: StatusInputs, over: bool) -> Stated | None:
    was = sharepod.status
    former = _former(was, CONDITION_RESIZED)
    if inputs.row is None or over:
        return former
    if sharepod.error is not None:
        return _condition(CONDITION_RESIZED, "False", "Invalid", f"{sharepod.error}; keeps {share(inputs.row)}")
    if inputs.resizing:
        refusal = inputs.resize_refusal
        if refusal is None:
            return former
        return _condition(CONDITION_RESIZED, "False", refusal.outlook.value, refusal.message)
    changed = was.granted is not None and was.granted.dump() != _granted(inputs.row)
    if changed or (former is not None and former.status == "False"):
        return _condition(CONDITION_RESIZED, "True", "Granted", share(inputs.row))
    return former


def _dated(was: SharePodStatus, item: Stated, now: str, generation: int) -> Json:
    former = next((known for known in was.conditions if known.type == item.type), None)
    since = former.last_transition_time if former is not None and former.status == item.status else None
    return {
        "type": item.type,
        "status": item.status,
        "reason": str(item.reason),
        "message": item.message,
        "lastTransitionTime": since or now,
        "observedGeneration": generation,
    }
