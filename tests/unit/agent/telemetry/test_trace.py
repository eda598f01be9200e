"""Traces of a GPU and its tenants, made from the log of turns, and served over HTTP."""

from __future__ import annotations

import asyncio
import itertools
import json
import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sharepod.agent.shares.turn_log import LoggedTurn
from sharepod.agent.telemetry.trace import gpu_slices, tenant_slices, trace
from unit.agent.client import GPU0, Client, row
from unit.agent.in_process import started
from unit.agent.telemetry.test_http import served_http

G = ("G",)
NAMES = {"a": "team/a", "b": "team/b"}


def test_a_turn_is_shown_with_its_wait_its_drain_and_what_it_overran() -> None:
    turn = LoggedTurn("a", G, 0, 10, 30, 40, 50)
    assert list(tenant_slices(turn, 5, 100)) == [
        ("waits", 5, 10),
        ("holds", 10, 40),
        ("drains", 30, 40),
        ("overruns", 40, 50),
    ]
    assert list(tenant_slices(LoggedTurn("a", G, 60, None, None, None, None), 0, 100)) == [("waits", 60, 100)]


def test_the_gpu_is_held_by_one_or_several_or_waited_for_or_idle() -> None:
    turns = [
        LoggedTurn("a", G, None, 0, None, None, 20),
        LoggedTurn("b", G, 5, 10, None, None, 30),
        LoggedTurn("a", G, 35, 40, None, None, None),
    ]
    assert list(gpu_slices(turns, NAMES, 0, 50)) == [
        ("team/a", 0, 10),
        ("team/a + team/b", 10, 20),
        ("team/b", 20, 30),
        ("idle", 30, 35),
        ("waited for", 35, 40),
        ("team/a", 40, 50),
    ]


_MOMENTS = st.lists(st.integers(0, 1000), min_size=2, max_size=4).map(sorted)


@given(st.lists(st.tuples(st.sampled_from("abc"), _MOMENTS)), st.integers(0, 500), st.integers(501, 1000))
def test_the_gpu_s_slices_have_no_gap_and_no_overlap(
    given_turns: list[tuple[str, list[int]]], begin: int, end: int
) -> None:
    turns = [
        LoggedTurn(tenant, G, at[0], at[1], None, at[2] if len(at) > 3 else None, at[-1]) for tenant, at in given_turns
    ]
    slices = list(gpu_slices(turns, {}, begin, end))
    assert slices[0][1] == begin
    assert slices[-1][2] == end
    assert all(left[2] == right[1] and left[0] != right[0] for left, right in itertools.pairwise(slices))
    assert all(at < until for _, at, until in slices)


def test_a_trace_names_its_tracks_and_counts_microseconds_from_its_begin() -> None:
    written = trace("G", [LoggedTurn("b", G, None, 3_000, None, None, 7_000)], NAMES, 1_000, 9_000, node="n")
    assert written["otherData"] == {"gpu": "G", "node": "n"}
    named = {event["tid"]: event["args"]["name"] for event in written["traceEvents"] if event["name"] == "thread_name"}
    assert named == {0: "GPU", 1: "team/b"}
    held = {"ph": "X", "pid": 1, "tid": 1, "name": "holds", "ts": 2.0, "dur": 4.0}
    assert [event for event in written["traceEvents"] if event["ph"] == "X" and event["tid"] == 1] == [held]


async def test_the_agent_serves_the_trace_of_one_gpu(directory: Path) -> None:
    async with started(directory) as agent, served_http(agent) as ask:
        await agent.tenants.apply([row("a")])
        client = await Client.connect(agent.tenants.directory("a"))
        await client.granted()
        question = f"GET /trace?gpu={GPU0}&seconds=5 HTTP/1.1\r\nHost: x\r\n\r\n"
        head, _, body = (await ask(question.encode())).partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200 OK")
        written = json.loads(body)
        assert [event["name"] for event in written["traceEvents"] if event["ph"] == "X" and event["tid"] == 0][
            -1
        ] == "default/a"
        client.close()


async def test_one_trace_is_written_at_a_time(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, ends = threading.Event(), threading.Event()

    def slow(*_: object, **__: object) -> dict[str, object]:
        begun.set()
        assert ends.wait(30)
        return {}

    monkeypatch.setattr("sharepod.agent.telemetry.endpoints.trace", slow)
    question = f"GET /trace?gpu={GPU0}&seconds=5 HTTP/1.1\r\nHost: x\r\n\r\n".encode()
    async with started(directory) as agent, served_http(agent) as ask:
        first = asyncio.ensure_future(ask(question))
        await asyncio.to_thread(begun.wait, 30)
        assert (await ask(question)).startswith(b"HTTP/1.1 429 ")
        ends.set()
        assert (await first).startswith(b"HTTP/1.1 200 ")


@pytest.mark.parametrize(
    ("query", "status", "words"),
    [
        ("gpu=GPU-none", 404, GPU0),
        ("", 404, "write the UUID"),
        (f"gpu={GPU0}&seconds=ten", 400, "seconds=ten"),
        (f"gpu={GPU0}&seconds=nan", 400, "60 at most"),
        (f"gpu={GPU0}&seconds=0", 400, "above 0"),
        (f"gpu={GPU0}&seconds=61", 400, "60 at most"),
    ],
)
async def test_a_trace_of_nothing_is_refused_with_what_to_write(
    directory: Path, query: str, status: int, words: str
) -> None:
    async with started(directory) as agent, served_http(agent) as ask:
        answer = (await ask(f"GET /trace?{query} HTTP/1.1\r\nHost: x\r\n\r\n".encode())).decode()
        assert answer.startswith(f"HTTP/1.1 {status} ")
        assert words in answer
