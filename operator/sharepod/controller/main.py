"""`sharepod-operator`: the operator's process.

Guarantees:
- It acts only while it leads, and only after it has listed everything since it began to lead.
- A part that fails ends the process with exit status 1; the Deployment starts it again.
- On SIGTERM it stops acting, gives up its Lease and exits with 0.
"""

from __future__ import annotations

import asyncio
import signal
import sys
import time
from collections.abc import Coroutine
from typing import Any

import kopf
import structlog
from aiohttp import web
from prometheus_client import generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from sharepod import logs
from sharepod.api.objects import TENANT_LABEL
from sharepod.api.pod import PodSettings
from sharepod.controller.apiserver import kopf_feed
from sharepod.controller.apiserver.client import LEASES, PODS, Client
from sharepod.controller.apiserver.events import Events
from sharepod.controller.apiserver.leadership import Leadership
from sharepod.controller.apiserver.reflector import Reflector
from sharepod.controller.apiserver.resync import Resync
from sharepod.controller.placing.ledger_writer import LedgerWriter
from sharepod.controller.placing.loop import PlacementLoop
from sharepod.controller.state.agent_leases import AgentLeases
from sharepod.controller.state.cluster_state import ClusterState
from sharepod.controller.state.memos import TenantMemos
from sharepod.controller.tenants.pods import PodControl
from sharepod.controller.tenants.reconciler import TenantReconciler
from sharepod.kube import ApiError, configuration
from sharepod.tasks import Supervisor

from . import metrics
from .nodes import NodeReconciler
from .settings import OperatorSettings, SettingsError, load

_OTHER_PODS = "spec.nodeName!=,status.phase!=Succeeded,status.phase!=Failed"
"""Field selector of the pods that take room of a node."""
_TICK_S = 1.0
"""Period of the checks of agents, gaps and gauges."""
_STALLED_S = 30.0
"""Seconds without a tick after which the health probe fails: longer than any step that works takes."""
_KOPF_GRACE_S = 10.0
"""Seconds that Kopf has to end its watches before its task is cancelled."""

log = structlog.get_logger(__name__)


class Operator:
    """Operator: all parts, wired to each other."""

    def __init__(self, settings: OperatorSettings, config: Any) -> None:
        clock = time.monotonic
        self._settings = settings
        self._config = config
        self._active = False
        self._stale = False
        self._ticked = clock()
        self._activation: asyncio.Task[None] | None = None
        pods = PodSettings(
            runtime_class=settings.runtime_class or "",
            tolerations=tuple(toleration.manifest() for toleration in settings.tolerations),
        )
        self.lease_client = Client(config, read_timeout=settings.write_timeout, write_timeout=settings.write_timeout)
        self.leadership = Leadership(
            self.lease_client,
            namespace=settings.namespace,
            identity=settings.identity,
            duration=settings.lease_duration,
            renew_deadline=settings.renew_deadline,
            retry_period=settings.retry_period,
            on_gained=self._gained,
            on_lost=self._lost,
            clock=clock,
        )
        self.client = Client(
            config,
            read_timeout=settings.read_timeout,
            write_timeout=settings.write_timeout,
            page_size=settings.page_size,
            may_write=self.leadership.acting,
        )
        self.state = ClusterState(pods, AgentLeases(settings.agent_duration, clock))
        self.memos = TenantMemos()
        self.events = Events(self.client, settings.identity, clock)
        self.resync = Resync(self.state, self.client)
        self.ledger = LedgerWriter(self.state, self.client, self.events, settings.writers)
        pod_control = PodControl(self.state, self.client, self.events, pods)
        self.tenant_reconciler = TenantReconciler(
            self.state, self.client, self.ledger, pod_control, self.events, self.memos, settings, clock
        )
        self.loop = PlacementLoop(
            self.state,
            self.memos,
            may_act=lambda: self._active and self.leadership.acting(),
            on_decided=lambda _tenant, node: self.ledger.add(node),
            on_answered=self._enqueue_tenant,
            clock=clock,
            head_reservation_after=settings.keep_after,
        )
        self.tenant_reconciler.loop = self.loop
        self.tenant_reconciler.read_priorities = self.resync.read_priorities
        self.node_reconciler = NodeReconciler(self.state, self.client, self.ledger, self.events, settings, clock)
        self.ledger.on_refused = self.tenant_reconciler.back_off_from_node
        self.ledger.on_removed = lambda node, _tenant: self._enqueue_node(node)
        self.state.on_tenant_changed = self._enqueue_tenant
        self.state.on_node_changed = self._enqueue_node
        self.state.on_room_changed = self.loop.room_changed
        self.other_pods = Reflector(
            self.client,
            PODS,
            put=self.state.put_other_pod,
            drop=self.state.drop_other_pod,
            labels=f"!{TENANT_LABEL}",
            fields=_OTHER_PODS,
        )
        self.agent_leases = Reflector(
            self.client,
            LEASES,
            put=self.state.agents.put,
            drop=self.state.agents.drop,
            namespace=settings.namespace,
        )

    # Enqueueing

    def _enqueue_tenant(self, tenant: str) -> None:
        if self._active:
            self.tenant_reconciler.queue.add(tenant)

    def _enqueue_node(self, name: str) -> None:
        if self._active:
            self.node_reconciler.queue.add(name)

    def _gained(self) -> None:
        self._activation = asyncio.create_task(self._activate(), name="activation")

    def _lost(self) -> None:
        if self._activation is not None:
            self._activation.cancel()
        self._active = False
        self.tenant_reconciler.queue.clear()
        self.node_reconciler.queue.clear()
        self.loop.clear()
        self.ledger.abandon()
        self.memos.clear()

    async def _activate(self) -> None:
        """Begin to act: list everything, then enqueue every tenant and node."""
        while True:
            try:
                await self.resync.relist()
                await self.other_pods.listed.wait()
                await self.agent_leases.listed.wait()
                break
            except ApiError as error:
                log.warning("cannot list; trying again", error=str(error))
                await asyncio.sleep(1)
        self.node_reconciler.check_agents()
        self._active = True
        self._enqueue_all()
        log.info("acting", sharepods=len(self.state.sharepods), nodes=len(self.state.nodes))

    def _enqueue_all(self) -> None:
        if not self._active:
            return
        for tenant in self.state.tenants():
            self.tenant_reconciler.queue.add_resync(tenant)
        for name in {item.name for item in self.state.nodes} | {item.name for item in self.state.gpunodes}:
            self.node_reconciler.queue.add_resync(name)
        self.loop.room_changed()

    def gap(self) -> None:
        """Note that a watch had a gap and has listed again: a full list follows."""
        if self.resync.complete:
            self._stale = True

    # Loops

    async def _resync(self) -> None:
        """List everything every `resync_interval`, and soon after a gap."""
        last = time.monotonic()
        while True:
            await asyncio.sleep(_TICK_S)
            if not (self._stale or time.monotonic() - last >= self._settings.resync_interval):
                continue
            self._stale = False
            try:
                await self.resync.relist()
            except ApiError as error:
                log.warning("cannot list; trying again", error=str(error))
                self._stale = True
                continue
            last = time.monotonic()
            self._enqueue_all()

    async def _tick(self) -> None:
        while True:
            self._ticked = time.monotonic()
            self.node_reconciler.check_agents()
            phases: dict[str, int] = {}
            for item in self.state.sharepods:
                phases[item.status.phase.value] = phases.get(item.status.phase.value, 0) + 1
            metrics.UNENFORCED.set(self.state.unenforced())
            for phase in ("Pending", "Placed", "Running", "Succeeded", "Failed"):
                metrics.SHAREPODS.labels(phase).set(phases.get(phase, 0))
            await asyncio.sleep(_TICK_S)

    def healthy(self) -> str:
        """Return a word for the health probe. Raises `RuntimeError` if the event loop has stood still."""
        silent = time.monotonic() - self._ticked
        if silent > _STALLED_S:
            raise RuntimeError(f"the event loop has stood still for {silent:.0f} s")
        return "leads" if self.leadership.acting() else "stands by"

    async def _serve(self) -> None:
        """Serve `/metrics` and `/readyz`."""

        async def show_metrics(_: web.Request) -> web.Response:
            return web.Response(body=generate_latest(metrics.REGISTRY), headers={"Content-Type": CONTENT_TYPE_LATEST})

        async def show_ready(_: web.Request) -> web.Response:
            ready = self.resync.complete
            return web.Response(status=200 if ready else 503, text="ok\n" if ready else "listing\n")

        app = web.Application()
        app.add_routes([web.get("/metrics", show_metrics), web.get("/readyz", show_ready)])
        runner = web.AppRunner(app, handle_signals=False, shutdown_timeout=1.0)
        await runner.setup()
        try:
            await web.TCPSite(runner, self._settings.bind_address, self._settings.metrics_port).start()
            await asyncio.Event().wait()
        finally:
            await runner.cleanup()

    async def _first_list(self) -> None:
        """List everything once even while standing by, so that a take-over finds a warm cluster state."""
        while not self.resync.complete:
            try:
                await self.resync.relist()
            except ApiError as error:
                log.warning("cannot list; trying again", error=str(error))
                await asyncio.sleep(1)
        await asyncio.Event().wait()

    async def run(self) -> None:
        """Run until a signal. Raises `TaskEndedError` if a part fails or ends."""
        stop = asyncio.Event()
        kopf_stop, kopf_ready = asyncio.Event(), asyncio.Event()
        parts: dict[str, Coroutine[Any, Any, None]] = {
            "lease": self.leadership.run(),
            "events": self.events.run(),
            "placement": self.loop.run(),
            "ledger": self.ledger.run(),
            "tenants": self.tenant_reconciler.run(),
            "nodes": self.node_reconciler.run(),
            "other pods": self.other_pods.run(),
            "agent leases": self.agent_leases.run(),
            "first list": self._first_list(),
            "resync": self._resync(),
            "tick": self._tick(),
        }
        if self._settings.metrics_port:
            parts["metrics"] = self._serve()
        try:
            async with Supervisor() as supervisor:
                for name, part in parts.items():
                    supervisor.start(name, part)
                await asyncio.sleep(0)  # Kopf ends every task that it finds begun after its own
                supervisor.start("kopf", self._watch(kopf_stop, kopf_ready), stop=kopf_stop, grace_s=_KOPF_GRACE_S)
                supervisor.start("signals", self._signalled(stop, kopf_ready))
                await supervisor.wait(stop)
        finally:
            await self.client.close()
            await self.lease_client.close()

    async def _watch(self, stop: asyncio.Event, ready: asyncio.Event) -> None:
        port = self._settings.health_port
        await kopf.operator(
            registry=kopf_feed.registry(
                self.state, lambda: kopf_feed.credentials(self._config), self.gap, self.healthy
            ),
            settings=kopf_feed.settings(),
            standalone=True,
            clusterwide=True,
            liveness_endpoint=f"http://{self._settings.bind_address}:{port}/healthz" if port else None,
            stop_flag=stop,
            ready_flag=ready,
        )

    @staticmethod
    async def _signalled(stop: asyncio.Event, ready: asyncio.Event) -> None:
        """Take the signals, and take them back once Kopf has started: the Lease must be given up first."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, stop.set)
        await ready.wait()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, stop.set)
        await stop.wait()
        log.info("stopping")


async def _run(settings: OperatorSettings) -> None:
    config = await configuration(settings.kubeconfig)
    await Operator(settings, config).run()


def main() -> None:
    """Run `sharepod-operator`."""
    try:
        settings = load()
    except SettingsError as error:
        sys.exit(f"sharepod-operator: {error}")
    logs.configure(settings.log_level, settings.log_format)
    try:
        asyncio.run(_run(settings))
    except ConnectionError as error:
        sys.exit(f"sharepod-operator: {error}")
    except KeyboardInterrupt:
        sys.exit(130)
    except Exception as error:
        log.exception("operator cannot go on", error=str(error))
        sys.exit(1)
