"""Parts that the tests of admission share: paths of objects, a SharePod to apply, and texts of refusals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from cluster.malformed_case import CONTAINER
from harness.api import Api, ApiError, Object
from harness.cluster import Cluster
from harness.installation import NAMESPACE, SHAREPODS
from sharepod.api.pods.pod import PodSettings, build_pod

GPUNODES = "/apis/sharepod.dev/v1alpha1/gpunodes"
LEASES = f"/apis/coordination.k8s.io/v1/namespaces/{NAMESPACE}/leases"
PODS = "/api/v1/namespaces/default/pods"


def sharepod(
    name: str, gpu: dict[str, Any] | None = None, annotations: dict[str, str] | None = None, **spec: Any
) -> Object:
    metadata: Object = {"name": name, "namespace": "default"}
    if annotations:
        metadata["annotations"] = annotations
    body: Object = {"containers": [dict(CONTAINER)], **spec}
    if gpu is not None:
        body["gpu"] = gpu
    return {"apiVersion": "sharepod.dev/v1alpha1", "kind": "SharePod", "metadata": metadata, "spec": body}


def pod_of(server: Cluster, name: str, claim: str | None = None) -> Object:
    """Create a SharePod in namespace default; return the Pod that the operator would create for it. `claim`: name of
    the claim that attaches its GPUs."""
    made = server.api.create(SHAREPODS, sharepod(name, {"request": 0.25, "memory": "1Gi"}))
    return build_pod(made, PodSettings(runtime_class=""), claim)


def refusal(api: Api, *request: Any, **options: Any) -> str:
    """Send a patch, which must be refused; return the message of the refusal."""
    with pytest.raises(ApiError) as refused:
        api.patch(*request, **options)
    return refused.value.message


def as_user(server: Cluster, kubeconfig: Path, *arguments: str, body: Object | None = None) -> tuple[int, str]:
    answer = server.kubectl(
        *arguments, kubeconfig=kubeconfig, input=None if body is None else json.dumps(body), check=False
    )
    return answer.returncode, answer.stdout + answer.stderr
