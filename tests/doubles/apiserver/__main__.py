"""API server double as a separate process, with scheduler, kubelets and agents: the in-memory control plane of the
benchmarks.

    python -m doubles.apiserver --port 23000 --nodes 320 --gpus 8

Objects of any shape are accepted, because checking a schema takes milliseconds. Paths for the benchmark:

    GET  /double/calls              number of calls so far, by client, verb and resource
    POST /double/foreign?count=N    adds Pods that are no tenants
    POST /double/swing?milli=N      lets usage change by up to N thousandths
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import json
from collections import Counter
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, TypeAlias
from urllib.parse import parse_qsl

import uvicorn

from .errors import Refused
from .kinds import without_schemas
from .players import Players
from .server import ApiServer
from .storage import Storage

Message: TypeAlias = MutableMapping[str, Any]
Receive: TypeAlias = Callable[[], Awaitable[Message]]
Send: TypeAlias = Callable[[Message], Awaitable[None]]

_REMEMBERED = 50_000
"""Number of changes by which a watch may be behind before it gets 410."""
_YOUNG = 50_000
"""Number of new Python objects between two garbage collections, which examine only these objects. A full collection
would stop the double for half a second at 700 nodes. A real API server has no such stops.
"""
_BOOKMARK_S = 60.0
"""Seconds between two bookmarks, as in the real API server."""


class Front:
    """ASGI application that serves the double over HTTP."""

    def __init__(self, nodes: int, gpus: int) -> None:
        storage = Storage(copies=False, remembered=_REMEMBERED)
        kinds = without_schemas()
        self.double = ApiServer(storage, kinds, bookmark_s=_BOOKMARK_S)
        self.players = Players(storage, {kind.plural: kind for kind in kinds})
        self.players.add_nodes(nodes, gpus)
        self.calls: Counter[str] = Counter()

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Answer one HTTP request, or stream a watch."""
        headers = dict(scope["headers"])
        body = b""
        while (message := await receive())["type"] == "http.request":
            body += message.get("body", b"")
            if not message.get("more_body"):
                break
        query = dict(parse_qsl(scope["query_string"].decode(), keep_blank_values=True))
        path: str = scope["path"]
        if path.startswith("/double/"):
            await _answer(send, json.dumps(self._own(path.removeprefix("/double/"), query)).encode(), 200)
            return
        try:
            content = headers.get(b"content-type", b"").decode().partition(";")[0]
            call = self.double.parse(scope["method"], path, query, content, body)
            if call is None:
                await _answer(send, json.dumps(self.double.discovered(path)).encode(), 200)
                return
            who = headers.get(b"user-agent", b"").decode().partition("/")[0]
            part = f"/{call.subresource}" if call.subresource else ""
            self.calls[f"{who} {call.verb} {call.kind.plural}{part}"] += 1
            if call.verb == "watch":
                await self._watch(self.double.watch(call), receive, send)
                return
            await _answer(send, *self.double.do(call))
        except Refused as refused:
            await _answer(send, json.dumps(refused.status()).encode(), refused.code)

    async def _watch(self, events: Any, receive: Receive, send: Send) -> None:
        """Send events until they end or the client has disconnected."""
        first = await anext(events)  # a watch that starts too late gets 410 before the stream begins
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"application/json")]})
        await send({"type": "http.response.body", "body": first, "more_body": True})

        async def stream() -> None:
            async for lines in events:
                await send({"type": "http.response.body", "body": lines, "more_body": True})

        streaming = asyncio.ensure_future(stream())
        leaving = asyncio.ensure_future(receive())
        try:
            await asyncio.wait([streaming, leaving], return_when=asyncio.FIRST_COMPLETED)
        finally:
            leaving.cancel()
            streaming.cancel()
            await asyncio.gather(streaming, leaving, return_exceptions=True)
            await events.aclose()
        with contextlib.suppress(Exception):
            await send({"type": "http.response.body", "body": b"", "more_body": False})

    def _own(self, name: str, query: dict[str, str]) -> Any:
        if name == "calls":
            return dict(self.calls)
        if name == "foreign":
            self.players.add_foreign_pods(int(query["count"]))
        elif name == "swing":
            self.players.swing(int(query["milli"]))
        return {}


async def _answer(send: Send, body: bytes, status: int) -> None:
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


async def _serve(options: argparse.Namespace) -> None:
    front = Front(options.nodes, options.gpus)
    gc.set_threshold(_YOUNG, 1 << 30, 1 << 30)
    front.players.start()
    config = uvicorn.Config(
        front,
        host="127.0.0.1",
        port=options.port,
        lifespan="off",
        access_log=False,
        log_level="warning",
        timeout_graceful_shutdown=1,
        timeout_keep_alive=600,
    )
    try:
        await uvicorn.Server(config).serve()
    finally:
        await front.players.stop()


def main() -> None:
    """Serve the double until SIGTERM or SIGINT."""
    parser = argparse.ArgumentParser(description="an API server in memory")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--nodes", type=int, default=50)
    parser.add_argument("--gpus", type=int, default=8)
    uvicorn_loop = uvicorn.Config(lambda: None).get_loop_factory()
    with asyncio.Runner(loop_factory=uvicorn_loop) as runner:
        runner.run(_serve(parser.parse_args()))


if __name__ == "__main__":
    main()
