"""Volume admission: decides which tenant's directory a pod gets as its volume, if any. Pure.

Guarantees:
- Nothing that a tenant can write affects the decision: neither the volume's attributes nor labels, annotations or owner
  references.
- The decision uses the pod's name and UID as the kubelet sends them. A kubelet runs only pods of its own node.
- It also uses the ledger row that the operator wrote for a pod of that name and UID. No call of the API server is made.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import Enum

from sharepod.agent.kubelet.identity import KubeletIdentity
from sharepod.api.gpunode import Tenant, TenantState
from sharepod.api.objects import CSI_DRIVER

_PREFIX = "csi.storage.k8s.io/"


class VolumeRefusalReason(Enum):
    """Reason why a volume is refused."""

    MALFORMED = "malformed"
    """The request is not the kubelet's request for an inline volume of this driver."""
    NOT_ENTITLED = "not entitled"
    """The pod has no right to the volume, now or later."""
    NO_RESERVATION = "no reservation"
    """The ledger has no row for the pod. The agent's ledger may be older than the pod, so waiting may help."""


class VolumeRefusedError(Exception):
    """Refusal to publish a volume. The message appears in the pod's events, with the remedy."""

    def __init__(self, reason: VolumeRefusalReason, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class PodIdentity(KubeletIdentity):
    """Identity of a pod in a call of the kubelet."""


def identify(volume_context: Mapping[str, str]) -> PodIdentity:
    """Return the identity of the pod in the kubelet's request.

    Raise `VolumeRefusedError` if the kubelet does not name it, or if the volume is not an inline one.
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
            f"the kubelet does not name the pod; set podInfoOnMount: true in the CSIDriver {CSI_DRIVER}",
        )
    return PodIdentity(namespace=namespace, name=name, uid=uid)


def choose_tenant(rows: Iterable[Tenant], who: PodIdentity, node: str) -> Tenant:
    """Return the ledger row that entitles this pod. Raise `VolumeRefusedError` if there is none."""
    named = [row for row in rows if (row.namespace, row.pod_name) == (who.namespace, who.name)]
    if not named:
        raise VolumeRefusedError(
            VolumeRefusalReason.NO_RESERVATION,
            f"no share of a GPU is reserved on node {node} for pod {who}; "
            "only the operator's pods for SharePods have one: create a SharePod, not a Pod with this volume",
        )
    entitled = next((row for row in named if row.pod_uid == who.uid), None)
    if entitled is None:
        meant = named[0].pod_uid
        raise VolumeRefusedError(
            VolumeRefusalReason.NO_RESERVATION,
            f"the share reserved on node {node} under the name {who} "
            + (f"is for the pod with UID {meant}" if meant is not None else "names no pod yet")
            + f", and this one has UID {who.uid}; the kubelet tries again. If this pod is no SharePod's, delete it",
        )
    if entitled.state is not TenantState.RESERVED:
        raise VolumeRefusedError(
            VolumeRefusalReason.NOT_ENTITLED,
            f"the reservation of pod {who} on node {node} is being released; create the SharePod again to run it again",
        )
    return entitled
