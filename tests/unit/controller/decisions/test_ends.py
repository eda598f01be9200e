"""Consequences of the ends of runs, by cause and restartPolicy, and the pauses before the next run."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sharepod.api.sharepod import RestartPolicy, SharePodStatus
from sharepod.controller.decisions.ends import (
    LONGEST_PAUSE_S,
    MOVED,
    EndCause,
    Sequel,
    attempts_after,
    end_of,
    end_of_lost,
    pause_s,
    sequel,
)
from sharepod.controller.state.facts.pod_facts import pod_facts
from sharepod.kube import Json
from unit.controller.objects import pod, pod_object

ALWAYS, ON_FAILURE, NEVER = RestartPolicy.ALWAYS, RestartPolicy.ON_FAILURE, RestartPolicy.NEVER


def disruption(reason: str) -> list[Json]:
    return [{"type": "DisruptionTarget", "status": "True", "reason": reason, "message": "m"}]


@pytest.mark.promise("operator-comes-back")
@pytest.mark.parametrize("cause", EndCause)
def test_what_follows_is_the_table(cause: EndCause) -> None:
    again, failed, done = Sequel.ANOTHER_RUN, Sequel.FAILED, Sequel.SUCCEEDED
    wanted = {EndCause.COMPLETED: (done, done, again), EndCause.DEADLINE: (failed, failed, failed)}
    found = tuple(sequel(cause, policy) for policy in (NEVER, ON_FAILURE, ALWAYS))
    assert found == wanted.get(cause, (failed, again, again))


@pytest.mark.parametrize(
    ("fields", "cause"),
    [
        ({"phase": "Failed", "deleting": True, "conditions": disruption("EvictionByEvictionAPI")}, EndCause.DRAINED),
        ({"phase": "Failed", "deleting": True, "conditions": disruption("DeletionByTaintManager")}, EndCause.DRAINED),
        ({"phase": "Failed", "deleting": True, "conditions": disruption("PreemptionByScheduler")}, EndCause.PREEMPTED),
        ({"phase": "Failed", "deleting": True, "conditions": disruption(MOVED)}, EndCause.MOVED),
        ({"phase": "Failed", "conditions": disruption("DeletionByPodGC")}, EndCause.NODE_LOST),
        ({"phase": "Failed", "conditions": disruption("TerminationByKubelet")}, EndCause.EVICTED),
        ({"phase": "Failed", "conditions": disruption("SomethingNewer")}, EndCause.EVICTED),
        ({"phase": "Failed", "status": {"reason": "Evicted"}}, EndCause.EVICTED),
        ({"phase": "Failed", "status": {"reason": "DeadlineExceeded"}}, EndCause.DEADLINE),
        ({"phase": "Failed", "status": {"reason": "OutOfcpu"}}, EndCause.REJECTED),
        ({"phase": "Failed", "status": {"reason": "UnexpectedAdmissionError"}}, EndCause.REJECTED),
        ({"phase": "Failed"}, EndCause.CONTAINER_FAILED),
        ({"phase": "Succeeded"}, EndCause.COMPLETED),
        ({"phase": "Succeeded", "deleting": True, "restart": "OnFailure"}, EndCause.DELETED),
        ({"phase": "Succeeded", "deleting": True, "conditions": disruption("EvictionByEvictionAPI")}, EndCause.DRAINED),
        ({"phase": "Succeeded", "deleting": True, "restart": "Always"}, EndCause.DELETED),
        ({"phase": "Failed", "deleting": True}, EndCause.DELETED),
    ],
)
def test_a_pod_shows_why_it_ended(fields: Json, cause: EndCause) -> None:
    ended = pod(node="node-a", **fields)
    assert end_of(ended).cause is cause
    assert end_of_lost(SharePodStatus(), ended, node_lost=False).cause is cause


def test_a_missing_pod_counts_as_deleted_unless_its_node_is_missing_too() -> None:
    running = pod(node="node-a", phase="Running")
    assert end_of_lost(SharePodStatus(), running, node_lost=False).cause is EndCause.DELETED
    assert end_of_lost(SharePodStatus(), None, node_lost=True).cause is EndCause.NODE_LOST
    drained = pod(node="node-a", phase="Running", conditions=disruption("EvictionByEvictionAPI"))
    assert end_of_lost(SharePodStatus(), drained, node_lost=False).cause is EndCause.DRAINED


@pytest.mark.promise("operator-deleted-first")
@pytest.mark.parametrize(
    ("finished", "exit_code", "cause"),
    [
        (["00:00:29", "00:00:20"], 0, EndCause.COMPLETED),
        (["00:00:29", "00:00:20"], 3, EndCause.CONTAINER_FAILED),
        (["00:00:30", "00:00:20"], 0, EndCause.DELETED),
        (["00:00:45", "00:00:20"], 0, EndCause.DELETED),
        (["00:00:45", "00:00:20"], 3, EndCause.DELETED),
        (["", "00:00:20"], 0, EndCause.DELETED),
        ([], 0, EndCause.DELETED),
    ],
)
def test_a_pod_that_was_deleted_before_it_had_ended_was_deleted_whatever_sigterm_made_of_it(
    finished: list[str], exit_code: int, cause: EndCause
) -> None:
    states = [
        {"terminated": {"exitCode": exit_code, "finishedAt": time and f"2026-01-01T{time}Z"}} for time in finished
    ]
    phase = "Failed" if exit_code else "Succeeded"
    raw = pod_object(node="node-a", phase=phase, deleting=True, restart="OnFailure")
    raw["status"]["containerStatuses"] = [{"name": "main", "state": state} for state in states]
    raw["metadata"] |= {"deletionTimestamp": "2026-01-01T00:01:00Z", "deletionGracePeriodSeconds": 30}
    assert end_of(pod_facts(raw)).cause is cause


@pytest.mark.promise("operator-back-off")
def test_failures_in_a_row_wait_as_a_jobs_do_and_a_first_disruption_not_at_all() -> None:
    def pauses(cause: EndCause, ran_s: float) -> list[float]:
        found, attempts = [], 0
        for _ in range(9):
            attempts = attempts_after(cause, ran_s, attempts)
            found.append(pause_s(cause, attempts))
        return found

    assert pauses(EndCause.CONTAINER_FAILED, 599) == [10, 20, 40, 80, 160, 320, 360, 360, 360]
    assert pauses(EndCause.CONTAINER_FAILED, 600) == [10] * 9
    assert pauses(EndCause.DRAINED, 59)[:4] == [0, 20, 40, 80]
    assert pauses(EndCause.DRAINED, 60) == [0] * 9


@given(st.sampled_from(EndCause), st.floats(-1e9, 1e9), st.integers(0, 1 << 31))
def test_no_pause_is_longer_than_six_minutes(cause: EndCause, ran_s: float, attempts: int) -> None:
    after = attempts_after(cause, ran_s, attempts)
    assert 0 <= pause_s(cause, after) <= LONGEST_PAUSE_S
