"""The agent without its surroundings: inventory, tenants and what is known of both. What drives it is given to it.

In mode `cluster` that is `agent/cluster.py` (`await run(agent)`), in mode `standalone` a YAML file. Either one
- calls `await agent.tenants.apply(rows)` with the node's whole ledger whenever it changed, one call at a time; when
  the call returns the rows are in force (sockets open or closed, limits files replaced), so that generation may be
  reported as observed;
- reads `agent.facts()` and waits on `agent.changed` to report;
- may set `agent.residue` and `agent.owner_of`, which say what is left of a tenant beyond its connections.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING

import structlog

from sharepod.agent.devices.inventory import Inventory, InventoryError, Reading
from sharepod.agent.findings.utilization import UtilizationMeter
from sharepod.agent.tenants.registry import TenantRegistry
from sharepod.api.gpunode import Gpu, Health, TenantStatus

from .settings import AgentSettings

if TYPE_CHECKING:
    from sharepod.agent.kubelet.plugin_pods import (
        PluginPod,  # which needs grpc, and an agent without Kubernetes does not
    )

log = structlog.get_logger(__name__)

_COMPARE_AFTER_S = 0.05
"""However often tenants' processes come and go, what became of it is put together no more often than this."""

Residue = Callable[[str], str | None]
"""tenant id -> what is still there of it outside the agent (a published volume, processes in its cgroup), or None.
Quick: no I/O that can hang."""

OwnerOf = Callable[[int], str | None]
"""pid (as the agent's PID namespace numbers it) -> id of the tenant whose pod it runs in, or None if it is no
tenant's."""


@dataclass(frozen=True)
class AgentFacts:
    """What the agent knows now; the parts of GPUNode's status that it can fill."""

    gpus: tuple[Gpu, ...]
    tenants: tuple[TenantStatus, ...]
    simulated: bool
    agent_version: str

    def without_usage(self) -> AgentFacts:
        """The same with all that moves by itself (`memory`, `held_milli`) zeroed: compare these to see whether to
        report at once."""
        still = tuple(row.model_copy(update={"memory": 0, "held_milli": 0}) for row in self.tenants)
        return replace(self, tenants=still)


class Agent:
    """One node's agent. `await start()` before use, `await close()` at the end; everything runs on one event loop.

    `changed` is set whenever `facts().without_usage()` became different; whoever reports clears it before reading.
    `residue` and `owner_of` may be replaced before or after `start`.
    """

    def __init__(self, settings: AgentSettings, inventory: Inventory) -> None:
        self.settings = settings
        self.inventory = inventory
        self.changed = asyncio.Event()
        self.residue: Residue = lambda tenant_id: None
        self.owner_of: OwnerOf = lambda pid: None
        self.tenants = TenantRegistry(settings, changed=self._compare_soon)
        self.plugin_pods: Mapping[str, PluginPod] = {}
        """By UUID, pods that have a GPU of their own from NVIDIA's device plugin."""
        self.plugin_pod_utilization = UtilizationMeter()
        """How long they were busy, by `namespace/name`."""
        self._reading = Reading(gpus=(), processes=())
        self.foreign: Mapping[str, tuple[int, ...]] = {}
        """By UUID, processes of nobody's that use the GPU."""
        self._read_at: float | None = None
        self._failure: str | None = None
        self._last: AgentFacts | None = None
        self._polling: asyncio.Task[None] | None = None
        self._comparing: asyncio.TimerHandle | None = None
        self._under_way = False

    async def start(self) -> None:
        """Reads the inventory once and begins to follow it. Raises `InventoryError` if there is none at all."""
        await self._read()
        log.info(
            "inventory",
            simulated=self.inventory.simulated,
            gpus=[f"{gpu.index}:{gpu.uuid}:{gpu.model}:{gpu.health}" for gpu in self._reading.gpus],
        )
        if self.inventory.simulated:
            log.warning("the inventory is simulated: there is no GPU behind it", file=str(self.settings.inventory_file))
        self.tenants.set_models(self._reading)
        await self.tenants.start()
        self._polling = asyncio.create_task(self._poll(), name="inventory")

    async def close(self) -> None:
        """Closes every socket and stops. Tenants' directories stay: their pods outlive the agent."""
        if self._polling is not None:
            self._polling.cancel()
            await asyncio.gather(self._polling, return_exceptions=True)
            self._polling = None
        await self.tenants.close()
        if self._comparing is not None:
            self._comparing.cancel()
            self._comparing = None

    @property
    def reading(self) -> Reading:
        """The last one."""
        return self._reading

    def know_plugin_pods(self, pods: Mapping[str, PluginPod]) -> None:
        """These have GPUs of their own now."""
        self.plugin_pods = pods

    def facts(self) -> AgentFacts:
        """What is known now. Cheap: no I/O."""
        return AgentFacts(
            gpus=self._gpus(),
            tenants=self.tenants.status(),
            simulated=self.inventory.simulated,
            agent_version=agent_version(),
        )

    def unhealthy(self) -> str | None:
        """Why the agent does not do its work, or None. What `/healthz` says."""
        if self._polling is None or self._polling.done():
            return "the inventory is not being read: the agent is starting or ending"
        stale = 3 * self.settings.inventory_interval_s + self.settings.nvml_timeout_s
        if self._read_at is None or asyncio.get_running_loop().time() - self._read_at > stale:
            return f"the inventory has not been read for {stale:.0f} s: {self._failure or 'no answer'}"
        return None

    async def _poll(self) -> None:
        while True:
            await asyncio.sleep(self.settings.inventory_interval_s)
            try:
                await self._read()
                attribution = self.tenants.observe(self._reading, residue=self.residue, owner_of=self.owner_of)
                if self._reading.fresh:
                    self._observe_plugin_pods()
                # Before the ledger is known nobody can be told apart.
                self.foreign = attribution.foreign if self.tenants.known else {}
            except InventoryError as error:
                if self._failure != str(error):
                    log.error("cannot read the inventory, keeping the last one", error=str(error))
                self._failure = str(error)
            except Exception:
                log.exception("a reading of the inventory was not understood; going on with the next")
            self._compare()

    async def _read(self) -> None:
        if not self._under_way:
            # A reading that timed out goes on in its thread: the next one that is asked for may be that one.
            self.tenants.begin_reading()
            self._under_way = True
        reading = await self.inventory.read()
        self._under_way = not reading.fresh
        self._reading = reading
        self._read_at = asyncio.get_running_loop().time()
        if self._failure is not None:
            log.info("the inventory can be read again")
        self._failure = None

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
        now = self.facts().without_usage()
        if now != self._last:
            self._last = now
            self.changed.set()

    def _gpus(self) -> tuple[Gpu, ...]:
        """The inventory, less what is unfit to be shared: a GPU that failed, or that a process of nobody's uses."""
        gpus = []
        for gpu in self._reading.gpus:
            if gpu.health is not Health.HEALTHY:
                gpu = gpu.model_copy(update={"shareable": False})
            elif gpu.shareable and self.foreign.get(gpu.uuid):
                reason = f"process {self.foreign[gpu.uuid][0]} on the node uses it and is no tenant's"
                gpu = gpu.model_copy(update={"shareable": False, "reason": reason})
            gpus.append(gpu)
        return tuple(gpus)


@cache
def agent_version() -> str:
    """The version of the installed package."""
    try:
        return version("sharepod")
    except PackageNotFoundError:
        return "unknown"
