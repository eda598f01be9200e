"""The next step for a tenant: from no object to an open gate, and while its Pod is not bound or does not start."""

from __future__ import annotations

from dataclasses import replace

import pytest
from sharepod.api.objects import TAKEN_BACK
from sharepod.api.resource_line import MEMORY, MILLI
from sharepod.api.sharepod import Phase
from sharepod.controller.decisions.snapshot import ReservationSnapshot
from sharepod.controller.decisions.steps import (
    ClearPodUid,
    CreatePod,
    EndRun,
    Finish,
    LetPodGo,
    OpenGate,
    Place,
    RemovalReason,
    RemoveRow,
    TakeBackCause,
    TakeBackPod,
    Unreserve,
    Wait,
)
from sharepod.controller.state.facts.sharepod_facts import unreadable_sharepod
from unit.controller.decisions.lifecycle_steps import GATED, NEVER_BOUND, REFUSED, made, step
from unit.controller.objects import pod, reserved, row, sharepod, sharepod_object

# From no object to an open gate


def test_the_pod_comes_first_and_asks_for_a_place_behind_its_gate() -> None:
    assert step(sharepod()) == CreatePod()
    assert step(sharepod(), GATED) == Place()


def test_in_a_namespace_that_ends_nothing_is_made_placed_or_kept() -> None:
    assert step(sharepod(), namespace_ends=True) == Wait()
    assert step(sharepod(), GATED, namespace_ends=True) == Wait()
    booked = reserved(pod_uid=GATED.uid)
    assert isinstance(step(sharepod(), GATED, booked), OpenGate)
    assert step(sharepod(), GATED, booked, namespace_ends=True) == RemoveRow("node-a", NEVER_BOUND)
    decided = reserved(written=False, pod_uid=GATED.uid)
    assert step(sharepod(), GATED, decided, namespace_ends=True) == Unreserve("node-a")


def test_what_runs_in_a_namespace_that_ends_runs_on() -> None:
    bound = pod(node="node-a")
    assert step(made(), bound, reserved(), namespace_ends=True) == step(made(), bound, reserved())


def test_nothing_is_concluded_from_the_absence_of_a_pod_while_the_status_cannot_be_read() -> None:
    unread = unreadable_sharepod(sharepod_object()["metadata"], "is nested too deep")
    assert step(unread) == Wait()
    assert step(unread, None, reserved()) == Wait()
    assert step(unread, None, reserved(written=False)) == Wait()
    assert isinstance(step(unread, pod(node="node-a", phase="Succeeded"), reserved()), Finish)


def test_an_invalid_one_gets_no_pod_and_no_place_and_gives_back_what_it_has() -> None:
    invalid = sharepod(spec={"gpu": {"request": 1.4}})
    assert step(invalid) == Wait()
    assert step(invalid, GATED) == Wait()
    assert step(invalid, None, reserved(written=False)) == Unreserve("node-a")
    assert step(invalid, None, reserved()) == RemoveRow("node-a", NEVER_BOUND)


@pytest.mark.promise("operator-row-before-use")
def test_the_gate_opens_only_once_the_ledger_says_reserved_for_this_very_pod() -> None:
    mine = reserved(pod_uid="pod-1")
    assert step(sharepod(), GATED, reserved(written=False, pod_uid="pod-1")) == Wait()
    assert step(sharepod(), GATED, mine) == OpenGate(GATED, "node-a", row(pod_uid="pod-1"))
    assert step(sharepod(), GATED, reserved(releasing=True, pod_uid="pod-1")) == Wait()
    assert step(sharepod(), GATED, reserved(pod_uid="pod-0")) == RemoveRow("node-a", NEVER_BOUND)
    assert step(sharepod(), GATED, reserved(written=False, pod_uid="pod-0")) == Unreserve("node-a")


def test_a_share_that_the_api_server_refuses_goes_back_until_it_is_tried_again() -> None:
    mine = reserved(pod_uid="pod-1")
    assert step(sharepod(), GATED, mine, now=10.0, refused_until=12.0) == RemoveRow("node-a", NEVER_BOUND)
    decided = reserved(written=False, pod_uid="pod-1")
    assert step(sharepod(), GATED, decided, now=10.0, refused_until=12.0) == Unreserve("node-a")
    assert step(sharepod(), GATED, now=10.0, refused_until=12.0) == Wait(12.0)
    assert step(sharepod(), GATED, now=12.0, refused_until=12.0) == Place()


@pytest.mark.promise("operator-row-before-use")
def test_a_row_that_is_only_decided_for_this_pod_opens_nothing() -> None:
    former = ReservationSnapshot(node="node-a", wanted=reserved(pod_uid="pod-1").wanted, written=row(pod_uid="pod-0"))
    assert step(sharepod(), GATED, former) == Wait()


@pytest.mark.promise("operator-sharepod-line-counted")
@pytest.mark.parametrize("line", [{MILLI: "300"}, {MILLI: "300", MEMORY: "4096"}])
def test_a_gated_pod_that_carries_less_than_is_asked_for_by_now_is_taken_back(line: dict[str, str]) -> None:
    waits = pod(gated=True, line=line)
    rows = reserved(pod_uid="pod-1")
    assert isinstance(step(sharepod(), waits), TakeBackPod)
    assert isinstance(step(sharepod(), waits, rows), TakeBackPod), "no gate is opened for an uncounted Pod"
    # the Pod's line exceeds the share: the request was lowered, and a LimitRange added a default for memory
    more = pod(gated=True, line={MILLI: "500", MEMORY: "4096"})
    assert step(sharepod(), more) == Place()
    assert isinstance(step(sharepod(), more, rows), OpenGate)
    assert step(sharepod(), pod(gated=True)) == Place(), "lines were not in use when it was made"


def test_no_gate_opens_on_a_share_that_is_about_to_be_released() -> None:
    assert step(sharepod(), GATED, reserved(ending=True, pod_uid="pod-1")) == RemoveRow("node-a", NEVER_BOUND)


def test_of_two_reservations_for_a_gated_pod_the_same_one_is_kept_by_everybody() -> None:
    one, two = reserved("node-a", pod_uid="pod-1"), reserved("node-b", pod_uid="pod-1")
    for order in ((one, two), (two, one)):
        assert step(sharepod(), GATED, *order) == RemoveRow("node-b", NEVER_BOUND)
    assert step(sharepod(), GATED, reserved("node-a", written=False, pod_uid="pod-1"), two) == Unreserve("node-a")


@pytest.mark.promise("operator-no-second-run")
def test_a_gated_pod_that_goes_is_made_again_and_one_on_record_is_not() -> None:
    assert step(sharepod(), None, lost=GATED) == CreatePod()
    assert step(sharepod(), None, reserved(written=False, pod_uid="pod-1"), lost=GATED) == Unreserve("node-a")
    lost = step(sharepod(), None, reserved(pod_uid="pod-1"))
    assert isinstance(lost, Finish)
    assert (lost.phase, lost.reason) == (Phase.FAILED, "PodLost")


def test_a_gated_pod_that_is_being_deleted_asks_for_nothing() -> None:
    assert step(sharepod(), pod(gated=True, deleting=True)) == Wait()
    assert step(sharepod(), pod(gated=True, deleting=True), reserved(pod_uid="pod-1")) == Wait()


def test_a_pod_made_by_another_operator_decides_which_reservation_stays() -> None:
    there = pod(pin="node-b")
    assert step(made(), there, reserved("node-a"), reserved("node-b")) == RemoveRow(
        "node-a", RemovalReason.POD_ELSEWHERE, "node-b"
    )
    assert step(made(), there, reserved("node-a", written=False), reserved("node-b")) == Unreserve("node-a")


@pytest.mark.promise("operator-forbidden")
def test_a_pod_that_cannot_be_made_is_tried_again_later() -> None:
    assert step(sharepod(), now=1.0, blocked_until=5.0) == Wait(5.0)
    assert step(sharepod(), now=5.0, blocked_until=5.0) == CreatePod()


# Pods that are not bound


@pytest.mark.promise("operator-taken-back")
def test_a_pod_refused_by_kube_scheduler_for_long_is_withdrawn() -> None:
    refused = pod(conditions=[REFUSED])
    assert step(made(), refused, reserved(), unbound_since=10.0, now=20.0) == Wait(70.0)
    assert step(made(), refused, reserved(), unbound_since=10.0, now=70.0) == TakeBackPod(refused, "0/3 nodes")


@pytest.mark.promise("operator-unbound-node-gone")
def test_a_pending_pod_on_a_deleted_node_is_withdrawn_at_once() -> None:
    node_deleted = reserved(override=RemovalReason.NODE_GONE)
    assert step(made(), pod(), node_deleted, unstarted_since=10.0, now=11.0) == TakeBackPod(
        pod(), "the Node is deleted"
    )
    assert step(made(), pod(node="node-a"), node_deleted, unstarted_since=10.0, now=11.0) == Wait(1810.0)


@pytest.mark.promise("operator-bound-stays")
def test_a_bound_pod_is_never_withdrawn() -> None:
    assert step(made(), pod(node="node-a"), reserved(), unbound_since=0.0, now=1e6) == Wait()


@pytest.mark.promise("operator-no-second-run")
def test_one_taken_back_by_us_is_placed_again_and_one_lost_is_not() -> None:
    taken_back = pod(deleting=True, finalizers=[TAKEN_BACK])
    assert step(made(), taken_back, reserved(pod_uid="pod-1")) == RemoveRow("node-a", NEVER_BOUND)
    assert step(made(), taken_back, reserved(written=False)) == Unreserve("node-a")
    assert step(made(), taken_back) == ClearPodUid()
    assert step(made(), taken_back, reserved(releasing=True)) == ClearPodUid(), "a row that ends is no record of a run"
    assert step(sharepod(), taken_back) == LetPodGo(taken_back)
    assert step(sharepod(), None, lost=taken_back) == CreatePod()
    lost = step(made(), None, reserved())
    assert isinstance(lost, Finish)
    assert (lost.phase, lost.reason) == (Phase.FAILED, "PodLost")


def test_a_pod_that_is_marked_and_was_bound_after_all_runs_and_is_let_go() -> None:
    bound = pod(node="node-a", finalizers=["a", TAKEN_BACK])
    for own in (made(), made(phase="Failed"), None):
        assert step(own, bound, reserved()) == LetPodGo(bound)
    marked = pod(conditions=[REFUSED], finalizers=[TAKEN_BACK])
    assert step(made(), marked, reserved(), unbound_since=10.0, now=20.0) == Wait(70.0)
    assert step(made(), marked, reserved(), unbound_since=10.0, now=70.0) == TakeBackPod(marked, "0/3 nodes")


def test_a_pod_that_was_taken_back_keeps_no_sharepod_from_ending() -> None:
    taken_back = pod(deleting=True, finalizers=[TAKEN_BACK])
    going = sharepod(metadata={"deletionTimestamp": "2026-01-01T00:00:00Z"})
    over = sharepod(status={"endTime": "2026-01-01T00:00:00Z"})
    for own in (None, going, over):
        assert step(own, taken_back, reserved()) == LetPodGo(taken_back)


# Pods that do not start


@pytest.mark.promise("operator-not-started")
def test_a_pod_of_which_nothing_starts_gives_its_share_back() -> None:
    waiting = {"state": {"waiting": {"reason": "ImagePullBackOff", "message": "no such image"}}}
    stuck = pod(node="node-a", status={"containerStatuses": [waiting]})
    assert step(made(), stuck, reserved(), unstarted_since=10.0, now=20.0) == Wait(1810.0)
    found = step(made(), stuck, reserved(), unstarted_since=10.0, now=1810.0)
    assert isinstance(found, Finish)
    assert (found.phase, found.reason) == (Phase.FAILED, "NotStarted")
    assert "no such image" in found.message
    always = sharepod(status={"podUID": "pod-1"}, spec={"restartPolicy": "Always"})
    again = step(always, stuck, reserved(), unstarted_since=10.0, now=1810.0)
    assert isinstance(again, EndRun)
    assert (again.cause, again.pause_s) == ("NotStarted", 10.0)


def test_a_pod_whose_init_container_runs_has_started() -> None:
    assert pod(node="node-a", status={"initContainerStatuses": [{"state": {"running": {"startedAt": "x"}}}]}).begun
    assert pod(node="node-a", status={"containerStatuses": [{"restartCount": 2}]}).begun
    assert pod(node="node-a", phase="Running").begun
    assert not pod(node="node-a", status={"containerStatuses": [{"state": {"waiting": {"reason": "x"}}}]}).begun


def test_a_pod_that_no_scheduler_looks_at_is_taken_back_after_as_long() -> None:
    unseen = pod()
    assert step(made(), unseen, reserved(), unstarted_since=10.0, now=20.0) == Wait(1810.0)
    found = step(made(), unseen, reserved(), unstarted_since=10.0, now=1810.0)
    assert isinstance(found, TakeBackPod)
    assert found.cause is TakeBackCause.SCHEDULER
    assert "default-scheduler" in found.message


@pytest.mark.promise("operator-unknown-scheduler")
def test_a_pod_of_a_scheduler_of_its_own_that_does_not_look_at_it_gives_the_share_back_sooner() -> None:
    unseen = replace(pod(), scheduler="unknown")
    assert step(made(), unseen, reserved(), unstarted_since=10.0, now=20.0) == Wait(70.0)
    found = step(made(), unseen, reserved(), unstarted_since=10.0, now=70.0)
    assert isinstance(found, TakeBackPod)
    assert found.cause is TakeBackCause.SCHEDULER
    assert "unknown has not looked at it for 60 s" in found.message
    bound = replace(pod(node="node-a"), scheduler="unknown")
    assert step(made(), bound, reserved(), unstarted_since=10.0, now=310.0) == Wait(1810.0)


@pytest.mark.promise("operator-foreign-gate")
def test_a_pod_behind_a_foreign_gate_gets_no_share() -> None:
    gated = replace(GATED, gates=(*GATED.gates, "example.com/mine"))
    assert step(sharepod(), gated) == Wait()
    assert step(sharepod(), GATED) == Place()


def test_nothing_is_concluded_while_a_row_cannot_be_read() -> None:
    running = pod(node="node-a", phase="Running")
    for its_pod in (None, running):
        assert step(sharepod(), its_pod, unreadable_row=True) == Wait()
        assert step(None, its_pod, reserved(releasing=True, drained=True), unreadable_row=True) == Wait()


def test_a_pod_that_was_bound_and_is_gone_is_not_made_again_though_its_uid_was_never_written() -> None:
    last_seen = pod(node="node-a", phase="Running")
    finish = step(sharepod(), None, reserved(), lost=last_seen)
    assert isinstance(finish, Finish)
    assert finish.reason == "PodLost"
    assert step(sharepod(), None, reserved(), lost=pod()) == RemoveRow("node-a", NEVER_BOUND)
    assert step(sharepod(), None, lost=pod()) == CreatePod()
