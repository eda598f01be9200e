"""Calls over kept connections, against servers that answer in every way that HTTP/1.1 allows, and in some
invalid ways."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest
from sharepod.kube import exchange
from sharepod.kube.exchange import Answer, Exchanges

Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}"


class Peer:
    """Server whose answer to each request is `answer`. None: it closes the connection without an answer."""

    def __init__(self) -> None:
        self.connections = 0
        self.requests: list[bytes] = []
        self.answer: Callable[[int], bytes | None] = lambda _: OK
        self.then_closes = False
        self.asked = asyncio.Semaphore(0)
        self.pause = asyncio.Event()
        self.pause.set()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = next(
                    (line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")), b""
                )
                body = await reader.readexactly(int(length.partition(b":")[2] or 0))
                self.requests.append(head + body)
                self.asked.release()
                await self.pause.wait()
                answer = self.answer(len(self.requests))
                if answer is None:
                    return
                writer.write(answer)
                await writer.drain()
                if self.then_closes:
                    return
        except (asyncio.IncompleteReadError, ConnectionError):
            return
        finally:
            writer.close()


@asynccontextmanager
async def served(peer: Peer) -> AsyncIterator[Exchanges]:
    server = await asyncio.start_server(peer.serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    exchanges = Exchanges(f"http://127.0.0.1:{port}/prefix/", lambda: None, None, 5.0)
    try:
        yield exchanges
    finally:
        exchanges.close()
        peer.pause.set()
        server.close()
        await server.wait_closed()


async def call(exchanges: Exchanges, method: str = "GET", body: bytes | None = None) -> Answer:
    async with asyncio.timeout(5):
        return await exchanges.exchange(method, "/x?a=b", {"Accept": "text"}, body)


async def test_one_connection_carries_one_call_after_the_other_and_each_says_what_it_asks() -> None:
    peer = Peer()
    async with served(peer) as exchanges:
        for _ in range(3):
            assert (await call(exchanges, "PATCH", b"[]")).body == b"{}"
    assert peer.connections == 1
    head = peer.requests[0]
    assert head.startswith(b"PATCH /prefix/x?a=b HTTP/1.1\r\nHost: 127.0.0.1:")
    assert head.endswith(b"\r\nAccept: text\r\nContent-Length: 2\r\n\r\n[]")


async def test_calls_at_the_same_time_have_connections_of_their_own_and_their_own_answers() -> None:
    peer = Peer()
    peer.pause.clear()
    peer.answer = lambda count: b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\n\r\n%d" % (count % 10)
    async with served(peer) as exchanges:
        calls = [asyncio.create_task(call(exchanges)) for _ in range(5)]
        for _ in range(5):
            await asyncio.wait_for(peer.asked.acquire(), 5)
        peer.pause.set()
        await asyncio.gather(*calls)
        assert peer.connections == 5


@pytest.mark.parametrize(
    ("answer", "body", "kept"),
    [
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n2\r\nde\r\n0\r\n\r\n", b"abcde", True),
        (b"HTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\n" + OK, b"{}", True),
        (b"HTTP/1.1 204 No Content\r\n\r\n", b"", True),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\nconnection: close\r\n\r\n{}", b"{}", False),
        (b"HTTP/1.0 200 OK\r\nContent-Length: 2\r\n\r\n{}", b"{}", False),
    ],
)
async def test_an_answer_is_read_in_every_form(answer: bytes, body: bytes, kept: bool) -> None:
    peer = Peer()
    peer.answer = lambda _: answer
    async with served(peer) as exchanges:
        assert (await call(exchanges)).body == body
        assert (await call(exchanges)).body == body
    assert (peer.connections == 1) is kept


async def test_an_answer_may_end_where_the_connection_does() -> None:
    peer = Peer()
    peer.answer, peer.then_closes = (lambda _: b"HTTP/1.1 200 OK\r\nRetry-After: 3\r\n\r\nabc"), True
    async with served(peer) as exchanges:
        answer = await call(exchanges)
    assert (answer.status, answer.headers, answer.body) == (200, {"retry-after": "3"}, b"abc")


@pytest.mark.parametrize(
    "answer", [b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nab", b"HTTP/1.1 200", b"nonsense\r\n\r\n"]
)
async def test_half_an_answer_and_nonsense_are_errors(answer: bytes) -> None:
    peer = Peer()
    peer.answer, peer.then_closes = (lambda _: answer), True
    async with served(peer) as exchanges:
        with pytest.raises(ConnectionError):
            await call(exchanges)
    assert len(peer.requests) == 1, "it was taken: to send it again could do it twice"


@pytest.mark.parametrize(("method", "again"), [("GET", True), ("DELETE", True), ("PATCH", False), ("POST", False)])
async def test_over_a_kept_connection_that_the_server_closes_only_what_can_be_repeated_is_sent_again(
    method: str, again: bool
) -> None:
    peer = Peer()
    peer.answer = lambda count: None if count == 2 else OK
    async with served(peer) as exchanges:
        await call(exchanges)
        if again:
            assert (await call(exchanges, method)).status == 200
        else:
            with pytest.raises(ConnectionResetError):
                await call(exchanges, method, b"{}")
    assert len(peer.requests) == (3 if again else 2)


async def test_a_new_connection_that_is_closed_without_an_answer_is_an_error_at_once() -> None:
    peer = Peer()
    peer.answer = lambda _: None
    async with served(peer) as exchanges:
        with pytest.raises(ConnectionResetError):
            await call(exchanges)
    assert len(peer.requests) == 1


async def test_the_answer_of_a_call_that_was_given_up_comes_to_no_other_call() -> None:
    peer = Peer()
    peer.answer = lambda count: b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\n\r\n%d" % count
    peer.pause.clear()
    async with served(peer) as exchanges:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await exchanges.exchange("GET", "/x", {}, None)
        peer.pause.set()
        assert (await call(exchanges)).body == b"2"
    assert peer.connections == 2


async def test_a_connection_that_was_idle_for_long_is_not_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    peer = Peer()
    async with served(peer) as exchanges:
        await call(exchanges)
        monkeypatch.setattr(exchange, "_IDLE_S", 0.0)
        await call(exchanges)
    assert peer.connections == 2


async def test_an_unrequested_message_of_a_server_is_no_answer() -> None:
    peer = Peer()
    peer.answer = lambda count: OK + (b"HTTP/1.1 500 No\r\nContent-Length: 0\r\n\r\n" if count == 1 else b"")
    async with served(peer) as exchanges:
        first = await call(exchanges)
        assert (first.status, first.headers) == (200, {"content-length": "2"})
        assert (await call(exchanges)).status == 200
    assert peer.connections == 2


async def test_a_header_cannot_bring_a_header_of_its_own() -> None:
    peer = Peer()
    async with served(peer) as exchanges:
        for value in ("a\r\nX-Other: b", "a\nb", "a\rb"):
            with pytest.raises(ValueError, match="end of a line"):
                await exchanges.exchange("GET", "/x", {"Authorization": value}, None)
    assert not peer.requests
