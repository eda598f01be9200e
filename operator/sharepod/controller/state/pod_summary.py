"""Summary of a Pod in the words of `kubectl get pods`: READY and STATUS. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from sharepod.api.bounds import MAX_LABEL

Json = Mapping[str, Any]


def ready_containers(spec: Json, status: Json) -> str:
    """Return how many containers are ready and how many there are: `1/2`."""
    ready = sum(bool(item.get("ready")) for item in status.get("containerStatuses") or ())
    return f"{ready}/{len(spec.get('containers') or ())}"


def summary(metadata: Json, spec: Json, status: Json) -> str:
    """Return the STATUS of a Pod: its phase, or the reason of the container that keeps it from running."""
    found = str(status.get("reason") or "") or str(status.get("phase") or "Pending")
    if any(item.get("reason") == "SchedulingGated" for item in status.get("conditions") or ()):
        found = "SchedulingGated"
    found = _starting(spec, status) or _of_containers(status.get("containerStatuses") or (), found)
    if metadata.get("deletionTimestamp"):
        found = "Terminating"
    return found[:MAX_LABEL]


def _starting(spec: Json, status: Json) -> str:
    """Return what the init container says that is not done; empty if all are."""
    listed = spec.get("initContainers") or ()
    restarted = {item.get("name") for item in listed if item.get("restartPolicy") == "Always"}
    statuses: Sequence[Json] = status.get("initContainerStatuses") or ()
    for number, item in enumerate(statuses):
        state = item.get("state") or {}
        terminated, waiting = state.get("terminated"), state.get("waiting") or {}
        if terminated is not None and not terminated.get("exitCode"):
            continue
        if item.get("name") in restarted and item.get("started"):
            continue
        if terminated is not None:
            return f"Init:{terminated.get('reason') or 'ExitCode:' + str(terminated.get('exitCode'))}"
        if waiting.get("reason") and waiting["reason"] != "PodInitializing":
            return f"Init:{waiting['reason']}"
        return f"Init:{number}/{len(listed)}"
    return ""


def _of_containers(statuses: Sequence[Json], found: str) -> str:
    reasons = list(_reasons(statuses))
    if reasons:
        found = reasons[0]
    running = any((item.get("state") or {}).get("running") is not None and item.get("ready") for item in statuses)
    return "Running" if found == "Completed" and running else found


def _reasons(statuses: Sequence[Json]) -> Iterator[str]:
    for item in statuses:
        state = item.get("state") or {}
        waiting, terminated = state.get("waiting") or {}, state.get("terminated")
        if waiting.get("reason"):
            yield str(waiting["reason"])
        elif terminated is not None:
            yield str(terminated.get("reason") or f"ExitCode:{terminated.get('exitCode')}")
