"""The status of a SharePod: its content, and when it is written."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from sharepod.api.gpunode import Finding, FindingReason, Gpu, Health, TenantStatus
from sharepod.api.sharepod import KeptPlace, Phase, SharePodConsumption, SharePodStatus, Usage
from sharepod.controller.decisions import status as composing
from sharepod.controller.decisions.conditions import StatusInputs
from sharepod.controller.decisions.ends import EndReason
from sharepod.controller.decisions.snapshot import TenantSnapshot
from sharepod.controller.decisions.status import MINOR, difference, gpus_of, looked_at, major
from sharepod.controller.decisions.steps import Finish
from sharepod.controller.state.facts.pod_facts import PodFacts
from sharepod.controller.state.facts.sharepod_facts import SharePodFacts
from sharepod.controller.state.gpunode_changes import usage_moved
from sharepod.controller.state.memos import Blocked, BlockedReason
from sharepod.placement.state.types import Obstacle, Outlook, Refusal
from unit.controller.objects import TENANT, pod, row, sharepod

GPUS = (Gpu(uuid="GPU-0", index=0, model="T", memory=1 << 34),)


def inputs(own: SharePodFacts, its_pod: PodFacts | None = None, **fields: Any) -> StatusInputs:
    values: dict[str, Any] = {
        "snapshot": TenantSnapshot(sharepod=own, pod=its_pod, reserved=()),
        "node": None,
        "row": None,
        "gpus": None,
        "seen": None,
        "refusal": None,
        "resize_refusal": None,
        "resizing": False,
        "blocked": None,
        "usage_due": True,
        "now": "2026-01-01T00:00:00Z",
    }
    return StatusInputs(**values | fields)


def placed(own: SharePodFacts, its_pod: PodFacts | None, **fields: Any) -> StatusInputs:
    its_row, seen = fields.pop("row", row()), TenantStatus(id=TENANT, **fields.pop("seen", {}))
    gpus = gpus_of(its_row, fields.pop("gpus", GPUS))
    return inputs(own, its_pod, **{"node": "node-a", "row": its_row, "gpus": gpus, "seen": seen} | fields)


def unreported(own: SharePodFacts) -> StatusInputs:
    """Return the inputs of a SharePod whose agent has not reported yet."""
    return inputs(own, node="node-a", row=row())


def compose(own: SharePodFacts, its: StatusInputs, finish: Finish | None = None) -> SharePodStatus:
    """Compose the status and read it as the API server does. This checks that the status is valid and no field of it is
    dropped."""
    composed = composing.compose(own, its, finish)
    status = SharePodStatus.model_validate(composed)
    assert status.dump() == composed
    return status


def patch(own: SharePodFacts, wanted: SharePodStatus) -> dict[str, Any]:
    return difference(own.raw_status, wanted.dump())


def condition(status: SharePodStatus, kind: str) -> tuple[str, str]:
    found = next(item for item in status.conditions if item.type == kind)
    return found.status, found.reason


def again(status: SharePodStatus) -> SharePodFacts:
    return sharepod(status=status.dump())


def test_an_unchanged_status_is_not_written_again() -> None:
    running = pod(node="node-a", phase="Running", conditions=[{"type": "Ready", "status": "True"}])
    first = compose(sharepod(), placed(sharepod(), running, seen={"connected": True, "held_milli": 5}))
    own = again(first)
    second = compose(own, placed(own, running, seen={"connected": True, "held_milli": 5}, now="2026-02-02T00:00:00Z"))
    assert patch(own, second) == {}


def test_in_a_namespace_that_ends_the_owner_reads_why_nothing_is_placed() -> None:
    own, waits = sharepod(), pod(gated=True)
    refused = inputs(own, waits, refusal=Refusal(outlook=Outlook.WAITING, headline="full"))
    ending = replace(refused, snapshot=replace(refused.snapshot, namespace_ends=True))
    assert condition(compose(own, refused), "Placed") == ("False", "NoRoom")
    assert condition(compose(own, ending), "Placed") == ("False", "NamespaceTerminating")
    assert looked_at(own, refused) != looked_at(own, ending)


def test_a_condition_keeps_its_time_until_its_status_turns() -> None:
    waiting = pod(node="node-a")
    own = again(compose(sharepod(), placed(sharepod(), waiting)))
    later = "2026-02-02T00:00:00Z"
    same = compose(own, placed(own, waiting, now=later))
    ready = pod(node="node-a", phase="Running", conditions=[{"type": "Ready", "status": "True"}])
    turned = compose(own, placed(own, ready, now=later))

    def since(status: SharePodStatus) -> str | None:
        return next(item.last_transition_time for item in status.conditions if item.type == "PodReady")

    assert since(same) == "2026-01-01T00:00:00Z"
    assert since(turned) == later


def test_one_whose_pod_is_gone_and_cannot_be_made_again_does_not_wait_for_room() -> None:
    """The SharePod's Pod waited for room and was deleted, and a smaller quota now forbids the next Pod. So the status
    names the quota, not the room."""
    blocked = Blocked(BlockedReason.FORBIDDEN, "exceeded quota", until=1.0)
    own = again(compose(sharepod(), inputs(sharepod(), pod(gated=True), refusal=REFUSAL)))
    assert condition(compose(own, inputs(own, pod(gated=True), refusal=REFUSAL)), "Ready") == ("False", "NoRoom")
    for refusal in (REFUSAL, None):
        status = compose(own, inputs(own, refusal=refusal, blocked=blocked))
        assert condition(status, "Placed") == ("False", "Waiting")
        assert condition(status, "Ready") == ("False", "PodForbidden")
        assert status.summary == "PodForbidden"


def test_status_fields_without_a_value_are_removed() -> None:
    own = again(compose(sharepod(), placed(sharepod(), None)))
    changes = patch(own, compose(own, inputs(own)))
    assert changes["node"] is None
    assert changes["granted"] is None
    assert changes["phase"] == "Pending"


def test_usage_is_kept_as_it_was_until_it_is_due() -> None:
    running = pod(node="node-a", phase="Running")
    own = again(compose(sharepod(), placed(sharepod(), running, seen={"connected": True, "held_milli": 5})))
    kept = compose(own, placed(own, running, seen={"connected": True, "held_milli": 9}, usage_due=False))
    assert kept.usage is not None
    assert kept.usage.held_milli == 5
    due = compose(own, placed(own, running, seen={"connected": True, "held_milli": 9, "memory": 3 << 29}))
    assert due.usage is not None
    assert due.usage.held_milli == 9
    assert due.usage.memory_shown == "1.5Gi"


def test_the_reason_for_waiting_is_placements_reason() -> None:
    refusal = Refusal(
        outlook=Outlook.NEVER,
        headline="0/1 nodes can take it",
        obstacles=(Obstacle("TooSmall", "node", 1, "too small"),),
        advice="Grow.",
    )
    status = compose(sharepod(), inputs(sharepod(), refusal=refusal))
    assert condition(status, "Placed") == ("False", "NeverFits")
    assert next(item.message for item in status.conditions if item.type == "Placed") == refusal.message


def test_what_has_ended_stays_so_whatever_its_phase_says_and_gets_an_end_time_if_it_has_none() -> None:
    former = {"phase": "Failed", "podUID": "p", "conditions": [{"type": "PodReady", "status": "False", "reason": "R"}]}
    for before in (former, {**former, "phase": "Resting", "endTime": "2026-01-01T00:00:00Z"}):
        own = sharepod(status=before)
        once = compose(own, inputs(own))
        assert (once.phase, once.end_time, once.ended) == ("Failed", "2026-01-01T00:00:00Z", True)
        again = sharepod(status=once.dump())
        assert compose(again, replace(inputs(again), now="2027-01-01T00:00:00Z")) == once


def test_a_terminal_phase_stays_with_what_it_had() -> None:
    running = pod(node="node-a", phase="Running")
    own = again(compose(sharepod(), placed(sharepod(), running)))
    ended = compose(own, placed(own, running), Finish(Phase.SUCCEEDED, "Completed", "done"))
    assert condition(ended, "PodReady") == ("False", "Completed")
    after = again(ended)
    assert patch(after, compose(after, inputs(after))) == {}
    assert after.status.node == "node-a"
    assert after.status.usage is None


def test_a_share_that_differs_from_the_request_is_reported_until_it_agrees() -> None:
    running = pod(node="node-a", phase="Running")
    own = again(compose(sharepod(), placed(sharepod(), running)))
    refusal = Refusal(
        outlook=Outlook.WAITING, headline="keeps request 0.4", obstacles=(Obstacle("Time", "GPU", 1, "too little"),)
    )
    refused = compose(own, placed(own, running, resizing=True, resize_refusal=refusal))
    assert condition(refused, "Resized") == ("False", "NoRoom")
    own = again(refused)
    granted = compose(own, placed(own, running, row=row(request_milli=900)))
    assert condition(granted, "Resized") == ("True", "Granted")
    assert granted.granted is not None
    assert granted.granted.request_milli == 900


def test_a_change_without_an_answer_does_not_count_as_granted() -> None:
    running = pod(node="node-a", phase="Running")
    first = again(compose(sharepod(), placed(sharepod(), running)))
    own = again(compose(first, placed(first, running, row=row(request_milli=900))))
    asked = compose(own, placed(own, running, row=row(request_milli=900), resizing=True))
    assert condition(asked, "Resized") == ("Unknown", "Waiting")
    own = again(asked)
    withdrawn = compose(own, placed(own, running, row=row(request_milli=900)))
    assert condition(withdrawn, "Resized") == ("True", "Granted")
    first_change = compose(first, placed(first, running, resizing=True))
    assert condition(first_change, "Resized") == ("Unknown", "Waiting")


def test_a_refusal_of_an_earlier_change_does_not_answer_a_later_one() -> None:
    running, ours = pod(node="node-a", phase="Running"), row(request_milli=900)
    refused = Refusal(outlook=Outlook.WAITING, headline="0.1 free")
    own = sharepod()
    first = compose(own, placed(own, running, row=ours, resizing=True, resize_refusal=refused))
    assert condition(first, "Resized") == ("False", "NoRoom")
    same = again(first)
    kept = compose(same, placed(same, running, row=ours, resizing=True))
    assert condition(kept, "Resized") == ("False", "NoRoom"), "a new process has not decided yet"
    changed = sharepod(status=first.dump(), metadata={"generation": 2})
    asked = compose(changed, placed(changed, running, row=ours, resizing=True))
    assert condition(asked, "Resized") == ("Unknown", "Waiting")


def test_a_condition_has_no_control_characters() -> None:
    blocked = Blocked(BlockedReason.FORBIDDEN, "no PriorityClass \x1b[31mnope", until=1.0)
    status = compose(sharepod(), inputs(sharepod(), blocked=blocked))
    message = next(item.message for item in status.conditions if item.type == "PodReady")
    assert message == "no PriorityClass \ufffd[31mnope"


def found(*reasons: FindingReason) -> tuple[Finding, ...]:
    return tuple(Finding(reason=reason, message=f"{reason} here") for reason in reasons)


def test_enforcement_is_what_the_agent_found_out() -> None:
    running = pod(node="node-a", phase="Running")
    unhooked, busy = FindingReason.PROCESS_WITHOUT_HOOK, FindingReason.BUSY_BEYOND_HELD
    untold, gap = FindingReason.PROCESSES_NOT_TOLD, FindingReason.MEMORY_BEYOND_TRACKED
    for seen, findings, expected in (
        (None, (), ("Unknown", "NoCudaCall")),
        (None, (untold,), ("Unknown", "ProcessesNotTold")),
        (True, (), ("True", "HookConnected")),
        (True, (gap,), ("True", "HookConnected")),
        (False, (), ("False", "ProcessWithoutHook")),
        (False, (busy, gap), ("False", "BusyBeyondHeld")),
        (False, (unhooked, busy), ("False", "ProcessWithoutHook")),
    ):
        status = compose(sharepod(), placed(sharepod(), running, seen={"enforced": seen, "findings": found(*findings)}))
        assert condition(status, "Enforced") == expected
        message = next(item.message for item in status.conditions if item.type == "Enforced")
        assert all(f"{reason} here" in message for reason in findings)


def test_a_failed_gpu_is_reported_to_its_tenants_only() -> None:
    running = pod(node="node-a", phase="Running")

    def report(health: Health) -> tuple[Gpu, ...]:
        sick = GPUS[0].model_copy(update={"health": health, "reason": "the driver reported Xid 79"})
        return (sick, GPUS[0].model_copy(update={"uuid": "GPU-1", "index": 1}))

    own = sharepod()
    well = compose(own, placed(own, running, gpus=report(Health.HEALTHY)))
    assert "GPUHealthy" not in {item.type for item in well.conditions}
    sick = compose(own, placed(own, running, gpus=report(Health.UNHEALTHY)))
    assert condition(sick, "GPUHealthy") == ("False", "GpuFailed")
    assert "Xid 79" in next(item.message for item in sick.conditions if item.type == "GPUHealthy")
    other = compose(own, placed(own, running, gpus=report(Health.UNHEALTHY), row=row(gpus=("GPU-1",))))
    assert "GPUHealthy" not in {item.type for item in other.conditions}
    own = again(sick)
    assert condition(compose(own, placed(own, running, gpus=report(Health.HEALTHY))), "GPUHealthy")[0] == "True"
    lost = compose(own, placed(own, running, gpus=(), missing_gpus=("GPU-0",)))
    assert condition(lost, "GPUHealthy") == ("False", "GpuFailed")
    message = next(item.message for item in lost.conditions if item.type == "GPUHealthy")
    assert "GPU-0 of node-a is missing" in message


@pytest.mark.promise("operator-ready")
@pytest.mark.parametrize(
    ("reason", "outlook", "kind"),
    [("NoRoom", Outlook.WAITING, "Reconciling"), ("NeverFits", Outlook.NEVER, "Stalled")],
)
def test_what_waits_reconciles_and_what_needs_somebody_is_stalled(reason: str, outlook: Outlook, kind: str) -> None:
    own = sharepod()
    status = compose(own, inputs(own, pod(gated=True), refusal=Refusal(outlook=outlook, headline="no")))
    assert condition(status, "Ready") == ("False", reason)
    assert condition(status, kind) == ("True", reason)
    assert status.summary == reason
    assert len({"Reconciling", "Stalled"} & {item.type for item in status.conditions}) == 1


@pytest.mark.promise("operator-ready")
def test_ready_is_true_while_the_pod_is_ready_and_once_it_has_succeeded() -> None:
    own = sharepod()
    starting = compose(own, placed(own, pod(node="node-a", phase="Running")))
    assert condition(starting, "Ready") == ("False", "ContainersNotReady")
    assert condition(starting, "Reconciling") == ("True", "ContainersNotReady")
    ready = compose(own, placed(own, RUNNING))
    assert condition(ready, "Ready") == ("True", "Ready")
    assert not {"Reconciling", "Stalled"} & {item.type for item in ready.conditions}
    done = compose(own, placed(own, RUNNING), Finish(Phase.SUCCEEDED, "Completed", "done"))
    assert condition(done, "Ready") == ("True", "Completed")
    assert done.summary == "Completed"
    failed = compose(own, placed(own, RUNNING), Finish(Phase.FAILED, "Evicted", "removed"))
    assert condition(failed, "Ready") == ("False", "Evicted")
    assert condition(failed, "Stalled") == ("True", "Evicted")
    assert failed.summary == "Evicted"


def test_restarts_count_over_all_pods() -> None:
    restarted = pod(node="node-a", phase="Running", status={"containerStatuses": [{"restartCount": 3}]})
    own = sharepod(status={"lastEnd": {"podUID": "pod-0", "restarts": 4}}, spec={"restartPolicy": "Always"})
    assert compose(own, placed(own, restarted)).restarts == 7
    assert compose(own, inputs(own, None)).restarts == 4


RUNNING = pod(node="node-a", phase="Running", conditions=[{"type": "Ready", "status": "True"}])
FINDING = Finding(reason=FindingReason.OVERTAKEN, message="again and again")
REFUSAL = Refusal(outlook=Outlook.WAITING, headline="0/1 nodes can take it")


PLACE = KeptPlace(node="node-b", gpus=("g",), priority=5)
TOTALS = SharePodConsumption(since="2026-01-01T00:00:00.000Z", counted_since="x", held_seconds=7)


def variations() -> dict[str, tuple[StatusInputs, Finish | None]]:
    """Return, by name, inputs that differ from the usual inputs in one field each."""
    own = sharepod()
    failed = Gpu(uuid="GPU-0", index=0, model="T", memory=1 << 34, health=Health.UNHEALTHY, reason="Xid 79")
    found: dict[str, tuple[StatusInputs, Finish | None]] = {
        "placed": (placed(own, None), None),
        "no row": (inputs(own), None),
        "refused": (inputs(own, refusal=REFUSAL), None),
        "resize refused": (placed(own, None, resize_refusal=REFUSAL, resizing=True), None),
        "resizing": (placed(own, None, resizing=True), None),
        "blocked": (placed(own, None, blocked=Blocked(BlockedReason.FORBIDDEN, "quota", until=1.0)), None),
        "other node": (placed(own, None, node="node-b"), None),
        "pod": (placed(own, pod(node="node-a")), None),
        "pod runs": (placed(own, RUNNING), None),
        "pod evicted": (placed(own, replace(RUNNING, disrupted="by an admin")), None),
        "connected": (placed(own, RUNNING, seen={"connected": True}), None),
        "enforced": (placed(own, RUNNING, seen={"enforced": True}), None),
        "not enforced": (placed(own, RUNNING, seen={"enforced": False}), None),
        "finding": (placed(own, RUNNING, seen={"enforced": True, "findings": (FINDING,)}), None),
        "used": (placed(own, RUNNING, seen={"connected": True, "held_milli": 70}), None),
        "used, not due": (placed(own, RUNNING, seen={"connected": True, "held_milli": 70}, usage_due=False), None),
        "GPU failed": (placed(own, RUNNING, gpus=(failed,)), None),
        "no report": (unreported(own), None),
        "counted": (placed(own, RUNNING, consumed=TOTALS), None),
        "evicted to move": (placed(own, RUNNING, moves_to=PLACE), None),
        "moving": (placed(own, replace(RUNNING, deleting=True), moves_to=PLACE), None),
        "finished": (placed(own, RUNNING), Finish(Phase.FAILED, "Evicted", "by an admin")),
    }
    return found


@pytest.mark.parametrize("one", variations())
def test_inputs_that_make_another_status_are_told_apart(one: str) -> None:
    own, (its, finish) = sharepod(), variations()[one]
    for other, (others, its_finish) in variations().items():
        same = compose(own, its, finish) == compose(own, others, its_finish)
        assert same or looked_at(own, its, finish) != looked_at(own, others, its_finish), other
    assert looked_at(own, its, finish) == looked_at(own, replace(its, now="2030-01-01T00:00:00Z"), finish)


@pytest.mark.parametrize("one", variations())
def test_where_nothing_that_decides_has_changed_only_minor_fields_differ(one: str) -> None:
    own, (its, finish) = sharepod(), variations()[one]
    for other, (others, its_finish) in variations().items():
        if major(own, its, finish) == major(own, others, its_finish):
            written = compose(own, its, finish).dump()
            assert difference(written, compose(own, others, its_finish).dump()).keys() <= MINOR, other


@pytest.mark.parametrize("one", variations())
def test_a_status_that_was_written_makes_no_other_from_the_same_inputs(one: str) -> None:
    its, finish = variations()[one]
    own = again(compose(sharepod(), its, finish))
    assert patch(own, compose(own, replace(its, now="2030-01-01T00:00:00Z"))) == {}


@pytest.mark.parametrize(
    ("held", "memory", "moved"),
    [(400, 100, False), (449, 100, False), (450, 100, True), (350, 100, True), (400, 149, False), (400, 150, True)],
)
def test_usage_has_moved_by_five_points_of_the_time_or_of_the_memory_granted(
    held: int, memory: int, moved: bool
) -> None:
    was = Usage(held_milli=400, memory=100)
    granted = row().model_copy(update={"memory": 1000})
    seen = TenantStatus(id=TENANT, connected=True, held_milli=held, memory=memory)
    assert usage_moved(was, seen, granted) is moved


def test_the_first_usage_is_that_of_a_connected_tenant_and_the_last_goes_with_its_report() -> None:
    was = Usage(held_milli=400, memory=100)
    assert usage_moved(None, TenantStatus(id=TENANT, connected=True, held_milli=50), row())
    assert usage_moved(None, TenantStatus(id=TENANT, connected=True, held_milli=0, memory=row().memory), row())
    assert not usage_moved(None, TenantStatus(id=TENANT, connected=True, held_milli=49), row())
    assert not usage_moved(None, TenantStatus(id=TENANT, held_milli=50), row())
    assert usage_moved(was, None, row())
    assert not usage_moved(None, None, None)


@pytest.mark.promise("operator-usage-known")
@pytest.mark.parametrize("was", [None, Usage(held_milli=400, memory=100)])
def test_usage_that_the_agent_does_not_know_yet_is_not_written(was: Usage | None) -> None:
    """While the agent reports memory but no held time, neither is written: a status has values of one moment only."""
    assert not usage_moved(was, TenantStatus(id=TENANT, connected=True, memory=row().memory), row())


@pytest.mark.promise("operator-columns")
def test_a_failed_sharepod_shows_how_its_containers_ended_as_a_pod_does_and_after_its_pod_is_gone() -> None:
    killed = {"name": "main", "state": {"terminated": {"exitCode": 137, "reason": "OOMKilled"}}}
    ended = pod(node="node-a", phase="Failed", status={"containerStatuses": [killed]})
    finish = Finish(Phase.FAILED, EndReason.POD_FAILED, "container main ended")
    own = again(compose(sharepod(), placed(sharepod(), ended), finish))
    assert own.status.summary == "OOMKilled"
    assert compose(own, inputs(own)).summary == "OOMKilled"
    unseen = compose(sharepod(), inputs(sharepod()), finish)
    assert unseen.summary == "Error"


def test_between_two_runs_placed_says_itself_why_the_next_pod_cannot_be_created() -> None:
    end = {"podUID": "pod-1", "time": "2026-01-01T00:00:00Z", "cause": "Error", "message": "exit code 1"}
    own = sharepod(status={"podUID": "pod-1", "lastEnd": end}, spec={"restartPolicy": "Always"})
    reason = "no PriorityClass with name missing was found"
    status = compose(own, inputs(own, blocked=Blocked(BlockedReason.FORBIDDEN, reason, until=1.0)))
    shown = {item.type: item.message for item in status.conditions}
    assert reason in shown["Placed"]
    assert shown["PodReady"] == "exit code 1"


@pytest.mark.promise("placement-move-crash")
def test_where_it_moves_stands_in_the_status_until_its_next_pod_has_a_share() -> None:
    own = sharepod()
    running = pod(node="node-a", phase="Running")
    ending = pod(node="node-a", phase="Running", deleting=True)
    assert compose(own, placed(own, running, moves_to=PLACE)).moves_to is None, "it is not evicted yet"
    moving = compose(own, placed(own, ending, moves_to=PLACE))
    assert moving.moves_to == PLACE
    kept = again(moving)
    for later in (placed(kept, ending), inputs(kept), inputs(kept, pod(uid="next", gated=True))):
        assert compose(kept, later).moves_to == PLACE, "a new leader knows it from the status alone"
    assert compose(kept, placed(kept, pod(uid="next", gated=True))).moves_to is None
    assert compose(kept, placed(kept, pod(uid="next", node="node-b", phase="Running"))).moves_to is None
    assert compose(kept, inputs(kept), Finish(Phase.FAILED, "PodLost", "")).moves_to is None


def test_totals_stay_in_the_status_until_others_are_due() -> None:
    own = sharepod()
    written = compose(own, placed(own, pod(node="node-a", phase="Running"), consumed=TOTALS))
    assert written.consumed == TOTALS
    for finish in (None, Finish(Phase.SUCCEEDED, "Completed", "")):
        assert compose(again(written), inputs(again(written)), finish).consumed == TOTALS
