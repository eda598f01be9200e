"""Plain Pods with a resource line over their life, with claims and with volumes: Jobs whose Pods fail, and preemption
by kube-scheduler.

Controllers and scheduler are real.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from cluster.fake_agents import FakeAgents
from cluster.operator_world import AGENT_LEASE, World, wait
from cluster.plain_webhook_world import start_with_webhook
from cluster.plain_world import container, install_plain, line_pod, need_mutating_policies
from harness.api import Object
from harness.cluster import Cluster
from harness.fakes import FakeKubelets


@pytest.fixture(scope="module", params=["claim", "volume"])
def world(request: pytest.FixtureRequest) -> Iterator[World]:
    with (
        Cluster() as cluster,
        FakeKubelets(cluster.api) as kubelets,
        FakeAgents(cluster.api, duration=AGENT_LEASE, renew=0.5) as agents,
    ):
        world = World(cluster, kubelets, agents)
        if request.param == "volume":
            start_with_webhook(world, "plain-volume")
        else:
            need_mutating_policies(cluster.api)
            install_plain(cluster)
            world.start_operator()
        yield world
        assert not kubelets.failures, kubelets.failures[:3]
        assert not agents.failures


def pods(world: World, namespace: str) -> list[Object]:
    found: list[Object] = world.api.get(f"/api/v1/namespaces/{namespace}/pods")["items"]
    return found


def template(prefix: str, milli: str, *, annotations: dict[str, str] | None = None, **spec: Any) -> Object:
    """Return the template of Pods with a line, for nodes with the label `test=PREFIX`."""
    one = container(milli=milli)
    one["resources"]["requests"] = {"cpu": spec.pop("cpu", "100m")}
    body = line_pod(one, annotations=annotations, nodeSelector={"test": prefix}, **spec)
    return {"metadata": {"labels": {"app": prefix}, "annotations": annotations or {}}, "spec": body["spec"]}


@pytest.mark.promise("operator-line-failing-job")
def test_a_job_that_fails_has_a_share_for_each_try_and_leaves_none(world: World) -> None:
    (node,) = world.nodes("fails")
    namespace = world.cluster.namespace("fails")
    ends = {"test.sharepod.dev/run-seconds": "0.2", "test.sharepod.dev/phase": "Failed"}
    spec = {"backoffLimit": 1, "template": template("fails", "800", annotations=ends)}
    job = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "job"}, "spec": spec}
    world.api.create(f"/apis/batch/v1/namespaces/{namespace}/jobs", job)

    def failed() -> bool:
        status = world.api.get(f"/apis/batch/v1/namespaces/{namespace}/jobs/job").get("status", {})
        reasons = [one["reason"] for one in status.get("conditions", []) if one["type"] == "Failed"]
        return reasons == ["BackoffLimitExceeded"]

    wait(failed, what="the Job gives up", timeout=90)
    tries = pods(world, namespace)
    assert [pod["status"]["phase"] for pod in tries] == ["Failed", "Failed"]
    assert all(pod["spec"].get("nodeName") == node for pod in tries)
    wait(lambda: not world.rows(node), what="the shares are released")


@pytest.mark.promise("operator-line-job-taken-back")
def test_a_job_without_a_second_try_lives_through_a_node_that_kube_scheduler_refuses(world: World) -> None:
    nodes = world.nodes("once", 2)
    namespace = world.cluster.namespace("once")
    world.apply(namespace, "first", {"request": 0.4}, on="once", labels={"app": "x"})
    first = world.phase(namespace, "first", "Running")["status"]["node"]
    rule = {"labelSelector": {"matchLabels": {"app": "x"}}, "topologyKey": "kubernetes.io/hostname"}
    apart = {"podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [rule]}}
    ends = {"test.sharepod.dev/run-seconds": "0.2"}
    spec = {"backoffLimit": 0, "template": template("once", "400", annotations=ends, affinity=apart)}
    job = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "job"}, "spec": spec}
    world.api.create(f"/apis/batch/v1/namespaces/{namespace}/jobs", job)

    def status() -> Object:
        found: Object = world.api.get(f"/apis/batch/v1/namespaces/{namespace}/jobs/job").get("status", {})
        return found

    wait(lambda: {"Complete", "Failed"} & {one["type"] for one in status().get("conditions", [])}, what="it ends")
    assert (status().get("succeeded"), status().get("failed")) == (1, None)
    (pod,) = [pod for pod in pods(world, namespace) if pod["metadata"]["name"] != "first"]
    assert pod["spec"]["nodeName"] in set(nodes) - {first}


@pytest.mark.promise("operator-line-scheduler-preemption")
def test_one_that_kube_scheduler_preempts_gives_its_share_back_and_the_next_one_waits_without(world: World) -> None:
    world.api.create("/apis/scheduling.k8s.io/v1/priorityclasses", {"metadata": {"name": "urgent"}, "value": 1000})
    (node,) = world.nodes("cpu", cpu="4")
    namespace = world.cluster.namespace("cpu")
    spec = {
        "replicas": 1,
        "selector": {"matchLabels": {"app": "cpu"}},
        "template": template("cpu", "800", cpu="3", restartPolicy="Always"),
    }
    low = {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": "low"}, "spec": spec}
    world.api.create(f"/apis/apps/v1/namespaces/{namespace}/deployments", low)
    wait(lambda: [pod for pod in pods(world, namespace) if pod["spec"].get("nodeName")], what="it runs")
    first = pods(world, namespace)[0]["metadata"]["name"]
    urgent: Object = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "urgent"},
        "spec": {
            "priorityClassName": "urgent",
            "nodeSelector": {"test": "cpu"},
            "containers": [{"name": "main", "image": "x", "resources": {"requests": {"cpu": "3"}}}],
        },
    }
    world.api.create(f"/api/v1/namespaces/{namespace}/pods", urgent)
    wait(
        lambda: (world.pod(namespace, "urgent") or {}).get("status", {}).get("phase") == "Running",
        what="kube-scheduler preempted for it",
    )
    assert world.pod(namespace, first) is None
    wait(lambda: not world.rows(node), what="the share is released, and the waiting Pod holds none")
    (waits,) = wait(
        lambda: [pod for pod in pods(world, namespace) if pod["metadata"]["name"] != "urgent"], what="the next Pod"
    )
    assert not waits["spec"].get("nodeName")
    world.api.delete(f"/api/v1/namespaces/{namespace}/pods/urgent")
    wait(
        lambda: (world.pod(namespace, waits["metadata"]["name"]) or {}).get("status", {}).get("phase") == "Running",
        what="it gets the room",
    )
    assert len(world.rows(node)) == 1
