"""The Xids that the driver reports, counted from the first reading on.

What was reported outlives the agent, in a file: a GPU that failed has not become sound by an upgrade. It is forgotten
with a restart of the node, which resets GPUs, and where an administrator who reset one removes the file.

They come as events of NVML, which are waited for in a thread of their own: waiting for them blocks. A GPU that has no
such events is judged by its readings alone, and the log says so once. A driver that answers with errors is asked again,
at intervals.
"""

from __future__ import annotations

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
_AGAIN_S = 5.0


class _XidsFile(BaseModel):
    """`boot`: the start of the node that they are of. `xids`: by UUID."""

    model_config = ConfigDict(extra="ignore")
    boot: str
    xids: dict[str, list[int]]


class XidListener:
    """`nvml`: the module `pynvml`, initialised. `listen` once; `counts` whenever it is asked. `kept`: the file; None:
    nothing outlives the agent."""

    def __init__(self, nvml: Any, kept: Path | None = None) -> None:
        self._kept = kept
        self._nvml = nvml
        self._lock = threading.Lock()
        self._counts: dict[str, Counter[int]] = {uuid: Counter(xids) for uuid, xids in self._load().items()}
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None
        self._deaf: set[str] = set()
        self._failing = False

    def listen(self) -> None:
        """Begins, if it has not."""
        if self._thread is None:
            # A daemon thread, so that a call into a sick driver cannot keep the agent from ending.
            self._thread = threading.Thread(target=self._run, name="xids", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        """Lets the thread end, within the time that one wait takes."""
        self._stopped.set()

    def counts(self) -> Mapping[str, Mapping[int, int]]:
        """By UUID, how often each Xid was reported."""
        with self._lock:
            return {uuid: dict(counts) for uuid, counts in self._counts.items()}

    # ---- in the thread

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
        """One set of events, until the driver fails. Returns where no GPU has any."""
        nvml = self._nvml
        events = nvml.nvmlEventSetCreate()
        try:
            if not self._register(events):
                self._stopped.wait(60 * _AGAIN_S)
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
                    self._count(str(nvml.nvmlDeviceGetUUID(event.device)), int(event.eventData))
        finally:
            nvml.nvmlEventSetFree(events)

    def _register(self, events: Any) -> int:
        """How many GPUs have such events."""
        nvml, heard = self._nvml, 0
        for index in range(int(nvml.nvmlDeviceGetCount())):
            try:
                handle = nvml.nvmlDeviceGetHandleByIndex(index)
                uuid = str(nvml.nvmlDeviceGetUUID(handle))
            except nvml.NVMLError:
                continue
            try:
                nvml.nvmlDeviceRegisterEvents(handle, nvml.nvmlEventTypeXidCriticalError, events)
                heard += 1
            except nvml.NVMLError as error:
                if uuid not in self._deaf:
                    log.info("this GPU reports no Xids; it is judged by its readings alone", gpu=uuid, error=str(error))
                    self._deaf.add(uuid)
        return heard

    def _count(self, uuid: str, xid: int) -> None:
        log.error("the driver reports an Xid", gpu=uuid, xid=xid)
        with self._lock:
            counts = self._counts.setdefault(uuid, Counter())
            counts[xid] += 1
            new = counts[xid] == 1
        if new:
            self._save()

    # ---- the file

    def _load(self) -> dict[str, list[int]]:
        if self._kept is None:
            return {}
        try:
            kept = _XidsFile.model_validate_json(self._kept.read_bytes())
        except FileNotFoundError:
            return {}
        except (OSError, ValidationError) as error:
            log.warning("cannot read which Xids were reported before", file=str(self._kept), error=str(error))
            return {}
        if kept.boot != boot_id():
            return {}
        for uuid, xids in kept.xids.items():
            log.warning("reported before the agent was started", gpu=uuid, xids=xids, file=str(self._kept))
        return kept.xids

    def _save(self) -> None:
        if self._kept is None:
            return
        kept = _XidsFile(boot=boot_id(), xids={uuid: sorted(xids) for uuid, xids in self.counts().items()})
        try:
            files.replace(self._kept, kept.model_dump_json().encode())
        except OSError as error:
            log.warning("cannot keep which Xids were reported", file=str(self._kept), error=str(error))
