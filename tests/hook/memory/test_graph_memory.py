"""Memory of graphs keeps to the limit."""

from __future__ import annotations

from hook.conftest import GPU_0, GPU_1, MIB, TENANT_MEMORY, MakeTenant, terms
from hook.world.ledger_check import PAGE, LedgerCheck, MakeCheck
from hook.world.probe import OUT_OF_MEMORY


def test_graphs_reserve_their_memory_before_the_launch(make_check: MakeCheck) -> None:
    check = make_check()
    probe = check.probe
    probe.ok("stream", "s")
    probe.ok("memory_graph", "small", 3 * MIB, 100 * MIB)
    probe.ok("memory_graph", "large", 200 * MIB)
    assert check.same() == 0, "nothing is taken yet"
    for _ in range(3):
        grant_and_launch(check, "small")
        assert check.same() == check.taken("graph") == 104 * MIB
    before = check.same()
    assert launch(check, "large") == OUT_OF_MEMORY
    assert probe.call("graph_upload", "large", "s").code == OUT_OF_MEMORY
    assert check.same() == before
    probe.ok("stream_sync", "s")
    probe.ok("graph_destroy", "small")
    assert check.same() == 104 * MIB, "kept for the next graph"
    probe.ok("graph_upload", "large", "s")
    assert check.same() == 200 * MIB
    probe.ok("graph_destroy", "large")
    probe.ok("graph_trim")
    assert check.same() == 0


def test_a_child_graphs_memory_and_what_is_uploaded_at_once_keep_to_the_limit(make_check: MakeCheck) -> None:
    check = make_check()
    probe = check.probe
    check.refused("uploaded_graph", "too much", 300 * MIB)
    probe.ok("uploaded_graph", "at once", 100 * MIB)
    assert check.same() == 100 * MIB
    probe.ok("child_graph", "child", 200 * MIB)
    assert probe.call("graph_upload", "child").code == OUT_OF_MEMORY
    probe.ok("graph_destroy", "at once")
    probe.ok("graph_upload", "child")
    assert check.same() == 200 * MIB


def test_a_graph_needs_no_more_than_its_allocations_take_at_one_time(make_check: MakeCheck) -> None:
    check = make_check()
    probe = check.probe
    assert 20 * 100 * MIB > TENANT_MEMORY
    probe.ok("freeing_graph", "one after the other", *[100 * MIB] * 20)
    probe.ok("graph_upload", "one after the other")
    assert check.same() == 100 * MIB
    probe.ok("graph_destroy", "one after the other")
    probe.ok("graph_trim")
    probe.ok("memory_graph", "small", *[64 << 10] * 1000)
    probe.ok("graph_upload", "small")
    assert 1000 * (64 << 10) <= check.same() <= 1000 * (64 << 10) + 2 * PAGE
    probe.ok("graph_destroy", "small")
    probe.ok("memory_graph", "at once", *[100 * MIB] * 3)
    assert probe.call("graph_upload", "at once").code == OUT_OF_MEMORY
    assert check.same() == 0, "what the small one had left was given back for it"


def test_a_captured_allocation_belongs_to_its_graph(make_check: MakeCheck) -> None:
    check = make_check()
    probe = check.probe
    probe.ok("stream", "s")
    probe.ok("capture_begin", "s")
    address = probe.ok("alloc_async", 300 * MIB, "s")
    probe.ok("free_async", address, "s")
    probe.ok("capture_end", "s", "g")
    assert check.same() == 0
    assert launch(check, "g") == OUT_OF_MEMORY
    assert check.same() == 0


def test_an_allocation_captured_from_another_gpus_pool_counts_on_that_gpu(make_tenant: MakeTenant) -> None:
    """The memory node is on the GPU of the pool, even if the stream is on another GPU."""
    tenant = make_tenant(terms(GPU_0), terms(GPU_1, memory=64 * MIB))
    tenant.agent()
    probe = tenant.probe()
    probe.start_cuda()
    probe.ok("stream", "s")
    pool = probe.ok("pool_create", 0, 1)
    probe.ok("capture_begin", "s")
    probe.ok("alloc_async", 100 * MIB, "s", pool)
    probe.ok("capture_end", "s", "g")
    assert probe.call("graph_upload", "g", "s").code == OUT_OF_MEMORY
    assert tenant.read().client("tenant").usage[GPU_1].memory == 0


def launch(check: LedgerCheck, name: str) -> int:
    return check.probe.call("launch_graph", name, "s").code


def grant_and_launch(check: LedgerCheck, name: str) -> None:
    agent = check.agent
    agent.on_want = lambda client: agent.next_grant()
    assert launch(check, name) == 0
