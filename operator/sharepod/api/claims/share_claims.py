"""Claim of a SharePod's Pod: the ResourceClaim by which the Pod's GPUs are attached instead of by CSI. Pure.

The operator creates it with the Pod and allocates it. Size and limits are in the ledger, so the claim has only the
number of GPUs. As it requests no capacity, it needs no feature gate.

Guarantees:
- Such a claim is recognized by its spec, which is immutable: one request named `sharepod` without capacity.
- The Pod owns its claim, so that the claim is deleted with the Pod.
- The finalizer is set at creation: an allocated claim that a user deletes stays until its Pod is deleted.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Any

from sharepod.api.objects import CLAIM_FINALIZER, DEVICE_CLASS, SHARE_REQUEST, only_request

from .claims import API_VERSION, KIND

_NAME_MAX = 240
"""Most characters of the Pod's name that the claim's name begins with; the claim's name may have 253 in total."""


class Attach(StrEnum):
    """Setting of the operator: how the GPUs of SharePods' Pods are attached."""

    AUTO = "auto"
    CLAIMS = "claims"
    CSI = "csi"


def claim_name(pod: str, token: str) -> str:
    """Return the name of the claim for a Pod. `token`: 8 lowercase letters and digits, different for each Pod."""
    return f"{pod[:_NAME_MAX].rstrip('-.')}-{token}"


def build_claim(name: str, namespace: str, pod: str, pod_uid: str, count: int) -> dict[str, Any]:
    """Return the manifest of the claim of `count` GPUs for a Pod, given by name and UID."""
    exactly = {"deviceClassName": DEVICE_CLASS, "allocationMode": "ExactCount", "count": count}
    return {
        "apiVersion": API_VERSION,
        "kind": KIND,
        "metadata": {
            "name": name,
            "namespace": namespace,
            "finalizers": [CLAIM_FINALIZER],
            "ownerReferences": [
                {"apiVersion": "v1", "kind": "Pod", "name": pod, "uid": pod_uid, "controller": True},
            ],
        },
        "spec": {"devices": {"requests": [{"name": SHARE_REQUEST, "exactly": exactly}]}},
    }


def is_share_claim(claim: Mapping[str, Any]) -> bool:
    """Return whether a claim has the form in which the operator creates claims for SharePods."""
    request = only_request(claim)
    if request is None:
        return False
    exactly = request.get("exactly")
    return (
        request.get("name") == SHARE_REQUEST
        and isinstance(exactly, Mapping)
        and exactly.get("deviceClassName") == DEVICE_CLASS
        and not exactly.get("capacity")
    )
