"""`/metrics` for Prometheus and `/healthz` for the kubelet.

Guarantee: a scrape is computed when it is asked for, at most once a second however many ask.
"""

from __future__ import annotations

import asyncio
import math

from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, ProcessCollector, generate_latest

from sharepod.agent.agent import Agent

from . import http
from .collector import AgentCollector

CACHED_S = 1.0
"""Seconds for which one scrape is given to all that ask: far below any scrape interval."""


async def serve(agent: Agent) -> http.HttpServer:
    """Serve on the address of the settings. Raises `OSError` if it is taken."""
    registry = CollectorRegistry()
    registry.register(AgentCollector(agent))
    ProcessCollector(registry=registry)

    scrape, scraped_at = b"", -math.inf

    async def metrics(_request: web.Request) -> web.Response:
        nonlocal scrape, scraped_at
        now = asyncio.get_running_loop().time()
        if now - scraped_at >= CACHED_S:
            scrape, scraped_at = generate_latest(registry), now
        return web.Response(body=scrape, headers={"Content-Type": CONTENT_TYPE_LATEST})

    async def healthz(_request: web.Request) -> web.Response:
        reason = agent.unhealthy()
        if reason is not None:
            return web.Response(status=503, text=f"{reason}\n")
        return web.Response(text="ok\n")

    application = web.Application()
    application.add_routes([web.get("/metrics", metrics), web.get("/healthz", healthz)])
    return await http.serve(application, agent.settings.http_bind, agent.settings.http_port)
