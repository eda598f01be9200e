"""Pools that other processes can import keep to the limit, although the driver returns none of their memory before they
are destroyed (guarantee C11 of shim/src/memory).
"""

from __future__ import annotations

import pytest
from hook.conftest import MIB, TENANT_MEMORY
from hook.world.ledger_check import PAGE, LedgerCheck, MakeCheck
from hook.world.probe import OUT_OF_MEMORY

DESCRIPTOR, FABRIC = 1, 8
"""Kinds of handle by which a pool can be exported."""


def shareable(check: LedgerCheck, handles: int = DESCRIPTOR) -> int:
    pool: int = check.probe.ok("pool_create", 0, 0, 1, handles)
    return pool


@pytest.mark.promise("memory-shareable-pools")
@pytest.mark.parametrize("handles", [DESCRIPTOR, FABRIC])
def test_its_memory_counts_until_it_is_destroyed(make_check: MakeCheck, handles: int) -> None:
    check = make_check(FAKE_CUDA_POOL_CHUNK=str(PAGE))
    probe, pool = check.probe, shareable(check, handles)
    address = probe.ok("alloc_async", 100 * MIB, "", pool)
    probe.ok("free_async", address)
    probe.ok("context_sync")
    probe.ok("pool_trim", pool)
    assert check.same() == 100 * MIB, "nothing trims it"
    check.refused("alloc", TENANT_MEMORY - 99 * MIB)
    probe.ok("free_async", probe.ok("alloc_async", 90 * MIB, "", pool))
    assert check.same() == 100 * MIB, "it serves from what it has"
    probe.ok("context_sync")
    probe.ok("pool_destroy", pool)
    assert check.same() == 0
    probe.ok("alloc", TENANT_MEMORY)


@pytest.mark.promise("memory-shareable-pools")
def test_destroyed_with_allocations_left_it_counts_until_the_last_is_freed(make_check: MakeCheck) -> None:
    check = make_check(FAKE_CUDA_POOL_CHUNK=str(PAGE))
    probe, pool = check.probe, shareable(check)
    first, last = (probe.ok("alloc_async", 50 * MIB, "", pool) for _ in range(2))
    probe.ok("pool_destroy", pool)
    probe.ok("free_async", first)
    probe.ok("context_sync")
    assert check.same() == 100 * MIB
    probe.ok("free_async", last)
    probe.ok("context_sync")
    check.tenant.until(lambda: check.taken() == 0, "the pool to be destroyed", timeout=30)
    assert check.same() == 0


def test_it_takes_no_step_that_the_limit_has_no_room_for(make_check: MakeCheck) -> None:
    """The hook does not know yet that the pool grows in steps of 32 MiB. A pool that grew over the limit could not be
    trimmed.
    """
    check = make_check()
    pool = shareable(check)
    check.fill(20 * MIB)
    before = check.same()
    check.refused("alloc_async", MIB, "", pool)
    assert check.same() == before
    check.probe.ok("alloc", 20 * MIB)


def test_it_grows_beyond_the_limit_in_one_call_at_most(make_check: MakeCheck) -> None:
    """Memory freed on a stream cannot serve other streams while the work before the free is unfinished. Only the driver
    knows that, so the hook cannot prevent this growth.
    """
    check = make_check(FAKE_CUDA_POOL_CHUNK=str(PAGE))
    probe, pool = check.probe, shareable(check)
    for name in ("s", *(f"other {n}" for n in range(5))):
        probe.ok("stream", name)
    address = probe.ok("alloc_async", 16 * MIB, "s", pool)
    check.fill(0)
    probe.ok("ungated", "value", "s")
    probe.ok("free_async", address, "s")
    for n in range(5):
        assert probe.call("alloc_async", 8 * MIB, f"other {n}", pool).code == OUT_OF_MEMORY
    assert check.taken() == TENANT_MEMORY + 8 * MIB
    probe.ok("ungated_ends")
    probe.ok("stream_sync", "s")
    assert probe.call("alloc_async", 8 * MIB, "s", pool).code == OUT_OF_MEMORY, "the tenant is over its limit"
    probe.ok("pool_destroy", pool)
    check.agent.wait(lambda: check.agent.used(0) <= TENANT_MEMORY, "its bytes")
    assert check.same() == TENANT_MEMORY - 16 * MIB
    probe.ok("free_async", probe.ok("alloc_async", 8 * MIB, "s", shareable(check)))


def test_it_grows_again_once_there_is_room(make_check: MakeCheck) -> None:
    check = make_check(FAKE_CUDA_POOL_CHUNK=str(PAGE))
    probe, pool = check.probe, shareable(check)
    for name in ("s", "other"):
        probe.ok("stream", name)
    address = probe.ok("alloc_async", 16 * MIB, "s", pool)
    filling = probe.ok("physical", TENANT_MEMORY - check.same())
    probe.ok("ungated", "value", "s")
    probe.ok("free_async", address, "s")
    assert probe.call("alloc_async", 8 * MIB, "other", pool).code == OUT_OF_MEMORY
    probe.ok("physical_release", filling)  # unlike a free, this call waits for no stream
    held = probe.ok("alloc_async", 8 * MIB, "other", pool)
    assert check.same() == 24 * MIB
    probe.ok("ungated_ends")
    probe.ok("stream_sync", "s")
    check.fill(0)
    probe.ok("alloc_async", 16 * MIB, "s", pool)
    probe.ok("free_async", held, "other")
    assert check.same() == TENANT_MEMORY
