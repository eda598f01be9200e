"""Claims of class `sharepod.dev` and Pods that use them, in the world of the operator's tests."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cluster.operator_world import World, wait
from harness.api import Api, ApiError, Object

CLAIMS = "/apis/resource.k8s.io/v1"
FINALIZER = "resource.kubernetes.io/delete-protection"


def serves_claims(api: Api) -> bool:
    """Return whether the API server serves claims in the version that SharePod uses."""
    groups = api.get("/apis")["groups"]
    return "resource.k8s.io/v1" in {version["groupVersion"] for group in groups for version in group["versions"]}


def claim_spec(time_milli: int = 400, memory: str | None = "1Gi", **exactly: Any) -> Object:
    """Return the spec of a claim for one share."""
    amounts = {"timeMilli": str(time_milli), **({"memory": memory} if memory is not None else {})}
    asked = {"deviceClassName": "sharepod.dev", "capacity": {"requests": amounts}, **exactly}
    return {"devices": {"requests": [{"name": "gpu", "exactly": asked}]}}


def claim_path(namespace: str, name: str | None = None) -> str:
    collection = f"{CLAIMS}/namespaces/{namespace}/resourceclaims"
    return collection if name is None else f"{collection}/{name}"


def make_claim(
    world: World, namespace: str, name: str, *, annotations: Mapping[str, str] | None = None, **spec: Any
) -> Object:
    """Create a claim."""
    metadata = {"name": name, "annotations": dict(annotations or {})}
    body = {
        "apiVersion": "resource.k8s.io/v1",
        "kind": "ResourceClaim",
        "metadata": metadata,
        "spec": claim_spec(**spec),
    }
    return world.api.create(claim_path(namespace), body)


def make_template(world: World, namespace: str, name: str, **spec: Any) -> Object:
    """Create a template of claims."""
    body = {
        "apiVersion": "resource.k8s.io/v1",
        "kind": "ResourceClaimTemplate",
        "metadata": {"name": name},
        "spec": {"spec": claim_spec(**spec)},
    }
    return world.api.create(f"{CLAIMS}/namespaces/{namespace}/resourceclaimtemplates", body)


def pod_body(
    name: str, *, claims: tuple[str, ...] = (), template: str | None = None, cpu: str = "100m", **spec: Any
) -> Object:
    """Return a plain Pod that uses claims by name, or a claim from a template. Each claim belongs to a container of its
    own."""
    listed: list[Object] = [{"name": f"c{number}", "resourceClaimName": claim} for number, claim in enumerate(claims)]
    if template is not None:
        listed.append({"name": "gpu", "resourceClaimTemplateName": template})
    containers = [
        {
            "name": f"main-{item['name']}" if number else "main",
            "image": "test",
            "resources": {"requests": {"cpu": cpu}, "claims": [{"name": item["name"]}]},
        }
        for number, item in enumerate(listed)
    ] or [{"name": "main", "image": "test", "resources": {"requests": {"cpu": cpu}}}]
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name},
        "spec": {"restartPolicy": "Never", "resourceClaims": listed, "containers": containers, **spec},
    }


def make_pod(world: World, namespace: str, name: str, *, on: str, **options: Any) -> Object:
    """Create a Pod that uses claims, on nodes labelled `test=ON`."""
    return world.api.create(
        f"/api/v1/namespaces/{namespace}/pods", pod_body(name, nodeSelector={"test": on}, **options)
    )


def claim_of(world: World, namespace: str, name: str) -> Object | None:
    try:
        found: Object = world.api.get(claim_path(namespace, name))
    except ApiError as error:
        if error.code == 404:
            return None
        raise
    return found


def claim_made_for(world: World, namespace: str, pod: str) -> Object | None:
    """Return the claim that was created for a Pod from a template. None if there is none."""
    items = world.api.get(claim_path(namespace))["items"]
    return next(
        (item for item in items for owner in item["metadata"].get("ownerReferences", ()) if owner["name"] == pod), None
    )


def allocation(claim: Object | None) -> Object | None:
    return ((claim or {}).get("status") or {}).get("allocation")


def row_of(world: World, node: str, claim: str) -> Object | None:
    """Return the ledger's row of the claim with this name. None if there is none."""
    return next((row for row in world.rows(node) if (row.get("claim") or {}).get("name") == claim), None)


def runs(world: World, namespace: str, name: str) -> Object:
    """Wait until a Pod runs; return it."""

    def running() -> Object | None:
        pod = world.pod(namespace, name)
        return pod if pod is not None and (pod.get("status") or {}).get("phase") == "Running" else None

    try:
        found: Object = wait(running, what=f"{namespace}/{name} runs")
    except AssertionError as error:
        log = world.operator.log_tail(60) if world.operator is not None else ""
        raise AssertionError(f"{error}; pod: {world.pod(namespace, name)}\n{log}") from None
    return found
