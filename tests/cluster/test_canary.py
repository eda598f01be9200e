"""Canary of one assumption: kube-scheduler uses allocations of claims that another client has written. No document of
Kubernetes promises this.

There is no operator: the test makes the operator's writes. `make test-canary` runs it on each Kubernetes with
ResourceClaims of `resource.k8s.io/v1`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import UTC, datetime

import pytest
from cluster.claims_world import CLAIMS, FINALIZER, allocation, claim_path, claim_spec, pod_body, serves_claims
from harness.api import ApiError, Object
from harness.cluster import Cluster, wait_until
from harness.fakes import FakeKubelets
from harness.installation import MANIFESTS

_CLASS, _DRIVER = "canary.example", "gpu.canary.example"
_NODES = ("node-0", "node-1")


@pytest.fixture(scope="module")
def canary() -> Iterator[Cluster]:
    """Yield a cluster with two nodes of 8 CPUs, and a DeviceClass whose devices no ResourceSlice publishes."""
    with Cluster() as running, FakeKubelets(running.api):
        if not serves_claims(running.api):
            pytest.skip("the API server does not serve resource.k8s.io/v1")
        running.add_fake_nodes(len(_NODES), cpu="8")
        body: Object = {"apiVersion": "resource.k8s.io/v1", "kind": "DeviceClass", "metadata": {"name": _CLASS}}
        expression = f'device.driver == "{_DRIVER}"'
        running.api.create(
            f"{CLAIMS}/deviceclasses", {**body, "spec": {"selectors": [{"cel": {"expression": expression}}]}}
        )
        yield running


def asked(cluster: Cluster, namespace: str, name: str) -> None:
    """Create a claim for one device."""
    body: Object = {"apiVersion": "resource.k8s.io/v1", "kind": "ResourceClaim", "metadata": {"name": name}}
    request = {"name": "gpu", "exactly": {"deviceClassName": _CLASS}}
    cluster.api.create(claim_path(namespace), {**body, "spec": {"devices": {"requests": [request]}}})


def allocated(cluster: Cluster, namespace: str, name: str, node: str) -> Object:
    """Allocate a claim as the operator does; return the stored claim."""
    path = claim_path(namespace, name)
    cluster.api.patch(path, {"metadata": {"finalizers": [FINALIZER]}})
    terms = [{"matchFields": [{"key": "metadata.name", "operator": "In", "values": [node]}]}]
    written: Object = {
        "allocationTimestamp": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "devices": {"results": [{"request": "gpu", "driver": _DRIVER, "pool": node, "device": "gpu-0"}]},
        "nodeSelector": {"nodeSelectorTerms": terms},
    }
    cluster.api.patch(f"{path}/status", {"status": {"allocation": written}})
    return written


def pod_of(cluster: Cluster, namespace: str, name: str) -> Object:
    found: Object = cluster.api.get(f"/api/v1/namespaces/{namespace}/pods/{name}")
    return found


def created(cluster: Cluster, namespace: str, name: str, claim: str, cpu: str = "100m") -> None:
    cluster.api.create(f"/api/v1/namespaces/{namespace}/pods", pod_body(name, claims=(claim,), cpu=cpu))


def until(found: Callable[[], object], what: str) -> None:
    wait_until(lambda: bool(found()), what=what, timeout=30)


@pytest.mark.promise("operator-claim-canary")
@pytest.mark.parametrize("node", _NODES)
def test_a_pod_is_bound_where_somebody_else_has_allocated_its_claim_and_the_allocation_stays(
    canary: Cluster, node: str
) -> None:
    namespace = canary.namespace(f"bound-{node}")
    asked(canary, namespace, "share")
    created(canary, namespace, "one", "share")
    until(
        lambda: any(
            item.get("reason") == "Unschedulable"
            for item in (pod_of(canary, namespace, "one").get("status") or {}).get("conditions") or ()
        ),
        "kube-scheduler finds no device of its own",
    )
    written = allocated(canary, namespace, "share", node)
    until(lambda: pod_of(canary, namespace, "one")["spec"].get("nodeName"), "bound")
    pod, claim = pod_of(canary, namespace, "one"), canary.api.get(claim_path(namespace, "share"))
    assert pod["spec"]["nodeName"] == node
    stands = {"allocationTimestamp": written["allocationTimestamp"], **(allocation(claim) or {})}
    assert stands == written, "Kubernetes 1.34 may drop the time, and nothing else"
    assert [item["uid"] for item in claim["status"]["reservedFor"]] == [pod["metadata"]["uid"]]


@pytest.mark.promise("operator-claim-canary")
def test_where_the_pod_does_not_fit_kube_scheduler_takes_the_allocation_away_and_takes_the_next_one(
    canary: Cluster,
) -> None:
    namespace = canary.namespace("unfit")
    full, free = _NODES
    filler = {"containers": [{"name": "main", "image": "test", "resources": {"requests": {"cpu": "7"}}}]}
    body = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "filler"}, "spec": {**filler, "nodeName": full}}
    canary.api.create(f"/api/v1/namespaces/{namespace}/pods", body)
    asked(canary, namespace, "share")
    allocated(canary, namespace, "share", full)
    created(canary, namespace, "one", "share", cpu="4")
    until(lambda: allocation(canary.api.get(claim_path(namespace, "share"))) is None, "the allocation is taken away")
    assert not pod_of(canary, namespace, "one")["spec"].get("nodeName")
    allocated(canary, namespace, "share", free)
    until(lambda: pod_of(canary, namespace, "one")["spec"].get("nodeName") == free, "bound to the next node")


@pytest.mark.promise("operator-claim-canary")
def test_the_end_of_the_last_pod_takes_the_allocation_away_and_a_deleted_claim_is_kept_until_then(
    canary: Cluster,
) -> None:
    namespace = canary.namespace("ends")
    asked(canary, namespace, "share")
    allocated(canary, namespace, "share", _NODES[0])
    created(canary, namespace, "one", "share")
    until(lambda: pod_of(canary, namespace, "one")["spec"].get("nodeName"), "bound")
    canary.api.delete(claim_path(namespace, "share"))
    assert allocation(canary.api.get(claim_path(namespace, "share"))) is not None
    canary.api.delete(f"/api/v1/namespaces/{namespace}/pods/one")
    until(
        lambda: (
            not [item for item in canary.api.get(claim_path(namespace))["items"] if item["metadata"]["name"] == "share"]
        ),
        "the claim is deleted after its Pod",
    )


# `canary` skips the test on an API server without claims, which would not start with this feature gate
@pytest.mark.usefixtures("canary")
@pytest.mark.promise("operator-claim-gate")
def test_a_server_that_drops_sizes_refuses_a_claim_with_one_by_the_name_of_the_gate(
    cluster_factory: Callable[..., Cluster],
) -> None:
    server = cluster_factory(
        scheduler=False, controller_manager=False, apiserver_args=["--feature-gates=DRAConsumableCapacity=false"]
    )
    server.kubectl("apply", "--server-side", "-k", str(MANIFESTS / "claims"), timeout=60)
    body: Object = {"apiVersion": "resource.k8s.io/v1", "kind": "ResourceClaim", "metadata": {"name": "share"}}
    body["spec"] = claim_spec()
    answer = ""

    def refused() -> bool:
        nonlocal answer
        try:
            server.api.create(claim_path("default"), body, dryRun="All")
        except ApiError as error:
            answer = error.message
        return answer != ""

    until(refused, "the policy is in force")
    assert "DRAConsumableCapacity" in answer
    exclusive = {"name": "whole", "annotations": {"sharepod.dev/gpu-mode": "Exclusive"}}
    whole = {"name": "gpu", "exactly": {"deviceClassName": "sharepod.dev"}}
    server.api.create(
        claim_path("default"), {**body, "metadata": exclusive, "spec": {"devices": {"requests": [whole]}}}
    )
