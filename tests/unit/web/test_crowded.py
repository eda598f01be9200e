"""HTTP server with many hostile connections: clients that may read are answered, whatever hostile clients do."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import pytest
import uvloop
from aiohttp import web
from sharepod.web.http_server import HttpServer, serve
from sharepod.web.metrics_access import TOKEN_REVIEWS, MetricsGuard, Reviews

READER = "127.0.2.1"
STRANGERS = [f"127.0.1.{number}" for number in range(1, 17)]
PLACES = 64
SILENCE = {
    "nothing": b"",
    "a part": b"GET /metrics HTTP/1.1\r\nHost: a\r\nAuthoriz",
    "a body that does not come": b"GET /metrics HTTP/1.1\r\nHost: a\r\nContent-Length: 9\r\n\r\n",
    "an unknown token": b"GET /metrics HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer made-up\r\n\r\n",
}
Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class Crowded:
    """HTTP server whose reads need authorization. A test clears `answering` to hold answers back, and `reviewing` to
    hold the API server's reviews back."""

    def __init__(self) -> None:
        self.answering, self.asked = asyncio.Event(), asyncio.Event()
        self.reviewing, self.reviewed = asyncio.Event(), asyncio.Event()
        self.answering.set()
        self.reviewing.set()
        self.streams: list[Streams] = []
        self.server: HttpServer

    async def review(self, path: str, body: Mapping[str, Any]) -> Mapping[str, Any]:
        self.reviewed.set()
        await self.reviewing.wait()
        known = path != TOKEN_REVIEWS or body["spec"]["token"] == "reader"
        return {"status": {"authenticated": known, "user": {"username": "prometheus"}, "allowed": known}}

    async def page(self, _request: web.Request) -> web.Response:
        self.asked.set()
        await self.answering.wait()
        return web.Response(text="figures")

    async def connect(self, address: str, sent: bytes) -> Streams:
        streams = await asyncio.open_connection("127.0.0.1", self.server.port, local_addr=(address, 0))
        self.streams.append(streams)
        streams[1].write(sent)
        return streams

    async def crowd(self, sent: bytes, *, addresses: list[str] = STRANGERS, number: int = PLACES) -> None:
        """Open connections that send this and read nothing. Return once the server has accepted or closed them."""
        for each in range(number):
            await self.connect(addresses[each % len(addresses)], sent)
        with contextlib.suppress(ConnectionError):  # the server closed the connection before it read the data
            # this answer shows that the earlier connections were accepted
            await (await self.connect(addresses[0], b"x\r\n\r\n"))[0].read()

    async def reader_asks(self, address: str = READER) -> asyncio.StreamReader:
        sent = b"GET /metrics HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer reader\r\n\r\n"
        return (await self.connect(address, sent))[0]


@asynccontextmanager
async def crowded() -> AsyncIterator[Crowded]:
    it, application = Crowded(), web.Application()
    application.router.add_get("/metrics", it.page)
    it.server = await serve(application, "127.0.0.1", 0, guard=MetricsGuard(Reviews(it.review, ())))
    try:
        async with asyncio.timeout(20):
            yield it
    finally:
        it.answering.set()
        it.reviewing.set()
        for _reader, writer in it.streams:
            writer.close()
        await it.server.close()


@pytest.mark.promise("security-metrics-port")
@pytest.mark.parametrize("sent", SILENCE)
async def test_a_reader_is_answered_where_strangers_have_taken_every_place(sent: str) -> None:
    async with crowded() as server:
        await server.crowd(SILENCE[sent])
        assert (await (await server.reader_asks()).read()).endswith(b"figures")


@pytest.mark.promise("security-metrics-port")
async def test_a_reader_that_is_being_answered_makes_room_for_nobody() -> None:
    async with crowded() as server:
        server.answering.clear()
        answer = await server.reader_asks()
        await server.asked.wait()
        await server.crowd(b"", number=2 * PLACES)
        await server.crowd(b"", addresses=[READER])
        server.answering.set()
        assert (await answer.read()).endswith(b"figures")


@pytest.mark.promise("security-metrics-port")
async def test_a_reader_whose_token_is_being_asked_about_makes_no_room_for_who_asks_nothing() -> None:
    async with crowded() as server:
        server.reviewing.clear()
        answer = await server.reader_asks()
        await server.reviewed.wait()
        await server.crowd(b"", number=2 * PLACES)
        server.reviewing.set()
        assert (await answer.read()).endswith(b"figures")


@pytest.mark.promise("security-metrics-port")
async def test_where_a_reader_was_before_a_connection_makes_no_room_for_strangers() -> None:
    async with crowded() as server:
        assert (await (await server.reader_asks()).read()).endswith(b"figures")
        reader, writer = await server.connect(READER, b"")
        await server.crowd(b"", number=2 * PLACES)
        writer.write(b"GET /metrics HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer reader\r\n\r\n")
        assert (await reader.read()).endswith(b"figures")


@pytest.mark.promise("security-metrics-port")
async def test_a_reader_is_answered_where_others_of_its_address_hold_all_that_one_may_have() -> None:
    async with crowded() as server:
        await server.crowd(b"", addresses=[READER], number=8)
        assert (await (await server.reader_asks()).read()).endswith(b"figures")


@pytest.mark.parametrize("new_loop", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_a_connection_that_makes_room_is_closed_on_the_agents_loop_and_on_the_operators(new_loop: Any) -> None:
    async def crowds() -> None:
        async with crowded() as server:
            reader, _writer = await server.connect(STRANGERS[0], b"")
            for _ in range(8):
                await server.connect(STRANGERS[0], b"")
            assert await reader.read() == b""

    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(crowds())
