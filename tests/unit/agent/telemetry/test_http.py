"""The agent's HTTP server: its answers, and the effect of floods and silent connections."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from sharepod.agent.agent import Agent
from sharepod.agent.telemetry import endpoints
from unit.agent.client import row
from unit.agent.in_process import started


@asynccontextmanager
async def served_http(agent: Agent) -> AsyncIterator[Callable[[bytes], Awaitable[bytes]]]:
    """Serve the agent over HTTP. Yield a function from a request to its whole answer. The answer is empty if the
    connection was closed without one."""
    http = await endpoints.serve(agent, None)

    async def ask(request: bytes) -> bytes:
        port = http.health_port if b" /he" in request else http.metrics_port
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        try:
            writer.write(request)
            return await asyncio.wait_for(reader.read(), 20)
        except ConnectionError:
            return b""
        finally:
            writer.close()

    try:
        yield ask
    finally:
        await http.close()


async def test_many_scrapes_at_once_cost_no_more_than_one(directory: Path) -> None:
    async with started(directory) as agent, served_http(agent) as ask:
        await agent.tenants.apply([row("a")])
        first = await ask(b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n")
        assert first.startswith(b"HTTP/1.1 200 OK\r\n")
        assert b'tenant="a"' in first
        await agent.tenants.apply([])
        text = first.split(b"\r\n\r\n", 1)[1]
        for _ in range(3):
            answer = await ask(2 * b"GET /metrics?x=1 HTTP/1.1\r\nHost: x\r\n\r\n")
            assert answer.split(b"\r\n\r\n", 1)[1] == text, "one connection is one question"


@pytest.mark.parametrize(
    ("request_", "answer"),
    [
        (b"HEAD /healthz HTTP/1.1\r\nHost: x\r\n\r\n", b"HTTP/1.1 200 OK"),
        (b"GET /secrets HTTP/1.1\r\nHost: x\r\n\r\n", b"HTTP/1.1 404 Not Found"),
        (b"POST /metrics HTTP/1.1\r\nHost: x\r\nContent-Length: 3\r\n\r\nabc", b"HTTP/1.1 405 Method Not Allowed"),
        (b"\x16\x03\x01\x02\r\n\r\n", b"HTTP/1.0 400 Bad Request"),
        (b"GET /" + 10_000 * b"x" + b" HTTP/1.1\r\n\r\n", b"HTTP/1.0 400 Bad Request"),
    ],
)
async def test_an_invalid_query_is_refused_and_its_connection_closed(
    directory: Path, request_: bytes, answer: bytes
) -> None:
    async with started(directory) as agent, served_http(agent) as ask:
        assert (await ask(request_)).split(b"\r\n")[0] == answer


@pytest.mark.promise("security-http")
async def test_who_asks_too_much_over_http_is_closed_and_who_says_nothing_takes_no_place_for_long(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sharepod.web.http_server._ASKS_AT_ONCE", 30.0)
    monkeypatch.setattr("sharepod.web.http_server._ASKS_PER_S", 5.0)
    monkeypatch.setattr("sharepod.web.http_server._WITHIN_S", 0.3)
    question = b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n"
    async with started(directory) as agent, served_http(agent) as ask:
        async with asyncio.timeout(20):
            silent = await asyncio.gather(*(ask(b"GET /he") for _ in range(12)))
        assert silent == [b""] * 12, "four of them made room, for there were eight"
        answers = [await ask(question) for _ in range(60)]
        assert answers[0].endswith(b"ok\n")
        assert answers.count(b"") >= 20
        async with asyncio.timeout(20):
            while not await ask(question):  # noqa: ASYNC110 - in time it is answered again
                await asyncio.sleep(0.1)


@pytest.mark.promise("security-http")
async def test_an_address_has_eight_connections_at_a_time(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sharepod.web.http_server._ASKS_AT_ONCE", 1e6)
    monkeypatch.setattr("sharepod.web.http_server._WITHIN_S", 60.0)
    question = b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n"
    async with started(directory) as agent, served_http(agent) as ask, asyncio.timeout(20):
        silent = [asyncio.ensure_future(ask(b"GET /he")) for _ in range(9)]
        await asyncio.wait(silent, return_when=asyncio.FIRST_COMPLETED)
        assert sum(each.done() for each in silent) == 1, "it made room"
        assert (await ask(question)).endswith(b"ok\n"), "another one made room"
        await asyncio.gather(*(_cancelled(each) for each in silent))


@pytest.mark.promise("security-probe-port")
async def test_silent_connections_from_everywhere_do_not_keep_a_probe_out(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sharepod.web.http_server._OPEN_EACH", 1000)  # so that one address can represent many
    monkeypatch.setattr("sharepod.web.http_server._ASKS_AT_ONCE", 1e6)
    monkeypatch.setattr("sharepod.web.http_server._WITHIN_S", 60.0)
    question = b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n"
    async with started(directory) as agent, served_http(agent) as ask, asyncio.timeout(20):
        silent = [asyncio.ensure_future(ask(b"GET /he")) for _ in range(40)]
        await asyncio.sleep(0.2)
        assert not any(each.done() for each in silent)
        for _ in range(20):
            silent += [asyncio.ensure_future(ask(b"GET /he")) for _ in range(8)]
            await asyncio.sleep(0.02)  # these connections are accepted before the probe's, and take all places
            assert (await ask(question)).endswith(b"ok\n")
        assert any(each.done() for each in silent), "the oldest made room"
        await asyncio.gather(*(_cancelled(each) for each in silent))


async def _cancelled(task: asyncio.Future[bytes]) -> None:
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
