"""SharePods, Pods and GPUNodes as the API server returns them, for tests of the operator's facts and decisions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sharepod.api.gpunode import Tenant, TenantState
from sharepod.api.objects import SHARE_GATE, TENANT_LABEL
from sharepod.api.pods.pod import PodSettings
from sharepod.controller.decisions.snapshot import ReservationSnapshot
from sharepod.controller.decisions.steps import RemovalReason
from sharepod.controller.state.facts.pod_facts import PodFacts, pod_facts
from sharepod.controller.state.facts.sharepod_facts import SharePodFacts, sharepod_facts
from sharepod.kube import Json
from sharepod.placement.state.types import Reservation

TENANT = "tenant-1"
PODS = PodSettings()


def sharepod_object(*, uid: str = TENANT, version: int = 1, name: str = "one", **fields: Any) -> Json:
    """Return a SharePod with request 0.4 that runs once. `status`, `metadata`, `spec`: merged into the object."""
    containers = [{"name": "main", "image": "test"}]
    spec = {"gpu": {"request": 0.4}, "restartPolicy": "Never", "containers": containers, **fields.get("spec", {})}
    metadata = {
        "name": name,
        "namespace": "n",
        "uid": uid,
        "resourceVersion": str(version),
        "generation": 1,
        "creationTimestamp": "2026-01-01T00:00:00Z",
        **fields.get("metadata", {}),
    }
    return {"metadata": metadata, "spec": spec, "status": fields.get("status", {})}


def sharepod(**fields: Any) -> SharePodFacts:
    return sharepod_facts(sharepod_object(**fields), PODS)


def pod_object(
    *,
    uid: str = "pod-1",
    version: int = 1,
    pin: str = "node-a",
    node: str | None = None,
    phase: str = "Pending",
    owner: str = TENANT,
    restart: str = "Never",
    status: Json | None = None,
    deleting: bool | str = False,
    conditions: list[Json] | None = None,
    gated: bool = False,
    priority: int = 0,
    name: str = "one",
    finalizers: Sequence[str] = (),
    line: Mapping[str, str] | None = None,
) -> Json:
    """Return a Pod of a SharePod.

    - `gated`: it waits for its share, so it has no pin.
    - `line`: limits of its container.
    - `deleting`: True if it is being deleted; or the time at which its grace period ends.
    """
    terms = [{"matchFields": [{"key": "metadata.name", "operator": "In", "values": [pin]}]}]
    required = {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": terms}}
    metadata: Json = {
        "name": name,
        "namespace": "n",
        "uid": uid,
        "resourceVersion": str(version),
        "labels": {TENANT_LABEL: owner},
        "ownerReferences": [{"kind": "SharePod", "uid": owner, "controller": True}],
    }
    if finalizers:
        metadata["finalizers"] = list(finalizers)
    if deleting:
        metadata["deletionTimestamp"] = deleting if isinstance(deleting, str) else "2026-01-01T00:00:00Z"
    return {
        "metadata": metadata,
        "spec": {
            **({"schedulingGates": [{"name": SHARE_GATE}]} if gated else {"affinity": {"nodeAffinity": required}}),
            "priority": priority,
            "restartPolicy": restart,
            "containers": [{"name": "main", **({"resources": {"limits": dict(line)}} if line else {})}],
            **({"nodeName": node} if node else {}),
        },
        "status": {"phase": phase, "conditions": conditions or [], **(status or {})},
    }


def pod(**fields: Any) -> PodFacts:
    return pod_facts(pod_object(**fields))


def row(*, state: TenantState = TenantState.RESERVED, tenant: str = TENANT, **fields: Any) -> Tenant:
    values: dict[str, Any] = {
        "id": tenant,
        "namespace": "n",
        "pod_name": "one",
        "state": state,
        "gpus": ("GPU-0",),
        "request_milli": 400,
        "limit_milli": 1000,
        "memory": 1 << 32,
    }
    return Tenant(**values | fields)


def reserved(
    node: str = "node-a",
    *,
    written: bool = True,
    releasing: bool = False,
    ending: bool = False,
    drained: bool = False,
    override: RemovalReason | None = None,
    forced: bool = False,
    pod_uid: str | None = None,
) -> ReservationSnapshot:
    """Return a reservation for the Pod `pod_uid`. `releasing`: its row in the ledger is Releasing. `ending`: the
    operator has decided to release it, and the row is not Releasing yet."""
    state = TenantState.RELEASING if releasing else TenantState.RESERVED
    wanted = Reservation.of_row(row(state=TenantState.RELEASING if ending else state, pod_uid=pod_uid))
    return ReservationSnapshot(
        node=node,
        wanted=wanted,
        written=row(state=state, pod_uid=pod_uid) if written else None,
        drained=drained,
        override=override,
        forced=forced,
    )
