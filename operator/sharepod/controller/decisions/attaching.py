"""Way in which GPUs are attached to SharePods' Pods: by ResourceClaims, or by the runtime class and a CSI volume. Pure.

The way is fixed when a Pod is created, before the Pod has a node. CSI works on every node of the pool. Claims work only
where the container runtime supports CDI. So the setting `auto` chooses claims if every node can attach them, else CSI.

Guarantees:
- `auto` uses claims only if no node of the pool is known to be unable to attach them.
- A node whose agent starts or is away does not change the choice. A node counts as unable until its self-test has
  attached the devices of a claim.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from sharepod.api.claims.share_claims import Attach
from sharepod.api.gpunode import CLAIMS_ATTACH_STARTING, CONDITION_CDI_DEVICES, CONDITION_CLAIMS_ATTACH, Pool
from sharepod.controller.state.facts.node_facts import GpuNodeFacts

CONDITION_BY_CLAIMS = "SharePodsByClaims"
"""Condition of a GPUNode: True while new Pods of SharePods have their GPUs attached by claims."""

_OLDER_AGENT = "its agent does not attach GPUs by claims, or does not test it; upgrade it"


class AttachReason(StrEnum):
    """Reason of the condition `SharePodsByClaims`."""

    CLAIMS = "Claims"
    SETTING = "SetToCsi"
    NOT_SERVED = "NotServed"
    POLICY_ABSENT = "PolicyAbsent"
    NODE_CANNOT = "NodeCannot"
    NOT_HONOURED = "AllocationNotHonoured"


@dataclass(frozen=True, slots=True)
class Attaching:
    """Way in which the GPUs of new Pods are attached, with the reason. `message`: the reason as text."""

    by_claims: bool
    reason: AttachReason
    message: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttachSituation:
    """Inputs of the choice between claims and CSI."""

    setting: Attach
    served: bool
    """True if the API server serves ResourceClaims of `resource.k8s.io/v1`."""
    guarded: bool | None
    """True if the admission policy on claims of SharePods' Pods is enforced. None while unknown."""
    not_honoured: str = ""
    """Latest evidence that allocations by the operator are not honoured, as text. Empty if there is none."""


def attaching(situation: AttachSituation, nodes: Iterable[GpuNodeFacts]) -> Attaching:
    """Return the way of attachment for Pods that are created now."""
    if situation.setting is Attach.CSI:
        return Attaching(False, AttachReason.SETTING, "the operator's setting attach is csi")
    if situation.setting is Attach.CLAIMS:
        return Attaching(True, AttachReason.CLAIMS, "the operator's setting attach is claims")
    if not situation.served:
        text = "the API server has no ResourceClaims of resource.k8s.io/v1; they need Kubernetes 1.34 or newer"
        return Attaching(False, AttachReason.NOT_SERVED, text)
    if not situation.guarded:
        text = "the policy on claims of SharePods is not in force; kubectl apply --server-side -k manifests/claims"
        return Attaching(False, AttachReason.POLICY_ABSENT, text)
    if situation.not_honoured:
        return Attaching(False, AttachReason.NOT_HONOURED, situation.not_honoured)
    can = False
    for node in sorted(nodes, key=lambda item: item.name):
        able, why = _attachable(node)
        if able is False:
            return Attaching(False, AttachReason.NODE_CANNOT, f"node {node.name} cannot attach GPUs by claims: {why}")
        can = can or able is True
    if not can:
        return Attaching(False, AttachReason.NODE_CANNOT, "no node can attach GPUs by claims yet")
    return Attaching(True, AttachReason.CLAIMS, "every node can attach GPUs by claims")


def _attachable(node: GpuNodeFacts) -> tuple[bool | None, str]:
    """Return (whether a node attaches GPUs by claims, the reason if it does not).

    The first value is None while the node's agent or its self-test starts, and for a node that takes no SharePods: an
    unreadable node, a node of pool `scheduler`, or a node without shareable GPUs.
    """
    if node.error is not None or node.spec.pool is Pool.SCHEDULER or not any(gpu.shareable for gpu in node.status.gpus):
        return None, ""
    conditions = {item.type: item for item in node.status.conditions}
    devices, shown = conditions.get(CONDITION_CDI_DEVICES), conditions.get(CONDITION_CLAIMS_ATTACH)
    if devices is None or shown is None:
        return False, _OLDER_AGENT
    if devices.status == "False":
        return False, devices.message or devices.reason
    if devices.status == "Unknown" or shown.reason == CLAIMS_ATTACH_STARTING:
        return None, ""
    return shown.status == "True", shown.message or shown.reason
