"""A stolen token of the operator: which objects that do not belong to SharePod it can change."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
from cluster.admission import PODS, pod_of, refusal
from cluster.claims_world import FINALIZER, claim_path, serves_claims
from harness.api import Api, ApiError, Object
from harness.cluster import Cluster
from harness.installation import NAMESPACE
from sharepod.api.claims.share_claims import build_claim
from sharepod.api.objects import SCHEDULER_CLASS
from sharepod.api.pods.holder_pod import holder_pod
from sharepod.api.sharepod import GpuRequest
from sharepod.api.units import Milli, TenantId
from sharepod.controller.scaling.placeholder_pod import PlaceholderSettings, placeholder_pod
from sharepod.controller.settings import OperatorSettings
from sharepod.placement.state.types import PlacementRequest

POD: Object = {"spec": {"containers": [{"name": "main", "image": "x"}]}}
HOLDERS = f"/api/v1/namespaces/{NAMESPACE}/pods"
Change = Callable[[Object], object]
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
    """Return a SharePod's Pod without one of its identifying parts."""
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
def test_the_operators_token_creates_only_pods_of_sharepods(server: Cluster, operator: Api) -> None:
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
        output = create_refused(operator, f"/api/v1/namespaces/{namespace}/pods", elsewhere)
        assert f"no business with pods in namespace {namespace}" in output


def container(**fields: Any) -> Change:
    """Return a function that changes the container of a holder."""
    return lambda body: body["spec"]["containers"][0].update(fields)


def security(**fields: Any) -> Change:
    """Return a function that changes the security context of a holder's container."""
    return lambda body: body["spec"]["containers"][0]["securityContext"].update(fields)


def spec(**fields: Any) -> Change:
    """Return a function that changes the spec of a holder."""
    return lambda body: body["spec"].update(fields)


BEYOND: dict[str, Change] = {
    "no label": lambda body: body["metadata"].update(labels={}),
    "another name": lambda body: body["metadata"].update(name="holder-1"),
    "a tenant's label": lambda body: body["metadata"]["labels"].update({"sharepod.dev/tenant": "x"}),
    "a finalizer": lambda body: body["metadata"].update(finalizers=["sharepod.dev/x"]),
    "the node's processes": spec(hostPID=True),
    "the node's network": spec(hostNetwork=True),
    "the node's ipc": spec(hostIPC=True),
    "a file of the node": spec(volumes=[{"name": "node", "hostPath": {"path": "/"}}]),
    "a secret": spec(volumes=[{"name": "secret", "secret": {"secretName": "x"}}]),
    "a token": spec(automountServiceAccountToken=True),
    "the agent's account": spec(serviceAccountName="sharepod-agent"),
    "a node past the scheduler": spec(nodeName="x"),
    "a class that preempts": spec(priorityClassName="system-node-critical"),
    "another runtime": spec(runtimeClassName="another"),
    "two containers": lambda body: body["spec"]["containers"].append(POD["spec"]["containers"][0]),
    "an init container": spec(initContainers=[{"name": "init", "image": "x"}]),
    "a kernel setting": spec(securityContext={"sysctls": [{"name": "kernel.shm_rmid_forced", "value": "1"}]}),
    "a command": container(command=["sh"]),
    "a port": container(ports=[{"containerPort": 80, "hostPort": 80}]),
    "a secret's value": container(envFrom=[{"secretRef": {"name": "x"}}]),
    "a probe": container(livenessProbe={"httpGet": {"path": "/", "port": 80, "host": "127.0.0.1"}}),
    "two GPUs": container(resources={"limits": {"nvidia.com/gpu": "2"}}),
    "no GPU": container(resources={}),
    "privileges": security(privileged=True, allowPrivilegeEscalation=True),
    "a capability": security(capabilities={"add": ["NET_RAW"], "drop": ["ALL"]}),
    "root": security(runAsNonRoot=False),
    "no filter of calls": security(seccompProfile={"type": "Unconfined"}),
}


@pytest.fixture(scope="module")
def holder(server: Cluster) -> Object:
    """Return a holder as the operator creates it."""
    server.await_service_account(NAMESPACE, "default")
    server.await_service_account(NAMESPACE, "sharepod-agent")
    server.api.create("/apis/node.k8s.io/v1/runtimeclasses", {"metadata": {"name": "another"}, "handler": "another"})
    settings = OperatorSettings()
    made: Object = holder_pod(
        "sharepod-holder-1",
        NAMESPACE,
        node="x",
        tenant="t",
        image=settings.holder_image,
        priority_class=settings.holder_priority_class,
        tolerations=[],
    )
    return made


@pytest.mark.promise("security-operator-own-pods")
def test_a_holder_of_the_operator_is_created_in_its_only_allowed_form(operator: Api, holder: Object) -> None:
    operator.create(HOLDERS, holder)
    path = f"{HOLDERS}/{holder['metadata']['name']}"
    output = refusal(operator, path, {"metadata": {"annotations": {"a": "b"}}})
    operator.delete(path)
    assert "no business with pods in namespace" in output
    assert "create pods with the label sharepod.dev/tenant" in create_refused(operator, PODS, in_default(holder))


@pytest.mark.promise("security-operator-own-pods")
@pytest.mark.parametrize("beyond", BEYOND)
def test_a_holder_of_the_operator_has_no_access_to_its_node_or_namespace(
    operator: Api, holder: Object, beyond: str
) -> None:
    body = copy.deepcopy(holder)
    BEYOND[beyond](body)
    assert "no business with pods in namespace" in create_refused(operator, HOLDERS, body)


@pytest.fixture(scope="module")
def placeholder(holder: Object) -> Object:
    """Return a placeholder as the operator creates it."""
    settings = OperatorSettings()
    gpu = GpuRequest(request_milli=Milli(400), limit_milli=Milli(400), memory=None)
    request = PlacementRequest(tenant=TenantId("t"), namespace="default", name="train", gpu=gpu)
    asked = PlaceholderSettings(
        namespace=NAMESPACE,
        image=settings.holder_image,
        priority_class=settings.placeholder_priority_class,
        with_line=True,
    )
    made: Object = placeholder_pod(request, asked)
    return made


@pytest.mark.promise("security-operator-own-pods")
def test_a_placeholder_of_the_operator_is_created_in_its_only_allowed_form(operator: Api, placeholder: Object) -> None:
    operator.create(HOLDERS, placeholder)
    path = f"{HOLDERS}/{placeholder['metadata']['name']}"
    output = refusal(operator, path, {"metadata": {"annotations": {"a": "b"}}})
    operator.delete(path)
    assert "no business with pods in namespace" in output
    assert "create pods with the label sharepod.dev/tenant" in create_refused(operator, PODS, in_default(placeholder))
    for scheduler in ("default-scheduler", ""):
        body = copy.deepcopy(placeholder)
        spec(schedulerName=scheduler)(body)
        assert "no business with pods in namespace" in create_refused(operator, HOLDERS, body)


@pytest.mark.promise("security-operator-own-pods")
@pytest.mark.parametrize("beyond", [name for name in BEYOND if "GPU" not in name])
def test_a_placeholder_of_the_operator_has_no_access_to_its_namespace(
    operator: Api, placeholder: Object, beyond: str
) -> None:
    body = copy.deepcopy(placeholder)
    BEYOND[beyond](body)
    assert "no business with pods in namespace" in create_refused(operator, HOLDERS, body)


def in_default(body: Object) -> Object:
    """Return the Pod in namespace default instead of its own namespace."""
    metadata = {name: value for name, value in body["metadata"].items() if name != "namespace"}
    return {**body, "metadata": metadata}


@pytest.mark.promise("security-operator-own-pods")
def test_the_operators_token_neither_changes_nor_ends_other_pods(server: Cluster, operator: Api) -> None:
    server.api.create(PODS, {**POD, "metadata": {"name": "of-a-team", "annotations": {"a": "b"}}})
    path = f"{PODS}/of-a-team"
    operator.patch(path, {"metadata": {"annotations": {"sharepod.dev/gpus": "GPU-1"}}})
    changes: list[dict[str, Any]] = [
        {"metadata": {"annotations": {"a": "c"}}},
        {"metadata": {"annotations": {"a": None}}},
        {"metadata": {"annotations": {"without-a-value": ""}}},
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
    output = create_refused(operator, "/api/v1/namespaces/kube-system/pods/of-the-system/eviction", eviction)
    assert "no business with pods in namespace kube-system" in output


@pytest.mark.promise("security-operator-own-pods")
def test_a_pod_detached_from_its_sharepod_by_a_user_still_ends(server: Cluster, operator: Api) -> None:
    operator.create(PODS, pod_of(server, "orphaned"))
    server.api.patch(f"{PODS}/orphaned", {"metadata": {"ownerReferences": None}})
    operator.delete(f"{PODS}/orphaned")


@pytest.mark.promise("security-operator-own-resources")
def test_the_operators_token_changes_only_the_line_resources_of_nodes(server: Cluster, operator: Api) -> None:
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
        {"status": {"daemonEndpoints": {"kubeletEndpoint": {"Port": 4444}}}},
        {"status": {"nodeInfo": {"kubeletVersion": "v1.0.0"}}},
        {"status": {"runtimeHandlers": [{"name": "x", "features": {"userNamespaces": True}}]}},
    ]
    for change in changes:
        assert f"of the status of node {node}, and nothing else" in refusal(operator, path, change)


def result(driver: str) -> Object:
    """Return the status of a claim to which one device of a driver is allocated."""
    device = {"device": "d", "driver": driver, "pool": "p", "request": "sharepod"}
    return {"status": {"allocation": {"devices": {"results": [device]}}}}


def claim_of(server: Cluster, name: str, device_class: str, namespace: str = "default") -> str:
    """Create a claim as an admin or a user; return its path."""
    asked = {"name": "sharepod", "exactly": {"deviceClassName": device_class}}
    server.api.create(claim_path(namespace), {"metadata": {"name": name}, "spec": {"devices": {"requests": [asked]}}})
    return claim_path(namespace, name)


@pytest.mark.promise("security-operator-own-claims")
def test_the_operators_token_writes_only_claims_of_sharepod(server: Cluster, operator: Api) -> None:
    if not serves_claims(server.api):
        pytest.skip("needs an API server with claims")
    made = build_claim("of-a-pod", "default", "one", "0b1c2d3e-1111-1111-1111-000000000000", 1)
    operator.create(claim_path("default"), made, dryRun="All")
    orphan = {**made, "metadata": {**made["metadata"], "ownerReferences": []}}
    assert "that a pod owns" in create_refused(operator, claim_path("default"), orphan)
    asked = {"name": "sharepod", "exactly": {"deviceClassName": "nic"}}
    another = {**made, "spec": {"devices": {"requests": [asked]}}}
    assert "claims of the classes" in create_refused(operator, claim_path("default"), another)
    for namespace in ("kube-system", NAMESPACE):
        elsewhere = {**made, "metadata": {**made["metadata"], "namespace": namespace}}
        assert "not of the system" in create_refused(operator, claim_path(namespace), elsewhere)

    ours, scheduled = claim_of(server, "ours", "sharepod.dev"), claim_of(server, "scheduled", SCHEDULER_CLASS)
    foreign, system = claim_of(server, "foreign", "nic"), claim_of(server, "system", "nic", "kube-system")
    for path in (foreign, system):
        for at, change in ((path, {"metadata": {"finalizers": [FINALIZER]}}), (f"{path}/status", result("nic"))):
            assert "claims of the classes" in refusal(operator, at, change)
    for change in ({"labels": {"a": "b"}}, {"annotations": {"a": "b"}}, {"finalizers": ["sharepod.dev/x"]}):
        assert "none of its other metadata" in refusal(operator, ours, {"metadata": change})
    operator.patch(ours, {"metadata": {"finalizers": [FINALIZER]}})
    operator.patch(scheduled, {"metadata": {"finalizers": [FINALIZER]}})
    for path in (ours, scheduled):
        assert "devices of the driver gpu.sharepod.dev" in refusal(operator, f"{path}/status", result("nic"))
    assert "devices of the driver gpu" in refusal(operator, f"{scheduled}/status", result("gpu.sharepod.dev"))
    operator.patch(f"{ours}/status", result("gpu.sharepod.dev"))

    server.api.patch(f"{scheduled}/status", result("nic"))
    consumer = {"name": "one", "resource": "pods", "uid": "1"}
    output = refusal(operator, f"{scheduled}/status", {"status": {"reservedFor": [consumer]}})
    assert "consumers of claims that it allocates" in output
    hold = {"apiGroup": "sharepod.dev", "resource": "gpunodes", "name": "n", "uid": "2"}
    operator.patch(f"{scheduled}/status", {"status": {"reservedFor": [hold]}})
    operator.patch(f"{scheduled}/status", {"status": {"reservedFor": None, "allocation": None}})


@pytest.mark.promise("security-operator-own-claims")
def test_the_operators_token_creates_only_the_template_of_lines(server: Cluster, operator: Api) -> None:
    if not serves_claims(server.api):
        pytest.skip("needs an API server with claims")
    path = "/apis/resource.k8s.io/v1/namespaces/default/resourceclaimtemplates"
    asked = {"name": "line", "exactly": {"deviceClassName": "sharepod.dev"}}
    body: Object = {"metadata": {"name": "sharepod"}, "spec": {"spec": {"devices": {"requests": [asked]}}}}
    operator.create(path, body, dryRun="All")
    assert "with the name sharepod" in create_refused(operator, path, {**body, "metadata": {"name": "another"}})


@pytest.mark.promise("security-operator-own-events")
def test_the_operators_token_writes_no_event_of_others_and_none_in_the_system(operator: Api) -> None:
    def event(namespace: str, controller: str = "sharepod.dev/operator") -> tuple[str, Object]:
        about = {"apiVersion": "v1", "kind": "Pod", "name": "one", "namespace": namespace}
        body = {
            "metadata": {"name": "one.1", "namespace": namespace},
            "eventTime": "2026-01-01T00:00:00.000000Z",
            "reportingController": controller,
            "reportingInstance": "x",
            "type": "Warning",
            "reason": "Evicted",
            "action": "Evict",
            "note": "the node is out of memory",
            "regarding": about,
        }
        return f"/apis/events.k8s.io/v1/namespaces/{namespace}/events", body

    operator.create(*event("default"), dryRun="All")
    refused = [event("default", "kubelet"), event("kube-system"), event(NAMESPACE)]
    for path, body in refused:
        assert "may write Events of the reporting controller" in create_refused(operator, path, body)


@pytest.mark.promise("security-operator-own-lease")
def test_the_operators_token_writes_no_lease_but_its_own(server: Cluster, operator: Api) -> None:
    path = f"/apis/coordination.k8s.io/v1/namespaces/{NAMESPACE}/leases"

    def lease(name: str) -> Object:
        return {"metadata": {"name": name}, "spec": {"holderIdentity": "x"}}

    operator.create(path, lease("sharepod-operator"), dryRun="All")
    assert "create the Lease sharepod-operator" in create_refused(operator, path, lease("sharepod-agent-a"))
    server.api.create(path, lease("sharepod-agent-b"))
    with pytest.raises(ApiError, match='cannot update resource "leases"'):
        operator.request("PUT", f"{path}/sharepod-agent-b", lease("sharepod-agent-b"))
