"""The limit itself: lowered, not enforced, shared with other processes, and what a process sees of it."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest
from hook.conftest import GPU_0, MIB, TENANT_MEMORY, MakeTenant, Tenant, terms
from hook.world.child import end
from hook.world.ledger_check import LedgerCheck, MakeCheck
from hook.world.probe import OUT_OF_MEMORY


def test_no_argument_of_memory_info_is_needed(make_check: MakeCheck) -> None:
    probe = make_check().probe
    assert probe.call("memory_info_of", False, True).code == 0
    assert probe.ok("memory_info_of", True, False)[0] == TENANT_MEMORY


@pytest.mark.promise("memory-shared-once")
def test_what_another_process_made_counts_there_alone(make_check: MakeCheck) -> None:
    check = make_check()
    other = check.tenant.probe("other")
    other.start_cuda()
    address = check.probe.ok("alloc", 100 * MIB)
    opened = other.ok("ipc_open", check.probe.ok("ipc_handle", address))
    other.ok("alloc", 156 * MIB)
    assert check.agent.used(0) == 256 * MIB == check.tenant.read().client("other").usage[GPU_0].memory + check.taken()
    other.ok("ipc_close", opened)
    assert check.agent.used(0) == 256 * MIB
    check.probe.ok("free", address)
    other.ok("alloc", 90 * MIB)


@pytest.mark.promise("memory-oom", "memory-lowered")
def test_a_lowered_limit_says_so_and_refuses(make_check: MakeCheck, capfd: pytest.CaptureFixture[str]) -> None:
    check = make_check()
    address = check.probe.ok("alloc", 200 * MIB)
    check.agent.change_limits([terms(memory=100 * MIB)])
    check.tenant.until(lambda: check.probe.ok("total_memory") == 100 * MIB, "the lowered limit")
    assert "below what this process uses" in capfd.readouterr().err
    assert check.probe.call("alloc", 1).code == OUT_OF_MEMORY
    assert check.probe.ok("memory_info") == [0, 100 * MIB]
    check.probe.ok("free", address)
    check.probe.ok("alloc", 100 * MIB)
    assert check.same() == 100 * MIB


REUSES_NUMBER_2 = """
import ctypes, os, sys
cuda, context, total = ctypes.CDLL("libcuda.so.1"), ctypes.c_void_p(), ctypes.c_size_t()
assert cuda.cuInit(0) == 0 and cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0) == 0
assert cuda.cuCtxSetCurrent(context) == 0
assert cuda.cuMemAlloc_v2(ctypes.byref(ctypes.c_uint64()), ctypes.c_size_t(200 << 20)) == 0
os.close(2)
assert os.open(sys.argv[1], os.O_RDWR | os.O_CREAT) == 2
print("open", flush=True)
while total.value != 100 << 20:
    assert cuda.cuDeviceTotalMem_v2(ctypes.byref(total), 0) == 0
"""


@pytest.mark.promise("program-standard-error")
def test_no_message_goes_into_a_file_of_the_programs(tenant: Tenant, tmp_path: Path) -> None:
    agent = tenant.agent()
    command = [sys.executable, "-S", "-c", REUSES_NUMBER_2, str(tmp_path / "data")]
    process = subprocess.Popen(command, env=tenant.environment(), stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == b"open\n"
        agent.change_limits([terms(memory=100 * MIB)])
        assert process.wait(20) == 0
        assert (tmp_path / "data").read_bytes() == b""
    finally:
        end(process)


@pytest.mark.promise("memory-lowered")
def test_credits_that_a_lowered_limit_takes_back_do_not_go_back_twice(make_check: MakeCheck) -> None:
    """Credits that were idle at the hook's last check must be returned once. If the next check returned them again, the
    process could exceed its limit.
    """
    check = make_check()
    check.probe.ok("alloc", MIB)
    check.agent.wait(lambda: check.agent.used(0) == 2 * MIB, "a whole step of credits")
    time.sleep(0.05)  # the hook's first periodic check
    check.agent.change_limits([terms(memory=100 * MIB)])
    check.agent.wait(lambda: check.agent.used(0) == MIB, "the idle credits")
    time.sleep(0.7)  # the hook's second periodic check
    assert check.agent.used(0) == MIB
    assert check.probe.call("alloc", 100 * MIB).code == OUT_OF_MEMORY
    assert check.same() == MIB


@pytest.mark.promise("memory-little-idle")
def test_idle_credits_go_back(make_check: MakeCheck) -> None:
    check = make_check()
    check.probe.ok("free", check.probe.ok("alloc", 33 * MIB))
    asked = check.asked()
    check.probe.ok("free", check.probe.ok("alloc", MIB))
    assert check.asked() > asked, "more than 32 MiB went back at once"
    check.agent.wait(lambda: check.agent.used(0) == 0, "the idle credits")
    check.probe.ok("free", check.probe.ok("alloc", 10 * MIB))
    assert check.agent.used(0) > 0
    check.agent.wait(lambda: check.agent.used(0) == 0, "the idle credits")


@pytest.mark.promise("memory-ruled-out")
@pytest.mark.parametrize("state", ["away", "silent"])
@pytest.mark.parametrize(
    "call",
    [("alloc", 100 * MIB), ("alloc_async", 100 * MIB), ("physical", 100 * MIB), ("array", 1024, 6400)],
    ids=lambda call: str(call[0]),
)
def test_no_agent_is_waited_for_where_the_known_limit_is_too_low(
    make_check: MakeCheck, state: str, call: tuple[str, int]
) -> None:
    check = make_check()
    check.probe.ok("alloc", 200 * MIB)
    check.agent.answer_memory = False
    asked = check.asked()
    if state == "away":
        check.agent.vanish()
    assert check.probe.call(*call, timeout=20).code == OUT_OF_MEMORY, "not after the 30 s for an agent"
    if state == "silent":
        check.agent.wait(lambda: check.asked() > asked, "a question")
        assert check.asked() == asked + 1
    assert check.taken() == 200 * MIB


@pytest.mark.parametrize(("allocate", "free"), [("alloc", "free"), ("alloc_async", "free_async")])
@pytest.mark.promise("memory-kept-for-loops")
def test_a_loop_of_large_allocations_asks_once(make_check: MakeCheck, allocate: str, free: str) -> None:
    check = make_check()
    for _ in range(200):
        check.probe.ok(free, check.probe.ok(allocate, 100 * MIB))
    assert check.asked() < 40, "a few at the start, and one for each half second that the machine stood still"
    check.agent.wait(lambda: check.agent.used(0) <= check.taken(), "what a loop kept, once the loop is over")


@pytest.mark.promise("memory-uncapped")
def test_isolation_none_counts_every_kind_and_refuses_none(make_tenant: MakeTenant) -> None:
    check = LedgerCheck(make_tenant(terms(memory=MIB, enforced=False)))
    probe = check.probe
    probe.ok("array", 512, 300)
    probe.ok("physical", 100 * MIB)
    probe.ok("alloc_async", MIB)
    probe.ok("memory_graph", "g", 50 * MIB)
    probe.ok("graph_upload", "g")
    probe.ok("context_limit", 2, 24 * MIB)
    check.agent.wait(lambda: check.taken() <= check.agent.used(0) < check.taken() + 33 * MIB, "all to be counted")
    for size in (1 << 46, (1 << 64) - 1):
        assert probe.call("alloc", size).code == OUT_OF_MEMORY, "more than any GPU has causes no request"
    assert len(check.agent.clients) == 1
