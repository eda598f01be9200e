"""The agent in the privileged process, with the interface of `Agent`: it forwards a driver's calls to the worker, and
returns the facts that the worker reports.

Guarantees:
- A restarted worker gets the whole state again, the applied rows last.
- A restarted privileged process takes over the worker, which has continued to serve. It changes the worker's tenants
  only once it has read a ledger.
- A tenant counts as drained only if this process also finds no process of it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from pathlib import Path

import structlog

from sharepod.agent.agent import Agent, AgentFacts, agent_version, unfit_for
from sharepod.agent.devices.held_gpus import HeldGpus, PluginPod
from sharepod.agent.devices.inventory import Inventory
from sharepod.agent.settings import AgentSettings
from sharepod.agent.state.kept_descriptors import KeptDescriptors
from sharepod.agent.tenants.observer import OwnerOf, Replaced, Residue
from sharepod.agent.tenants.registry import UntakenRowsError
from sharepod.api.gpunode import Gpu, PluginHolder, Pool, Tenant

from . import calls
from .link import Line, LinkLostError, NoAnswerError
from .privileged_services import PrivilegedServices

log = structlog.get_logger(__name__)

_AWAY_S = 10.0
"""Seconds that a call waits for the worker to connect."""
_APPLY_S = 120.0
"""Seconds that the worker may take to apply a ledger: each new row needs a few files."""
_ATTEMPTS = 6
"""Most attempts of a call, each with a new worker. The fifth kill of a worker within a minute ends the agent."""
_CLOSE_S = 5.0
_STALE_S = 10.0
"""Seconds without a report after which the worker's facts count as stale; the worker reports each second."""


class DistantTenants:
    """Tenants in the worker, with the part of `TenantRegistry` that a driver uses."""

    def __init__(self, agent: DistantAgent) -> None:
        self._agent = agent
        self.ready: frozenset[str] = frozenset()
        self.problems: Mapping[str, str] = {}

    async def apply(self, rows: Sequence[Tenant]) -> None:
        """Make exactly these rows the tenants of this node. See `TenantRegistry.apply`."""
        await self._agent.put_in_force(tuple(rows))

    def directory(self, tenant_id: str) -> Path | None:
        """Return the directory to mount into a tenant's pod; None if there is none."""
        state = self._agent.services.state
        return state.path(tenant_id) if tenant_id in self.ready and tenant_id in self._agent.services.rows else None

    def unservable(self, tenant_id: str) -> str | None:
        """Return why a tenant's row cannot be served, as text; None if it can."""
        return self.problems.get(tenant_id)


class DistantAgent:
    """Agent whose tenants are served by the worker. A driver uses it as `Agent`."""

    def __init__(self, settings: AgentSettings, inventory: Inventory, kept: KeptDescriptors) -> None:
        self.settings = settings
        self.inventory = inventory
        self.changed = asyncio.Event()
        self.stands_by: Callable[[], bool] = lambda: False
        self.successor_waits: Callable[[], bool] = lambda: False
        self.unfit: str | None = "it has not been checked yet whether this agent could serve"
        self.taken_in: Callable[[], Collection[str]] = lambda: ()
        self.services = PrivilegedServices(settings, inventory, kept, self._take_report)
        self.link_lost: Callable[[], None] = lambda: None
        """Called when the link to the worker has ended."""
        self.may_serve = False
        """Set by `close`: True if the worker may still serve, because it has not confirmed that it closed
        everything."""
        self.line = Line(self.services.service(), self._revive_soon, lambda: self.link_lost())
        self.tenants = DistantTenants(self)
        self.held_gpus = _HeldGpusElsewhere(settings.namespace, self.line)
        self._order = asyncio.Lock()
        self._started = self._stocked = False
        self._rows: tuple[Tenant, ...] | None = None
        self._pods: calls.Pods | None = None
        self._reviving: asyncio.Task[None] | None = None
        self._report: calls.WorkerReport | None = None
        self._reported_at = 0.0

    # ---- callbacks for readings, set by the driver

    @property
    def residue(self) -> Residue:
        """Callback: what remains of a tenant beyond its connections."""
        return self.services.residue

    @residue.setter
    def residue(self, residue: Residue) -> None:
        self.services.residue = residue

    @property
    def owner_of(self) -> OwnerOf:
        """Callback: tenant in whose Pod a process runs."""
        return self.services.owner_of

    @owner_of.setter
    def owner_of(self, owner_of: OwnerOf) -> None:
        self.services.owner_of = owner_of

    @property
    def replaced(self) -> Replaced:
        """Callback: processes of a tenant whose hook was replaced."""
        return self.services.replaced

    @replaced.setter
    def replaced(self, replaced: Replaced) -> None:
        self.services.replaced = replaced

    # ---- life cycle

    async def start(self) -> None:
        """Prepare the state directory. Raises `StateDirError`."""
        await self.services.prepare()
        self._started = True
        await self._insist(self._revive)

    async def check(self) -> None:
        """Check whether this agent could serve: its hook and the driver must be readable."""
        self.unfit = await unfit_for(self.settings, self.inventory)
        self._report_standing()

    async def take_stock(self, *, needed: bool = True) -> None:
        """Have the worker read the inventory, and keep reading it. See `Agent.take_stock`."""

        async def take() -> None:
            await self.line.call(calls.WORKER_TAKE_STOCK, needed, timeout_s=_APPLY_S, wait_s=_AWAY_S)

        await self._insist(take)
        self._stocked = True

    async def close(self) -> None:
        """Have the worker close all sockets. Tenants' directories stay."""
        self.link_lost = lambda: None
        if self._reviving is not None:
            self._reviving.cancel()
            await asyncio.gather(self._reviving, return_exceptions=True)
        self.may_serve = self._started
        if self._started and self.line.up:
            try:
                await self.line.call(calls.WORKER_CLOSE, None, timeout_s=_CLOSE_S)
                self.may_serve = False
            except OSError as error:
                log.warning("the process that serves tenants does not end by itself", error=error.strerror)
        self.line.close()
        self.services.close()

    async def put_in_force(self, rows: tuple[Tenant, ...]) -> None:
        """Have the worker apply these rows. Raises `UntakenRowsError`, `OSError`."""

        async def apply() -> None:
            self._rows = rows
            await self._apply(rows)

        await self._insist(apply)

    def know_plugin_pods(
        self, given: Mapping[str, PluginPod] | None, problem: str | None, offered: frozenset[str] = frozenset()
    ) -> None:
        """Store, here and in the worker, what the kubelet reports about plugin pods."""
        self.held_gpus.know_pods(given, problem, offered)
        self._pods = calls.Pods(dict(given) if given is not None else None, problem, offered)
        self.line.notify(calls.WORKER_KNOW_PODS, self._pods)
        self.changed.set()

    # ---- facts from the worker

    @property
    def consumption(self) -> tuple[list[dict[str, object]], str | None]:
        """Namespaces' consumption, as for the GPUNode's status, and the time of the count."""
        return (self._report.consumption, self._report.consumed_at) if self._report is not None else ([], None)

    def facts(self) -> AgentFacts:
        """Return the current facts."""
        report = self._report
        tenants = () if report is None else report.tenants
        return AgentFacts(
            gpus=self.gpus(),
            gpus_known=report is not None and report.gpus_known,
            tenants=tuple(
                row.model_copy(update={"drained": False})
                if row.drained and self.services.residue(row.id) is not None
                else row
                for row in tenants
            ),
            simulated=self.inventory.simulated,
            agent_version=agent_version(),
        )

    def gpus(self) -> tuple[Gpu, ...]:
        """Return the inventory's GPUs, by the worker's last report."""
        return self._report.gpus if self._report is not None else ()

    def unhealthy(self) -> str | None:
        """Return why the agent cannot do its work, as text; None if it can."""
        if self._report is None or asyncio.get_running_loop().time() - self._reported_at > _STALE_S:
            return "the process that serves tenants does not answer"
        return self._report.unhealthy

    # ---- inside

    def _take_report(self, report: calls.WorkerReport) -> None:
        first = self._report is None
        self._report, self._reported_at = report, asyncio.get_running_loop().time()
        if report.moved or first:
            self.changed.set()
        self.line.notify(calls.WORKER_TAKEN_IN, tuple(self.taken_in()))

    def _report_standing(self) -> None:
        self.line.notify(calls.WORKER_STAND, calls.ServingState(self.stands_by(), self.unfit))

    def _revive_soon(self) -> None:
        """Send a new worker the whole state, in the background."""
        self._report_standing()
        if self._started:
            if self._reviving is not None:
                self._reviving.cancel()
            self._reviving = asyncio.get_running_loop().create_task(self._revived(), name="revive")

    async def _revived(self) -> None:
        try:
            async with self._order:
                await self._revive()
        except OSError as error:  # the next link or ledger leads to another attempt
            log.error("cannot send the process that serves tenants its whole state", error=str(error))

    async def _insist(self, work: Callable[[], Awaitable[None]]) -> None:
        """Await `work`, which calls the worker. If the worker is killed during it, repeat it with the next worker."""
        for attempt in range(1, _ATTEMPTS + 1):
            async with self._order:
                try:
                    await work()
                except NoAnswerError:
                    raise
                except LinkLostError:
                    if attempt == _ATTEMPTS:
                        raise
                else:
                    return

    async def _revive(self) -> None:
        await self.line.call(calls.WORKER_START, None, timeout_s=_APPLY_S, wait_s=_AWAY_S)
        self._report_standing()
        if self._pods is not None:
            self.line.notify(calls.WORKER_KNOW_PODS, self._pods)
        self.held_gpus.tell_again()
        if self._stocked:
            await self.line.call(calls.WORKER_TAKE_STOCK, False, timeout_s=_APPLY_S)
        if self._rows is not None:
            await self._apply(self._rows)

    async def _apply(self, rows: tuple[Tenant, ...]) -> None:
        services = self.services
        wanted = {row.id: row for row in rows}
        self.tenants.ready &= {row.id for row in rows}
        services.rows, services.known = wanted, True
        in_force, _none = await self.line.call(calls.WORKER_APPLY, rows, timeout_s=_APPLY_S, wait_s=_AWAY_S)
        self.tenants.ready, self.tenants.problems = frozenset(in_force.directories), in_force.unservable
        self._take_report(in_force.report)
        if in_force.failure is not None:
            failure = in_force.failure
            raise UntakenRowsError(failure.errno, failure.text, failure.filename)


class _HeldGpusElsewhere(HeldGpus):
    """Decision which GPUs are open to tenants. The worker opens and closes the GPUs."""

    def __init__(self, namespace: str, line: Line) -> None:
        super().__init__(namespace, lambda gpus: None)
        self._line = line
        self._ledger: calls.LedgerHeader | None = None

    def know_ledger(self, pool: Pool, holders: Sequence[PluginHolder]) -> None:
        """Set pool and holders of a ledger, before its rows are applied, here and in the worker."""
        super().know_ledger(pool, holders)
        self._ledger = calls.LedgerHeader(pool, tuple(holders))
        self.tell_again()

    def tell_again(self) -> None:
        """Send pool and holders to the worker again."""
        if self._ledger is not None:
            self._line.notify(calls.WORKER_KNOW_LEDGER, self._ledger)


AnyAgent = Agent | DistantAgent
"""Agent with the interface that drivers use."""
