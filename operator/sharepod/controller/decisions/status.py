"""Status of a SharePod: composes it from the inputs, and computes the patch to the stored status. Pure.

Guarantees:
- The patch is empty if the status is unchanged.
- A terminal phase never changes.
- Inputs with equal `looked_at` give equal statuses, except for times. So a caller may skip `compose`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sharepod.api.gpunode import Gpu, Tenant, TenantStatus
from sharepod.api.sharepod import (
    GpuRequest,
    Phase,
    SharePodStatus,
)
from sharepod.api.units import format_fraction
from sharepod.controller.state.facts.pod_facts import PodFacts
from sharepod.controller.state.facts.sharepod_facts import SharePodFacts
from sharepod.controller.state.memos import BlockedReason
from sharepod.controller.state.reading.timestamps import seconds, text_of
from sharepod.placement.wording import size_exact, size_near

from .conditions import (
    Stated,
    StatusInputs,
    between_runs,
    enforced,
    gpu_healthy,
    granted,
    of_run,
    overall,
    resized,
)
from .ends import EndReason
from .steps import Ending, EndRun, Finish

Json = dict[str, Any]

MINOR = frozenset({"conditions", "usage", "observedGeneration", "restarts", "summary", "readyContainers", "podIP"})
"""Fields of the status that only inform users. No decision depends on them."""


def compose(sharepod: SharePodFacts, inputs: StatusInputs, finish: Ending | None = None) -> Json:
    """Return the status that the SharePod should have now, as JSON. With `finish`: the status after that end of a
    run."""
    was = sharepod.status
    pod, row = inputs.snapshot.pod, inputs.row
    between = isinstance(finish, EndRun) or (finish is None and not sharepod.ended and inputs.snapshot.between_runs)
    if isinstance(finish, Finish):
        phase = finish.phase
    elif between:
        phase = Phase.PENDING
    elif sharepod.ended:
        phase = Phase.SUCCEEDED if was.succeeded else Phase.FAILED
    else:
        phase = _phase(pod, row)
    over = sharepod.ended or isinstance(finish, Finish)
    gpus = _gpus(was, row, inputs.gpus or ()) if row is not None else [gpu.dump() for gpu in was.gpus] if over else []
    last = _last_end(was, inputs, finish)
    stated = between_runs(inputs, last) if between else of_run(sharepod, inputs, gpus, finish)
    stated += overall(phase, *stated)
    stated += (enforced(was, inputs), gpu_healthy(was, inputs, over), resized(sharepod, inputs, over))
    status: Json = {
        "phase": phase.value,
        "node": inputs.node if row is not None else was.node if over else None,
        "gpus": gpus or None,
        "gpuIndexes": ",".join(str(gpu["index"]) for gpu in gpus) or None,
        "summary": _summary(was, phase, pod, row, stated),
        "readyContainers": pod.containers if pod is not None else was.ready_containers if over else None,
        "podIP": (pod.address or None) if pod is not None and not pod.ended else None,
        "replicas": 0 if between or over or pod is None or pod.waits_for_share or pod.taken_back else 1,
        "podName": pod.name if pod is not None else was.pod_name if over else None,
        "podUID": _pod_uid(was, pod, between=between),
        "startTime": None if between else _start_time(was, pod),
        "endTime": (was.end_time if sharepod.ended and was.end_time else inputs.now) if over else None,
        "restarts": _restarts(was, pod, between=between, last=last),
        "lastEnd": last,
        "movesTo": _moves_to(was, inputs, between=between, over=over),
        "granted": granted(row) if row is not None else was.granted.dump() if over and was.granted else None,
        "share": _shown(row, sharepod.gpu) if row is not None or not over else was.share.dump() if was.share else None,
        "usage": None if over or between else _usage(was, inputs.seen, inputs.usage_due),
        "consumed": known.dump() if (known := inputs.consumed or was.consumed) is not None else None,
        "conditions": [_dated(was, item, inputs.now, sharepod.generation) for item in stated if item is not None],
        "observedGeneration": sharepod.generation,
    }
    return {key: value for key, value in status.items() if value is not None}


def _summary(
    was: SharePodStatus, phase: Phase, pod: PodFacts | None, row: Tenant | None, stated: Sequence[Stated | None]
) -> str:
    """Return the column STATUS for `kubectl get`: the Pod's STATUS while it has a share, otherwise the reason why it
    has none.

    Args:
        was: The present status.
        phase: The phase to show.
        pod: The Pod.
        row: Its row.
        stated: The conditions: Placed, PodReady, then others.
    """
    placed, pod_ready = stated[0], stated[1]
    if phase is Phase.SUCCEEDED:
        return "Completed"
    if phase is Phase.FAILED:
        if pod_ready is not None and pod_ready.reason != EndReason.POD_FAILED:
            return pod_ready.reason
        # the reason of a failed container, such as Error, OOMKilled or ContainerCannotRun
        if pod is not None and pod.ended:
            return pod.summary
        return was.summary if was.ended and was.summary else "Error"
    if row is not None and pod is not None and not pod.waits_for_share and (placed is None or placed.status == "True"):
        return pod.summary
    if placed is not None and placed.status != "True" and placed.reason != "Waiting":
        return placed.reason
    if pod_ready is None or pod_ready.reason == "NoPod":
        return "Pending"
    return pod_ready.reason if pod is None or pod_ready.reason == BlockedReason.FORBIDDEN else "Pending"


def _pod_uid(was: SharePodStatus, pod: PodFacts | None, *, between: bool) -> str | None:
    """Return the uid of the Pod of the present run. None between two runs, and if the Pod is being withdrawn."""
    if between or (pod is not None and pod.taken_back):
        return None
    return pod.uid if pod is not None and not pod.waits_for_share else was.pod_uid


def _start_time(was: SharePodStatus, pod: PodFacts | None) -> str | None:
    """Return the time at which the kubelet accepted the Pod of the present run. It is left out until a container runs,
    because another write of the status follows then anyway.
    """
    if pod is None or pod.waits_for_share:
        return was.start_time if was.pod_uid is not None else None
    return (pod.started or None) if pod.phase != "Pending" else None


def _restarts(was: SharePodStatus, pod: PodFacts | None, *, between: bool, last: Json | None) -> int:
    """Return how often containers were restarted or the Pod was replaced, in all runs."""
    former = int(last["restarts"]) if last is not None else 0
    if between or (pod is not None and pod.waits_for_share):
        return former
    return former + pod.restarted if pod is not None else was.restarts or former


def _moves_to(was: SharePodStatus, inputs: StatusInputs, *, between: bool, over: bool) -> Json | None:
    """Return the place that is reserved for a moving SharePod. It is shown while its old Pod ends, and until its next
    Pod has a share.
    """
    pod, kept = inputs.snapshot.pod, inputs.moves_to or was.moves_to
    waits = pod is None or pod.deleting or (pod.waits_for_share and inputs.row is None)
    return kept.dump() if kept is not None and (between or waits) and not over else None


def _last_end(was: SharePodStatus, inputs: StatusInputs, finish: Ending | None) -> Json | None:
    """Return `lastEnd` of the status: the record of the run that ends now, otherwise the stored value."""
    if not isinstance(finish, EndRun):
        return was.last_end.dump() if was.last_end is not None else None
    pod = inputs.snapshot.pod
    former = was.last_end.restarts if was.last_end is not None else 0
    restarts = former + pod.restarted if pod is not None else was.restarts or former
    end: Json = {
        "podUID": finish.pod_uid,
        "node": finish.node,
        "cause": finish.cause.value,
        "message": finish.message,
        "endedAt": inputs.now,
        "retryAt": text_of((seconds(inputs.now) or 0.0) + finish.pause_s),
        "attempts": finish.attempts,
        "restarts": restarts + 1,
    }
    return {key: value for key, value in end.items() if value is not None}


def looked_at(sharepod: SharePodFacts, inputs: StatusInputs, finish: Ending | None = None) -> tuple[object, ...]:
    """Return all inputs of `compose` except times, as a tuple that is cheap to compare."""
    seen = inputs.seen
    return (
        sharepod,
        inputs.snapshot.pod,
        inputs.snapshot.namespace_ends,
        inputs.node,
        inputs.row,
        inputs.gpus,
        inputs.missing_gpus,
        (seen.connected, seen.enforced, seen.findings) if seen is not None else None,
        (seen.held_milli, seen.progress_milli, seen.memory) if seen is not None and inputs.usage_due else None,
        inputs.usage_due,
        inputs.refusal,
        inputs.resize_refusal,
        inputs.resizing,
        inputs.blocked,
        inputs.unreachable,
        inputs.snapshot.between_runs,
        inputs.consumed,
        inputs.moves_to,
        finish,
    )


def major(sharepod: SharePodFacts, inputs: StatusInputs, finish: Ending | None = None) -> tuple[object, ...]:
    """Return the inputs of the fields on which the next steps depend. All other inputs affect only fields in
    `MINOR`."""
    pod = inputs.snapshot.pod
    return (
        (pod.name, pod.uid, pod.phase, pod.waits_for_share, pod.taken_back, pod.started) if pod is not None else None,
        inputs.snapshot.between_runs,
        inputs.node,
        inputs.row,
        inputs.gpus,
        sharepod.gpu,
        inputs.consumed,
        (inputs.moves_to, pod is None or pod.deleting) if inputs.moves_to is not None else None,
        finish,
    )


def difference(written: Mapping[str, Any], wanted: Mapping[str, Any]) -> Json:
    """Return the merge patch that turns the stored status into the wanted status. Empty if they are equal.

    The order of conditions does not count, because server-side apply keeps the stored order.
    """
    changes: Json = {key: value for key, value in wanted.items() if written.get(key) != value}
    if "conditions" in changes and _by_type(written.get("conditions")) == _by_type(changes["conditions"]):
        del changes["conditions"]
    changes |= {key: None for key in written if key not in wanted}
    # A merge patch keeps the fields that it does not name: set the former value's fields to null.
    for key in ("usage", "consumed", "granted", "share", "lastEnd", "movesTo"):
        if isinstance(changes.get(key), dict):
            changes[key] = dict.fromkeys(written.get(key) or {}) | changes[key]
    return changes


def _by_type(conditions: object) -> list[Json]:
    """Return conditions sorted by type. Any other value is returned in a list, so that it compares unequal."""
    if not isinstance(conditions, list) or not all(isinstance(item, dict) for item in conditions):
        return [{"": conditions}]
    return sorted(conditions, key=lambda item: str(item.get("type")))


def _phase(pod: PodFacts | None, row: Tenant | None) -> Phase:
    if pod is not None and pod.phase == "Running":
        return Phase.RUNNING
    return Phase.PLACED if row is not None else Phase.PENDING


def gpus_of(row: Tenant, gpus: Sequence[Gpu]) -> tuple[Gpu, ...]:
    """Return the GPUs of a row, selected from the node's GPUs."""
    return tuple(gpu for gpu in gpus if gpu.uuid in row.gpus)


def _gpus(was: SharePodStatus, row: Tenant, reported: Sequence[Gpu]) -> list[Json]:
    known = {gpu.uuid: gpu.dump() for gpu in was.gpus if gpu.uuid in row.gpus} | {
        str(gpu.uuid): {"uuid": str(gpu.uuid), "index": gpu.index, "model": gpu.model} for gpu in reported
    }
    return [known[uuid] for uuid in row.gpus if uuid in known]


def _shown(row: Tenant | None, request: GpuRequest | None) -> Json | None:
    if row is not None:
        asked = request is not None and request.memory == row.memory
        share, memory = (row.request_milli, row.limit_milli), (size_exact if asked else size_near)(row.memory)
    elif request is not None:
        share = (request.request_milli, request.limit_milli)
        memory = size_exact(request.memory) if request.memory is not None else ""
    else:
        return None
    return {"request": format_fraction(share[0]), "limit": format_fraction(share[1]), "memory": memory}


def _usage(was: SharePodStatus, seen: TenantStatus | None, due: bool) -> Json | None:
    if not due:
        return was.usage.dump() if was.usage is not None else None
    if seen is None or seen.held_milli is None:
        return None
    progress = {} if seen.progress_milli is None else {"progress": format_fraction(seen.progress_milli)}
    shown = {"shown": format_fraction(seen.held_milli), "memoryShown": size_near(seen.memory)}
    return {"heldMilli": seen.held_milli, "memory": seen.memory} | shown | progress


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
