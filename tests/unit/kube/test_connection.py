"""The connection to the API server, against a server with every fault that a real server may have."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from email.utils import formatdate
from pathlib import Path

import pytest
import yaml
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st
from sharepod.kube import (
    APPLY_PATCH,
    JSON_PATCH,
    ApiError,
    Connection,
    ErrorEventError,
    ForbiddenError,
    GoneError,
    NoApiServerError,
    NotFoundError,
    SilentError,
    UnauthorizedError,
    UnavailableError,
    bodies,
    connection,
    credentials,
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


@given(st.text())
def test_a_body_has_the_same_content_as_json_and_as_yaml(text: str) -> None:
    sent = bodies.encoded({"message": text, "n": 1})
    assert json.loads(sent) == {"message": text, "n": 1}
    assert yaml.load(sent, Loader=yaml.CSafeLoader) == {"message": text, "n": 1}


@pytest.mark.parametrize("odd", ["\U0001f600", "\x00", "\x7f", "\x85", "\u2028", "\ufeff", "\uffff", "\\ud83d\\ude00"])
async def test_what_is_applied_may_have_any_character(scripted: Scripted, api: Connection, odd: str) -> None:
    scripted.answers({})
    await api.patch("/x", {"message": f"a{odd}b"}, APPLY_PATCH)
    assert yaml.load(scripted.bodies[0], Loader=yaml.CSafeLoader) == {"message": f"a{odd}b"}


async def test_half_a_character_is_sent_as_the_api_server_would_store_it() -> None:
    assert json.loads(bodies.encoded({"message": "a\ud83db"})) == {"message": "a\ufffdb"}


async def test_a_rotated_token_is_read_again(
    scripted: Scripted, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "token").write_text("first")
    connected = await Connection.open(kubeconfig(tmp_path, scripted.url, tokenFile="token"), "test")
    try:
        await connected.get("/x")
        (tmp_path / "token").write_text("second")
        await connected.get("/x")
        monkeypatch.setattr(credentials, "_PERIOD_S", 0.0)
        await connected.get("/x")
        (tmp_path / "token").unlink()
        await connected.get("/x")
    finally:
        await connected.close()
    sent = [request.headers["Authorization"] for request in scripted.asked]
    assert sent == ["Bearer first", "Bearer first", "Bearer second", "Bearer second"]


async def test_a_token_that_no_header_can_carry_costs_the_call_alone(scripted: Scripted, tmp_path: Path) -> None:
    (tmp_path / "token").write_text("half of one\nand of another")
    connected = await Connection.open(kubeconfig(tmp_path, scripted.url, tokenFile="token"), "test")
    try:
        with pytest.raises(UnavailableError, match="end of a line"):
            await connected.get("/x")
        with pytest.raises(UnavailableError, match="ValueError"):
            await connected.page("/x", {}, take=lambda _: None, unreadable=lambda *_: None)
        with pytest.raises(UnavailableError, match="ValueError"):
            await anext(connected.watch("/x", {}, "1"))
    finally:
        await connected.close()
    assert scripted.asked == []


async def test_without_api_server_credentials_the_agent_names_the_file_that_it_tried(tmp_path: Path) -> None:
    with pytest.raises(NoApiServerError, match="nowhere"):
        await Connection.open(tmp_path / "nowhere", "test")
    (tmp_path / "empty").write_text("")
    with pytest.raises(NoApiServerError, match="empty"):
        await Connection.open(tmp_path / "empty", "test")
    with pytest.raises(NoApiServerError, match="set kubeconfig"):
        await Connection.open(None, "test")


async def test_a_refusal_keeps_the_servers_message(scripted: Scripted, api: Connection) -> None:
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


async def test_credentials_that_are_rejected_are_read_again_at_once_though_a_clock_was_set_back(
    scripted: Scripted, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(credentials, "_AFTER_REJECTION_S", 0.0)
    (tmp_path / "token").write_text("first")
    connected = await Connection.open(kubeconfig(tmp_path, scripted.url, tokenFile="token"), "test")

    async def respond(request: web.Request) -> web.StreamResponse:
        accepted = request.headers["Authorization"] == "Bearer second"
        return web.json_response({}, status=200 if accepted else 401)

    scripted.respond = respond
    try:
        assert connected.rejected_for_s == 0
        with pytest.raises(UnauthorizedError):
            await connected.get("/x")
        (tmp_path / "token").write_text("second")
        began = connected.rejected_for_s
        with monkeypatch.context() as patched:
            patched.setattr(time, "time", lambda: 0.0)
            assert connected.rejected_for_s >= began
            await connected.get("/x")
        assert connected.rejected_for_s == 0
    finally:
        await connected.close()


async def test_a_refusal_carries_the_servers_retry_after(scripted: Scripted, api: Connection) -> None:
    async def respond(request: web.Request) -> web.StreamResponse:
        return web.json_response(
            {"message": "later"}, status=int(request.query["status"]), headers={"Retry-After": "7"}
        )

    scripted.respond = respond
    for status, not_begun in ((429, True), (503, True), (500, False)):
        with pytest.raises(UnavailableError) as refused:
            await api.get("/x", {"status": str(status)})
        assert (refused.value.retry_after_s, refused.value.was_not_begun) == (7.0, not_begun)
    scripted.answers({"details": {"retryAfterSeconds": 3}}, 429)
    with pytest.raises(UnavailableError) as refused:
        await api.get("/x")
    assert refused.value.retry_after_s == 3.0


@pytest.mark.parametrize(
    ("retry_after", "date", "wait_s"),
    [
        ("Thu, 26 Nov 2026 10:00:07 GMT", "Thu, 26 Nov 2026 10:00:00 GMT", 7.0),
        ("Thu, 26 Nov 2026 09:00:00 GMT", "Thu, 26 Nov 2026 10:00:00 GMT", 0.0),
        ("Thu, 26 Nov 2026 10:00:07 GMT", "nonsense", 3.0),
        ("soon", "Thu, 26 Nov 2026 10:00:00 GMT", 3.0),
        ("-1", "Thu, 26 Nov 2026 10:00:00 GMT", 3.0),
        ("1e400", "Thu, 26 Nov 2026 10:00:00 GMT", 3.0),
        ("9999999", "Thu, 26 Nov 2026 10:00:00 GMT", 3.0),
    ],
)
async def test_a_date_to_be_asked_again_counts_from_the_servers_own_time(
    scripted: Scripted, api: Connection, retry_after: str, date: str, wait_s: float
) -> None:
    async def respond(_: web.Request) -> web.StreamResponse:
        status = {"details": {"retryAfterSeconds": 3}}
        return web.json_response(status, status=429, headers={"Retry-After": retry_after, "Date": date})

    scripted.respond = respond
    with pytest.raises(UnavailableError) as refused:
        await api.get("/x")
    assert (refused.value.retry_after_s, refused.value.was_not_begun) == (wait_s, True)


async def test_a_proxy_of_the_environment_is_used_and_without_one_the_environment_is_not_looked_at(
    scripted: Scripted, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable in ("http_proxy", "HTTP_PROXY", "no_proxy", "NO_PROXY"):
        monkeypatch.delenv(variable, raising=False)
    connected = await Connection.open(kubeconfig(tmp_path, scripted.url, token="t"), "test")
    await connected.get("/straight")
    assert not connected._proxied
    await connected.close()
    monkeypatch.setenv("http_proxy", scripted.url)
    connected = await Connection.open(kubeconfig(tmp_path, "http://api.invalid", token="t"), "test")
    await connected.get("/proxied")
    await connected.close()
    assert [str(request.url.host) for request in scripted.asked] == ["127.0.0.1", "api.invalid"]


DEEP = '{"a":' * 50_000 + "1" + "}" * 50_000
BAD = f'{{"metadata":{{"name":"bad","uid":"u"}},"spec":{DEEP}}}'


async def test_a_page_is_read_item_by_item_and_one_that_cannot_be_read_costs_itself_alone(
    scripted: Scripted, api: Connection
) -> None:
    good: list[str] = []
    bad: list[tuple[str, str]] = []
    scripted.answers(
        f'{{"items":[{{"metadata":{{"name":"a"}}}},{BAD},{{"metadata":{{"name":"b"}}}}],"metadata":{{"x":"y"}}}}'
    )
    metadata = await api.page(
        "/x",
        {},
        take=lambda item: good.append(item["metadata"]["name"]),
        unreadable=lambda kind, item: bad.append((kind, item.metadata["name"])),
    )
    assert (good, bad, metadata) == (["a", "b"], [("ADDED", "bad")], {"x": "y"})
    for nonsense in ("oops", '{"items":[{}'):
        scripted.answers(nonsense)
        with pytest.raises(UnavailableError):
            await api.page("/x", {}, take=lambda _: None, unreadable=lambda *_: None)
    scripted.answers({"message": "too old"}, 410)
    with pytest.raises(GoneError):
        await api.page("/x", {}, take=lambda _: None, unreadable=lambda *_: None)


@pytest.mark.parametrize(("timeouts", "whole"), [(10, True), (1, False)])
async def test_a_page_is_read_to_its_end_while_more_of_it_arrives_but_not_for_ever(
    scripted: Scripted, api: Connection, monkeypatch: pytest.MonkeyPatch, timeouts: int, whole: bool
) -> None:
    """Each chunk of the page arrives 0.25 s after the one before. A silence of two seconds would exceed the timeout."""
    monkeypatch.setattr(connection, "_PAGE_TIMEOUTS", timeouts)
    taken: list[object] = []

    async def slow(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(b'{"items":[{}')
        with contextlib.suppress(ConnectionResetError):
            for _ in range(10):
                await asyncio.sleep(0.25)
                await response.write(b",{}")
            await response.write(b'],"metadata":{}}')
        return response

    scripted.respond = slow
    with contextlib.nullcontext() if whole else pytest.raises(UnavailableError, match="no answer in time"):
        await api.page("/x", {}, take=taken.append, unreadable=lambda *_: None, timeout_s=2.0)
    assert (len(taken) == 11) is whole


async def test_an_event_that_cannot_be_read_does_not_end_the_watch(scripted: Scripted, api: Connection) -> None:
    large = json.dumps({"type": "ADDED", "object": {"metadata": {"name": "large"}, "spec": "x" * (5 << 20)}})
    lines = [f'{{"type":"MODIFIED","object":{BAD}}}', large, json.dumps({"type": "ADDED", "object": {"metadata": {}}})]
    scripted.answers("\n".join(lines) + "\n")
    bad: list[tuple[str, str]] = []
    seen = [
        event["type"]
        async for event in api.watch(
            "/x", {}, "1", unreadable=lambda kind, item: bad.append((kind, item.metadata["name"]))
        )
    ]
    assert seen == ["ADDED"]
    assert bad == [("MODIFIED", "bad"), ("ADDED", "large")]
    with pytest.raises(UnavailableError, match="too deep"):
        async for _ in api.watch("/x", {}, "1"):
            pass


async def test_a_watch_that_the_server_does_not_end_is_silent_and_each_sound_of_it_is_heard(
    scripted: Scripted, api: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "WATCH_S", (0, 0))
    monkeypatch.setattr(connection, "WATCH_GRACE_S", 0.5)
    never = asyncio.Event()

    async def respond(request: web.Request) -> web.StreamResponse:
        stream = web.StreamResponse()
        await stream.prepare(request)
        await stream.write(b'{"type":"ADDED","object":{"metadata":{}}}\n')
        await never.wait()
        return stream

    scripted.respond = respond
    sounds: list[int] = []
    with pytest.raises(SilentError):
        async for _ in api.watch("/x", {}, "1", heard=lambda: sounds.append(1)):
            pass
    assert len(sounds) == 2
    never.set()


@pytest.mark.parametrize(("code", "kind"), [(410, GoneError), (500, UnavailableError)])
async def test_an_error_event_ends_the_watch_with_its_kind(
    scripted: Scripted, api: Connection, code: int, kind: type[ApiError]
) -> None:
    scripted.answers(json.dumps({"type": "ERROR", "object": {"code": code, "message": "the words"}}) + "\n")
    with pytest.raises(kind, match="the words"):
        async for _ in api.watch("/x", {}, "1"):
            pass


async def test_an_error_event_that_cannot_be_read_ends_the_watch_too(scripted: Scripted, api: Connection) -> None:
    details = '{"a":' * 50_000 + "1" + "}" * 50_000
    scripted.answers('{"type":"ERROR","object":{"code":410,"details":' + details + "}}\n")
    with pytest.raises(ErrorEventError, match="nested too deep"):
        async for _ in api.watch("/x", {}, "1", unreadable=lambda *_: None):
            pass


async def test_a_refused_connection_is_unavailable(tmp_path: Path) -> None:
    connected = await Connection.open(kubeconfig(tmp_path, "http://127.0.0.1:1", token="t"), "test")
    try:
        with pytest.raises(UnavailableError):
            await connected.get("/x")
    finally:
        await connected.close()


async def test_the_api_servers_answers_tell_how_far_this_machines_clock_is_off(
    scripted: Scripted, api: Connection
) -> None:
    year_s = 365 * 86_400

    async def respond(_: web.Request) -> web.StreamResponse:
        return web.json_response({}, headers={"Date": formatdate(time.time() - year_s, usegmt=True)})

    scripted.respond = respond
    assert api.clock_behind_s == 0.0
    await api.get("/x")
    assert api.clock_behind_s == pytest.approx(-year_s, abs=30)
