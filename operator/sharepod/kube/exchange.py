"""HTTP/1.1 client: one request and one answer at a time over kept connections. A general client costs more time per
call (docs/decisions/0057-calls-without-a-general-client.md).

Guarantees:
- A connection carries one exchange at a time; a connection whose exchange was not completed is closed.
- A request is sent once, with one exception. If a kept connection turns out to be closed before any part of the answer
  arrives, a repeatable request (`_REPEATABLE`) is sent again, over a new connection.
- A connection that has been idle for `_IDLE_S`, or was opened with another TLS context, is not used again.
- Every failure is an `OSError`; timeouts are the caller's.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from ssl import SSLContext
from typing import cast
from urllib.parse import urlsplit

import httptools

_IDLE_S = 15.0
"""Seconds for which an idle connection is kept: shorter than servers and load balancers keep it."""
_REPEATABLE = frozenset({"GET", "PUT", "DELETE"})
"""Methods that have the same effect once and twice, so a request may be sent again."""
_NO_BODY = (204, 304)


@dataclass(frozen=True, slots=True)
class Answer:
    """Answer of the server. `headers`: value by name in lower case."""

    status: int
    headers: dict[str, str]
    body: bytes


class Exchanges:
    """Exchanges with one server.

    Args:
        url: Address of the server. A path in it is put before the path of each request.
        trust: Returns the TLS context of new connections; None: plain HTTP.
        server_name: Name that the server's certificate must be for; None: that of the URL.
        connect_timeout_s: Timeout in seconds of opening a connection.
    """

    def __init__(
        self, url: str, trust: Callable[[], SSLContext | None], server_name: str | None, connect_timeout_s: float
    ) -> None:
        parts = urlsplit(url)
        self._host = parts.hostname or ""
        self._port = parts.port or (443 if parts.scheme == "https" else 80)
        self._netloc = parts.netloc.rpartition("@")[2]
        self._prefix = parts.path.rstrip("/")
        self._trust = trust
        self._server_name = server_name
        self._connect_timeout_s = connect_timeout_s
        self._idle: deque[_Channel] = deque()
        self._closed = False

    def close(self) -> None:
        """Close all idle connections. A connection with an exchange under way closes after the exchange."""
        self._closed = True
        while self._idle:
            self._idle.pop().abort()

    async def exchange(self, method: str, path: str, headers: dict[str, str], body: bytes | None) -> Answer:
        """Send a request; return its answer. Raises `OSError`, or `ValueError` if a header contains the end of a
        line."""
        request = self._request(method, path, headers, body)
        channel, kept = self._kept(), True
        while True:
            if channel is None:
                channel, kept = await self._connected(), False
            try:
                answer = await channel.exchange(request)
            except _StaleError as error:
                if not kept or method not in _REPEATABLE:
                    raise ConnectionResetError("the server has closed the connection") from error
                channel = None
                continue
            except BaseException:
                channel.abort()
                raise
            self._keep(channel)
            return answer

    def _request(self, method: str, path: str, headers: dict[str, str], body: bytes | None) -> bytes:
        lines = [f"{method} {self._prefix}{path} HTTP/1.1", f"Host: {self._netloc}"]
        lines += [f"{name}: {value}" for name, value in headers.items()]
        if body is not None:
            lines.append(f"Content-Length: {len(body)}")
        head = "\r\n".join(lines)
        if head.count("\n") != len(lines) - 1 or head.count("\r") != len(lines) - 1:
            raise ValueError("a header has an end of a line in it")
        return head.encode() + b"\r\n\r\n" + (body or b"")

    def _kept(self) -> _Channel | None:
        """Return the connection that was used last and can be used again; close the others. None: there is none."""
        trust, now = self._trust(), time.monotonic()
        while self._idle:
            channel = self._idle.pop()
            if channel.is_open and channel.trust is trust and now < channel.idle_since + _IDLE_S:
                return channel
            channel.abort()
        return None

    def _keep(self, channel: _Channel) -> None:
        now = time.monotonic()
        if self._closed or not channel.is_reusable:
            channel.abort()
        else:
            channel.idle_since = now
            self._idle.append(channel)
        while self._idle and now >= self._idle[0].idle_since + _IDLE_S:
            self._idle.popleft().abort()

    async def _connected(self) -> _Channel:
        trust = self._trust()
        named = (self._server_name or self._host) if trust is not None else None
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(self._connect_timeout_s):
            _, channel = await loop.create_connection(
                lambda: _Channel(trust), self._host, self._port, ssl=trust, server_hostname=named
            )
        return channel


class _StaleError(ConnectionError):
    """The server closed the connection before any part of an answer."""


class _Channel(asyncio.Protocol):
    """One connection. `trust`: the TLS context with which it was opened."""

    def __init__(self, trust: SSLContext | None) -> None:
        self.trust = trust
        self.idle_since = 0.0
        self._transport: asyncio.Transport | None = None
        self._parser = httptools.HttpResponseParser(self)
        self._answer: asyncio.Future[Answer] | None = None
        self._headers: dict[str, str] = {}
        self._body: list[bytes] = []
        self._begun = False
        """True once the first bytes of the answer have arrived."""
        self._to_the_end = False
        """True if the answer gives no length of its body, which therefore ends when the server closes the
        connection."""
        self.is_reusable = True

    @property
    def is_open(self) -> bool:
        """True while the connection is open."""
        return self._transport is not None and not self._transport.is_closing()

    def abort(self) -> None:
        """Close the connection at once."""
        if self._transport is not None:
            self._transport.abort()

    async def exchange(self, request: bytes) -> Answer:
        """Send a request; return its answer. Raises `OSError`. After an error or a cancellation the caller must close
        the connection."""
        if self._transport is None or self._transport.is_closing():
            raise _StaleError
        self._begun = self._to_the_end = False
        self._answer = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        return await self._answer

    # Callbacks of asyncio

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Store the connection's transport."""
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        """Feed received bytes to the parser."""
        if self._answer is None or self._answer.done():  # no request is pending
            self.is_reusable = False
            self.abort()
            return
        self._begun = True
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._fail(ConnectionError(f"the answer is not HTTP: {error}"))

    def eof_received(self) -> bool:
        """Let asyncio close the connection when the server has closed its side."""
        return False

    def connection_lost(self, error: Exception | None) -> None:
        """Complete an answer whose body ends with the connection; fail any other pending exchange."""
        self._transport = None
        if self._answer is None or self._answer.done():
            return
        if self._to_the_end and error is None:
            self._complete()
        elif not self._begun:
            self._fail(_StaleError())
        else:
            self._fail(error if isinstance(error, OSError) else ConnectionResetError("the answer breaks off"))

    # Callbacks of the parser

    def on_message_begin(self) -> None:
        """Clear headers and body: an informational answer (100, 103) may have come before."""
        self._headers, self._body = {}, []

    def on_header(self, name: bytes, value: bytes) -> None:
        """Store a header."""
        self._headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        """Determine whether the body ends only with the connection."""
        known = "content-length" in self._headers or "transfer-encoding" in self._headers
        status = self._parser.get_status_code()
        self._to_the_end = not known and status >= 200 and status not in _NO_BODY

    def on_body(self, piece: bytes) -> None:
        """Store a part of the body."""
        self._body.append(piece)

    def on_message_complete(self) -> None:
        """Deliver the answer, unless it is informational (100, 103)."""
        if self._parser.get_status_code() >= 200:
            self._complete()

    def _complete(self) -> None:
        assert self._answer is not None
        if self._answer.done():  # this is a second answer to one request
            self.is_reusable = False
            return
        sent = self._transport is not None and self._transport.get_write_buffer_size() == 0
        self.is_reusable = sent and not self._to_the_end and self._parser.should_keep_alive()
        self._answer.set_result(Answer(self._parser.get_status_code(), self._headers, b"".join(self._body)))

    def _fail(self, error: OSError) -> None:
        self.is_reusable = False
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(error)
