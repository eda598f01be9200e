"""What readings of the inventory say of the tenants: whose the processes are, how busy, what is found out of it.

A reading that is an earlier one repeated says nothing, and a GPU whose processes cannot be read shows nobody gone.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from pathlib import Path

import structlog
from pydantic import BaseModel, ConfigDict, ValidationError

from sharepod.agent.devices.context_overhead import ContextOverhead
from sharepod.agent.devices.inventory import Process, Reading
from sharepod.agent.findings.attribution import Attribution, attribute
from sharepod.agent.findings.rules import FindingRules, FindingThresholds
from sharepod.agent.findings.utilization import Key, UtilizationMeter
from sharepod.agent.state import files
from sharepod.api.gpunode import Finding, Mode, TenantState
from sharepod.timeshare import TimeUsage

from .entry import Entry
from .served import ServedTenant

log = structlog.get_logger(__name__)

Residue = Callable[[str], str | None]
OwnerOf = Callable[[int], str | None]


class _KeptFindings(BaseModel):
    """What stood of each tenant, by id."""

    model_config = ConfigDict(extra="ignore")
    findings: dict[str, tuple[Finding, ...]] = {}


class Observer:
    """What it learns is kept in files of `state_dir`. `usage`: token time of a tenant that is served."""

    def __init__(self, state_dir: Path, config: FindingThresholds, usage: Callable[[str], TimeUsage]) -> None:
        self.busy = UtilizationMeter()
        """How long tenants and GPUs were busy, as the driver says."""
        self._usage = usage
        self._contexts = ContextOverhead(state_dir / "contexts.json")
        self._config = config
        self._findings_file = state_dir / "findings.json"
        self._findings: dict[str, tuple[Finding, ...]] = {}
        self._models: dict[str, tuple[str, str]] = {}
        """By UUID, model and driver, as last read."""
        self._saving: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Reads what an earlier agent learnt and found out."""
        await asyncio.to_thread(self._contexts.load)
        await asyncio.to_thread(self._load_findings)

    async def close(self) -> None:
        """Waits for what is being written."""
        if self._saving is not None:
            await asyncio.gather(self._saving, return_exceptions=True)

    def watch_of(self, tenant_id: str) -> FindingRules:
        """A tenant's watch, which goes on with what an earlier agent found out."""
        return FindingRules(self._config, self._findings.get(tenant_id, ()))

    def know_models(self, reading: Reading) -> None:
        """What GPUs there are."""
        self._models = {gpu.uuid: (gpu.model, reading.driver) for gpu in reading.gpus}

    def context_kib(self, uuid: str) -> int:
        """What a process's context takes of this GPU's memory; 0 while that is not known."""
        return self._contexts.kib(*self._models[uuid]) if uuid in self._models else 0

    def observe(
        self, entries: Mapping[str, Entry], reading: Reading, *, residue: Residue, owner_of: OwnerOf
    ) -> Attribution:
        """Takes note of what a reading says about the tenants, by id, and says whose the processes are."""
        attribution = attribute(reading, lambda process: _owner(entries, process, owner_of))
        for entry in entries.values():
            entry.seen = attribution.of(entry.row.id)
        if reading.fresh:
            now = asyncio.get_running_loop().time()
            self._observe_busy(now, entries, reading)
            for entry in entries.values():
                if entry.serving is not None:
                    entry.serving.observe(entry.seen.memory, unread=reading.unread, exhaustive=reading.exhaustive)
                    self._watch(now, entry, entry.serving, reading)
                _judge(entry, residue, reading.unread)
            self._learn_contexts(entries, reading)
            self._keep({entry.row.id: entry.watch.findings for entry in entries.values() if entry.watch.findings})
        return attribution

    def _learn_contexts(self, entries: Mapping[str, Entry], reading: Reading) -> None:
        self.know_models(reading)
        for gpu in reading.gpus:
            if gpu.uuid in reading.unread:
                continue
            samples: dict[int, int] = {}
            for entry in entries.values():
                if entry.served is not None and gpu.uuid in entry.row.gpus and gpu.uuid in entry.seen.memory:
                    samples |= entry.served.beyond_credits(gpu.uuid, entry.seen.memory[gpu.uuid])
            self._contexts.observe(gpu.model, reading.driver, gpu.uuid, samples)

    def _keep(self, findings: dict[str, tuple[Finding, ...]]) -> None:
        """Writes what is new for the next agent."""
        news = findings != self._findings
        if (news or self._contexts.changed) and (self._saving is None or self._saving.done()):
            self._findings = findings
            self._saving = asyncio.create_task(self._save(findings=news), name="save-observations")

    async def _save(self, *, findings: bool) -> None:
        try:
            if self._contexts.changed:
                await asyncio.to_thread(self._contexts.save)
            if findings:
                await asyncio.to_thread(self._save_findings, _KeptFindings(findings=self._findings))
        except OSError as error:
            log.warning("cannot keep what was found out for the next agent", error=str(error))

    def _save_findings(self, kept: _KeptFindings) -> None:
        files.replace(self._findings_file, kept.model_dump_json().encode())

    def _load_findings(self) -> None:
        try:
            self._findings = _KeptFindings.model_validate_json(self._findings_file.read_bytes()).findings
        except (OSError, ValidationError):
            self._findings = {}

    def _observe_busy(self, now: float, entries: Mapping[str, Entry], reading: Reading) -> None:
        busy: dict[Key, float] = {("", uuid): part for uuid, part in reading.utilization.items()}
        kept: list[Key] = [("", gpu.uuid) for gpu in reading.gpus]
        for tenant_id, entry in entries.items():
            for uuid in entry.row.gpus:
                part = reading.utilization.get(uuid)  # an Exclusive tenant's is the GPU's
                if entry.row.mode is Mode.SHARED:
                    there = uuid in entry.seen.memory
                    part = entry.seen.utilization.get(uuid) if there else None if uuid in reading.unread else 0.0
                if part is not None:
                    busy[tenant_id, uuid] = part
                kept.append((tenant_id, uuid))
        self.busy.observe(now, busy, kept)

    def _watch(self, now: float, entry: Entry, served: ServedTenant, reading: Reading) -> None:
        row, usage = entry.row, self._usage(entry.row.id)
        entry.watch.observe_unhooked(now, entry.seen.pids - served.hooked)
        entry.watch.observe_unread(reading.unread.intersection(row.gpus))
        told = {
            uuid: seconds
            for uuid in row.gpus
            if self.busy.ratio((row.id, uuid)) is not None
            and (seconds := self.busy.seconds((row.id, uuid))) is not None
        }
        entry.watch.observe_time(now, told, usage.held_ns / 1e9)
        entry.watch.observe_memory(now, served.memory.gaps())
        entry.watch.observe_preemptions(now, usage.preemptions)


def _owner(entries: Mapping[str, Entry], process: Process, owner_of: OwnerOf) -> str | None:
    for tenant_id, entry in entries.items():
        if entry.served is not None and process.pid in entry.served.processes:
            return tenant_id
    owner = owner_of(process.pid)
    if owner is not None:
        return owner
    for tenant_id, entry in entries.items():
        if entry.row.mode is Mode.EXCLUSIVE and process.uuid in entry.row.gpus:
            return tenant_id
    return None


def _judge(entry: Entry, residue: Residue, unread: frozenset[str]) -> None:
    """Whether a tenant that is being released has left nothing behind. Once it has, it stays so."""
    if entry.row.state is not TenantState.RELEASING or entry.drained:
        return
    clients = len(entry.served.processes) if entry.served is not None else 0
    left = f"{clients} of its processes run" if clients else None
    if entry.seen.pids:
        left = f"process {min(entry.seen.pids)} is on its GPU"
    blind = sorted(unread.intersection(entry.row.gpus))
    if left is None and blind:
        left = f"the processes on {', '.join(blind)} cannot be read"
    left = left or residue(entry.row.id)
    if left is None:
        entry.drained = True
        log.info("tenant is drained", tenant=entry.row.id)
    elif left != entry.left_behind:
        log.info("tenant is not drained yet", tenant=entry.row.id, left=left)
    entry.left_behind = left
