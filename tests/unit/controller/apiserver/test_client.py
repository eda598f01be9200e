"""The client of the API server: every failure has a type, every wait has a timeout, and a standby does not write."""

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
from sharepod.controller.apiserver import client as client_module
from sharepod.controller.apiserver.client import PODS, SHAREPODS, Client, NotLeadingError
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


@pytest.mark.parametrize(
    "answer",
    [
        "<html><h1>404 Not Found</h1></html>",
        "default backend - 404",
        "",
        "404 page not found",
        '{"reason": "NotFound", "message": "the server could not find the requested resource"}',
    ],
)
async def test_a_404_that_names_no_object_proves_no_deletion(answer: str) -> None:
    async def refuse(_: web.Request) -> web.Response:
        return web.Response(status=404, text=answer)

    async with serving(refuse) as client:
        for resource in (PODS, SHAREPODS):
            with pytest.raises(UnavailableError):
                await client.get(resource, "p", "n")


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


async def test_a_standby_reads_and_does_not_write() -> None:
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


async def test_an_answer_out_of_a_history_that_no_longer_exists_is_not_taken() -> None:
    asked, answers = asyncio.Event(), asyncio.Event()

    async def wait(_: web.Request) -> web.Response:
        asked.set()
        await answers.wait()
        return web.json_response({"metadata": {"resourceVersion": "9000"}})

    async with serving(wait) as client:
        written = asyncio.create_task(client.apply_status(PODS, "p", {}, "n"))
        await asked.wait()
        asked.clear()
        read = asyncio.create_task(client.get(PODS, "p", "n"))
        await asked.wait()
        client.forget()
        answers.set()
        with pytest.raises(NotLeadingError, match="versions went back"):
            await written
        with pytest.raises(UnavailableError, match="versions went back"):
            await read
        assert await client.get(PODS, "p", "n")


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


async def test_a_call_that_was_not_begun_is_made_again_when_the_server_says(monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []
    refusals: list[tuple[int, str | None]] = []

    def note(seconds: float) -> float:
        pauses.append(seconds)
        return 0.0

    monkeypatch.setattr(client_module, "jittered", note)

    async def answer(_: web.Request) -> web.Response:
        if not refusals:
            return web.json_response({"ok": True})
        status, after = refusals.pop(0)
        return web.json_response({}, status=status, headers={"Retry-After": after} if after is not None else None)

    async with serving(answer) as client:
        refusals[:] = [(429, "7"), (503, "2")]
        assert await client.create(PODS, {}, "n") == {"ok": True}
        assert pauses == [7.0, 2.0]
        many: list[list[tuple[int, str | None]]]
        many = [[(429, None)], [(503, None)], [(500, "1")], [(429, "31")], [(429, "1")] * 4]
        many += [[(429, after)] for after in ("Wed, 21 Oct 2037 07:28:00 GMT", "-1", "1e3", "1.5", "9" * 20, "soon")]
        for causes in many:
            refusals[:] = causes
            with pytest.raises(UnavailableError):
                await client.patch_json(PODS, "p", [], "n")
            assert not refusals
        refusals[:] = [(429, "1"), (200, None)]
        with pytest.raises(UnavailableError):
            await client.evict("p", "n", uid="u")
        assert len(refusals) == 1


@pytest.mark.parametrize("dry_run", [True, False])
async def test_an_eviction_of_a_pod_with_two_budgets_is_refused_though_it_is_answered_with_201(dry_run: bool) -> None:
    async def answer(_: web.Request) -> web.Response:
        # Kubernetes' answer (registry/core/pod/storage/eviction.go): status 201 with a Status of failure, not an error.
        message = "This pod has more than one PodDisruptionBudget, which the eviction subresource does not support."
        return web.json_response({"kind": "Status", "status": "Failure", "message": message, "code": 500}, status=201)

    async with serving(answer) as client:
        with pytest.raises(UnavailableError, match="more than one PodDisruptionBudget") as refused:
            await client.evict("p", "n", uid="u", dry_run=dry_run)
    assert refused.value.status == 429


@pytest.mark.parametrize("status", [400, 403, 500])
async def test_an_eviction_that_a_webhook_denies_is_refused_as_by_a_budget(status: int) -> None:
    """OpenKruise's PodUnavailableBudgets deny evictions in this way. Tenants can create them."""
    message = 'admission webhook "pub.example" denied the request: no more pods may be unavailable'

    async def answer(_: web.Request) -> web.Response:
        return web.json_response({"kind": "Status", "status": "Failure", "message": message}, status=status)

    async with serving(answer) as client:
        with pytest.raises(UnavailableError, match="no more pods") as refused:
            await client.evict("p", "n", uid="u")
    assert refused.value.status == 429


async def test_a_write_is_not_retried_by_a_former_leader(monkeypatch: pytest.MonkeyPatch) -> None:
    leads = True
    calls = 0
    monkeypatch.setattr(client_module, "jittered", lambda _: 0.0)

    async def answer(_: web.Request) -> web.Response:
        nonlocal leads, calls
        calls += 1
        leads = False
        return web.json_response({}, status=429, headers={"Retry-After": "1"})

    async with serving(answer, may_write=lambda: leads) as client:
        with pytest.raises(NotLeadingError):
            await client.create(PODS, {}, "n")
    assert calls == 1


def test_clients_do_not_come_back_together_nor_earlier_than_asked() -> None:
    waits = [client_module.jittered(5.0) for _ in range(50)]
    assert len(set(waits)) > 1
    assert min(waits) >= 5.0
    assert max(waits) <= 6.0
