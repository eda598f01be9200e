"""Every kind of device memory keeps to the limit: reserved before the driver is asked, rolled back, freed in full.

The truth is the double's: what it has of the process, by kind.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
from doubles.gpus import create_state
from hook.conftest import DEVICE_MEMORY, GPU_0, GPU_1, MIB, TENANT_MEMORY, MakeTenant, Tenant, terms
from hook.world.probe import OUT_OF_MEMORY
from hook.world.scripted_agent import ScriptedAgent

PAGE = 2 * MIB


class Ledgers:
    """A probe with CUDA started, the agent's count and the double's."""

    def __init__(self, tenant: Tenant, **environment: str) -> None:
        self.tenant, self.agent = tenant, tenant.agent()
        self.probe = tenant.probe(more=environment)
        self.probe.start_cuda()

    def taken(self, kind: str = "") -> int:
        """Bytes of the device, but for what contexts and modules take by themselves."""
        usage = self.tenant.read().client("tenant").usage[GPU_0]
        return usage.kinds[kind] if kind else usage.memory

    def counted(self) -> int:
        """What the agent counts, less what is idle."""
        free, total = self.probe.ok("memory_info")
        return int(total - free)

    def same(self) -> int:
        """What both say."""
        taken = self.taken()
        assert self.counted() == taken <= self.agent.used(0) <= self.agent.gpus[0].memory
        return taken

    def refused(self, op: str, *arguments: object) -> None:
        """The call is refused as the driver would, and leaves nothing behind."""
        before = self.same()
        assert self.probe.call(op, *arguments).code == OUT_OF_MEMORY
        assert self.same() == before


MakeLedgers = Callable[..., Ledgers]


@pytest.fixture
def ledgers(make_tenant: MakeTenant) -> MakeLedgers:
    def make(memory: int = TENANT_MEMORY, **environment: str) -> Ledgers:
        return Ledgers(make_tenant(terms(memory=memory)), **environment)

    return make


def fill(books: Ledgers, leave: int) -> int:
    """Linear memory until `leave` bytes of the limit are left; where it is."""
    address: int = books.probe.ok("alloc", books.agent.gpus[0].memory - books.same() - leave)
    return address


def test_what_is_freed_on_a_stream_counts_until_the_work_before_it_is_over(ledgers: MakeLedgers) -> None:
    books = ledgers()
    probe = books.probe
    books.agent.on_want = lambda client: books.agent.next_grant()
    probe.ok("stream", "s")
    address = probe.ok("alloc", 200 * MIB)
    probe.ok("launch", "spin_us_200000", "s")
    probe.ok("free_async", address, "s")
    assert books.same() == 0
    probe.ok("alloc", TENANT_MEMORY)
    assert books.same() == TENANT_MEMORY


def test_arrays_and_their_levels_keep_to_the_limit(ledgers: MakeLedgers) -> None:
    books = ledgers()
    probe = books.probe
    shapes = [(1000, 0, 0, 0, 0), (512, 300, 0, 0, 0), (64, 64, 20, 0, 0), (256, 256, 0, 0, 5), (128, 64, 6, 1, 3)]
    made = [(probe.ok("array", *shape), shape[4]) for shape in shapes]
    assert books.same() > 0
    fill(books, 512 * 304 * 16 - 512)
    books.refused("array", 512, 300)
    for array, levels in made:
        probe.ok("array_free", array, levels)
    assert books.taken("array") == 0
    again = probe.ok("array", 512, 300)
    probe.ok("array_free", again)
    books.same()


def test_an_array_that_the_driver_refuses_is_rolled_back(ledgers: MakeLedgers) -> None:
    books = ledgers(2 * DEVICE_MEMORY)
    books.refused("array", 1 << 14, 1 << 14)
    assert books.probe.call("array", 0, 5).code not in (0, OUT_OF_MEMORY), "the driver says what is wrong"
    assert books.probe.call("array_free", 12345).code != 0
    assert books.same() == 0


def test_physical_memory_counts_until_its_last_reference_and_mapping_are_gone(ledgers: MakeLedgers) -> None:
    books = ledgers()
    probe = books.probe
    handle = probe.ok("physical", 100 * MIB)
    address = probe.ok("addresses", 256 * MIB)
    probe.ok("map", address, 100 * MIB, handle)
    probe.ok("map", address + 100 * MIB, 50 * MIB, handle)
    probe.ok("physical_release", handle)
    assert books.same() == 100 * MIB
    again = probe.ok("physical_of", address + 100 * MIB + 5)
    probe.ok("unmap", address, 150 * MIB)
    assert books.same() == 100 * MIB, "a reference is left"
    probe.ok("map", address, 100 * MIB, again)
    probe.ok("physical_release", again)
    assert probe.call("physical_release", again).code not in (0, OUT_OF_MEMORY)
    books.refused("physical", 158 * MIB)
    assert probe.call("unmap", address, PAGE).code != 0, "a part of a mapping"
    assert probe.call("unmap", address, 1 << 62).code != 0, "more than there is, and at once"
    assert books.same() == 100 * MIB
    probe.ok("unmap", address, 100 * MIB)
    assert books.same() == 0
    probe.ok("physical", TENANT_MEMORY)
    assert books.same() == TENANT_MEMORY


def test_physical_memory_of_another_size_or_place_is_the_drivers_word(ledgers: MakeLedgers) -> None:
    books = ledgers()
    probe = books.probe
    assert probe.call("physical", PAGE + 512).code not in (0, OUT_OF_MEMORY)
    probe.ok("physical", 512 * MIB, 0, 2)
    assert books.same() == 0, "host memory is none of the device's"
    assert probe.call("physical", PAGE, 1).code == OUT_OF_MEMORY, "a GPU that is not the tenant's"
    own = probe.ok("physical", PAGE)
    imported = probe.ok("physical_again", own)
    assert books.same() == PAGE, "counted once"
    probe.ok("physical_release", imported)
    assert books.same() == PAGE
    probe.ok("physical_release", own)
    assert books.same() == 0


def test_a_failed_mapping_refers_to_nothing(ledgers: MakeLedgers) -> None:
    books = ledgers()
    probe = books.probe
    handle = probe.ok("physical", 4 * PAGE)
    address = probe.ok("addresses", 16 * PAGE)
    probe.ok("map", address, 4 * PAGE, handle)
    assert probe.call("map", address + PAGE, PAGE, handle).code != 0, "mapped already"
    probe.ok("unmap", address, 4 * PAGE)
    probe.ok("physical_release", handle)
    assert books.same() == 0


def test_what_is_mapped_into_a_sparse_array_counts_until_the_array_is_gone(ledgers: MakeLedgers) -> None:
    books = ledgers()
    probe = books.probe
    array = probe.ok("array", 4096, 4096, 0, 0x40, 0, 1)
    assert books.same() == 0
    first, second = (probe.ok("physical", 50 * MIB) for _ in range(2))
    for x in (0, 128):
        probe.ok("sparse_map", array, x, first)
    probe.ok("physical_release", first)
    probe.ok("sparse_map", array, 0, 0)
    assert books.same() == 100 * MIB
    probe.ok("sparse_map", array, 128, second)
    assert books.same() == 50 * MIB, "the second took the place of the first"
    probe.ok("physical_release", second)
    assert books.same() == 50 * MIB
    probe.ok("array_free", array)
    assert books.same() == 0


def test_what_is_bound_to_a_multicast_object_counts_until_it_is_unbound(ledgers: MakeLedgers) -> None:
    books = ledgers()
    probe = books.probe
    handle, unbound = probe.ok("physical", 50 * MIB), probe.ok("physical", 10 * MIB)
    multicast = probe.ok("multicast", 200 * MIB)
    assert books.same() == 60 * MIB
    probe.ok("multicast_bind", multicast, 0, handle, PAGE)
    assert probe.call("multicast_bind", multicast, 0, unbound, PAGE).code not in (0, OUT_OF_MEMORY), "bound already"
    address = probe.ok("addresses", 200 * MIB)
    probe.ok("map", address, 50 * MIB, handle)
    probe.ok("map", address + 50 * MIB, 10 * MIB, unbound)
    probe.ok("multicast_bind_address", multicast, 50 * MIB, address, PAGE)
    probe.ok("unmap", address, 60 * MIB)
    probe.ok("physical_release", handle)
    probe.ok("physical_release", unbound)
    assert books.same() == 50 * MIB
    probe.ok("multicast_unbind", multicast, 0, PAGE)
    probe.ok("map", address, 200 * MIB, multicast)
    probe.ok("physical_release", multicast)
    assert books.same() == 50 * MIB
    probe.ok("unmap", address, 200 * MIB)
    assert books.same() == 0


def test_a_pool_counts_by_what_it_reserves(ledgers: MakeLedgers) -> None:
    books = ledgers()
    probe = books.probe
    probe.ok("stream", "s")
    pool = probe.ok("pool_default")
    probe.ok("pool_keep", pool, 1 << 40)
    first = probe.ok("alloc_async", MIB, "s")
    assert books.same() == 32 * MIB
    second = probe.ok("alloc_async", 40 * MIB, "s")
    assert books.same() == 64 * MIB
    probe.ok("free_async", second, "s")
    probe.ok("stream_sync", "s")
    assert books.same() == 64 * MIB, "reserved still"
    books.refused("alloc", 193 * MIB)
    probe.ok("pool_trim", pool)
    assert books.same() == 2 * MIB
    probe.ok("free", first)
    probe.ok("pool_trim", pool)
    assert books.same() == 0
    probe.ok("alloc", TENANT_MEMORY)


def test_a_pool_that_would_grow_over_the_limit_is_trimmed_again(ledgers: MakeLedgers) -> None:
    books = ledgers()
    probe = books.probe
    probe.ok("stream", "s")
    fill(books, 20 * MIB)
    before = books.same()
    assert probe.call("alloc_async", MIB, "s").code == OUT_OF_MEMORY, "the pool takes 32 MiB or nothing"
    books.same()
    probe.ok("stream_sync", "s")  # what was allocated goes back in the order of the stream
    assert books.same() == before


def test_a_pools_step_is_learnt_so_that_nothing_that_fits_is_refused(ledgers: MakeLedgers) -> None:
    books = ledgers(FAKE_CUDA_POOL_CHUNK=str(8 * MIB))
    probe = books.probe
    for leave, size in ((12 * MIB, MIB), (64 * MIB, 26 * MIB), (8 * MIB, MIB)):  # unknown, 8 to 32 MiB, known
        filling, pool = fill(books, leave), probe.ok("pool_create")
        address = probe.ok("alloc_async", size, "", pool)
        assert books.taken("pool") == (size + 8 * MIB - 1) // (8 * MIB) * 8 * MIB
        probe.ok("free_async", address)
        probe.ok("context_sync")
        probe.ok("pool_destroy", pool)
        probe.ok("free", filling)
    fill(books, 7 * MIB)
    books.refused("alloc_async", MIB)


def test_a_pool_uses_what_it_has_when_nothing_more_is_to_be_had(ledgers: MakeLedgers) -> None:
    books = ledgers(FAKE_CUDA_POOL_CHUNK=str(PAGE))
    probe = books.probe
    probe.ok("stream", "s")
    probe.ok("pool_keep", probe.ok("pool_default"), 1 << 40)
    kept = probe.ok("alloc_async", 16 * MIB, "s")
    probe.ok("free_async", kept, "s")
    probe.ok("stream_sync", "s")
    fill(books, 0)
    held = [probe.ok("alloc_async", 4 * MIB, "s") for _ in range(4)]
    books.refused("alloc_async", 512, "s")
    for address in held:
        probe.ok("free_async", address, "s")
    books.same()


def test_a_pool_of_the_programs_own_counts_until_its_last_allocation_is_gone(ledgers: MakeLedgers) -> None:
    books = ledgers(FAKE_CUDA_POOL_CHUNK=str(PAGE))
    probe = books.probe
    probe.ok("stream", "s")
    pool, host = probe.ok("pool_create"), probe.ok("pool_create", 0, 0, 2)
    probe.ok("pool_use", pool)
    address = probe.ok("alloc_async", 100 * MIB, "s")
    direct = probe.ok("alloc_async", 20 * MIB, "s", pool)
    probe.ok("alloc_async", 512 * MIB, "s", host)
    assert books.same() == 120 * MIB
    books.refused("alloc_async", 137 * MIB, "s", pool)
    probe.ok("pool_destroy", pool)
    assert books.same() == 120 * MIB
    probe.ok("free_async", address, "s")
    probe.ok("free_async", direct, "s")
    probe.ok("stream_sync", "s")
    books.tenant.until(lambda: books.taken() == 0, "the pool to be destroyed")
    assert books.same() == 0
    another = probe.ok("pool_create")
    probe.ok("alloc_async", 200 * MIB, "s", another)
    assert books.same() == 200 * MIB


def test_threads_that_use_one_pool_at_once_stay_within_the_limit(ledgers: MakeLedgers) -> None:
    books = ledgers(FAKE_CUDA_POOL_CHUNK=str(PAGE))
    probe, pool = books.probe, books.probe.ok("pool_default")
    probe.ok("pool_keep", pool, 1 << 40)
    names = [f"t{n}" for n in range(6)]
    for name in names:
        probe.ok("context_use", thread=name)
        probe.ok("stream", name, thread=name)
    results = [(name, probe.post("alloc_async", 10 * MIB, name, thread=name)) for _ in range(6) for name in names]
    made = [(name, future.result(20).value) for name, future in results if future.result(20).code == 0]
    assert len(made) == 25
    assert books.same() == 250 * MIB
    for name, address in made:
        probe.post("free_async", address, name, thread=name)
    again = [probe.post("alloc_async", 4 * MIB, name, thread=name) for name in names]
    assert [future.result(20).code for future in again] == [0] * 6
    for name in names:
        probe.ok("stream_sync", name, thread=name)
    probe.ok("pool_trim", pool)
    assert books.same() == 24 * MIB


def test_graphs_reserve_their_memory_before_the_launch(ledgers: MakeLedgers) -> None:
    books = ledgers()
    probe = books.probe
    probe.ok("stream", "s")
    probe.ok("memory_graph", "small", 3 * MIB, 100 * MIB)
    probe.ok("memory_graph", "large", 200 * MIB)
    assert books.same() == 0, "nothing is taken yet"
    for _ in range(3):
        grant_and_launch(books, "small")
        assert books.same() == books.taken("graph") == 104 * MIB
    before = books.same()
    assert launch(books, "large") == OUT_OF_MEMORY
    assert probe.call("graph_upload", "large", "s").code == OUT_OF_MEMORY
    assert books.same() == before
    probe.ok("stream_sync", "s")
    probe.ok("graph_destroy", "small")
    assert books.same() == 104 * MIB, "kept for the next graph"
    probe.ok("graph_upload", "large", "s")
    assert books.same() == 200 * MIB
    probe.ok("graph_destroy", "large")
    probe.ok("graph_trim")
    assert books.same() == 0


def test_a_child_graphs_memory_and_what_is_uploaded_at_once_keep_to_the_limit(ledgers: MakeLedgers) -> None:
    books = ledgers()
    probe = books.probe
    books.refused("uploaded_graph", "too much", 300 * MIB)
    probe.ok("uploaded_graph", "at once", 100 * MIB)
    assert books.same() == 100 * MIB
    probe.ok("child_graph", "child", 200 * MIB)
    assert probe.call("graph_upload", "child").code == OUT_OF_MEMORY
    probe.ok("graph_destroy", "at once")
    probe.ok("graph_upload", "child")
    assert books.same() == 200 * MIB


def test_a_graph_needs_no_more_than_its_allocations_take_at_one_time(ledgers: MakeLedgers) -> None:
    books = ledgers()
    probe = books.probe
    assert 20 * 100 * MIB > TENANT_MEMORY
    probe.ok("freeing_graph", "one after the other", *[100 * MIB] * 20)
    probe.ok("graph_upload", "one after the other")
    assert books.same() == 100 * MIB
    probe.ok("graph_destroy", "one after the other")
    probe.ok("graph_trim")
    probe.ok("memory_graph", "small", *[64 << 10] * 1000)
    probe.ok("graph_upload", "small")
    assert 1000 * (64 << 10) <= books.same() <= 1000 * (64 << 10) + 2 * PAGE
    probe.ok("graph_destroy", "small")
    probe.ok("memory_graph", "at once", *[100 * MIB] * 3)
    assert probe.call("graph_upload", "at once").code == OUT_OF_MEMORY
    assert books.same() == 0, "what the small one had left was given back for it"


def launch(books: Ledgers, name: str) -> int:
    return books.probe.call("launch_graph", name, "s").code


def grant_and_launch(books: Ledgers, name: str) -> None:
    agent: ScriptedAgent = books.agent
    agent.on_want = lambda client: agent.next_grant()
    assert launch(books, name) == 0


def test_a_captured_allocation_belongs_to_its_graph(ledgers: MakeLedgers) -> None:
    books = ledgers()
    probe = books.probe
    probe.ok("stream", "s")
    probe.ok("capture_begin", "s")
    address = probe.ok("alloc_async", 300 * MIB, "s")
    probe.ok("free_async", address, "s")
    probe.ok("capture_end", "s", "g")
    assert books.same() == 0
    assert launch(books, "g") == OUT_OF_MEMORY
    assert books.same() == 0


def test_a_contexts_limits_are_paid_by_the_tenant(ledgers: MakeLedgers) -> None:
    books = ledgers()
    probe = books.probe
    probe.ok("own_context", "own")
    probe.ok("context_limit", 2, 24 * MIB)  # CU_LIMIT_MALLOC_HEAP_SIZE, 8 MiB at first
    assert books.same() == 16 * MIB
    probe.ok("context_limit", 0, 1025)  # CU_LIMIT_STACK_SIZE
    assert books.same() == 16 * MIB + 132 * 2048
    books.refused("context_limit", 2, 300 * MIB)
    probe.ok("context_limit", 2, 10 * MIB)
    assert books.same() == 2 * MIB + 132 * 2048
    probe.ok("context_limit", 3, 2)
    probe.ok("context_destroy", "own")
    probe.ok("context_use")
    assert books.same() == 0


def test_no_argument_of_memory_info_is_needed(ledgers: MakeLedgers) -> None:
    probe = ledgers().probe
    assert probe.call("memory_info_of", False, True).code == 0
    assert probe.ok("memory_info_of", True, False)[0] == TENANT_MEMORY


@pytest.mark.parametrize("create", ["context_create", "own_context", "green_context"])
def test_a_context_is_paid_for_as_the_agent_has_learnt(make_tenant: MakeTenant, create: str) -> None:
    """Once for each process and GPU, before the first context; back with the last."""
    tenant = make_tenant(terms(context_kib=100 << 10))
    create_state(tenant.state, [(gpu, "Simulated", DEVICE_MEMORY) for gpu in (GPU_0, GPU_1)], context_bytes=100 * MIB)
    agent, first, second, third = tenant.agent(), *(tenant.probe(f"p{n}") for n in range(3))
    for probe in (first, second):
        probe.ok("init")
        probe.ok(create, *["one"] * (create != "context_create"))
        probe.ok("own_context", "more")
    assert agent.used(0) == 200 * MIB == sum(client.usage[GPU_0].memory for client in tenant.read().clients)
    assert third.call("init").code == 0
    assert third.call("own_context", "one").code == OUT_OF_MEMORY
    for probe in (first, second):
        assert probe.call("alloc", 57 * MIB).code == OUT_OF_MEMORY
    first.ok("context_destroy", "more")
    assert agent.used(0) == 200 * MIB
    match create:
        case "own_context":
            first.ok("context_destroy", "one")
        case "green_context":
            first.ok("green_context_destroy", "one")
        case _:
            first.ok("context_release")
    agent.wait(lambda: agent.used(0) == 100 * MIB, "what the context took")
    third.ok("own_context", "one")


def test_what_another_process_made_counts_there_alone(ledgers: MakeLedgers) -> None:
    books = ledgers()
    other = books.tenant.probe("other")
    other.start_cuda()
    address = books.probe.ok("alloc", 100 * MIB)
    opened = other.ok("ipc_open", books.probe.ok("ipc_handle", address))
    other.ok("alloc", 156 * MIB)
    assert books.agent.used(0) == 256 * MIB == books.tenant.read().client("other").usage[GPU_0].memory + books.taken()
    other.ok("ipc_close", opened)
    assert books.agent.used(0) == 256 * MIB
    books.probe.ok("free", address)
    other.ok("alloc", 90 * MIB)


def test_an_imported_pool_is_not_counted_again(ledgers: MakeLedgers) -> None:
    books = ledgers(FAKE_CUDA_POOL_CHUNK=str(PAGE))
    probe, other = books.probe, books.tenant.probe("other")
    other.start_cuda()
    pool = probe.ok("pool_create", 0, 0, 1, 1)
    imported = other.ok("pool_import", probe.pid, probe.ok("pool_export", pool))
    probe.ok("alloc_async", 10 * MIB, "", pool)
    assert other.call("alloc_async", MIB, "", imported).code not in (0, OUT_OF_MEMORY), "the driver's word"
    assert books.same() == 10 * MIB
    other.ok("pool_destroy", imported)
    other.ok("alloc_async", MIB, "", other.ok("pool_create"))
    assert books.counted() == books.taken() + books.tenant.read().client("other").usage[GPU_0].memory


def test_a_lowered_limit_says_so_and_refuses(ledgers: MakeLedgers, capfd: pytest.CaptureFixture[str]) -> None:
    books = ledgers()
    address = books.probe.ok("alloc", 200 * MIB)
    books.agent.change_limits([terms(memory=100 * MIB)])
    books.tenant.until(lambda: books.probe.ok("total_memory") == 100 * MIB, "the lowered limit")
    assert "below what this process uses" in capfd.readouterr().err
    assert books.probe.call("alloc", 1).code == OUT_OF_MEMORY
    assert books.probe.ok("memory_info") == [0, 100 * MIB]
    books.probe.ok("free", address)
    books.probe.ok("alloc", 100 * MIB)
    assert books.same() == 100 * MIB


def test_idle_credits_go_back(ledgers: MakeLedgers) -> None:
    books = ledgers()
    books.probe.ok("free", books.probe.ok("alloc", 10 * MIB))
    assert books.agent.used(0) > 0
    books.agent.wait(lambda: books.agent.used(0) == 0, "the idle credits")


def test_isolation_none_counts_every_kind_and_refuses_none(make_tenant: MakeTenant) -> None:
    books = Ledgers(make_tenant(terms(memory=MIB, enforced=False)))
    probe = books.probe
    probe.ok("array", 512, 300)
    probe.ok("physical", 100 * MIB)
    probe.ok("alloc_async", MIB)
    probe.ok("memory_graph", "g", 50 * MIB)
    probe.ok("graph_upload", "g")
    probe.ok("context_limit", 2, 24 * MIB)
    books.agent.wait(lambda: books.taken() <= books.agent.used(0) < books.taken() + 33 * MIB, "all to be counted")
    for size in (1 << 46, (1 << 64) - 1):
        assert probe.call("alloc", size).code == OUT_OF_MEMORY, "more than any GPU has is asked of nobody"
    assert len(books.agent.clients) == 1
