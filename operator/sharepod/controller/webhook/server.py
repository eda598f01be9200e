"""HTTPS server of the webhook: receives the reviews of API servers and passes them to Kopf, which answers them.

Kopf calls this server as it calls its own webhook servers, and passes in the function that answers a review.

Guarantees:
- The server listens once it has a certificate.
- A review takes bounded memory and time, whatever its sender. All reviews take at most half of the operator's time
  (`review_turns.py`).
- If a request cannot be answered, only its sender is affected. At most a few log lines a minute report such requests.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from typing import Any, Final

import structlog
from aiohttp import web

from sharepod.api.admission.line_webhook import BY_VOLUME, HANDLERS
from sharepod.rate_limit import RateLimiter
from sharepod.web.http_server import KeptConnections, serve

from .certificate_keeper import CertificateKeeper
from .review_turns import ReviewTurns
from .reviews import TooManyPartsError, left_of, refusal

LARGEST_REVIEW: Final = 4 << 20
"""Largest review in bytes: the largest object of an API server (3 MiB) and the review's other fields."""
_READ_S = 5.0
"""Seconds within which a review must have arrived and have a turn. The API server gives up after 5 s."""
_OPEN_EACH, _OPEN_MAX = 256, 512
"""Largest number of open connections for one address, and in total. An API server opens one for each review in
progress."""
_TOLD_PER_S, _TOLD_AT_ONCE = 0.1, 5.0
"""Log lines about requests that cannot be answered: rate per second, and burst. Any client may send such requests."""

Answer = Callable[..., Awaitable[Mapping[str, Any]]]

log = structlog.get_logger(__name__)


class WebhookServer:
    """Server of the webhook, as Kopf takes it for `settings.admission.server`."""

    def __init__(self, keeper: CertificateKeeper, address: str, port: int) -> None:
        self._keeper = keeper
        self._address = address
        self._port = port

    async def __call__(self, answer: Answer) -> AsyncGenerator[dict[str, Any], None]:
        """Serve until cancelled. `answer`: Kopf's function, which gets a review and returns its answer."""
        await self._keeper.ready.wait()

        async def respond(request: web.Request) -> web.Response:
            return await _respond(request, answer, turns, limiter)

        turns = ReviewTurns()
        limiter = RateLimiter(time.monotonic(), per_s=_TOLD_PER_S, burst=_TOLD_AT_ONCE)

        application = web.Application(client_max_size=LARGEST_REVIEW)
        application.add_routes([web.post(path, respond) for path in HANDLERS])
        kept = KeptConnections(tls=self._keeper.context, open_each=_OPEN_EACH, open_max=_OPEN_MAX)
        server = await serve(application, self._address, self._port, kept=kept)
        try:
            yield {}  # an empty configuration, so Kopf configures nothing
            await asyncio.Event().wait()
        finally:
            await server.close()


async def _respond(request: web.Request, answer: Answer, turns: ReviewTurns, limiter: RateLimiter) -> web.Response:
    address = request.remote or ""
    size = LARGEST_REVIEW if request.content_length is None else request.content_length
    try:
        with turns.holding(address, size) as taken:
            if not taken:
                return web.Response(status=503, text="reviews of too many bytes are under way already\n")
            async with asyncio.timeout(_READ_S):
                content = await request.read()
                await turns.begin(address)
            try:
                return web.json_response(await _answered(json.loads(content), answer, HANDLERS[request.path]))
            finally:
                turns.end()
    except TimeoutError:
        return web.Response(status=408, text=f"the review has not arrived, or had no turn, within {_READ_S:.0f} s\n")
    except web.HTTPRequestEntityTooLarge:
        return web.Response(status=413, text=f"a review has at most {LARGEST_REVIEW} bytes\n")
    except Exception as error:  # invalid content must affect its sender only
        if limiter.take(time.monotonic()):
            log.warning("a review cannot be answered", error=repr(error)[:200])
        return web.Response(status=400, text="the body is no review of a Pod that can be read\n")


async def _answered(review: Any, answer: Answer, handler: str) -> Mapping[str, Any]:
    volume = handler == BY_VOLUME
    try:
        left = left_of(review, volume=volume)
    except TooManyPartsError:
        return refusal(review, volume=volume)
    return await answer(left, webhook=handler)
