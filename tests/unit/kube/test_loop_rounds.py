"""Rounds of the event loop: many tasks that continue at the same time leave time for other tasks."""

from __future__ import annotations

import asyncio

from sharepod.kube.loop_rounds import LoopRounds


class Steps:
    """Tasks, each of which takes two milliseconds in a round."""

    def __init__(self) -> None:
        self.now = 100.0
        self.rounds = LoopRounds(lambda: self.now, 0.005)
        self.done: list[int] = []

    async def one(self, number: int) -> None:
        await self.rounds.enter()
        self.now += 0.002
        self.done.append(number)

    async def each_round(self, count: int) -> list[int]:
        """Return, by round of the loop, how many of these tasks continued in it."""
        tasks = [asyncio.create_task(self.one(number)) for number in range(count)]
        found = []
        while not all(task.done() for task in tasks):
            before = len(self.done)
            await asyncio.sleep(0)
            found.append(len(self.done) - before)
        return [number for number in found if number]


async def test_tasks_take_no_more_of_a_round_than_the_budget_and_one_step_in_the_order_in_which_they_came() -> None:
    steps = Steps()
    assert await steps.each_round(10) == [3, 3, 3, 1]
    assert steps.done == list(range(10))


async def test_the_budget_is_whole_again_in_the_next_round() -> None:
    steps = Steps()
    assert [await steps.each_round(2) for _ in range(3)] == [[2], [2], [2]]


async def test_one_that_ends_while_it_waits_keeps_no_other_waiting() -> None:
    steps = Steps()
    tasks = [asyncio.create_task(steps.one(number)) for number in range(6)]
    await asyncio.sleep(0)
    for task in tasks[3:5]:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert steps.done == [0, 1, 2, 5]
