"""Xid errors (the driver's reports of GPU faults), counted from the agent's first reading on.

Guarantees:
- Reported Xids outlive the agent, in a file: a restart of the agent does not make a GPU healthy.
- Reported Xids are dropped after a restart of the node, which resets its GPUs. They are also dropped at the agent's
  start if an administrator has removed the file.
- A GPU that supports no Xid events is judged by its readings only. This is logged once.
- An Xid counts even if the UUID of its GPU can no longer be read, as after the GPU has fallen off the bus.
- A driver that answers with errors is retried at intervals.

Xids are NVML events. Waiting for events blocks, so it has a thread of its own.
"""

from __future__ import annotations

import ctypes
import threading
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import structlog
from pydantic import BaseModel, ConfigDict, ValidationError

from sharepod.agent.state import files
from sharepod.agent.state.boot import boot_id

log = structlog.get_logger(__name__)

_WAIT_MS = 2000
"""Milliseconds of one wait for an event. `stop` takes effect within this time."""
_AGAIN_S = 5.0
"""Seconds from an error of the driver to the next attempt."""
_NO_EVENTS_AGAIN_S = 300.0
"""Seconds until GPUs without Xid events are tried again, because the driver may be replaced while the agent runs."""


class _XidsFile(BaseModel):
    """File of reported Xids."""

    model_config = ConfigDict(extra="ignore")
    boot: str
    """Boot id of the node at the time of the write. After another boot the file is ignored."""
    xids: dict[str, list[int]]
    """XIDs by GPU UUID."""


class XidListener:
    """Counter of the Xids of all GPUs. Call `listen` to start it."""

    def __init__(self, nvml: Any, path: Path | None = None) -> None:
        """Args:
        nvml: the module `pynvml`, initialised.
        path: file that keeps the Xids for the next agent; None: they are not kept.
        """
        self._path = path
        self._nvml = nvml
        self._lock = threading.Lock()
        self._counts: dict[str, Counter[int]] = {uuid: Counter(xids) for uuid, xids in self._load().items()}
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None
        self._deaf: set[str] = set()
        self._uuids: dict[object, str] = {}
        """UUID of each GPU with registered events, by its handle."""
        self._failing = False

    def listen(self) -> None:
        """Start the thread, unless it runs."""
        if self._thread is None:
            # a daemon thread, so that a call into a blocked driver does not keep the agent from exiting
            self._thread = threading.Thread(target=self._run, name="xids", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        """Stop the thread, within the time of one wait."""
        self._stopped.set()

    def counts(self) -> Mapping[str, Mapping[int, int]]:
        """Return the number of reports of each Xid, by GPU UUID."""
        with self._lock:
            return {uuid: dict(counts) for uuid, counts in self._counts.items()}

    # ---- in the listening thread

    def _run(self) -> None:
        while not self._stopped.is_set():
            try:
                self._follow()
            except Exception as error:
                if not self._failing:
                    log.warning("cannot wait for Xids, trying again", error=str(error))
                self._failing = True
            self._stopped.wait(_AGAIN_S)

    def _follow(self) -> None:
        """Count events until the driver fails. Return earlier, after a pause, if no GPU supports Xid events."""
        nvml = self._nvml
        events = nvml.nvmlEventSetCreate()
        try:
            if not self._register(events):
                self._stopped.wait(_NO_EVENTS_AGAIN_S)
                return
            self._failing = False
            while not self._stopped.is_set():
                try:
                    event = nvml.nvmlEventSetWait_v2(events, _WAIT_MS)
                except nvml.NVMLError as error:
                    if getattr(error, "value", None) == nvml.NVML_ERROR_TIMEOUT:
                        continue
                    raise
                if event.eventType == nvml.nvmlEventTypeXidCriticalError:
                    self._count(self._uuid_of(event.device), int(event.eventData))
        finally:
            nvml.nvmlEventSetFree(events)

    def _uuid_of(self, device: Any) -> str:
        try:
            return str(self._nvml.nvmlDeviceGetUUID(device))
        except self._nvml.NVMLError:
            if handle_key(device) not in self._uuids:
                raise
            return self._uuids[handle_key(device)]

    def _register(self, events: Any) -> int:
        """Register all GPUs for Xid events. Return the number of GPUs that support them."""
        nvml, heard = self._nvml, 0
        for index in range(int(nvml.nvmlDeviceGetCount())):
            try:
                handle = nvml.nvmlDeviceGetHandleByIndex(index)
                uuid = str(nvml.nvmlDeviceGetUUID(handle))
            except nvml.NVMLError:
                continue
            try:
                nvml.nvmlDeviceRegisterEvents(handle, nvml.nvmlEventTypeXidCriticalError, events)
                self._uuids[handle_key(handle)] = uuid
                heard += 1
            except nvml.NVMLError as error:
                if uuid not in self._deaf:
                    log.info("GPU reports no Xids; it is judged by its readings only", gpu=uuid, error=str(error))
                    self._deaf.add(uuid)
        return heard

    def _count(self, uuid: str, xid: int) -> None:
        log.error("driver reports an Xid", gpu=uuid, xid=xid)
        with self._lock:
            counts = self._counts.setdefault(uuid, Counter())
            counts[xid] += 1
            new = counts[xid] == 1
        if new:
            self._save()

    # ---- the file

    def _load(self) -> dict[str, list[int]]:
        if self._path is None:
            return {}
        try:
            kept = _XidsFile.model_validate_json(self._path.read_bytes())
        except FileNotFoundError:
            return {}
        except (OSError, ValidationError) as error:
            log.warning("cannot read the file of reported Xids", file=str(self._path), error=str(error))
            return {}
        if kept.boot != boot_id():
            return {}
        for uuid, xids in kept.xids.items():
            log.warning("Xids were reported before the agent started", gpu=uuid, xids=xids, file=str(self._path))
        return kept.xids

    def _save(self) -> None:
        if self._path is None:
            return
        kept = _XidsFile(boot=boot_id(), xids={uuid: sorted(xids) for uuid, xids in self.counts().items()})
        try:
            files.replace(self._path, kept.model_dump_json().encode(), durable=False)
        except OSError as error:
            log.warning("cannot write the file of reported Xids", file=str(self._path), error=str(error))


def handle_key(handle: Any) -> object:
    """Return a key that is equal for all handles of one GPU. A handle of the real `pynvml` is a pointer in a new object
    each time."""
    return handle if isinstance(handle, int) else ctypes.cast(handle, ctypes.c_void_p).value
