"""Supervision of tasks: the end of each long-running task is noticed, and no task outlives its group."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest
from sharepod.tasks import Supervisor, TaskEndedError
from structlog.testing import capture_logs


async def _forever() -> None:
    await asyncio.Event().wait()


async def _fail(error: Exception) -> None:
    raise error


async def _fail_when_cancelled(error: Exception) -> None:
    try:
        await _forever()
    finally:
        raise error


async def _run(stop: asyncio.Event | None, **works: Coroutine[Any, Any, None]) -> None:
    """Supervise `works` until `stop` is set. Each has begun before the group waits."""
    async with Supervisor() as supervisor:
        for name, work in works.items():
            supervisor.start(name, work)
        await asyncio.sleep(0)
        await supervisor.wait(stop)


def _set() -> asyncio.Event:
    event = asyncio.Event()
    event.set()
    return event


async def test_a_task_that_raises_ends_the_wait_and_is_named() -> None:
    cause = OSError("no such file")
    with pytest.raises(TaskEndedError, match="report failed: no such file") as raised:
        await _run(asyncio.Event(), lease=_forever(), report=_fail(cause))
    assert raised.value.task == "report"
    assert raised.value.__cause__ is cause


async def test_a_task_that_returns_ends_the_wait_and_is_named() -> None:
    with pytest.raises(TaskEndedError, match="report has ended") as raised:
        await _run(None, lease=_forever(), report=asyncio.sleep(0))
    assert raised.value.task == "report"
    assert raised.value.__cause__ is None


async def test_a_failure_comes_before_a_stop() -> None:
    with pytest.raises(TaskEndedError, match="report failed"):
        await _run(_set(), report=_fail(ValueError()))


async def test_a_stop_ends_every_task_and_raises_nothing() -> None:
    stop = asyncio.Event()
    asyncio.get_running_loop().call_later(0.01, stop.set)
    async with Supervisor() as supervisor:
        supervisor.start("lease", _forever())
        supervisor.start("report", _forever())
        await supervisor.wait(stop)
    assert {task.get_name() for task in asyncio.all_tasks()}.isdisjoint({"lease", "report"})


async def test_a_task_with_a_stop_of_its_own_ends_after_the_others_and_is_not_cancelled() -> None:
    ends: list[str] = []
    stop, feed_stop = asyncio.Event(), asyncio.Event()

    async def part() -> None:
        try:
            await _forever()
        finally:
            await asyncio.sleep(0.01)
            ends.append("part")

    async def feed() -> None:
        await feed_stop.wait()
        ends.append("feed")

    stop.set()
    async with Supervisor() as supervisor:
        supervisor.start("feed", feed(), stop=feed_stop, grace_s=5)
        supervisor.start("part", part())
        await asyncio.sleep(0)
        await supervisor.wait(stop)
    assert ends == ["part", "feed"]


async def test_a_task_that_ignores_its_stop_is_cancelled_after_the_grace() -> None:
    async with Supervisor() as supervisor:
        supervisor.start("feed", _forever(), stop=asyncio.Event(), grace_s=0.01)
        await supervisor.wait(_set())


async def test_a_failure_while_ending_is_raised() -> None:
    with pytest.raises(TaskEndedError, match="report failed: cannot stop"):
        await _run(_set(), report=_fail_when_cancelled(ValueError("cannot stop")))


async def test_each_further_failure_is_logged_with_its_task() -> None:
    with capture_logs() as lines, pytest.raises(TaskEndedError, match="first failed"):
        await _run(
            None,
            second=_fail_when_cancelled(ValueError("too")),
            third=_fail_when_cancelled(ValueError("as well")),
            first=_fail(ValueError("at first")),
        )
    assert [(line["event"], line["task"], line["error"]) for line in lines] == [
        ("task failed", "second", "too"),
        ("task failed", "third", "as well"),
    ]


async def test_cancelling_the_wait_ends_every_task() -> None:
    running = asyncio.create_task(_run(None, lease=_forever()))
    await asyncio.sleep(0.01)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert "lease" not in {task.get_name() for task in asyncio.all_tasks()}
