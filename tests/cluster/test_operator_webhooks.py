"""Slow or failing admission webhooks of third parties: they delay only the namespace that they belong to."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from cluster.operator_world import World, a_world, condition_of, wait
from harness.api import Object
from harness.webhook import Webhook

pytestmark = pytest.mark.timeout(300)

_MANY = 60
"""Number of SharePods in a namespace with a webhook: more than the operator's writers (32)."""
_EVICTIONS_AT_ONCE = 8
"""Number of preemptions whose evictions the operator sends at the same time."""
_SHARE = {"request": 0.05, "memory": "64Mi"}


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    with a_world() as running:
        running.api.create("/apis/scheduling.k8s.io/v1/priorityclasses", {"metadata": {"name": "high"}, "value": 1000})
        yield running


def others_run(world: World, on: str) -> None:
    """Check that SharePods of another namespace run and end."""
    namespace = world.cluster.namespace(f"{on}-others")
    for number in range(4):
        world.apply(namespace, f"p{number}", _SHARE, on=on)
    for number in range(4):
        world.phase(namespace, f"p{number}", "Running")
    for number in range(4):
        world.delete(namespace, f"p{number}")


def all_run(world: World, namespace: str, count: int) -> None:
    def running() -> int:
        items = world.api.get(world.path(namespace))["items"]
        return sum((item.get("status") or {}).get("phase") == "Running" for item in items)

    wait(lambda: running() == count, what=f"{count} SharePods of {namespace} to run", timeout=120)


@pytest.mark.promise("operator-turns")
@pytest.mark.promise("operator-forbidden")
def test_a_webhook_that_does_not_answer_costs_nobody_but_its_namespace_which_is_told(world: World) -> None:
    world.nodes("silent", 3)
    namespace = world.cluster.namespace("silent")
    with Webhook(world.cluster, namespace) as webhook:
        webhook.hold()

        def names_it(seen: Object) -> bool:
            return "silent.example.com" in str(condition_of(seen, "PodReady").get("message"))

        for number in range(_MANY):
            world.apply(namespace, f"p{number}", _SHARE, on="silent")
        wait(lambda: webhook.count() > _MANY // 4, what="the webhook to be asked for many")
        others_run(world, "silent")
        assert not world.cluster.pods(namespace)
        world.condition(namespace, "p0", "PodReady", status="False", reason="PodForbidden")
        wait(lambda: any(map(names_it, world.api.get(world.path(namespace))["items"])), what="its name")
        webhook.allow()
        all_run(world, namespace, _MANY)


def test_a_webhook_that_is_slower_than_the_operators_writes_lets_its_pods_run_nevertheless(world: World) -> None:
    """The webhook takes twice the operator's timeout for a write. The API server then continues without its answer."""
    world.nodes("slower")
    namespace = world.cluster.namespace("slower")
    with Webhook(world.cluster, namespace, timeout=5, policy="Ignore") as webhook:
        webhook.hold()
        for number in range(4):
            world.apply(namespace, f"p{number}", _SHARE, on="slower")
        all_run(world, namespace, 4)


@pytest.mark.promise("operator-slow-gate")
def test_a_webhook_for_updates_that_is_slower_than_the_operators_writes_lets_gates_open(world: World) -> None:
    world.nodes("slow-gate")
    namespace = world.cluster.namespace("slow-gate")
    with Webhook(world.cluster, namespace, operations=["UPDATE"], timeout=5, policy="Ignore") as webhook:
        webhook.hold()
        for number in range(4):
            world.apply(namespace, f"p{number}", _SHARE, on="slow-gate")
        all_run(world, namespace, 4)


@pytest.mark.promise("operator-turns")
def test_a_webhook_that_does_not_answer_for_gates_costs_nobody_else(world: World) -> None:
    (node,) = world.nodes("gates")
    namespace = world.cluster.namespace("gates")
    with Webhook(world.cluster, namespace, operations=["UPDATE"]) as webhook:
        webhook.hold()
        for number in range(20):
            world.apply(namespace, f"p{number}", _SHARE, on="gates")
        wait(lambda: webhook.count() > 5, what="the webhook to be asked for gates")
        others_run(world, "gates")
        assert all(pod["spec"].get("schedulingGates") for pod in world.cluster.pods(namespace))
        webhook.allow()
        all_run(world, namespace, 20)
    wait(lambda: len(world.rows(node)) == 20, what="a row each")


@pytest.mark.promise("operator-forbidden")
def test_a_webhook_that_fails_is_told_and_its_pods_run_once_it_answers(world: World) -> None:
    world.nodes("failing")
    namespace = world.cluster.namespace("failing")
    with Webhook(world.cluster, namespace) as webhook:
        webhook.fail()
        for number in range(4):
            world.apply(namespace, f"p{number}", _SHARE, on="failing")
        message = world.condition(namespace, "p0", "PodReady", status="False", reason="PodForbidden")
        assert "failed calling webhook" in message
        others_run(world, "failing")
        webhook.allow()
        all_run(world, namespace, 4)


@pytest.mark.promise("operator-turns")
def test_a_webhook_that_does_not_answer_for_evictions_keeps_nobody_elses_preemption_waiting(world: World) -> None:
    count = 12  # more evictions than the operator carries out at the same time
    world.nodes("evict", count // 2)
    world.nodes("elsewhere")
    slow, other, high = (world.cluster.namespace(f"evict-{name}") for name in ("slow", "other", "high"))
    most = {"request": 0.5, "memory": "12Gi"}
    for number in range(count):
        world.apply(slow, f"p{number}", most, on="evict", restartPolicy="Always")
    for number in range(2):
        world.apply(other, f"p{number}", most, on="elsewhere", restartPolicy="Always")
    all_run(world, slow, count)
    all_run(world, other, 2)
    with Webhook(world.cluster, slow, resources=["pods/eviction"]) as webhook:
        webhook.hold()
        for number in range(count):
            world.apply(high, f"h{number}", most, on="evict", priorityClassName="high")
        wait(lambda: webhook.count() >= _EVICTIONS_AT_ONCE, what="evictions that are not answered")
        world.apply(high, "quick", most, on="elsewhere", priorityClassName="high")
        world.phase(high, "quick", "Running")
        webhook.allow()
        all_run(world, high, count + 1)
