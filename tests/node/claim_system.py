"""SharePod on a cluster with one real node of simulated GPUs, and a namespace with claims."""

from __future__ import annotations

import json
import signal
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml
from cluster.plain_webhook_world import await_answers, install_webhook
from cluster.plain_world import install_plain
from harness.api import Object
from harness.cluster import Cluster, wait_until
from harness.images import image_with_program
from harness.installation import MANIFESTS, Installation
from harness.machines import IMAGE, RealNode
from harness.services import Service
from node.claim_node import CLASS, GROUP, RESTRICTED, container, inventory, restricted_namespace

NAMESPACE = "team-c"


class ClaimSystem:
    """Cluster with SharePod, one real node of simulated GPUs, and a namespace with claims."""

    def __init__(
        self, cluster: Cluster, machine: RealNode, installation: Installation, settings: Mapping[str, str] | None = None
    ) -> None:
        self.cluster = cluster
        self.machine = machine
        self.installation = installation
        self.gpunode = f"{GROUP}/gpunodes/{machine.node}"
        self.settings = settings
        """Settings of the operator."""
        self.operator: Service = installation.start_operator("operator-1", env=settings)
        self.agent: Service = machine.start_agent(installation, "agent-1")
        self._starts = 1
        self.most: dict[str, int] = {}
        """For each GPU: the most thousandths of its time that any version of the ledger assigned."""

    def kill_agent(self) -> None:
        self.agent.signal(signal.SIGKILL)
        self.agent.wait(10)

    def start_agent(self) -> None:
        self._starts += 1
        self.agent = self.machine.start_agent(self.installation, f"agent-{self._starts}")

    def restart_operator(self) -> None:
        """Kill the operator and start it again."""
        self._starts += 1
        self.operator.signal(signal.SIGKILL)
        self.operator.wait(10)
        self.operator = self.installation.start_operator(f"operator-{self._starts}", env=self.settings)

    def apply(self, *objects: Object) -> None:
        for each in objects:
            self.cluster.kubectl("apply", "-n", NAMESPACE, "-f", "-", input=json.dumps(each))

    def template(self, name: str, milli: int, *, limit: int = 1000, count: int = 1) -> Object:
        amounts = {"timeMilli": str(milli), "limitMilli": str(limit), "memory": "1Gi"}
        exactly = {"deviceClassName": CLASS, "count": count, "capacity": {"requests": amounts}}
        spec = {"devices": {"requests": [{"name": "gpu", "exactly": exactly}]}}
        meta = {"apiVersion": "resource.k8s.io/v1", "kind": "ResourceClaimTemplate", "metadata": {"name": name}}
        return {**meta, "spec": {"spec": spec}}

    def claim(self, name: str, milli: int) -> Object:
        made = self.template(name, milli)
        return {**made, "kind": "ResourceClaim", "spec": made["spec"]["spec"]}

    def workload(self, kind: str, name: str, template: str, *args: str, **spec: Any) -> Object:
        labels = {"app": name}
        claims = [{"name": "gpu", "resourceClaimTemplateName": template}]
        pod = {"resourceClaims": claims, "containers": [container(*args)], "terminationGracePeriodSeconds": 2}
        if kind == "Job":
            pod["restartPolicy"] = "Never"
        made = {"template": {"metadata": {"labels": labels}, "spec": pod}, **spec}
        if kind == "Deployment":
            made["selector"] = {"matchLabels": labels}
        group = {"Job": "batch/v1", "Deployment": "apps/v1"}[kind]
        return {"apiVersion": group, "kind": kind, "metadata": {"name": name}, "spec": made}

    def pod(self, name: str, *, claim: str | None = None, template: str | None = None) -> Object:
        source = {"resourceClaimName": claim} if claim else {"resourceClaimTemplateName": template}
        spec = {"resourceClaims": [{"name": "gpu", **source}], "containers": [container()]}
        meta = {"name": name, "labels": {"app": name}}
        return {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": meta,
            "spec": {**spec, "terminationGracePeriodSeconds": 2},
        }

    def sharepod(self, name: str, request: float | None, **more: Any) -> Object:
        """Return a SharePod with 1Gi of memory. Without `request` it requests whole GPUs. `gpu`: merged into the block
        `spec.gpu`; the other arguments are merged into the spec."""
        gpu = {"request": request, "memory": "1Gi"} if request is not None else {"mode": "Exclusive"}
        one = {"name": "main", "image": IMAGE, "securityContext": RESTRICTED}
        spec = {"gpu": gpu | more.pop("gpu", {}), "containers": [one], "terminationGracePeriodSeconds": 2, **more}
        return {
            "apiVersion": "sharepod.dev/v1alpha1",
            "kind": "SharePod",
            "metadata": {"name": name},
            "spec": spec,
        }

    def pods(self, app: str | None = None) -> list[Object]:
        found: list[Object] = self.cluster.api.get(f"/api/v1/namespaces/{NAMESPACE}/pods")["items"]
        return [pod for pod in found if app is None or pod["metadata"].get("labels", {}).get("app") == app]

    def await_running(self, app: str, count: int = 1, *, timeout: float = 60.0) -> list[str]:
        def running() -> list[str]:
            return [
                pod["metadata"]["name"]
                for pod in self.pods(app)
                if pod["status"].get("phase") == "Running" and "deletionTimestamp" not in pod["metadata"]
            ]

        wait_until(lambda: len(running()) == count, what=f"{count} running Pods of {app}", timeout=timeout)
        return running()

    def rows(self) -> list[Object]:
        rows: list[Object] = self.cluster.api.get(self.gpunode)["spec"].get("tenants", [])
        return rows

    def restarts(self) -> int:
        return sum(int(each["restartCount"]) for pod in self.pods() for each in pod["status"]["containerStatuses"])

    def watch_ledger(self, until: threading.Event) -> None:
        """Record every version of the ledger until the event is set."""
        seen = self.cluster.api.get(self.gpunode)
        self._note(seen)
        while not until.is_set():
            version = seen["metadata"]["resourceVersion"]
            for event in self.cluster.api.watch(f"{GROUP}/gpunodes", timeout=2, resourceVersion=version):
                seen = event["object"]
                self._note(seen)

    def _note(self, gpunode: Object) -> None:
        given: dict[str, int] = {}
        for row in gpunode["spec"].get("tenants", []):
            for uuid in row["gpus"]:
                given[uuid] = given.get(uuid, 0) + row["requestMilli"]
        self.most = {uuid: max(self.most.get(uuid, 0), given.get(uuid, 0)) for uuid in self.most.keys() | given.keys()}

    def install_self_test(self, directory: Path) -> None:
        """Apply `manifests/claims/self-test`, with an image that contains only its program. `directory`: folder for the
        image."""
        image = "sharepod.test/sleep:1"
        self.machine.real.load_image(image_with_program(image, Path("/usr/bin/sleep"), directory=directory))
        rendered = self.cluster.kubectl("kustomize", str(MANIFESTS / "claims/self-test")).stdout
        documents = list(yaml.safe_load_all(rendered))
        (daemonset,) = (each for each in documents if each["kind"] == "DaemonSet")
        daemonset["spec"]["template"]["spec"]["containers"][0]["image"] = image
        self.cluster.kubectl("apply", "--server-side", "-f", "-", input=yaml.safe_dump_all(documents), timeout=60)

    def await_condition(self, kind: str, reason: str, *, timeout: float = 60.0) -> Object:
        """Wait until this condition of the node has this reason; return the condition."""

        def condition(gpunode: Object | None) -> Object:
            conditions = (gpunode or {}).get("status", {}).get("conditions", [])
            return next((each for each in conditions if each["type"] == kind), {})

        def holds(gpunode: Object | None) -> bool:
            return condition(gpunode).get("reason") == reason

        return condition(self.cluster.wait_for(self.gpunode, holds, what=f"{kind} {reason}", timeout=timeout))

    def clear(self) -> None:
        kinds = "deployments,statefulsets,jobs,sharepods.sharepod.dev,pods,resourceclaims,resourceclaimtemplates"
        self.cluster.kubectl("delete", kinds, "--all", "-n", NAMESPACE, timeout=90)
        wait_until(lambda: not self.pods(), what="no Pods", timeout=60)
        wait_until(lambda: not self.rows(), what="an empty ledger", timeout=60)


def gpunodes(cluster: Cluster) -> list[str]:
    """Return the names of all GPUNodes."""
    return [each["metadata"]["name"] for each in cluster.api.get(f"{GROUP}/gpunodes")["items"]]


@contextmanager
def system_with_claims(
    cluster: Cluster,
    directory: Path,
    settings: Mapping[str, str] | None = None,
    *,
    gpus: int = 2,
    plain: bool = False,
    volume: bool = False,
) -> Iterator[ClaimSystem]:
    """Run SharePod and a node with `gpus` GPUs, with claims.

    Args:
        directory: Folder for the node's inventory.
        settings: Settings of the operator.
        plain: With the resource line, too.
        volume: With the resource line, and without claims.
    """
    listed = directory / "inventory.yaml"
    listed.write_text(inventory(gpus))
    with RealNode(cluster, listed) as machine:
        installation = Installation(cluster)
        if volume:
            settings = {**(settings or {}), **install_webhook(cluster, "plain-volume")}
        elif plain:
            install_plain(cluster)
        else:
            installation.install_claims()
        installation.add_to_pool(machine.node)
        restricted_namespace(cluster, NAMESPACE)
        system = ClaimSystem(cluster, machine, installation, settings)
        wait_until(lambda: machine.node in gpunodes(cluster), what="the GPUNode", timeout=60)
        if volume:
            await_answers(cluster)
        yield system
