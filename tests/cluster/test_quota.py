"""A quota counts SharePods and plain Pods alike, because the Pods of both carry the resource line."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from cluster.operator_world import World, a_world, wait
from cluster.plain_world import MEMORY, MILLI, container, install_plain, line_pod, serves_mutating_policies
from harness.api import Object

SHARE = {"request": 0.4, "memory": "1Gi"}


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    with a_world() as running:
        if not serves_mutating_policies(running.api):
            pytest.skip("the API server does not serve MutatingAdmissionPolicy in admissionregistration.k8s.io/v1")
        install_plain(running.cluster)
        (node,) = running.nodes("first")
        wait(lambda: advertised(running, node) == "2k", what="lines are in use")
        yield running


def advertised(world: World, node: str) -> str | None:
    found: str | None = world.api.get(f"/api/v1/nodes/{node}")["status"]["allocatable"].get(MILLI)
    return found


def quota(world: World, namespace: str, **hard: str) -> str:
    """Create the ResourceQuota `gpu` on these amounts of the line and wait until it is in force; return its path."""
    names = {"milli": f"requests.{MILLI}", "mib": f"requests.{MEMORY}"}
    body = {
        "apiVersion": "v1",
        "kind": "ResourceQuota",
        "metadata": {"name": "gpu"},
        "spec": {"hard": {names[key]: amount for key, amount in hard.items()}},
    }
    path = f"/api/v1/namespaces/{namespace}/resourcequotas"
    world.api.create(path, body)
    wait(lambda: (world.api.get(f"{path}/gpu").get("status") or {}).get("used"), what="the quota is in force")
    return f"{path}/gpu"


def used(world: World, path: str) -> Object:
    found: Object = world.api.get(path)["status"]["used"]
    return found


def row(world: World, node: str, name: str) -> int | None:
    """Thousandths of a SharePod's row."""
    found = world.row(node, name)
    return found["requestMilli"] if found is not None else None


def resize(world: World, namespace: str, name: str, request: float) -> None:
    world.api.patch(world.path(namespace, name), {"spec": {"gpu": {"request": request}}})


@pytest.mark.promise("operator-sharepod-quota")
def test_a_quota_counts_sharepods_and_plain_pods_together_and_says_so_in_the_condition(world: World) -> None:
    world.nodes("both")
    namespace = world.cluster.namespace("both")
    path = quota(world, namespace, milli="1000", mib="4096")
    world.apply(namespace, "share", SHARE, on="both")
    world.phase(namespace, "share", "Running")
    world.api.create(
        f"/api/v1/namespaces/{namespace}/pods", line_pod(container(), name="plain", nodeSelector={"test": "both"})
    )
    wait(lambda: used(world, path)[f"requests.{MILLI}"] == "800", what="both are counted")
    assert used(world, path)[f"requests.{MEMORY}"] == "2048"
    world.apply(namespace, "third", SHARE, on="both")
    said = world.condition(namespace, "third", "PodReady", status="False", reason="PodForbidden")
    assert f"exceeded quota: gpu, requested: requests.{MILLI}=400, used: requests.{MILLI}=800" in said
    world.api.delete(f"/api/v1/namespaces/{namespace}/pods/plain", grace=0)
    world.phase(namespace, "third", "Running")


@pytest.mark.promise("operator-sharepod-line-resize")
def test_a_live_resize_changes_the_share_and_not_the_line_and_kube_scheduler_believes_it(world: World) -> None:
    (node,) = world.nodes("resize")
    namespace = world.cluster.namespace("resize")
    for name in ("wide", "other"):
        world.apply(namespace, name, {"request": 0.8, "memory": "1Gi"}, on="resize")
        world.phase(namespace, name, "Running")
    pod = world.pod(namespace, "wide") or {}
    assert pod["spec"]["containers"][0]["resources"]["limits"][MILLI] == "800"
    resize(world, namespace, "wide", 0.2)
    wait(lambda: advertised(world, node) == "2600", what="the room that the lowered share has left is advertised")
    world.apply(namespace, "beside", {"request": 0.8, "memory": "1Gi"}, on="resize")
    world.phase(namespace, "beside", "Running")
    world.delete(namespace, "beside")
    wait(lambda: world.row(node, "beside") is None, what="its share is free")
    resize(world, namespace, "wide", 1.0)
    wait(lambda: row(world, node, "wide") == 1000, what="the share is raised above the line")


@pytest.mark.promise("operator-sharepod-line-counted")
def test_a_sharepod_that_is_raised_while_it_waits_is_counted_as_raised(world: World) -> None:
    (node,) = world.nodes("raised")
    namespace = world.cluster.namespace("raised")
    path = quota(world, namespace, milli="2500")
    for name in ("one", "two"):
        world.apply(namespace, name, {"request": 1.0}, on="raised")
        world.phase(namespace, name, "Running")
    world.apply(namespace, "small", {"request": 0.1}, on="raised")
    world.condition(namespace, "small", "Placed", status="False", reason="NoRoom")
    resize(world, namespace, "small", 0.4)
    wait(lambda: used(world, path)[f"requests.{MILLI}"] == "2400", what="its Pod carries what it asks for now")
    resize(world, namespace, "small", 0.6)
    said = world.condition(namespace, "small", "PodReady", status="False", reason="PodForbidden")
    assert f"exceeded quota: gpu, requested: requests.{MILLI}=600" in said
    world.delete(namespace, "one")
    wait(lambda: row(world, node, "small") == 600, what="it is placed once it is counted")
