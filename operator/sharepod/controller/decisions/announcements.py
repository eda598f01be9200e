"""Events that a change of a SharePod's status causes. Pure.

Guarantees:
- An Event with the same message is repeated only after its cause had ended.
- When a SharePod reaches a terminal phase, only the Event about its end is written.
- A run that starts without obstacles causes one Event, at its start. A placement without a wait causes none.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from sharepod.api.gpunode import FindingReason, TenantStatus
from sharepod.api.sharepod import (
    CONDITION_ENFORCED,
    CONDITION_GPU_HEALTHY,
    CONDITION_PLACED,
    CONDITION_RESIZED,
    Phase,
    SharePodStatus,
)
from sharepod.placement.state.types import Refusal

from .steps import Ending, Finish

_SILENT = ("Waiting", "Releasing", "BackOff")
"""Reasons of the condition Placed that cause no Event: the Event about the end of the former run has reported them."""


_FINDINGS = tuple(str(reason) for reason in FindingReason)
_STARTED = "Started"
"""Reason of the Event at the start of a run. Also its key in `announced`; the value is the uid of that run's Pod."""


@dataclass(frozen=True, slots=True)
class Announcement:
    """One Event about a SharePod. `warning`: True for type Warning, False for Normal."""

    warning: bool
    reason: str
    action: str
    message: str
    hint: bool = False
    """True for an Event of little importance: it is dropped while many Events wait to be written."""


def announcements(
    written: Mapping[str, Any],
    finish: Ending | None,
    seen: TenantStatus | None,
    announced: Mapping[str, str],
    refusals: Iterable[Refusal | None] = (),
) -> tuple[list[Announcement], dict[str, str]]:
    """Return the Events to write and the next value of `announced`.

    Args:
        written: The status just written, from `status.compose`.
        finish: End of the SharePod or its run that this status records; None if it records no end.
        seen: The agent's report of the tenant; None without one.
        announced: Message of the last Event, by condition type or finding.
        refusals: Refusals behind the conditions. The Event of such a condition has the refusal's brief text.
    """
    known = dict(announced)
    if finish is not None and not isinstance(finish, Finish):
        retry_at = written["lastEnd"]["retryAt"]
        text = f"{finish.message}; it is placed again at {retry_at}"
        return [Announcement(True, finish.cause, "Restart", text)], known
    if finish is not None:
        return [Announcement(finish.phase is not Phase.SUCCEEDED, finish.reason, "Finish", finish.message)], known
    found: list[Announcement] = []
    briefs = {refusal.message: refusal.brief for refusal in refusals if refusal is not None}
    findings = {finding.reason: finding.message for finding in seen.findings} if seen is not None else {}
    run = written.get("podUID") if written.get("startTime") else None
    if run is not None and known.get(_STARTED) != run:
        known[_STARTED] = run
        found.append(Announcement(False, _STARTED, "Start", _started(written), hint=True))
    for condition in written["conditions"]:
        words, former = condition["reason"] + condition["message"], known.get(condition["type"])
        if former == words:
            continue
        known[condition["type"]] = words
        waited = former is not None and not former.startswith("Reserved")
        message = briefs.get(condition["message"], condition["message"])
        found += _of_condition({**condition, "message": message}, waited=waited, findings=bool(findings))
    for reason in _FINDINGS:
        if reason not in findings:
            known.pop(reason, None)
    for reason, message in sorted(findings.items()):
        if known.get(reason) != message:
            known[reason] = message
            found.append(Announcement(True, str(reason), "Watch", message))
    return found, known


def _started(written: Mapping[str, Any]) -> str:
    """Return the Event's text at the start of a run: node, GPUs, and the Pod's name for kubectl."""
    gpus = written.get("gpuIndexes") or ""
    place = f"{written.get('node')}, {'GPUs' if ',' in gpus else 'GPU'} {gpus}"
    return f"runs on {place}; kubectl logs, exec and port-forward take pod {written.get('podName')}"


def _of_condition(condition: Mapping[str, Any], *, waited: bool, findings: bool) -> Iterator[Announcement]:
    """Yield the Event of a condition, if any.

    Args:
        condition: The condition.
        waited: True if an earlier status showed that the SharePod waits for a place.
        findings: True if the agent reports findings, which have their own Events.
    """
    kind, reason, message = condition["type"], condition["reason"], condition["message"]
    warning = condition["status"] != "True"
    if kind == CONDITION_PLACED and reason not in _SILENT and (warning or waited):
        yield Announcement(warning, reason if warning else "Placed", "Place", message)
    elif kind == CONDITION_RESIZED and condition["status"] != "Unknown":
        yield Announcement(warning, f"Resize{reason}", "Resize", message)
    elif kind == CONDITION_GPU_HEALTHY or (
        kind == CONDITION_ENFORCED and condition["status"] == "False" and not findings
    ):
        yield Announcement(warning, reason, "Watch", message)


def announced_before(written: SharePodStatus, seen: TenantStatus | None) -> dict[str, str]:
    """Return the first value of `announced` in a new process, from the stored status: the Events that former processes
    have written.

    A finding counts as announced if the condition Enforced names it.
    """
    known = {condition.type: condition.reason + condition.message for condition in written.conditions}
    if written.start_time and written.pod_uid:
        known[_STARTED] = written.pod_uid
    for finding in seen.findings if seen is not None else ():
        if finding.message in known.get(CONDITION_ENFORCED, ""):
            known[finding.reason] = finding.message
    return known
