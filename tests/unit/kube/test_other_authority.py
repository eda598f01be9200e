"""An API server that comes back with another certificate authority: rejected as long as the old one is trusted."""

from __future__ import annotations

import socket
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from aiohttp import web
from harness.certs import Authority
from kubernetes.aio.client import Configuration
from sharepod.kube import Connection, UnavailableError

HOST = "127.0.0.1"


@asynccontextmanager
async def serving(authority: Authority, port: int) -> AsyncIterator[None]:
    """An API server whose certificate is of this authority."""
    pair = authority.issue("server", "apiserver", addresses=[HOST])
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(pair.certificate, pair.key)
    application = web.Application()

    async def answer(_: web.Request) -> web.Response:
        return web.json_response({"kind": "Node"})

    application.router.add_get("/{path:.*}", answer)
    runner = web.AppRunner(application)
    await runner.setup()
    await web.TCPSite(runner, HOST, port, ssl_context=context, reuse_address=True).start()
    try:
        yield
    finally:
        await runner.cleanup()


@pytest.mark.promise("operator-other-authority")
async def test_a_certificate_of_another_authority_counts_as_a_rejection_until_one_is_shown_that_is_trusted(
    tmp_path: Path,
) -> None:
    with socket.socket() as free:
        free.bind((HOST, 0))
        port = free.getsockname()[1]
    trusted, other = Authority(tmp_path / "trusted"), Authority(tmp_path / "other")
    config = Configuration(host=f"https://{HOST}:{port}")
    config.ssl_ca_cert = str(trusted.certificate)
    api = Connection(config, "test")
    try:
        async with serving(trusted, port):
            assert await api.get("/api/v1/nodes/a") == {"kind": "Node"}
        with pytest.raises(UnavailableError):
            await api.get("/api/v1/nodes/a")
        assert api.rejected_for_s == 0, "a server that is away rejects nothing"
        async with serving(other, port):
            for _ in range(2):
                with pytest.raises(UnavailableError, match="certificate verify failed"):
                    await api.get("/api/v1/nodes/a")
            assert api.rejected_for_s > 0
            watching = api.watch("/api/v1/nodes", {}, "1")
            with pytest.raises(UnavailableError, match="certificate verify failed"):
                await anext(watching)
        async with serving(trusted, port):
            await api.get("/api/v1/nodes/a")
            assert api.rejected_for_s == 0
    finally:
        await api.close()
