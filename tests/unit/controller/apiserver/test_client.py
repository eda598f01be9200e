"""The client: every failure has its kind, nothing waits for ever, and who does not lead does not write."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web
from kubernetes.aio.client import Configuration
from sharepod.controller.apiserver.client import PODS, Client, NotLeadingError
from sharepod.controller.apiserver.reflector import Reflector
from sharepod.kube import (
    AlreadyExistsError,
    ApiError,
    ConflictError,
    ForbiddenError,
    GoneError,
    InvalidError,
    Json,
    NotFoundError,
    UnauthorizedError,
    UnavailableError,
)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@asynccontextmanager
async def serving(handler: Handler, **options: Any) -> AsyncIterator[Client]:
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", handler)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    config = Configuration()
    config.host = f"http://127.0.0.1:{runner.addresses[0][1]}"
    client = Client(config, **{"read_timeout": 5.0, "write_timeout": 5.0, **options})
    try:
        yield client
    finally:
        await client.close()
        await runner.cleanup()


@pytest.mark.parametrize(
    ("status", "reason", "kind"),
    [
        (400, "BadRequest", InvalidError),
        (401, "Unauthorized", UnauthorizedError),
        (403, "Forbidden", ForbiddenError),
        (404, "NotFound", NotFoundError),
        (409, "Conflict", ConflictError),
        (409, "AlreadyExists", AlreadyExistsError),
        (410, "Expired", GoneError),
        (422, "Invalid", InvalidError),
        (429, "TooManyRequests", UnavailableError),
        (500, "InternalError", UnavailableError),
        (503, "", UnavailableError),
    ],
)
async def test_each_refusal_has_its_kind_and_keeps_the_servers_words(
    status: int, reason: str, kind: type[ApiError]
) -> None:
    async def refuse(_: web.Request) -> web.Response:
        return web.json_response({"reason": reason, "message": "the words"}, status=status)

    async with serving(refuse) as client:
        with pytest.raises(ApiError) as caught:
            await client.get(PODS, "p", "n")
    assert type(caught.value) is kind
    assert caught.value.message == "the words"


async def test_a_server_that_does_not_answer_is_given_up_in_time() -> None:
    async def hang(_: web.Request) -> web.Response:
        await asyncio.sleep(60)
        return web.Response()

    async with serving(hang, read_timeout=0.2, write_timeout=0.2) as client:
        began = time.monotonic()
        with pytest.raises(UnavailableError):
            await client.get(PODS, "p", "n")
        with pytest.raises(UnavailableError):
            await client.patch_json(PODS, "p", [], "n")
        assert time.monotonic() - began < 3


async def test_who_does_not_lead_reads_and_does_not_write() -> None:
    called: list[str] = []

    async def note(request: web.Request) -> web.Response:
        called.append(request.method)
        return web.json_response({})

    async with serving(note, may_write=lambda: False) as client:
        await client.get(PODS, "p", "n")
        for write in (
            client.create(PODS, {}, "n"),
            client.patch_json(PODS, "p", [], "n"),
            client.patch_status(PODS, "p", {}, "n"),
            client.apply_status(PODS, "p", {}, "n"),
            client.replace(PODS, "p", {}, "n"),
            client.delete(PODS, "p", "n", uid="u"),
        ):
            with pytest.raises(NotLeadingError):
                await write
    assert called == ["GET"]


async def test_what_is_sent_is_what_the_api_server_expects() -> None:
    seen: list[tuple[str, str, str, Json]] = []

    async def note(request: web.Request) -> web.Response:
        body = await request.text()
        seen.append((request.method, request.path_qs, request.content_type, json.loads(body) if body else {}))
        return web.json_response({})

    async with serving(note) as client:
        await client.create(PODS, {"a": 1}, "n", strict=True)
        await client.patch_json(PODS, "p", [{"op": "test"}], "n")
        await client.patch_status(PODS, "p", {"b": 1}, "n")
        await client.delete(PODS, "p", "n", uid="u", resource_version="7")
    path = "/api/v1/namespaces/n/pods"
    assert seen[0] == ("POST", f"{path}?fieldValidation=Strict", "application/json", {"a": 1})
    assert seen[1][1:3] == (f"{path}/p", "application/json-patch+json")
    assert seen[2][1:3] == (f"{path}/p/status", "application/merge-patch+json")
    assert seen[3][3]["preconditions"] == {"uid": "u", "resourceVersion": "7"}


async def test_a_list_is_read_page_by_page_and_begins_anew_when_it_expires() -> None:
    calls: list[str] = []

    async def pages(request: web.Request) -> web.Response:
        token = request.query.get("continue", "")
        calls.append(token)
        if token == "two" and calls.count("two") == 1:
            return web.json_response({"reason": "Expired"}, status=410)
        following = {"": "two", "two": ""}[token]
        metadata = {"continue": following, "resourceVersion": "9"}
        return web.json_response({"metadata": metadata, "items": [{"page": token}]})

    async with serving(pages) as client:
        items, version = await client.list_all(PODS)
    assert [item["page"] for item in items] == ["", "two"]
    assert version == "9"
    assert calls == ["", "two", "", "two"]


async def test_after_a_gap_the_slim_watch_drops_what_vanished_unseen() -> None:
    def pod(name: str, version: int) -> Json:
        return {"metadata": {"name": name, "uid": name, "resourceVersion": str(version)}}

    lists = iter([["a", "b"], ["b", "c"]])
    last = asyncio.Event()

    async def serve(request: web.Request) -> web.StreamResponse:
        if "watch" not in request.query:
            names = next(lists)
            return web.json_response({"metadata": {"resourceVersion": "5"}, "items": [pod(name, 1) for name in names]})
        answer = web.StreamResponse()
        await answer.prepare(request)
        if request.query["resourceVersion"] == "5" and not last.is_set():
            # One event cut in two, one that is large, then the version is too old.
            line = json.dumps({"type": "ADDED", "object": {**pod("d", 6), "filler": "x" * 300_000}}).encode() + b"\n"
            await answer.write(line[:1000])
            await answer.write(line[1000:])
            gone = {"type": "ERROR", "object": {"code": 410, "reason": "Expired", "message": "too old"}}
            await answer.write(json.dumps(gone).encode() + b"\n")
            last.set()
        else:
            await asyncio.sleep(30)
        return answer

    put: list[str] = []
    dropped: list[str] = []
    async with serving(serve) as client:
        watch = Reflector(client, PODS, put=lambda item: put.append(item["metadata"]["uid"]), drop=dropped.append)
        task = asyncio.create_task(watch.run())
        try:
            async with asyncio.timeout(10):
                while "c" not in put:  # noqa: ASYNC110  in steps of the event loop
                    await asyncio.sleep(0.01)
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
    assert put == ["a", "b", "d", "b", "c"]
    assert sorted(dropped) == ["a", "d"]
