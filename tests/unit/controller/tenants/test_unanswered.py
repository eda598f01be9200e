"""Creations of Pods that get no answer: they are reported and get longer timeouts, but only a few are made at the same
time.
"""

from __future__ import annotations

import asyncio
from contextlib import ExitStack, suppress

import pytest
from doubles.apiserver.server import Call, Fault
from sharepod.controller.apiserver.client import NODES
from sharepod.controller.tenants.unanswered import MOST, MOST_OF_A_NAMESPACE, PATIENCE_S, Patience
from sharepod.kube import UnavailableError
from unit.controller.acting_world import PATIENCE_S as TEST_S
from unit.controller.acting_world import World


def hangs(call: Call) -> bool:
    return (call.verb, call.kind.plural) == ("create", "pods")


async def asks(world: World) -> None:
    """Send other requests continuously, like the renewal of a Lease."""
    while True:
        await world.client.get(NODES, "node-a")
        await asyncio.sleep(0.05)


@pytest.mark.promise("operator-slow-webhook")
async def test_a_pod_whose_webhook_is_slower_than_a_write_is_told_and_created_nevertheless(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.node()
    monkeypatch.setattr(world.client, "_write_timeout", 0.3)
    never, late = asyncio.Event(), asyncio.Event()
    world.server.faults += [Fault(hangs, hold=never), Fault(hangs, hold=late)]
    asking = asyncio.create_task(asks(world))
    await world.gated()
    asking.cancel()
    assert world.condition("PodReady")["reason"] == "PodForbidden"
    assert "waits for an admission webhook" in world.condition("PodReady")["message"]
    assert world.read("pods") is None
    assert world.memo.blocked is not None
    world.now = world.memo.blocked.until
    world.renew()
    looking = asyncio.create_task(world.tenants.reconcile(world.tenant))
    with suppress(TimeoutError):  # the wait is longer than the timeout of the last write
        await asyncio.wait_for(asyncio.shield(looking), 0.8)
    assert not looking.done()
    late.set()
    async with asyncio.timeout(TEST_S):
        await looking
    assert world.read("pods") is not None
    assert not world.memo.unanswered
    never.set()


@pytest.mark.promise("operator-slow-gate")
async def test_a_gate_whose_webhook_is_slower_than_a_write_opens_at_the_second_try(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.node()
    await world.placed()
    await world.relist()
    monkeypatch.setattr(world.client, "_write_timeout", 0.3)
    never, late = asyncio.Event(), asyncio.Event()
    opens = [
        Fault(lambda call: (call.verb, call.kind.plural) == ("patch", "pods"), hold=held) for held in (never, late)
    ]
    world.server.faults += opens
    asking = asyncio.create_task(asks(world))
    with pytest.raises(UnavailableError):
        await world.tenants.reconcile(world.tenant)
    asking.cancel()
    await world.until(lambda: bool(world.notes("PodForbidden")))
    assert world.rows(), "its share stays: the gate may have opened"
    world.renew()
    looking = asyncio.create_task(world.tenants.reconcile(world.tenant))
    with suppress(TimeoutError):  # the wait is longer than the timeout of the first try
        await asyncio.wait_for(asyncio.shield(looking), 0.8)
    assert not looking.done()
    late.set()
    async with asyncio.timeout(TEST_S):
        await looking
    found = world.read("pods")
    assert found is not None
    assert not found["spec"].get("schedulingGates")
    assert not world.memo.gate_unanswered
    never.set()


async def test_an_api_server_that_answers_nobody_is_no_webhook(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    world.node()
    world.sharepod()
    await world.relist()
    monkeypatch.setattr(world.client, "_write_timeout", 0.3)
    never = asyncio.Event()
    world.server.faults.append(Fault(lambda _: True, times=1000, hold=never))
    await asyncio.sleep(0.3)
    with pytest.raises(UnavailableError):
        await world.tenants.reconcile(world.tenant)
    assert world.memo.blocked is None
    never.set()


def test_few_wait_longer_at_a_time_and_fewer_of_one_namespace() -> None:
    patience = Patience()
    with ExitStack() as waiting:

        def asked(namespace: str, *, wanted: bool = True) -> float | None:
            return waiting.enter_context(patience.timeout_s(namespace, wanted=wanted))

        assert asked("a", wanted=False) is None
        for number in range(MOST):
            assert asked(f"n{number // MOST_OF_A_NAMESPACE}") == PATIENCE_S
            if number < MOST_OF_A_NAMESPACE - 1:
                continue
            assert asked("n0") is None, "of one namespace"
        assert asked("b") is None, "in all"
    with patience.timeout_s("b", wanted=True) as seconds:
        assert seconds == PATIENCE_S
