"""The operator survives the deletion of a namespace: of a preemptor, of its victims, or of a namespace with a budget
and a statement."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from cluster.audit import Audit
from cluster.operator_world import GIB, GPUNODES, World, wait
from cluster.shared_cluster import SharedCluster
from harness.api import Object
from harness.cluster import suppress_reason

pytestmark = pytest.mark.timeout(300)

_STATEMENTS = "/apis/sharepod.dev/v1alpha1/gpustatements"
_HALF = {"request": 0.5, "memory": "12Gi"}
_SLOW = {"test.sharepod.dev/termination-seconds": "3"}


@pytest.fixture(scope="module")
def world(shared_cluster: SharedCluster) -> Iterator[World]:
    with shared_cluster.world() as running:
        running.api.create("/apis/scheduling.k8s.io/v1/priorityclasses", {"metadata": {"name": "high"}, "value": 1000})
        yield running


def deleted(world: World, namespace: str) -> None:
    """Delete a namespace. Wait until the namespace and all its objects no longer exist."""
    path = f"/api/v1/namespaces/{namespace}"
    with suppress_reason("Conflict"):  # a namespace in deletion answers with a conflict
        world.api.delete(path)
    world.cluster.wait_for(path, lambda seen: seen is None, what=f"the end of {namespace}", timeout=90)


def filled(world: World, prefix: str, namespace: str) -> str:
    """Fill one node with two SharePods that take some seconds to end and return afterwards. Return the node."""
    (node,) = world.nodes(prefix)
    for name in ("low0", "low1"):
        world.apply(namespace, name, _HALF, on=prefix, restartPolicy="Always", annotations=_SLOW)
    for name in ("low0", "low1"):
        world.phase(namespace, name, "Running")
    return node


def until_one_ends(world: World, namespace: str) -> None:
    def ending() -> bool:
        found = (world.pod(namespace, name) for name in ("low0", "low1"))
        return any(pod is None or "deletionTimestamp" in pod["metadata"] for pod in found)

    wait(ending, what="a victim that ends")


def names(world: World, node: str) -> list[str]:
    return sorted(row["podName"] for row in world.rows(node))


def account(world: World, namespace: str) -> int:
    """Return the reserved time in the statement of a namespace, in milliseconds."""
    found = [item for item in world.api.get(_STATEMENTS)["items"] if item["metadata"]["name"] == namespace]
    totals = (found[0].get("status") or {}).get("totals") or [{}] if found else [{}]
    return int(totals[0].get("reservedMilliseconds", 0))


def budget(world: World, namespace: str) -> Object:
    path = f"/apis/sharepod.dev/v1alpha1/namespaces/{namespace}/gpubudgets"
    spec = {"gpuSeconds": 1000, "chargeBy": "Reserved"}
    body = {"apiVersion": "sharepod.dev/v1alpha1", "kind": "GPUBudget", "metadata": {"name": "team"}, "spec": spec}
    made: Object = world.api.create(path, body)
    return made


def consumed(world: World, node: str, namespace: str, milliseconds: int) -> None:
    """Make the agent of a node report this reserved time of a namespace."""
    series = {
        "series": f"{node}-{namespace}",
        "namespace": namespace,
        "model": "T",
        "since": "2026-01-01T00:00:00.000Z",
        "reservedMilliseconds": milliseconds,
    }
    at = f"2026-02-01T02:{milliseconds // 60_000:02}:00.000Z"
    world.api.patch(f"{GPUNODES}/{node}/status", {"status": {"consumption": [series], "consumptionAt": at}})


@pytest.mark.promise("placement-preempt-crash")
def test_the_namespace_that_preempts_goes_and_its_victims_come_back(world: World) -> None:
    stays, goes = world.cluster.namespace("stays"), world.cluster.namespace("goes")
    node = filled(world, "preemptor", stays)
    with Audit(world.api, memory=16 * GIB) as audit:
        world.apply(goes, "high", _HALF, on="preemptor", priorityClassName="high")
        until_one_ends(world, stays)
        deleted(world, goes)
        wait(lambda: names(world, node) == ["low0", "low1"], what="both victims to have their rows again")
        for name in ("low0", "low1"):
            world.phase(stays, name, "Running")
        assert not audit.over_committed, audit.over_committed


@pytest.mark.promise("placement-preempt-crash")
def test_the_namespace_of_the_victims_goes_and_its_room_is_taken(world: World) -> None:
    goes, stays = world.cluster.namespace("victims"), world.cluster.namespace("victors")
    node = filled(world, "victims", goes)
    with Audit(world.api, memory=16 * GIB) as audit:
        world.apply(stays, "high", _HALF, on="victims", priorityClassName="high")
        until_one_ends(world, goes)
        deleted(world, goes)
        world.phase(stays, "high", "Running")
        wait(lambda: names(world, node) == ["high"], what="its row alone")
        assert not audit.over_committed, audit.over_committed


@pytest.mark.promise("operator-statement")
def test_a_namespace_that_goes_with_its_budget_keeps_its_account_and_comes_back_with_it(world: World) -> None:
    namespace, other = world.cluster.namespace("billed"), world.cluster.namespace("billed-other")
    node = filled(world, "billed", namespace)
    budget(world, namespace)
    consumed(world, node, namespace, 600_000)
    world.api.delete(f"/api/v1/namespaces/{namespace}")
    consumed(world, node, namespace, 700_000)
    deleted(world, namespace)
    wait(lambda: not world.rows(node), what="an empty ledger")
    world.apply(other, "next", _HALF, on="billed")
    world.phase(other, "next", "Running")
    wait(lambda: account(world, namespace) == 700_000, what="the last report")

    world.cluster.namespace(namespace)
    budget(world, namespace)
    world.apply(namespace, "again", _HALF, on="billed")
    world.phase(namespace, "again", "Running")
    consumed(world, node, namespace, 800_000)
    wait(lambda: account(world, namespace) == 800_000, what="the account to go on")
    path = f"/apis/sharepod.dev/v1alpha1/namespaces/{namespace}/gpubudgets/team"
    wait(lambda: (world.api.get(path).get("status") or {}).get("conditions"), what="the new budget's status")
    assert world.operator is not None
    assert world.operator.running()
