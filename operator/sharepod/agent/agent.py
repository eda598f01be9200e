"""Agent of one node: the GPU inventory, the tenants, and the facts that go into the GPUNode's status.

A driver (`cluster/` in mode `cluster`, `standalone.py` in mode `standalone`) supplies the rows of the ledger. It calls
`start`, then `take_stock`. From then on the driver
- calls `await agent.tenants.apply(rows)`, one call at a time, with the whole ledger whenever the ledger has changed;
- may report the ledger's generation as applied once `apply` has returned;
- waits on `agent.changed`, then reads `agent.facts()` and reports them;
- may set `agent.residue` and `agent.owner_of`, which find a tenant's remains and processes beyond its connections;
- may set `agent.replaced`, which finds processes whose hook is not the mounted one.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from functools import cache
from importlib.metadata import PackageNotFoundError, version

import structlog

from sharepod.agent.devices.held_gpus import HeldGpus, PluginPod
from sharepod.agent.devices.inventory import Inventory, InventoryError, Reading
from sharepod.agent.findings.surcharge import irregular
from sharepod.agent.findings.utilization import UtilizationMeter
from sharepod.agent.shares.consumption_meter import TenantTotals
from sharepod.agent.tenants.observer import OwnerOf, Replaced, Residue, nothing_replaced
from sharepod.agent.tenants.registry import TenantRegistry
from sharepod.agent.tenants.surroundings import Surroundings
from sharepod.api.gpunode import Gpu, Health, TenantStatus
from sharepod.backoff import Backoff

from .settings import AgentSettings

log = structlog.get_logger(__name__)

_COMPARE_AFTER_S = 0.05
"""Seconds until changed facts are compared. Processes start and exit in bursts, and each
comparison builds the status of every tenant."""
_RELEASE_FIRST_S = 0.1
"""Seconds between a release and the first extra reading of the GPUs. A share is reassigned only after one or two
readings without a trace of its tenant. The pauses between these readings double, up to the usual interval."""
_COUNT_S = 2.0
"""Seconds between two counts of GPU time. If the agent is killed, the time since its last count is not metered."""
_FLUSHED_S = 10.0
"""Seconds between two counts that are flushed to disk. A power cut loses at most the counts of this time."""
_COUNTED_S = 60.0
"""Seconds between two reports of consumption while no tenant is added or removed. Counters change all the time. At this
interval a thousand nodes write 17 times a second."""
_FIRST_READING_S = 1.0
"""Seconds that the start waits for the first reading of the GPUs. A working driver
needs far less."""


_WITHOUT_USAGE = {
    "memory": 0,
    "counted_since": None,
    "held_seconds": None,
    "borrowed_seconds": None,
    "reserved_seconds": None,
    "memory_mebibyte_seconds": None,
}
"""Values that replace the usage in a tenant's status for the comparison of `without_usage`."""


@dataclass(frozen=True)
class AgentFacts:
    """Parts of the GPUNode's status that the agent knows at one moment."""

    gpus: tuple[Gpu, ...]
    gpus_known: bool
    """False until the GPUs have been read. Until then the GPUNode keeps its former inventory."""
    tenants: tuple[TenantStatus, ...]
    simulated: bool
    agent_version: str

    def without_usage(self) -> AgentFacts:
        """Return the facts without usage, which changes all the time. A change of them is reported at once."""
        return replace(self, tenants=tuple(map(_without_usage, self.tenants)))


def _without_usage(row: TenantStatus) -> TenantStatus:
    held = None if row.held_milli is None else 0
    return row.model_copy(update=_WITHOUT_USAGE | {"held_milli": held, "progress_milli": held})


class Agent:
    """Agent of one node, on one event loop. `await start()` and `await take_stock()` before use, `await close()` at the
    end.

    Args:
        settings: Settings of the agent.
        inventory: Source of readings of the GPUs and the processes on them.
        around: Access to the node (files, processes); by default, from this process.
    """

    def __init__(self, settings: AgentSettings, inventory: Inventory, around: Surroundings | None = None) -> None:
        self.settings = settings
        self.inventory = inventory
        self.changed = asyncio.Event()
        """Set whenever `facts().without_usage()` has changed. A reporter clears it before it reads the facts."""
        self.residue: Residue = lambda tenant_id: None
        """Callback: returns, as text, what remains of a tenant on the node beyond its connections, or None. May be
        replaced at any time."""
        self.owner_of: OwnerOf = lambda pid: None
        """Callback: returns the id of the tenant in whose Pod a process runs, or None. May be replaced at any time."""
        self.replaced: Replaced = nothing_replaced
        """Callback: returns the processes of a tenant whose hook was replaced. May be replaced at any time."""
        self.stands_by: Callable[[], bool] = lambda: False
        """Callback: returns True if another agent serves this node and this agent is its standby. May be replaced
        before `start`."""
        self.unfit: str | None = "it has not been checked yet whether this agent could serve"
        """For a standby: reason why it could not serve. None if it could."""
        self.successor_waits: Callable[[], bool] = lambda: False
        """Callback: returns True if a standby agent waits to serve when this agent ends. May be replaced before
        `start`."""
        self.taken_in: Callable[[], Collection[str]] = lambda: ()
        """Callback: returns the names of closed consumption series that the operator has added to its totals. May be
        replaced at any time."""
        self.consumption: tuple[list[dict[str, object]], str | None] = ([], None)
        """Namespaces' GPU consumption as the GPUNode's status shows it, and the time of the count."""
        self._totals: Mapping[str, TenantTotals] = {}
        """Totals at the last report of consumption, by tenant id."""
        self._counting: asyncio.Task[None] | None = None
        self.tenants = TenantRegistry(settings, changed=self._compare_soon, around=around)
        self.held_gpus = HeldGpus(settings.namespace, self.tenants.set_open)
        """GPUs of NVIDIA's device plugin, and which of them tenants may use."""
        self.plugin_pod_utilization = UtilizationMeter()
        """Utilization of the GPUs of plugin pods, by `namespace/name` and GPU UUID."""
        self._reading = Reading(gpus=(), processes=())
        self.foreign: Mapping[str, tuple[int, ...]] = {}
        """Pids of processes that use a GPU and belong to no tenant, by GPU UUID."""
        self._read_at: float | None = None
        """Loop time of the last reading."""
        self._failure: str | None = None
        """Error of the last reading of the inventory; None if it succeeded."""
        self._last: AgentFacts | None = None
        self._polling: asyncio.Task[None] | None = None
        self._comparing: asyncio.TimerHandle | None = None
        self._releasing: frozenset[str] = frozenset()
        """Ids of tenants in release, whose shares wait for more readings."""
        self._release_begun = asyncio.Event()
        self._release_readings = 0
        """Readings since the last release began."""

    async def start(self) -> None:
        """Prepare the state directory. Raises `StateDirError`."""
        await self.tenants.start()

    async def check(self) -> None:
        """Check whether this agent could serve: its hook and the driver must be readable. Changes nothing else."""
        self.unfit = await unfit_for(self.settings, self.inventory)

    async def take_stock(self, *, needed: bool = True) -> None:
        """Read the inventory once, then keep reading it in the background.

        If possible, call this before tenants are applied: a tenant's processes are sent the memory that a CUDA context
        takes on each GPU model, which the inventory shows.

        Args:
            needed: True: raise `InventoryError` if the first reading fails. False: wait one second at most. The agent
            then serves tenants without an inventory, and `unhealthy` returns the reason.
        """
        if needed:
            await self._read()
        else:
            with contextlib.suppress(InventoryError, TimeoutError):
                async with asyncio.timeout(_FIRST_READING_S):
                    await self._read()
        self._polling = asyncio.create_task(self._poll(), name="inventory")
        self._counting = asyncio.create_task(self._count(), name="consumption")

    async def close(self) -> None:
        """Close every socket and stop. Tenants' directories stay, because their Pods outlive the agent."""
        for task in (self._polling, self._counting):
            if task is not None:
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
        self._polling = self._counting = None
        await self.tenants.close()
        if self._comparing is not None:
            self._comparing.cancel()
            self._comparing = None

    @property
    def reading(self) -> Reading:
        """Last reading of the inventory."""
        return self._reading

    def know_plugin_pods(
        self, given: Mapping[str, PluginPod] | None, problem: str | None, offered: frozenset[str] = frozenset()
    ) -> None:
        """Store what the kubelet reports about plugin pods. Arguments as for `HeldGpus.know_pods`."""
        self.held_gpus.know_pods(given, problem, offered)
        self._compare_soon()

    @property
    def plugin_pods(self) -> Mapping[str, PluginPod]:
        """Pods with a whole GPU from NVIDIA's device plugin, by GPU UUID, without SharePod's own holders."""
        return self.held_gpus.native()

    def facts(self) -> AgentFacts:
        """Return the current facts. No I/O."""
        return AgentFacts(
            gpus=self.gpus(),
            gpus_known=self.gpus_known,
            tenants=tuple(map(self._with_totals, self.tenants.status())),
            simulated=self.inventory.simulated,
            agent_version=agent_version(),
        )

    def unhealthy(self) -> str | None:
        """Return the reason why the agent cannot do its work, for `/healthz`. None if it can."""
        if self._polling is None or self._polling.done():
            return "the inventory is not being read: the agent is starting or ending"
        stale = 3 * self.settings.inventory_interval_s + self.settings.nvml_timeout_s
        if self._read_at is None or asyncio.get_running_loop().time() - self._read_at > stale:
            return f"the inventory has not been read for {stale:.0f} s: {self._failure or 'no answer'}"
        return None

    async def _poll(self) -> None:
        if self._read_at is not None:
            await self._pause()
        while True:
            try:
                await self._read()
                attribution = await self.tenants.observe(
                    self._reading, residue=self.residue, owner_of=self.owner_of, replaced=self.replaced
                )
                if self._reading.fresh:
                    self._observe_plugin_pods()
                # without a ledger, no process can be attributed to a tenant, so none counts as foreign
                self.foreign = attribution.foreign if self.tenants.known else {}
            except InventoryError as error:
                if self._failure != str(error):
                    log.error("cannot read the inventory, keeping the last one", error=str(error))
                self._failure = str(error)
            except Exception:
                log.exception("cannot use a reading of the inventory, going on with the next")
            self._compare()
            await self._pause()

    @property
    def gpus_known(self) -> bool:
        """False until the GPUs have been read."""
        return self._read_at is not None

    def status_of(self, tenant_id: str) -> TenantStatus | None:
        """Return a tenant's entry in the status of the GPUNode; None if its row is no longer applied."""
        view = self.tenants.view(tenant_id)
        return None if view is None else self._with_totals(view.status())

    def _with_totals(self, status: TenantStatus) -> TenantStatus:
        """Return the tenant's status with its totals: the last reported totals, or the final totals once the tenant is
        drained."""
        totals = self.tenants.totals_now(status.id) if status.drained else self._totals.get(status.id)
        if totals is None:
            return status
        return status.model_copy(
            update={
                "counted_since": totals.since,
                "held_seconds": totals.held_seconds,
                "borrowed_seconds": totals.borrowed_seconds,
                "reserved_seconds": totals.reserved_seconds,
                "memory_mebibyte_seconds": totals.memory_mebibyte_seconds,
            }
        )

    async def _count(self) -> None:
        """Count GPU time at intervals, and store the count for the next agent."""
        loop = asyncio.get_running_loop()
        counted_at = flushed_at = -_COUNTED_S
        counted: frozenset[str] = frozenset()
        while True:
            try:
                await self.tenants.count(self.taken_in())
                now, present = loop.time(), frozenset(row.id for row in self.tenants.rows())
                if now - counted_at >= _COUNTED_S or present != counted:
                    first = self.consumption[1] is None
                    self.consumption, counted_at, counted = self.tenants.consumption(), now, present
                    self._totals = self.tenants.totals()
                    if first:
                        self.changed.set()
                durable = now - flushed_at >= _FLUSHED_S
                await self.tenants.keep_count(durable=durable)
                if durable:
                    flushed_at = now
            except Exception:
                log.exception("cannot count GPU time, going on with the next count")
            await asyncio.sleep(_COUNT_S)

    async def _pause(self) -> None:
        """Wait for the next reading: until the interval is over or a release begins. During releases, pauses grow up to
        the interval."""
        if not self._releasing:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(irregular(self.settings.inventory_interval_s, random.random())):  # noqa: S311
                    await self._release_begun.wait()
        if self._release_begun.is_set():
            self._release_begun.clear()
            self._release_readings = 0
        if self._releasing:
            self._release_readings += 1
            pauses = Backoff(_RELEASE_FIRST_S, self.settings.inventory_interval_s)
            await asyncio.sleep(pauses.pause_s(self._release_readings))

    async def _read(self) -> None:
        self.tenants.begin_reading()
        reading = await self.inventory.read()
        self._reading = reading
        if self._read_at is None:
            self._tell_inventory()
            self.tenants.set_models(reading)
        self._read_at = asyncio.get_running_loop().time()
        if self._failure is not None:
            log.info("the inventory can be read again")
        self._failure = None

    def _tell_inventory(self) -> None:
        gpus = [f"{gpu.index}:{gpu.uuid}:{gpu.model}:{gpu.health}" for gpu in self._reading.gpus]
        log.info("inventory", simulated=self.inventory.simulated, gpus=gpus)
        if self.inventory.simulated:
            log.warning("the inventory is simulated: there is no GPU behind it", file=str(self.settings.inventory_file))

    def _observe_plugin_pods(self) -> None:
        keys = {uuid: (f"{pod.namespace}/{pod.name}", uuid) for uuid, pod in self.plugin_pods.items()}
        busy = {key: self._reading.utilization[uuid] for uuid, key in keys.items() if uuid in self._reading.utilization}
        self.plugin_pod_utilization.observe(asyncio.get_running_loop().time(), busy, kept=keys.values())

    def _compare_soon(self) -> None:
        if self._comparing is None:
            self._comparing = asyncio.get_running_loop().call_later(_COMPARE_AFTER_S, self._compare)

    def _compare(self) -> None:
        if self._comparing is not None:
            self._comparing.cancel()
            self._comparing = None
        releasing = self.tenants.releasing
        if releasing - self._releasing:
            self._release_begun.set()
        self._releasing = releasing
        now = self.facts().without_usage()
        if now != self._last:
            self._last = now
            self.changed.set()

    def gpus(self) -> tuple[Gpu, ...]:
        """Return the inventory's GPUs for the GPUNode. A GPU that has failed, or that a foreign process uses, is marked
        not shareable.

        A process is not foreign on a GPU that the device plugin has given to its Pod.
        """
        gpus = []
        for gpu in map(self.held_gpus.mark, self._reading.gpus):
            if gpu.health is not Health.HEALTHY:
                gpu = gpu.model_copy(update={"shareable": False})
            elif gpu.shareable and not gpu.taken and self.foreign.get(gpu.uuid):
                reason = f"process {self.foreign[gpu.uuid][0]} on the node uses it and belongs to no tenant"
                gpu = gpu.model_copy(update={"shareable": False, "reason": reason})
            gpus.append(gpu)
        return tuple(gpus)


async def unfit_for(settings: AgentSettings, inventory: Inventory) -> str | None:
    """Return the reason why an agent with these settings and this inventory could not serve: it cannot read its hook or
    the driver. None if it could."""
    try:
        await asyncio.to_thread(settings.hook_file.read_bytes)
        await inventory.read()
    except (OSError, InventoryError) as error:
        log.error("this agent could not serve", error=str(error))
        return str(error)
    return None


@cache
def agent_version() -> str:
    """Return the version of the installed package `sharepod`."""
    try:
        return version("sharepod")
    except PackageNotFoundError:
        return "unknown"
