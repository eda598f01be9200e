"""The agent's event loop and its timers."""

from __future__ import annotations

import asyncio
import ctypes
import gc
import os
import selectors
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from sharepod.agent import on_time
from sharepod.agent.on_time import OnTimeLoop, OnTimeSelector
from sharepod.protocol import Beat

OPEN = Path("/proc/self/fd")
"""Descriptors that are open in this process."""
NO_TIMER = 1 << 20
"""Number of a descriptor that is not open, and so no timer that could be set."""


class Kernel:
    """The C library, whose timers can be refused."""

    def __init__(self, libc: object, wait: Callable[..., int], refuses: str) -> None:
        self._libc = libc
        self._wait = wait
        self.refuses = refuses
        self.set_ns: list[int] = []

    def timerfd_create(self, *arguments: object) -> int:
        return -1 if self.refuses == "create" else self._libc.timerfd_create(*arguments)  # type: ignore[attr-defined]

    def wait(self, poller: int, timer: int, timeout_ns: int, ready: object, most: int, vigil: object) -> int:
        if timer >= 0:
            self.set_ns.append(timeout_ns)
            timer = NO_TIMER if self.refuses == "set" else timer
        return self._wait(poller, timer, timeout_ns, ready, most, vigil)


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
    """Again and again, also when the descriptor of the timer has reported before."""
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


def test_a_descriptor_that_is_ready_ends_a_wait_and_is_the_only_one_that_is_told_of(selector: OnTimeSelector) -> None:
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
        for ms in (4, 1, 30, 2):
            loop.call_later(ms / 1000, called.append, ms)
        loop.call_later(0.031, done.set)
        await done.wait()
        return called

    gc.collect()  # what earlier tests have left would close its descriptors meanwhile
    before = len(list(OPEN.iterdir()))
    assert on_time.run(main()) == [1, 2, 4, 30]
    assert len(list(OPEN.iterdir())) == before


# ---- vigil

PATIENCE_NS = 200_000_000
"""Far more than a busy machine takes from a thread that lives."""


class Living:
    """A process that gives signs of life until it stops."""

    def __init__(self, ahead_ns: int = 0) -> None:
        self.written = ctypes.c_uint64(time.monotonic_ns() + ahead_ns)
        self.ahead_ns = ahead_ns
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._live)
        self._thread.start()

    def _live(self) -> None:
        while not self._stopped.wait(0.0003):
            self.written.value = time.monotonic_ns() + self.ahead_ns

    def stop(self) -> int:
        """Let it stop; return when it gave its last sign."""
        self._stopped.set()
        self._thread.join()
        return self.written.value - self.ahead_ns

    def beat(self) -> Beat:
        return Beat(self.written, ctypes.addressof(self.written), -self.ahead_ns, 0, PATIENCE_NS)


async def silence(tenants: list[list[Beat]]) -> tuple[int, int]:
    """Watch until a tenant is silent; return the moment at which that look was due, and the present moment."""
    loop = asyncio.get_running_loop()
    assert isinstance(loop, OnTimeLoop)
    over: asyncio.Future[int] = loop.create_future()
    assert loop.vigil.keep(tenants, time.monotonic_ns(), over.set_result)
    due = await over
    assert loop.vigil.due_ns is None, "nobody is watched any more"
    return due, time.monotonic_ns()


@pytest.mark.parametrize("ahead_ns", [0, 3600 * 10**9])
def test_a_vigil_is_over_once_a_process_is_silent_and_wakes_python_only_then(
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
        due, now = await silence([[living.beat()]])
        assert due <= now
        return now

    found = on_time.run(main())
    assert found - living.stop() >= PATIENCE_NS
    assert len([at for at in waits if at < living.written.value - ahead_ns]) <= 2, "not one for each look"


@pytest.mark.usefixtures("kernel")
def test_a_tenant_is_silent_once_all_its_processes_are() -> None:
    one, other, neighbour = Living(), Living(), Living()

    async def main() -> int:
        one.stop()
        threading.Timer(0.05, other.stop).start()
        _due, now = await silence([[one.beat(), other.beat()], [neighbour.beat()]])
        return now

    found = on_time.run(main())
    assert found - other.stop() >= PATIENCE_NS
    neighbour.stop()


@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize("value", [0, 1, 2**63 - 1, 2**63, 2**64 - 1])
def test_whatever_a_process_writes_it_is_silent_unless_it_has_just_been_heard(value: int) -> None:
    living = Living()
    living.stop()
    living.written.value = value
    due, now = on_time.run(silence([[living.beat()]]))
    assert due <= now


@pytest.mark.usefixtures("kernel")
def test_other_events_and_timers_come_while_a_vigil_is_kept() -> None:
    living = Living()

    async def main() -> None:
        loop = asyncio.get_running_loop()
        watching = asyncio.create_task(silence([[living.beat()]]))
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
        assert not loop.vigil.keep([[living.beat()]] * 65, 0, print)
        assert loop.vigil.due_ns is None
        assert loop.vigil.keep([[living.beat()]] * 64, 0, print)
        loop.vigil.end()
        assert loop.vigil.due_ns is None

    on_time.run(main())
