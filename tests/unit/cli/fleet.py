"""Cluster in memory that the plugin reads: two nodes with three GPUs, tenants by SharePod, claim and plain Pod, and
SharePods that wait."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from kubectl_sharepod.kubectl import ForbiddenError, Json, Kubectl, KubectlError, NotFoundError

GI = 1 << 30
MODEL = "NVIDIA A100-SXM4-80GB"
UUIDS = tuple(f"GPU-{n}0000000-0000-0000-0000-00000000000{n}" for n in range(3))


@dataclass(frozen=True)
class Memory(Kubectl):
    """kubectl of a cluster in memory. `denied`: prefixes of paths that the user may not read."""

    objects: dict[str, Json] = field(default_factory=dict)
    denied: tuple[str, ...] = ()
    patches: list[tuple[str, str, str, Json]] = field(default_factory=list)

    def namespace(self) -> str:
        return "team"

    def start(self) -> None:
        """Do nothing: no program is needed."""

    def get(self, path: str) -> Json:
        plain = path.partition("?")[0]
        if any(plain.startswith(beginning) for beginning in self.denied):
            raise ForbiddenError(f'Error from server (Forbidden): you cannot read "{plain}"')
        if plain not in self.objects:
            raise NotFoundError(f'Error from server (NotFound): "{plain}" not found')
        return self.objects[plain]

    def merge(self, resource: str, namespace: str, name: str, patch: Json) -> None:
        self.patches.append((resource, namespace, name, patch))

    def edit(self, resource: str, namespace: str, name: str, steps: Sequence[Json]) -> None:
        """Change `spec.gpu` of a SharePod by the steps of a JSON patch, as the API server does."""
        spec = self.objects[f"/apis/sharepod.dev/v1alpha1/namespaces/{namespace}/sharepods/{name}"]["spec"]["gpu"]
        for step in steps:
            field = step["path"].removeprefix("/spec/gpu/")
            if step["op"] == "test" and spec[field] != step["value"]:
                raise KubectlError("the server rejected our request due to an error in our request")
            if step["op"] == "remove":
                del spec[field]
            elif step["op"] == "replace":
                spec[field] = step["value"]


def row(name: str, gpus: tuple[int, ...], request: int, memory: int, *, door: str = "SharePod", **more: Any) -> Json:
    """Return a row of the ledger. `memory`: in GiB. `gpus`: numbers of its GPUs."""
    uid = f"uid-{name}"
    return {
        "id": uid,
        "namespace": "team",
        "podName": "" if door == "Claim" else name,
        "podUID": uid if door == "Pod" else "pod-uid",
        **({"claim": {"name": name, "uid": uid}} if door == "Claim" else {}),
        "gpus": [UUIDS[gpu] for gpu in gpus],
        "requestMilli": request,
        "limitMilli": 1000,
        "memory": memory * GI,
        "mode": "Shared",
        "state": "Reserved",
    } | more


def gpunode(name: str, gpus: dict[int, int], tenants: list[Json], **status: Any) -> Json:
    """Return a GPUNode. `gpus`: by number of the GPU, its index on the node."""
    seen = [
        {"id": tenant["id"], "processes": 1, "memory": GI, "heldMilli": 220, "progressMilli": 930} for tenant in tenants
    ]
    devices = [{"uuid": UUIDS[n], "index": i, "model": MODEL, "memory": 80 * GI} for n, i in gpus.items()]
    spec = {"pool": "dedicated", "tenants": tenants}
    return {"metadata": {"name": name}, "spec": spec, "status": {"gpus": devices, "tenants": seen} | status}


def sharepod(name: str, request: float, *, memory: str = "8Gi", placed: bool = True, **more: Any) -> Json:
    """Return a SharePod."""
    reason = {} if placed else {"reason": "NoRoom", "message": "no GPU has 0.9 of its time free"}
    condition = {"type": "Placed", "status": "True" if placed else "False", **reason}
    return {
        "metadata": {
            "name": name,
            "namespace": "team",
            "uid": f"uid-{name}",
            "creationTimestamp": "2026-01-01T00:00:00Z",
            "generation": 1,
        },
        "spec": {"gpu": {"request": request, "limit": 1, "memory": memory}},
        "status": {
            "conditions": [condition],
            "share": {"request": str(request), "limit": "1", "memory": memory},
            "summary": "Running" if placed else "NoRoom",
            **({"node": "node-a", "gpuIndexes": "0", "podName": name} if placed else {}),
            "observedGeneration": 1,
        }
        | more,
    }


def rollout(part: str, **status: Any) -> Json:
    """Return the Deployment of the operator or the DaemonSet of the agent."""
    spec = {"replicas": 2, "template": {"spec": {"runtimeClassName": "nvidia"} if part == "agent" else {}}}
    return {"metadata": {"namespace": "sharepod-system", "name": f"sharepod-{part}"}, "spec": spec, "status": status}


PODS, CLAIMS = "/api/v1", "/apis/resource.k8s.io/v1"
TEAM_PODS, TEAM_CLAIMS = f"{PODS}/namespaces/team/pods", f"{CLAIMS}/namespaces/team/resourceclaims"


def pending_pod(name: str, milli: int | None = None, claims: dict[str, str] | None = None, **metadata: Any) -> Json:
    """Return a Pod without a node. `milli`: its line, if it has one. `claims`: by entry of its spec, the name of its
    claim from a template."""
    limits = {} if milli is None else {"sharepod.dev/gpu-milli": str(milli), "sharepod.dev/gpu-memory-mib": "4096"}
    made = claims or {}
    unschedulable = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "no GPU has room"}
    return {
        "metadata": {
            "name": name,
            "namespace": "team",
            "uid": f"uid-{name}",
            "labels": {} if milli is None else {"sharepod.dev/line": "true"},
            "creationTimestamp": "2026-01-01T00:00:00Z",
        }
        | metadata,
        "spec": {
            "containers": [{"name": "main", "resources": {"limits": limits}}],
            "resourceClaims": [{"name": entry, "resourceClaimTemplateName": entry} for entry in made],
        },
        "status": {
            "phase": "Pending",
            "conditions": [unschedulable],
            "resourceClaimStatuses": [{"name": entry, "resourceClaimName": claim} for entry, claim in made.items()],
        },
    }


def claim(name: str, milli: int | None = None, request: str = "gpu", namespace: str = "team", **more: Any) -> Json:
    """Return a claim without an allocation. `milli`: None: it has no size, as the claim of a line."""
    capacity = {} if milli is None else {"capacity": {"requests": {"timeMilli": str(milli), "memory": "6Gi"}}}
    asked = [{"name": request, "exactly": {"deviceClassName": "sharepod.dev", "count": 1} | capacity}]
    metadata = {"name": name, "namespace": namespace, "uid": f"uid-{name}"}
    return {"metadata": metadata, "spec": {"devices": {"requests": asked}}} | more


def waiting_cluster(**changes: Any) -> Memory:
    """Return the cluster with Pods and claims. Of these, the Pods `web` and `late` and the claim `job-gpu` wait."""
    found = cluster(**changes)
    pods = [
        pending_pod("web", 400, {"sharepod": "web-sharepod"}),
        pending_pod("late", 2000),
        pending_pod("job", None, {"gpu": "job-gpu"}),
        pending_pod("placed", 300, {"sharepod": "eval"}),
        pending_pod("notebook", 200),
        pending_pod("large", 900, {"gpu": "large-sharepod"}, labels={"sharepod.dev/tenant": "uid-large"}),
        pending_pod("deleted", 300, {"gpu": "deleted-gpu"}, deletionTimestamp="2026-01-01T00:00:00Z"),
        pending_pod("cpu"),
    ]
    claims = [
        claim("web-sharepod", request="line"),
        claim("job-gpu", 250),
        claim("eval", request="line"),
        claim("large-sharepod", request="sharepod"),
        claim("deleted-gpu", 100),
        claim("unused", 100),
    ]
    for path, items in ((TEAM_PODS, pods), (f"{PODS}/pods", pods), (TEAM_CLAIMS, claims)):
        found.objects[path] = {"items": items}
    return found


def cluster(**changes: Any) -> Memory:
    """Return the cluster of this file's header. `changes`: other values of fields of `Memory`."""
    tenants = [
        row("train", (0,), 500, 40),
        row("notebook", (0,), 200, 8, door="Pod"),
        row("eval", (1,), 600, 60, door="Claim"),
    ]
    alive = [{"type": "AgentAlive", "status": "False", "message": "the agent does not renew its Lease"}]
    nodes = [gpunode("node-a", {0: 0, 1: 1}, tenants), gpunode("node-b", {2: 0}, [], conditions=alive)]
    waiting = sharepod("large", 0.9, placed=False)
    objects: dict[str, Json] = {
        "/apis/sharepod.dev/v1alpha1/gpunodes": {"items": nodes},
        "/apis/sharepod.dev/v1alpha1/sharepods": {"items": [sharepod("train", 0.5), waiting]},
        "/apis/sharepod.dev/v1alpha1/namespaces/team/sharepods": {"items": [sharepod("train", 0.5), waiting]},
        "/apis/sharepod.dev/v1alpha1/namespaces/team/sharepods/large": waiting,
        "/apis/sharepod.dev/v1alpha1/namespaces/team/sharepods/train": sharepod("train", 0.5),
        "/api/v1/nodes": {"items": [{"metadata": {"name": "node-a", "labels": {"sharepod.dev/pool": "dedicated"}}}]},
        "/apis/apps/v1/deployments": {"items": [rollout("operator", readyReplicas=2, updatedReplicas=2)]},
        "/apis/apps/v1/daemonsets": {"items": [rollout("agent", desiredNumberScheduled=0)]},
        "/apis/node.k8s.io/v1/runtimeclasses": {"items": [{"metadata": {"name": "nvidia"}}]},
        "/api/v1/namespaces/sharepod-system/events": {"items": []},
        "/version": {"gitVersion": "v1.36.3"},
    }
    return Memory(**({"objects": objects} | changes))
