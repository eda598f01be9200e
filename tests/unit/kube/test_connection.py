"""The connection to the API server against a server that misbehaves in every way a real one can."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
from aiohttp import web
from sharepod.kube import (
    JSON_PATCH,
    Connection,
    ForbiddenError,
    NoApiServerError,
    NotFoundError,
    UnavailableError,
    connection,
)
from unit.scripted_server import Scripted, kubeconfig


async def test_calls_carry_identity_and_content(scripted: Scripted, api: Connection) -> None:
    scripted.answers({"kind": "Pod"})
    assert await api.get("/api/v1/namespaces/a/pods/b") == {"kind": "Pod"}
    patch = [{"op": "test", "path": "/metadata/uid", "value": "u"}]
    await api.patch("/x", patch, JSON_PATCH)
    request = scripted.asked[1]
    assert request.method == "PATCH"
    assert request.headers["Authorization"] == "Bearer first"
    assert request.headers["User-Agent"] == "sharepod-agent/test"
    assert request.headers["Content-Type"] == JSON_PATCH
    assert json.loads(scripted.bodies[1]) == patch


async def test_a_rotated_token_is_read_again(
    scripted: Scripted, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "token").write_text("first")
    connected = await Connection.open(kubeconfig(tmp_path, scripted.url, tokenFile="token"), "test")
    try:
        await connected.get("/x")
        (tmp_path / "token").write_text("second")
        await connected.get("/x")
        monkeypatch.setattr(connection, "_TOKEN_PERIOD_S", 0.0)
        await connected.get("/x")
        (tmp_path / "token").unlink()
        await connected.get("/x")
    finally:
        await connected.close()
    sent = [request.headers["Authorization"] for request in scripted.asked]
    assert sent == ["Bearer first", "Bearer first", "Bearer second", "Bearer second"]


async def test_without_a_way_to_the_api_server_the_agent_says_which_file_it_tried(tmp_path: Path) -> None:
    with pytest.raises(NoApiServerError, match="nowhere"):
        await Connection.open(tmp_path / "nowhere", "test")
    (tmp_path / "empty").write_text("")
    with pytest.raises(NoApiServerError, match="empty"):
        await Connection.open(tmp_path / "empty", "test")
    with pytest.raises(NoApiServerError, match="set kubeconfig"):
        await Connection.open(None, "test")


async def test_a_refusal_keeps_the_servers_words(scripted: Scripted, api: Connection) -> None:
    scripted.answers({"kind": "Status", "code": 404, "reason": "NotFound", "message": 'pods "b" not found'}, 404)
    with pytest.raises(NotFoundError, match="not found") as refused:
        await api.get("/x")
    assert (refused.value.status, refused.value.reason) == (404, "NotFound")
    scripted.answers("<html>proxy", 403)
    with pytest.raises(ForbiddenError, match="proxy"):
        await api.get("/x")


@pytest.mark.parametrize("status", [429, 500, 503])
async def test_a_server_in_trouble_is_unavailable(scripted: Scripted, api: Connection, status: int) -> None:
    scripted.answers({"message": "try later"}, status)
    with pytest.raises(UnavailableError, match="try later"):
        await api.get("/x")


@pytest.mark.parametrize("body", ["not json", "[1]", ""])
async def test_nonsense_is_no_answer(scripted: Scripted, api: Connection, body: str) -> None:
    scripted.answers(body)
    with pytest.raises(UnavailableError):
        await api.get("/x")


async def test_no_call_outlasts_its_timeout(scripted: Scripted, api: Connection) -> None:
    never = asyncio.Event()

    async def hang(request: web.Request) -> web.StreamResponse:
        await never.wait()
        return web.Response()

    scripted.respond = hang
    with pytest.raises(UnavailableError):
        await api.patch("/x", {}, JSON_PATCH, timeout_s=0.1)
    never.set()


async def test_a_refused_connection_is_unavailable(tmp_path: Path) -> None:
    connected = await Connection.open(kubeconfig(tmp_path, "http://127.0.0.1:1", token="t"), "test")
    try:
        with pytest.raises(UnavailableError):
            await connected.get("/x")
    finally:
        await connected.close()
