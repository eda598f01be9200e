"""Answers GET requests for a few paths, over HTTP/1.1, one for each connection.

Whoever reaches the port may ask, tenants' programs too. Guarantees: what one address asks too often, slowly or in too
many connections is closed unanswered, and costs the agent's loop next to nothing; an address that asks now and then
(the kubelet, Prometheus) is answered beside it.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from http import HTTPStatus

from .listener import Listener
from .pace import Pace

_CONNECTS_PER_S, _CONNECTS_AT_ONCE = 1000.0, 256.0
_ASKS_PER_S, _ASKS_AT_ONCE = 50.0, 100.0
"""Of one address."""
_OPEN_MAX, _OPEN_EACH = 64, 8
_ADDRESSES = 1024
"""So many addresses are remembered, those that came last."""
_REQUEST_MAX = 8192
_REQUEST_WITHIN_S = 5.0
_ANSWER_WITHIN_S = 10.0
_BACKLOG = 128


@dataclass(frozen=True)
class Answer:
    """To a request."""

    status: HTTPStatus
    text: bytes
    content_type: str = "text/plain; charset=utf-8"


class HttpServer:
    """`pages`: what is answered, by path; called on the loop. Raises `OSError` if it cannot listen there."""

    def __init__(self, address: str, port: int, pages: Mapping[str, Callable[[], Answer]]) -> None:
        self._pages = pages
        self._paces: OrderedDict[str, Pace] = OrderedDict()
        self._open: Counter[str] = Counter()
        self._tasks: set[asyncio.Task[None]] = set()
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        sock = socket.create_server((address, port), family=family, backlog=_BACKLOG)
        sock.setblocking(False)
        self.port: int = sock.getsockname()[1]
        self._listener = Listener(sock, "HTTP", self._admit, per_s=_CONNECTS_PER_S, burst=_CONNECTS_AT_ONCE)

    async def close(self) -> None:
        """Nobody is answered any more."""
        self._listener.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _admit(self, sock: socket.socket) -> None:
        try:
            address = str(sock.getpeername()[0])
        except OSError:  # it has gone already
            sock.close()
            return
        now = asyncio.get_running_loop().time()
        pace = self._paces.pop(address, None) or Pace(now, per_s=_ASKS_PER_S, burst=_ASKS_AT_ONCE)
        self._paces[address] = pace
        if len(self._paces) > _ADDRESSES:
            self._paces.popitem(last=False)
        if not pace.take(now) or self._open[address] >= _OPEN_EACH or self._open.total() >= _OPEN_MAX:
            sock.close()
            return
        self._open[address] += 1
        task = asyncio.create_task(self._serve(sock, address), name="http")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve(self, sock: socket.socket, address: str) -> None:
        writer = None
        try:
            sock.setblocking(False)
            async with asyncio.timeout(_REQUEST_WITHIN_S):
                reader, writer = await asyncio.open_connection(sock=sock, limit=_REQUEST_MAX)
                request = await reader.readuntil(b"\r\n\r\n")
            answer, with_text = self._answer(request)
            head = (
                f"HTTP/1.1 {answer.status.value} {answer.status.phrase}\r\nContent-Type: {answer.content_type}\r\n"
                f"Content-Length: {len(answer.text)}\r\nConnection: close\r\n\r\n"
            )
            writer.write(head.encode() + (answer.text if with_text else b""))
            async with asyncio.timeout(_ANSWER_WITHIN_S):
                writer.close()
                await writer.wait_closed()
        except (OSError, EOFError, TimeoutError, asyncio.LimitOverrunError):
            pass  # whose trouble it is
        finally:
            self._open[address] -= 1
            if not self._open[address]:
                del self._open[address]
            if writer is not None:
                writer.transport.abort()
            else:
                with contextlib.suppress(OSError):
                    sock.close()

    def _answer(self, request: bytes) -> tuple[Answer, bool]:
        """To a request, and whether its text is wanted."""
        words = request.split(b"\r\n", 1)[0].decode("latin-1").split(" ")
        if len(words) != 3 or not words[2].startswith("HTTP/1."):
            return Answer(HTTPStatus.BAD_REQUEST, b"this is no request of HTTP/1.1\n"), True
        method, target, _version = words
        if method not in ("GET", "HEAD"):
            return Answer(HTTPStatus.METHOD_NOT_ALLOWED, b"only GET and HEAD\n"), True
        page = self._pages.get(target.split("?", 1)[0])
        if page is None:
            known = " and ".join(sorted(self._pages))
            return Answer(HTTPStatus.NOT_FOUND, f"there is {known}\n".encode()), method == "GET"
        return page(), method == "GET"
