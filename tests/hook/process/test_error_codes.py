"""Under the hook, a call that the driver refuses fails in the same way as without it: same error code, same values of
the program's variables.
"""

from __future__ import annotations

from typing import Any

import pytest
from hook.conftest import DEVICE_MEMORY, Tenant, terms
from hook.world.allocating import PHYSICAL
from hook.world.caller import Caller, In
from hook.world.invalid_calls import ENDED, FILL, answers, invalid_calls
from hook.world.probe import Probe
from sharepod.protocol import Drained

INVALID_DEVICE, ILLEGAL_ADDRESS = 101, 700


@pytest.mark.promise("program-error-codes")
def test_invalid_calls_fail_alike_with_and_without_the_hook(tenant: Tenant) -> None:
    tenant.gpus = (terms(memory=DEVICE_MEMORY),)
    tenant.write_limits()
    agent = tenant.agent()
    agent.on_want = lambda client: agent.next_grant()
    calls = invalid_calls()
    environment = tenant.environment()
    with_hook = answers(environment, calls)
    del environment["LD_PRELOAD"]
    without = answers(environment, calls)
    refused = [call for call, answer in without.items() if answer != "0"]
    assert len(refused) >= 300
    assert ENDED not in without.values(), "the double checks its arguments"
    assert {call: (without[call], with_hook[call]) for call in without if with_hook[call] != without[call]} == {}


def test_physical_memory_of_a_device_that_does_not_exist_is_refused_by_the_driver(tenant: Tenant) -> None:
    tenant.agent()
    caller = Caller(tenant.environment())
    try:
        caller.start()
        for device in (-1, 2, 63, 64, 99):
            properties = bytearray(PHYSICAL)
            properties[12:16] = device.to_bytes(4, "little", signed=True)
            code, (handle, _) = caller.raw("cuMemCreate", In(FILL), 2 << 20, In(bytes(properties)), 0)
            assert (code, handle) == (INVALID_DEVICE, FILL)
    finally:
        caller.close()


def codes_after_a_fault(probe: Probe) -> dict[str, int]:
    """Return the result codes of calls in a context in which a kernel has read an invalid address."""
    probe.start_cuda()
    probe.ok("stream", "s")
    probe.ok("stream", "other")
    probe.ok("event", "e")
    address = probe.ok("alloc", 1 << 20)
    probe.ok("launch", "noop", "other", 3)
    probe.ok("launch", "fault", "s")
    calls: list[tuple[Any, ...]] = [
        ("stream_sync", "s"),
        ("launch", "noop", "s"),
        ("launch", "noop", "other"),
        ("event_record", "e", "other"),
        ("event_query", "e"),
        ("alloc", 1 << 20),
        ("alloc_async", 1 << 20),
        ("free", address),
        ("memory_info",),
        ("ungated", "value", "s"),
        ("stream_destroy", "other"),
        ("context_sync",),
    ]
    return {" ".join(str(word) for word in call if word != address): probe.call(*call).code for call in calls}


@pytest.mark.parametrize("metered", [False, True])
def test_after_a_fault_calls_fail_alike_and_the_token_goes_back(tenant: Tenant, metered: bool) -> None:
    agent = tenant.agent()
    agent.on_want = lambda client: agent.next_grant(metered=metered)
    without = codes_after_a_fault(tenant.probe(more={"LD_PRELOAD": ""}))
    assert set(without.values()) == {ILLEGAL_ADDRESS}
    assert codes_after_a_fault(tenant.probe()) == without
    client = agent.client()
    agent.wait(lambda: sum(frame.launches for frame in agent.frames(client, Drained)) == 6, "refused launches, too", 20)
