"""Hands connections to an HTTP application, so many of each address.

Whoever reaches the port may ask, tenants' programs too. Guarantees: what one address asks too often, slowly or in too
many connections is closed unanswered, before anything of it is read; an address that asks now and then (the kubelet,
Prometheus) is answered beside it. One connection is one question.
"""

from __future__ import annotations

import asyncio
import socket
from collections import OrderedDict
from dataclasses import dataclass, field

from aiohttp import web

from sharepod.agent.sockets.listener import Listener
from sharepod.rate_limit import RateLimiter

_CONNECTS_PER_S, _CONNECTS_AT_ONCE = 1000.0, 256.0
_ASKS_PER_S, _ASKS_AT_ONCE = 50.0, 100.0
"""Of one address."""
_OPEN_EACH, _OPEN_MAX = 8, 64
_ADDRESSES = 1024
"""So many addresses are remembered, those that came last."""
_WITHIN_S = 10.0
"""Who has not asked and read the answer by then is closed."""
_BACKLOG = 128


@dataclass
class _Asker:
    limiter: RateLimiter
    open: list[asyncio.Transport] = field(default_factory=list)


class HttpServer:
    """`await serve(...)` makes one. `port`: where it listens."""

    def __init__(self, runner: web.AppRunner, sock: socket.socket) -> None:
        self.port: int = sock.getsockname()[1]
        self._runner = runner
        self._askers: OrderedDict[str, _Asker] = OrderedDict()
        self._tasks: set[asyncio.Task[None]] = set()
        self._loop = asyncio.get_running_loop()
        self._listener = Listener(sock, "HTTP", self._admit, per_s=_CONNECTS_PER_S, burst=_CONNECTS_AT_ONCE)

    async def close(self) -> None:
        """Nobody is answered any more."""
        self._listener.close()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for asker in self._askers.values():
            for transport in asker.open:
                transport.abort()
        await self._runner.cleanup()

    def _admit(self, sock: socket.socket) -> None:
        try:
            address = str(sock.getpeername()[0])
        except OSError:  # it has gone already
            sock.close()
            return
        now = self._loop.time()
        asker = self._askers.pop(address, None) or _Asker(RateLimiter(now, per_s=_ASKS_PER_S, burst=_ASKS_AT_ONCE))
        self._askers[address] = asker
        asker.open = [transport for transport in asker.open if not transport.is_closing()]
        # Those whose transport is being made count with the tasks.
        there = len(self._tasks) + sum(len(each.open) for each in self._askers.values())
        if not asker.limiter.take(now) or len(asker.open) >= _OPEN_EACH or there >= _OPEN_MAX:
            sock.close()
        else:
            task = self._loop.create_task(self._hand_over(sock, asker), name="http")
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        if len(self._askers) > _ADDRESSES:
            _address, forgotten = self._askers.popitem(last=False)
            for transport in forgotten.open:
                transport.abort()

    async def _hand_over(self, sock: socket.socket, asker: _Asker) -> None:
        sock.setblocking(False)
        assert self._runner.server is not None
        try:
            transport, _protocol = await self._loop.connect_accepted_socket(self._runner.server, sock)
        except OSError:
            sock.close()
            return
        asker.open.append(transport)
        self._loop.call_later(_WITHIN_S, transport.abort)


async def serve(application: web.Application, address: str, port: int) -> HttpServer:
    """Listens. Raises `OSError` where it cannot."""
    application.on_response_prepare.append(_last)
    runner = web.AppRunner(application, access_log=None, handle_signals=False, shutdown_timeout=1.0)
    await runner.setup()
    try:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        sock = socket.create_server((address, port), family=family, backlog=_BACKLOG)
        sock.setblocking(False)
        return HttpServer(runner, sock)
    except OSError:
        await runner.cleanup()
        raise


async def _last(_request: web.Request, response: web.StreamResponse) -> None:
    response.force_close()
