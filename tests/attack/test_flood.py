"""Floods of one namespace, SharePods at the limits of names and labels, and Events, beside one SharePod of another."""

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
"""SharePods: ten times what the operator writes a second here."""
MESSAGE_MAX = 1024
"""Characters of a condition's message: what a list of SharePods costs whoever reads it."""
EVENTS_OF_ONE_REASON = 10
"""Events about one object with one reason that the operator writes at once; then one a minute."""
EVENTS = "/apis/events.k8s.io/v1/namespaces/{}/events"

pytestmark = pytest.mark.timeout(400)


def longest(number: int) -> dict[str, Any]:
    """Name and labels as long as the API server takes them."""
    labels = {f"{'p' * 249}.{each:03}/{'n' * 63}": "v" * 63 for each in range(20)}
    return {"name": f"f{number:03}".ljust(63, "x"), "labels": labels}


@pytest.mark.promise("security-flood")
def test_who_floods_the_queue_waits_in_it_and_a_small_request_of_another_passes(world: World) -> None:
    """The flood asks for more than half of both GPUs, so that one runs; the rest of the GPUs is anybody's."""
    (node,) = world.nodes("flood")
    attacker, victim = world.cluster.namespace("flood"), world.cluster.namespace("flooded")
    for number in range(FLOOD):
        world.apply(attacker, on="flood", gpu={"request": 0.6, "count": 2, "memory": "8Gi"}, **longest(number))
    world.apply(victim, "small", {"request": 0.1, "memory": "1Gi"}, on="flood")
    world.phase(victim, "small", "Running", timeout=120)
    assert [row["podName"] for row in world.rows(node) if row["namespace"] == victim] == ["small"]
    assert sum(row["namespace"] == attacker for row in world.rows(node)) <= 1

    def all_told() -> bool:
        items = world.api.get(world.path(attacker))["items"]
        return len(items) == FLOOD and all(condition_of(item, "Placed").get("message") for item in items[1:])

    world.cluster.wait_for(world.path(attacker), lambda _: all_told(), what="a word to each owner", timeout=120)
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
    """Create Events about a SharePod, each as long as it may be, from four threads, until the block ends."""
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
def test_a_flood_of_events_and_of_what_is_worth_one_delays_nobodys_placing_or_events(world: World) -> None:
    """The namespace writes Events itself, and has a program whose processes without the hook come and go: each is worth
    an Event of the operator's."""
    world.nodes("noisy")
    attacker, victim = world.cluster.namespace("noise"), world.cluster.namespace("beside-noise")
    tenant = world.apply(attacker, "noisy", {"request": 0.1, "memory": "1Gi"}, on="noisy")["metadata"]["uid"]
    world.phase(attacker, "noisy", "Running")
    with events_as_fast_as_they_go(world.api, attacker, "noisy"):
        for number in range(EVENTS_OF_ONE_REASON + 6):
            word = f"process {number} "
            finding = {"reason": "ProcessWithoutHook", "message": word.ljust(MESSAGE_MAX, "x")}
            world.agents.report(tenant, connected=True, enforced=False, findings=[finding])

            def told_of(seen: Object, word: str = word) -> bool:
                return word in condition_of(seen, "Enforced").get("message", "")

            world.until(attacker, "noisy", told_of, what=f"to be told of {word}")
        world.apply(victim, "beside", {"request": 0.1, "memory": "1Gi"}, on="noisy")
        world.phase(victim, "beside", "Running", timeout=60)
        world.until(
            victim,
            "beside",
            lambda _: dict(world.events(victim, "beside")).get("Started"),
            what="its Event",
            timeout=60,
        )
    told = [reason for reason, _ in world.events(attacker, "noisy")]
    assert 1 <= told.count("ProcessWithoutHook") <= EVENTS_OF_ONE_REASON + 2, "two more where this takes minutes"
