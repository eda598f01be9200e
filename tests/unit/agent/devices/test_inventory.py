"""Inventories: simulated GPUs from a file, and GPUs of NVML, whose Python module is a double here."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import queue
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from sharepod.agent.devices.inventory import InventoryError, Process, Reading, SimulatedInventory
from sharepod.agent.devices.nvml import NvmlInventory
from sharepod.agent.devices.xids import XidListener, handle_key
from sharepod.api.gpunode import Health
from unit.agent.client import GI, GPU0, GPU1, until

FILE = f"""
gpus:
- {{uuid: {GPU1}, index: 1, model: Simulated, memory: 80Gi, numaNode: 1}}
- {{uuid: {GPU0}, index: 0, model: Simulated, memory: 16Gi, links: [{{uuid: {GPU1}, kind: NVLINK}}]}}
processes:
- {{pid: 42, uuid: {GPU0}, memory: 1Gi}}
"""


def replace(path: Path, text: str) -> None:
    fresh = path.with_suffix(".new")
    fresh.write_text(text)
    fresh.rename(path)


async def test_a_simulated_inventory_is_its_file(tmp_path: Path) -> None:
    path = tmp_path / "inventory.yaml"
    path.write_text(FILE)
    inventory = SimulatedInventory(path)
    reading = await inventory.read()
    assert inventory.simulated
    assert [(gpu.index, gpu.memory, gpu.numa_node) for gpu in reading.gpus] == [(0, 16 * GI, None), (1, 80 * GI, 1)]
    assert reading.gpus[0].links[0].kind == "NVLINK"
    assert reading.processes == (Process(42, GPU0, GI),)


async def test_a_simulated_inventory_follows_its_file(tmp_path: Path) -> None:
    path = tmp_path / "inventory.yaml"
    path.write_text(FILE)
    inventory = SimulatedInventory(path)
    await inventory.read()
    replace(path, FILE.replace("pid: 42", "pid: 43"))
    assert (await inventory.read()).processes[0].pid == 43
    replace(path, "gpus: nonsense")
    for _ in range(2):
        with pytest.raises(InventoryError, match=r"inventory\.yaml is not valid"):
            await inventory.read()
    replace(path, FILE)
    assert (await inventory.read()).processes[0].pid == 42


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (("uuid: GPU-0", "uuid: GPU-x"), "is not the UUID of a GPU"),
        (("16Gi", "16 apples"), "is not a quantity"),
        (("index: 1", "index: 0"), "index 0 appears twice"),
        ((f"uuid: {GPU1}, index", f"uuid: {GPU0}, index"), "appears twice"),
        (("model", "colour"), "colour"),
        (("pid: 42, uuid: GPU-0", "pid: 42, uuid: GPU-2"), "is not a GPU of the file"),
        (("gpus:", "gpus: ["), "is not valid"),
    ],
)
async def test_a_wrong_file_is_refused_with_a_message(tmp_path: Path, change: tuple[str, str], words: str) -> None:
    path = tmp_path / "inventory.yaml"
    path.write_text(FILE.replace(*change))
    with pytest.raises(InventoryError, match=words):
        await SimulatedInventory(path).read()


async def test_a_missing_file_is_reported(tmp_path: Path) -> None:
    with pytest.raises(InventoryError, match="No such file"):
        await SimulatedInventory(tmp_path / "none.yaml").read()


class NvmlError(Exception):
    def __init__(self, value: int, text: str = "Unknown Error") -> None:
        super().__init__(text)
        self.value = value


class FakeNvml:
    """Double of the part of `pynvml` that the inventory uses, for two GPUs. `broken`: calls that fail, by name
    and index."""

    NVMLError = NvmlError
    NVML_SUCCESS, NVML_ERROR_NOT_SUPPORTED, NVML_ERROR_NOT_FOUND, NVML_ERROR_TIMEOUT = 0, 3, 6, 10
    NVML_ERROR_FUNCTION_NOT_FOUND = 13
    NVML_P2P_CAPS_INDEX_NVLINK = 2
    NVML_P2P_STATUS_OK = 0
    NVML_TOPOLOGY_INTERNAL, NVML_TOPOLOGY_SINGLE, NVML_TOPOLOGY_MULTIPLE = 0, 10, 20
    NVML_TOPOLOGY_HOSTBRIDGE, NVML_TOPOLOGY_NODE, NVML_TOPOLOGY_SYSTEM = 30, 40, 50
    nvmlMemory_v2 = 2  # noqa: N815
    nvmlEventTypeXidCriticalError = 8  # noqa: N815

    def __init__(self) -> None:
        self.uuids = [GPU0, GPU1]
        self.broken: dict[tuple[str, int], int] = {}
        self.mig = [0, 0]
        self.nvlink = True
        self.processes: dict[tuple[str, int], list[Any]] = {}
        self.busy = [0, 0]
        self.samples: list[Any] = []
        self.events: queue.Queue[Any] = queue.Queue()
        self.listening = threading.Event()
        self.hang = threading.Event()
        self.hang.set()
        self.hang_at: tuple[str, int] | None = None
        """The only call that hangs, as (name, number). None: each call hangs."""
        self.counted = 0
        self.count_answers: list[NvmlError] = []

    def _call(self, name: str, handle: int) -> None:
        if self.hang_at in (None, (name, handle)):
            self.hang.wait(30)
        if (name, handle) in self.broken:
            raise NvmlError(self.broken[name, handle], f"{name} failed")

    def nvmlInit(self) -> None:  # noqa: N802
        self._call("init", 0)

    def nvmlDeviceGetCount(self) -> int:  # noqa: N802
        # count only the thread that takes readings, not the thread that waits for Xids
        self.counted += threading.current_thread().name == "nvml"
        if self.count_answers:
            raise self.count_answers.pop()
        return len(self.uuids)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:  # noqa: N802
        self._call("handle", index)
        return index

    def nvmlDeviceGetUUID(self, handle: int) -> str:  # noqa: N802
        self._call("uuid", handle)
        return self.uuids[handle]

    def nvmlDeviceGetName(self, handle: int) -> str:  # noqa: N802
        return "NVIDIA H100"

    def nvmlDeviceGetMemoryInfo(self, handle: int, version: int) -> Any:  # noqa: N802
        self._call("memory", handle)
        assert version == self.nvmlMemory_v2
        return SimpleNamespace(total=80 * GI, reserved=1 * GI)

    def nvmlDeviceGetMigMode(self, handle: int) -> list[int]:  # noqa: N802
        self._call("mig", handle)
        return [self.mig[handle], 0]

    def nvmlDeviceGetRemappedRows(self, handle: int) -> list[int]:  # noqa: N802
        self._call("rows", handle)
        return [0, 0, 0, 0]

    def nvmlDeviceGetComputeRunningProcesses_v3(self, handle: int) -> list[Any]:  # noqa: N802
        self._call("compute", handle)
        return self.processes.get(("compute", handle), [])

    def nvmlDeviceGetComputeRunningProcesses_v2(self, handle: int) -> list[Any]:  # noqa: N802
        return self.processes.get(("compute", handle), [])

    def nvmlDeviceGetGraphicsRunningProcesses_v3(self, handle: int) -> list[Any]:  # noqa: N802
        return self.processes.get(("graphics", handle), [])

    def nvmlDeviceGetMPSComputeRunningProcesses_v3(self, handle: int) -> list[Any]:  # noqa: N802
        raise NvmlError(self.NVML_ERROR_NOT_SUPPORTED)

    def nvmlSystemGetDriverVersion(self) -> str:  # noqa: N802
        return "580.1"

    def nvmlDeviceGetUtilizationRates(self, handle: int) -> Any:  # noqa: N802
        self._call("utilization", handle)
        return SimpleNamespace(gpu=self.busy[handle])

    def nvmlDeviceGetProcessUtilization(self, handle: int, since: int) -> list[Any]:  # noqa: N802
        self._call("process utilization", handle)
        if not self.samples:
            raise NvmlError(self.NVML_ERROR_NOT_FOUND)
        return self.samples

    def nvmlEventSetCreate(self) -> int:  # noqa: N802
        return 1

    def nvmlDeviceRegisterEvents(self, handle: int, types: int, events: int) -> None:  # noqa: N802
        self._call("events", handle)

    def nvmlEventSetWait_v2(self, events: int, timeout_ms: int) -> Any:  # noqa: N802
        self.listening.set()
        try:
            event = self.events.get(timeout=0.05)
        except queue.Empty:
            raise NvmlError(self.NVML_ERROR_TIMEOUT) from None
        if isinstance(event, NvmlError):
            raise event
        return event

    def nvmlEventSetFree(self, events: int) -> None:  # noqa: N802
        self.listening.clear()

    def nvmlDeviceGetPciInfo(self, handle: int) -> Any:  # noqa: N802
        return SimpleNamespace(busId=f"00000000:{handle:02X}:00.0")

    def nvmlDeviceGetP2PStatus(self, one: int, other: int, index: int) -> int:  # noqa: N802
        return self.NVML_P2P_STATUS_OK if self.nvlink else 1

    def nvmlDeviceGetTopologyCommonAncestor(self, one: int, other: int) -> int:  # noqa: N802
        return self.NVML_TOPOLOGY_HOSTBRIDGE


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeNvml]:
    fake, listeners = FakeNvml(), []
    begin = XidListener.listen

    def listen(listener: XidListener) -> None:
        listeners.append(listener)
        begin(listener)

    monkeypatch.setattr(XidListener, "listen", listen)
    yield fake
    fake.hang.set()
    for listener in listeners:
        listener.stop()


async def test_capacity_is_the_total_less_what_the_driver_keeps(nvml: FakeNvml) -> None:
    inventory = NvmlInventory(5, nvml)
    reading = await inventory.read()
    assert not inventory.simulated
    assert [gpu.memory for gpu in reading.gpus] == [79 * GI] * 2
    assert all(gpu.health is Health.HEALTHY and gpu.shareable for gpu in reading.gpus)
    assert reading.gpus[0].links[0].kind == "NVLINK"


async def test_gpus_without_nvlink_are_linked_by_their_common_ancestor(nvml: FakeNvml) -> None:
    nvml.nvlink = False
    assert (await NvmlInventory(5, nvml).read()).gpus[1].links[0].kind == "PHB"


@pytest.mark.promise("node-mig")
async def test_a_gpu_in_mig_mode_is_not_shared(nvml: FakeNvml) -> None:
    nvml.mig[1] = 1
    gpu = (await NvmlInventory(5, nvml).read()).gpus[1]
    assert (gpu.shareable, gpu.health) == (False, Health.HEALTHY)
    assert "MIG" in gpu.reason


async def test_an_unsupported_query_of_a_gpu_is_no_error(nvml: FakeNvml) -> None:
    nvml.broken = {("mig", 0): nvml.NVML_ERROR_NOT_SUPPORTED, ("rows", 0): nvml.NVML_ERROR_NOT_SUPPORTED}
    assert (await NvmlInventory(5, nvml).read()).gpus[0].health is Health.HEALTHY


@pytest.mark.promise("node-xid")
async def test_a_gpu_that_cannot_be_read_is_unhealthy_and_no_other(nvml: FakeNvml) -> None:
    nvml.broken = {("memory", 0): 999}
    first, second = (await NvmlInventory(5, nvml).read()).gpus
    assert (first.health, second.health) == (Health.UNHEALTHY, Health.HEALTHY)
    assert "cannot read its memory" in first.reason


async def test_a_gpu_that_is_lost_stays_in_the_inventory_as_unhealthy(nvml: FakeNvml) -> None:
    inventory = NvmlInventory(5, nvml)
    await inventory.read()
    nvml.broken = {("handle", 1): 15}
    second = (await inventory.read()).gpus[1]
    assert (second.uuid, second.health) == (GPU1, Health.UNHEALTHY)


async def test_a_gpu_that_has_another_index_than_one_that_is_lost_is_listed_once(nvml: FakeNvml) -> None:
    inventory = NvmlInventory(5, nvml)
    await inventory.read()
    nvml.uuids, nvml.broken = [GPU1, GPU0], {("handle", 1): 15}
    gpus = {gpu.uuid: gpu.health for gpu in (await inventory.read()).gpus}
    assert gpus == {GPU1: Health.HEALTHY, GPU0: Health.UNHEALTHY}
    assert len((await inventory.read()).gpus) == 2


async def test_a_process_is_listed_once_with_its_greatest_reported_memory(nvml: FakeNvml) -> None:
    nvml.processes = {
        ("compute", 0): [SimpleNamespace(pid=7, usedGpuMemory=None), SimpleNamespace(pid=8, usedGpuMemory=5)],
        ("graphics", 0): [SimpleNamespace(pid=8, usedGpuMemory=9)],
    }
    assert (await NvmlInventory(5, nvml).read()).processes == (Process(7, GPU0, 0, 0.0), Process(8, GPU0, 9, 0.0))


async def first_reading(inventory: NvmlInventory) -> None:
    """Wait for a reading. Retry, because on a busy machine the first one may exceed a short timeout."""
    for _ in range(100):
        with contextlib.suppress(InventoryError):
            await inventory.read()
            return


@pytest.mark.promise("node-driver-hangs")
async def test_a_driver_that_hangs_makes_gpus_unhealthy_and_the_agent_continues(nvml: FakeNvml) -> None:
    inventory = NvmlInventory(0.05, nvml)
    await first_reading(inventory)
    nvml.hang.clear()
    for _ in range(2):
        assert {gpu.health for gpu in (await inventory.read()).gpus} == {Health.UNHEALTHY}
    assert sum(thread.name == "nvml" for thread in threading.enumerate()) == 1, "no second call joins a hanging call"
    nvml.hang.set()
    async with asyncio.timeout(10):
        while (await inventory.read()).gpus[0].health is not Health.HEALTHY:
            pass


@pytest.mark.promise("node-driver-hangs")
async def test_a_reading_that_began_before_a_request_does_not_answer_it(nvml: FakeNvml) -> None:
    """A process starts while a reading hangs, so that reading lacks it. An answer from that reading would let the
    process's tenant count as drained while it computes."""
    inventory = NvmlInventory(0.2, nvml)
    await first_reading(inventory)
    nvml.hang_at = "rows", 1  # the reading hangs after it has read the processes of the first GPU
    nvml.hang.clear()
    assert not (await inventory.read()).fresh
    nvml.processes = {("compute", 0): [SimpleNamespace(pid=7, usedGpuMemory=1)]}
    asking = asyncio.create_task(inventory.read())
    await asyncio.sleep(0)
    nvml.hang.set()
    reading = await asking
    while not reading.fresh:  # on a busy machine the reading exceeds the inventory's timeout
        reading = await inventory.read()
    assert [process.pid for process in reading.processes] == [7]
    nvml.hang.clear()
    assert not (await inventory.read()).fresh
    nvml.processes = {}
    nvml.hang.set()
    # Wait for the end of the hanging reading: the next call must begin another.
    await until(lambda: all(thread.name != "nvml" for thread in threading.enumerate()))
    assert (await inventory.read()).processes == ()


async def test_the_error_of_an_earlier_reading_reaches_no_later_caller(nvml: FakeNvml) -> None:
    inventory = NvmlInventory(5, nvml)
    nvml.hang.clear()
    nvml.count_answers = [NvmlError(999, "count failed")]
    asking = [asyncio.create_task(inventory.read())]
    await asyncio.sleep(0)
    asking.append(asyncio.create_task(inventory.read()))
    await asyncio.sleep(0)
    nvml.hang.set()
    with pytest.raises(InventoryError, match="cannot count"):
        await asking[0]
    assert (await asking[1]).fresh


async def test_callers_during_a_reading_share_the_next_one(nvml: FakeNvml) -> None:
    inventory = NvmlInventory(5, nvml)
    await inventory.read()
    nvml.hang.clear()
    before = nvml.counted
    asking = [asyncio.create_task(inventory.read())]
    await asyncio.sleep(0)
    asking += [asyncio.create_task(inventory.read()) for _ in range(5)]
    await asyncio.sleep(0)
    nvml.hang.set()
    readings = await asyncio.gather(*asking)
    assert nvml.counted - before == 2
    assert all(reading is readings[1] for reading in readings[2:])


async def test_processes_that_cannot_be_read_are_not_taken_for_none(nvml: FakeNvml) -> None:
    inventory = NvmlInventory(5, nvml)
    assert (await inventory.read()).unread == frozenset()
    nvml.broken = {("compute", 0): 999}
    assert (await inventory.read()).unread == {GPU0}
    nvml.broken = {("handle", 1): 15}
    assert (await inventory.read()).unread == {GPU1}


async def test_a_driver_without_the_newest_call_is_asked_by_the_one_before(nvml: FakeNvml) -> None:
    nvml.processes = {("compute", 0): [SimpleNamespace(pid=8, usedGpuMemory=5)]}
    nvml.broken = {("compute", 0): nvml.NVML_ERROR_FUNCTION_NOT_FOUND}
    reading = await NvmlInventory(5, nvml).read()
    assert reading.processes == (Process(8, GPU0, 5, 0.0),)
    assert reading.gpus[0].health is Health.HEALTHY


async def test_an_unexpected_answer_is_an_inventory_error_and_the_next_is_read(nvml: FakeNvml) -> None:
    inventory = NvmlInventory(5, nvml)
    uuids, nvml.uuids = nvml.uuids, None  # type: ignore[assignment]
    for _ in range(2):
        with pytest.raises(InventoryError, match="was not understood"):
            await inventory.read()
    nvml.uuids = uuids
    assert len((await inventory.read()).gpus) == 2


async def test_a_missing_driver_is_reported_and_retried(nvml: FakeNvml) -> None:
    nvml.broken = {("init", 0): 9}
    inventory = NvmlInventory(5, nvml)
    with pytest.raises(InventoryError, match="is the NVIDIA driver installed"):
        await inventory.read()
    nvml.broken = {}
    assert len((await inventory.read()).gpus) == 2


async def test_a_gpu_without_a_process_list_does_not_count_as_empty(nvml: FakeNvml) -> None:
    nvml.broken = {("compute", 0): nvml.NVML_ERROR_NOT_SUPPORTED}
    reading = await NvmlInventory(5, nvml).read()
    assert reading.unread == {GPU0}
    assert reading.gpus[0].health is Health.HEALTHY


async def test_how_busy_gpus_and_processes_are_is_read_where_the_driver_says_it(nvml: FakeNvml) -> None:
    nvml.busy = [85, 100]
    nvml.processes = {("compute", 0): [SimpleNamespace(pid=pid, usedGpuMemory=5) for pid in (7, 8)]}
    nvml.samples = [
        SimpleNamespace(pid=7, timeStamp=10, smUtil=40),
        SimpleNamespace(pid=7, timeStamp=11, smUtil=60),
        SimpleNamespace(pid=8, timeStamp=11, smUtil=4000),
    ]
    inventory = NvmlInventory(5, nvml)
    reading = await inventory.read()
    assert reading.utilization == {GPU0: 0.85, GPU1: 1.0}
    assert [(each.pid, each.utilization) for each in reading.processes] == [(7, 0.5), (8, 0.0)]
    assert [each.utilization for each in (await inventory.read()).processes] == [0.0, 0.0], (
        "old samples are not reported again"
    )
    nvml.broken = {("utilization", 0): 3, ("process utilization", 0): 3}
    reading = await inventory.read()
    assert reading.utilization == {GPU1: 1.0}
    assert [each.utilization for each in reading.processes] == [None, None]


@pytest.mark.parametrize("step_s", [-3600, -0.5, 0.2, 2])
async def test_samples_next_to_a_step_of_the_clock_are_dropped(
    nvml: FakeNvml, monkeypatch: pytest.MonkeyPatch, step_s: float
) -> None:
    """After a step of the clock, a sample's time stamp may lie outside the turn in which the work ran."""
    second = 1_000_000
    nvml.processes = {("compute", 0): [SimpleNamespace(pid=7, usedGpuMemory=5)]}
    shift, wall = [0.0], time.time_ns
    monkeypatch.setattr(time, "time_ns", lambda: wall() + int(shift[0] * 1e9))
    inventory = NvmlInventory(5, nvml)

    def now() -> int:
        return time.time_ns() // 1000

    async def sampled(*samples: tuple[int, int]) -> float | None:
        nvml.samples = [SimpleNamespace(pid=7, timeStamp=at, smUtil=part) for at, part in samples]
        return (await inventory.read()).processes[0].utilization

    assert await sampled((now() - second, 40)) == 0.4
    before, shift[0] = now(), step_s
    assert await sampled((before, 40), (now(), 100)) == 0.0
    assert await sampled((now() + second // 2, 60)) == 0.6


async def until_xids(inventory: NvmlInventory, counted: int) -> Reading:
    async with asyncio.timeout(10):
        while True:
            reading = await inventory.read()
            if sum(sum(each.values()) for each in reading.xids.values()) == counted:
                return reading
            await asyncio.sleep(0.01)


@pytest.mark.promise("node-xid")
async def test_a_gpu_whose_driver_reports_a_fatal_xid_has_failed_and_no_other(nvml: FakeNvml) -> None:
    inventory = NvmlInventory(5, nvml)
    await inventory.read()
    nvml.events.put(SimpleNamespace(device=1, eventType=8, eventData=31))
    reading = await until_xids(inventory, 1)
    assert {gpu.health for gpu in reading.gpus} == {Health.HEALTHY}, "a program's page fault is not the GPU's"
    nvml.events.put(SimpleNamespace(device=1, eventType=8, eventData=79))
    reading = await until_xids(inventory, 2)
    assert [gpu.health for gpu in reading.gpus] == [Health.HEALTHY, Health.UNHEALTHY]
    assert "Xid 79" in reading.gpus[1].reason
    assert reading.xids == {GPU1: {31: 1, 79: 1}}


async def test_an_xid_of_a_gpu_that_is_lost_and_tells_its_uuid_no_more_is_counted(nvml: FakeNvml) -> None:
    inventory = NvmlInventory(5, nvml)
    await inventory.read()
    await asyncio.to_thread(nvml.listening.wait, 10)
    nvml.broken = {("uuid", 1): 15}
    nvml.events.put(SimpleNamespace(device=1, eventType=8, eventData=79))
    assert (await until_xids(inventory, 1)).xids == {GPU1: {79: 1}}
    nvml.broken = {}  # the GPU was reset; the administrator should now restart the node
    assert (await inventory.read()).gpus[1].health is Health.UNHEALTHY


def test_handles_of_the_real_module_are_the_same_if_they_point_to_the_same() -> None:
    opaque = type("opaque", (ctypes.Structure,), {})
    handles: list[Any] = [ctypes.cast(address, ctypes.POINTER(opaque)) for address in (4096, 4096, 8192)]
    one, same, another = handles
    assert handle_key(one) == handle_key(same) != handle_key(another)


@pytest.mark.promise("node-xid-stays", "install-continues")
async def test_a_gpu_that_failed_stays_failed_over_a_restart_of_the_agent_but_not_of_the_node(
    nvml: FakeNvml, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = tmp_path / "state" / "xids.json"
    inventory = NvmlInventory(5, nvml, xids_file=kept)
    await inventory.read()
    nvml.events.put(SimpleNamespace(device=1, eventType=8, eventData=79))
    await until_xids(inventory, 1)
    async with asyncio.timeout(10):
        while not kept.exists():  # noqa: ASYNC110 - another thread writes it
            await asyncio.sleep(0.01)
    reading = await NvmlInventory(5, nvml, xids_file=kept).read()
    assert [gpu.health for gpu in reading.gpus] == [Health.HEALTHY, Health.UNHEALTHY]
    assert "xids.json" in reading.gpus[1].reason
    monkeypatch.setattr("sharepod.agent.devices.xids.boot_id", lambda: "another start")
    reading = await NvmlInventory(5, nvml, xids_file=kept).read()
    assert {gpu.health for gpu in reading.gpus} == {Health.HEALTHY}
    kept.write_text("damaged")
    assert {gpu.health for gpu in (await NvmlInventory(5, nvml, xids_file=kept).read()).gpus} == {Health.HEALTHY}


@pytest.mark.promise("node-xid")
async def test_an_administrator_chooses_the_tolerated_xids(nvml: FakeNvml) -> None:
    inventory = NvmlInventory(5, nvml, xids_tolerated=(79,))
    await inventory.read()
    nvml.events.put(SimpleNamespace(device=0, eventType=8, eventData=79))
    assert (await until_xids(inventory, 1)).gpus[0].health is Health.HEALTHY


async def test_a_driver_that_loses_its_events_is_listened_to_again(
    nvml: FakeNvml, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sharepod.agent.devices.xids._AGAIN_S", 0.01)
    inventory = NvmlInventory(5, nvml)
    await inventory.read()
    nvml.events.put(NvmlError(999))
    nvml.events.put(SimpleNamespace(device=0, eventType=8, eventData=48))
    assert (await until_xids(inventory, 1)).gpus[0].health is Health.UNHEALTHY


async def test_gpus_without_events_are_judged_by_their_readings(nvml: FakeNvml) -> None:
    nvml.broken = {("events", 0): 3, ("events", 1): 3}
    inventory = NvmlInventory(5, nvml)
    assert {gpu.health for gpu in (await inventory.read()).gpus} == {Health.HEALTHY}


async def test_a_simulated_gpu_can_be_busy_fail_and_not_tell(tmp_path: Path) -> None:
    path = tmp_path / "inventory.yaml"
    more = f"busy: 0.5, xids: [13, 79], processesUnread: true, uuid: {GPU1}, index"
    path.write_text(FILE.replace(f"uuid: {GPU1}, index", more).replace("memory: 1Gi", "memory: 1Gi, busy: 0.25"))
    reading = await SimulatedInventory(path).read()
    assert reading.utilization == {GPU1: 0.5}
    assert reading.processes[0].utilization == 0.25
    assert reading.unread == {GPU1}
    assert reading.xids == {GPU1: {13: 1, 79: 1}}
    assert [gpu.health for gpu in reading.gpus] == [Health.HEALTHY, Health.UNHEALTHY]
    replace(path, FILE)
    assert (await SimulatedInventory(path).read()).gpus[1].health is Health.HEALTHY


@pytest.mark.skipif(os.path.exists("/dev/nvidiactl"), reason="there is a driver here")  # noqa: PTH110
async def test_the_real_module_without_a_driver_is_an_inventory_error() -> None:
    with pytest.raises(InventoryError, match="NVML does not start"):
        await NvmlInventory(30).read()
