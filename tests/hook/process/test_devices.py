"""The hook identifies GPUs by their UUIDs, because a program chooses their order and numbers."""

from __future__ import annotations

import pytest
from hook.conftest import GPU_0, GPU_1, MIB, MakeTenant, terms
from sharepod.protocol import Want

NO_DEVICE = 100


def test_memory_is_booked_on_the_device_whatever_its_number(make_tenant: MakeTenant) -> None:
    """The device to which memory is charged must not depend on the number that the program uses for it."""
    tenant = make_tenant(terms(GPU_0, memory=64 * MIB), terms(GPU_1, memory=128 * MIB))
    agent = tenant.agent()
    probe = tenant.probe(FAKE_CUDA_VISIBLE=f"{GPU_1},{GPU_0}")
    probe.start_cuda()
    assert probe.ok("total_memory", 0) == 128 * MIB
    assert probe.ok("total_memory", 1) == 64 * MIB
    probe.ok("alloc", 100 * MIB)
    assert [agent.used(0), agent.used(1)] == [0, 100 * MIB]


@pytest.mark.parametrize(
    ("container", "chosen", "seen"),
    [
        (f"{GPU_0},{GPU_1}", "1,0", [GPU_1, GPU_0]),
        (f"{GPU_0},{GPU_1}", "1", [GPU_1]),
        (f"{GPU_1},{GPU_0}", "0", [GPU_1]),
        (f"{GPU_1},{GPU_0}", f"{GPU_0},{GPU_1}", [GPU_0, GPU_1]),
        (f"{GPU_0},{GPU_1}", GPU_1, [GPU_1]),
        (f"{GPU_0},{GPU_1}", "1,7,0", [GPU_1]),
    ],
)
def test_devices_chosen_by_index_or_uuid_are_the_ones_booked(
    make_tenant: MakeTenant, container: str, chosen: str, seen: list[str]
) -> None:
    """CUDA_VISIBLE_DEVICES selects some of the container's GPUs."""
    memory = {GPU_0: 64 * MIB, GPU_1: 128 * MIB}
    tenant = make_tenant(*(terms(gpu, memory=size) for gpu, size in memory.items()))
    agent = tenant.agent()
    probe = tenant.probe(FAKE_CUDA_VISIBLE=container, CUDA_VISIBLE_DEVICES=chosen)
    probe.start_cuda()
    assert [probe.ok("total_memory", ordinal) for ordinal in range(len(seen))] == [memory[gpu] for gpu in seen]
    probe.ok("alloc", 40 * MIB)
    booked = dict(zip(memory, (agent.used(0), agent.used(1)), strict=True))
    assert {gpu for gpu, used in booked.items() if used >= 40 * MIB} == {seen[0]}
    launching = probe.post("launch", "spin_us_100", "", 3)
    client = agent.client()
    assert agent.next_frame(client, Want).gpu_mask == 3, "its GPUs are granted together, whichever it sees"
    agent.grant(client)
    assert launching.result(10).code == 0
    used = tenant.read().client("tenant").usage
    assert {gpu: used[gpu].submitted for gpu in memory} == {gpu: 3 * (gpu == seen[0]) for gpu in memory}


@pytest.mark.parametrize(
    "chosen", ["MIG-10000000-0000-4000-8000-000000000000", "MIG-GPU-1/0/0", "-1", "", "GPU-1", "0,0"]
)
def test_a_choice_of_no_device_is_the_drivers_to_refuse(make_tenant: MakeTenant, chosen: str) -> None:
    tenant = make_tenant()
    agent = tenant.agent()
    probe = tenant.probe(CUDA_VISIBLE_DEVICES=chosen)
    assert probe.call("init").code == NO_DEVICE
    assert "sharepod" not in probe.ok("facts")["threads"]
    assert agent.clients == []
