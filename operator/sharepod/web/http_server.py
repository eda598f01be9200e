"""HTTP server with limits per client address: one request per connection, or several where clients keep them open.

Anything that reaches the port may ask, also programs of tenants. Guarantees:
- An address that asks too often, too slowly or in too many connections is closed unanswered, before anything is read.
- An address that asks now and then (the kubelet, Prometheus) is answered meanwhile.
- A server for probes is never full: a new connection takes the place of the oldest one of all.
- What a client sends amiss is answered, and nothing of it is logged: it would push everything else out of the log.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from collections import OrderedDict
from dataclasses import dataclass, field
from http import HTTPStatus

from aiohttp import web
from aiohttp.http import HttpProcessingError

from sharepod.listener import Listener
from sharepod.rate_limit import RateLimiter

_CONNECTS_PER_S, _CONNECTS_AT_ONCE = 1000.0, 256.0
"""Connections accepted a second, and at once, from all addresses together: what bounds the agent's time for closing
them."""
_ASKS_PER_S, _ASKS_AT_ONCE = 50.0, 100.0
"""Requests answered a second, and at once, for one address: far more than Prometheus and the kubelet ask."""
_OPEN_EACH, _OPEN_MAX = 8, 64
"""Connections open at a time for one address, and in all."""
_ADDRESSES = 1024
"""Addresses remembered, the latest ones: a bound on memory however many addresses ask."""
_WITHIN_S = 10.0
"""Seconds from accept until the answer must have been read; the timeout of a scrape is usually 10 s too."""
_BACKLOG = 128
"""Connections that the kernel keeps waiting."""
_IDLE_S = 120.0
"""Seconds that a kept connection may be idle: longer than the 90 s after which Go's client closes one, so that the
client closes first and no request meets a connection that is being closed."""
_HANDSHAKE_S = 5.0
"""Seconds that a TLS handshake may take."""


def _is_ours(record: logging.LogRecord) -> bool:
    """Return whether a record of the HTTP library tells of a fault of this server, not of what a client has sent."""
    return not (record.exc_info and isinstance(record.exc_info[1], HttpProcessingError))


_faults = logging.getLogger(__name__)
_faults.addFilter(_is_ours)


@dataclass
class _ClientAddress:
    limiter: RateLimiter
    open: list[asyncio.Transport] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptConnections:
    """Connections that carry several requests each, over TLS: for clients that ask often, as an API server does.

    A connection must have been answered once within `_WITHIN_S`; later it may be idle. After an answer other than
    200 it is closed: what asks amiss has no more than connections are accepted.
    """

    tls: ssl.SSLContext
    open_each: int
    """Connections open at a time for one address."""
    open_max: int
    """Connections open at a time in all."""


class HttpServer:
    """Running HTTP server; `await serve(...)` makes one. `probes`, `kept`: see `serve`. `answered`: kept connections
    that have been answered once; those that are closed are taken out with each new one (transports of uvloop cannot be
    referred to weakly)."""

    def __init__(
        self,
        runner: web.AppRunner,
        sock: socket.socket,
        answered: set[asyncio.BaseTransport],
        *,
        probes: bool,
        kept: KeptConnections | None,
    ) -> None:
        self._probes = probes
        self._tls = kept.tls if kept is not None else None
        self._open_each = kept.open_each if kept is not None else _OPEN_EACH
        self._open_max = kept.open_max if kept is not None else _OPEN_MAX
        self._answered = answered
        self._oldest_first: OrderedDict[asyncio.Transport, None] = OrderedDict()
        self.port: int = sock.getsockname()[1]
        """Port that the server listens on."""
        self._runner = runner
        self._addresses: OrderedDict[str, _ClientAddress] = OrderedDict()
        """By IP address, the one that connected last at the end."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._loop = asyncio.get_running_loop()
        self._listener = Listener(sock, {"server": "http"}, self._admit, per_s=_CONNECTS_PER_S, burst=_CONNECTS_AT_ONCE)

    async def close(self) -> None:
        """Stop listening and drop every connection."""
        self._listener.close()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for client in self._addresses.values():
            for transport in client.open:
                transport.abort()
        await self._runner.cleanup()

    def _admit(self, sock: socket.socket) -> None:
        try:
            address = str(sock.getpeername()[0])
        except OSError:  # it has gone already
            sock.close()
            return
        now = self._loop.time()
        client = self._addresses.pop(address, None) or _ClientAddress(
            RateLimiter(now, per_s=_ASKS_PER_S, burst=_ASKS_AT_ONCE)
        )
        self._addresses[address] = client
        client.open = [transport for transport in client.open if not transport.is_closing()]
        # Connections whose transport is being made count with the tasks.
        in_all = len(self._tasks) + sum(len(each.open) for each in self._addresses.values())
        # Those that are just being handed over count twice: one place may not be enough.
        while self._probes and in_all >= self._open_max and (dropped := self._drop_oldest()):
            in_all -= dropped
        if not client.limiter.take(now) or len(client.open) >= self._open_each or in_all >= self._open_max:
            sock.close()
        else:
            task = self._loop.create_task(self._hand_over(sock, client), name="http")
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        if len(self._addresses) > _ADDRESSES:
            _address, forgotten = self._addresses.popitem(last=False)
            for transport in forgotten.open:
                transport.abort()

    def _drop_oldest(self) -> int:
        """Abort the connection that has been open longest. Return how many were."""
        while self._oldest_first:
            transport, _none = self._oldest_first.popitem(last=False)
            if not transport.is_closing():
                transport.abort()
                return 1
        return 0

    async def _hand_over(self, sock: socket.socket, client: _ClientAddress) -> None:
        """Pass an accepted connection to the HTTP application, and abort it after `_WITHIN_S`."""
        sock.setblocking(False)
        assert self._runner.server is not None
        within_s = None if self._tls is None else _HANDSHAKE_S
        try:
            transport, _protocol = await self._loop.connect_accepted_socket(
                self._runner.server, sock, ssl=self._tls, ssl_handshake_timeout=within_s
            )
        except OSError:  # an SSLError is one, and so is the end of a handshake's time
            sock.close()
            return
        client.open.append(transport)
        self._answered.difference_update([each for each in self._answered if each.is_closing()])
        if self._probes:
            while self._oldest_first and next(iter(self._oldest_first)).is_closing():
                self._oldest_first.popitem(last=False)
            self._oldest_first[transport] = None
        self._loop.call_later(_WITHIN_S, self._abort_unanswered, transport)

    def _abort_unanswered(self, transport: asyncio.Transport) -> None:
        if transport not in self._answered:
            transport.abort()


async def serve(
    application: web.Application,
    address: str,
    port: int,
    *,
    probes: bool = False,
    kept: KeptConnections | None = None,
    sock: socket.socket | None = None,
) -> HttpServer:
    """Listen on `address` and `port` (0: any free one). Raises `OSError` if that is not possible.

    `sock`: socket that listens there already, which is taken over.

    `probes`: the port is for the kubelet's probes, where the newest connection goes before the oldest. `kept`: clients
    keep their connections; None: each has one request.
    """
    answered: set[asyncio.BaseTransport] = set()

    async def note_answer(request: web.Request, response: web.StreamResponse) -> None:
        if response.status != HTTPStatus.OK:
            response.force_close()
        elif request.transport is not None:
            answered.add(request.transport)

    application.on_response_prepare.append(_close_after_answer if kept is None else note_answer)
    runner = web.AppRunner(
        application,
        access_log=None,
        logger=_faults,
        handle_signals=False,
        shutdown_timeout=1.0,
        keepalive_timeout=_IDLE_S,
    )
    await runner.setup()
    try:
        sock = sock or listening(address, port)
        return HttpServer(runner, sock, answered, probes=probes, kept=kept)
    except OSError:
        await runner.cleanup()
        raise


def listening(address: str, port: int) -> socket.socket:
    """Return a socket that listens on `address` and `port` (0: any free one). Raises `OSError`."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    sock = socket.create_server((address, port), family=family, backlog=_BACKLOG)
    sock.setblocking(False)
    return sock


async def _close_after_answer(_request: web.Request, response: web.StreamResponse) -> None:
    response.force_close()
