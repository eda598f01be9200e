"""Memory pools and stream-ordered allocation keep to the limit."""

from __future__ import annotations

import subprocess

import pytest
from hook.conftest import BUILD, GPU_0, MIB, TENANT_MEMORY, Tenant
from hook.world.ledger_check import PAGE, MakeCheck
from hook.world.probe import OUT_OF_MEMORY


def test_what_is_freed_on_a_stream_counts_until_the_work_before_it_is_over(make_check: MakeCheck) -> None:
    """An allocation that does not fit while the freed memory counts waits until the work before the free is over."""
    check = make_check()
    probe = check.probe
    check.agent.on_want = lambda client: check.agent.next_grant()
    addresses = [probe.ok("alloc", 100 * MIB) for _ in range(2)]
    for index, address in enumerate(addresses):
        probe.ok("stream", f"s{index}")
        probe.ok("launch", f"spin_us_{100_000 * (index + 1)}", f"s{index}")
        probe.ok("free_async", address, f"s{index}")
    assert check.counted() == 200 * MIB
    probe.ok("alloc", TENANT_MEMORY)
    assert check.same() == TENANT_MEMORY


@pytest.mark.promise("program-free-on-a-stream")
def test_a_thread_that_frees_on_a_stream_may_end_what_the_stream_waits_for(make_check: MakeCheck) -> None:
    check = make_check()
    probe = check.probe
    probe.ok("stream", "s")
    addresses = [probe.ok("alloc", 10 * MIB) for _ in range(3)]
    probe.ok("ungated", "value", "s")
    for address in addresses:
        probe.ok("free_async", address, "s")
    assert check.counted() == 30 * MIB
    probe.ok("ungated_ends")
    probe.ok("stream_sync", "s")
    assert check.same() == 0


def test_what_was_freed_on_a_stream_goes_with_the_streams_context(make_check: MakeCheck) -> None:
    check = make_check()
    probe = check.probe
    empty = check.same()
    probe.ok("own_context", "other")
    probe.ok("stream", "s")
    address = probe.ok("alloc", 10 * MIB)
    probe.ok("ungated", "value", "s")
    probe.ok("free_async", address, "s")
    probe.ok("ungated_ends")
    probe.ok("context_destroy", "other")
    assert check.same() == empty
    assert check.tenant.read().client("tenant").usage[GPU_0].misused == 0


def test_a_sibling_gets_what_was_freed_on_a_stream(make_check: MakeCheck) -> None:
    """The program makes no call after the free, so the hook thread must notice that the stream has reached it."""
    check = make_check()
    probe = check.probe
    probe.ok("stream", "s")
    address = probe.ok("alloc", 200 * MIB)
    probe.ok("ungated", "value", "s")
    probe.ok("free_async", address, "s")
    probe.ok("ungated_ends")
    check.tenant.until(lambda: check.agent.used(0) <= 64 * MIB, "the bytes at the agent")


def test_a_pool_counts_by_what_it_reserves(make_check: MakeCheck) -> None:
    check = make_check()
    probe = check.probe
    probe.ok("stream", "s")
    pool = probe.ok("pool_default")
    probe.ok("pool_keep", pool, 1 << 40)
    first = probe.ok("alloc_async", MIB, "s")
    assert check.same() == 32 * MIB
    second = probe.ok("alloc_async", 40 * MIB, "s")
    assert check.same() == 64 * MIB
    probe.ok("free_async", second, "s")
    probe.ok("stream_sync", "s")
    assert check.same() == 64 * MIB, "reserved still"
    check.refused("alloc", 193 * MIB)
    probe.ok("pool_trim", pool)
    assert check.same() == 2 * MIB
    probe.ok("free", first)
    probe.ok("pool_trim", pool)
    assert check.same() == 0
    probe.ok("alloc", TENANT_MEMORY)


@pytest.mark.promise("memory-pools")
def test_a_pool_that_would_grow_over_the_limit_is_trimmed_again(make_check: MakeCheck) -> None:
    check = make_check()
    probe = check.probe
    probe.ok("stream", "s")
    check.fill(20 * MIB)
    before = check.same()
    assert probe.call("alloc_async", MIB, "s").code == OUT_OF_MEMORY, "the pool takes 32 MiB or nothing"
    check.same()
    probe.ok("stream_sync", "s")  # the undone allocation is freed once the stream reaches it
    assert check.same() == before


def test_a_pools_step_is_learnt_so_that_nothing_that_fits_is_refused(make_check: MakeCheck) -> None:
    check = make_check(FAKE_CUDA_POOL_CHUNK=str(8 * MIB))
    probe = check.probe
    # What the hook knows of the driver's step: nothing; that it is 8 to 32 MiB; that it is 8 MiB.
    for leave, size in ((12 * MIB, MIB), (64 * MIB, 26 * MIB), (8 * MIB, MIB)):
        filling, pool = check.fill(leave), probe.ok("pool_create")
        address = probe.ok("alloc_async", size, "", pool)
        assert check.taken("pool") == (size + 8 * MIB - 1) // (8 * MIB) * 8 * MIB
        probe.ok("free_async", address)
        probe.ok("context_sync")
        probe.ok("pool_destroy", pool)
        probe.ok("free", filling)
    check.fill(7 * MIB)
    check.refused("alloc_async", MIB)


def test_a_pool_uses_what_it_has_when_nothing_more_is_to_be_had(make_check: MakeCheck) -> None:
    check = make_check(FAKE_CUDA_POOL_CHUNK=str(PAGE))
    probe = check.probe
    probe.ok("stream", "s")
    probe.ok("pool_keep", probe.ok("pool_default"), 1 << 40)
    kept = probe.ok("alloc_async", 16 * MIB, "s")
    probe.ok("free_async", kept, "s")
    probe.ok("stream_sync", "s")
    check.fill(0)
    held = [probe.ok("alloc_async", 4 * MIB, "s") for _ in range(4)]
    check.refused("alloc_async", 512, "s")
    for address in held:
        probe.ok("free_async", address, "s")
    check.same()


def test_a_pool_of_the_programs_own_counts_until_its_last_allocation_is_gone(make_check: MakeCheck) -> None:
    check = make_check(FAKE_CUDA_POOL_CHUNK=str(PAGE))
    probe = check.probe
    probe.ok("stream", "s")
    pool, host = probe.ok("pool_create"), probe.ok("pool_create", 0, 0, 2)
    probe.ok("pool_use", pool)
    address = probe.ok("alloc_async", 100 * MIB, "s")
    direct = probe.ok("alloc_async", 20 * MIB, "s", pool)
    probe.ok("alloc_async", 512 * MIB, "s", host)
    assert check.same() == 120 * MIB
    check.refused("alloc_async", 137 * MIB, "s", pool)
    probe.ok("pool_destroy", pool)
    assert check.same() == 120 * MIB
    probe.ok("free_async", address, "s")
    probe.ok("free_async", direct, "s")
    probe.ok("stream_sync", "s")
    check.tenant.until(lambda: check.taken() == 0, "the pool to be destroyed")
    assert check.same() == 0
    another = probe.ok("pool_create")
    probe.ok("alloc_async", 200 * MIB, "s", another)
    assert check.same() == 200 * MIB


def test_threads_that_together_hold_half_of_the_limit_are_not_refused(tenant: Tenant) -> None:
    """Before each call the hook charges 32 MiB, the growth that the call may cause, although the driver then reuses
    memory of the pool.
    """
    agent = tenant.agent()
    agent.on_want = lambda client: agent.next_grant()
    for _ in range(4):
        program = [str(BUILD / "programs" / "poolthreads"), "16", "60"]
        subprocess.run(program, env=tenant.environment(), check=True, timeout=60)


def test_threads_that_use_one_pool_at_once_stay_within_the_limit(make_check: MakeCheck) -> None:
    check = make_check(FAKE_CUDA_POOL_CHUNK=str(PAGE))
    probe, pool = check.probe, check.probe.ok("pool_default")
    probe.ok("pool_keep", pool, 1 << 40)
    names = [f"t{n}" for n in range(6)]
    for name in names:
        probe.ok("context_use", thread=name)
        probe.ok("stream", name, thread=name)
    results = [(name, probe.post("alloc_async", 10 * MIB, name, thread=name)) for _ in range(6) for name in names]
    made = [(name, future.result(20).value) for name, future in results if future.result(20).code == 0]
    assert len(made) == 25
    assert check.same() == 250 * MIB
    for name, address in made:
        probe.post("free_async", address, name, thread=name)
    again = [probe.post("alloc_async", 4 * MIB, name, thread=name) for name in names]
    assert [future.result(20).code for future in again] == [0] * 6
    for name in names:
        probe.ok("stream_sync", name, thread=name)
    probe.ok("pool_trim", pool)
    assert check.same() == 24 * MIB


@pytest.mark.promise("memory-shared-once")
def test_an_imported_pool_is_not_counted_again(make_check: MakeCheck) -> None:
    check = make_check(FAKE_CUDA_POOL_CHUNK=str(PAGE))
    probe, other = check.probe, check.tenant.probe("other")
    other.start_cuda()
    pool = probe.ok("pool_create", 0, 0, 1, 1)
    imported = other.ok("pool_import", probe.pid, probe.ok("pool_export", pool))
    probe.ok("alloc_async", 10 * MIB, "", pool)
    assert other.call("alloc_async", MIB, "", imported).code not in (0, OUT_OF_MEMORY), "the driver's word"
    assert check.same() == 10 * MIB
    other.ok("pool_destroy", imported)
    other.ok("alloc_async", MIB, "", other.ok("pool_create"))
    assert check.counted() == check.taken() + check.tenant.read().client("other").usage[GPU_0].memory


def test_a_pool_grows_within_the_limit_on_a_stream_of_a_green_context(make_check: MakeCheck) -> None:
    """For a stream of a green context, only the second version of cuStreamGetCtx returns a context."""
    check = make_check()
    probe = check.probe
    probe.ok("green_context", "green")
    probe.ok("green_stream", "s", "green")
    before = check.same()
    probe.ok("alloc_async", 32 * MIB, "s")
    assert check.same() == before + 32 * MIB
    check.refused("alloc_async", TENANT_MEMORY, "s")
    check.same()
