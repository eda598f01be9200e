"""HTTP endpoints of the operator: `/metrics` for Prometheus, `/readyz` for the kubelet.

`/healthz` is Kopf's, on a port of its own (`handlers.py`).
"""

from __future__ import annotations

import asyncio
from typing import Protocol

from aiohttp import web
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from . import metrics


class Watched(Protocol):
    """Part of the operator that the endpoints show."""

    def measure(self) -> None:
        """Bring the gauges up to date that are read when they are asked for."""

    def unready(self) -> str | None:
        """Return why the operator is not ready; None if it is."""

    def leads(self) -> bool:
        """Return whether this process leads."""


async def serve(address: str, port: int, operator: Watched) -> None:
    """Serve until cancelled."""

    async def show_metrics(_: web.Request) -> web.Response:
        operator.measure()
        shown: list[CollectorRegistry] = [metrics.REGISTRY]
        if operator.leads():
            shown.append(metrics.LEADERS)
        return web.Response(body=b"".join(map(generate_latest, shown)), headers={"Content-Type": CONTENT_TYPE_LATEST})

    async def show_ready(_: web.Request) -> web.Response:
        why = operator.unready()
        return web.Response(status=200 if why is None else 503, text=f"{why or 'ok'}\n")

    app = web.Application()
    app.add_routes([web.get("/metrics", show_metrics), web.get("/readyz", show_ready)])
    runner = web.AppRunner(app, handle_signals=False, shutdown_timeout=1.0)
    await runner.setup()
    try:
        await web.TCPSite(runner, address, port).start()
        await asyncio.Event().wait()
    finally:
        await runner.cleanup()
