"""SharePod as its users have it: the shipped images and manifests on a real kubelet, from install to uninstall.

The operator is a Deployment, the agent a DaemonSet, and both reach the API server as pods do. GPUs, driver and NVIDIA's
runtime are doubles; the runtime puts the driver into the agent's container.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import yaml
from cluster.pasted import paste_uninstall
from harness.api import Object
from harness.cluster import Cluster, wait_until
from harness.delivered import await_workloads, deliveries
from harness.errors import HarnessError
from harness.installation import GROUP, NAMESPACE, POOL_LABEL
from harness.machines import IMAGE, RealNode
from node.installed_rights import expect_rights
from node.whole_system import RESTRICTED

TEAM = "team-a"
SHAREPODS = f"{GROUP}/namespaces/{TEAM}/sharepods"
PODS = f"/api/v1/namespaces/{TEAM}/pods"
_GPU = {"uuid": "GPU-5a9e0001-0000-4000-8000-000000000001", "index": 0, "model": "Simulated", "memory": "16Gi"}

pytestmark = [pytest.mark.alone, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def machine(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealNode]:
    inventory = tmp_path_factory.mktemp("gpus") / "inventory.yaml"
    inventory.write_text(json.dumps({"gpus": [_GPU]}))
    with RealNode(cluster, inventory, nvml=True) as machine:
        machine.real.serve_api()
        yield machine


def _apply(cluster: Cluster, name: str, gpu: Object) -> None:
    container = {"name": "main", "image": IMAGE, "args": ["--kernel-us", "2000"], "securityContext": RESTRICTED}
    spec = {"containers": [container], "gpu": gpu, "terminationGracePeriodSeconds": 2}
    meta = {"name": name, "namespace": TEAM}
    manifest = {"apiVersion": "sharepod.dev/v1alpha1", "kind": "SharePod", "metadata": meta, "spec": spec}
    cluster.kubectl("apply", "-f", "-", input=json.dumps(manifest))


def _await_running(cluster: Cluster, name: str) -> Object:
    cluster.wait_for(
        f"{SHAREPODS}/{name}",
        lambda found: found and found.get("status", {}).get("phase") == "Running",
        what=f"{name} Running",
        timeout=60,
    )
    pod: Object = cluster.api.get(f"{PODS}/{name}")
    return pod


def _apply_by_claim_and_line(cluster: Cluster) -> None:
    """Apply two plain Pods of 0.1 each, gamma with a claim and delta with a line. Both can run at the end of
    the test."""
    amounts = {"timeMilli": "100", "memory": "1Gi"}
    exactly = {"deviceClassName": "sharepod.dev", "capacity": {"requests": amounts}}
    spec = {"devices": {"requests": [{"name": "gpu", "exactly": exactly}]}}
    claim = {"apiVersion": "resource.k8s.io/v1", "kind": "ResourceClaim", "metadata": {"name": "tenth"}, "spec": spec}
    line = {"limits": {"sharepod.dev/gpu-milli": "100", "sharepod.dev/gpu-memory-mib": "1024"}}
    pods = {
        "gamma": ({"claims": [{"name": "gpu"}]}, [{"name": "gpu", "resourceClaimName": "tenth"}]),
        "delta": (line, []),
    }
    cluster.kubectl("apply", "-n", TEAM, "-f", "-", input=json.dumps(claim))
    for name, (resources, claims) in pods.items():
        env = [{"name": "FAKE_CUDA_LABEL", "value": f"{TEAM}/{name}/main"}]
        container = {"name": "main", "image": IMAGE, "args": ["--kernel-us", "2000"], "securityContext": RESTRICTED}
        body = {"containers": [container | {"resources": resources, "env": env}], "resourceClaims": claims}
        meta = {"name": name, "namespace": TEAM}
        pod = {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": meta,
            "spec": {**body, "terminationGracePeriodSeconds": 2},
        }
        cluster.kubectl("apply", "-f", "-", input=json.dumps(pod))
    for name in pods:
        cluster.wait_for(
            f"{PODS}/{name}", lambda pod: pod and pod["status"].get("phase") == "Running", what=name, timeout=90
        )


def _holds(kind: str, gpunode: Object | None) -> bool:
    """Return whether the GPUNode has this condition with status True."""
    conditions = (gpunode or {}).get("status", {}).get("conditions", [])
    return (kind, "True") in [(each["type"], each["status"]) for each in conditions]


def _reports(cluster: Cluster, node: str) -> list[str]:
    """Return ledger, Pods and logs as text. They show what blocks a release."""
    found = [json.dumps(cluster.api.get(node)), json.dumps(cluster.pods(TEAM))]
    for name in ("sharepod-agent", "sharepod-operator"):
        label = f"app.kubernetes.io/name={name}"
        found.append(cluster.kubectl("logs", "-n", NAMESPACE, "-l", label, "--tail=80", "--prefix").stdout)
    return found


def _installed_kinds(cluster: Cluster, overlay: Path) -> list[tuple[str, str]]:
    """Return (kind, name) of all objects of an overlay that are not in a namespace."""
    rendered = yaml.load_all(
        cluster.kubectl("kustomize", overlay).stdout, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    )
    return [(one["kind"], one["metadata"]["name"]) for one in rendered if "namespace" not in one["metadata"]]


@pytest.mark.promise("install-as-written", "security-installed-rights")
def test_the_shipped_images_and_manifests_install_run_upgrade_and_uninstall(
    cluster: Cluster, machine: RealNode, tmp_path: Path
) -> None:
    delivered = deliveries()
    if isinstance(delivered, str):
        pytest.skip(delivered)
    before, now = delivered
    # 1. Install by docs/install.md.
    before.install(cluster, machine.real)
    cluster.kubectl("label", "node", machine.node, f"{POOL_LABEL}=dedicated")
    await_workloads(cluster)
    cluster.namespace(TEAM, labels={"pod-security.kubernetes.io/enforce": "restricted"})
    # 2. A SharePod runs with its share.
    _apply(cluster, "alpha", {"request": 0.4, "limit": 0.6, "memory": "4Gi"})
    was = _await_running(cluster, "alpha")
    time.sleep(3)
    machine.shares().expect(alpha=60)
    # 3. Upgrade, with claims and the resource line: the same Pod continues under the new agent, and new Pods start by
    #    SharePod, claim and line.
    now.upgrade(cluster, machine.real, tmp_path, "claims", "claims/self-test", "plain")
    node = f"{GROUP}/gpunodes/{machine.node}"
    for kind in ("HookLoads", "ClaimsAttach"):
        cluster.wait_for(node, partial(_holds, kind), what=f"{kind} True", timeout=90)
    running = {
        container["image"]
        for pod in cluster.api.get(f"/api/v1/namespaces/{NAMESPACE}/pods")["items"]
        if "deletionTimestamp" not in pod["metadata"]
        for container in pod["spec"]["containers"]
    }
    digests = [image.digest.removeprefix("sha256:")[:12] for image in now.images.values()]
    assert sorted(image.rpartition(":")[2] for image in running) == sorted(digests)
    _apply(cluster, "beta", {"request": 0.4, "memory": "4Gi"})
    _await_running(cluster, "beta")
    _apply_by_claim_and_line(cluster)
    time.sleep(3)
    machine.shares().expect(alpha=40, beta=40, gamma=10, delta=10)
    pod = cluster.api.get(f"{PODS}/alpha")
    assert pod["metadata"]["uid"] == was["metadata"]["uid"]
    assert [status["restartCount"] for status in pod["status"]["containerStatuses"]] == [0]
    # 4. No process has more rights than the documentation states.
    expect_rights(cluster, machine)
    # 5. Uninstall as docs/install.md describes. No object is left.
    brought = _installed_kinds(cluster, tmp_path)
    cluster.kubectl("delete", "pods,resourceclaims,resourceclaimtemplates", "--all", "-n", TEAM, timeout=60)
    printed = tmp_path / "printed"
    script = paste_uninstall(cluster, tmp_path, printed)
    try:
        wait_until(lambda: script.poll() is not None, what="the commands to end", timeout=240)
    except HarnessError as error:
        raise HarnessError("\n".join([str(error), printed.read_text(), *_reports(cluster, node)])) from None
    finally:
        script.kill()
    assert script.wait() == 0, printed.read_text()
    assert "sharepod.dev/gpu-milli" not in cluster.kubectl("get", "nodes", "-o", "jsonpath={..allocatable}").stdout
    left = [
        f"{kind}/{name}"
        for kind, name in brought
        if kind == "CustomResourceDefinition" or cluster.kubectl("get", kind, name, check=False).returncode == 0
    ]
    crds = [f"CustomResourceDefinition/{name}" for kind, name in brought if kind == "CustomResourceDefinition"]
    assert left == crds, "of the manifests' objects only the CRDs, which are removed below"
    assert "sharepod" not in cluster.kubectl("get", "crds", "-o", "name").stdout
    assert not cluster.pods(TEAM)
    mounts = machine.real.run("cat", "/proc/mounts").stdout
    assert "/var/lib/sharepod/" not in mounts
    assert "kubernetes.io~csi" not in mounts
    machine.real.run(
        "sh",
        "-c",
        "rm -rf /var/lib/sharepod/* /var/lib/kubelet/plugins/*.sharepod.dev /var/run/cdi/sharepod*.json",
    )
    found = machine.real.run(
        "find", "/var/lib/kubelet/plugins", "/var/lib/kubelet/plugins_registry", "/run/cdi", "/etc/cdi"
    )
    assert "sharepod" not in found.stdout
