"""The operator's token in wrong hands: what it may do to Pods and Nodes that are not SharePod's."""

from __future__ import annotations

from typing import Any

import pytest
from cluster.admission import PODS, pod_of, refusal
from harness.api import Api, ApiError, Object
from harness.cluster import Cluster
from harness.installation import NAMESPACE

POD: Object = {"spec": {"containers": [{"name": "main", "image": "x"}]}}
MILLI = "sharepod.dev/gpu-milli"


@pytest.fixture(scope="module")
def operator(server: Cluster) -> Api:
    return server.api_for(server.service_account_token(NAMESPACE, "sharepod-operator"))


def create_refused(api: Api, path: str, body: Object) -> str:
    with pytest.raises(ApiError) as refused:
        api.create(path, body, dryRun="All")
    assert refused.value.code == 403
    return refused.value.message


def without(body: Object, part: str) -> Object:
    """The Pod of a SharePod that lacks one part of what makes it one."""
    metadata, spec = dict(body["metadata"]), dict(body["spec"])
    if part == "label":
        metadata["labels"] = {}
    elif part == "controller":
        metadata["ownerReferences"] = []
    elif part == "its own controller":
        metadata["ownerReferences"] = [{**metadata["ownerReferences"][0], "uid": "another"}]
    elif part == "volume":
        spec["volumes"] = [{"name": "sharepod-gpu", "emptyDir": {}}]
    elif part == "mount":
        spec["containers"] = [{**container, "volumeMounts": []} for container in spec["containers"]]
    elif part == "claim":
        spec["resourceClaims"] = []
        spec["containers"] = [{**container, "resources": {}} for container in spec["containers"]]
    elif part == "gate":
        spec["schedulingGates"] = []
    return {**body, "metadata": metadata, "spec": spec}


@pytest.mark.promise("security-operator-own-pods")
def test_the_token_creates_pods_of_sharepods_and_no_others(server: Cluster, operator: Api) -> None:
    body = pod_of(server, "of-the-operator")
    operator.create(PODS, body, dryRun="All")
    for part in ("label", "controller", "its own controller"):
        assert "create pods with the label sharepod.dev/tenant" in create_refused(operator, PODS, without(body, part))
    for part in ("volume", "mount", "gate"):
        assert "and no others" in create_refused(operator, PODS, without(body, part))
    by_claim = pod_of(server, "by-claim", claim="by-claim-1")
    operator.create(PODS, by_claim, dryRun="All")
    for part in ("claim", "gate"):
        assert "and no others" in create_refused(operator, PODS, without(by_claim, part))
    for namespace in ("kube-system", NAMESPACE):
        elsewhere = {**body, "metadata": {**body["metadata"], "namespace": namespace}}
        said = create_refused(operator, f"/api/v1/namespaces/{namespace}/pods", elsewhere)
        assert f"no business with pods in namespace {namespace}" in said


@pytest.mark.promise("security-operator-own-pods")
def test_a_holder_of_the_operators_has_nothing_of_its_node(server: Cluster, operator: Api) -> None:
    pods = f"/api/v1/namespaces/{NAMESPACE}/pods"
    server.await_service_account(NAMESPACE, "default")
    holder: Object = {**POD, "metadata": {"name": "holder", "labels": {"sharepod.dev/holder": "x"}}}
    operator.create(pods, holder)
    operator.delete(f"{pods}/holder")
    reaching: list[dict[str, Any]] = [
        {"hostPID": True},
        {"hostNetwork": True},
        {"volumes": [{"name": "node", "hostPath": {"path": "/"}}]},
        {"containers": [{"name": "main", "image": "x", "securityContext": {"privileged": True}}]},
    ]
    for part in reaching:
        said = create_refused(operator, pods, {**holder, "spec": {**holder["spec"], **part}})
        assert "no business with pods in namespace" in said
    create_refused(operator, PODS, holder)


@pytest.mark.promise("security-operator-own-pods")
def test_the_token_changes_and_ends_no_pod_of_others(server: Cluster, operator: Api) -> None:
    server.api.create(PODS, {**POD, "metadata": {"name": "of-a-team", "annotations": {"a": "b"}}})
    path = f"{PODS}/of-a-team"
    operator.patch(path, {"metadata": {"annotations": {"sharepod.dev/gpus": "GPU-1"}}})
    changes: list[dict[str, Any]] = [
        {"metadata": {"annotations": {"a": "c"}}},
        {"metadata": {"annotations": {"a": None}}},
        {"metadata": {"labels": {"app": "x"}}},
        {"metadata": {"finalizers": ["sharepod.dev/x"]}},
        {"spec": {"activeDeadlineSeconds": 5}},
    ]
    for change in changes:
        assert "annotation sharepod.dev/gpus alone" in refusal(operator, path, change)
    with pytest.raises(ApiError, match="change and delete pods with that label"):
        operator.delete(path)
    server.await_service_account("kube-system", "default")
    server.api.create("/api/v1/namespaces/kube-system/pods", {**POD, "metadata": {"name": "of-the-system"}})
    eviction = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": "of-the-system"}}
    said = create_refused(operator, "/api/v1/namespaces/kube-system/pods/of-the-system/eviction", eviction)
    assert "no business with pods in namespace kube-system" in said


@pytest.mark.promise("security-operator-own-pods")
def test_a_pod_that_a_user_has_taken_from_its_sharepod_still_ends(server: Cluster, operator: Api) -> None:
    operator.create(PODS, pod_of(server, "orphaned"))
    server.api.patch(f"{PODS}/orphaned", {"metadata": {"ownerReferences": None}})
    operator.delete(f"{PODS}/orphaned")


@pytest.mark.promise("security-operator-own-resources")
def test_the_token_changes_no_node_but_the_resources_of_the_line(server: Cluster, operator: Api) -> None:
    (node,) = server.add_fake_nodes(1, prefix="advertised")
    path = f"/api/v1/nodes/{node}/status"
    operator.patch(path, {"status": {"capacity": {MILLI: "1000"}, "allocatable": {MILLI: "1000"}}})
    operator.patch(path, {"status": {"capacity": {MILLI: "2000"}, "allocatable": {MILLI: "2000"}}})
    changes: list[dict[str, Any]] = [
        {"metadata": {"labels": {"zone": "x"}}},
        {"metadata": {"annotations": {"a": "b"}}},
        {"status": {"allocatable": {"cpu": "1"}}},
        {"status": {"capacity": {"nvidia.com/gpu": "8"}}},
        {"status": {"allocatable": {"memory": None}}},
        {"status": {"conditions": [{"type": "Ready", "status": "False"}]}},
        {"status": {"addresses": [{"type": "InternalIP", "address": "10.9.9.9"}]}},
    ]
    for change in changes:
        assert f"of the status of node {node}, and nothing else" in refusal(operator, path, change)
