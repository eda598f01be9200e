"""HTTP endpoints of the operator: `/metrics` for Prometheus; on another port `/healthz` and `/readyz` for the kubelet.

Kopf can serve the same health (`kopf run --liveness=...`), but that server does not limit its clients.

Guarantees:
- The metrics are rendered in another thread, so the event loop is not blocked (0.25 s for 2,000 namespaces).
- Rendering takes at most a quarter of the time, however many clients scrape: for three times the duration of a
  rendering, every client gets that text.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from typing import Protocol

import structlog
from aiohttp import web
from aiohttp.typedefs import Handler
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from sharepod.web.http_server import serve
from sharepod.web.metrics_access import MetricsGuard

from . import metrics

_RESTS = 3
"""How long a rendered text is sent, as a multiple of the duration of its rendering. So rendering takes a quarter of the
time at most."""

log = structlog.get_logger(__name__)


class Watched(Protocol):
    """Methods of the operator that the endpoints call."""

    def measure(self) -> None:
        """Update the gauges that are computed at each scrape."""

    def unready(self) -> str | None:
        """Return why the operator is not ready; None if it is."""

    def leads(self) -> bool:
        """Return whether this process leads."""

    def healthy(self) -> str:
        """Return a short text for the health probe. Raise `RuntimeError` if a restart can help."""


class MetricsText:
    """Text of the metrics of an operator. `clock`: monotonic seconds."""

    def __init__(self, operator: Watched, clock: Callable[[], float] = time.monotonic) -> None:
        self._operator = operator
        self._clock = clock
        self._making = asyncio.Lock()
        self._text = b""
        self._shown_until = float("-inf")

    async def read(self) -> bytes:
        """Return the metrics as text, rendered now or within the last `_RESTS` rendering times."""
        async with self._making:
            began = self._clock()
            if began >= self._shown_until:
                self._operator.measure()
                shown: list[CollectorRegistry] = [metrics.REGISTRY]
                if self._operator.leads():
                    shown.append(metrics.LEADERS)
                self._text = await asyncio.to_thread(_text_of, shown)
                ended = self._clock()
                self._shown_until = ended + _RESTS * (ended - began)
            return self._text


def _text_of(registries: list[CollectorRegistry]) -> bytes:
    return b"".join(map(generate_latest, registries))


async def serve_metrics(address: str, port: int, operator: Watched, guard: MetricsGuard | None) -> None:
    """Serve `/metrics` until cancelled, to clients that `guard` admits. With `guard` None all clients are served."""

    text = MetricsText(operator)

    async def show(_: web.Request) -> web.Response:
        return web.Response(body=await text.read(), headers={"Content-Type": CONTENT_TYPE_LATEST})

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
