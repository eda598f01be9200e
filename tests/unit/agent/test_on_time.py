"""The agent's event loop and its timers."""

from __future__ import annotations

import asyncio
import gc
import os
import selectors
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from sharepod.agent import on_time
from sharepod.agent.on_time import OnTimeSelector

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

    def wait(self, poller: int, timer: int, timeout_ns: int, ready: object, most: int) -> int:
        if timer >= 0:
            self.set_ns.append(timeout_ns)
            timer = NO_TIMER if self.refuses == "set" else timer
        return self._wait(poller, timer, timeout_ns, ready, most)


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
