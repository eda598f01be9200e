"""Observer of the tenants, from each reading of the GPUs: attributes processes, feeds findings, and decides when a
tenant is drained.

Guarantees:
- A reading that repeats an earlier one (`fresh` is False) changes no finding and drains no tenant.
- A GPU whose processes cannot be read counts as possibly in use, so no tenant of that GPU counts as drained.
- Findings survive a restart of the agent. They end with their tenant's run.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Generator, Mapping, Set
from dataclasses import dataclass, field

import structlog
from pydantic import BaseModel, ConfigDict, ValidationError

from sharepod.agent.devices.context_overhead import ContextOverhead
from sharepod.agent.devices.inventory import Reading
from sharepod.agent.findings.attribution import Attribution, attribute
from sharepod.agent.findings.beyond_turns import Beyond, BeyondTurnsMeter, TurnsOfTenant
from sharepod.agent.findings.offenders import offenders
from sharepod.agent.findings.rules import FindingRules, FindingThresholds
from sharepod.agent.findings.surcharge import SurchargeMeter
from sharepod.agent.findings.utilization import Key, UtilizationMeter
from sharepod.agent.state.files import KeptFiles
from sharepod.api.gpunode import Finding, FindingReason, MemoryIsolation, Mode, TenantState
from sharepod.timeshare import TimeUsage, TurnSpans

from .entry import Entry, pod_of
from .process_end import EndProcess, end_here
from .served import ServedTenant

FINDINGS_FILE = "findings.json"
_AT_ONCE = 2
"""Tenants that are evaluated before the observer yields to the loop. Each takes some 0.1 ms (benchmarks/handoff.py),
and 0.3 ms more if a sample shows it busy."""

log = structlog.get_logger(__name__)

Residue = Callable[[str], str | None]
"""Function: tenant id -> what remains of the tenant beyond its connections, as text (a published volume, processes in
its cgroup), or None. It must be quick: no I/O that can hang."""

OwnerOf = Callable[[int], str | None]
"""Function: pid (in the agent's PID namespace) -> id of the tenant in whose pod the process runs, or None."""

Replaced = Callable[[str, Set[int], Set[int]], Mapping[int, str]]
"""Function of a tenant id, the pids of its processes on its GPUs, and the subset whose connection came from the hook.
Returns, by pid, evidence that its hook was replaced. Quick: no I/O that can hang."""


def nothing_replaced(tenant_id: str, pids: Set[int], hooked: Set[int]) -> Mapping[int, str]:
    """Return no process, for an agent that mounts no hook into its tenants."""
    return {}


class _KeptFindings(BaseModel):
    """Content of the file `findings.json`: present findings of each tenant, by tenant id."""

    model_config = ConfigDict(extra="ignore")
    findings: dict[str, tuple[Finding, ...]] = {}


@dataclass
class _TimeMeters:
    """Meters of one tenant's busy time on one GPU, compared with its turns."""

    beyond_turns: BeyondTurnsMeter = field(default_factory=BeyondTurnsMeter)
    surcharge: SurchargeMeter = field(default_factory=SurchargeMeter)


class Observer:
    """Observer of all tenants of a node.

    Args:
        files: Files for the next agent; this class stores `contexts.json` and `findings.json`.
        thresholds: Thresholds of the findings.
        usage: Returns the token time of a served tenant, by tenant id.
        turns: Returns the turns of a served tenant in the last seconds, by tenant id.
        surcharge: Called with a tenant's id and the nanoseconds for which its kernels ran beyond its charged time.
        end_process: Kills a process of a tenant.
    """

    def __init__(
        self,
        files: KeptFiles,
        thresholds: FindingThresholds,
        usage: Callable[[str], TimeUsage],
        turns: Callable[[str], TurnSpans],
        surcharge: Callable[[str, int], None],
        end_process: EndProcess = end_here,
    ) -> None:
        self.utilization = UtilizationMeter()
        """Utilization by the driver, for each (tenant id, GPU UUID). An empty tenant id stands for the whole GPU."""
        self.killed: Counter[FindingReason] = Counter()
        """Number of killed processes, by the finding that was the cause."""
        self._usage = usage
        self._turns = turns
        self._surcharge = surcharge
        self._end_process = end_process
        self._time: dict[Key, _TimeMeters] = {}
        self._contexts = ContextOverhead(files)
        self._thresholds = thresholds
        self._files = files
        self._findings: dict[str, tuple[Finding, ...]] = {}
        self._resumed: dict[str, tuple[Finding, ...]] = {}
        """Findings of an earlier agent, of tenants that this agent has not entered yet."""
        self._models: dict[str, tuple[str, str]] = {}
        """(model, driver version) by GPU UUID, from the last reading."""
        self._saving: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Read an earlier agent's findings and estimates of context sizes."""
        await asyncio.to_thread(self._contexts.load)
        await asyncio.to_thread(self._load_findings)

    async def close(self) -> None:
        """Wait for a running write."""
        if self._saving is not None:
            await asyncio.gather(self._saving, return_exceptions=True)

    def rules_of(self, tenant_id: str) -> FindingRules:
        """Return new rules of findings for a tenant. A tenant's first rules start with an earlier agent's findings."""
        return FindingRules(self._thresholds, self._resumed.pop(tenant_id, ()))

    def set_models(self, reading: Reading) -> None:
        """Set the GPUs' models from a reading."""
        self._models = {gpu.uuid: (gpu.model, reading.driver) for gpu in reading.gpus}

    def context_kib(self, uuid: str) -> int:
        """Return the KiB that a process's CUDA context takes on a GPU; 0 while unknown."""
        return self._contexts.kib(*self._models[uuid]) if uuid in self._models else 0

    def observe(
        self,
        present: Callable[[], Mapping[str, Entry]],
        reading: Reading,
        *,
        residue: Residue,
        owner_of: OwnerOf,
        replaced: Replaced = nothing_replaced,
    ) -> Generator[None, None, Attribution]:
        """Evaluate a reading in steps: store each tenant's part in its entry. Return the attribution of all processes:
        by connection, else by pod, else by an Exclusive tenant's GPU.

        Args:
            present: Returns the current entries, which may change between two steps.
            residue: See `Residue`.
            owner_of: See `OwnerOf`.
            replaced: See `Replaced`.
        """
        entries = present()
        clients = {
            pid: tenant_id
            # in reverse order, so that the first tenant wins if a process has connected to several
            for tenant_id, entry in reversed(list(entries.items()))
            if entry.served is not None
            for pid in entry.served.processes.pids
        }
        exclusive = {
            uuid: tenant_id
            for tenant_id, entry in reversed(list(entries.items()))
            if entry.row.mode is Mode.EXCLUSIVE
            for uuid in entry.row.gpus
        }
        attribution = attribute(
            reading, lambda process: clients.get(process.pid) or owner_of(process.pid) or exclusive.get(process.uuid)
        )
        for entry in entries.values():
            entry.seen = attribution.of(entry.row.id)
        if reading.fresh:
            gpu_memory = {gpu.uuid: gpu.memory for gpu in reading.gpus}
            now = asyncio.get_running_loop().time()
            self._observe_utilization(now, entries, reading)
            for number, entry in enumerate(list(entries.values()), 1):
                if number % _AT_ONCE == 0:
                    yield
                if present().get(entry.row.id) is not entry:
                    continue
                if entry.serving is not None:
                    entry.serving.memory.set_gpu_memory(gpu_memory)
                    entry.serving.observe(entry.seen.memory, unread=reading.unread, exhaustive=reading.exhaustive)
                    hooked = entry.serving.hooked
                    entry.rules.observe_replaced(now, replaced(entry.row.id, entry.seen.pids, hooked))
                    self._apply_rules(now, entry, entry.serving, reading)
                    if self._thresholds.kill:
                        self._end_offenders(entry, entry.serving, owner_of)
                _judge(entry, residue, reading.unread)
            yield
            entries = present()
            self._time = {key: meters for key, meters in self._time.items() if key[0] in entries}
            self._observe_contexts(entries, reading)
            self._keep({entry.row.id: entry.rules.findings for entry in entries.values() if entry.rules.findings})
        return attribution

    def _observe_contexts(self, entries: Mapping[str, Entry], reading: Reading) -> None:
        self.set_models(reading)
        for gpu in reading.gpus:
            if gpu.uuid in reading.unread:
                continue
            samples: dict[int, int] = {}
            for entry in entries.values():
                if entry.served is not None and gpu.uuid in entry.row.gpus and gpu.uuid in entry.seen.memory:
                    samples |= entry.served.beyond_credits(gpu.uuid, entry.seen.memory[gpu.uuid])
            self._contexts.observe(gpu.model, reading.driver, gpu.uuid, samples)

    def _keep(self, findings: dict[str, tuple[Finding, ...]]) -> None:
        """Start storing findings and estimates for the next agent if they have changed, unless a write is running."""
        changed = findings != self._findings
        if (changed or self._contexts.changed) and (self._saving is None or self._saving.done()):
            self._findings = findings
            self._saving = asyncio.create_task(self._save(findings=changed), name="save-observations")

    async def _save(self, *, findings: bool) -> None:
        try:
            if self._contexts.changed:
                await asyncio.to_thread(self._contexts.save)
            if findings:
                await asyncio.to_thread(self._save_findings, _KeptFindings(findings=self._findings))
        except OSError as error:
            log.warning("cannot keep findings for the next agent", error=str(error))

    def _save_findings(self, kept: _KeptFindings) -> None:
        self._files.replace(FINDINGS_FILE, kept.model_dump_json().encode())

    def _load_findings(self) -> None:
        try:
            self._findings = _KeptFindings.model_validate_json(self._files.read(FINDINGS_FILE)).findings
        except (OSError, ValidationError):
            self._findings = {}
        self._resumed = dict(self._findings)

    def _observe_utilization(self, now: float, entries: Mapping[str, Entry], reading: Reading) -> None:
        busy: dict[Key, float] = {("", uuid): part for uuid, part in reading.utilization.items()}
        kept: list[Key] = [("", gpu.uuid) for gpu in reading.gpus]
        for tenant_id, entry in entries.items():
            for uuid in entry.row.gpus:
                # an Exclusive tenant uses the GPU alone, so the GPU's utilization is the tenant's
                part = reading.utilization.get(uuid)
                if entry.row.mode is Mode.SHARED:
                    there = uuid in entry.seen.memory
                    part = entry.seen.utilization.get(uuid) if there else None if uuid in reading.unread else 0.0
                if part is not None:
                    busy[tenant_id, uuid] = part
                kept.append((tenant_id, uuid))
        self.utilization.observe(now, busy, kept)

    def _observe_time(self, now: float, entry: Entry) -> None:
        """Compare the tenant's busy time, as the driver reports it, with its turns. Charge it for busy time beyond its
        charged time; if it has several GPUs, for the GPU with the most."""
        row, usage = entry.row, self._usage(entry.row.id)
        busy_s = {
            uuid: seconds
            for uuid in row.gpus
            if self.utilization.ratio((row.id, uuid)) is not None
            and (seconds := self.utilization.seconds((row.id, uuid))) is not None
        }
        turns = TurnsOfTenant(lambda: self._turns(row.id))
        beyond: dict[str, Beyond] = {}
        most = 0.0
        for uuid in busy_s:
            meters = self._time.setdefault((row.id, uuid), _TimeMeters())
            part = entry.seen.utilization.get(uuid, 0.0)
            sums = meters.beyond_turns.observe(now, entry.seen.samples.get(uuid, ()), part, turns)
            beyond[uuid] = sums.held
            most = max(most, meters.surcharge.observe(now, sums.charged))
        entry.rules.observe_time(now, busy_s, usage.held_ns / 1e9, beyond, usage.overdue_ns / 1e9)
        if most > 0:
            self._surcharge(row.id, round(most * 1e9))

    def _apply_rules(self, now: float, entry: Entry, served: ServedTenant, reading: Reading) -> None:
        row, usage = entry.row, self._usage(entry.row.id)
        entry.rules.observe_unhooked(now, entry.seen.pids - served.hooked)
        entry.rules.observe_unread(reading.unread.intersection(row.gpus))
        self._observe_time(now, entry)
        entry.rules.observe_memory(now, served.memory.gaps())
        beyond = {uuid: used - row.memory for uuid, used in served.memory.used().items() if used > row.memory}
        enforced = row.memory_isolation is MemoryIsolation.ENFORCED
        entry.rules.observe_limit(now, beyond if enforced else {})
        entry.rules.observe_refusals(now, served.memory.refusals())
        entry.rules.observe_preemptions(now, usage.preemptions)

    def _end_offenders(self, entry: Entry, served: ServedTenant, owner_of: OwnerOf) -> None:
        """Kill the processes that cause the tenant's findings."""
        beyond_credits = {
            uuid: {pid: size - served.memory.credited(uuid, pid) for pid, size in by_pid.items()}
            for uuid, by_pid in entry.seen.memory.items()
            if uuid in entry.row.gpus
        }

        def is_the_tenants(pid: int) -> bool:
            return pid in served.processes or owner_of(pid) == entry.row.id

        ended = False
        for pid, reason in offenders(entry.rules, entry.seen, beyond_credits).items():
            if self._end_process(entry.row.id, pid, is_the_tenants):
                ended = True
                self.killed[reason] += 1
                log.warning("process is killed", tenant=entry.row.id, pod=pod_of(entry.row), pid=pid, finding=reason)
        if ended:
            entry.rules.begin_again()


def _judge(entry: Entry, residue: Residue, unread: frozenset[str]) -> None:
    """Record what remains of a tenant in release. If nothing does, set `drained`, which is never reset."""
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
        log.info("tenant is drained", tenant=entry.row.id, pod=pod_of(entry.row))
    elif left != entry.left_behind:
        log.info("tenant is not drained yet", tenant=entry.row.id, pod=pod_of(entry.row), left=left)
    entry.left_behind = left
