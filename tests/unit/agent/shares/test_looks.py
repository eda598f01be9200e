"""Checks of heartbeats by the agent's event loop, with real pulse pages and the real clock."""

from __future__ import annotations

import asyncio
import mmap
import struct
import threading
import time
from collections.abc import Awaitable, Callable

import pytest
from sharepod import protocol
from sharepod.agent import on_time
from sharepod.agent.shares import silence
from sharepod.agent.shares import tokens as tokens_module
from sharepod.agent.shares.tokens import Tokens
from sharepod.timeshare import Parameters
from unit.agent.client import until

GPU = "GPU-0"


class Process:
    """Client with a pulse page, into which it writes each 0.5 ms while it lives."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.version = protocol.VERSION_MAX
        self.grant_id = 0
        page = protocol.PulsePage()
        self._written = mmap.mmap(page.fd, 4096, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
        page.close_fd()
        self.heartbeat: protocol.Heartbeat | None = protocol.Heartbeat(page.read, page)
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._live, daemon=True)
        self.write()
        self._thread.start()

    def send(self, frame: protocol.AgentFrame) -> None:
        if isinstance(frame, protocol.Grant):
            self.grant_id = frame.grant_id

    def fileno(self) -> int:
        """Return -1: the process has no socket, so the agent prepares no hand-off to or from it."""
        return -1

    def write(self) -> None:
        now = time.monotonic_ns()
        self._written[:24] = struct.pack("=QQQ", self.grant_id, now, now)

    def _live(self) -> None:
        while not self._stopped.wait(0.0005):
            self.write()

    def stop(self) -> None:
        self._stopped.set()
        self._thread.join()


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Raise the patience (time until a process counts as silent) to 50 ms, because a busy machine may delay a
    thread.
    """
    for module in (tokens_module, silence):
        monkeypatch.setattr(module, "PATIENCE_MOST_NS", 50_000_000)


def on_the_loop(life: Callable[[Tokens, Process, Process, list[int]], Awaitable[None]], *, busy: bool = False) -> int:
    """Let `a` hold a GPU for which `b` waits. Return how often Python was woken for a check. `busy`: a third tenant,
    whose process lives, holds another GPU for which a fourth waits."""
    barred: list[int] = []
    looks: list[bool] = []
    one, other, third, fourth = (Process(pid) for pid in range(1, 5))

    async def main() -> None:
        tokens = Tokens(Parameters())
        listen = tokens._looks._look

        def counted(late: bool) -> None:
            looks.append(late)
            listen(late)

        tokens._looks._look = counted
        clients = {"c": third, "d": fourth, "a": one, "b": other}
        for name, process in clients.items():
            gpu = GPU if name in "ab" else "GPU-1"
            tokens.set_tenant(
                name, (gpu,), request_milli=400, limit_milli=1000, contended=lambda _: None, bar=barred.append
            )
            tokens.set_connected(name, connected=True)
            assert process.heartbeat is not None
        for name, process in clients.items():
            if busy or name in "ab":
                tokens.want(name, process)
        await life(tokens, one, other, barred)
        tokens.close()

    try:
        on_time.run(main())
    finally:
        for process in (one, other, third, fourth):
            process.stop()
    return len(looks)


@pytest.mark.promise("time-starved")
def test_who_holds_after_another_is_watched_although_the_one_before_lives_on() -> None:
    async def life(tokens: Tokens, one: Process, other: Process, barred: list[int]) -> None:
        await asyncio.sleep(0.02)  # by now the event loop watches the first tenant
        other.stop()
        tokens.drained("a", one, protocol.Drained(one.grant_id, wanting=True))
        await until(lambda: other.grant_id in barred)

    on_the_loop(life)


@pytest.mark.promise("time-starved")
def test_who_holds_after_another_is_watched_while_a_neighbour_of_another_gpu_is() -> None:
    async def life(tokens: Tokens, one: Process, other: Process, barred: list[int]) -> None:
        await asyncio.sleep(0.02)
        other.stop()
        tokens.drained("a", one, protocol.Drained(one.grant_id, wanting=True))
        await until(lambda: other.grant_id in barred)

    on_the_loop(life, busy=True)


@pytest.mark.promise("time-starved")
def test_a_holder_is_watched_from_the_first_waiting_tenant_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stopped holder is barred only once another tenant waits. The patience is 300 ms, so that a busy machine makes
    no tenant seem silent.
    """
    for module in (tokens_module, silence):
        monkeypatch.setattr(module, "PATIENCE_MOST_NS", 300_000_000)

    async def life(tokens: Tokens, one: Process, other: Process, barred: list[int]) -> None:
        await asyncio.sleep(0.4)  # longer than the patience: the check that was due from the beginning has run
        tokens.drained("a", one, protocol.Drained(one.grant_id))
        other.stop()
        await asyncio.sleep(0.02)
        assert other.grant_id not in barred, "no tenant waits"
        tokens.want("a", one)
        await until(lambda: other.grant_id in barred)

    on_the_loop(life, busy=True)


def test_a_tenant_that_is_removed_as_it_holds_is_watched_no_more(patient: None) -> None:
    async def life(tokens: Tokens, one: Process, other: Process, barred: list[int]) -> None:
        await until(lambda: tokens._looks.watches("a"))
        tokens.remove("a")
        assert not tokens._looks.watches("a")

    on_the_loop(life)


@pytest.mark.promise("time-starved")
def test_a_holder_that_stops_while_the_loop_watches_is_barred() -> None:
    async def life(_tokens: Tokens, one: Process, _other: Process, barred: list[int]) -> None:
        await asyncio.sleep(0.02)
        one.stop()
        await until(lambda: one.grant_id in barred)

    on_the_loop(life)


def test_python_is_not_woken_for_a_look_at_one_that_lives(patient: None) -> None:
    async def life(_tokens: Tokens, _one: Process, _other: Process, _barred: list[int]) -> None:
        await asyncio.sleep(0.9)  # many times the patience of 50 ms

    assert on_the_loop(life) <= 6, "18 looks were due"


def test_python_is_not_woken_for_a_hand_off_between_processes_that_live(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (tokens_module, silence):
        monkeypatch.setattr(module, "PATIENCE_MOST_NS", 50_000_000)

    async def life(tokens: Tokens, one: Process, other: Process, _barred: list[int]) -> None:
        names = ("a", one), ("b", other)
        for turn in range(9):
            name, process = names[turn % 2]
            await asyncio.sleep(0.08)
            tokens.drained(name, process, protocol.Drained(process.grant_id, wanting=True))

    assert on_the_loop(life) <= 4, "a look of Python's for each of 9 hand-offs"


def test_where_the_loop_cannot_watch_each_look_is_a_timer(monkeypatch: pytest.MonkeyPatch) -> None:
    async def life(_tokens: Tokens, one: Process, _other: Process, barred: list[int]) -> None:
        await asyncio.sleep(0.02)
        one.stop()
        await until(lambda: one.grant_id in barred)

    monkeypatch.setattr(on_time.SilenceWatch, "keep", lambda *_: False)
    assert on_the_loop(life) >= 2
