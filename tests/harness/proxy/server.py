"""Proxy between one client and the API server of a test cluster, with faults that a test sets.

Guarantees:
- TLS on both sides, checked against the cluster's authority; the client's bearer token is forwarded.
- Without a rule an answer passes byte for byte, a watch's events one by one as they arrive.
- Only the first rule that matches a call applies.
- The proxy ends with its `with` block, even if answers are still held back or silent.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import ssl
import struct
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

import aiohttp
from aiohttp import web

from harness.cluster import Cluster
from harness.components import LOOPBACK

from .calls import Call, call_of
from .faults import ErrorEvent, Fault, Hold, LoseAnswer, Mute, Refuse, Reset, Rule, Slow, Words, status

_HOP = frozenset(("connection", "keep-alive", "transfer-encoding", "upgrade", "content-length", "host", "expect"))
"""Headers that concern one connection only."""
_CONNECT_S = 10.0
_ANSWER_S = 30.0
"""Seconds that the test's own calls of the proxy may take."""
_PIECE = 64
"""Largest part of a slow answer that is delivered at once, in bytes."""
_REMEMBERED = 200_000
"""Calls that are remembered: more than a long benchmark makes."""

T = TypeVar("T")


def _all(_call: Call) -> bool:
    return True


@dataclass(slots=True)
class Record:
    """Call that the proxy has seen. Times: monotonic seconds."""

    call: Call
    began: float
    status: int | None = None
    """HTTP status of the answer that was sent; None if none was, or not yet."""
    ended: float | None = None


@dataclass(slots=True, eq=False)
class _Answer:
    """Answer that is being sent to the client."""

    call: Call
    transport: asyncio.Transport | None
    silent: bool = False
    error: ErrorEvent | Words | None = None
    turned: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when `error` is."""


class FaultProxy:
    """Fault-injecting proxy of `cluster`'s API server, at `server`. Use it in a `with` block; any thread may call its
    methods.
    """

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._rules: list[Rule] = []
        self._answers: set[_Answer] = set()
        self._pauses: list[tuple[Callable[[Call], bool], asyncio.Event]] = []
        self._expected: list[tuple[tuple[bytes, ...], threading.Event]] = []
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="fault proxy", daemon=True)
        self._session: aiohttp.ClientSession | None = None
        self._runner: web.ServerRunner | None = None
        self._port = 0
        self.records: deque[Record] = deque(maxlen=_REMEMBERED)
        """The calls so far, in order of arrival."""

    @property
    def server(self) -> str:
        """Return the URL of the proxy."""
        return f"https://{LOOPBACK}:{self._port}"

    def kubeconfig(self, token: str, name: str = "through-proxy") -> Path:
        """Return the path of a kubeconfig for the holder of `token`, with the proxy as API server."""
        return self._cluster.kubeconfig_for(token, name=name, server=self.server)

    def __enter__(self) -> Self:
        self._thread.start()
        self._in_loop(self._start())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._in_loop(self._end())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout=_ANSWER_S)
        self._loop.close()

    # Weather

    @contextlib.contextmanager
    def weather(self, *rules: Rule) -> Iterator[None]:
        """Add rules for the block. They precede the rules that exist already."""
        self._in_loop(self._set([*rules, *self._rules]))
        try:
            yield
        finally:
            self._in_loop(self._set([rule for rule in self._rules if rule not in rules]))

    def clear(self) -> None:
        """Remove all rules. Answers that are silent stay silent."""
        self._in_loop(self._set([]))

    def cut(self, where: Callable[[Call], bool] = _all) -> int:
        """Reset the connections of matching answers in progress, usually watches. Return their number."""

        async def cut() -> int:
            chosen = [answer for answer in self._answers if where(answer.call)]
            for answer in chosen:
                _reset(answer.transport)
            return len(chosen)

        return self._in_loop(cut())

    def silence(self, where: Callable[[Call], bool] = _all) -> int:
        """Permanently stop the bytes of matching answers in progress; their connections stay open. Return their
        number."""

        async def silence() -> int:
            chosen = [answer for answer in self._answers if where(answer.call)]
            for answer in chosen:
                answer.silent = True
            return len(chosen)

        return self._in_loop(silence())

    @contextlib.contextmanager
    def paused(self, where: Callable[[Call], bool] = _all) -> Iterator[None]:
        """Delay the bytes of matching answers to the end of the block. No bytes are lost. This applies to answers in
        progress and new ones."""
        resumed = self._in_loop(self._pause(where))
        try:
            yield
        finally:
            self._in_loop(self._resume(resumed))

    def send(self, event: ErrorEvent | Words, where: Callable[[Call], bool] = _all) -> int:
        """End matching watches in progress with an ERROR event, or other bytes. Return their number."""

        async def send() -> int:
            chosen = [answer for answer in self._answers if answer.call.verb == "watch" and where(answer.call)]
            for answer in chosen:
                answer.error = event
                answer.turned.set()
            return len(chosen)

        return self._in_loop(send())

    def expect(self, *parts: str) -> threading.Event:
        """Return an event that is set once a watch's event that contains all these texts has passed."""
        passed = threading.Event()

        async def expect() -> None:
            self._expected.append((tuple(part.encode() for part in parts), passed))

        self._in_loop(expect())
        return passed

    def watches(self, where: Callable[[Call], bool] = _all) -> int:
        """Return the number of matching watches that are in progress and not silent."""

        async def count() -> int:
            return sum(
                answer.call.verb == "watch" and not answer.silent and where(answer.call) for answer in self._answers
            )

        return self._in_loop(count())

    def seen(self, where: Callable[[Call], bool]) -> list[Record]:
        """Return the calls so far that match."""

        async def seen() -> list[Record]:
            return [record for record in self.records if where(record.call)]

        return self._in_loop(seen())

    # The server

    def _in_loop(self, work: Coroutine[Any, Any, T]) -> T:
        done: Future[T] = asyncio.run_coroutine_threadsafe(work, self._loop)
        return done.result(_ANSWER_S)

    async def _set(self, rules: list[Rule]) -> None:
        self._rules = rules

    async def _pause(self, where: Callable[[Call], bool]) -> asyncio.Event:
        resumed = asyncio.Event()
        self._pauses.append((where, resumed))
        return resumed

    async def _resume(self, resumed: asyncio.Event) -> None:
        self._pauses = [pause for pause in self._pauses if pause[1] is not resumed]
        resumed.set()

    async def _start(self) -> None:
        authority = self._cluster.authority
        pair = authority.issue("fault-proxy", "fault-proxy", addresses=[LOOPBACK])
        serving = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        serving.load_cert_chain(pair.certificate, pair.key)
        asking = ssl.create_default_context(cafile=str(authority.certificate))
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(ssl=asking, limit=0),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_S),
            auto_decompress=False,
        )
        self._runner = web.ServerRunner(
            web.Server(self._handle, handler_cancellation=True), access_log=None, shutdown_timeout=0.0
        )
        await self._runner.setup()
        listening = socket.create_server((LOOPBACK, 0))
        self._port = listening.getsockname()[1]
        await web.SockSite(self._runner, listening, ssl_context=serving).start()

    async def _end(self) -> None:
        self._rules = []
        for answer in list(self._answers):
            _reset(answer.transport)
        if self._runner is not None:
            await self._runner.cleanup()
        if self._session is not None:
            await self._session.close()
        rest = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in rest:
            task.cancel()
        await asyncio.gather(*rest, return_exceptions=True)

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        call = call_of(request.method, request.path, request.query)
        record = Record(call, time.monotonic())
        self.records.append(record)
        body = await request.content.read()
        rule = next((rule for rule in self._rules if rule.matches(call)), None)
        if rule is not None:
            rule.met += 1
        answer = _Answer(call, request.transport)
        self._answers.add(answer)
        try:
            return await self._answered(request, record, body, answer, rule.fault if rule else None)
        # the client or the server has closed the connection
        except (aiohttp.ClientError, ConnectionError, TimeoutError):
            return self._gone(request)
        finally:
            self._answers.discard(answer)
            record.ended = time.monotonic()

    async def _answered(
        self, request: web.BaseRequest, record: Record, body: bytes, answer: _Answer, fault: Fault | None
    ) -> web.StreamResponse:
        """Answer one request. A fault that needs no answer of the API server is applied instead of the call."""
        match fault:
            case Refuse():
                record.status = fault.code
                return _refusal(fault)
            case Reset():
                return self._gone(request)
            case Mute():
                await self._never()
            case ErrorEvent() | Words():
                record.status = 200
                return web.Response(body=fault.line, content_type="application/json")
        async with self._ask(request, body) as upstream:
            if isinstance(fault, Hold):
                held = await upstream.read()
                await self._held(fault)
                record.status = upstream.status
                return web.Response(status=upstream.status, headers=_headers(upstream), body=held)
            if isinstance(fault, LoseAnswer):
                await upstream.read()
                return self._gone(request)
            record.status = upstream.status
            response = web.StreamResponse(status=upstream.status, headers=_headers(upstream))
            await response.prepare(request)
            if record.call.verb == "watch":
                await self._relay_events(upstream, response, answer)
            else:
                await self._relay(upstream, response, answer, fault)
            await response.write_eof()
            return response

    @contextlib.asynccontextmanager
    async def _ask(self, request: web.BaseRequest, body: bytes) -> AsyncIterator[aiohttp.ClientResponse]:
        assert self._session is not None
        headers = {name: value for name, value in request.headers.items() if name.lower() not in _HOP}
        async with self._session.request(
            request.method, f"{self._cluster.server}{request.raw_path}", headers=headers, data=body or None
        ) as upstream:
            yield upstream

    async def _relay(
        self, upstream: aiohttp.ClientResponse, response: web.StreamResponse, answer: _Answer, fault: Fault | None
    ) -> None:
        async for chunk in upstream.content.iter_any():
            await self._may_pass(answer)
            if isinstance(fault, Slow):
                for start in range(0, len(chunk), _PIECE):
                    await response.write(chunk[start : start + _PIECE])
                    await asyncio.sleep(_PIECE / fault.bytes_per_s)
            else:
                await response.write(chunk)

    async def _relay_events(
        self, upstream: aiohttp.ClientResponse, response: web.StreamResponse, answer: _Answer
    ) -> None:
        """Forward the events of a watch until it ends, falls silent, or gets an ERROR event."""
        rest = b""
        async with _first_of(upstream.content.readany, answer.turned) as read:
            while True:
                chunk = await read()
                if answer.error is not None:
                    await response.write(answer.error.line)
                    return
                await self._may_pass(answer)
                if not chunk:
                    await response.write(rest)
                    return
                *lines, rest = (rest + chunk).split(b"\n")
                for line in lines:
                    await response.write(line + b"\n")
                    self._passed(line)

    def _passed(self, line: bytes) -> None:
        for item in [item for item in self._expected if all(part in line for part in item[0])]:
            item[1].set()
            self._expected.remove(item)

    async def _may_pass(self, answer: _Answer) -> None:
        """Wait while the answer is paused. If it is silent, wait until the client closes the connection."""
        for where, resumed in list(self._pauses):
            if where(answer.call):
                await resumed.wait()
        if answer.silent:
            await self._never()

    async def _held(self, hold: Hold) -> None:
        released = asyncio.Event()
        hold.when_released(lambda: self._loop.call_soon_threadsafe(released.set))
        hold.held.set()
        await released.wait()

    async def _never(self) -> None:
        await asyncio.Event().wait()  # wait until the client closes the connection, which cancels this task

    @staticmethod
    def _gone(request: web.BaseRequest) -> web.StreamResponse:
        _reset(request.transport)
        return web.Response()  # this answer goes into a closed connection


@contextlib.asynccontextmanager
async def _first_of(
    read: Callable[[], Coroutine[Any, Any, bytes]], turned: asyncio.Event
) -> AsyncIterator[Callable[[], Coroutine[Any, Any, bytes]]]:
    """Return a function that returns the next result of `read`, or empty bytes once `turned` is set."""
    turning = asyncio.create_task(turned.wait())
    tasks: list[asyncio.Task[bytes]] = []

    async def either() -> bytes:
        tasks[:] = [asyncio.create_task(read())]
        await asyncio.wait((*tasks, turning), return_when=asyncio.FIRST_COMPLETED)
        return b"" if turning.done() else await tasks[0]

    try:
        yield either
    finally:
        turning.cancel()
        for task in tasks:
            task.cancel()
        await asyncio.gather(turning, *tasks, return_exceptions=True)


def _refusal(fault: Refuse) -> web.Response:
    headers = {} if fault.retry_after is None else {"Retry-After": str(fault.retry_after)}
    body = json.dumps(status(fault.code, fault.reason, fault.message)).encode()
    return web.Response(status=fault.code, headers=headers, body=body, content_type="application/json")


def _headers(upstream: aiohttp.ClientResponse) -> list[tuple[str, str]]:
    return [(name, value) for name, value in upstream.headers.items() if name.lower() not in _HOP]


def _reset(transport: asyncio.Transport | None) -> None:
    """Close a connection so that the other side sees a reset, not an orderly end."""
    if transport is None:
        return
    underlying = transport.get_extra_info("socket")
    if underlying is not None:
        with contextlib.suppress(OSError):
            underlying.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    transport.abort()
