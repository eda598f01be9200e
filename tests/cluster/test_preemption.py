"""Preemption on a real API server: first shares are lowered, then Pods are evicted by the Eviction API. Victims return
later.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from typing import Any

import pytest
from cluster.audit import Audit
from cluster.operator_world import GIB, TIMES, World, wait
from cluster.shared_cluster import SharedCluster
from harness.api import Object

_BUDGETS = "/apis/policy/v1/namespaces/{}/poddisruptionbudgets"


@pytest.fixture(scope="module")
def world(shared_cluster: SharedCluster) -> Iterator[World]:
    with shared_cluster.world(times={**TIMES, "SHAREPOD_MOVE_AFTER": "1"}) as running:
        running.api.create(
            "/apis/scheduling.k8s.io/v1/priorityclasses",
            {"metadata": {"name": "high"}, "value": 1000},
        )
        running.api.create(
            "/apis/scheduling.k8s.io/v1/priorityclasses",
            {"metadata": {"name": "patient"}, "value": 1000, "preemptionPolicy": "Never"},
        )
        yield running


def filled(world: World, prefix: str, count: int, **gpu: Any) -> tuple[str, str]:
    """Fill one node with SharePods of priority 0 that return after an eviction. Return the node and their namespace."""
    (node,) = world.nodes(prefix)
    namespace = world.cluster.namespace(prefix)
    for number in range(count):
        labels = {"one": f"low{number}"}
        world.apply(namespace, f"low{number}", gpu, on=prefix, restartPolicy="Always", labels=labels)
    for number in range(count):
        world.phase(namespace, f"low{number}", "Running")
    return node, namespace


def requests(world: World, node: str) -> dict[str, int]:
    """Return the requests of a ledger's rows in thousandths, by name."""
    return {row["podName"]: row["requestMilli"] for row in world.rows(node)}


def protect(world: World, namespace: str, name: str) -> None:
    """Protect one SharePod's Pod by a PodDisruptionBudget, and wait until the budget's status counts the Pod."""
    body = {"metadata": {"name": name}, "spec": {"minAvailable": 1, "selector": {"matchLabels": {"one": name}}}}
    world.api.create(_BUDGETS.format(namespace), body)


def kill_and_start(world: World) -> None:
    """Kill the operator, and start it again."""
    assert world.operator is not None
    world.operator.signal(signal.SIGKILL)
    world.operator.wait(10)
    world.start_operator()


def restarts(seen: Object) -> int:
    return int((seen.get("status") or {}).get("restarts") or 0)


@pytest.mark.promise("placement-preempt-time")
@pytest.mark.promise("placement-preempt-never")
def test_time_changes_hands_with_nobody_ended_and_comes_back(world: World) -> None:
    node, namespace = filled(world, "lowers", 4, request=0.5, memory="2Gi")
    other = world.cluster.namespace("lowers-other")
    world.apply(other, "patient", {"request": 1.0, "memory": "4Gi"}, on="lowers", priorityClassName="patient")
    world.condition(other, "patient", "Placed", status="False", reason="NoRoom")
    assert set(requests(world, node).values()) == {500}, "a Pod of preemptionPolicy Never waits"
    world.delete(other, "patient")

    world.apply(other, "high", {"request": 1.0, "memory": "4Gi"}, on="lowers", priorityClassName="high")
    world.phase(other, "high", "Running")
    rows = requests(world, node)
    lowered = sorted(name for name, milli in rows.items() if milli == 0)
    assert len(lowered) == 2
    assert rows["high"] == 1000
    for name in lowered:
        world.condition(namespace, name, "Resized", status="False")
        seen = world.sharepod(namespace, name)
        assert seen["status"]["phase"] == "Running"
        assert restarts(seen) == 0
        note = world.event(namespace, name, "Lowered")
        assert "high of" not in note, "the other namespace's SharePod is not named"
        assert other not in note
    world.event(other, "high", "Preempting", note="2 tenants of other namespaces")

    world.delete(other, "high")
    wait(lambda: set(requests(world, node).values()) == {500}, what="the shares as they were")
    for name in lowered:
        world.condition(namespace, name, "Resized", status="True")


@pytest.mark.promise("placement-preempt-budgets")
@pytest.mark.promise("placement-preempt-comes-back")
def test_where_memory_is_short_one_is_evicted_that_no_budget_protects_and_comes_back(world: World) -> None:
    node, namespace = filled(world, "evicts", 2, request=0.3, memory="12Gi")
    protect(world, namespace, "low0")
    wait(
        lambda: world.api.get(_BUDGETS.format(namespace) + "/low0").get("status", {}).get("expectedPods") == 1,
        what="the budget's status",
    )
    world.apply(namespace, "high", {"request": 0.3, "memory": "12Gi"}, on="evicts", priorityClassName="high")
    world.phase(namespace, "high", "Running")
    assert restarts(world.sharepod(namespace, "low0")) == 0, "the protected Pod continues to run"
    seen = world.until(namespace, "low1", lambda seen: seen["status"]["phase"] == "Pending", what="waits")
    assert seen["status"]["lastEnd"]["cause"] == "Preempted"
    world.event(namespace, "low1", "Preempted", note="by high of higher priority")
    world.event(namespace, "high", "Preempting", note="evicts low1")
    assert set(requests(world, node)) == {"low0", "high"}

    world.delete(namespace, "high")
    world.phase(namespace, "low1", "Running")


@pytest.mark.promise("placement-preempt-crash")
def test_operators_killed_amid_preemptions_end_nobody_for_nothing_and_over_commit_nothing(world: World) -> None:
    nodes = world.nodes("killed", 2)
    namespace = world.cluster.namespace("killed")
    slow = {"test.sharepod.dev/termination-seconds": "3"}
    gpu = {"request": 0.5, "memory": "12Gi"}
    low, high = [f"low{number}" for number in range(4)], [f"high{number}" for number in range(3)]
    with Audit(world.api, memory=16 * GIB) as audit:
        for name in low:
            world.apply(
                namespace,
                name,
                {"request": 0.5, "memory": "12Gi"},
                on="killed",
                restartPolicy="Always",
                annotations=slow,
            )
        pods = {name: world.phase(namespace, name, "Running")["status"]["podUID"] for name in low}
        for name in high:
            world.apply(namespace, name, gpu, on="killed", priorityClassName="high")

        def ended(name: str) -> bool:
            """Return whether the SharePod is ending, has ended, or waits to run again."""
            pod = world.pod(namespace, name)
            return pod is None or "deletionTimestamp" in pod["metadata"] or pod["metadata"]["uid"] != pods[name]

        def ending() -> int:
            return sum(map(ended, low))

        wait(lambda: ending() >= 1, what="the first that ends")
        kill_and_start(world)
        wait(lambda: ending() >= 3, what="the others that end")
        kill_and_start(world)
        for name in high:
            world.phase(namespace, name, "Running")
        world.await_untouched(namespace, pods, 1)
        assert not audit.over_committed, audit.over_committed
        assert sum(len(world.rows(node)) for node in nodes) == 4


def scattered(world: World, prefix: str) -> str:
    """Fill two GPUs of one node: `mover` has 0.4 of one, `fixed` 0.5 of the other. A request of 0.8 fits only if
    `mover` moves to the GPU of `fixed`."""
    world.nodes(prefix)
    namespace = world.cluster.namespace(prefix)
    slow = {"test.sharepod.dev/termination-seconds": "3"}
    small = {"memory": "1Gi"}
    world.apply(
        namespace,
        "mover",
        {"request": 0.4, "movable": True, **small},
        on=prefix,
        restartPolicy="Always",
        annotations=slow,
    )
    world.phase(namespace, "mover", "Running")
    world.apply(namespace, "blocker", {"request": 0.6, **small}, on=prefix)
    world.phase(namespace, "blocker", "Running")
    world.apply(namespace, "fixed", {"request": 0.5, **small}, on=prefix, restartPolicy="Always")
    world.phase(namespace, "fixed", "Running")
    world.delete(namespace, "blocker")
    wait(lambda: world.sharepod(namespace, "mover")["status"].get("startTime"), what="the mover's start")
    return namespace


@pytest.mark.promise("placement-move-comes-back")
def test_a_movable_sharepod_is_restarted_on_another_gpu_for_an_equal_that_waits(world: World) -> None:
    namespace = scattered(world, "moves")
    before = world.sharepod(namespace, "mover")["status"]
    world.apply(namespace, "waits", {"request": 0.8, "memory": "1Gi"}, on="moves")
    world.phase(namespace, "waits", "Running")
    moved = world.until(
        namespace,
        "mover",
        lambda seen: seen["status"]["phase"] == "Running" and restarts(seen) == 1,
        what="the mover's next run",
    )["status"]
    assert moved["lastEnd"]["cause"] == "Moved"
    assert "it makes room on" in moved["lastEnd"]["message"]
    assert moved["gpuIndexes"] != before["gpuIndexes"]
    assert moved["gpuIndexes"] == world.sharepod(namespace, "fixed")["status"]["gpuIndexes"]
    assert restarts(world.sharepod(namespace, "fixed")) == 0
    for name in ("mover", "waits"):
        for reason in ("Moving", "Moved"):
            world.event(namespace, name, reason)


@pytest.mark.promise("placement-move-crash")
def test_operators_killed_amid_a_move_move_one_and_over_commit_nothing(world: World) -> None:
    namespace = scattered(world, "moved")

    def ended() -> bool:
        pod = world.pod(namespace, "mover")
        return pod is None or "deletionTimestamp" in pod["metadata"]

    with Audit(world.api, memory=16 * GIB) as audit:
        world.apply(namespace, "waits", {"request": 0.8, "memory": "1Gi"}, on="moved")
        wait(ended, what="the mover's end")
        wait(lambda: world.sharepod(namespace, "mover")["status"].get("movesTo"), what="where it goes")
        kill_and_start(world)
        same_gpus = [gpu["uuid"] for gpu in world.sharepod(namespace, "fixed")["status"]["gpus"]]
        world.apply(namespace, "slips", {"request": 0.4, "memory": "1Gi", "uuids": same_gpus}, on="moved")
        wait(lambda: world.sharepod(namespace, "mover")["status"].get("podUID") is None, what="the end of its run")
        kill_and_start(world)
        for name in ("waits", "mover", "fixed"):
            world.phase(namespace, name, "Running")
        assert [restarts(world.sharepod(namespace, name)) for name in ("mover", "fixed", "waits")] == [1, 0, 0]
        assert "movesTo" not in world.sharepod(namespace, "mover")["status"]
        assert not audit.over_committed, audit.over_committed
