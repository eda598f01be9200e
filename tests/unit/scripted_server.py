"""HTTP server with scripted answers."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TypeAlias

from aiohttp import web
from aiohttp.test_utils import TestServer

Respond: TypeAlias = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Scripted:
    """Server that sends the test's answers and records requests."""

    def __init__(self) -> None:
        self.respond: Respond = self._nothing
        self.asked: list[web.Request] = []
        self.bodies: list[str] = []
        self.url = ""

    async def _nothing(self, request: web.Request) -> web.StreamResponse:
        return web.json_response({})

    async def handle(self, request: web.Request) -> web.StreamResponse:
        self.asked.append(request)
        self.bodies.append(await request.text())
        return await self.respond(request)

    def answers(self, body: object, status: int = 200) -> None:
        async def respond(request: web.Request) -> web.StreamResponse:
            return web.Response(status=status, text=body if isinstance(body, str) else json.dumps(body))

        self.respond = respond


@asynccontextmanager
async def scripted_server() -> AsyncIterator[Scripted]:
    script = Scripted()
    application = web.Application()
    application.router.add_route("*", "/{path:.*}", script.handle)
    async with TestServer(application) as server:
        script.url = f"http://127.0.0.1:{server.port}"
        yield script


def kubeconfig(folder: Path, server: str, **user: str) -> Path:
    path = folder / "kubeconfig"
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "c", "cluster": {"server": server}}],
        "users": [{"name": "u", "user": user}],
        "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u"}}],
        "current-context": "c",
    }
    path.write_text(json.dumps(config))
    return path
