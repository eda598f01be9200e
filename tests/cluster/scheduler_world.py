"""Nodes of pool `scheduler` in the world of the operator's tests. In place of the agents, this module publishes their
ResourceSlices, with the agents' rights and tokens.
"""

from __future__ import annotations

from typing import Any

from cluster.claims_world import CLAIMS, allocation, claim_of, make_claim
from cluster.operator_world import GIB, GPUNODES, World, gpu_uuid, wait
from harness.api import Api, ApiError, Object
from harness.installation import NAMESPACE
from sharepod.agent.cluster.device_slice import slice_body, slice_name, slice_spec
from sharepod.api.gpunode import Gpu

CLASS = "scheduler.sharepod.dev"
SLICES = f"{CLAIMS}/resourceslices"


class SliceAgent:
    """Slice of one node, as the node's agent writes it. `gpus`: number of published GPUs, at most two."""

    def __init__(self, world: World, node: str, gpus: int = 2) -> None:
        self._world = world
        self.node = node
        self._gpus = [
            Gpu(uuid=gpu_uuid(node, index), index=index, model="Test GPU", memory=16 * GIB) for index in range(gpus)
        ]
        token = world.cluster.service_account_token(NAMESPACE, "sharepod-agent", bound_node=node)
        self._api: Api = world.cluster.api_for(token)
        self._generation = 0

    def publish(self) -> None:
        """Publish the GPUs once the ledger has pool `scheduler`."""
        wait(lambda: self.spec()["pool"] == "scheduler", what=f"{self.node} is of pool scheduler")
        self._generation += 1
        uid = self._world.api.get(f"/api/v1/nodes/{self.node}")["metadata"]["uid"]
        body = slice_body(self.node, uid, slice_spec(self.node, self._gpus, self._generation))
        self._api.create(SLICES, body)
        self._say("True", "Published")

    def remove(self) -> None:
        """Delete the slice, as a kubelet does while the agent is away."""
        self._world.api.delete(f"{SLICES}/{slice_name(self.node)}")

    def leave(self) -> None:
        """Withdraw the GPUs once the ledger marks the node as leaving the pool."""
        wait(lambda: self.spec().get("leaving"), what=f"{self.node} leaves its pool")
        self._api.delete(f"{SLICES}/{slice_name(self.node)}")
        self._say("False", "Withdrawn")

    def spec(self) -> Object:
        found: Object = self._world.api.get(f"{GPUNODES}/{self.node}")["spec"]
        return found

    def _say(self, status: str, reason: str) -> None:
        body = {
            "apiVersion": "sharepod.dev/v1alpha1",
            "kind": "GPUNode",
            "metadata": {"name": self.node},
            "status": {"conditions": [{"type": "SlicesPublished", "status": status, "reason": reason}]},
        }
        self._world.api.apply(f"{GPUNODES}/{self.node}/status", body, manager="agent-slices")


def pool_of_scheduler(world: World, prefix: str, *, gpus: int = 2) -> SliceAgent:
    """Create a node of pool `scheduler` that publishes this number of its GPUs."""
    (node,) = world.nodes(prefix, pool="scheduler")
    agent = SliceAgent(world, node, gpus)
    agent.publish()
    return agent


def make_scheduled(world: World, namespace: str, name: str, **options: Any) -> Object:
    """Create a claim of the class that kube-scheduler allocates."""
    return make_claim(world, namespace, name, deviceClassName=CLASS, **options)


def holds(world: World, namespace: str, name: str) -> list[str]:
    """Return the GPUNodes in the operator's holds of a claim."""
    entries = ((claim_of(world, namespace, name) or {}).get("status") or {}).get("reservedFor") or []
    return [entry["name"] for entry in entries if entry["resource"] == "gpunodes"]


def is_free(world: World, namespace: str, name: str) -> bool:
    """Return whether a claim is deleted, or has neither allocation nor hold."""
    claim = claim_of(world, namespace, name)
    return claim is None or (allocation(claim) is None and not holds(world, namespace, name))


def relabel(world: World, node: str, pool: str | None) -> None:
    """Set the label of a node's pool."""
    world.api.patch(f"/api/v1/nodes/{node}", {"metadata": {"labels": {"sharepod.dev/pool": pool}}})


def most_reserved(world: World, node: str) -> int:
    """Return the largest sum of thousandths that rows of the node's ledger reserve on one GPU."""
    rows = world.rows(node)
    gpus = {gpu for row in rows for gpu in row["gpus"]}
    return max((sum(row["requestMilli"] for row in rows if gpu in row["gpus"]) for gpu in gpus), default=0)


__all__ = [
    "CLASS",
    "SLICES",
    "ApiError",
    "SliceAgent",
    "holds",
    "is_free",
    "make_scheduled",
    "most_reserved",
    "pool_of_scheduler",
    "relabel",
]
