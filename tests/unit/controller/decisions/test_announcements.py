"""Events that a status causes: each fact causes one Event, and another only if it had ceased to be true."""

from __future__ import annotations

from dataclasses import replace

import pytest
from sharepod.api.gpunode import Finding, FindingReason, TenantStatus
from sharepod.api.objects import Condition
from sharepod.api.sharepod import Phase, SharePodStatus
from sharepod.controller.decisions.announcements import Announcement, announced_before, announcements
from sharepod.controller.decisions.steps import Finish
from sharepod.placement.state.types import Obstacle, Outlook, Refusal
from unit.controller.objects import TENANT

NOTHING = SharePodStatus().dump()


def status(kind: str, value: str, reason: str, message: str = "m") -> dict[str, object]:
    return SharePodStatus(conditions=(Condition(type=kind, status=value, reason=reason, message=message),)).dump()


def seen(*reasons: FindingReason, message: str = "f") -> TenantStatus:
    return TenantStatus(id=TENANT, findings=tuple(Finding(reason=reason, message=message) for reason in reasons))


@pytest.mark.parametrize(
    ("kind", "value", "reason", "announced"),
    [
        ("Placed", "True", "Reserved", None),
        ("Placed", "False", "NoRoom", Announcement(True, "NoRoom", "Place", "m")),
        ("Placed", "False", "Waiting", None),
        ("Resized", "True", "Granted", Announcement(False, "ResizeGranted", "Resize", "m")),
        ("Resized", "False", "NoRoom", Announcement(True, "ResizeNoRoom", "Resize", "m")),
        ("GPUHealthy", "False", "GpuFailed", Announcement(True, "GpuFailed", "Watch", "m")),
        ("GPUHealthy", "True", "GpuRecovered", Announcement(False, "GpuRecovered", "Watch", "m")),
        ("Enforced", "False", "ProcessWithoutHook", Announcement(True, "ProcessWithoutHook", "Watch", "m")),
        ("Resized", "Unknown", "Waiting", None),
        ("Enforced", "Unknown", "NoCudaCall", None),
        ("Enforced", "True", "HookConnected", None),
        ("PodReady", "False", "NotScheduled", None),
    ],
)
def test_what_a_condition_is_worth(kind: str, value: str, reason: str, announced: Announcement | None) -> None:
    written = status(kind, value, reason)
    found, known = announcements(written, None, None, {})
    assert found == ([announced] if announced is not None else [])
    assert announcements(written, None, None, known) == ([], known), "announced once"
    again, _ = announcements(status(kind, value, reason, "other words"), None, None, known)
    assert len(again) == (announced is not None)


def test_a_placement_is_reported_only_to_a_sharepod_that_waited_for_it() -> None:
    _, waits = announcements(status("Placed", "False", "NoRoom"), None, None, {})
    found, known = announcements(status("Placed", "True", "Reserved"), None, None, waits)
    assert found == [Announcement(False, "Placed", "Place", "m")]
    assert announcements(status("Placed", "True", "Reserved", "resized"), None, None, known)[0] == []


@pytest.mark.promise("operator-started")
def test_the_start_of_each_run_is_told_once_with_the_ways_to_look_into_it() -> None:
    running = SharePodStatus(
        pod_name="one", pod_uid="pod-1", node="node-a", gpu_indexes="0,1", start_time="2026-01-01T00:00:00Z"
    )
    (event,), known = announcements(running.dump(), None, None, {})
    assert (event.reason, event.warning, event.hint) == ("Started", False, True)
    assert event.message.startswith("runs on node-a, GPUs 0,1;")
    assert event.message.endswith("; kubectl logs, exec and port-forward take pod one")
    assert announcements(running.dump(), None, None, known) == ([], known)
    assert announcements(running.dump(), None, None, announced_before(running, None))[0] == [], (
        "announced by a predecessor"
    )
    placed = running.model_copy(update={"start_time": None})
    assert announcements(placed.dump(), None, None, {})[0] == []
    (again,), _ = announcements(running.model_copy(update={"pod_uid": "pod-2"}).dump(), None, None, known)
    assert again.reason == "Started"


@pytest.mark.promise("operator-events-brief")
def test_the_event_of_a_refusal_is_brief_and_names_what_would_fit() -> None:
    refusal = Refusal(
        outlook=Outlook.WAITING,
        headline="0/3 nodes can take it",
        obstacles=(
            Obstacle("Taint", "node", 12, "12 nodes have a taint"),
            Obstacle("Time", "GPU", 9, "9 GPUs have too little time free (most free: 0.3 of a GPU 1; asked 0.5)"),
        ),
        advice="It will be placed automatically as soon as there is room.",
    )
    for fits_now, text in (
        ("", "0/3 nodes can take it: 9 GPUs have too little time free"),
        ("spec.gpu.request 0.3", "0/3 nodes can take it: spec.gpu.request 0.3 would fit now"),
    ):
        found = replace(refusal, fits_now=fits_now)
        written = status("Placed", "False", "NoRoom", found.message)
        (event,), _ = announcements(written, None, None, {}, (found, None))
        assert event.message == text


def test_an_end_is_told_alone_and_as_what_it_is() -> None:
    written = status("Placed", "True", "Reserved")
    finding = seen(FindingReason.OVERTAKEN)
    good = announcements(written, Finish(Phase.SUCCEEDED, "Completed", "fine"), finding, {"a": "b"})
    assert good == ([Announcement(False, "Completed", "Finish", "fine")], {"a": "b"})
    bad, _ = announcements(written, Finish(Phase.FAILED, "PodLost", "deleted"), finding, {})
    assert bad == [Announcement(True, "PodLost", "Finish", "deleted")]


def test_a_finding_speaks_for_itself_and_not_through_the_condition_too() -> None:
    written = status("Enforced", "False", "ProcessWithoutHook")
    found, _ = announcements(written, None, seen(FindingReason.PROCESS_WITHOUT_HOOK), {})
    assert found == [Announcement(True, "ProcessWithoutHook", "Watch", "f")]


def test_a_finding_is_reported_again_when_its_message_changes_or_it_returns() -> None:
    events, known = announcements(NOTHING, None, seen(FindingReason.OVERTAKEN), {})
    assert [item.reason for item in events] == ["Overtaken"]
    assert announcements(NOTHING, None, seen(FindingReason.OVERTAKEN), known)[0] == []
    assert len(announcements(NOTHING, None, seen(FindingReason.OVERTAKEN, message="g"), known)[0]) == 1
    nothing, ceased = announcements(NOTHING, None, None, known)
    assert nothing == []
    assert len(announcements(NOTHING, None, seen(FindingReason.OVERTAKEN), ceased)[0]) == 1


def test_known_announcements_are_not_changed_in_place() -> None:
    known: dict[str, str] = {}
    announcements(status("Placed", "True", "Reserved"), None, seen(FindingReason.OVERTAKEN), known)
    assert known == {}
