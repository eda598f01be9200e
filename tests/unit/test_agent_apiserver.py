"""The agent's calls to the API server against a server that misbehaves in every way a real one can."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any, TypeAlias

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from sharepod.agent import apiserver, ledger
from sharepod.agent.apiserver import JSON_PATCH, ApiServer, NoApiServerError, Refused, Unreachable
from sharepod.agent.ledger import LedgerWatch
from sharepod.api.gpunode import Tenant

Respond: TypeAlias = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Scripted:
    """Answers as the test says; remembers what was asked."""

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


@pytest.fixture
async def scripted() -> AsyncIterator[Scripted]:
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


@pytest.fixture
async def api(scripted: Scripted, tmp_path: Path) -> AsyncIterator[ApiServer]:
    connected = await ApiServer.connect(kubeconfig(tmp_path, scripted.url, token="first"), "sharepod-agent/test")
    yield connected
    await connected.close()


async def test_calls_carry_identity_and_content(scripted: Scripted, api: ApiServer) -> None:
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
    connected = await ApiServer.connect(kubeconfig(tmp_path, scripted.url, tokenFile="token"), "test")
    try:
        await connected.get("/x")
        (tmp_path / "token").write_text("second")
        await connected.get("/x")
        monkeypatch.setattr(apiserver, "_TOKEN_PERIOD_S", 0.0)
        await connected.get("/x")
        (tmp_path / "token").unlink()
        await connected.get("/x")
    finally:
        await connected.close()
    sent = [request.headers["Authorization"] for request in scripted.asked]
    assert sent == ["Bearer first", "Bearer first", "Bearer second", "Bearer second"]


async def test_without_a_way_to_the_api_server_the_agent_says_which_file_it_tried(tmp_path: Path) -> None:
    with pytest.raises(NoApiServerError, match="nowhere"):
        await ApiServer.connect(tmp_path / "nowhere", "test")
    (tmp_path / "empty").write_text("")
    with pytest.raises(NoApiServerError, match="empty"):
        await ApiServer.connect(tmp_path / "empty", "test")
    with pytest.raises(NoApiServerError, match="set kubeconfig"):
        await ApiServer.connect(None, "test")


async def test_a_refusal_keeps_the_servers_words(scripted: Scripted, api: ApiServer) -> None:
    scripted.answers({"kind": "Status", "code": 404, "reason": "NotFound", "message": 'pods "b" not found'}, 404)
    with pytest.raises(Refused, match="not found") as refused:
        await api.get("/x")
    assert (refused.value.code, refused.value.reason) == (404, "NotFound")
    scripted.answers("<html>proxy", 403)
    with pytest.raises(Refused, match="proxy") as refused:
        await api.get("/x")
    assert refused.value.code == 403


@pytest.mark.parametrize("status", [429, 500, 503])
async def test_a_server_in_trouble_is_unreachable(scripted: Scripted, api: ApiServer, status: int) -> None:
    scripted.answers({"message": "try later"}, status)
    with pytest.raises(Unreachable, match="try later"):
        await api.get("/x")


@pytest.mark.parametrize("body", ["not json", "[1]", ""])
async def test_nonsense_is_no_answer(scripted: Scripted, api: ApiServer, body: str) -> None:
    scripted.answers(body)
    with pytest.raises(Unreachable):
        await api.get("/x")


async def test_no_call_outlasts_its_timeout(scripted: Scripted, api: ApiServer) -> None:
    never = asyncio.Event()

    async def hang(request: web.Request) -> web.StreamResponse:
        await never.wait()
        return web.Response()

    scripted.respond = hang
    with pytest.raises(Unreachable):
        await api.patch("/x", {}, JSON_PATCH, timeout_s=0.1)
    never.set()


async def test_a_refused_connection_is_unreachable(tmp_path: Path) -> None:
    connected = await ApiServer.connect(kubeconfig(tmp_path, "http://127.0.0.1:1", token="t"), "test")
    try:
        with pytest.raises(Unreachable):
            await connected.get("/x")
    finally:
        await connected.close()


def gpunode(version: int, *tenants: str, generation: int | None = None, uid: str = "u") -> dict[str, Any]:
    rows = [
        {
            "id": tenant,
            "namespace": "n",
            "podName": tenant,
            "gpus": ["GPU-0"],
            "requestMilli": 1,
            "limitMilli": 1,
            "memory": 1,
        }
        for tenant in tenants
    ]
    metadata = {"uid": uid, "name": "node-1", "generation": generation or version, "resourceVersion": str(version)}
    return {"metadata": metadata, "spec": {"tenants": rows}}


class Follower:
    """A LedgerWatch on a scripted server."""

    def __init__(self, api: ApiServer, folder: Path) -> None:
        self.applied: list[list[str]] = []
        self.failures = 0
        self.ledger = LedgerWatch(
            api, node="node-1", apply=self.apply, checkpoint=folder / "ledger.json", on_change=lambda: None
        )

    async def apply(self, rows: Any) -> None:
        if self.failures:
            self.failures -= 1
            raise OSError(28, "No space left on device")
        self.applied.append([row.id for row in rows])

    async def until(self, holds: Callable[[], bool]) -> None:
        tasks = [asyncio.create_task(self.ledger.follow()), asyncio.create_task(self.ledger.enforce())]
        try:
            async with asyncio.timeout(15):
                while not holds():
                    with contextlib.suppress(TimeoutError):  # not all that is waited for is a change of the ledger
                        await asyncio.wait_for(self.ledger.changed(), 0.05)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


def plays(script: Scripted, lists: list[dict[str, Any]], watches: list[list[dict[str, Any]]]) -> None:
    """Each list and each watch answers with the next of these; the last watch stays open."""

    async def respond(request: web.Request) -> web.StreamResponse:
        if "watch" not in request.query:
            return web.json_response(lists.pop(0) if len(lists) > 1 else lists[0])
        stream = web.StreamResponse()
        await stream.prepare(request)
        for event in watches.pop(0) if watches else []:
            await stream.write(json.dumps(event).encode() + b"\n")
        if not watches:
            await asyncio.sleep(30)
        return stream

    script.respond = respond


def listing(version: int, *items: dict[str, Any]) -> dict[str, Any]:
    return {"metadata": {"resourceVersion": str(version)}, "items": list(items)}


async def test_after_a_410_the_ledger_is_listed_again(scripted: Scripted, api: ApiServer, tmp_path: Path) -> None:
    gone = {"type": "ERROR", "object": {"kind": "Status", "code": 410, "reason": "Expired", "message": "too old"}}
    plays(
        scripted,
        [listing(5, gpunode(5, "a")), listing(9, gpunode(9, "a", "c"))],
        [[{"type": "MODIFIED", "object": gpunode(6, "a", "b")}, gone], []],
    )
    follower = Follower(api, tmp_path)
    await follower.until(lambda: follower.ledger.generation == 9)
    assert follower.applied[-1] == ["a", "c"]


async def test_a_watch_goes_on_where_the_last_one_ended(scripted: Scripted, api: ApiServer, tmp_path: Path) -> None:
    bookmark = {"type": "BOOKMARK", "object": {"metadata": {"resourceVersion": "40"}}}
    plays(
        scripted,
        [listing(5, gpunode(5, "a"))],
        [[bookmark], [{"type": "MODIFIED", "object": gpunode(41, "b")}], []],
    )
    follower = Follower(api, tmp_path)
    await follower.until(lambda: follower.ledger.generation == 41)
    watched = [request.query for request in scripted.asked if "watch" in request.query]
    assert [query["resourceVersion"] for query in watched[:2]] == ["5", "40"]
    assert {query["fieldSelector"] for query in watched} == {"metadata.name=node-1"}
    assert all(240 <= int(query["timeoutSeconds"]) <= 300 for query in watched)
    assert len([request for request in scripted.asked if "watch" not in request.query]) == 1


async def test_a_watch_that_fell_silent_is_given_up(
    scripted: Scripted, api: ApiServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(apiserver, "WATCH_SILENCE_S", 0.1)
    silent = asyncio.Event()
    versions = iter([5, 6, 7, 8, 9])

    async def respond(request: web.Request) -> web.StreamResponse:
        if "watch" not in request.query:
            version = next(versions)
            return web.json_response(listing(version, gpunode(version, "a")))
        stream = web.StreamResponse()
        await stream.prepare(request)
        await silent.wait()
        return stream

    scripted.respond = respond
    follower = Follower(api, tmp_path)
    await follower.until(lambda: (follower.ledger.generation or 0) >= 6)
    silent.set()


async def test_a_ledger_that_cannot_be_put_in_force_is_tried_again_and_not_called_observed(
    scripted: Scripted, api: ApiServer, tmp_path: Path
) -> None:
    plays(scripted, [listing(5, gpunode(5, "a"))], [[]])
    follower = Follower(api, tmp_path)
    follower.failures = 2
    problems: list[str | None] = []

    def holds() -> bool:
        problems.append(follower.ledger.problem)
        assert follower.ledger.generation is None or follower.applied
        return follower.ledger.generation == 5

    await follower.until(holds)
    assert any("No space left on device" in (problem or "") for problem in problems)
    assert follower.ledger.problem is None


async def test_the_ledger_of_before_the_restart_serves_but_entitles_nobody(
    scripted: Scripted, api: ApiServer, tmp_path: Path
) -> None:
    plays(scripted, [listing(5, gpunode(5, "a", "b"))], [[]])
    first = Follower(api, tmp_path)
    await first.until(lambda: first.ledger.generation == 5 and (tmp_path / "ledger.json").exists())
    second = Follower(api, tmp_path)
    await second.ledger.restore()
    assert second.applied == [["a", "b"]]
    assert second.ledger.rows == ()
    assert second.ledger.absent is not None
    assert (second.ledger.uid, second.ledger.generation) == (None, None)
    (tmp_path / "ledger.json").write_text("{ torn")
    third = Follower(api, tmp_path)
    await third.ledger.restore()
    assert third.applied == []


async def test_a_row_stops_entitling_before_anything_else_is_done_about_it(
    scripted: Scripted, api: ApiServer, tmp_path: Path
) -> None:
    follower = Follower(api, tmp_path)
    seen: list[list[str]] = []

    async def apply(rows: Any) -> None:
        seen.append([row.id for row in follower.ledger.rows])

    follower.ledger = LedgerWatch(
        api, node="node-1", apply=apply, checkpoint=tmp_path / "ledger.json", on_change=lambda: None
    )
    releasing = gpunode(6, "a", "b")
    releasing["spec"]["tenants"][0]["state"] = "Releasing"
    plays(scripted, [listing(5, gpunode(5, "a", "b"))], [[{"type": "MODIFIED", "object": releasing}], []])
    await follower.until(lambda: follower.ledger.generation == 6)
    assert seen in ([[], ["b"]], [[]])  # the first ledger may be overtaken before it is in force


def test_an_unreadable_row_stays_as_it_is_in_force_and_unknown_fields_are_skipped() -> None:
    rows = gpunode(1, "a", "b", "c")["spec"]["tenants"]
    in_force, unreadable = ledger.read_rows(rows, ())
    assert [row.id for row in in_force] == ["a", "b", "c"]
    assert not unreadable
    newer = [
        {**rows[0], "requestMilli": 500, "limitMilli": 600, "sinceVersion2": {"x": 1}},
        {**rows[1], "gpus": []},
        {**rows[2], "mode": "Sliced"},
        {"id": "d", "podName": 7},
        "nonsense",
    ]
    read, unreadable = ledger.read_rows(newer, in_force)
    assert [(row.id, row.request_milli) for row in read] == [("a", 500), ("b", 1), ("c", 1)]
    assert len(unreadable) == 4
    assert unreadable[0].startswith("tenant b: gpus: ")
    assert isinstance(read[0], Tenant)
