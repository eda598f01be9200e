"""Whose volume it is: decides, from what the kubelet says and what the API server says, which tenant a pod is.

Pure. Nothing that a tenant can write counts: not the volume's attributes, not labels or annotations. What counts is the
pod's UID from the kubelet, the pod's place and controller from the API server, and the ledger row that the operator
wrote for that very name.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum

from sharepod.api.gpunode import Tenant, TenantState
from sharepod.api.objects import CSI_DRIVER

_PREFIX = "csi.storage.k8s.io/"


class VolumeRefusalReason(Enum):
    """Why a volume is refused: whether it is the request, the pod, or only the moment that is wrong."""

    MALFORMED = "malformed"
    NOT_ENTITLED = "not entitled"
    NO_RESERVATION = "no reservation"
    """May pass: the ledger can be behind the pod by a moment."""


class VolumeRefusedError(Exception):
    """The volume is not published. The message ends up in the pod's events and says what to do."""

    def __init__(self, reason: VolumeRefusalReason, message: str) -> None:
        super().__init__(message)
        self.reason = reason


@dataclass(frozen=True, slots=True, kw_only=True)
class PodIdentity:
    """The pod as the kubelet names it."""

    namespace: str
    name: str
    uid: str

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}"


def identify(volume_context: Mapping[str, str]) -> PodIdentity:
    """The pod that the kubelet asks for.

    Raises `VolumeRefusedError` where it does not say, or the volume is no inline one.
    """
    if volume_context.get(_PREFIX + "ephemeral") != "true":
        raise VolumeRefusedError(
            VolumeRefusalReason.MALFORMED,
            f"{CSI_DRIVER} serves inline ephemeral volumes only; "
            "a pod gets one through a SharePod, not through a PersistentVolumeClaim",
        )
    names = ("pod.namespace", "pod.name", "pod.uid")
    namespace, name, uid = (volume_context.get(_PREFIX + key, "") for key in names)
    if not (namespace and name and uid):
        raise VolumeRefusedError(
            VolumeRefusalReason.MALFORMED,
            f"the kubelet does not say which pod this is; the CSIDriver {CSI_DRIVER} has to have podInfoOnMount: true",
        )
    return PodIdentity(namespace=namespace, name=name, uid=uid)


def check_pod(pod: Mapping[str, object], who: PodIdentity, node: str) -> str:
    """The UID that owns this pod: its controller's, or its own where it has none.

    `pod`: the object that the API server has under that name. Raises `VolumeRefusedError` where it is another pod or
    another node's.
    """
    metadata = _mapping(pod.get("metadata"))
    if metadata.get("uid") != who.uid:
        raise VolumeRefusedError(
            VolumeRefusalReason.NOT_ENTITLED,
            f"pod {who} is now another one (UID {metadata.get('uid')}, not {who.uid}); the old one is being taken away",
        )
    placed = _mapping(pod.get("spec")).get("nodeName")
    if placed != node:
        raise VolumeRefusedError(
            VolumeRefusalReason.NOT_ENTITLED,
            f"pod {who} belongs to node {placed}, and this is the agent of node {node}; check the agent's node_name",
        )
    owners = metadata.get("ownerReferences")
    for owner in owners if isinstance(owners, list) else ():
        if _mapping(owner).get("controller") is True:
            return str(owner.get("uid"))
    return who.uid


def choose_tenant(rows: Iterable[Tenant], who: PodIdentity, owner_uid: str, node: str) -> Tenant:
    """The row of the ledger that entitles this pod. Raises `VolumeRefusedError` where there is none."""
    named = [row for row in rows if (row.namespace, row.pod_name) == (who.namespace, who.name)]
    if not named:
        raise VolumeRefusedError(
            VolumeRefusalReason.NO_RESERVATION,
            f"no share of a GPU is reserved on node {node} for pod {who}; "
            "only pods that the operator made for a SharePod have one: create a SharePod, not a Pod with this volume",
        )
    entitled = next((row for row in named if row.id == owner_uid), None)
    if entitled is None:
        raise VolumeRefusedError(
            VolumeRefusalReason.NOT_ENTITLED,
            f"the share reserved on node {node} under the name {who} is SharePod {named[0].id}'s, "
            f"and this pod's owner is {owner_uid}; "
            "delete this pod, or give it another name",
        )
    if entitled.state is not TenantState.RESERVED:
        raise VolumeRefusedError(
            VolumeRefusalReason.NOT_ENTITLED,
            f"the reservation of pod {who} on node {node} is being released; create the SharePod again to run it again",
        )
    return entitled


def _mapping(value: object) -> Mapping[str, object]:
    return value if isinstance(value, Mapping) else {}
