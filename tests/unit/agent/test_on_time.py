"""The agent's event loop (OnTimeLoop): precise timers, silence watch and alarm."""

from __future__ import annotations

import asyncio
import ctypes
import functools
import gc
import os
import selectors
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import ClassVar, ParamSpec

import pytest
from sharepod.agent import on_time
from sharepod.agent.on_time import OnTimeLoop, OnTimeSelector
from sharepod.protocol import Beat

P = ParamSpec("P")
OPEN = Path("/proc/self/fd")
"""Folder that lists the open descriptors of this process."""
NO_TIMER = 1 << 20
"""Number of a descriptor that is not open, so no timer can be set on it."""


class Kernel:
    """Double of the C library's timer functions. `refuses`: call that fails. `set_ns`: recorded timeouts."""

    def __init__(self, libc: object, wait: Callable[..., int], refuses: str) -> None:
        self._libc = libc
        self._wait = wait
        self.refuses = refuses
        self.set_ns: list[int] = []

    def timerfd_create(self, *arguments: object) -> int:
        return -1 if self.refuses == "create" else self._libc.timerfd_create(*arguments)  # type: ignore[attr-defined]

    def wait(self, poller: int, timer: int, timeout_ns: int, ready: object, most: int, *looked_after: object) -> int:
        if timer >= 0:
            self.set_ns.append(timeout_ns)
            timer = NO_TIMER if self.refuses == "set" else timer
        return self._wait(poller, timer, timeout_ns, ready, most, *looked_after)


@pytest.fixture(params=["nothing", "create", "set"])
def kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Kernel:
    kernel = Kernel(on_time._libc, on_time._wait, request.param)
    monkeypatch.setattr(on_time, "_libc", kernel)
    monkeypatch.setattr(on_time, "_wait", kernel.wait)
    return kernel


@pytest.fixture
def selector(kernel: Kernel) -> Iterator[OnTimeSelector]:
    with OnTimeSelector() as selector:
        yield selector


def test_a_wait_ends_no_sooner_than_it_was_set_for(selector: OnTimeSelector) -> None:
    """Waits of different lengths follow each other, so the timer's descriptor of an earlier wait may still be ready."""
    for timeout in (0.0004, 0.0001, 0.0021, 0.03):
        begun = time.monotonic()
        assert selector.select(timeout) == []
        assert time.monotonic() - begun >= timeout


def test_a_short_wait_is_for_nanoseconds_and_a_long_one_for_milliseconds(
    selector: OnTimeSelector, kernel: Kernel
) -> None:
    for timeout in (0, 0.000_3, 0.0025, 0.021):
        selector.select(timeout)
    assert kernel.set_ns == ([] if kernel.refuses == "create" else [300_001, 2_500_001])


def test_a_ready_descriptor_ends_a_wait_and_only_it_is_reported(selector: OnTimeSelector) -> None:
    reading, writing = os.pipe()
    try:
        key = selector.register(reading, selectors.EVENT_READ)
        assert selector.select(0.001) == []
        os.write(writing, b"x")
        for timeout in (0.01, None, 0):
            assert selector.select(timeout) == [(key, selectors.EVENT_READ)]
        time.sleep(0.002)
        selector.unregister(reading)
        assert selector.select(0) == []
    finally:
        os.close(reading)
        os.close(writing)


@pytest.mark.usefixtures("kernel")
def test_the_loop_calls_timers_in_the_order_in_which_they_are_due_and_leaves_no_descriptor_open() -> None:
    async def main() -> list[int]:
        loop, called, done = asyncio.get_running_loop(), list[int](), asyncio.Event()
        begun = loop.time()
        for ms in (4, 1, 30, 2):
            loop.call_at(begun + ms / 1000, called.append, ms)
        loop.call_at(begun + 0.031, done.set)
        await done.wait()
        return called

    gc.collect()  # close descriptors of earlier tests now, not while this test counts descriptors
    before = len(list(OPEN.iterdir()))
    assert on_time.run(main()) == [1, 2, 4, 30]
    assert len(list(OPEN.iterdir())) == before


# ---- silence watch

PATIENCE_NS = 200_000_000
"""Patience of the watches in these tests, in nanoseconds."""
AHEAD_NS = 2_500_000


class Pulse(ctypes.Structure):
    _fields_ = (("grant_id", ctypes.c_uint64), ("ends_at", ctypes.c_uint64), ("beat_at", ctypes.c_uint64))


class Living:
    """Thread in place of a process: it writes heartbeats every 0.3 ms until it is stopped."""

    made: ClassVar[list[Living]] = []
    """Processes of the present test."""

    def __init__(self, ahead_ns: int = 0) -> None:
        self.made.append(self)
        self._longest_gap_ns = 0
        self.written = Pulse(1, 0, time.monotonic_ns() + ahead_ns)
        self.ahead_ns = ahead_ns
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._live, daemon=True)
        self._thread.start()

    def _live(self) -> None:
        while not self._stopped.wait(0.0003):
            now = time.monotonic_ns()
            self._longest_gap_ns = max(self._longest_gap_ns, now + self.ahead_ns - self.written.beat_at)
            self.written.beat_at = now + self.ahead_ns

    def starved(self) -> bool:
        """Return whether a busy machine delayed the thread for so long that it really was silent."""
        gap_ns = self._longest_gap_ns
        if not self._stopped.is_set():
            gap_ns = max(gap_ns, time.monotonic_ns() + self.ahead_ns - self.written.beat_at)
        return gap_ns >= PATIENCE_NS

    def stop(self) -> int:
        """Stop the process. Return the moment of its last heartbeat."""
        self._stopped.set()
        self._thread.join()
        return int(self.written.beat_at) - self.ahead_ns

    def beat(self) -> Beat:
        return Beat(self.written, ctypes.addressof(self.written), -self.ahead_ns, 0, PATIENCE_NS, AHEAD_NS)


def repeated_where_starved(test: Callable[P, None]) -> Callable[P, None]:
    """Repeat a test while its failures are caused by a busy machine, on which a process wrote no heartbeat."""

    @functools.wraps(test)
    def repeated(*arguments: P.args, **options: P.kwargs) -> None:
        starved = True
        while starved:
            Living.made.clear()
            starved = False
            try:
                test(*arguments, **options)
            except AssertionError:
                starved = any(living.starved() for living in Living.made)
                if not starved:
                    raise
            finally:
                for living in Living.made:
                    living.stop()

    return repeated


def named(*tenants: list[Beat]) -> dict[str, list[Beat]]:
    return {str(number): beats for number, beats in enumerate(tenants)}


async def silence(tenants: dict[str, list[Beat]]) -> tuple[int, int]:
    """Watch until a tenant is found silent. Return (moment at which that check was due, present moment)."""
    loop = asyncio.get_running_loop()
    assert isinstance(loop, OnTimeLoop)
    over: asyncio.Future[int] = loop.create_future()
    assert loop.silence_watch.keep(tenants, time.monotonic_ns(), over.set_result)
    due = await over
    assert not loop.silence_watch.keeps, "no tenant is watched any more"
    return due, time.monotonic_ns()


@pytest.mark.parametrize("ahead_ns", [0, 3600 * 10**9])
@repeated_where_starved
def test_a_silence_watch_ends_once_a_process_is_silent_and_wakes_python_only_then(
    kernel: Kernel, monkeypatch: pytest.MonkeyPatch, ahead_ns: int
) -> None:
    waits: list[int] = []

    def counted(*arguments: object) -> int:
        waits.append(time.monotonic_ns())
        return kernel.wait(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(on_time, "_wait", counted)
    living = Living(ahead_ns)

    async def main() -> int:
        threading.Timer(0.8, living.stop).start()
        waits.clear()
        due, now = await silence(named([living.beat()]))
        assert due <= now
        return now

    found = on_time.run(main())
    assert found - living.stop() >= PATIENCE_NS
    assert len([at for at in waits if at < living.written.beat_at - ahead_ns]) <= 2, "not one for each look"


@pytest.mark.usefixtures("kernel")
@repeated_where_starved
def test_a_tenant_is_silent_once_all_its_processes_are() -> None:
    one, other, neighbour = Living(), Living(), Living()

    async def main() -> int:
        one.stop()
        threading.Timer(0.05, other.stop).start()
        _due, now = await silence(named([one.beat(), other.beat()], [neighbour.beat()]))
        return now

    found = on_time.run(main())
    assert found - other.stop() >= PATIENCE_NS
    neighbour.stop()


@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize("value", [0, 1, 2**63 - 1, 2**63, 2**64 - 1])
def test_whatever_a_process_writes_it_is_silent_unless_it_has_just_been_heard(value: int) -> None:
    living = Living()
    living.stop()
    living.written.beat_at = value
    due, now = on_time.run(silence(named([living.beat()])))
    assert due <= now


@pytest.mark.usefixtures("kernel")
@repeated_where_starved
def test_other_events_and_timers_come_during_a_silence_watch() -> None:
    living = Living()

    async def main() -> None:
        loop = asyncio.get_running_loop()
        watching = asyncio.create_task(silence(named([living.beat()])))
        for _ in range(3):
            await asyncio.sleep(0.15)
            await loop.run_in_executor(None, time.sleep, 0.001)
        assert not watching.done()
        living.stop()
        await watching

    on_time.run(main())


def test_more_than_it_can_watch_are_not_watched(kernel: Kernel) -> None:
    living = Living()
    living.stop()

    async def main() -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, OnTimeLoop)
        assert not loop.silence_watch.keep(named(*[[living.beat()]] * 65), 0, print)
        assert not loop.silence_watch.keeps
        assert loop.silence_watch.keep(named(*[[living.beat()]] * 64), 0, print)
        loop.silence_watch.end()
        assert not loop.silence_watch.keeps

    on_time.run(main())


@pytest.mark.usefixtures("kernel")
@repeated_where_starved
def test_one_that_is_put_beside_others_is_watched_and_one_that_is_dropped_is_not() -> None:
    living, stopped, last = Living(), Living(), Living()
    stopped.stop()

    async def main() -> int:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, OnTimeLoop)
        over: asyncio.Future[int] = loop.create_future()
        assert loop.silence_watch.put("living", [living.beat()], over.set_result)
        assert loop.silence_watch.put("stopped", [stopped.beat()], over.set_result)
        loop.silence_watch.drop("stopped")
        await asyncio.sleep(0.3)
        assert loop.silence_watch.put("last", [last.beat()], over.set_result)
        await asyncio.sleep(0.3)
        assert not over.done(), "both live"
        last.stop()
        await over
        return time.monotonic_ns()

    found = on_time.run(main())
    assert found - last.stop() >= PATIENCE_NS
    living.stop()


def test_gaps_that_were_left_by_others_are_closed_where_there_is_no_place(kernel: Kernel) -> None:
    living = Living()
    living.stop()

    async def main() -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, OnTimeLoop)
        silence_watch = loop.silence_watch
        for name, beats in named(*[[living.beat()]] * 64).items():
            assert silence_watch.put(name, beats, print)
        assert not silence_watch.put("a", [living.beat()] * 2, print)
        silence_watch.drop("3")
        silence_watch.drop("40")
        assert silence_watch.put("a", [living.beat()] * 2, print)
        assert [name for name in ("3", "40", "63", "a") if silence_watch.watches(name)] == ["63", "a"]
        tenants = [loop._looked_after.beats[place].tenant for place in range(64)]
        assert len(set(tenants)) == 63
        assert all(loop._looked_after.beats[place].pulse for place in range(64))
        assert not silence_watch.put("b", [living.beat()], print)
        silence_watch.end()

    on_time.run(main())


@pytest.mark.usefixtures("kernel")
def test_one_that_is_silent_is_told_of_when_its_work_is_about_to_end() -> None:
    living = Living()
    last = living.stop()
    ends_at = living.written.ends_at = last + PATIENCE_NS + 100_000_000
    _due, now = on_time.run(silence(named([living.beat()])))
    assert now >= ends_at - AHEAD_NS


@pytest.mark.usefixtures("kernel")
def test_an_end_that_comes_forward_puts_no_look_off_for_long() -> None:
    living = Living()
    last = living.stop()
    living.written.ends_at = last + 3600 * 10**9

    async def main() -> None:
        watching = asyncio.create_task(silence(named([living.beat()])))
        await asyncio.sleep(0.3)
        assert not watching.done(), "its work goes on"
        living.written.ends_at = time.monotonic_ns()
        await watching

    on_time.run(main())


@pytest.mark.usefixtures("kernel")
def test_no_ones_work_puts_off_the_look_at_another() -> None:
    busy, stopped = Living(), Living()
    busy.stop()
    busy.written.ends_at = time.monotonic_ns() + 3600 * 10**9
    stopped.stop()
    on_time.run(silence(named([busy.beat()], [stopped.beat()])))


# ---- alarm


@pytest.mark.usefixtures("kernel")
def test_an_alarm_rings_once_when_it_was_last_set_for() -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, OnTimeLoop)
        rang, heard = list[int](), asyncio.Event()

        def ring() -> None:
            rang.append(time.monotonic_ns())
            heard.set()

        assert loop.alarm.claim(ring)
        assert not loop.alarm.claim(lambda: None), "it is another's"
        for ms in (2, 40):
            rang.clear()
            heard.clear()
            begun = time.monotonic_ns()
            loop.alarm.set(begun)
            loop.alarm.set(begun + 3600 * 10**9)
            loop.alarm.set(begun + ms * 10**6)
            await heard.wait()
            assert rang[0] >= begun + ms * 10**6
            await asyncio.sleep(0.02)
            assert len(rang) == 1
        rang.clear()
        loop.alarm.set(time.monotonic_ns() + 10**6)
        loop.alarm.set(None)
        await asyncio.sleep(0.02)
        assert not rang

    on_time.run(main())


@pytest.mark.usefixtures("kernel")
def test_an_alarm_and_a_look_come_although_some_descriptor_is_always_ready() -> None:
    living = Living()
    living.stop()

    async def main() -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, OnTimeLoop)
        reading, writing = os.pipe()
        os.write(writing, b"x")
        loop.add_reader(reading, lambda: None)  # always ready, because its bytes are never read
        rang: asyncio.Future[None] = loop.create_future()
        assert loop.alarm.claim(lambda: rang.set_result(None))
        loop.alarm.set(time.monotonic_ns() + 5_000_000)
        await rang
        await silence(named([living.beat()]))
        loop.remove_reader(reading)
        os.close(reading)
        os.close(writing)

    on_time.run(main())
