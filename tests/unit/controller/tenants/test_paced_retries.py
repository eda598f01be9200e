"""Retries of refused Pods by namespace: a few each second, none dropped, and more at once after a success."""

from __future__ import annotations

from collections import Counter

import pytest
from sharepod.controller.tenants.paced_retries import TRIES_PER_S, PacedRetries


def test_a_few_are_tried_when_their_pause_is_over() -> None:
    retries = PacedRetries()
    assert [retries.next_try("n", f"t{number}", 100.5, 2.0) for number in range(3)] == [102.5] * 3


@pytest.mark.promise("operator-paced-retries")
def test_thousands_are_tried_a_few_each_second_and_none_before_its_pause_is_over() -> None:
    retries = PacedRetries()
    due = [retries.next_try("n", f"t{number}", 100.5, 2.0) for number in range(10_000)]
    assert min(due) == 102.5
    assert max(Counter(int(at) for at in due).values()) == TRIES_PER_S
    assert max(due) == 102 + 10_000 / TRIES_PER_S - 1
    assert retries.next_try("other", "t", 100.5, 2.0) == 102.5, "another namespace does not wait for them"


def test_what_is_past_makes_room() -> None:
    retries = PacedRetries()
    for number in range(1000):
        retries.next_try("n", f"t{number}", 100.0, 2.0)
    assert retries.next_try("n", "late", 300.0, 2.0) == 302.0


def test_two_others_are_tried_when_one_is_taken_those_first_that_have_waited_longest() -> None:
    retries = PacedRetries()
    for name in ("a", "b", "c", "d", "e"):
        retries.next_try("n", name, 100.0, 2.0)
    retries.next_try("n", "b", 102.0, 4.0)
    assert retries.taken("n", "c", lambda tenant: tenant != "a") == ["d", "e"]
    assert retries.taken("n", "d", lambda _: True) == ["b"]
    assert retries.taken("n", "e", lambda _: True) == []
    assert retries.taken("elsewhere", "x", lambda _: True) == []


def test_a_deleted_request_is_not_tried_and_leaves_nothing() -> None:
    retries = PacedRetries()
    for name in ("a", "b", "c"):
        retries.next_try("n", name, 100.0, 2.0)
    retries.forget("a")
    retries.forget("never refused")
    assert retries.taken("n", "b", lambda _: True) == ["c"]
    assert not vars(retries)["_refused"], "no tenant waits"


def test_nobody_is_tried_at_once_who_was_refused_before_all_was_forgotten() -> None:
    retries = PacedRetries()
    for name in ("a", "b"):
        retries.next_try("n", name, 100.0, 2.0)
    retries.clear()
    assert retries.taken("n", "b", lambda _: True) == []
    retries.next_try("n", "b", 101.0, 2.0)
    assert retries.taken("n", "b", lambda _: True) == []
