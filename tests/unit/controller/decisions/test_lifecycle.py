"""The next step for a tenant, in every situation that can be."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sharepod.api.gpunode import TenantState
from sharepod.api.objects import TAKEN_BACK, Condition
from sharepod.api.sharepod import Phase
from sharepod.controller.decisions.lifecycle import (
    BeginRelease,
    ClearPodUid,
    CreatePod,
    DeletePod,
    DeleteSharePod,
    EndRun,
    Finish,
    Forget,
    LetPodGo,
    OpenGate,
    Place,
    RemovalReason,
    RemoveRow,
    ReservationSnapshot,
    TakeBackPod,
    TenantSnapshot,
    Unreserve,
    Wait,
    decide,
)
from sharepod.controller.state.facts.pod_facts import PodFacts
from sharepod.controller.state.facts.sharepod_facts import SharePodFacts, unreadable_sharepod
from unit.controller.objects import pod, reserved, row, sharepod, sharepod_object

EVICTION = {"type": "DisruptionTarget", "status": "True", "reason": "EvictionByEvictionAPI", "message": "evicted"}
REFUSED = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/3 nodes"}


def step(
    own: SharePodFacts | None, its_pod: PodFacts | None = None, *reservations: ReservationSnapshot, **known: Any
) -> object:
    return decide(TenantSnapshot(sharepod=own, pod=its_pod, reserved=reservations, **known))


def made(**fields: Any) -> SharePodFacts:
    """A SharePod whose Pod was made."""
    return sharepod(status={"podUID": "pod-1", **fields})


GATED = pod(gated=True)
NEVER_BOUND = RemovalReason.NEVER_BOUND

# From nothing to an open gate


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
def test_a_pod_that_kube_scheduler_refuses_for_long_is_taken_back() -> None:
    refused = pod(conditions=[REFUSED])
    assert step(made(), refused, reserved(), unbound_since=10.0, now=20.0) == Wait(70.0)
    assert step(made(), refused, reserved(), unbound_since=10.0, now=70.0) == TakeBackPod(refused, "0/3 nodes")


@pytest.mark.promise("operator-bound-stays")
def test_a_bound_pod_is_never_taken_back() -> None:
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


# Ends


@pytest.mark.parametrize(
    ("ended", "phase", "reason"),
    [
        (pod(phase="Succeeded", node="node-a"), Phase.SUCCEEDED, "Completed"),
        (pod(phase="Failed", node="node-a"), Phase.FAILED, "PodFailed"),
        (pod(phase="Failed", node="node-a", status={"reason": "Evicted"}), Phase.FAILED, "Evicted"),
        (pod(phase="Failed", node="node-a", status={"reason": "OutOfcpu"}), Phase.FAILED, "OutOfcpu"),
        (pod(phase="Failed", node="node-a", conditions=[EVICTION], deleting=True), Phase.FAILED, "Evicted"),
        (pod(phase="Failed", node="node-a", deleting=True), Phase.FAILED, "PodLost"),
        (pod(phase="Succeeded", node="node-a", deleting=True), Phase.FAILED, "PodLost"),
        # A server that ends with 0 when it is told to stop has not done its work.
        (pod(phase="Succeeded", node="node-a", deleting=True, restart="Always"), Phase.FAILED, "PodLost"),
    ],
)
def test_how_a_pod_ended_is_how_its_sharepod_ends(ended: PodFacts, phase: Phase, reason: str) -> None:
    found = step(made(), ended, reserved())
    assert isinstance(found, Finish)
    assert (found.phase, found.reason) == (phase, reason)
    # The same, where it is only known from what was last seen of it.
    gone = step(made(), None, reserved(), lost=ended)
    assert gone == found


@pytest.mark.promise("operator-evicted")
def test_an_eviction_that_was_shown_is_remembered_after_a_restart() -> None:
    shown = made(conditions=[{"type": "PodReady", "status": "False", "reason": "Evicted", "message": "drained"}])
    found = step(shown, None, reserved())
    assert isinstance(found, Finish)
    assert (found.phase, found.reason) == (Phase.FAILED, "Evicted")
    assert found.message.startswith("drained; ")


def test_a_share_is_released_in_two_steps_and_not_while_the_pod_is_there() -> None:
    ending = pod(node="node-a", phase="Running", deleting=True)
    assert step(None, pod(node="node-a", phase="Running"), reserved()) == DeletePod(pod(node="node-a", phase="Running"))
    assert step(None, ending, reserved()) == Wait()
    assert step(None, None, reserved()) == BeginRelease("node-a")
    assert step(None, None, reserved(ending=True)) == Wait()
    assert step(None, None, reserved(releasing=True)) == Wait()
    assert step(None, None, reserved(releasing=True, drained=True)) == RemoveRow("node-a", RemovalReason.DRAINED)
    assert step(None) == Forget()


def test_an_override_stands_in_for_the_agent_but_not_for_the_pod() -> None:
    assert step(None, None, reserved(releasing=True, override=RemovalReason.NODE_GONE)) == RemoveRow(
        "node-a", RemovalReason.NODE_GONE
    )
    ending = pod(node="node-a", phase="Running", deleting=True)
    assert step(None, ending, reserved(override=RemovalReason.NODE_GONE)) == Wait()


@pytest.mark.promise("operator-override-admin")
def test_force_release_ends_what_hangs_and_not_what_lives() -> None:
    hanging = pod(node="node-a", phase="Running", deleting=True)
    assert step(None, hanging, reserved(forced=True)) == RemoveRow("node-a", RemovalReason.FORCED)
    assert step(made(), pod(node="node-a", phase="Running"), reserved(forced=True)) == Wait()


@pytest.mark.promise("operator-reservation-lost")
def test_a_bound_pod_without_a_reservation_ends_its_sharepod() -> None:
    found = step(made(), pod(node="node-a", phase="Running"))
    assert isinstance(found, Finish)
    assert found.reason == "ReservationLost"
    assert isinstance(step(made(phase="Failed"), pod(node="node-a", phase="Running")), DeletePod)


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
    assert found.unseen
    assert "default-scheduler" in found.message


@pytest.mark.promise("operator-foreign-gate")
def test_a_pod_behind_a_gate_of_somebody_else_gets_no_share() -> None:
    gated = replace(GATED, gates=(*GATED.gates, "example.com/mine"))
    assert step(sharepod(), gated) == Wait()
    assert step(sharepod(), GATED) == Place()


# The end of the end


@pytest.mark.promise("operator-ttl")
def test_a_sharepod_that_has_ended_is_deleted_when_its_time_is_over_and_its_share_released() -> None:
    over = {"phase": "Succeeded", "podUID": "pod-1", "endTime": "1970-01-01T00:01:40Z"}
    own = sharepod(status=over, spec={"ttlSecondsAfterFinished": 60})
    done = pod(node="node-a", phase="Succeeded")
    for its_pod in (None, done):
        assert step(own, its_pod, ended_since=7.0, now=20.0) == Wait(67.0)
        assert step(own, its_pod, ended_since=7.0, now=67.0) == DeleteSharePod()
        assert step(own, its_pod, reserved(releasing=True), ended_since=7.0, now=1e6) == Wait(), "its share goes first"
        assert step(own, its_pod, now=1e6) != DeleteSharePod(), "nobody knows when it ended"
    assert step(sharepod(status=over), done, ended_since=7.0, now=1e6) == Wait(), "without the field it stays"
    assert step(sharepod(spec={"ttlSecondsAfterFinished": 0}), None, now=1e6) == CreatePod()
    going = sharepod(
        status=over, spec={"ttlSecondsAfterFinished": 0}, metadata={"deletionTimestamp": "2026-01-01T00:00:00Z"}
    )
    assert step(going, None, ended_since=7.0, now=1e6) == Forget()


@pytest.mark.promise("operator-orphan")
def test_a_pod_that_was_left_alone_keeps_its_share_until_it_ends() -> None:
    orphan = replace(pod(node="node-a", phase="Running"), orphaned=True)
    assert step(None, orphan, reserved()) == Wait()
    going = {"deletionTimestamp": "2026-01-01T00:00:00Z", "finalizers": ["orphan"]}
    left = sharepod(status={"podUID": "pod-1"}, metadata=going)
    running = pod(node="node-a", phase="Running")
    assert step(left, running, reserved()) == Wait(), "its controller is taken out before the SharePod goes"
    assert step(None, running, reserved()) == DeletePod(running)
    foreground = sharepod(metadata=going | {"finalizers": ["foregroundDeletion"]})
    assert step(foreground, running, reserved()) == DeletePod(running)
    assert step(None, orphan) == DeletePod(orphan), "without a share it ends"
    assert step(None, replace(GATED, orphaned=True)) == DeletePod(replace(GATED, orphaned=True))
    done = replace(orphan, phase="Succeeded")
    assert step(None, done, reserved()) == BeginRelease("node-a")


# Between two runs

ENDED = {"podUID": "pod-1", "node": "node-a", "cause": "Drained", "retryAt": "1970-01-01T00:01:40Z", "attempts": 2}


def between(**status: Any) -> SharePodFacts:
    """A SharePod whose last run ended and is followed by another."""
    return sharepod(status={"lastEnd": ENDED, **status}, spec={"restartPolicy": "Always"})


@pytest.mark.promise("operator-comes-back")
def test_a_run_that_is_drained_is_followed_by_another_where_the_policy_says_so() -> None:
    drained = pod(node="node-a", phase="Failed", deleting=True, conditions=[EVICTION])
    for policy, kind in (("Always", EndRun), ("OnFailure", EndRun), ("Never", Finish)):
        own = sharepod(status={"podUID": "pod-1"}, spec={"restartPolicy": policy})
        assert isinstance(step(own, drained, reserved()), kind), policy
        assert isinstance(step(own, None, reserved(), lost=drained), kind), policy
        assert isinstance(step(own, None, reserved(pod_uid="pod-1")), kind), policy


def test_the_end_of_a_run_says_whose_it_was_and_how_long_the_next_one_waits() -> None:
    status = {"podUID": "pod-1", "startTime": "1970-01-01T00:00:10Z", "lastEnd": {**ENDED, "podUID": "pod-0"}}
    own = sharepod(status=status, spec={"restartPolicy": "Always"})
    failed = pod(node="node-a", phase="Failed")
    found = step(own, failed, reserved(), wall=609.0)
    assert isinstance(found, EndRun)
    assert (found.pod_uid, found.node, found.cause) == ("pod-1", "node-a", "ContainerFailed")
    assert (found.attempts, found.pause_s) == (3, 40.0)
    lasted = step(own, failed, reserved(), wall=610.0)
    assert isinstance(lasted, EndRun)
    assert (lasted.attempts, lasted.pause_s) == (1, 10.0)


@pytest.mark.promise("operator-one-run-at-a-time")
def test_between_runs_the_pod_goes_first_then_the_share_then_time_passes() -> None:
    running = pod(node="node-a", phase="Running")
    ending = pod(node="node-a", phase="Running", deleting=True)
    failed = pod(node="node-a", phase="Failed")
    assert step(between(), running, reserved(pod_uid="pod-1")) == DeletePod(running)
    assert step(between(), ending, reserved(pod_uid="pod-1")) == Wait()
    for gone in (None, failed):
        assert step(between(), gone, reserved(pod_uid="pod-1"), wall=200.0) == BeginRelease("node-a")
        assert step(between(), gone, reserved(pod_uid="pod-1", releasing=True), wall=200.0) == Wait()
        drained = reserved(pod_uid="pod-1", releasing=True, drained=True)
        assert step(between(), gone, drained) == RemoveRow("node-a", RemovalReason.DRAINED)
        assert step(between(), gone, wall=90.0, now=7.0) == Wait(17.0)
    assert step(between(), failed, wall=100.0) == DeletePod(failed), "its log was there to be read until now"
    assert step(between(), pod(node="node-a", phase="Failed", deleting=True), wall=100.0) == Wait()
    assert step(between(), None, wall=100.0) == CreatePod()
    assert step(between(), None, wall=100.0, now=1.0, blocked_until=5.0) == Wait(5.0)
    assert step(between(), None, wall=100.0, namespace_ends=True) == Wait()


def test_a_clock_that_was_set_back_delays_no_run() -> None:
    assert isinstance(step(between(), None, wall=-1e9, now=7.0), CreatePod)


@pytest.mark.promise("operator-one-run-at-a-time")
def test_the_next_run_is_known_by_its_pod_or_by_its_row() -> None:
    second = pod(uid="pod-2", node="node-b", pin="node-b", phase="Running")
    assert step(between(podUID="pod-2"), second, reserved("node-b", pod_uid="pod-2")) == Wait()
    lost = step(between(), None, reserved("node-b", pod_uid="pod-2"))
    assert isinstance(lost, EndRun), "its gate may have been opened"
    assert lost.pod_uid == "pod-2"
    lost = step(between(), None, lost=second)
    assert isinstance(lost, EndRun)
    gated = pod(uid="pod-2", gated=True)
    assert step(between(), gated) == Place()
    assert step(between(), None, lost=pod(node="node-a"), wall=100.0) == CreatePod(), "the former Pod is on record"


def test_a_pod_beside_a_gpu_that_failed_moves_once_it_is_not_ready() -> None:
    ready = pod(node="node-a", phase="Running", conditions=[{"type": "Ready", "status": "True"}])
    crashes = pod(node="node-a", phase="Running")
    always = sharepod(status={"podUID": "pod-1"}, spec={"restartPolicy": "Always"})
    assert step(always, ready, reserved(), gpu_failed=True) == Wait()
    found = step(always, crashes, reserved(), gpu_failed=True)
    assert isinstance(found, EndRun)
    assert (found.cause, found.pause_s) == ("GpuFailed", 0.0)
    assert step(made(), crashes, reserved(), gpu_failed=True) == Wait(), "Never: it ends as it ends"
    failed = step(always, pod(node="node-a", phase="Failed"), reserved(), gpu_failed=True)
    assert isinstance(failed, EndRun)
    assert failed.cause == "GpuFailed", "not its own fault"


# Whatever happens

_PODS = st.none() | st.builds(
    pod,
    pin=st.sampled_from(["node-a", "node-b"]),
    node=st.sampled_from([None, "node-a", "node-b"]),
    gated=st.booleans(),
    phase=st.sampled_from(["Pending", "Running", "Succeeded", "Failed"]),
    deleting=st.booleans(),
    conditions=st.sampled_from([[], [REFUSED], [EVICTION]]),
)
_HELD = st.lists(
    st.builds(
        reserved,
        st.sampled_from(["node-a", "node-b", "node-c"]),
        written=st.booleans(),
        releasing=st.booleans(),
        drained=st.booleans(),
        override=st.sampled_from([None, RemovalReason.NODE_GONE]),
        forced=st.booleans(),
        ending=st.booleans(),
        pod_uid=st.sampled_from([None, "pod-1", "pod-0"]),
    ),
    max_size=3,
    unique_by=lambda item: item.node,
)
_SHAREPODS = st.none() | st.builds(
    lambda phase, uid, valid, deleting, policy, last: sharepod(
        status={
            "phase": phase,
            **({"podUID": uid} if uid and uid != last else {}),  # one write empties one and sets the other
            **({"lastEnd": {**ENDED, "podUID": last}} if last else {}),
        },
        spec={"restartPolicy": policy} | ({} if valid else {"gpu": {"request": 1.4}}),
        metadata={"deletionTimestamp": "2026-01-01T00:00:00Z"} if deleting else {},
    ),
    st.sampled_from(["Pending", "Placed", "Running", "Succeeded", "Failed"]),
    st.sampled_from([None, "pod-1"]),
    st.booleans(),
    st.booleans(),
    st.sampled_from(["Always", "OnFailure", "Never"]),
    st.sampled_from([None, "pod-0", "pod-1"]),
)
_VIEWS = st.builds(
    lambda own, its_pod, reservations, unbound, now, refused_until: TenantSnapshot(
        sharepod=own,
        pod=its_pod,
        reserved=tuple(reservations),
        unbound_since=unbound,
        now=now,
        refused_until=refused_until,
    ),
    _SHAREPODS,
    _PODS,
    _HELD,
    st.none() | st.floats(0, 100),
    st.floats(0, 200),
    st.floats(0, 200),
)


@settings(max_examples=500, deadline=None)
@given(_VIEWS)
def test_a_pod_that_was_taken_back_is_let_go_once_nothing_says_that_it_ran(view: TenantSnapshot) -> None:
    snapshot = replace(view, pod=pod(deleting=True, finalizers=[TAKEN_BACK]))
    found, own = decide(snapshot), snapshot.sharepod
    if isinstance(found, LetPodGo) and own is not None and not (own.deleting or own.ended or snapshot.between_runs):
        assert own.status.pod_uid != found.pod.uid
        assert all(item.releasing for item in snapshot.reserved)


@settings(max_examples=500, deadline=None)
@given(_VIEWS)
def test_no_share_is_asked_for_or_given_that_was_refused_a_moment_ago(snapshot: TenantSnapshot) -> None:
    assert not isinstance(decide(snapshot), Place | OpenGate) or snapshot.now >= snapshot.refused_until


@settings(max_examples=2000, deadline=None)
@given(_VIEWS)
def test_promises_that_hold_in_every_situation(snapshot: TenantSnapshot) -> None:
    found = decide(snapshot)
    own, its_pod = snapshot.sharepod, snapshot.pod
    rows = {item.node: item for item in snapshot.reserved}
    alive = own is not None and not own.deleting and not own.ended
    if isinstance(found, CreatePod):
        assert alive
        assert own is not None
        last = own.status.last_end.pod_uid if own.status.last_end is not None else None
        assert own.status.pod_uid in (None, last), "one run at a time"
        assert its_pod is None
        assert not snapshot.reserved, "a row may have a Pod on record"
    if isinstance(found, Place):
        assert alive
        assert its_pod is not None, "nobody waits with a share"
        assert its_pod.waits_for_share
        assert not its_pod.deleting
        assert not snapshot.reserved
    if isinstance(found, OpenGate):
        assert alive
        assert found.pod is its_pod
        assert its_pod is not None
        assert its_pod.waits_for_share
        assert rows[found.node].written == found.row
        assert found.row.pod_uid == its_pod.uid
        assert found.row.state is TenantState.RESERVED
        assert not rows[found.node].wanted.releasing
    if isinstance(found, TakeBackPod):
        assert found.pod.node is None
    if isinstance(found, BeginRelease):
        row_of = rows[found.node].written
        last = own.status.last_end.pod_uid if own is not None and own.status.last_end is not None else None
        assert not alive or snapshot.between_runs or (row_of is not None and row_of.pod_uid == last)
        assert its_pod is None or its_pod.ended or (its_pod.uid != last is not None)
    if isinstance(found, Unreserve):
        assert rows[found.node].written is None
    if isinstance(found, RemoveRow):
        item = rows[found.node]
        confirmed = item.releasing and (item.drained or item.override is not None)
        elsewhere = its_pod is not None and (its_pod.node or its_pod.pin) != found.node
        gated = its_pod is not None and its_pod.waits_for_share and not its_pod.deleting
        on_record = {item.written.pod_uid for item in snapshot.reserved if item.written and not item.releasing}
        on_record.add(own.status.pod_uid if own is not None else None)
        no_pod = its_pod is None and on_record <= {None}
        never_bound = alive and (gated or no_pod or (its_pod is not None and its_pod.taken_back))
        assert confirmed or item.forced or elsewhere or never_bound
        if its_pod is not None and its_pod.node == found.node and not its_pod.ended:
            assert item.forced
            assert its_pod.deleting
    if isinstance(found, Finish | EndRun):
        assert alive
    if isinstance(found, EndRun):
        assert own is not None
        assert own.restart_policy != "Never", "no work runs twice"
        assert own.status.last_end is None or found.pod_uid != own.status.last_end.pod_uid, "each end is counted once"
    if isinstance(found, Forget):
        assert not snapshot.reserved
        assert its_pod is None


@given(st.text(max_size=2000))
def test_whatever_reason_a_pod_ends_for_can_be_written(reason: str) -> None:
    failed = pod(phase="Failed", node="node-a", status={"reason": reason})
    finish = step(made(), failed, reserved())
    assert isinstance(finish, Finish)
    assert Condition(type="PodReady", status="False", reason=finish.reason).reason == finish.reason
    assert len(finish.reason) <= 128


def test_a_kubelets_lack_of_a_resource_ends_with_its_reason() -> None:
    failed = pod(phase="Failed", node="node-a", status={"reason": "OutOfephemeral-storage"})
    finish = step(made(), failed, reserved())
    assert isinstance(finish, Finish)
    assert finish.reason == "OutOfephemeral_storage"


def test_nothing_is_concluded_while_a_row_cannot_be_read() -> None:
    running = pod(node="node-a", phase="Running")
    for its_pod in (None, running):
        assert step(sharepod(), its_pod, unreadable_row=True) == Wait()
        assert step(None, its_pod, reserved(releasing=True, drained=True), unreadable_row=True) == Wait()


def test_a_pod_that_was_bound_and_is_gone_is_not_made_again_though_its_uid_was_never_written() -> None:
    gone = pod(node="node-a", phase="Running")
    finish = step(sharepod(), None, reserved(), lost=gone)
    assert isinstance(finish, Finish)
    assert finish.reason == "PodLost"
    assert step(sharepod(), None, reserved(), lost=pod()) == RemoveRow("node-a", NEVER_BOUND)
    assert step(sharepod(), None, lost=pod()) == CreatePod()


def test_force_release_ends_a_sharepod_whose_pod_hangs_in_its_deletion() -> None:
    hanging = pod(node="node-a", phase="Running", deleting=True)
    finish = step(made(phase="Running"), hanging, reserved(forced=True))
    assert isinstance(finish, Finish)
    assert (finish.phase, finish.reason) == (Phase.FAILED, "PodLost")
    assert step(made(phase="Failed"), hanging, reserved(forced=True)) == RemoveRow("node-a", RemovalReason.FORCED)
