"""Plain Pods with a resource line, and the manifests that give them shares, on a test cluster."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pytest
from cluster.operator_world import TIMES, World
from cluster.shared_cluster import SharedCluster
from harness.api import Api, ApiError, Object
from harness.cluster import Cluster, wait_until
from harness.installation import MANIFESTS

MILLI, MEMORY = "sharepod.dev/gpu-milli", "sharepod.dev/gpu-memory-mib"


def serves_mutating_policies(api: Api) -> bool:
    """Return whether the API server serves MutatingAdmissionPolicy in the manifests' version."""
    resources = api.get("/apis/admissionregistration.k8s.io/v1")["resources"]
    return any(one["name"] == "mutatingadmissionpolicies" for one in resources)


def need_mutating_policies(api: Api) -> None:
    """Skip the test where the API server serves no MutatingAdmissionPolicy in the version that the manifests use."""
    if not serves_mutating_policies(api):
        pytest.skip("the API server does not serve MutatingAdmissionPolicy in admissionregistration.k8s.io/v1")


@contextmanager
def a_world_of_lines(lent: SharedCluster, *, times: Mapping[str, str] = TIMES) -> Iterator[World]:
    """Return a world in which plain Pods get shares by a resource line. `times`: settings of the operator."""
    with lent.world(times=times) as running:
        need_mutating_policies(running.api)
        install_plain(running.cluster)
        yield running


def install_plain(cluster: Cluster) -> None:
    """Apply `manifests/claims` and `manifests/plain`, and wait until both policies on Pods are enforced."""
    for folder in ("claims", "plain"):
        cluster.kubectl("apply", "--server-side", "-k", str(MANIFESTS / folder), timeout=60)
    wait_until(
        lambda: (
            "is not known" in answer(cluster.api, line_pod(annotations={"sharepod.dev/gpu-share": "1"}))
            and answer(cluster.api, line_pod()) == ""
        ),
        what="the policies are enforced",
        timeout=30,
    )


def container(name: str = "main", milli: str | None = "400", mib: str | None = "1024", **fields: Any) -> Object:
    """Return a container with a resource line."""
    limits = {key: value for key, value in ((MILLI, milli), (MEMORY, mib)) if value is not None}
    return {"name": name, "image": "test", "resources": {"limits": limits}, **fields}


def line_pod(
    *containers: Object, name: str = "probe", annotations: dict[str, str] | None = None, **spec: Any
) -> Object:
    """Return a Pod with these containers. Without any, it has one container with 0.4 of a GPU and 1 GiB."""
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "annotations": annotations or {}},
        "spec": {"restartPolicy": "Never", "containers": list(containers) or [container()], **spec},
    }


def answer(api: Api, body: Object, namespace: str = "default") -> str:
    """Return the API server's refusal of a Pod, or an empty string if the API server accepts the Pod."""
    try:
        api.create(f"/api/v1/namespaces/{namespace}/pods", body, dryRun="All")
    except ApiError as error:
        return error.message
    return ""
