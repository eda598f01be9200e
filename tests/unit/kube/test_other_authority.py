"""An API server that returns with another certificate authority: it is rejected while only the old authority is
trusted."""

from __future__ import annotations

import contextlib
import shutil
import socket
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from aiohttp import web
from harness.certs import Authority
from kubernetes.aio.client import Configuration
from sharepod.kube import Connection, UnavailableError, trust

HOST = "127.0.0.1"


@asynccontextmanager
async def serving(authority: Authority, port: int) -> AsyncIterator[None]:
    """Run an API server whose certificate was issued by this authority."""
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


async def test_an_authority_that_is_replaced_is_trusted_by_new_calls_and_watches_and_the_former_one_no_longer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kubelet replaces a mounted authority in this way while the process runs."""
    monkeypatch.setattr(trust, "_AFTER_DOUBT_S", 0.0)
    with socket.socket() as free:
        free.bind((HOST, 0))
        port = free.getsockname()[1]
    former, later = Authority(tmp_path / "former"), Authority(tmp_path / "later")
    mounted = tmp_path / "ca.crt"
    shutil.copy(former.certificate, mounted)
    config = Configuration(host=f"https://{HOST}:{port}")
    config.ssl_ca_cert = str(mounted)
    api = Connection(config, "test")

    async def watch() -> None:
        async with contextlib.aclosing(api.watch("/api/v1/nodes", {}, "1")) as events:
            async for _ in events:
                return

    try:
        async with serving(former, port):
            await api.get("/api/v1/nodes/a")
        async with serving(later, port):
            for ask in (lambda: api.get("/api/v1/nodes/a"), watch):
                with pytest.raises(UnavailableError, match="certificate verify failed"):
                    await ask()
            mounted.write_text(later.certificate.read_text()[:100])  # the file is half written, so nothing changes
            with pytest.raises(UnavailableError, match="certificate verify failed"):
                await api.get("/api/v1/nodes/a")
            shutil.copy(later.certificate, mounted)
            await watch()
            assert await api.get("/api/v1/nodes/a") == {"kind": "Node"}
            assert api.rejected_for_s == 0
        async with serving(former, port):
            with pytest.raises(UnavailableError, match="certificate verify failed"):
                await api.get("/api/v1/nodes/a")
    finally:
        await api.close()


async def test_an_authority_that_is_replaced_is_looked_at_from_time_to_time_without_any_rejection(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    former, later = Authority(tmp_path / "former"), Authority(tmp_path / "later")
    mounted = tmp_path / "ca.crt"
    shutil.copy(former.certificate, mounted)
    config = Configuration(host="https://127.0.0.1:1")
    config.ssl_ca_cert = str(mounted)
    trusted = trust.Trust(config)
    first = trusted.context()
    shutil.copy(later.certificate, mounted)
    assert trusted.context() is first
    monkeypatch.setattr(trust, "_PERIOD_S", 0.0)
    second = trusted.context()
    assert second is not first
    assert trusted.context() is second
    mounted.unlink()
    assert trusted.context() is second
