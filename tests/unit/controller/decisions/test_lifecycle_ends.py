"""The next step for a tenant that ends: the cause, the release, ends that hang, the deletion."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sharepod.api.objects import Condition
from sharepod.api.sharepod import Phase
from sharepod.controller.decisions.steps import (
    BeginRelease,
    CreatePod,
    DeletePod,
    DeleteSharePod,
    Finish,
    Forget,
    RemovalReason,
    RemoveRow,
    Wait,
)
from sharepod.controller.state.facts.pod_facts import PodFacts
from unit.controller.decisions.lifecycle_steps import EVICTION, GATED, made, step
from unit.controller.objects import pod, reserved, sharepod


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
        # A server that exits with 0 on SIGTERM has not finished its work.
        (pod(phase="Succeeded", node="node-a", deleting=True, restart="Always"), Phase.FAILED, "PodLost"),
    ],
)
def test_how_a_pod_ended_is_how_its_sharepod_ends(ended: PodFacts, phase: Phase, reason: str) -> None:
    found = step(made(), ended, reserved())
    assert isinstance(found, Finish)
    assert (found.phase, found.reason) == (phase, reason)
    # The same for a Pod of which only the last cached version is known.
    conclusion = step(made(), None, reserved(), lost=ended)
    assert conclusion == found


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


# The last steps of an end


@pytest.mark.promise("operator-ttl")
def test_a_sharepod_that_has_ended_is_deleted_when_its_time_is_over_and_its_share_released() -> None:
    over = {"phase": "Succeeded", "podUID": "pod-1", "endTime": "1970-01-01T00:01:40Z"}
    own = sharepod(status=over, spec={"ttlSecondsAfterFinished": 60})
    done = pod(node="node-a", phase="Succeeded")
    for its_pod in (None, done):
        assert step(own, its_pod, ended_since=7.0, now=20.0) == Wait(67.0)
        assert step(own, its_pod, ended_since=7.0, now=67.0) == DeleteSharePod()
        assert step(own, its_pod, reserved(releasing=True), ended_since=7.0, now=1e6) == Wait(), "its share goes first"
        assert step(own, its_pod, now=1e6) != DeleteSharePod(), "the time of its end is unknown"
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


def test_force_release_ends_a_sharepod_whose_pod_hangs_in_its_deletion() -> None:
    hanging = pod(node="node-a", phase="Running", deleting=True)
    finish = step(made(phase="Running"), hanging, reserved(forced=True))
    assert isinstance(finish, Finish)
    assert (finish.phase, finish.reason) == (Phase.FAILED, "PodLost")
    assert step(made(phase="Failed"), hanging, reserved(forced=True)) == RemoveRow("node-a", RemovalReason.FORCED)
