"""`/metrics` for Prometheus, `/trace` for people, and `/healthz` for the kubelet on a port of its own.

Guarantees:
- A flood of requests on one port does not delay clients of the other.
- A scrape is computed on request, at most once a second for any number of requests.
- One trace is written at a time: a second reader is refused with status 429.
- A scrape delays no hand-off: samples are gathered in short steps, and their text is rendered in another thread.
"""

from __future__ import annotations

import asyncio
import json
import math
import socket
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import structlog
from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from sharepod.agent.agent import Agent
from sharepod.agent.settings import AgentSettings
from sharepod.web.http_server import HttpServer, listening
from sharepod.web.http_server import serve as serve_http
from sharepod.web.metrics_access import TRACE_PATH, MetricsGuard

from .collector import AgentCollector
from .trace import trace

log = structlog.get_logger(__name__)

_TRACED_MAX_S = 60.0
"""Longest trace that a reader may request, in seconds. The turns of a busy node are kept for about ten."""
CACHED_S = 1.0
"""Seconds for which one scrape is served to all clients. This is far below any scrape interval."""


class Endpoints:
    """Both running servers. `metrics_port`, `health_port`: the ports on which they listen."""

    def __init__(self, metrics: HttpServer, health: HttpServer) -> None:
        self._servers = metrics, health
        self.metrics_port, self.health_port = metrics.port, health.port

    async def close(self) -> None:
        """Stop listening and drop every connection."""
        for server in self._servers:
            await server.close()


@dataclass(frozen=True)
class Sockets:
    """Sockets that listen already: for metrics and for probes."""

    metrics: socket.socket
    health: socket.socket

    @classmethod
    def of(cls, settings: AgentSettings) -> Sockets:
        """Listen on the addresses of the settings. Raises `OSError` if one is taken."""
        return cls(
            listening(settings.http_bind, settings.http_port),
            listening(settings.http_bind, settings.listens_for_probes()),
        )


async def serve(agent: Agent, guard: MetricsGuard | None, sockets: Sockets | None = None) -> Endpoints:
    """Serve on the addresses of the settings, or on `sockets`. Raises `OSError` if an address is taken.

    `guard`: decides who may read the metrics; None: every client may.
    """
    collector, computing, tracing = AgentCollector(agent), asyncio.Lock(), asyncio.Lock()
    scrape, scraped_at = b"", -math.inf

    async def metrics(_request: web.Request) -> web.Response:
        nonlocal scrape, scraped_at
        async with computing:
            now = asyncio.get_running_loop().time()
            if now - scraped_at >= CACHED_S:
                families = tuple(await collector.collect_in_steps())
                scrape, scraped_at = await asyncio.to_thread(_text, families), now
        return web.Response(body=scrape, headers={"Content-Type": CONTENT_TYPE_LATEST})

    async def traced(request: web.Request) -> web.Response:
        if tracing.locked():
            return web.Response(status=429, text="another trace is being written: ask again in a second\n")
        async with tracing:
            return await _trace(agent, request.query)

    async def healthz(_request: web.Request) -> web.Response:
        if agent.stands_by() and agent.unfit is not None:
            return web.Response(status=503, text=f"another agent serves; this one could not: {agent.unfit}\n")
        if agent.stands_by():
            return web.Response(text="stands by: another agent serves\n")
        reason = agent.unhealthy()
        if reason is not None:
            return web.Response(status=503, text=f"{reason}\n")
        return web.Response(text="ok\n")

    settings, figures, probes = agent.settings, web.Application(), web.Application()
    metrics_sock, health_sock = (sockets.metrics, sockets.health) if sockets is not None else (None, None)
    figures.add_routes([web.get("/metrics", metrics), web.get(TRACE_PATH, traced)])
    probes.add_routes([web.get("/healthz", healthz)])
    health = await serve_http(probes, settings.http_bind, settings.listens_for_probes(), sock=health_sock)
    try:
        metrics_server = await serve_http(
            figures, settings.http_bind, settings.http_port, guard=guard, sock=metrics_sock
        )
        served = Endpoints(metrics_server, health)
        ports = {"port": served.metrics_port, "health_port": served.health_port}
        log.info("serving metrics and health", address=settings.http_bind, **ports)
        return served
    except OSError:
        await health.close()
        raise


async def _trace(agent: Agent, query: Mapping[str, str]) -> web.Response:
    """Return the trace of the GPU `gpu` over the last `seconds`, both from the query."""
    known = {gpu.uuid: gpu.index for gpu in agent.gpus()}
    gpu = query.get("gpu", "")
    if gpu not in known:
        text = f"gpu={gpu}: write the UUID of a GPU of this node: {', '.join(sorted(known)) or 'none is known'}\n"
        return web.Response(status=404, text=text)
    try:
        seconds = float(query.get("seconds", "10"))
    except ValueError:
        seconds = math.nan
    if not 0 < seconds <= _TRACED_MAX_S:
        text = f"seconds={query['seconds']}: write a number above 0, {_TRACED_MAX_S:g} at most\n"
        return web.Response(status=400, text=text)
    now = time.monotonic_ns()
    turns, since = agent.tenants.turns_on(gpu, now - round(seconds * 1e9))
    names = {row.id: f"{row.namespace}/{row.workload}" for row in agent.tenants.rows()}
    about = {"node": agent.settings.node_name, "index": known[gpu]}

    def written() -> str:
        return json.dumps(trace(gpu, turns, names, since, now, **about), separators=(",", ":"))

    return web.json_response(text=await asyncio.to_thread(written))


class _Gathered(Collector):
    """Families whose samples are already collected."""

    def __init__(self, families: Iterable[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        """Return the families."""
        return self._families


def _text(families: Iterable[Metric]) -> bytes:
    registry = CollectorRegistry()
    registry.register(_Gathered(families))
    ProcessCollector(registry=registry)
    return generate_latest(registry)
