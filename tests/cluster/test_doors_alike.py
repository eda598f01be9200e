"""Promises that hold alike for Pods with a claim from a template and Pods with a resource line, whatever workload
created them.

API server, controllers and scheduler are real.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from cluster.claims_world import make_template, pod_body
from cluster.doors import Door
from cluster.operator_world import World, wait
from cluster.plain_world import a_world_of_lines, container, line_pod
from cluster.shared_cluster import SharedCluster
from harness.api import Object

DOORS = pytest.mark.parametrize("door", [Door.CLAIM, Door.LINE], ids=lambda door: door.value)
GROUPS = {"DaemonSet": "apps/v1", "Job": "batch/v1"}


@pytest.fixture(scope="module")
def world(shared_cluster: SharedCluster) -> Iterator[World]:
    with a_world_of_lines(shared_cluster) as running:
        yield running


class Team:
    """Namespace with its own nodes. Its Pods request 0.8 of a GPU, all by a claim or all by a line (`door`)."""

    def __init__(self, world: World, name: str, door: Door, nodes: int = 1) -> None:
        self.world = world
        self.on = f"{name}-{door.value}"
        self.nodes = world.nodes(self.on, nodes)
        self.namespace = world.cluster.namespace(self.on)
        self._door = door
        make_template(world, self.namespace, "t800", time_milli=800)

    def pod(self, name: str = "one", **spec: Any) -> Object:
        if self._door is Door.CLAIM:
            return pod_body(name, template="t800", nodeSelector={"test": self.on}, **spec)
        return line_pod(container(milli="800"), name=name, nodeSelector={"test": self.on}, **spec)

    def start(self, kind: str, *, annotations: dict[str, str] | None = None, **spec: Any) -> None:
        """Create a workload of such Pods."""
        made = self.pod()["spec"]
        if kind == "DaemonSet":
            spec["selector"] = {"matchLabels": {"app": "work"}}
            made["restartPolicy"] = "Always"
        metadata = {"labels": {"app": "work"}, "annotations": annotations or {}}
        body = {"template": {"metadata": metadata, "spec": made}, **spec}
        work = {"apiVersion": GROUPS[kind], "kind": kind, "metadata": {"name": "work"}, "spec": body}
        self.kubectl("apply", "-f", "-", input=json.dumps(work))

    def kubectl(self, *args: str, **options: Any) -> None:
        self.world.cluster.kubectl(*args, "-n", self.namespace, **options)

    def pods(self) -> list[Object]:
        found: list[Object] = self.world.api.get(f"/api/v1/namespaces/{self.namespace}/pods")["items"]
        return found

    def running(self) -> list[str]:
        """Return the nodes of the Pods that run."""
        return [pod["spec"]["nodeName"] for pod in self.pods() if pod["status"].get("phase") == "Running"]

    def rows(self) -> int:
        return sum(len(self.world.rows(node)) for node in self.nodes)


@pytest.mark.promise("operator-doors-daemon-set")
@DOORS
def test_each_node_has_the_share_of_its_daemon(world: World, door: Door) -> None:
    team = Team(world, "daemon", door, nodes=2)
    team.start("DaemonSet")
    wait(lambda: sorted(team.running()) == sorted(team.nodes), what="a daemon on each node")
    assert [len(world.rows(node)) for node in team.nodes] == [1, 1]


@pytest.mark.promise("operator-doors-failing-job")
def test_a_job_that_fails_has_a_share_for_each_try_and_leaves_none(world: World) -> None:
    team = Team(world, "fails", Door.CLAIM)  # by a line: test_plain_life.py
    ends = {"test.sharepod.dev/run-seconds": "0.2", "test.sharepod.dev/phase": "Failed"}
    team.start("Job", annotations=ends, backoffLimit=1)

    def failed() -> bool:
        status = world.api.get(f"/apis/batch/v1/namespaces/{team.namespace}/jobs/work").get("status", {})
        return [one["reason"] for one in status.get("conditions", []) if one["type"] == "Failed"] == [
            "BackoffLimitExceeded"
        ]

    wait(failed, what="the Job gives up", timeout=90)
    assert [pod["status"]["phase"] for pod in team.pods()] == ["Failed", "Failed"]
    wait(lambda: not team.rows(), what="the shares are released")


@pytest.mark.promise("operator-doors-suspended")
@DOORS
def test_a_suspended_job_gives_its_share_back_and_has_one_again_once_it_goes_on(world: World, door: Door) -> None:
    team = Team(world, "suspended", door)
    team.start("Job")
    wait(lambda: len(team.running()) == 1, what="it runs")
    team.kubectl("patch", "job/work", "--type=merge", "-p", '{"spec": {"suspend": true}}')
    wait(lambda: not team.rows(), what="the share is released")
    team.kubectl("patch", "job/work", "--type=merge", "-p", '{"spec": {"suspend": false}}')
    wait(lambda: len(team.running()) == 1, what="it runs again")
    assert team.rows() == 1


@pytest.mark.promise("operator-doors-foreign-gate")
@DOORS
def test_a_pod_behind_a_gate_of_others_holds_no_share_and_a_later_one_goes_first(world: World, door: Door) -> None:
    team = Team(world, "gate", door)
    pods = f"/api/v1/namespaces/{team.namespace}/pods"
    world.api.create(pods, team.pod("gated", schedulingGates=[{"name": "example.com/quota"}]))
    for name in ("two", "three"):  # two Pods without a gate fill both GPUs of the node
        world.api.create(pods, team.pod(name))
    wait(lambda: len(team.running()) == 2, what="those without a gate")
    assert team.rows() == 2
    team.kubectl("patch", "pod/gated", "--type=json", "-p", '[{"op": "remove", "path": "/spec/schedulingGates"}]')
    team.kubectl("delete", "pod/two")
    wait(lambda: len(team.running()) == 2, what="the one whose gate was opened")
    assert team.rows() == 2
