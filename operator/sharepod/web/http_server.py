"""HTTP server with limits per client address: one request per connection, or several for clients that keep it open.

Anything that reaches the port may send requests, including programs of tenants.

Guarantees:
- Connections of an address above its rate are closed unread and unanswered; slow clients are closed after `_WITHIN_S`.
- An address that asks occasionally (the kubelet, Prometheus, an API server) is answered even during a flood.
- If all places are taken, a new connection replaces an open one: preferably of an address without a reader that the
  guard has allowed, then without a pending request, then the oldest. It is refused only if all open ones belong to
  readers.
- Invalid requests are answered but not logged: a client could fill the log with them.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import ssl
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from http import HTTPStatus

from aiohttp import web
from aiohttp.http import HttpProcessingError
from aiohttp.typedefs import Handler, Middleware

from sharepod.listener import Listener
from sharepod.rate_limit import RateLimiter

from .metrics_access import MetricsGuard

_CONNECTS_PER_S, _CONNECTS_AT_ONCE = 1000.0, 256.0
"""Limit on connections from all addresses together: accepted per second, and at once. It bounds the time for closing
them."""
_ASKS_PER_S, _ASKS_AT_ONCE = 50.0, 100.0
"""Limit on requests of one address: per second, and at once. Prometheus and the kubelet send far fewer."""
_OPEN_EACH, _OPEN_MAX = 8, 64
"""Limit on open connections: of one address, and of all addresses."""
_ADDRESSES = 1024
"""Most client addresses that are remembered, the latest ones, so that memory is bounded for any number of addresses."""
_READERS = 64
"""Most addresses of readers that are remembered, the latest ones. Prometheus has one or two addresses."""
_WITHIN_S = 10.0
"""Seconds from accept within which the client must have read the answer. A scrape's timeout is usually 10 s too."""
_BACKLOG = 128
"""Most connections that wait to be accepted."""
_IDLE_S = 120.0
"""Seconds that a kept connection may be idle: longer than the 90 s after which Go's client closes one. So the client
closes first, and no request meets a closing connection."""
_HANDSHAKE_S = 5.0
"""Timeout of a TLS handshake in seconds."""


def _is_ours(record: logging.LogRecord) -> bool:
    """Return True if a log record of the HTTP library reports a fault of this server, False if a client's input caused
    it."""
    return not (record.exc_info and isinstance(record.exc_info[1], HttpProcessingError))


_faults = logging.getLogger(__name__)
_faults.addFilter(_is_ours)


@dataclass(eq=False)
class _Connection:
    """Accepted connection. `address`: the client's."""

    address: str
    sock: socket.socket
    transport: asyncio.Transport | None = None
    """Transport of the connection. None until the HTTP application has the connection."""
    handed_over: bool = False
    reader: bool = False
    """True once the guard has allowed a request on this connection."""
    asks: bool = False
    """True while a request on this connection has no answer."""
    answered: bool = False
    """True once a request on this connection has been answered, if clients keep connections."""

    def is_closed(self) -> bool:
        """Return whether the connection or its transport is closed."""
        return self.handed_over and (self.transport is None or self.transport.is_closing())

    def drop(self) -> None:
        """Close the connection without an answer."""
        if self.transport is not None:
            self.transport.abort()
        elif not self.handed_over:  # its transport is still being created; it then finds the socket shut down
            with contextlib.suppress(OSError):
                self.sock.shutdown(socket.SHUT_RDWR)


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptConnections:
    """Settings for connections with several requests each, over TLS, for clients that send many, such as an API server.

    A connection must have got an answer within `_WITHIN_S`; later it may be idle. After an answer other than 200 it is
    closed, so the rate of accepted connections also bounds invalid requests.
    """

    tls: ssl.SSLContext
    open_each: int
    """Most open connections of one address."""
    open_max: int
    """Most open connections in total."""


class HttpServer:
    """HTTP server that `await serve(...)` starts. `guard`, `kept`: see `serve`."""

    def __init__(
        self,
        application: web.Application,
        *,
        guard: MetricsGuard | None,
        kept: KeptConnections | None,
    ) -> None:
        self._guard = guard
        self._kept = kept
        self._open_each = kept.open_each if kept is not None else _OPEN_EACH
        self._open_max = kept.open_max if kept is not None else _OPEN_MAX
        self._connections: dict[asyncio.BaseProtocol, _Connection] = {}
        """Open connections, in the order of their accept or last answer. The latest one is at the end."""
        self._readers: OrderedDict[str, None] = OrderedDict()
        """Addresses of clients that the guard has allowed. The latest one is at the end."""
        self._limiters: OrderedDict[str, RateLimiter] = OrderedDict()
        """Rate limiters by IP address. The address with the latest connection is at the end."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._loop = asyncio.get_running_loop()
        self._listener: Listener | None = None
        self.port = 0
        """Port that the server listens on."""
        application.middlewares.append(self._attending())
        self._runner = web.AppRunner(
            application,
            access_log=None,
            logger=_faults,
            handle_signals=False,
            shutdown_timeout=1.0,
            keepalive_timeout=_IDLE_S,
        )

    async def start(self, address: str, port: int, sock: socket.socket | None) -> None:
        """Listen on the address and port, or on the socket. Raises `OSError` if that is not possible."""
        await self._runner.setup()
        try:
            sock = sock or listening(address, port)
        except OSError:
            await self._runner.cleanup()
            raise
        self.port = sock.getsockname()[1]
        self._listener = Listener(sock, {"server": "http"}, self._admit, per_s=_CONNECTS_PER_S, burst=_CONNECTS_AT_ONCE)

    async def close(self) -> None:
        """Stop listening and drop every connection."""
        if self._listener is not None:
            self._listener.close()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for connection in self._connections.values():
            connection.drop()
        await self._runner.cleanup()

    def _admit(self, sock: socket.socket) -> None:
        try:
            address = str(sock.getpeername()[0])
        except OSError:  # already closed
            sock.close()
            return
        if not self._limiter_of(address).take(self._loop.time()) or not self._make_room(address):
            sock.close()
            return
        assert self._runner.server is not None
        protocol, connection = self._runner.server(), _Connection(address, sock)
        self._connections[protocol] = connection
        task = self._loop.create_task(self._hand_over(protocol, connection), name="http")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _limiter_of(self, address: str) -> RateLimiter:
        limiter = self._limiters.pop(address, None) or RateLimiter(
            self._loop.time(), per_s=_ASKS_PER_S, burst=_ASKS_AT_ONCE
        )
        self._limiters[address] = limiter
        if len(self._limiters) > _ADDRESSES:
            self._limiters.popitem(last=False)
        return limiter

    def _make_room(self, address: str) -> bool:
        """Close connections until one more of this address may be opened. Return False if that is not possible."""
        for protocol in [protocol for protocol, connection in self._connections.items() if connection.is_closed()]:
            del self._connections[protocol]
        own = [protocol for protocol, connection in self._connections.items() if connection.address == address]
        if len(own) >= self._open_each:
            return self._drop_one(own)
        return len(self._connections) < self._open_max or self._drop_one(self._connections)

    def _drop_one(self, protocols: Iterable[asyncio.BaseProtocol]) -> bool:
        """Close the least important of these connections. Return False if all belong to readers."""
        spared = min(protocols, key=self._worth)
        if self._connections[spared].reader:
            return False
        self._connections.pop(spared).drop()
        return True

    def _worth(self, protocol: asyncio.BaseProtocol) -> tuple[bool, bool, bool]:
        connection = self._connections[protocol]
        return connection.reader, connection.address in self._readers, connection.asks

    async def _hand_over(self, protocol: asyncio.BaseProtocol, connection: _Connection) -> None:
        """Pass an accepted connection to the HTTP application, and abort it after `_WITHIN_S`."""
        connection.sock.setblocking(False)
        tls, within_s = (None, None) if self._kept is None else (self._kept.tls, _HANDSHAKE_S)
        try:
            connection.transport, _protocol = await self._loop.connect_accepted_socket(
                lambda: protocol, connection.sock, ssl=tls, ssl_handshake_timeout=within_s
            )
        except OSError:  # includes SSLError and the timeout of a handshake
            connection.sock.close()
            return
        finally:
            connection.handed_over = True
        if protocol in self._connections:
            self._loop.call_later(_WITHIN_S, self._drop_unanswered, connection)
        else:  # another connection has replaced this one while it was being created
            connection.drop()

    def _drop_unanswered(self, connection: _Connection) -> None:
        if not connection.answered:
            connection.drop()

    def _attending(self) -> Middleware:
        """Return the middleware that records each request and asks the guard."""

        @web.middleware
        async def attend(request: web.Request, handler: Handler) -> web.StreamResponse:
            connection = self._connections.get(request.protocol)
            if connection is None:  # another connection has replaced this one
                raise web.HTTPServiceUnavailable
            connection.asks = True
            try:
                if self._guard is not None:
                    if (refused := await self._guard.refusal(request)) is not None:
                        return refused
                    self._note_reader(connection)
                return await handler(request)
            finally:
                connection.asks = False
                if request.protocol in self._connections:  # this makes it the latest connection
                    self._connections[request.protocol] = self._connections.pop(request.protocol)

        return attend

    def _note_reader(self, connection: _Connection) -> None:
        connection.reader = True
        self._readers[connection.address] = None
        self._readers.move_to_end(connection.address)
        if len(self._readers) > _READERS:
            self._readers.popitem(last=False)

    async def note_answer(self, request: web.Request, response: web.StreamResponse) -> None:
        """Record that an answer is being sent. Have the connection closed after it, unless the client keeps it."""
        connection = self._connections.get(request.protocol)
        if self._kept is None or response.status != HTTPStatus.OK or connection is None:
            response.force_close()
        else:
            connection.answered = True


async def serve(
    application: web.Application,
    address: str,
    port: int,
    *,
    guard: MetricsGuard | None = None,
    kept: KeptConnections | None = None,
    sock: socket.socket | None = None,
) -> HttpServer:
    """Start a server on `address` and `port` (0: any free one). Raises `OSError` if that is not possible.

    `guard`: decides who may read; None: every client. `kept`: clients keep their connections; None: each connection has
    one request. `sock`: already listens there; owned.
    """
    server = HttpServer(application, guard=guard, kept=kept)
    application.on_response_prepare.append(server.note_answer)
    await server.start(address, port, sock)
    return server


def listening(address: str, port: int) -> socket.socket:
    """Return a socket that listens on `address` and `port` (0: any free one). Raises `OSError`."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    sock = socket.create_server((address, port), family=family, backlog=_BACKLOG)
    sock.setblocking(False)
    return sock
