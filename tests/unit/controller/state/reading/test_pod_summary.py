"""READY and STATUS of a Pod, as `kubectl get pods` prints them."""

from __future__ import annotations

from typing import Any

import pytest
from sharepod.controller.state.reading.pod_summary import ready_containers, summary

GATED = [{"type": "PodScheduled", "status": "False", "reason": "SchedulingGated"}]
READY = [{"type": "Ready", "status": "True"}]
INITIALIZED = [{"type": "Initialized", "status": "True"}]


def container(ready: bool = False, **state: Any) -> dict[str, Any]:
    return {"name": "c", "ready": ready, "state": state}


def waits(reason: str) -> dict[str, Any]:
    return container(waiting={"reason": reason})


RUNS = container(True, running={"startedAt": "x"})
DONE = container(terminated={"exitCode": 0, "reason": "Completed"})


@pytest.mark.promise("operator-columns")
@pytest.mark.parametrize(
    ("status", "printed"),
    [
        ({}, "Pending"),
        ({"phase": "Pending", "conditions": GATED}, "Pending"),
        ({"phase": "Running", "containerStatuses": [RUNS]}, "Running"),
        ({"phase": "Running", "containerStatuses": [waits("CrashLoopBackOff")]}, "CrashLoopBackOff"),
        ({"phase": "Pending", "containerStatuses": [waits("ImagePullBackOff")]}, "ImagePullBackOff"),
        ({"phase": "Pending", "containerStatuses": [waits("ContainerCreating")]}, "ContainerCreating"),
        ({"phase": "Succeeded", "containerStatuses": [DONE]}, "Completed"),
        ({"phase": "Running", "containerStatuses": [DONE, RUNS], "conditions": READY}, "Running"),
        ({"phase": "Running", "containerStatuses": [DONE, RUNS]}, "NotReady"),
        ({"phase": "Failed", "containerStatuses": [container(terminated={"exitCode": 3, "reason": "Error"})]}, "Error"),
        ({"phase": "Failed", "containerStatuses": [container(terminated={"exitCode": 3})]}, "ExitCode:3"),
        ({"phase": "Failed", "containerStatuses": [container(terminated={"signal": 9, "exitCode": 137})]}, "Signal:9"),
        ({"phase": "Failed", "reason": "Evicted"}, "Evicted"),
        ({"phase": "Pending", "initContainerStatuses": [container(running={})]}, "Init:0/2"),
        ({"phase": "Pending", "initContainerStatuses": [DONE, waits("PodInitializing")]}, "Init:1/2"),
        ({"phase": "Pending", "initContainerStatuses": [waits("ErrImagePull")]}, "Init:ErrImagePull"),
        ({"phase": "Pending", "initContainerStatuses": [container(terminated={"exitCode": 1})]}, "Init:ExitCode:1"),
    ],
)  # fmt: skip
def test_a_pod_is_summed_up_as_kubectl_does(status: dict[str, Any], printed: str) -> None:
    spec = {"containers": [{"name": "c"}], "initContainers": [{"name": "a"}, {"name": "b"}]}
    assert summary({}, spec, status) == printed
    ended = status.get("phase") in ("Succeeded", "Failed")
    assert summary({"deletionTimestamp": "x"}, spec, status) == (printed if ended else "Terminating")


def test_a_gate_is_told_while_it_is_there_and_not_by_what_the_api_server_has_said_of_it() -> None:
    spec = {"containers": [{}], "schedulingGates": [{"name": "g"}]}
    assert summary({}, spec, {"phase": "Pending", "conditions": GATED}) == "SchedulingGated"


SIDECAR: dict[str, Any] = {"containers": [{}], "initContainers": [{"name": "c", "restartPolicy": "Always"}]}
"""PodSpec with a sidecar."""


def test_a_running_sidecar_counts_as_ready() -> None:
    sidecar = {**RUNS, "started": True}
    status = {"phase": "Running", "initContainerStatuses": [sidecar], "containerStatuses": [RUNS]}
    assert summary({}, SIDECAR, status) == "Running"
    assert ready_containers(SIDECAR, status) == "2/2"


@pytest.mark.promise("operator-columns")
@pytest.mark.parametrize(
    "sidecar", [waits("CrashLoopBackOff"), container(terminated={"exitCode": 137, "reason": "Error"})]
)
def test_a_sidecar_that_fails_once_all_have_started_is_not_ready_and_starts_nothing_again(
    sidecar: dict[str, Any],
) -> None:
    status = {"phase": "Running", "initContainerStatuses": [sidecar], "containerStatuses": [RUNS]}
    assert summary({}, SIDECAR, {**status, "conditions": INITIALIZED}) == "Running"
    assert summary({}, SIDECAR, status).startswith("Init:")
    assert ready_containers(SIDECAR, status) == "1/2"


def test_ready_containers_are_counted_of_those_that_are_asked_for() -> None:
    spec: dict[str, Any] = {"containers": [{}, {}]}
    assert ready_containers(spec, {}) == "0/2"
    assert ready_containers(spec, {"containerStatuses": [RUNS, DONE]}) == "1/2"
