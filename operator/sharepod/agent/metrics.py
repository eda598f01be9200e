"""`/metrics` for Prometheus and `/healthz` for the kubelet.

Values are read when they are asked for, at most once a second however many ask; nothing is counted twice.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable

from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, ProcessCollector, generate_latest

from .collector import AgentCollector
from .core import Agent

CACHED_S = 1.0


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
