"""Pods with claims, as each kind of workload in the examples creates them. The operator places them, and the real
kube-scheduler binds them. The real kube-controller-manager creates them; for KServe, KubeRay and JupyterHub, the test
changes the Pods as these controllers do.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from cluster import frameworks
from cluster.claims_world import allocation, claim_path, make_claim
from cluster.operator_world import GIB, World, wait
from cluster.plain_world import install_plain, need_mutating_policies
from cluster.scheduler_world import CLASS, pool_of_scheduler
from harness.api import ApiError, Object
from harness.installation import MANIFESTS

CLAIM_EXAMPLES = [
    path
    for path in sorted((MANIFESTS.parent / "examples" / "claims").glob("*.yaml"))
    if any(document["kind"] not in ("ResourceClaim",) for document in yaml.safe_load_all(path.read_text()))
]


WORLD_HAS_CLAIMS = True
"""Claims are installed in the file's world."""


def bound(world: World, namespace: str) -> dict[str, Object]:
    """Return the Pods of a namespace that have a node, by name."""
    found = world.api.get(f"/api/v1/namespaces/{namespace}/pods")["items"]
    return {pod["metadata"]["name"]: pod for pod in found if pod["spec"].get("nodeName")}


def await_bound(world: World, namespace: str, pods: int, claims: int) -> None:
    def placed() -> bool:
        items = world.api.get(claim_path(namespace))["items"]
        return len(bound(world, namespace)) == pods and sum(allocation(item) is not None for item in items) == claims

    wait(placed, what=f"{pods} Pods bound, {claims} claims allocated")
    for pod in bound(world, namespace).values():
        spec = pod["spec"]
        named = [one["name"] for each in spec["containers"] for one in each["resources"].get("claims", [])]
        assert named == [one["name"] for one in spec.get("resourceClaims", [])], "one container names the Pod's claim"


def shares(world: World, *nodes: str) -> list[tuple[int, int]]:
    """Return (request in thousandths, memory in GiB) of each row."""
    return sorted((row["requestMilli"], row["memory"] // GIB) for node in nodes for row in world.rows(node))


def make_pods(world: World, namespace: str, prefix: str, specs: list[Object]) -> None:
    for number, spec in enumerate(specs):
        body = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": f"{prefix}-{number}"}, "spec": spec}
        world.api.create(f"/api/v1/namespaces/{namespace}/pods", body)


def apply(world: World, namespace: str, *bodies: Object) -> None:
    for body in bodies:
        world.cluster.kubectl("apply", "--server-side", "-n", namespace, "-f", "-", input=json.dumps(body))


def on(specs: list[Object], label: str) -> list[Object]:
    """Return the specs with a node selector for the label `test=LABEL`."""
    return [{**spec, "nodeSelector": {"test": label}} for spec in specs]


@pytest.mark.promise("operator-claim-examples")
@pytest.mark.parametrize("path", CLAIM_EXAMPLES, ids=lambda path: path.stem)
def test_each_pod_of_an_example_is_bound_with_its_share(world: World, path: Path) -> None:
    name = path.stem[3:]
    if CLASS in path.read_text():
        pool_of_scheduler(world, name)
    else:
        world.nodes(name, 2)
    documents = list(yaml.safe_load_all(path.read_text()))
    pods = claims = 0
    for document in documents:
        spec = document.get("spec", {})
        made = {"Pod": 1, "Job": spec.get("parallelism", 1)}.get(document["kind"], spec.get("replicas", 0))
        template = spec if document["kind"] == "Pod" else spec.get("template", {}).get("spec")
        if template is not None:
            template["nodeSelector"] = {"test": name}
            pods += made
            claims += made if "resourceClaimTemplateName" in template["resourceClaims"][0] else 0
        claims += document["kind"] == "ResourceClaim"
    namespaces = [one["metadata"]["name"] for one in documents if one["kind"] == "Namespace"]
    namespace = namespaces[0] if namespaces else world.cluster.namespace(name)
    apply(world, namespace, *documents)
    await_bound(world, namespace, pods, claims)
    for pod in bound(world, namespace).values():
        assert pod["spec"]["nodeName"].startswith(name)


@pytest.mark.promise("operator-claim-frameworks")
def test_the_pods_that_kserve_makes_of_an_inference_service_have_its_shares(world: World) -> None:
    (node,) = world.nodes("kserve")
    namespace = world.cluster.namespace("kserve")
    example = frameworks.documents("kserve")
    service = example["InferenceService"]
    assert service["metadata"]["annotations"] == {"serving.kserve.io/deploymentMode": "Standard"}
    specs = on(frameworks.of_kserve(service), "kserve")
    apply(world, namespace, example["ResourceClaimTemplate"])
    labels = {"app": "isvc.qwen-predictor"}
    template = {"metadata": {"labels": labels}, "spec": specs[0]}
    spec = {"replicas": len(specs), "selector": {"matchLabels": labels}, "template": template}
    apply(world, namespace, {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": "qwen"}, "spec": spec})
    await_bound(world, namespace, 2, 2)
    assert shares(world, node) == [(300, 6)] * 2


@pytest.mark.promise("operator-claim-frameworks")
def test_the_workers_that_kuberay_makes_of_a_ray_cluster_have_its_shares_and_the_head_none(world: World) -> None:
    (node,) = world.nodes("kuberay")
    namespace = world.cluster.namespace("kuberay")
    example = frameworks.documents("kuberay")
    head, workers = frameworks.of_kuberay(example["RayCluster"])
    apply(world, namespace, example["ResourceClaimTemplate"])
    make_pods(world, namespace, "head", on([head], "kuberay"))
    make_pods(world, namespace, "worker", on(workers, "kuberay"))
    await_bound(world, namespace, 3, 2)
    assert shares(world, node) == [(500, 8)] * 2
    owners = {item["metadata"]["ownerReferences"][0]["name"] for item in world.api.get(claim_path(namespace))["items"]}
    assert owners == {"worker-0", "worker-1"}


@pytest.mark.promise("operator-claim-frameworks")
def test_the_server_that_kubespawner_makes_for_each_user_has_its_share(world: World) -> None:
    (node,) = world.nodes("spawner")
    namespace = world.cluster.namespace("spawner")
    apply(world, namespace, frameworks.documents("jupyterhub-template")["ResourceClaimTemplate"])
    server = frameworks.of_kubespawner(frameworks.documents("jupyterhub-values")[""])
    make_pods(world, namespace, "jupyter", on([server, server], "spawner"))
    await_bound(world, namespace, 2, 2)
    assert shares(world, node) == [(200, 4)] * 2
    limits = bound(world, namespace)["jupyter-0"]["spec"]["containers"][0]["resources"]["limits"]
    assert limits == {"cpu": "2", "memory": "4Gi"}, "CPU and memory, which the spawner's own settings lose"


def test_every_file_of_the_frameworks_is_tried() -> None:
    tried = {"kserve", "kserve-knative", "kuberay", "jupyterhub-template", "jupyterhub-values"}
    assert {path.stem for path in frameworks.examples()} == tried
    assert all(path.read_text().startswith("# ") for path in frameworks.examples())


@pytest.mark.promise("operator-claim-conditions")
def test_a_claim_without_an_allocation_can_have_no_condition(world: World) -> None:
    namespace = world.cluster.namespace("conditions")
    make_claim(world, namespace, "waits")
    condition = {
        "type": "Granted",
        "status": "False",
        "reason": "NoRoom",
        "message": "",
        "lastTransitionTime": "2026-01-01T00:00:00Z",
    }
    device = {"driver": "gpu.sharepod.dev", "pool": "n", "device": "gpu-0", "conditions": [condition]}
    with pytest.raises(ApiError, match=r"must be an allocated device"):
        world.api.patch(f"{claim_path(namespace, 'waits')}/status", {"status": {"devices": [device]}})


# This test is the last of the module, because it applies the policies of the resource line, which then stay.


@pytest.mark.promise("operator-claim-frameworks")
def test_the_pod_that_knative_makes_for_kserve_has_its_share_by_the_line(world: World) -> None:
    need_mutating_policies(world.api)
    install_plain(world.cluster)
    (node,) = world.nodes("knative")
    namespace = world.cluster.namespace("knative")
    service = frameworks.documents("kserve-knative")["InferenceService"]
    assert service["metadata"]["annotations"] == {"serving.kserve.io/deploymentMode": "Knative"}
    make_pods(world, namespace, "revision", on(frameworks.of_knative(service), "knative"))
    await_bound(world, namespace, 1, 1)
    assert shares(world, node) == [(300, 6)]
