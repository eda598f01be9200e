"""Floods of one namespace: many SharePods, longest names and labels, Events. A SharePod of another namespace is not
delayed."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from cluster.operator_world import World, condition_of
from harness.api import Api, Object

FLOOD = 300
"""Number of SharePods in the flood: ten times the operator's writes per second in this test."""
MESSAGE_MAX = 1024
"""Most characters of a condition's message, which bounds the size of a list of SharePods."""
EVENTS_OF_ONE_REASON = 10
"""Events about one object with one reason that the operator writes without a pause. After these it writes one a
minute."""
EVENTS = "/apis/events.k8s.io/v1/namespaces/{}/events"

pytestmark = pytest.mark.timeout(400)


def longest(number: int) -> dict[str, Any]:
    """Return a name and labels of the greatest length that the API server accepts. `number`: makes the name unique."""
    labels = {f"{'p' * 249}.{each:03}/{'n' * 63}": "v" * 63 for each in range(20)}
    return {"name": f"f{number:03}".ljust(63, "x"), "labels": labels}


@pytest.mark.promise("security-flood")
def test_a_flooding_namespace_waits_and_a_small_request_of_another_passes(world: World) -> None:
    """Each SharePod of the flood requests more than half of both GPUs, so that one runs; the rest of the GPUs is
    free."""
    (node,) = world.nodes("flood")
    attacker, victim = world.cluster.namespace("flood"), world.cluster.namespace("flooded")
    for number in range(FLOOD):
        world.apply(attacker, on="flood", gpu={"request": 0.6, "count": 2, "memory": "8Gi"}, **longest(number))
    world.apply(victim, "small", {"request": 0.1, "memory": "1Gi"}, on="flood")
    world.phase(victim, "small", "Running", timeout=120)
    assert [row["podName"] for row in world.rows(node) if row["namespace"] == victim] == ["small"]
    assert sum(row["namespace"] == attacker for row in world.rows(node)) <= 1

    def all_reported() -> bool:
        items = world.api.get(world.path(attacker))["items"]
        return len(items) == FLOOD and all(condition_of(item, "Placed").get("message") for item in items[1:])

    world.cluster.wait_for(world.path(attacker), lambda _: all_reported(), what="a message to each owner", timeout=120)
    messages = [
        condition.get("message", "")
        for item in world.api.get(world.path(attacker))["items"]
        for condition in item["status"]["conditions"]
    ]
    assert max(len(message) for message in messages) <= MESSAGE_MAX
    assert world.operator is not None
    assert world.operator.running()


@contextmanager
def events_as_fast_as_they_go(api: Api, namespace: str, about: str) -> Iterator[None]:
    """Create Events of the greatest length about a SharePod, from four threads and without pauses, until the block
    ends."""
    numbers, over = itertools.count(), threading.Event()

    def write() -> None:
        while not over.is_set():
            event = {
                "metadata": {"name": f"flood-{next(numbers)}", "namespace": namespace},
                "regarding": {"kind": "SharePod", "name": about, "namespace": namespace},
                "eventTime": "2026-01-01T00:00:00.000000Z",
                "reportingController": "example.com/flood",
                "reportingInstance": "flood",
                "action": "Flood",
                "type": "Warning",
                "reason": "Evicting",
                "note": "x" * MESSAGE_MAX,
            }
            api.create(EVENTS.format(namespace), event)

    threads = [threading.Thread(target=write, daemon=True) for _ in range(4)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        over.set()
        for thread in threads:
            thread.join()
    assert next(numbers) > EVENTS_OF_ONE_REASON, "it was a flood"


@pytest.mark.promise("security-events")
def test_a_flood_of_events_and_of_their_causes_delays_no_other_placement_or_event(world: World) -> None:
    """The namespace writes Events, and its program starts and ends processes without the hook. The operator writes an
    Event for each such process."""
    world.nodes("noisy")
    attacker, victim = world.cluster.namespace("noise"), world.cluster.namespace("next-to-noise")
    tenant = world.apply(attacker, "noisy", {"request": 0.1, "memory": "1Gi"}, on="noisy")["metadata"]["uid"]
    world.phase(attacker, "noisy", "Running")
    with events_as_fast_as_they_go(world.api, attacker, "noisy"):
        for number in range(EVENTS_OF_ONE_REASON + 6):
            word = f"process {number} "
            finding = {"reason": "ProcessWithoutHook", "message": word.ljust(MESSAGE_MAX, "x")}
            world.agents.report(tenant, connected=True, enforced=False, findings=[finding])

            def reported(seen: Object, word: str = word) -> bool:
                return word in condition_of(seen, "Enforced").get("message", "")

            world.until(attacker, "noisy", reported, what=f"the Event {word}")
        world.apply(victim, "victim", {"request": 0.1, "memory": "1Gi"}, on="noisy")
        world.phase(victim, "victim", "Running")
        world.event(victim, "victim", "Started")
    world.event(attacker, "noisy", "ProcessWithoutHook")
    reasons = [reason for reason, _ in world.events(attacker, "noisy")]
    assert 1 <= reasons.count("ProcessWithoutHook") <= EVENTS_OF_ONE_REASON + 2, "two more where this takes minutes"
