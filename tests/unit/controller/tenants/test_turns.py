"""Namespaces take turns at the operator's writers. A namespace whose writes hang leaves some writers to other
namespaces."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress

import pytest
from doubles.apiserver.server import Call, Fault
from sharepod.api.sharepod import KIND
from sharepod.kube import Json
from unit.controller.acting_world import NAMESPACE, PATIENCE_S, World, acting_world

WRITERS = 4


def pods(world: World, namespace: str) -> list[Json]:
    """Return the Pods of a namespace on the server."""
    return world.server.storage.select(world.kind("pods"), namespace)


async def begun(world: World, hangs: Callable[[Call], bool], count: int) -> None:
    """Wait until `count` calls that hang have arrived."""
    async with asyncio.timeout(PATIENCE_S):
        while sum(map(hangs, world.server.calls)) < count:  # noqa: ASYNC110 - no write to wait for
            await asyncio.sleep(0.01)


@pytest.mark.promise("operator-turns")
async def test_a_slow_webhook_on_one_namespace_does_not_hold_the_writers_of_others() -> None:
    async with acting_world(writers=WRITERS) as world:
        answers = asyncio.Event()

        def hangs(call: Call) -> bool:
            return (call.verb, call.kind.plural, call.namespace) == ("create", "pods", "slow")

        world.server.faults.append(Fault(hangs, times=1000, hold=answers))
        slow = [world.sharepod(f"slow-{number}", namespace="slow") for number in range(20)]
        world.node()
        quick = [world.sharepod(f"quick-{number}") for number in range(5)]
        await world.relist()
        for tenant in (*slow, *quick):
            world.tenants.queue.add(tenant)
        running = asyncio.create_task(world.tenants.queue.run())
        try:
            await world.until(lambda: len(pods(world, NAMESPACE)) == len(quick))
            assert not pods(world, "slow")
            assert len([call for call in world.server.calls if hangs(call)]) <= WRITERS - WRITERS // 4
        finally:
            answers.set()
            running.cancel()
            with suppress(asyncio.CancelledError):
                await running


@pytest.mark.promise("operator-turns")
async def test_slow_webhooks_on_many_namespaces_do_not_hold_the_writers_of_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each of the slow namespaces has more Pods to create than there are writers."""
    async with acting_world(writers=WRITERS) as world:
        monkeypatch.setattr(world.client, "_write_timeout", 10 * PATIENCE_S)
        answers = asyncio.Event()

        def hangs(call: Call) -> bool:
            return (call.verb, call.kind.plural) == ("create", "pods") and call.namespace.startswith("slow")

        world.server.faults.append(Fault(hangs, times=1000, hold=answers))
        names = [(f"slow-{number}", f"slow-{number % 4}") for number in range(40)]
        slow = [world.sharepod(name, namespace=namespace) for name, namespace in names]
        world.node()
        await world.relist()
        for tenant in slow:
            world.tenants.queue.add(tenant)
        running = asyncio.create_task(world.tenants.queue.run())
        try:
            await begun(world, hangs, WRITERS)
            quick = [world.sharepod(f"quick-{number}") for number in range(5)]
            await world.relist()
            for tenant in quick:
                world.tenants.queue.add(tenant)
            await world.until(lambda: len(pods(world, NAMESPACE)) == len(quick))
            assert not [item for item in pods(world, "") if item["metadata"]["namespace"].startswith("slow")]
        finally:
            answers.set()
            running.cancel()
            with suppress(asyncio.CancelledError):
                await running


@pytest.mark.promise("operator-turns")
async def test_a_slow_webhook_on_the_events_of_some_namespaces_delays_no_others() -> None:
    async with acting_world() as world:
        answers = asyncio.Event()

        def hangs(call: Call) -> bool:
            return call.kind.plural == "events" and call.namespace.startswith("slow")

        world.server.faults.append(Fault(hangs, times=1000, hold=answers))
        for number in range(600):
            world.sharepod(f"slow-{number}", namespace=f"slow-{number % 2}")
        world.sharepod()
        await world.relist()
        facts = {item.uid: item for item in world.state.sharepods}
        for item in facts.values():
            if item.uid != world.tenant:
                world.events.warning(KIND, item, "Slow", "Bind", "a note")
        await begun(world, hangs, 4)  # as many writes as there are writers
        world.events.warning(KIND, facts[world.tenant], "Quick", "Bind", "a note")
        await world.until(lambda: world.notes("Quick") == ["a note"])
        assert not world.notes("Slow")
        assert len(world.events._waiting) <= 500, "a namespace has a quarter of the room at most"
        answers.set()


async def test_a_tenants_namespace_is_known_from_whatever_is_left_of_it() -> None:
    async with acting_world() as world:
        world.node()
        await world.placed()
        claim = world.claim()
        await world.see_claims()
        assert {world.state.namespace_of(tenant) for tenant in (world.tenant, claim)} == {NAMESPACE}
        world.delete("sharepods")
        world.delete("pods")
        await world.relist()
        assert world.state.namespace_of(world.tenant) == NAMESPACE, "by its row"
        assert world.state.namespace_of("unknown") == ""
