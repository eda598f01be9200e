"""The work queue: no key is worked on twice at a time, no key is lost, and failures are retried."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest
from sharepod.backoff import Backoff
from sharepod.controller.apiserver import workqueue
from sharepod.controller.apiserver.client import NotLeadingError
from sharepod.controller.apiserver.workqueue import WorkQueue
from sharepod.kube import UnavailableError


@asynccontextmanager
async def running(
    work: Callable[[str], Awaitable[None]], workers: int = 4, owner: Callable[[str], str] | None = None
) -> AsyncIterator[WorkQueue[str]]:
    queue: WorkQueue[str] = WorkQueue("test", work, workers, owner)
    task = asyncio.create_task(queue.run())
    try:
        yield queue
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110  in steps of the event loop
            await asyncio.sleep(0.001)


@pytest.mark.parametrize("seed", range(10))
async def test_no_key_is_worked_on_twice_at_a_time_and_each_addition_is_seen(seed: int) -> None:
    chance = random.Random(seed)
    state: Counter[str] = Counter()
    seen: Counter[str] = Counter()
    busy: set[str] = set()

    async def work(key: str) -> None:
        assert key not in busy
        assert len(busy) < 4
        busy.add(key)
        known = state[key]
        for _ in range(chance.randrange(5)):
            await asyncio.sleep(0)
        seen[key] = known
        busy.remove(key)

    async with running(work) as queue:
        for _ in range(300):
            key = f"k{chance.randrange(10)}"
            state[key] += 1
            queue.add(key)
            if chance.random() < 0.3:
                await asyncio.sleep(0)
        await until(lambda: seen == state)


async def test_a_failing_step_is_retried_after_a_growing_back_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workqueue, "_BACKOFF", Backoff(0.01, 30.0))
    times: list[float] = []

    async def work(_: str) -> None:
        times.append(asyncio.get_running_loop().time())
        if len(times) < 4:
            raise UnavailableError("GET", 503, "", "away") if len(times) % 2 else RuntimeError("a defect")

    async with running(work) as queue:
        queue.add("k")
        await until(lambda: len(times) == 4)
    gaps = [later - earlier for earlier, later in itertools.pairwise(times)]
    assert gaps[0] >= 0.009
    assert gaps[1] >= 0.019
    assert gaps[2] >= 0.039


async def test_what_has_failed_for_half_a_day_is_still_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workqueue, "_BACKOFF", Backoff(0.2, 0.001))
    calls = 0

    async def work(_: str) -> None:
        nonlocal calls
        calls += 1
        if calls == 1:
            raise UnavailableError("PATCH", 500, "", "away")

    async with running(work) as queue:
        queue._failures["k"] = 1500
        queue.add("k")
        await until(lambda: not len(queue) and not queue._timers)
    assert (calls, queue._failures) == (2, {})


async def test_a_former_leader_is_not_asked_again() -> None:
    calls = 0

    async def work(_: str) -> None:
        nonlocal calls
        calls += 1
        raise NotLeadingError("PATCH")

    async with running(work) as queue:
        queue.add("k")
        await until(lambda: calls == 1 and not len(queue))
        assert not queue._timers


async def test_the_earlier_of_two_times_counts_and_now_is_earlier_than_both() -> None:
    done = asyncio.Event()

    async def work(_: str) -> None:
        done.set()

    async with running(work) as queue:
        queue.add_after("k", 60)
        queue.add_after("k", 0.01)
        queue.add_after("k", 30)
        await asyncio.wait_for(done.wait(), 5)
        done.clear()
        queue.add_after("k", 60)
        queue.add("k")
        await asyncio.wait_for(done.wait(), 5)
        assert not queue._timers


async def test_keys_with_news_go_before_those_of_a_resync() -> None:
    order: list[str] = []

    async def work(key: str) -> None:
        order.append(key)

    queue: WorkQueue[str] = WorkQueue("test", work, 1)
    for key in ("old-0", "old-1", "both"):
        queue.add_resync(key)
    for key in ("new-0", "both"):
        queue.add(key)
    queue.add_resync("new-0")
    assert len(queue) == 4
    task = asyncio.create_task(queue.run())
    await until(lambda: len(order) == 4)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert order == ["new-0", "both", "old-0", "old-1"]


async def test_a_resync_gets_its_share_of_the_turns_under_any_load() -> None:
    order: list[str] = []

    async def work(key: str) -> None:
        order.append(key)

    queue: WorkQueue[str] = WorkQueue("test", work, 1)
    for number in range(40):
        queue.add(f"new-{number}")
        queue.add_resync(f"old-{number}")
    task = asyncio.create_task(queue.run())
    await until(lambda: len(order) == 80)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert [place for place, key in enumerate(order[:40]) if key.startswith("old")] == [7, 15, 23, 31, 39]


async def test_a_key_of_a_resync_that_is_worked_on_is_worked_on_again() -> None:
    begun, free = asyncio.Event(), asyncio.Event()
    seen: list[str] = []

    async def work(key: str) -> None:
        seen.append(key)
        begun.set()
        await free.wait()

    async with running(work) as queue:
        queue.add("one")
        await begun.wait()
        queue.add_resync("one")
        free.set()
        await until(lambda: seen == ["one", "one"])


@pytest.mark.promise("operator-turns")
async def test_work_of_one_owner_that_hangs_leaves_workers_to_the_others() -> None:
    free = asyncio.Event()
    hanging: list[str] = []
    done: list[str] = []

    async def work(key: str) -> None:
        if key.startswith("slow"):
            hanging.append(key)
            await free.wait()
        done.append(key)

    async with running(work, workers=4, owner=lambda key: key.split("/", maxsplit=1)[0]) as queue:
        for number in range(100):
            queue.add(f"slow/{number}")
            queue.add_resync(f"slow/old-{number}")
        await until(lambda: len(hanging) == 3)
        for number in range(20):
            queue.add(f"quick/{number}")
        await until(lambda: len(done) == 20)
        assert (len(hanging), len(queue)) == (3, 200)
        free.set()
        await until(lambda: len(done) == 220)
        assert not len(queue)


@pytest.mark.promise("operator-turns")
async def test_owners_take_turns() -> None:
    order: list[str] = []

    async def work(key: str) -> None:
        order.append(key)

    queue: WorkQueue[str] = WorkQueue("test", work, 1, owner=lambda key: key[0])
    for key in ("a1", "a2", "a3", "b1", "b2", "c1"):
        queue.add(key)
    task = asyncio.create_task(queue.run())
    await until(lambda: len(order) == 6)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert order == ["a1", "b1", "c1", "a2", "b2", "a3"]


async def test_work_that_has_looked_at_everything_since_a_key_was_added_is_not_done_again_for_it() -> None:
    worked: list[str] = []

    async def work(key: str) -> None:
        worked.append(key)
        if len(worked) == 1:
            queue.add("k")
            queue.caught_up("k")
        elif len(worked) == 2:
            queue.caught_up("k")
            queue.add("k")

    async with running(work) as queue:
        queue.add("k")
        await until(lambda: worked == ["k"] and not len(queue))
        queue.add("k")
        await until(lambda: worked == ["k"] * 3 and not len(queue))
