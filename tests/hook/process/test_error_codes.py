"""A call that the driver refuses is refused in the same way under the hook: code and variables."""

from __future__ import annotations

import pytest
from hook.conftest import DEVICE_MEMORY, Tenant, terms
from hook.world.allocating import PHYSICAL
from hook.world.caller import Caller, In
from hook.world.invalid_calls import ENDED, FILL, answers, invalid_calls

INVALID_DEVICE = 101


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
