"""SharePods whose GPUs are attached by claims. The operator creates and allocates the claims, the real kube-scheduler
binds the Pods, and the real kube-controller-manager deallocates the claims. Also setting `attach: auto`, until a node
cannot attach claims.
"""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
from cluster.claims_world import CLAIMS, allocation, claim_of, claim_path, make_pod, pod_body, serves_claims
from cluster.operator_world import GPUNODES, TIMES, World, condition_of, gpu_uuid, wait
from cluster.plain_world import MILLI, install_plain, serves_mutating_policies
from cluster.shared_cluster import SharedCluster
from harness.api import ApiError, Object
from harness.installation import MANIFESTS


@pytest.fixture(scope="module")
def world(shared_cluster: SharedCluster) -> Iterator[World]:
    with shared_cluster.world(times={**TIMES, "SHAREPOD_ATTACH": "auto"}) as running:
        if not serves_claims(running.api):
            pytest.skip("the API server does not serve resource.k8s.io/v1")
        yield running


def attaching(world: World, node: str, reason: str) -> str:
    """Wait until the condition of a node has this reason for how new Pods are attached. Return its message."""

    def condition() -> Object:
        return condition_of(world.api.get(f"{GPUNODES}/{node}"), "SharePodsByClaims")

    wait(lambda: condition().get("reason") == reason, what=f"SharePodsByClaims {reason} on {node}")
    return str(condition()["message"])


def by_claims(world: World, node: str) -> None:
    """Install everything that claims need, and wait until new Pods are attached by claims."""
    world.installation.install_claims()
    attaching(world, node, "Claims")


def claim_named_by(world: World, namespace: str, pod: str) -> str:
    spec = (world.pod(namespace, pod) or {})["spec"]
    return str(next(item["resourceClaimName"] for item in spec["resourceClaims"] if item["name"] == "sharepod-gpu"))


def by_volume(world: World, namespace: str, pod: str) -> bool:
    spec = (world.pod(namespace, pod) or {})["spec"]
    return any(volume["name"] == "sharepod-gpu" for volume in spec.get("volumes", ()))


@pytest.mark.promise("operator-attach-auto", "operator-share-claim-order", "operator-share-claim-scheduled")
def test_auto_goes_by_claims_once_all_is_there_and_a_sharepod_lives_and_ends_by_its_claim(world: World) -> None:
    (node,) = world.nodes("life")
    namespace = world.cluster.namespace("life")
    world.cluster.kubectl("delete", "--ignore-not-found", "-k", str(MANIFESTS / "claims"))
    assert "manifests/claims" in attaching(world, node, "PolicyAbsent")
    world.apply(namespace, "early", {"request": 0.1}, on="life")
    world.phase(namespace, "early", "Running")
    assert by_volume(world, namespace, "early")
    by_claims(world, node)
    world.apply(namespace, "one", {"request": 0.3, "count": 2}, on="life")
    world.phase(namespace, "one", "Running")
    assert not by_volume(world, namespace, "one")
    assert by_volume(world, namespace, "early"), "a Pod that exists stays as it is"
    name, pod = claim_named_by(world, namespace, "one"), world.pod(namespace, "one") or {}
    claim, row = claim_of(world, namespace, name) or {}, world.row(node, "one") or {}
    assert row["claim"] == {"name": name, "uid": claim["metadata"]["uid"]}
    assert row["podUID"] == pod["metadata"]["uid"]
    given = allocation(claim) or {}
    assert [item["device"] for item in given["devices"]["results"]] == [
        gpu_uuid(node, index).lower() for index in range(2)
    ]
    assert [item["uid"] for item in claim["status"]["reservedFor"]] == [pod["metadata"]["uid"]]
    # The share changes while the Pod runs, and ends with the Pod.
    world.api.patch(world.path(namespace, "one"), {"spec": {"gpu": {"request": 0.5}}})
    wait(lambda: (world.row(node, "one") or {}).get("requestMilli") == 500, what="the raised share")
    world.delete(namespace, "one")
    wait(lambda: claim_of(world, namespace, name) is None, what="the claim is deleted")
    wait(lambda: world.row(node, "one") is None, what="the row is removed")


@pytest.mark.promise("operator-taken-back", "operator-share-claim-scheduled")
def test_a_pod_that_kube_scheduler_refuses_keeps_its_allocation_until_it_is_taken_back(world: World) -> None:
    nodes = world.nodes("elsewhere", 2)
    by_claims(world, nodes[0])
    namespace = world.cluster.namespace("elsewhere")
    world.apply(namespace, "first", {"request": 0.4}, on="elsewhere", labels={"app": "y"})
    first = world.phase(namespace, "first", "Running")["status"]["node"]
    rule = {"labelSelector": {"matchLabels": {"app": "y"}}, "topologyKey": "kubernetes.io/hostname"}
    apart = {"podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [rule]}}
    seen: list[Object] = []
    world.apply(namespace, "second", {"request": 0.4}, on="elsewhere", affinity=apart)
    wait(lambda: world.pod(namespace, "second") is not None, what="its Pod")
    refused = claim_named_by(world, namespace, "second")

    def runs() -> bool:
        claim = claim_of(world, namespace, refused)
        if claim is not None and "deletionTimestamp" not in claim["metadata"]:
            seen.append(claim)
        return (world.sharepod(namespace, "second").get("status") or {}).get("phase") == "Running"

    wait(runs, what="the second SharePod runs")
    allocated = [allocation(claim) is not None for claim in seen]
    assert any(allocated)
    assert allocated == sorted(allocated), "kube-scheduler took the allocation away"
    assert world.sharepod(namespace, "second")["status"]["node"] not in (first, None)
    assert claim_named_by(world, namespace, "second") != refused
    wait(lambda: claim_of(world, namespace, refused) is None, what="the first claim is deleted")


@pytest.mark.promise("operator-share-claim-alone")
def test_nobody_else_makes_such_a_claim_or_uses_one(world: World) -> None:
    (node,) = world.nodes("own")
    by_claims(world, node)
    namespace = world.cluster.namespace("own")
    world.apply(namespace, "one", {"request": 0.3}, on="own")
    world.phase(namespace, "one", "Running")
    name = claim_named_by(world, namespace, "one")
    claim = claim_of(world, namespace, name) or {}
    forged: Object = {
        "apiVersion": "resource.k8s.io/v1",
        "kind": "ResourceClaim",
        "metadata": {"name": "forged", "ownerReferences": claim["metadata"]["ownerReferences"]},
        "spec": claim["spec"],
    }
    world.cluster.kubectl("create", "rolebinding", "edits", "--clusterrole=edit", "--user=eve", "-n", namespace)
    refused = world.cluster.kubectl(
        "create",
        "-n",
        namespace,
        "-f",
        "-",
        input=json.dumps(forged),
        kubeconfig=world.cluster.user_kubeconfig("eve"),
        check=False,
    )
    assert "the operator makes for a SharePod" in refused.stderr
    stranger = pod_body("stranger", claims=(name,), nodeSelector={"test": "own"})
    world.api.create(f"/api/v1/namespaces/{namespace}/pods", stranger)
    world.event(namespace, "stranger", note="status.reservedFor")
    assert not (world.pod(namespace, "stranger") or {})["spec"].get("nodeName")
    consumer = {"resource": "pods", "name": "stranger", "uid": "another"}
    reserved = [*(claim_of(world, namespace, name) or {})["status"]["reservedFor"], consumer]
    with pytest.raises(ApiError, match=r"status[.]reservedFor"):
        world.api.patch(f"{claim_path(namespace, name)}/status", {"status": {"reservedFor": reserved}})


@pytest.mark.promise("security-other-class")
def test_a_sharepods_claim_of_another_drivers_gpu_gives_it_none(world: World) -> None:
    world.nodes("shared")
    (whole,) = world.cluster.add_fake_nodes(1, labels={"test": "whole"}, prefix="whole")
    others = [
        ("DeviceClass", "deviceclasses", {"selectors": [{"cel": {"expression": 'device.driver == "gpu.nvidia.com"'}}]}),
        (
            "ResourceSlice",
            "resourceslices",
            {
                "driver": "gpu.nvidia.com",
                "nodeName": whole,
                "pool": {"name": whole, "generation": 1, "resourceSliceCount": 1},
                "devices": [{"name": "gpu-0"}],
            },
        ),
    ]
    for kind, plural, spec in others:
        metadata = {"name": "gpu.nvidia.com"}
        body = {"apiVersion": "resource.k8s.io/v1", "kind": kind, "metadata": metadata, "spec": spec}
        world.api.create(f"{CLAIMS}/{plural}", body)
    namespace = world.cluster.namespace("shared")
    asked = {"devices": {"requests": [{"name": "gpu", "exactly": {"deviceClassName": "gpu.nvidia.com"}}]}}
    metadata = {"name": "theirs"}
    claim = {"apiVersion": "resource.k8s.io/v1", "kind": "ResourceClaim", "metadata": metadata, "spec": asked}
    world.api.create(claim_path(namespace), claim)
    main = {"name": "main", "image": "test", "resources": {"claims": [{"name": "gpu"}]}}
    entry = {"name": "gpu", "resourceClaimName": "theirs"}
    world.apply(namespace, "greedy", {"request": 0.3}, containers=[main], resourceClaims=[entry])
    world.event(namespace, "greedy", "FailedScheduling", note="claim")
    assert allocation(claim_of(world, namespace, "theirs")) is None
    assert not (world.pod(namespace, "greedy") or {"spec": {}})["spec"].get("nodeName")
    # The same claim gives a plain Pod that GPU. So the claim is valid, and only the SharePod's Pod was denied it.
    make_pod(world, namespace, "plain", on="whole", claims=("theirs",))
    wait(lambda: allocation(claim_of(world, namespace, "theirs")) is not None, what="the plain Pod's GPU")
    assert (world.pod(namespace, "greedy") or {"spec": {}})["spec"].get("nodeName") != whole
    world.delete(namespace, "greedy")


def test_a_pod_with_a_claim_carries_its_resource_line_too(world: World) -> None:
    if not serves_mutating_policies(world.api):
        pytest.skip("the API server does not serve MutatingAdmissionPolicies")
    (node,) = world.nodes("lined")
    by_claims(world, node)
    install_plain(world.cluster)
    wait(lambda: MILLI in world.api.get(f"/api/v1/nodes/{node}")["status"]["allocatable"], what="lines in use")
    namespace = world.cluster.namespace("lined")
    world.apply(namespace, "one", {"request": 0.3}, on="lined")
    world.phase(namespace, "one", "Running")
    assert claim_named_by(world, namespace, "one")
    (container,) = (world.pod(namespace, "one") or {})["spec"]["containers"]
    assert container["resources"]["limits"][MILLI] == "300"
    assert container["resources"]["claims"] == [{"name": "sharepod-gpu"}]


@pytest.mark.promise("operator-attach-auto", "operator-attach-shown")
def test_one_node_that_cannot_brings_new_pods_back_to_csi_and_every_node_says_so(world: World) -> None:
    (able, unable) = world.nodes("mixed", 2)
    by_claims(world, able)
    missing = {"type": "CDIDevices", "status": "False", "reason": "DevicesMissing", "message": "no CDI device"}
    shown = {"type": "ClaimsAttach", "status": "True", "reason": "Attached"}
    world.api.patch(f"{GPUNODES}/{unable}/status", {"status": {"conditions": [missing, shown]}})
    message = attaching(world, able, "NodeCannot")
    assert message == f"node {unable} cannot attach GPUs by claims: no CDI device"
    attaching(world, unable, "NodeCannot")
    namespace = world.cluster.namespace("mixed")
    world.apply(namespace, "one", {"request": 0.9, "count": 2}, on="mixed")
    world.apply(namespace, "two", {"request": 0.9, "count": 2}, on="mixed")
    nodes = {world.phase(namespace, name, "Running")["status"]["node"] for name in ("one", "two")}
    assert nodes == {able, unable}
    assert by_volume(world, namespace, "one")
    assert by_volume(world, namespace, "two")
    world.api.patch(f"{GPUNODES}/{unable}/status", {"status": {"conditions": [{**missing, "status": "True"}, shown]}})
    attaching(world, able, "Claims")
    fails = {**shown, "status": "False", "reason": "NotAttached", "message": "no CDI"}
    world.api.patch(f"{GPUNODES}/{unable}/status", {"status": {"conditions": [{**missing, "status": "True"}, fails]}})
    assert attaching(world, able, "NodeCannot") == f"node {unable} cannot attach GPUs by claims: no CDI"
