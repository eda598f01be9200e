"""Placeholders on a real API server with the real scheduler. A share without room makes the operator create a
placeholder, which requests a node from an autoscaler. The operator's own ServiceAccount and the manifests' policies
apply.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from cluster.operator_world import TIMES, World, wait
from cluster.plain_world import (
    MEMORY,
    MILLI,
    container,
    install_plain,
    line_pod,
    need_mutating_policies,
    serves_mutating_policies,
)
from cluster.shared_cluster import SharedCluster
from harness.api import ApiError, Object
from harness.installation import NAMESPACE
from sharepod.api.units import parse_whole

PODS = f"/api/v1/namespaces/{NAMESPACE}/pods"
ASKING = {
    **TIMES,
    "SHAREPOD_PLACEHOLDERS": "4",
    "SHAREPOD_PLACEHOLDERS_PER_NAMESPACE": "2",
    "SHAREPOD_PLACEHOLDER_AFTER": "0.5",
    "SHAREPOD_PLACEHOLDER_FOR": "600",
}


@pytest.fixture(scope="module")
def world(shared_cluster: SharedCluster) -> Iterator[World]:
    with shared_cluster.world(times=ASKING) as running:
        if serves_mutating_policies(running.api):
            install_plain(running.cluster)
        yield running


def placeholders(world: World, namespace: str) -> list[Object]:
    """Return the placeholders of the pending requests in a namespace, by name."""
    found = world.api.request("GET", PODS, query={"labelSelector": "sharepod.dev/placeholder"})["items"]
    ours = [pod for pod in found if whose(pod).partition("/")[0] == namespace]
    return sorted(ours, key=lambda pod: str(pod["metadata"]["name"]))


def whose(pod: Object) -> str:
    return str(pod["metadata"]["annotations"]["sharepod.dev/placeholder-for"])


def scheduled(pod: Object) -> Object:
    """Return the condition PodScheduled of a Pod. Empty if it has none."""
    conditions = pod.get("status", {}).get("conditions") or []
    return next((one for one in conditions if one["type"] == "PodScheduled"), {})


def one_of(world: World, namespace: str) -> Object:
    """Return the namespace's only placeholder, once kube-scheduler has set its condition to Unschedulable."""
    wait(
        lambda: [scheduled(pod).get("reason") for pod in placeholders(world, namespace)] == ["Unschedulable"],
        what="a placeholder with the condition Unschedulable",
    )
    (pod,) = placeholders(world, namespace)
    return pod


def full(world: World, prefix: str, namespace: str) -> str:
    """Create a node, and take 0.6 of each of its two GPUs; return its name."""
    (node,) = world.nodes(prefix)
    for name in ("one", "two"):
        world.apply(namespace, name, {"request": 0.6, "memory": "1Gi"}, on=prefix, restartPolicy="Always")
    for name in ("one", "two"):
        world.phase(namespace, name, "Running")
    return node


def amounts_of(pod: Object) -> dict[str, str]:
    limits = pod["spec"]["containers"][0]["resources"]["limits"]
    return {name: limits[name] for name in (MILLI, MEMORY) if name in limits}


@pytest.mark.promise("operator-placeholder", "operator-placeholder-never-runs", "operator-placeholder-ends")
def test_a_sharepod_without_room_asks_for_a_node_and_asks_no_more_once_it_is_placed(world: World) -> None:
    namespace = world.cluster.namespace("asks")
    node = full(world, "asks", namespace)
    world.apply(namespace, "three", {"request": 0.7, "memory": "2Gi"}, on="asks")
    pod = one_of(world, namespace)
    assert whose(pod) == f"{namespace}/three"
    assert pod["spec"]["preemptionPolicy"] == "Never"
    assert pod["spec"]["nodeSelector"] == {"test": "asks"}
    if serves_mutating_policies(world.api):
        assert amounts_of(pod) == {MILLI: "700", MEMORY: "2048"}, "its line, and no claim for it"
        allocatable = world.api.get(f"/api/v1/nodes/{node}")["status"]["allocatable"]
        assert parse_whole(allocatable[MILLI]) - 1200 >= 700, "kube-scheduler's sum has room for it"
    assert "resourceClaims" not in pod["spec"]
    world.event(namespace, "three", "NodeAskedFor")

    (new,) = world.cluster.add_fake_nodes(
        1, labels={"sharepod.dev/pool": "dedicated", "test": "asks"}, prefix="asks-new"
    )
    wait(lambda: not placeholders(world, namespace), what="no placeholder while a node comes")
    world.agents.start(new)
    world.phase(namespace, "three", "Running")
    assert not world.row(node, "three")
    assert not placeholders(world, namespace)


@pytest.mark.promise("operator-placeholder", "operator-placeholder-ends")
def test_a_plain_pod_asks_with_its_line_and_its_end_ends_that(world: World) -> None:
    need_mutating_policies(world.api)
    namespace = world.cluster.namespace("line")
    full(world, "asked", namespace)
    body = line_pod(container(milli="500", mib="1024"), name="plain", nodeSelector={"test": "asked"})
    path = f"/api/v1/namespaces/{namespace}/pods"
    made = world.api.create(path, body)
    assert made["metadata"]["labels"]["sharepod.dev/line"] == "true"
    pod = one_of(world, namespace)
    assert amounts_of(pod) == {MILLI: "500", MEMORY: "1024"}
    assert not pod["spec"].get("nodeName")
    world.api.delete(f"{path}/plain")
    wait(lambda: not placeholders(world, namespace), what="no placeholder without the Pod")


@pytest.mark.promise("operator-placeholder-quota")
def test_no_quota_of_the_users_namespace_counts_it(world: World) -> None:
    namespace = world.cluster.namespace("counted")
    (node,) = world.nodes("counted")
    quota = {"apiVersion": "v1", "kind": "ResourceQuota", "metadata": {"name": "all"}}
    world.api.create(
        f"/api/v1/namespaces/{namespace}/resourcequotas",
        {**quota, "spec": {"hard": {"pods": "3", "requests.cpu": "300m"}}},
    )
    path = f"/api/v1/namespaces/{namespace}/resourcequotas/all"
    # Admission counts no Pod for a quota without status.hard, and the controller's first count may be too early for it.
    wait(lambda: "hard" in (world.api.get(path).get("status") or {}), what="a quota that the controller has counted")
    for name, request in (("one", 0.9), ("two", 0.9), ("three", 0.9)):
        world.apply(namespace, name, {"request": request, "memory": "1Gi"}, on="counted", restartPolicy="Always")
    one_of(world, namespace)
    wait(lambda: world.api.get(path)["status"]["used"]["pods"] == "3", what="a quota that counts the user's Pods")
    assert len(world.rows(node)) == 2


@pytest.mark.promise("operator-placeholder-limits")
def test_a_namespace_asks_for_no_more_than_the_setting_says_also_after_a_kill(world: World) -> None:
    namespace = world.cluster.namespace("many")
    world.nodes("many")
    for number in range(5):
        world.apply(
            namespace, f"job-{number}", {"request": 1, "count": 2, "memory": "1Gi"}, on="many", restartPolicy="Always"
        )
    wait(lambda: len(placeholders(world, namespace)) == 2, what="two placeholders")
    before = {pod["metadata"]["uid"] for pod in placeholders(world, namespace)}
    assert world.operator is not None
    world.operator.stop(grace=0)
    world.start_operator("again")
    wait(lambda: world.metric("sharepod_operator_placeholders", "again") >= 2, what="the next one looks")
    assert {pod["metadata"]["uid"] for pod in placeholders(world, namespace)} == before, "it goes on with what it finds"


@pytest.mark.promise("security-placeholders")
def test_nobody_else_makes_placeholders_and_the_operator_writes_one_condition_of_theirs(world: World) -> None:
    api = world.api
    admin = world.cluster.service_account_token
    namespace = world.cluster.namespace("forger")
    operator = world.cluster.api_for(admin(NAMESPACE, "sharepod-operator"))
    world.cluster.kubectl("create", "serviceaccount", "forger", "--namespace", namespace)
    world.cluster.kubectl(
        "create",
        "rolebinding",
        "forger",
        "--clusterrole=admin",
        f"--serviceaccount={namespace}:forger",
        "--namespace",
        namespace,
    )
    forger = world.cluster.api_for(admin(namespace, "forger"))
    full(world, "forger", namespace)
    world.apply(namespace, "three", {"request": 0.7, "memory": "1Gi"}, on="forger")
    pod = one_of(world, namespace)
    bare = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "sharepod-placeholder-x", "labels": {"sharepod.dev/placeholder": "x"}},
        "spec": {"containers": pod["spec"]["containers"], "tolerations": []},
    }

    def refused(by: Any, path: str, body: Object) -> str:
        with pytest.raises(ApiError) as error:
            by.create(path, body)
        return error.value.message

    assert "is put on the operator's own pods alone" in refused(forger, f"/api/v1/namespaces/{namespace}/pods", bare)
    plain = line_pod(name="later")
    if serves_mutating_policies(api):
        forger.create(f"/api/v1/namespaces/{namespace}/pods", plain)
        with pytest.raises(ApiError, match="is put on the operator's own pods alone"):
            forger.patch(
                f"/api/v1/namespaces/{namespace}/pods/later",
                {"metadata": {"labels": {"sharepod.dev/placeholder": "x"}}},
            )
    status = f"{PODS}/{pod['metadata']['name']}/status"
    with pytest.raises(ApiError, match="may write the condition PodScheduled"):
        operator.patch(status, {"status": {"phase": "Running"}})
    with pytest.raises(ApiError, match="may write the condition PodScheduled"):
        operator.patch(status, {"status": {"conditions": [{"type": "Ready", "status": "True"}]}})
    for address in ({"podIP": "10.9.9.9", "podIPs": [{"ip": "10.9.9.9"}]}, {"hostIP": "10.9.9.9"}):
        with pytest.raises(ApiError, match="may write the condition PodScheduled"):
            operator.patch(status, {"status": address})
    with pytest.raises(ApiError):
        operator.patch(f"/api/v1/namespaces/{namespace}/pods/one/status", {"status": {"phase": "Failed"}})
