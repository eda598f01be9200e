"""Pod of a holder: it takes one GPU from NVIDIA's device plugin, so that SharePods can share it. Pure.

Guarantees:
- The Pod is bound to its node by node affinity, so kube-scheduler and kubelet still decide as for any Pod with a GPU of
  the device plugin.
- The Pod requests one whole GPU, runs nothing on it, and has no token of the API server.
- The Pod contains all that the operator needs after a restart: its node, and the tenant that waits for it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sharepod.api.objects import GROUP, HOLDER_FOR_ANNOTATION, HOLDER_LABEL

_RESOURCES = {"cpu": "10m", "memory": "16Mi"}
"""Requests, and equal limits, so that the kubelet evicts the Pod last. They are many times what a sleeping program
needs."""


def idle_container(name: str, image: str, amounts: Mapping[str, str]) -> dict[str, Any]:
    """Return a container that only occupies its resources. It is valid under Pod Security `restricted`."""
    return {
        "name": name,
        "image": image,
        "resources": {"requests": amounts, "limits": amounts},
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "runAsNonRoot": True,
            "runAsUser": 65532,
            "capabilities": {"drop": ["ALL"]},
            "seccompProfile": {"type": "RuntimeDefault"},
        },
    }


def holder_pod(
    name: str,
    namespace: str,
    *,
    node: str,
    tenant: str,
    image: str,
    priority_class: str,
    tolerations: Sequence[Mapping[str, str]],
) -> dict[str, Any]:
    """Return the manifest of a holder. `tenant`: id of the tenant that waits for it."""
    this_node = {"matchFields": [{"key": "metadata.name", "operator": "In", "values": [node]}]}
    amounts = {**_RESOURCES, "nvidia.com/gpu": "1"}
    container = idle_container("holder", image, amounts)
    spec: dict[str, Any] = {
        "affinity": {
            "nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [this_node]}}
        },
        "automountServiceAccountToken": False,
        "containers": [container],
        "enableServiceLinks": False,
        "priorityClassName": priority_class,
        "restartPolicy": "Always",
        "terminationGracePeriodSeconds": 1,
        "tolerations": [dict(each) for each in tolerations],
    }
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": name,
            "namespace": namespace,
            "labels": {HOLDER_LABEL: "true", "app.kubernetes.io/part-of": GROUP.partition(".")[0]},
            "annotations": {
                HOLDER_FOR_ANNOTATION: tenant,
                "cluster-autoscaler.kubernetes.io/safe-to-evict": "false",
            },
        },
        "spec": spec,
    }
