"""Turns of reviews: one review at a time, addresses in turn, other tasks run in between, and bytes are bounded."""

from __future__ import annotations

import asyncio
from contextlib import ExitStack

import pytest
from sharepod.controller.webhook.review_turns import HELD, HELD_EACH, SMALL, ReviewTurns

LARGE = 4 << 20


async def answer(turns: ReviewTurns, address: str, order: list[str], answered: list[str]) -> None:
    await turns.begin(address)
    order.append(address)
    await asyncio.sleep(0)
    assert order[-1] == address, "another review was answered in between"
    answered.append(address)
    turns.end()


@pytest.mark.promise("operator-line-webhook-bounded")
async def test_addresses_take_turns_and_one_is_answered_at_a_time() -> None:
    turns = ReviewTurns()
    order: list[str] = []
    asked = [answer(turns, address, order, []) for address in ("a", "a", "a", "a", "b", "c")]
    await asyncio.gather(*asked)
    assert order == ["a", "a", "b", "c", "a", "a"]


@pytest.mark.promise("operator-line-webhook-bounded")
async def test_a_request_that_gives_up_delays_no_other() -> None:
    turns = ReviewTurns()
    await turns.begin("a")
    cancelled = asyncio.create_task(turns.begin("b"))
    order: list[str] = []
    last = asyncio.create_task(answer(turns, "c", order, []))
    await asyncio.sleep(0)
    cancelled.cancel()
    turns.end()
    await last
    for _ in range(3):  # a review that is cancelled in the moment of its turn ends that turn
        await turns.begin("a")
        late = asyncio.create_task(turns.begin("b"))
        await asyncio.sleep(0)
        turns._next()
        late.cancel()
        await asyncio.gather(late, return_exceptions=True)
    assert order == ["c"]
    assert not turns._busy


@pytest.mark.promise("operator-line-webhook-bounded")
def test_large_reviews_are_bounded_for_one_address_and_in_all_and_small_ones_are_not() -> None:
    turns = ReviewTurns()
    with ExitStack() as held:
        for _ in range(HELD_EACH // LARGE):
            assert held.enter_context(turns.holding("a", LARGE))
        with turns.holding("a", SMALL + 1) as taken:
            assert not taken
        with turns.holding("a", SMALL) as taken:
            assert taken
        for number in range((HELD - HELD_EACH) // LARGE):
            assert held.enter_context(turns.holding(f"b{number}", LARGE))
        with turns.holding("c", SMALL + 1) as taken:
            assert not taken
    assert turns._held == {}
    with turns.holding("c", LARGE) as taken:
        assert taken


def test_small_reviews_of_one_address_end_in_any_order() -> None:
    turns = ReviewTurns()
    first, second = ExitStack(), ExitStack()
    assert first.enter_context(turns.holding("a", SMALL))
    assert second.enter_context(turns.holding("a", SMALL))
    first.close()
    second.close()
    assert turns._held == {}
