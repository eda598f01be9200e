"""Conversion server: answers the ConversionReviews of API servers over TLS, in every operator, whether it leads or not.

The API server asks for each object that it reads or writes in another version than the stored one, also those that the
operator lists: it must be there before anything is listed.

Guarantees:
- A review takes bounded bytes and time, and all reviews together at most half of the event loop's time, whoever sends
  them.
- An object that nests too deep to be parsed hinders no other object of its list.
- Large reviews, with their answers, take bounded bytes in all, however many connections send or read them; what finds
  no room waits, small ones never. While one waits, a large one that does not arrive is given up after a second.
- A renewed certificate is served to new connections within `_REREAD_S`; one that cannot be read is logged, and the
  former one serves on.
"""

from __future__ import annotations

import asyncio
import json
import ssl
import time
from collections import Counter
from collections.abc import AsyncIterator, Coroutine, Mapping
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any, Final

import structlog
from aiohttp import web

from sharepod.api.crd.served_versions import CONVERSION_PATH
from sharepod.api.versions.conversion_review import ReviewError, answer, why_failed
from sharepod.api.versions.kind_versions import KindVersions
from sharepod.web.http_server import KeptConnections, serve

from . import metrics
from .deep_reviews import deep_answer
from .settings import OperatorSettings

LARGEST_REVIEW: Final = 8 << 20
"""Bytes of a review: several of the largest objects that an API server takes (3 MiB in a request, 1.5 MiB stored)."""
SMALL: Final = 64 << 10
"""Bytes of a review that is always taken: of one or a few usual objects."""
HELD: Final = 64 << 20
"""Bytes of larger reviews that are held at a time."""
HELD_EACH: Final = 16 << 20
"""Bytes of them for one address: one review is read while another one is answered."""
_READ_S = 10.0
"""Seconds within which a review must have arrived, once there is room for it, and its answer must have been read; the
API server gives up after 30 s."""
_STEP_S, _STEP_BYTES, _SLOW_STEPS = 0.25, 256 << 10, 4
"""Seconds and bytes of a step of reading, and steps with less than these bytes after which a large review is given up
while another one waits for room: 1 MiB a second is far less than an API server sends. Steps, so that a loop that stood
still gives up nobody."""
_PIECE = 128 << 10
"""Bytes of an answer that are written at a time."""
_ROOM_S = 10.0
"""Seconds for which a review waits for room."""
_REREAD_S = 10.0
"""Seconds between two looks at the certificate: a Secret that is mounted takes a minute to be renewed."""
_OPEN_EACH, _OPEN_MAX = 256, 512
"""Connections open at a time for one address, and in all: an API server opens one for each question under way."""
_OWED_S = 0.005
"""Seconds of conversions after which the loop's other tasks get as long."""

log = structlog.get_logger(__name__)


class HeldBytes:
    """Bytes of large reviews that are held, by address."""

    def __init__(self) -> None:
        self._held: Counter[str] = Counter()
        self._changed = asyncio.Condition()
        self._waiting = 0

    @property
    def wanted(self) -> bool:
        """True while a review waits for room."""
        return self._waiting > 0

    @asynccontextmanager
    async def holding(self, address: str, size: int) -> AsyncIterator[None]:
        """Within it a review of that many bytes may be held. Raises `TimeoutError` where there is no room for it."""
        size = 0 if size <= SMALL else min(size, LARGEST_REVIEW)
        self._waiting += 1
        try:
            async with asyncio.timeout(_ROOM_S), self._changed:
                await self._changed.wait_for(lambda: not size or self._has_room(address, size))
                self._held[address] += size
        finally:
            self._waiting -= 1
        try:
            yield
        finally:
            self._held[address] -= size
            self._held += Counter()  # forgets addresses of which none is held
            async with self._changed:
                self._changed.notify_all()

    def _has_room(self, address: str, size: int) -> bool:
        return self._held[address] + size <= HELD_EACH and self._held.total() + size <= HELD


class Conversions:
    """Answers to reviews, one at a time. `kinds`: the versions of each kind."""

    def __init__(self, kinds: Mapping[str, KindVersions]) -> None:
        self._kinds = kinds
        self._turn = asyncio.Lock()
        self._owed_s = 0.0
        self._room = HeldBytes()

    async def respond(self, request: web.Request) -> web.StreamResponse:
        """Answer one review."""
        size = LARGEST_REVIEW if request.content_length is None else request.content_length
        sent: web.StreamResponse | None = None
        try:
            async with self._room.holding(request.remote or "", size):
                answer_ = await self._answered(request)
                sent = web.StreamResponse(status=answer_.status, headers=answer_.headers)
                async with asyncio.timeout(_READ_S):
                    await _send(request, sent, answer_.body)
        except TimeoutError:
            if sent is None:
                metrics.CONVERSIONS.labels("Refused").inc()
                return web.Response(status=503, text="reviews of too many bytes are under way already\n")
            if request.transport is not None:  # the answer is not read
                request.transport.abort()
        return sent

    async def _answered(self, request: web.Request) -> web.Response:
        try:
            async with asyncio.timeout(_READ_S):
                body = await self._read(request)
        except TimeoutError:
            metrics.CONVERSIONS.labels("Refused").inc()
            return web.Response(status=408, text=f"send the whole review within {_READ_S:.0f} s\n")
        except web.HTTPRequestEntityTooLarge:
            metrics.CONVERSIONS.labels("Refused").inc()
            return web.Response(status=413, text=f"a review has at most {LARGEST_REVIEW} bytes; list fewer at a time\n")
        async with self._turn:
            if self._owed_s > _OWED_S:
                await asyncio.sleep(self._owed_s)
                self._owed_s = 0.0
            began = time.monotonic()
            try:
                return self._respond(body)
            finally:
                self._owed_s += time.monotonic() - began

    async def _read(self, request: web.Request) -> bytearray:
        """Return the whole body. Raises `TimeoutError` if it does not arrive while another review waits for room."""
        body, slow = bytearray(), 0
        while not request.content.at_eof():
            before = len(body)
            with suppress(TimeoutError):
                async with asyncio.timeout(_STEP_S):
                    while len(body) - before < _STEP_BYTES and (arrived := await request.content.readany()):
                        body += arrived
            if len(body) > LARGEST_REVIEW:
                raise web.HTTPRequestEntityTooLarge(LARGEST_REVIEW, len(body))
            slow = slow + 1 if len(body) - before < _STEP_BYTES else 0
            if slow >= _SLOW_STEPS and self._room.wanted:
                raise TimeoutError
        return body

    def _respond(self, body: bytearray) -> web.Response:
        try:
            text, why = self._converted(body)
        except ReviewError as error:
            metrics.CONVERSIONS.labels("Refused").inc()
            return web.Response(status=400, text=f"{error}\n")
        except (ValueError, RecursionError):
            metrics.CONVERSIONS.labels("Refused").inc()
            return web.Response(status=400, text="the body is not JSON that can be read\n")
        if why:
            metrics.CONVERSIONS.labels("Failure").inc()
            log.warning("object not converted", why=why)
        else:
            metrics.CONVERSIONS.labels("Success").inc()
        return web.Response(text=text, content_type="application/json")

    def _converted(self, body: bytearray) -> tuple[str, str]:
        """Return the answer to a review, and why an object of it could not be converted; empty: all could."""
        try:
            reviewed = answer(json.loads(body), self._kinds)
            return json.dumps(reviewed), why_failed(reviewed)
        except RecursionError:
            return deep_answer(body.decode(), self._kinds)


async def _send(request: web.Request, response: web.StreamResponse, body: object) -> None:
    """Send an answer; return once its end is on its way. A TLS connection says that it is full only between pieces."""
    assert isinstance(body, bytes)
    response.content_length = len(body)
    await response.prepare(request)
    for start in range(0, len(body), _PIECE):
        await response.write(body[start : start + _PIECE])
    await response.write_eof()


class ServingCertificate:
    """Certificate and key of a server, as files that may change; `context` serves what was read last."""

    def __init__(self, certificate: Path, key: Path) -> None:
        self._files = (certificate, key)
        self._seen: tuple[bytes, bytes] | None = None
        self._trouble = ""
        self.context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)

    def reread(self) -> bool:
        """Read the files if they have changed. Return whether there is a certificate to serve."""
        try:
            certificate, key = (file.read_bytes() for file in self._files)
            if (certificate, key) != self._seen:
                # A context of which the two do not match would serve nobody: they are tried on another one first.
                for context in (ssl.create_default_context(ssl.Purpose.CLIENT_AUTH), self.context):
                    context.load_cert_chain(*self._files)
                self._seen, self._trouble = (certificate, key), ""
                log.info("conversion: certificate read", file=str(self._files[0]))
        except OSError as error:  # an SSLError is one
            if str(error) != self._trouble:
                self._trouble = str(error)
                log.error(
                    "conversion: certificate or key cannot be read; objects of other versions need it; trying again",
                    files=[str(file) for file in self._files],
                    error=str(error),
                    former_serves_on=self._seen is not None,
                )
        return self._seen is not None


async def serve_conversions(
    address: str, port: int, kinds: Mapping[str, KindVersions], certificate: ServingCertificate
) -> None:
    """Serve conversions until cancelled, from when there is a certificate."""
    while not certificate.reread():  # noqa: ASYNC110  a file wakes nobody
        await asyncio.sleep(_REREAD_S)
    application = web.Application()
    application.add_routes([web.post(CONVERSION_PATH, Conversions(kinds).respond)])
    kept = KeptConnections(tls=certificate.context, open_each=_OPEN_EACH, open_max=_OPEN_MAX)
    server = await serve(application, address, port, kept=kept)
    try:
        while True:
            await asyncio.sleep(_REREAD_S)
            certificate.reread()
    finally:
        await server.close()


def conversions_of(settings: OperatorSettings, kinds: Mapping[str, KindVersions]) -> Coroutine[Any, Any, None] | None:
    """Return the conversion server; None without a port, and where every kind has one version."""
    if not settings.conversion_port or not any(each.further for each in kinds.values()):
        return None
    assert settings.conversion_certificate is not None
    assert settings.conversion_key is not None
    certificate = ServingCertificate(settings.conversion_certificate, settings.conversion_key)
    return serve_conversions(settings.bind_address, settings.conversion_port, kinds, certificate)
