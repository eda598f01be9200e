"""No byte over the limit, no byte lost, and the tenant sees its own share of the memory."""

from __future__ import annotations

import random
import time

import pytest
from hook.conftest import DEVICE_MEMORY, GPU_0, GPU_1, MIB, TENANT_MEMORY, MakeTenant, Tenant, last_report, terms
from hook.world.probe import OUT_OF_MEMORY
from sharepod.protocol import Release, Reserve

GRANULARITY = 512


def in_use(tenant: Tenant, label: str = "tenant", gpu: str = GPU_0) -> int:
    return sum(client.usage[gpu].memory for client in tenant.read().clients if client.label == label)


@pytest.mark.promise("memory-limit")
@pytest.mark.parametrize("resolve", ["symbol", "dlsym", "getproc", "getproc11"])
def test_no_byte_over_the_limit_by_any_way_in(tenant: Tenant, resolve: str) -> None:
    tenant.agent()
    process = tenant.loop("--seconds", "0.1", "--resolve", resolve, "--memory", "300M", "--chunk", "10M")
    report = last_report(process)
    assert report["allocated"] == 250 * MIB
    assert report["refused_allocations"] == 5
    assert tenant.read().client("tenant").usage[GPU_0].peak == 250 * MIB


def test_the_last_byte_of_the_limit_can_be_used(tenant: Tenant) -> None:
    tenant.agent()
    probe = tenant.probe()
    probe.start_cuda()
    probe.ok("alloc", TENANT_MEMORY - 3 * GRANULARITY)
    for _ in range(3):
        probe.ok("alloc", 1)
    assert probe.call("alloc", 1).code == OUT_OF_MEMORY
    assert in_use(tenant) == TENANT_MEMORY


@pytest.mark.promise("memory-managed")
def test_pitched_and_managed_memory_count_as_well(tenant: Tenant) -> None:
    agent = tenant.agent()
    probe = tenant.probe()
    probe.start_cuda()
    pitched = probe.ok("alloc_pitch", 1000, 100_000)
    managed = probe.ok("alloc_managed", 100 * MIB)
    assert agent.used(0) >= in_use(tenant) == 1024 * 100_000 + 100 * MIB
    assert probe.call("alloc_managed", 100 * MIB).code == OUT_OF_MEMORY
    probe.ok("free", pitched)
    probe.ok("free", managed)
    probe.ok("alloc", TENANT_MEMORY)


def test_any_sequence_keeps_the_ledger_right(tenant: Tenant) -> None:
    """After each of many random calls three byte counts agree: the GPU's, the agent's, and the sum over the calls."""
    agent = tenant.agent()
    probe = tenant.probe()
    probe.start_cuda()
    chance = random.Random(20_240_517)
    held: dict[int, int] = {}
    refused = 0
    for _ in range(300):
        if held and chance.random() < 0.45:
            address = chance.choice(list(held))
            probe.ok("free", address)
            del held[address]
        else:
            size = chance.choice([1, 4096, 3 * MIB + 1, 20 * MIB, 60 * MIB])
            rounded = (size + GRANULARITY - 1) // GRANULARITY * GRANULARITY
            result = probe.call("alloc", size)
            assert (result.code == 0) == (sum(held.values()) + rounded <= TENANT_MEMORY), (size, held)
            if result.code == 0:
                held[result.value] = rounded
            else:
                refused += 1
        assert in_use(tenant) == sum(held.values()) <= agent.used(0) <= TENANT_MEMORY
    assert refused > 5
    for address in held:
        probe.ok("free", address)
    assert in_use(tenant) == 0
    agent.wait(lambda: agent.used(0) <= 32 * MIB, "the idle credits")


def test_what_the_driver_refuses_is_rolled_back(make_tenant: MakeTenant) -> None:
    tenant = make_tenant(terms(memory=2 * DEVICE_MEMORY))
    agent = tenant.agent()
    probe = tenant.probe()
    probe.start_cuda()
    probe.ok("alloc", 1000 * MIB)
    assert probe.call("alloc", 500 * MIB).code == OUT_OF_MEMORY
    agent.wait(lambda: agent.used(0) <= 1032 * MIB, "the credits that came back")
    assert probe.call("free", 12345).code != 0
    assert in_use(tenant) == 1000 * MIB


def test_a_failed_free_stays_counted(tenant: Tenant) -> None:
    tenant.agent()
    probe = tenant.probe()
    probe.start_cuda()
    address = probe.ok("alloc", 200 * MIB)
    probe.ok("stream", "s")
    probe.ok("capture_begin", "s")
    assert probe.call("free", address).code != 0, "not allowed in a thread that captures"
    probe.call("capture_end", "s")
    assert probe.call("alloc", 100 * MIB).code == OUT_OF_MEMORY
    probe.ok("free", address)
    probe.ok("alloc", 100 * MIB)


def test_a_free_that_waits_for_work_delays_no_other_thread(tenant: Tenant) -> None:
    """The driver's call for a free waits for all work of the context. Here the work ends only when the test ends a wait
    of a stream."""
    agent = tenant.agent()
    agent.on_want = lambda client: agent.next_grant()
    probe = tenant.probe()
    probe.start_cuda()
    probe.ok("context_use", thread="frees")
    probe.ok("stream", "waits")
    probe.ok("stream", "other")
    address = probe.ok("alloc", 100 * MIB)
    probe.ok("hold", "later", "waits")
    freed = probe.post("free", address, thread="frees")
    probe.ok("launch", "noop", "other", 600)
    probe.ok("alloc", 100 * MIB)
    assert probe.call("alloc", 100 * MIB).code == OUT_OF_MEMORY, "memory counts until the driver has it back"
    assert not freed.done()
    probe.ok("release", "later")
    assert freed.result(10).code == 0
    probe.ok("alloc", 100 * MIB)


def test_a_context_that_ends_gives_its_memory_back(tenant: Tenant) -> None:
    tenant.agent()
    probe = tenant.probe()
    probe.start_cuda()
    probe.ok("own_context", "own")
    for _ in range(20):
        probe.ok("alloc", 10 * MIB)
    probe.ok("context_destroy", "own")
    probe.ok("context_use")
    assert probe.ok("memory_info")[0] == TENANT_MEMORY
    probe.ok("alloc", 200 * MIB)
    probe.ok("context_release")
    probe.ok("context_create")
    probe.ok("alloc", 20 * MIB)


def test_a_recall_gives_back_what_is_idle_and_no_more(tenant: Tenant) -> None:
    agent = tenant.agent()
    probe = tenant.probe()
    probe.start_cuda()
    kept = probe.ok("alloc", 10 * MIB)
    freed = probe.ok("alloc", 20 * MIB)
    probe.ok("free", freed)
    client = agent.client()
    idle = agent.used(0) - 10 * MIB
    assert idle > 0
    agent.recall(client, 0, 4 * MIB)
    assert agent.next_frame(client, Release) == Release(0, 4 * MIB, recalled=True)
    agent.recall(client, 0, 1 << 40)
    assert agent.next_frame(client, Release, 1) == Release(0, idle - 4 * MIB, recalled=True)
    agent.recall(client, 0, 1)
    assert agent.next_frame(client, Release, 2) == Release(0, 0, recalled=True)
    assert agent.used(0) == 10 * MIB
    probe.ok("free", kept)


def test_small_allocations_seldom_ask(tenant: Tenant) -> None:
    agent = tenant.agent()
    probe = tenant.probe()
    probe.start_cuda()
    for _ in range(1000):
        probe.ok("alloc", 2000)
    client = agent.client()
    # Each return of idle credits, on a slow machine, causes one more request
    given_back = len(agent.frames(client, Release))
    assert len(agent.frames(client, Reserve)) <= 1 + given_back


@pytest.mark.promise("memory-cuda-view")
def test_the_tenant_sees_its_limit_as_the_gpu(tenant: Tenant) -> None:
    tenant.agent()
    first, second = tenant.probe("first"), tenant.probe("second")
    for probe in (first, second):
        probe.start_cuda()
    assert first.ok("memory_info") == [TENANT_MEMORY, TENANT_MEMORY]
    first.ok("alloc", 100 * MIB)
    second.ok("alloc", 50 * MIB)
    assert first.ok("memory_info")[1] == TENANT_MEMORY
    assert TENANT_MEMORY - 154 * MIB <= first.ok("memory_info")[0] <= TENANT_MEMORY - 150 * MIB
    assert first.ok("total_memory") == TENANT_MEMORY


def test_a_raised_limit_counts_at_once(tenant: Tenant) -> None:
    agent = tenant.agent()
    probe = tenant.probe()
    probe.start_cuda()
    assert probe.call("alloc", 300 * MIB).code == OUT_OF_MEMORY
    agent.change_limits([terms(memory=400 * MIB)])
    tenant.until(lambda: probe.ok("total_memory") == 400 * MIB, "the new limit")
    probe.ok("alloc", 300 * MIB)
    agent.change_limits([terms(memory=100 * MIB)])
    tenant.until(lambda: probe.ok("total_memory") == 100 * MIB, "the lowered limit")
    assert probe.call("alloc", 1).code in (0, OUT_OF_MEMORY), "idle credits may be used"
    assert probe.call("alloc", 50 * MIB).code == OUT_OF_MEMORY


def test_each_gpu_has_its_own_limit(make_tenant: MakeTenant) -> None:
    tenant = make_tenant(terms(GPU_1, memory=64 * MIB), terms(GPU_0, memory=128 * MIB))
    agent = tenant.agent()
    probe = tenant.probe()
    probe.start_cuda()
    probe.ok("own_context", "second", 1)
    assert probe.call("alloc", 65 * MIB).code == OUT_OF_MEMORY
    probe.ok("alloc", 64 * MIB)
    probe.ok("context_use")
    probe.ok("alloc", 128 * MIB)
    assert [agent.used(0), agent.used(1)] == [64 * MIB, 128 * MIB]


def test_a_gpu_that_is_not_the_tenants_gives_no_memory(tenant: Tenant) -> None:
    tenant.agent()
    probe = tenant.probe()
    probe.start_cuda()
    probe.ok("own_context", "foreign", 1)
    assert probe.call("alloc", 1).code == OUT_OF_MEMORY
    assert in_use(tenant, gpu=GPU_1) == 0


def test_memory_that_is_not_enforced_is_counted_and_not_refused(make_tenant: MakeTenant) -> None:
    tenant = make_tenant(terms(enforced=False))
    agent = tenant.agent()
    probe = tenant.probe()
    probe.start_cuda()
    probe.ok("alloc", 2 * TENANT_MEMORY)
    agent.wait(lambda: agent.used(0) == 2 * TENANT_MEMORY, "the bytes to be counted")
    assert probe.ok("total_memory") == DEVICE_MEMORY


def test_threads_that_allocate_at_once_stay_within_the_limit(tenant: Tenant) -> None:
    tenant.agent()
    probe = tenant.probe()
    probe.start_cuda()
    names = [f"t{n}" for n in range(8)]
    for name in names:
        probe.ok("context_use", thread=name)
    results = [probe.post("alloc", 10 * MIB, thread=name) for _ in range(5) for name in names]
    codes = [future.result(20).code for future in results]
    assert codes.count(0) == 25
    assert codes.count(OUT_OF_MEMORY) == 15
    assert in_use(tenant) == 250 * MIB


@pytest.mark.promise("memory-agent-away", "install-agent-gap")
def test_without_an_agent_the_credits_in_hand_are_all_there_is(make_tenant: MakeTenant) -> None:
    tenant = make_tenant(hasty=True)
    agent = tenant.agent()
    probe = tenant.probe()
    probe.start_cuda()
    probe.ok("alloc", MIB)
    agent.vanish()
    probe.ok("alloc", MIB)  # this allocation is from the 2 MiB of credits
    begun = time.monotonic()
    assert probe.call("alloc", MIB).code == OUT_OF_MEMORY
    assert 1.4 < time.monotonic() - begun < 6, "it waits for the agent first"
    assert in_use(tenant) == 2 * MIB


@pytest.mark.promise("memory-agent-away")
def test_an_allocation_waits_for_an_agent_that_comes_back(tenant: Tenant) -> None:
    agent = tenant.agent()
    probe = tenant.probe()
    probe.start_cuda()
    probe.ok("alloc", 100 * MIB)
    agent.vanish()
    waiting = probe.post("alloc", 50 * MIB)
    time.sleep(0.2)
    assert not waiting.done()
    agent.appear()
    assert waiting.result(10).code == 0
    client = agent.client()
    assert client.handed_over == [100 * MIB]
    assert agent.used(0) == 150 * MIB


def test_an_agent_that_hangs_does_not_lift_the_limit(make_tenant: MakeTenant) -> None:
    tenant = make_tenant(hasty=True)
    agent = tenant.agent()
    probe = tenant.probe()
    probe.start_cuda()
    agent.client()
    agent.answer_memory = False
    assert probe.call("alloc", 10 * MIB).code == OUT_OF_MEMORY
    assert in_use(tenant) == 0
