"""Inventory from NVML, the management library of NVIDIA's driver.

Guarantees:
- Readings run in a thread, one at a time. A failing GPU can block any call of NVML, and the event loop must not wait
  for it.
- If a reading exceeds its timeout, the last reading is returned again, with every GPU unhealthy, until the thread has
  finished.
- Otherwise the returned reading began after it was requested. A reading that the driver delayed beyond its timeout is
  discarded.
- A failed call about one GPU makes that GPU unhealthy and no other.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

from sharepod.api.gpunode import Gpu, Health, Link
from sharepod.api.objects import MAX_GPUS

from .inventory import XIDS_TOLERATED, InventoryError, Process, Reading, UtilizationSample, failure, is_gpu_uuid
from .xids import XidListener

_SAMPLE_US = 1_000_000
"""Longest time that NVML's utilization samples cover, in microseconds."""
_STEP_S = 0.02
"""Change of the difference between wall and monotonic time, in seconds, that counts as a step of the clock: more than
NTP slews in 15 s."""
_SYS_PCI = Path("/sys/bus/pci/devices")
"""sysfs folder of the PCI devices, which has each device's NUMA node."""


class NvmlInventory:
    """Inventory of the real GPUs."""

    simulated = False

    def __init__(
        self,
        timeout_s: float,
        nvml: Any = None,
        *,
        xids_tolerated: Collection[int] = XIDS_TOLERATED,
        xids_file: Path | None = None,
    ) -> None:
        """Args:
        timeout_s: longest time for one reading, in seconds.
        nvml: the module `pynvml` or a double of it; None: `pynvml`.
        xids_tolerated: Xids after which a GPU still counts as healthy.
        xids_file: file that keeps reported Xids for the next agent; None: they are not kept.
        """
        self._timeout_s = timeout_s
        self._nvml = nvml
        self._xids_tolerated = xids_tolerated
        self._xids_file = xids_file
        self._xids: XidListener | None = None
        self._sampled: dict[str, int] = {}
        self._offsets: dict[str, float] = {}
        """Wall time minus monotonic time at the last reading of samples, in seconds, by GPU UUID."""
        self._running: Future[Reading] | None = None
        self._begun = 0
        """Number of readings that were begun so far."""
        self._initialised = False
        self._driver = ""
        self._last: Reading | None = None
        self._last_number = 0
        self._links: dict[frozenset[str], str] = {}

    async def read(self) -> Reading:
        """Return a reading of GPUs and processes that begins after this call. Raise `InventoryError` if there is no
        driver, or if it has never answered.

        A running reading began too early for this, so it is awaited. Then one new reading is made for all waiting
        callers.
        """
        needed = self._begun + 1
        try:
            async with asyncio.timeout(self._timeout_s):
                while self._last is None or self._last_number < needed:
                    running, number = self._begin_or_join()
                    try:
                        reading = await asyncio.shield(asyncio.wrap_future(running))
                    except InventoryError:
                        self._forget(running)
                        if number >= needed:
                            raise
                        continue
                    if self._forget(running):
                        self._last, self._last_number = reading, number
                return self._last
        except TimeoutError:
            if self._last is None:
                raise InventoryError(f"NVML has not answered within {self._timeout_s:g} s; see `dmesg`") from None
            return _unhealthy(self._last, f"NVML does not answer within {self._timeout_s:g} s")

    def _begin_or_join(self) -> tuple[Future[Reading], int]:
        """Return the running reading, or begin a new one. Also return its number."""
        if self._running is None:
            self._running = Future()
            self._begun += 1
            # a daemon thread, so that a call into a blocked driver does not keep the agent from exiting
            threading.Thread(target=self._run, args=(self._running,), name="nvml", daemon=True).start()
        return self._running, self._begun

    def _forget(self, running: Future[Reading]) -> bool:
        """Forget a finished reading, so that the next caller begins a new one. Return False if it was already
        forgotten."""
        if self._running is not running:
            return False
        self._running = None
        return True

    # ---- in the reading thread

    def _run(self, answer: Future[Reading]) -> None:
        try:
            answer.set_result(self._read())
        except InventoryError as error:
            answer.set_exception(error)
        except BaseException as error:
            answer.set_exception(InventoryError(f"NVML's answer was not understood: {error!r}"))

    def _read(self) -> Reading:
        nvml = self._open()
        try:
            count = int(nvml.nvmlDeviceGetCount())
        except nvml.NVMLError as error:
            self._initialised = False
            raise InventoryError(f"cannot count the GPUs: {error}") from None
        if count > MAX_GPUS:
            raise InventoryError(f"this node has {count} GPUs; at most {MAX_GPUS} are supported")
        handles: dict[str, Any] = {}
        gpus: list[Gpu] = []
        processes: list[Process] = []
        unread: set[str] = set()
        utilization: dict[str, float] = {}
        lost: list[tuple[int, str]] = []
        xids = self._listener(nvml).counts()
        for index in range(count):
            try:
                handle = nvml.nvmlDeviceGetHandleByIndex(index)
                uuid = str(nvml.nvmlDeviceGetUUID(handle))
            except nvml.NVMLError as error:
                lost.append((index, str(error)))
                continue
            if not is_gpu_uuid(uuid):
                continue
            handles[uuid] = handle
            gpu, found = self._read_gpu(nvml, index, uuid, handle)
            failed = failure(xids.get(uuid, {}), self._xids_tolerated)
            gpus.append(gpu if failed is None else _sick(gpu, failed))
            if found is None:
                unread.add(uuid)
            else:
                processes.extend(found)
            whole = _utilization(nvml, handle)
            if whole is not None:
                utilization[uuid] = whole
        for gpu in self._lost(lost, handles):
            gpus.append(gpu)
            unread.add(gpu.uuid)
        gpus.sort(key=lambda gpu: gpu.index)
        links = {uuid: self._links_of(nvml, uuid, handles) for uuid in handles}
        return Reading(
            gpus=tuple(gpu.model_copy(update={"links": links.get(gpu.uuid, ())}) for gpu in gpus),
            processes=tuple(processes),
            unread=frozenset(unread),
            exhaustive=True,
            utilization=utilization,
            xids=xids,
            driver=self._driver,
        )

    def _open(self) -> Any:
        if self._nvml is None:
            import pynvml  # importing pynvml loads nothing of the driver; nvmlInit does

            self._nvml = pynvml
        if not self._initialised:
            try:
                self._nvml.nvmlInit()
            except self._nvml.NVMLError as error:
                raise InventoryError(
                    f"NVML does not start: {error}; is the NVIDIA driver installed, and its library in the container "
                    "(runtimeClassName nvidia, NVIDIA_DRIVER_CAPABILITIES=utility)?"
                ) from None
            self._initialised = True
            self._driver = _driver(self._nvml)
        return self._nvml

    def _listener(self, nvml: Any) -> XidListener:
        if self._xids is None:
            self._xids = XidListener(nvml, self._xids_file)
            self._xids.listen()
        return self._xids

    def _lost(self, lost: Collection[tuple[int, str]], read: Collection[str]) -> Iterator[Gpu]:
        """Yield the GPUs whose UUIDs can no longer be read: in their last known state, but unhealthy. A GPU that was
        never read is left out.

        Args:
            lost: (index, reason) of each GPU that cannot be read.
            read: UUIDs of the GPUs that were read. Needed because the driver may have renumbered GPUs.
        """
        gpus = self._last.gpus if self._last is not None else ()
        known = {gpu.index: gpu for gpu in gpus if gpu.uuid not in read}
        for index, reason in sorted(lost, key=lambda each: each[0] not in known):
            gpu = known.pop(index if index in known else min(known), None) if known else None
            if gpu is not None:
                yield _sick(gpu.model_copy(update={"index": index}), reason)

    def _read_gpu(self, nvml: Any, index: int, uuid: str, handle: Any) -> tuple[Gpu, list[Process] | None]:
        """Return a GPU and the processes on it; None in place of processes that cannot be read."""
        troubles: list[str] = []

        def ask(what: str, call: Callable[[], Any], default: Any) -> Any:
            try:
                return call()
            except nvml.NVMLError as error:
                if getattr(error, "value", None) != nvml.NVML_ERROR_NOT_SUPPORTED:
                    troubles.append(f"cannot read {what}: {error}")
                return default

        def capacity() -> int:
            memory = nvml.nvmlDeviceGetMemoryInfo(handle, version=nvml.nvmlMemory_v2)
            return int(memory.total) - int(memory.reserved)

        model = str(ask("its name", lambda: nvml.nvmlDeviceGetName(handle), "unknown"))
        memory = int(ask("its memory", capacity, 0))
        if memory <= 0 and not troubles:
            troubles.append("the driver does not report its memory")
        mig = ask("its MIG mode", lambda: nvml.nvmlDeviceGetMigMode(handle)[0], 0)
        remapping = ask("its remapped rows", lambda: nvml.nvmlDeviceGetRemappedRows(handle), None)
        if remapping is not None and remapping[3]:
            troubles.append("remapping of memory rows has failed; the GPU needs service")
        found: dict[int, int] = {}
        complete = True
        for kind in ("Compute", "Graphics", "MPSCompute"):
            before = len(troubles)
            listed = ask("its processes", lambda kind=kind: _running(nvml, kind, handle), None)  # type: ignore[misc]
            # Not every GPU lists graphics or MPS processes. A GPU without compute processes lists none.
            complete = complete and len(troubles) == before and (listed is not None or kind != "Compute")
            for process in listed or ():
                used = int(process.usedGpuMemory or 0)
                found[int(process.pid)] = max(found.get(int(process.pid), 0), used)
        gpu = Gpu(
            uuid=uuid,
            index=index,
            model=model,
            memory=max(0, memory),
            numa_node=self._numa_node(nvml, handle),
            shareable=not mig,
            reason="MIG is on; a GPU in MIG mode is not shared" if mig else "",
        )
        if troubles:
            gpu = _sick(gpu, "; ".join(dict.fromkeys(troubles)))
        if not complete:
            return gpu, None
        sampled = self._samples_of_processes(nvml, uuid, handle)
        processes: list[Process] = []
        for pid, used in sorted(found.items()):
            samples = () if sampled is None else tuple(sampled.get(pid, ()))
            mean = sum(each.part for each in samples) / len(samples) if samples else 0.0
            processes.append(Process(pid, uuid, used, None if sampled is None else mean, samples))
        return gpu, processes

    def _samples_of_processes(self, nvml: Any, uuid: str, handle: Any) -> dict[int, list[UtilizationSample]] | None:
        """Return the samples of utilization since the last call, by pid. A pid without samples was idle. None if the
        driver does not report samples."""
        now, monotonic = time.time_ns() // 1000, time.monotonic()
        since, until = self._sampled.get(uuid, 0), now + _SAMPLE_US
        offset = now / 1e6 - monotonic
        stepped = abs(offset - self._offsets.setdefault(uuid, offset)) > _STEP_S
        self._offsets[uuid] = offset
        if stepped:  # the wall clock was stepped, so time stamps of some samples cannot be converted
            self._sampled[uuid] = now
            return {}
        try:
            samples = nvml.nvmlDeviceGetProcessUtilization(handle, since)
        except nvml.NVMLError as error:
            value = getattr(error, "value", None)
            return {} if value in (nvml.NVML_SUCCESS, nvml.NVML_ERROR_NOT_FOUND) else None
        by_pid: dict[int, dict[int, float]] = {}
        newest = since
        for sample in samples:
            # samples outside this interval are old; utilization above 100 % is invalid
            if since < int(sample.timeStamp) < until and int(sample.smUtil) <= 100:
                by_pid.setdefault(int(sample.pid), {})[int(sample.timeStamp)] = int(sample.smUtil) / 100
                newest = max(newest, int(sample.timeStamp))
        self._sampled[uuid] = newest
        return {
            pid: [UtilizationSample(monotonic - (now - stamp) / 1e6, part) for stamp, part in sorted(each.items())]
            for pid, each in by_pid.items()
        }

    @staticmethod
    def _numa_node(nvml: Any, handle: Any) -> int | None:
        """Return the GPU's NUMA node from sysfs, which has it on every platform; None if unknown (-1 in sysfs)."""
        try:
            bus_id = nvml.nvmlDeviceGetPciInfo(handle).busId
            name = (bus_id.decode() if isinstance(bus_id, bytes) else str(bus_id)).lower()
            domain, rest = name.split(":", 1)
            node = int((_SYS_PCI / f"{domain[-4:]}:{rest}" / "numa_node").read_text())
        except (nvml.NVMLError, OSError, ValueError):
            return None
        return node if node >= 0 else None

    def _links_of(self, nvml: Any, uuid: str, handles: dict[str, Any]) -> tuple[Link, ...]:
        links = []
        for other in handles:
            if other == uuid:
                continue
            pair = frozenset((uuid, other))
            if pair not in self._links:
                kind = _kind_of(nvml, handles[uuid], handles[other])
                if kind is not None:
                    self._links[pair] = kind
            if pair in self._links:
                links.append(Link(uuid=other, kind=self._links[pair]))
        return tuple(links)


def _running(nvml: Any, kind: str, handle: Any) -> list[Any]:
    """Return the processes of one kind (`Compute`, `Graphics`, `MPSCompute`). On older drivers, use the older
    function."""
    try:
        return list(getattr(nvml, f"nvmlDeviceGet{kind}RunningProcesses_v3")(handle))
    except nvml.NVMLError as error:
        if getattr(error, "value", None) != nvml.NVML_ERROR_FUNCTION_NOT_FOUND:
            raise
    return list(getattr(nvml, f"nvmlDeviceGet{kind}RunningProcesses_v2")(handle))


def _utilization(nvml: Any, handle: Any) -> float | None:
    """Return the part of the last sample period in which any kernel ran on a GPU. None if the driver does not report
    it."""
    try:
        return min(100, max(0, int(nvml.nvmlDeviceGetUtilizationRates(handle).gpu))) / 100
    except nvml.NVMLError:
        return None


def _driver(nvml: Any) -> str:
    try:
        version = nvml.nvmlSystemGetDriverVersion()
    except nvml.NVMLError:
        return ""
    return version.decode() if isinstance(version, bytes) else str(version)


def _kind_of(nvml: Any, one: Any, other: Any) -> str | None:
    """Return how two GPUs are connected, by the nearest path (as `nvidia-smi topo -m` names it); None if unknown."""
    try:
        if nvml.nvmlDeviceGetP2PStatus(one, other, nvml.NVML_P2P_CAPS_INDEX_NVLINK) == nvml.NVML_P2P_STATUS_OK:
            return "NVLINK"
    except nvml.NVMLError:
        pass
    kinds = {
        nvml.NVML_TOPOLOGY_INTERNAL: "PIX",
        nvml.NVML_TOPOLOGY_SINGLE: "PIX",
        nvml.NVML_TOPOLOGY_MULTIPLE: "PXB",
        nvml.NVML_TOPOLOGY_HOSTBRIDGE: "PHB",
        nvml.NVML_TOPOLOGY_NODE: "NODE",
        nvml.NVML_TOPOLOGY_SYSTEM: "SYS",
    }
    try:
        return kinds.get(nvml.nvmlDeviceGetTopologyCommonAncestor(one, other))
    except nvml.NVMLError:
        return None


def _sick(gpu: Gpu, reason: str) -> Gpu:
    return gpu.model_copy(update={"health": Health.UNHEALTHY, "reason": reason})


def _unhealthy(reading: Reading, reason: str) -> Reading:
    return replace(reading, gpus=tuple(_sick(gpu, reason) for gpu in reading.gpus), fresh=False, utilization={})
