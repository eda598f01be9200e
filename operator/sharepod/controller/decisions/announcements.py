"""Which Events a SharePod's new status is worth.

Guarantees: what is said was not said before in the same words, or had ceased to be so meanwhile.
"""

from __future__ import annotations

from sharepod.api.gpunode import FindingReason, TenantStatus
from sharepod.api.objects import Condition
from sharepod.api.sharepod import (
    CONDITION_ENFORCED,
    CONDITION_GPU_HEALTHY,
    CONDITION_PLACED,
    CONDITION_RESIZED,
    KIND,
    Phase,
    SharePodStatus,
)
from sharepod.controller.apiserver.events import Events
from sharepod.controller.state.facts import SharePodFacts
from sharepod.controller.state.memos import TenantMemo

from .lifecycle import Finish


def announce(
    events: Events,
    sharepod: SharePodFacts,
    written: SharePodStatus,
    finish: Finish | None,
    memo: TenantMemo,
    seen: TenantStatus | None,
) -> None:
    """Tells of what the status that was `written`, and the agent (`seen`), say now and did not before."""
    if finish is not None:
        tell = events.normal if finish.phase is Phase.SUCCEEDED else events.warning
        tell(KIND, sharepod, finish.reason, "Finish", finish.message)
        return
    for condition in written.conditions:
        if memo.announced.get(condition.type) != condition.reason + condition.message:
            memo.announced[condition.type] = condition.reason + condition.message
            _announce_condition(events, sharepod, condition, found=bool(seen is not None and seen.findings))
    findings = {finding.reason: finding.message for finding in seen.findings} if seen is not None else {}
    for reason in FindingReason:
        if reason not in findings:
            memo.announced.pop(reason, None)
        elif memo.announced.get(reason) != findings[reason]:
            memo.announced[reason] = findings[reason]
            events.warning(KIND, sharepod, reason.value, "Watch", findings[reason])


def _announce_condition(events: Events, sharepod: SharePodFacts, condition: Condition, *, found: bool) -> None:
    """`found`: the agent has findings, which speak for themselves."""
    tell = events.normal if condition.status == "True" else events.warning
    if condition.type == CONDITION_PLACED and condition.reason != "Waiting":
        reason = "Placed" if condition.status == "True" else condition.reason
        tell(KIND, sharepod, reason, "Place", condition.message)
    elif condition.type == CONDITION_RESIZED:
        tell(KIND, sharepod, f"Resize{condition.reason}", "Resize", condition.message)
    elif condition.type == CONDITION_GPU_HEALTHY or (
        condition.type == CONDITION_ENFORCED and condition.status == "False" and not found
    ):
        tell(KIND, sharepod, condition.reason, "Watch", condition.message)
