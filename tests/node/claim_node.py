"""A real node whose GPUs are attached by resource claims; the test writes rows and allocations in place of the
operator."""

from __future__ import annotations

import datetime
import json
import threading
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Self

from harness.api import ApiError, Object
from harness.cluster import Cluster, suppress_reason, wait_until
from harness.errors import HarnessError
from harness.installation import Installation
from harness.machines import IMAGE, RealNode
from harness.services import Service

GROUP = "/apis/sharepod.dev/v1alpha1"
RESOURCE = "/apis/resource.k8s.io/v1"
CLASS = "sharepod.dev"
DRIVER = "gpu.sharepod.dev"
FINALIZER = "resource.kubernetes.io/delete-protection"

RESTRICTED = {
    "runAsNonRoot": True,
    "runAsUser": 65534,
    "allowPrivilegeEscalation": False,
    "readOnlyRootFilesystem": True,
    "capabilities": {"drop": ["ALL"]},
    "seccompProfile": {"type": "RuntimeDefault"},
}


def container(*args: str, name: str = "main", image: str = IMAGE, claim: str | None = "gpu", **more: Any) -> Object:
    """Return a container that Pod Security `restricted` admits. A variable gives the simulated GPUs its Pod's name."""
    names = {"NAMESPACE": "metadata.namespace", "POD": "metadata.name"}
    env = [{"name": key, "valueFrom": {"fieldRef": {"fieldPath": path}}} for key, path in names.items()]
    env.append({"name": "FAKE_CUDA_LABEL", "value": f"$(NAMESPACE)/$(POD)/{name}"})
    resources = {"claims": [{"name": claim}]} if claim is not None else {}
    body: Object = {"name": name, "image": image, "args": list(args), "env": env, "resources": resources}
    return {**body, "securityContext": RESTRICTED, **more}


def claim_spec(milli: int, memory: str = "1Gi", count: int = 1) -> Object:
    """Return the spec of a claim for a part of each of `count` GPUs."""
    capacity = {"requests": {"timeMilli": str(milli), "memory": memory}}
    exactly = {"deviceClassName": CLASS, "count": count, "capacity": capacity}
    return {"devices": {"requests": [{"name": "gpu", "exactly": exactly}]}}


class ClaimNode:
    """The agent on a real node, with claims. No operator runs."""

    def __init__(self, cluster: Cluster, machine: RealNode, installation: Installation, namespace: str) -> None:
        self.cluster = cluster
        self.machine = machine
        self.installation = installation
        self.namespace = namespace
        self.gpunode = f"{GROUP}/gpunodes/{machine.node}"
        self.gpus = [gpu["uuid"] for gpu in machine.gpus]
        self._starts = 0
        self._ledger = threading.Lock()
        self.agent: Service = self.start_agent()

    def start_agent(self) -> Service:
        """Start the node's next agent. Return once the kubelet calls it."""
        self._starts += 1
        self.agent = self.machine.start_agent(self.installation, f"agent-{self._starts}")
        self.machine.await_claim_driver(self.agent)
        return self.agent

    # Objects

    def make_claim(self, name: str, milli: int, **more: Any) -> Object:
        body = {"apiVersion": "resource.k8s.io/v1", "kind": "ResourceClaim", "metadata": {"name": name}}
        path = f"{RESOURCE}/namespaces/{self.namespace}/resourceclaims"
        made: Object = self.cluster.api.create(path, {**body, "spec": claim_spec(milli, **more)})
        return made

    def claim(self, name: str) -> Object | None:
        try:
            found: Object = self.cluster.api.get(f"{RESOURCE}/namespaces/{self.namespace}/resourceclaims/{name}")
        except ApiError as error:
            if error.code == 404:
                return None
            raise
        return found

    def make_pod(self, name: str, claim: str | None, *containers: Object, **spec: Any) -> str:
        """Create a Pod with the claim of that name as its claim `gpu`; return its path."""
        claims = [{"name": "gpu", "resourceClaimName": claim}] if claim is not None else []
        body = {"restartPolicy": "Always", "terminationGracePeriodSeconds": 1, "resourceClaims": claims, **spec}
        body["containers"] = list(containers) or [container()]
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "spec": body}
        self.cluster.api.create(f"/api/v1/namespaces/{self.namespace}/pods", pod)
        return f"/api/v1/namespaces/{self.namespace}/pods/{name}"

    # The operator's part

    def row(self, claim: Object, milli: int, *, gpus: Sequence[str] | None = None, limit: int = 1000) -> Object:
        meta = claim["metadata"]
        return {
            "id": meta["uid"],
            "namespace": meta["namespace"],
            "claim": {"name": meta["name"], "uid": meta["uid"]},
            "state": "Reserved",
            "gpus": list(gpus or self.gpus[:1]),
            "requestMilli": milli,
            "limitMilli": limit,
            "memory": 1 << 30,
        }

    def rows(self) -> list[Object]:
        rows: list[Object] = self.cluster.api.get(self.gpunode)["spec"].get("tenants", [])
        return rows

    def reserve(self, row: Object) -> None:
        """Write a row into the ledger, in place of the tenant's earlier row."""
        with self._ledger:
            rows = [each for each in self.rows() if each["id"] != row["id"]]
            self.cluster.api.patch(self.gpunode, {"spec": {"tenants": [*rows, row]}})

    def remove(self, tenant_id: str) -> None:
        with self._ledger:
            rows = [each for each in self.rows() if each["id"] != tenant_id]
            self.cluster.api.patch(self.gpunode, {"spec": {"tenants": rows}})

    def allocate(self, claim: Object, gpus: Sequence[str] | None = None) -> None:
        """Write finalizer and allocation of a claim, as the operator does after it has written the row."""
        meta = claim["metadata"]
        path = f"{RESOURCE}/namespaces/{meta['namespace']}/resourceclaims/{meta['name']}"
        self.cluster.api.patch(path, {"metadata": {"finalizers": [FINALIZER]}})
        node = {"matchFields": [{"key": "metadata.name", "operator": "In", "values": [self.machine.node]}]}
        results = [
            {"request": "gpu", "driver": DRIVER, "pool": self.machine.node, "device": uuid.lower()}
            for uuid in gpus or self.gpus[:1]
        ]
        moment = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        selector = {"nodeSelectorTerms": [node]}
        allocation = {"devices": {"results": results}, "nodeSelector": selector, "allocationTimestamp": moment}
        self.cluster.api.patch(f"{path}/status", {"status": {"allocation": allocation}})

    def give(self, name: str, milli: int, *, gpus: Sequence[str] | None = None, limit: int = 1000) -> Object:
        """Create a claim with row and allocation; return the row."""
        claim = self.make_claim(name, milli, count=len(gpus or [""]))
        row = self.row(claim, milli, gpus=gpus, limit=limit)
        self.reserve(row)
        self.allocate(claim, gpus)
        return row

    def release(self, row: Object) -> None:
        """Release a tenant as the operator does: set its row to Releasing, wait until the agent reports it drained,
        remove the row."""
        self.reserve({**row, "state": "Releasing"})
        self.await_tenant(row["id"], drained=True)
        self.remove(row["id"])

    # Observations

    def await_pod(self, pod: str, phase: str = "Running", *, timeout: float = 40.0) -> Object:
        def reached(seen: Object | None) -> bool:
            return seen is not None and seen["status"].get("phase") == phase

        try:
            found = self.cluster.wait_for(pod, reached, what=f"pod {phase}", timeout=timeout)
        except HarnessError as error:
            kubelet = self.machine.real.kubelet_log_tail()
            raise HarnessError(f"{self.messages()}\n{self.agent.log_tail()}\n{kubelet}\n{error}") from None
        assert found is not None
        return found

    def await_gone(self, pod: str, *, timeout: float = 60.0) -> None:
        self.cluster.wait_for(pod, lambda seen: seen is None, what="the pod deleted", timeout=timeout)

    def tenant(self, tenant_id: str) -> Object:
        tenants = self.cluster.api.get(self.gpunode).get("status", {}).get("tenants", [])
        return next((each for each in tenants if each["id"] == tenant_id), {})

    def await_tenant(self, tenant_id: str, *, timeout: float = 40.0, **fields: Any) -> None:
        wait_until(
            lambda: fields.items() <= self.tenant(tenant_id).items(),
            what=f"tenant {tenant_id} with {fields}",
            timeout=timeout,
        )

    def condition(self, kind: str) -> Object:
        conditions = self.cluster.api.get(self.gpunode).get("status", {}).get("conditions", [])
        return next((each for each in conditions if each["type"] == kind), {})

    def messages(self) -> str:
        events = self.cluster.api.get(f"/api/v1/namespaces/{self.namespace}/events")["items"]
        return "\n".join(str(event.get("message")) for event in events)

    def logs(self, pod: str, container_name: str = "main") -> str:
        return self.cluster.kubectl("logs", "-n", self.namespace, pod, "-c", container_name, check=False).stdout

    def restarts(self, pod: str) -> int:
        statuses = self.cluster.api.get(f"/api/v1/namespaces/{self.namespace}/pods/{pod}")["status"]
        return sum(int(each["restartCount"]) for each in statuses["containerStatuses"])

    # Its life

    def __enter__(self) -> Self:
        body = {"apiVersion": "resource.k8s.io/v1", "kind": "DeviceClass", "metadata": {"name": CLASS}}
        selectors = [{"cel": {"expression": f'device.driver == "{DRIVER}"'}}]
        with suppress_reason("AlreadyExists"):
            self.cluster.api.create(f"{RESOURCE}/deviceclasses", {**body, "spec": {"selectors": selectors}})
        gpunode: Object = {
            "apiVersion": "sharepod.dev/v1alpha1",
            "kind": "GPUNode",
            "metadata": {"name": self.machine.node},
            "spec": {"pool": "dedicated", "tenants": []},
        }
        with suppress_reason("AlreadyExists"):
            self.cluster.api.create(f"{GROUP}/gpunodes", gpunode)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.clear()

    def clear(self) -> None:
        """Delete every Pod and claim, and release every tenant."""
        path = f"/api/v1/namespaces/{self.namespace}/pods"
        for pod in self.cluster.api.get(path)["items"]:
            with suppress_reason("NotFound"):
                self.cluster.api.delete(f"{path}/{pod['metadata']['name']}", grace=1)
        wait_until(lambda: not self.cluster.api.get(path)["items"], what="no Pods", timeout=60)
        claims = f"{RESOURCE}/namespaces/{self.namespace}/resourceclaims"
        for claim in self.cluster.api.get(claims)["items"]:
            with suppress_reason("NotFound"):
                self.cluster.api.delete(f"{claims}/{claim['metadata']['name']}")
        wait_until(lambda: not self.cluster.api.get(claims)["items"], what="no claims", timeout=60)
        for row in self.rows():
            self.release(row)


def restricted_namespace(cluster: Cluster, name: str) -> str:
    """Create a namespace that enforces Pod Security `restricted`; return its name."""
    labels: Mapping[str, str] = {"pod-security.kubernetes.io/enforce": "restricted"}
    return cluster.namespace(name, labels=labels)


def inventory(count: int) -> str:
    """Return the text of the agent's inventory file with `count` simulated GPUs."""
    gpus = [
        {
            "uuid": f"GPU-5a9e000{n}-0000-4000-8000-00000000000{n}",
            "index": n - 1,
            "model": "Simulated",
            "memory": "16Gi",
        }
        for n in range(1, count + 1)
    ]
    return json.dumps({"gpus": gpus})
