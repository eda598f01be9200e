"""Readers of metrics: the API server's reviews, their number, and what happens while it does not answer."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import pytest
from aiohttp.test_utils import make_mocked_request
from sharepod.web import metrics_access
from sharepod.web.metrics_access import ACCESS_REVIEWS, TOKEN_REVIEWS, MetricsGuard, Reviews


class AwayError(Exception):
    """The API server does not answer."""


class ReviewingServer:
    """API server that makes reviews. `users`: by token. `readers`: users who may read /metrics. `viewers`: users who
    may read GPUNodes."""

    def __init__(self) -> None:
        self.users = {"reader-token": "reader", "stranger-token": "stranger"}
        self.readers = {"reader"}
        self.viewers = {"stranger"}
        self.asked: list[tuple[str, dict[str, Any]]] = []
        self.away = False
        self.now = 1000.0
        self.answers, self.was_asked = asyncio.Event(), asyncio.Event()
        self.answers.set()
        self.guard = MetricsGuard(Reviews(self._create, (AwayError,)), clock=lambda: self.now)

    async def _create(self, path: str, body: dict[str, Any]) -> Mapping[str, Any]:
        self.asked.append((path, body["spec"]))
        self.was_asked.set()
        await self.answers.wait()
        if self.away:
            raise AwayError("no route to host")
        if path == TOKEN_REVIEWS:
            user = self.users.get(body["spec"]["token"])
            if user is None:
                return {"status": {"error": "unknown"}}
            return {"status": {"authenticated": True, "user": {"username": user, "uid": "u", "groups": ["g"]}}}
        allowed = self.readers if "nonResourceAttributes" in body["spec"] else self.viewers
        return {"status": {"allowed": body["spec"]["user"] in allowed}}

    async def ask(
        self, header: str | None = "Bearer reader-token", of: str = "10.0.0.1", path: str = "/metrics"
    ) -> tuple[int, str]:
        headers = {} if header is None else {"Authorization": header}
        refused = await self.guard.refusal(make_mocked_request("GET", path, headers=headers).clone(remote=of))
        return (200, "") if refused is None else (refused.status, refused.text or "")


@pytest.mark.promise("security-metrics-access")
@pytest.mark.parametrize(
    ("header", "status", "words"),
    [
        ("Bearer reader-token", 200, ""),
        ("bearer  reader-token ", 200, ""),
        (None, 401, "ClusterRole sharepod-metrics-reader"),
        ("Basic cmVhZGVyOnRva2Vu", 401, "token"),
        ("Bearer ", 401, "token"),
        ("Bearer " + "x" * 20_000, 401, "token"),
        ("Bearer unknown", 401, "does not know this token"),
        ("Bearer stranger-token", 403, "stranger may not get /metrics"),
    ],
)
async def test_only_clients_with_the_right_to_get_metrics_read_them(
    header: str | None, status: int, words: str
) -> None:
    server = ReviewingServer()
    found = await server.ask(header)
    assert found[0] == status
    assert words in found[1]


async def test_the_review_names_the_token_s_user_and_the_path() -> None:
    server = ReviewingServer()
    await server.ask()
    assert [path for path, _ in server.asked] == [TOKEN_REVIEWS, ACCESS_REVIEWS]
    assert server.asked[1][1] == {
        "user": "reader",
        "uid": "u",
        "groups": ["g"],
        "extra": {},
        "nonResourceAttributes": {"path": "/metrics", "verb": "get"},
    }


@pytest.mark.promise("security-trace-access")
async def test_traces_are_for_readers_of_gpunodes_and_no_other_right_replaces_theirs() -> None:
    server = ReviewingServer()
    for _ in range(2):
        assert (await server.ask())[0] == 200
        status, words = await server.ask(path="/trace")
        assert (status, words) == (
            403,
            "reader may not get gpunodes.sharepod.dev: bind the ClusterRole sharepod-gpunode-view to it\n",
        )
        assert (await server.ask("Bearer stranger-token", path="/trace"))[0] == 200
        assert (await server.ask("Bearer stranger-token"))[0] == 403
    assert "sharepod-gpunode-view" in (await server.ask(None, path="/trace"))[1]
    assert server.asked[3][1]["resourceAttributes"] == {
        "verb": "get",
        "group": "sharepod.dev",
        "resource": "gpunodes",
    }


async def test_an_answer_is_remembered_for_a_while_and_a_refusal_for_a_shorter_one() -> None:
    server = ReviewingServer()
    for _ in range(5):
        assert (await server.ask())[0] == 200
        assert (await server.ask("Bearer stranger-token"))[0] == 403
    assert len(server.asked) == 4
    server.readers = {"stranger"}
    server.now += 11
    assert (await server.ask())[0] == 200
    assert (await server.ask("Bearer stranger-token"))[0] == 200
    server.now += 50
    assert (await server.ask())[0] == 403


async def test_one_token_is_looked_at_once_however_many_ask_at_the_same_time() -> None:
    server = ReviewingServer()
    server.answers.clear()
    asking = [asyncio.ensure_future(server.ask()) for _ in range(10)]
    await server.was_asked.wait()
    server.answers.set()
    assert [status for status, _ in await asyncio.gather(*asking)] == [200] * 10
    assert len(server.asked) == 2


async def test_a_reader_that_leaves_takes_nobody_along() -> None:
    server = ReviewingServer()
    server.answers.clear()
    first, second = (asyncio.ensure_future(server.ask()) for _ in range(2))
    await server.was_asked.wait()
    first.cancel()
    assert (await second)[0] == 503
    server.answers.set()
    assert (await server.ask())[0] == 200


@pytest.mark.promise("security-metrics-access")
async def test_while_the_api_server_is_away_former_readers_still_read_for_ten_minutes() -> None:
    server = ReviewingServer()
    assert (await server.ask())[0] == 200
    server.away = True
    server.now += 300
    assert (await server.ask())[0] == 200
    status, words = await server.ask("Bearer stranger-token")
    assert status == 503
    assert "no route to host" in words
    server.now += 301
    assert (await server.ask())[0] == 503


@pytest.mark.promise("security-metrics-access")
async def test_unknown_tokens_without_end_ask_the_api_server_little_and_keep_no_reader_waiting(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(metrics_access, "_REMEMBERED", 8)
    server = ReviewingServer()
    assert (await server.ask())[0] == 200
    answers = []
    for number in range(200):
        answers.append((await server.ask(f"Bearer token-{number}"))[0])
        if number % 4 == 0:
            assert (await server.ask())[0] == 200, "a token in use stays cached"
    assert set(answers) == {401, 429}, "answered, or refused with Retry-After"
    assert len(server.asked) <= 30
    assert len(server.guard._known) <= 8


@pytest.mark.promise("security-metrics-access")
async def test_a_reader_that_asks_seldom_is_not_forgotten_for_unknown_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics_access, "_REMEMBERED", 8)
    server = ReviewingServer()
    assert (await server.ask())[0] == 200
    for number in range(200):
        server.now += 0.02
        await server.ask(f"Bearer token-{number}", of=f"10.0.1.{number % 10}")
    assert len(server.asked) > 8
    assert (await server.ask())[0] == 200


@pytest.mark.promise("security-metrics-access")
async def test_who_makes_tokens_up_does_not_take_the_turn_of_a_reader_whose_token_is_new() -> None:
    server = ReviewingServer()
    for number in range(200):
        server.now += 0.02
        await server.ask(f"Bearer token-{number}", of="10.0.1.1")
    assert (await server.ask())[0] == 200
