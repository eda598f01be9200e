"""A call that the driver refuses is refused in the same way under the hook: code and variables."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import pytest
from hook.conftest import DEVICE_MEMORY, Tenant, terms
from hook.world.allocating import PHYSICAL
from hook.world.caller import Caller, In
from hook.world.invalid_calls import FILL, Handles, InvalidCall, invalid_calls

ENDED = "the process ended"
INVALID_DEVICE = 101


def answers(environment: Mapping[str, str], calls: Iterable[InvalidCall]) -> dict[tuple[str, str], str]:
    """Return the result of each call, in processes that begin again after a call that ended one."""
    found = {}
    handles: Handles | None = None
    try:
        for call in calls:
            handles = handles or Handles(Caller(environment))
            try:
                found[call.symbol, call.what] = handles.answer(call)
            except EOFError:
                found[call.symbol, call.what] = ENDED
                handles.usable = False
            if not handles.usable:
                handles.caller.close()
                handles = None
    finally:
        if handles is not None:
            handles.caller.close()
    return found


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
