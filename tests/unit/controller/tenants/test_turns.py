"""Namespaces take turns at the operator's writers: one whose writes hang leaves some to the others."""

from __future__ import annotations

import asyncio
from contextlib import suppress

import pytest
from doubles.apiserver.server import Call, Fault
from sharepod.kube import Json
from unit.controller.acting_world import NAMESPACE, World, acting_world

WRITERS = 4


def pods(world: World, namespace: str) -> list[Json]:
    """The Pods of a namespace on the server."""
    return world.server.storage.select(world.kind("pods"), namespace)


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
