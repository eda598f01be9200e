"""HTTP endpoints of the operator: `/metrics` for Prometheus; `/healthz` and `/readyz` for the kubelet, on a port of
their own.

The same health can be had of Kopf (`kopf run --liveness=...`), whose server has no limits.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Protocol

import structlog
from aiohttp import web
from aiohttp.typedefs import Handler
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from sharepod.web.http_server import serve
from sharepod.web.metrics_access import MetricsGuard

from . import metrics

log = structlog.get_logger(__name__)


class Watched(Protocol):
    """Part of the operator that the endpoints show."""

    def measure(self) -> None:
        """Bring the gauges up to date that are read when they are asked for."""

    def unready(self) -> str | None:
        """Return why the operator is not ready; None if it is."""

    def leads(self) -> bool:
        """Return whether this process leads."""

    def healthy(self) -> str:
        """Return a word for the health probe. Raise `RuntimeError` if a restart can help."""


async def serve_metrics(address: str, port: int, operator: Watched, guard: MetricsGuard | None) -> None:
    """Serve `/metrics` until cancelled, to whom `guard` lets read them; None: to whoever asks."""

    async def show(_: web.Request) -> web.Response:
        operator.measure()
        shown: list[CollectorRegistry] = [metrics.REGISTRY]
        if operator.leads():
            shown.append(metrics.LEADERS)
        return web.Response(body=b"".join(map(generate_latest, shown)), headers={"Content-Type": CONTENT_TYPE_LATEST})

    await _serve(address, port, {"/metrics": show}, guard)


async def serve_health(address: str, port: int, operator: Watched) -> None:
    """Serve `/healthz` and `/readyz` until cancelled."""

    async def show_health(_: web.Request) -> web.Response:
        try:
            return web.Response(text=f"{operator.healthy()}\n")
        except RuntimeError as error:
            log.error("unhealthy", why=str(error))
            return web.Response(status=503, text=f"{error}\n")

    async def show_ready(_: web.Request) -> web.Response:
        why = operator.unready()
        return web.Response(status=200 if why is None else 503, text=f"{why or 'ok'}\n")

    await _serve(address, port, {"/healthz": show_health, "/readyz": show_ready})


async def _serve(address: str, port: int, pages: Mapping[str, Handler], guard: MetricsGuard | None = None) -> None:
    application = web.Application()
    application.add_routes([web.get(path, show) for path, show in pages.items()])
    server = await serve(application, address, port, guard=guard)
    try:
        await asyncio.Event().wait()
    finally:
        await server.close()
