"""`/metrics` for Prometheus and `/healthz` for the kubelet.

Values are read when they are asked for, at most once a second however many ask; nothing is counted twice. Series of a
tenant end with the tenant.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterable

from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from .core import Agent

CACHED_S = 1.0
_TENANT = ("tenant", "namespace", "pod")


class AgentCollector(Collector):
    """What one agent knows, as metrics with the prefix `sharepod_`."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent

    def collect(self) -> Iterable[Metric]:
        """One family after another."""
        yield from self._gpus()
        yield from self._tenants()
        hand_offs = self._agent.tenants.hand_offs
        yield HistogramMetricFamily(
            "sharepod_agent_hand_off_seconds",
            "From reading that a token came back to having sent the next grant",
            buckets=hand_offs.buckets(),
            sum_value=hand_offs.sum_ns / 1e9,
        )
        yield CounterMetricFamily(
            "sharepod_agent_frames_refused",
            "Times that a client was closed for what it sent, or did not send",
            value=self._agent.tenants.frames_refused,
        )

    def _gpus(self) -> Iterable[Metric]:
        facts = self._agent.facts()
        memory = GaugeMetricFamily(
            "sharepod_gpu_memory_bytes", "Device memory that tenants can have", labels=("gpu", "index", "model")
        )
        healthy = GaugeMetricFamily("sharepod_gpu_healthy", "1 if the GPU is healthy", labels=("gpu", "index"))
        shareable = GaugeMetricFamily("sharepod_gpu_shareable", "1 if it can be shared", labels=("gpu", "index"))
        for gpu in facts.gpus:
            memory.add_metric((gpu.uuid, str(gpu.index), gpu.model), gpu.memory)
            healthy.add_metric((gpu.uuid, str(gpu.index)), int(gpu.health == "Healthy"))
            shareable.add_metric((gpu.uuid, str(gpu.index)), int(gpu.shareable))
        simulated = GaugeMetricFamily("sharepod_inventory_simulated", "1 if there is no GPU behind the inventory")
        simulated.add_metric((), int(facts.simulated))
        version = GaugeMetricFamily("sharepod_agent_build", "Always 1; the version is a label", labels=("version",))
        version.add_metric((facts.agent_version,), 1)
        return (memory, healthy, shareable, simulated, version)

    def _tenants(self) -> Iterable[Metric]:
        held = CounterMetricFamily(
            "sharepod_tenant_held_seconds", "Time that it held the token, of each of its GPUs", labels=_TENANT
        )
        borrowed = CounterMetricFamily(
            "sharepod_tenant_borrowed_seconds", "The part of it beyond what it was guaranteed", labels=_TENANT
        )
        grants = CounterMetricFamily("sharepod_tenant_grants", "Times that it was given the token", labels=_TENANT)
        overdue = CounterMetricFamily(
            "sharepod_tenant_overdue", "Times that it was overtaken because it had not drained", labels=_TENANT
        )
        request = GaugeMetricFamily("sharepod_tenant_request_ratio", "Guaranteed part of each GPU", labels=_TENANT)
        limit = GaugeMetricFamily("sharepod_tenant_limit_ratio", "Most that it may use of each GPU", labels=_TENANT)
        used = GaugeMetricFamily("sharepod_tenant_memory_used_bytes", "Device memory in use", labels=(*_TENANT, "gpu"))
        waits = HistogramMetricFamily(
            "sharepod_tenant_wait_seconds", "How long it waited for each grant of the token", labels=_TENANT
        )
        granted = GaugeMetricFamily(
            "sharepod_tenant_memory_limit_bytes", "Device memory that it may use on each GPU", labels=_TENANT
        )
        processes = GaugeMetricFamily("sharepod_tenant_processes", "Its processes on GPUs", labels=_TENANT)
        tenants = self._agent.tenants
        for served in tenants.served():
            row = served.row
            labels = (row.id, row.namespace, row.pod_name)
            usage = tenants.usage(row.id)
            if usage is None:
                continue
            held.add_metric(labels, usage.held_ns / 1e9)
            wait = tenants.waits(row.id)
            waits.add_metric(labels, wait.buckets(), wait.sum_ns / 1e9)
            borrowed.add_metric(labels, usage.borrowed_ns / 1e9)
            grants.add_metric(labels, usage.grants)
            overdue.add_metric(labels, usage.overdue)
            request.add_metric(labels, row.request_milli / 1000)
            limit.add_metric(labels, row.limit_milli / 1000)
            granted.add_metric(labels, row.memory)
            processes.add_metric(labels, len(served.processes))
            for gpu, size in served.used_by_gpu().items():
                used.add_metric((*labels, gpu), size)
        return (held, waits, borrowed, grants, overdue, request, limit, used, granted, processes)


def application(agent: Agent, *, unhealthy: Callable[[], str | None] | None = None) -> web.Application:
    """The HTTP application. `unhealthy` says what else is wrong, or None; the agent's own health is always asked."""
    registry = CollectorRegistry()
    registry.register(AgentCollector(agent))
    ProcessCollector(registry=registry)

    kept, kept_at = b"", -math.inf

    async def metrics(_request: web.Request) -> web.Response:
        nonlocal kept, kept_at
        now = asyncio.get_running_loop().time()
        if now - kept_at >= CACHED_S:
            kept, kept_at = generate_latest(registry), now
        return web.Response(body=kept, headers={"Content-Type": CONTENT_TYPE_LATEST})

    async def healthz(_request: web.Request) -> web.Response:
        trouble = agent.unhealthy() or (unhealthy() if unhealthy is not None else None)
        if trouble is not None:
            return web.Response(status=503, text=f"{trouble}\n")
        return web.Response(text="ok\n")

    app = web.Application()
    app.add_routes([web.get("/metrics", metrics), web.get("/healthz", healthz)])
    return app


async def serve(agent: Agent, *, unhealthy: Callable[[], str | None] | None = None) -> tuple[web.AppRunner, int]:
    """Serves on the address of the settings. Returns what to `cleanup`, and the port. Raises `OSError` if it is
    taken."""
    settings = agent.settings
    runner = web.AppRunner(application(agent, unhealthy=unhealthy), access_log=None, handle_signals=False)
    await runner.setup()
    try:
        site = web.TCPSite(runner, settings.http_bind, settings.http_port, shutdown_timeout=1.0)
        await site.start()
    except OSError:
        await runner.cleanup()
        raise
    port: int = runner.addresses[0][1]
    return runner, port
