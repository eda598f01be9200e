"""Standstills of the machine: what counts as one, and what does not."""

from __future__ import annotations

import pytest
from harness.standstill import LATE_S, Standstill


class _Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_only_time_in_which_the_clock_was_not_looked_at_is_lost() -> None:
    clock = _Clock()
    standstill = Standstill(clock)
    for _ in range(100):
        clock.now += 0.05 + LATE_S / 2
        standstill.look()
    assert standstill.seconds == 0
    clock.now += 7.05
    assert standstill.seconds == pytest.approx(7), "also before the thread has looked"
    standstill.look()
    clock.now += 0.05
    standstill.look()
    assert standstill.seconds == pytest.approx(7)


def test_its_thread_ends() -> None:
    with Standstill() as standstill:
        assert standstill._thread.is_alive()
    assert not standstill._thread.is_alive()
