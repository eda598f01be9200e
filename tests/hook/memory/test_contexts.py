"""The tenant is charged for the memory of its contexts, and for memory that their limits reserve."""

from __future__ import annotations

import time

import pytest
from doubles.gpus import create_state
from hook.conftest import DEVICE_MEMORY, GPU_0, GPU_1, MIB, TENANT_MEMORY, MakeTenant, terms
from hook.world.ledger_check import MakeCheck
from hook.world.probe import OUT_OF_MEMORY


def test_a_contexts_limits_are_paid_by_the_tenant(make_check: MakeCheck) -> None:
    check = make_check()
    probe = check.probe
    probe.ok("own_context", "own")
    probe.ok("context_limit", 2, 24 * MIB)  # CU_LIMIT_MALLOC_HEAP_SIZE, which is 8 MiB before this call
    assert check.same() == 16 * MIB
    # CU_LIMIT_STACK_SIZE, which is 1024 before this call; the driver rounds 1025 up to 1040
    probe.ok("context_limit", 0, 1025)
    stacks = 16 * 132 * 2048
    assert check.same() == 16 * MIB + stacks
    check.refused("context_limit", 2, 300 * MIB)
    probe.ok("context_limit", 2, 10 * MIB)
    assert check.same() == 2 * MIB + stacks
    probe.ok("context_limit", 3, 2)
    probe.ok("context_destroy", "own")
    probe.ok("context_use")
    assert check.same() == 0


def test_a_context_waits_for_what_an_agent_tells_late(make_tenant: MakeTenant) -> None:
    """The agent answers after 0.6 s. The context must wait for that answer, which contains the bytes of a context: more
    than the limit.
    """
    tenant = make_tenant(terms(memory=64 * MIB, context_kib=100 << 10))
    agent, probe = tenant.agent(), tenant.probe()
    agent.mute = True
    assert probe.call("init").code == 0
    created = probe.post("own_context", "one")
    time.sleep(0.6)
    agent.mute = False
    assert created.result(10).code == OUT_OF_MEMORY
    assert agent.used(0) == 0


def test_what_was_allocated_in_a_green_context_counts_until_the_primary_one_ends(make_check: MakeCheck) -> None:
    check = make_check()
    probe = check.probe
    probe.ok("green_context", "green")
    probe.ok("alloc", 100 * MIB)
    probe.ok("array", 1024, 1024)
    taken = check.same()
    probe.ok("context_use")
    probe.ok("green_context_destroy", "green")
    assert check.same() == taken > 100 * MIB
    check.refused("alloc", TENANT_MEMORY - taken + 1)


@pytest.mark.parametrize("create", ["context_create", "own_context", "green_context"])
def test_a_context_is_paid_for_as_the_agent_has_learnt(make_tenant: MakeTenant, create: str) -> None:
    """The overhead of contexts is charged once per process and GPU: from before the first context until after the last
    one."""
    tenant = make_tenant(terms(context_kib=100 << 10))
    create_state(tenant.state, [(gpu, "Simulated", DEVICE_MEMORY) for gpu in (GPU_0, GPU_1)], context_bytes=100 * MIB)
    agent, first, second, third = tenant.agent(), *(tenant.probe(f"p{n}") for n in range(3))
    for probe in (first, second):
        probe.ok("init")
        probe.ok("welcomed")  # after this answer the process knows the bytes of a context
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
