"""Values that a call leaves in the program's variable after the limit refused it: 0, as after the driver's refusal."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hook.conftest import TENANT_MEMORY, Tenant, terms
from hook.world.allocating import PHYSICAL, box, pool_properties
from hook.world.caller import Argument, Caller, In
from hook.world.probe import OUT_OF_MEMORY

TOO_MUCH = TENANT_MEMORY + 1
FILLED = In(b"\xff" * 8)


@pytest.fixture
def caller(tenant: Tenant) -> Iterator[Caller]:
    tenant.agent()
    caller = Caller(tenant.environment())
    caller.start()
    yield caller
    caller.close()


@pytest.mark.parametrize(
    ("symbol", "arguments"),
    [
        ("cuMemAlloc_v2", (TOO_MUCH,)),
        ("cuMemAllocManaged", (TOO_MUCH, 1)),
        ("cuMemAllocPitch_v2", (FILLED, TOO_MUCH, 1, 4)),
        ("cuMemAllocAsync", (TOO_MUCH, None)),
        ("cuMemCreate", (TENANT_MEMORY * 2, In(PHYSICAL), 0)),
        ("cuArray3DCreate_v2", (In(box(TENANT_MEMORY * 2)),)),
    ],
)
def test_a_refused_call_leaves_0(caller: Caller, symbol: str, arguments: tuple[Argument, ...]) -> None:
    code, (written, *_) = caller.raw(symbol, FILLED, *arguments)
    assert (code, written) == (OUT_OF_MEMORY, bytes(8))


def test_a_refused_allocation_of_a_named_pool_leaves_0(caller: Caller) -> None:
    pool = caller.new("cuMemPoolCreate", In(pool_properties()))
    code, (written,) = caller.raw("cuMemAllocFromPoolAsync", FILLED, TOO_MUCH, pool, None)
    assert (code, written) == (OUT_OF_MEMORY, bytes(8))
    caller.ok("cuMemPoolDestroy", pool)


def test_a_refused_context_leaves_no_handle(tenant: Tenant) -> None:
    tenant.gpus = (terms(memory=1 << 20, context_kib=2048),)
    tenant.write_limits()
    tenant.agent()
    caller = Caller(tenant.environment())
    try:
        caller.ok("cuInit", 0)
        code, (written,) = caller.raw("cuCtxCreate_v2", FILLED, 0, 0)
        assert (code, written) == (OUT_OF_MEMORY, bytes(8))
    finally:
        caller.close()
