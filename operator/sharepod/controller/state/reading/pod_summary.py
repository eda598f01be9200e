"""Summary of a Pod as `kubectl get pods` shows it: READY and STATUS. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from sharepod.api.bounds import MAX_LABEL

Json = Mapping[str, Any]

_TERMINAL = ("Succeeded", "Failed")


def ready_containers(spec: Json, status: Json) -> str:
    """Return the numbers of ready containers and of all containers as text, such as `1/2`. Sidecars count."""
    sidecars = _sidecars(spec)
    ready = sum(
        bool(item.get("ready"))
        for item in (
            *(status.get("containerStatuses") or ()),
            *(item for item in status.get("initContainerStatuses") or () if item.get("name") in sidecars),
        )
    )
    return f"{ready}/{len(spec.get('containers') or ()) + len(sidecars)}"


def summary(metadata: Json, spec: Json, status: Json) -> str:
    """Return the STATUS of a Pod: its phase, or the reason of the container that prevents it from running."""
    phase = str(status.get("phase") or "Pending")
    conditions = {item.get("type"): item for item in status.get("conditions") or ()}
    found = str(status.get("reason") or "") or phase
    if spec.get("schedulingGates"):
        found = "SchedulingGated"
    starting = _starting(spec, status)
    if starting and not _true(conditions, "Initialized"):
        found = starting
    else:
        found = _of_containers(status.get("containerStatuses") or (), found, ready=_true(conditions, "Ready"))
    if metadata.get("deletionTimestamp") and phase not in _TERMINAL:
        found = "Terminating"
    return found[:MAX_LABEL]


def _true(conditions: Mapping[Any, Json], kind: str) -> bool:
    return (conditions.get(kind) or {}).get("status") == "True"


def _sidecars(spec: Json) -> set[Any]:
    """Return the names of the sidecars: init containers that run as long as the containers."""
    return {item.get("name") for item in spec.get("initContainers") or () if item.get("restartPolicy") == "Always"}


def _starting(spec: Json, status: Json) -> str:
    """Return the STATUS for the first init container that is not done. Empty if all are done."""
    sidecars = _sidecars(spec)
    statuses: Sequence[Json] = status.get("initContainerStatuses") or ()
    for number, item in enumerate(statuses):
        state = item.get("state") or {}
        terminated, waiting = state.get("terminated"), state.get("waiting") or {}
        if terminated is not None and not terminated.get("exitCode"):
            continue
        if item.get("name") in sidecars and item.get("started"):
            continue
        if terminated is not None:
            return f"Init:{_how(terminated)}"
        if waiting.get("reason") and waiting["reason"] != "PodInitializing":
            return f"Init:{waiting['reason']}"
        return f"Init:{number}/{len(spec.get('initContainers') or ())}"
    return ""


def _of_containers(statuses: Sequence[Json], found: str, *, ready: bool) -> str:
    """Return the STATUS for the first container that waits or has ended; `found` if there is none."""
    found = next(_reasons(statuses), found)
    running = any((item.get("state") or {}).get("running") is not None and item.get("ready") for item in statuses)
    if found == "Completed" and running:
        return "Running" if ready else "NotReady"
    return found


def _reasons(statuses: Sequence[Json]) -> Iterator[str]:
    for item in statuses:
        state = item.get("state") or {}
        waiting, terminated = state.get("waiting") or {}, state.get("terminated")
        if waiting.get("reason"):
            yield str(waiting["reason"])
        elif terminated is not None:
            yield _how(terminated)


def _how(terminated: Json) -> str:
    """Return how a container ended: the kubelet's reason, else its signal or exit code."""
    if terminated.get("reason"):
        return str(terminated["reason"])
    if terminated.get("signal"):
        return f"Signal:{terminated['signal']}"
    return f"ExitCode:{terminated.get('exitCode')}"
