"""The hook adds few driver calls to the program's own, and these calls change nothing for the program."""

from __future__ import annotations

import subprocess

import pytest
from hook.conftest import BUILD, Tenant

PROGRAM = str(BUILD / "programs" / "drivercalls")
MOST_ADDED = {
    "batch-pageable": 1,
    "batch-pinned": 1,
    "copy-unsaid": 1,
    "copy-between": 1,
    "launch-copy-async": 1,
    "launch-copy": 1,
    "launches-4-copy": 4,
    "launch-wait-event": 1,
    "launch-wait-event-later": 1,
    "pool-pair": 1,
    "linear-pair": 1,
    "write-batch": 1,
}
"""Most driver calls that the hook may add to one round, by pattern of the program `drivercalls`. A copy that waits for
several streams needs a fence behind the launches of each.
"""


def calls(environment: dict[str, str], pattern: str, *more: str) -> int:
    """Return the smallest number of driver calls in one round. Rounds in which a window of launches ends have more,
    because the hook records a fence there.
    """
    done = subprocess.run(
        [PROGRAM, pattern, "300", *more], env=environment, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    return int(done.stdout.split()[1])


@pytest.mark.promise("program-driver-calls")
@pytest.mark.parametrize("metered", [False, True])
@pytest.mark.parametrize("pattern", MOST_ADDED)
def test_a_call_costs_one_more_call_of_the_driver_at_most(tenant: Tenant, pattern: str, metered: bool) -> None:
    """This holds with one GPU in the container. With several GPUs, the hook also queries the current context."""
    agent = tenant.agent()
    agent.on_want = lambda client: agent.next_grant(metered=metered)
    bare = calls(tenant.environment(LD_PRELOAD="", FAKE_CUDA_VISIBLE="0"), pattern)
    assert calls(tenant.environment(FAKE_CUDA_VISIBLE="0"), pattern) <= bare + MOST_ADDED[pattern]


@pytest.mark.promise("program-driver-calls")
@pytest.mark.parametrize("metered", [False, True])
def test_launches_behind_waits_that_are_over_do_not_count_as_unfinished(tenant: Tenant, metered: bool) -> None:
    """A thread that waits for the end of such a wait would query its event again and again."""
    agent = tenant.agent()
    agent.on_want = lambda client: agent.next_grant(metered=metered)
    arguments = [PROGRAM, "launch-behind", "20"]
    done = subprocess.run(arguments, env=tenant.environment(), capture_output=True, text=True, timeout=60, check=True)
    launches = 300
    assert int(done.stdout.split()[0]) <= launches + 30


@pytest.mark.promise("program-captures")
@pytest.mark.parametrize("pattern", ["batch-pageable", "launch-copy-async", "pool-pair"])
def test_calls_that_are_hidden_from_no_capture_break_none_that_begins(tenant: Tenant, pattern: str) -> None:
    agent = tenant.agent()
    agent.on_want = lambda client: agent.next_grant(metered=True)
    calls(tenant.environment(), pattern, "capture")


@pytest.mark.parametrize("allocation", ["alloc", "alloc_managed"])
def test_memory_of_a_device_that_lies_where_the_host_had_some_is_a_devices(tenant: Tenant, allocation: str) -> None:
    """Two copies let the hook store that an address is host memory. The driver then returns that address for device
    memory, so the next copy must need a grant."""
    agent = tenant.agent()
    probe = tenant.probe()
    probe.start_cuda()
    # The double will return this address for the next allocation. Until then the driver treats it as host memory.
    address = probe.ok("alloc", 4096) + 4096
    for _ in range(2):
        probe.ok("copy_unsaid", address, address + 64)
    assert probe.ok(allocation, 4096) == address
    copied = probe.post("copy_unsaid", address, address + 64)
    agent.wait_asked(agent.client(), 1)
    assert not copied.done()
    agent.grant(agent.client())
    assert copied.result(10).code == 0


def test_memory_of_a_pool_that_does_not_grow_lies_where_the_host_had_some_and_is_a_devices(tenant: Tenant) -> None:
    agent = tenant.agent()
    probe = tenant.probe()
    probe.start_cuda()
    probe.ok("stream", "s")
    # The double will return this address for the next allocation. Until then the driver treats it as host memory.
    address = probe.ok("alloc_async", 4096, "s") + 4096
    for _ in range(2):
        probe.ok("copy_unsaid", address, address + 64)
    assert probe.ok("alloc_async", 4096, "s") == address
    copied = probe.post("copy_unsaid", address, address + 64)
    agent.wait_asked(agent.client(), 1)
    assert not copied.done()
    agent.grant(agent.client())
    assert copied.result(10).code == 0


@pytest.mark.parametrize("way", ["captured", "node"])
def test_memory_of_a_graph_that_lies_where_the_host_had_some_is_a_devices(tenant: Tenant, way: str) -> None:
    agent = tenant.agent()
    probe = tenant.probe()
    probe.start_cuda()
    probe.ok("stream", "s")
    probe.ok("capture_begin", "s", 2)  # relaxed
    # The double will return this address for the next allocation. Until then the driver treats it as host memory.
    address = probe.ok("alloc_async", 4096, "s") + 4096
    for _ in range(2):
        probe.ok("copy_unsaid", address, address + 64)
    if way == "captured":
        assert probe.ok("alloc_async", 4096, "s") == address
    else:
        probe.ok("memory_graph", "graph", 4096)
    copied = probe.post("copy_unsaid", address, address + 64)
    agent.wait_asked(agent.client(), 1)
    assert not copied.done()
    agent.grant(agent.client())
    assert copied.result(10).code == 0
    probe.ok("capture_end", "s")
