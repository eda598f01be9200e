"""The next step for a tenant between two runs."""

from __future__ import annotations

import pytest
from sharepod.controller.decisions.steps import (
    BeginRelease,
    CreatePod,
    DeletePod,
    EndRun,
    Finish,
    Place,
    RemovalReason,
    RemoveRow,
    Wait,
)
from unit.controller.decisions.lifecycle_steps import ENDED, EVICTION, between, made, step
from unit.controller.objects import pod, reserved, sharepod


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
    for last in (None, failed):
        assert step(between(), last, reserved(pod_uid="pod-1"), wall=200.0) == BeginRelease("node-a")
        assert step(between(), last, reserved(pod_uid="pod-1", releasing=True), wall=200.0) == Wait()
        drained = reserved(pod_uid="pod-1", releasing=True, drained=True)
        assert step(between(), last, drained) == RemoveRow("node-a", RemovalReason.DRAINED)
        assert step(between(), last, wall=90.0, now=7.0) == Wait(17.0)
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


def test_a_pod_on_a_node_with_a_failed_gpu_moves_once_it_is_not_ready() -> None:
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
