"""HTTP server: invalid requests of clients, and what of them is logged."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import pytest
from aiohttp import web
from sharepod.web.http_server import serve
from sharepod.web.metrics_access import MetricsGuard, Reviews

AMISS = {
    "no header": (b"GET / HTTP/1.1\r\n\x1b[31mfoo\r\n\r\n", b"400"),
    "a long header": (b"GET / HTTP/1.1\r\nA: " + b"a" * 10_000 + b"\r\n\r\n", b"400"),
    "no HTTP": (b"\x16\x03\x01\r\n\r\n", b"400"),
    "a token that is no text": (b"GET / HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer \xff\r\n\r\n", b"401"),
}


async def unknown(_path: str, _body: dict[str, Any]) -> Mapping[str, Any]:
    return {}


async def asked(sent: bytes, *, broken: bool = False) -> bytes:
    """Request a guarded page; return the status line. `broken`: True if the page itself has a fault."""
    guard = MetricsGuard(Reviews(unknown, ()))

    async def page(_: web.Request) -> web.Response:
        if broken:
            raise ValueError("ours")
        return web.Response()

    application = web.Application()
    application.router.add_get("/", page)
    server = await serve(application, "127.0.0.1", 0, guard=None if broken else guard)
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(sent)
        status = (await reader.readline()).split()[1]
        writer.close()
        return status
    finally:
        await server.close()


@pytest.mark.parametrize("amiss", AMISS)
async def test_a_malformed_request_is_answered_and_not_logged(amiss: str, caplog: pytest.LogCaptureFixture) -> None:
    sent, status = AMISS[amiss]
    assert await asked(sent) == status
    assert caplog.messages == []


async def test_a_fault_of_the_server_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    assert await asked(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n", broken=True) == b"500"
    assert len(caplog.messages) == 1
    assert "ours" in caplog.text
