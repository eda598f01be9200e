"""Heartbeats of a process, read from its pulse page, also by a reader that is delayed."""

from __future__ import annotations

import pytest
from sharepod.protocol import CounterGrowth, Heartbeat, Pulse

MS = 1_000_000
APART = 3600 * 1000 * MS
"""Nanoseconds by which the process's clock is behind the reader's."""


class Machine:
    """A clock, and a page that a process writes whenever it has a processor."""

    def __init__(self) -> None:
        self.now = 2 * APART
        self.pulse = Pulse(0, 0, 0)
        self.held_up_ns = 0
        """Nanoseconds for which the reader has no processor before it reads the page."""

    def beat(self) -> None:
        self.pulse = Pulse(1, self.now - APART + 5 * MS, self.now - APART)

    def read(self) -> Pulse:
        """Return the page. While the reader is delayed, the process continues to write it."""
        self.now += self.held_up_ns
        if self.held_up_ns:
            self.beat()
        self.held_up_ns = 0
        return self.pulse

    def clock(self) -> int:
        return self.now


@pytest.mark.promise("time-starved")
def test_a_reader_that_was_held_up_once_hears_a_process_as_well_as_before() -> None:
    machine = Machine()
    heartbeat = Heartbeat(machine.read)
    machine.beat()
    heartbeat.read(machine.clock)
    machine.held_up_ns = 6 * MS
    heartbeat.read(machine.clock)
    machine.now += MS
    machine.beat()
    machine.now += MS // 2
    sign = heartbeat.read(machine.clock)
    assert machine.now - sign.at == MS // 2
    assert sign.ends_at == sign.at + 5 * MS


@pytest.mark.promise("time-starved")
@pytest.mark.parametrize(("grant_id", "ends_at", "waits"), [(0, 0, False), (0, 1, True), (7, 0, False), (7, 1, False)])
def test_a_process_that_waits_for_the_token_and_goes_on_giving_signs_is_told_from_one_that_does_not(
    grant_id: int, ends_at: int, waits: bool
) -> None:
    machine = Machine()
    machine.pulse = Pulse(grant_id, ends_at, machine.now - APART)
    assert Heartbeat(machine.read).read(machine.clock).waits is waits


def test_a_process_was_never_heard_later_than_it_was_read() -> None:
    machine = Machine()
    heartbeat = Heartbeat(machine.read)
    for ahead in (0, 10 * MS, 20 * MS):
        machine.pulse = Pulse(1, 0, machine.now - APART + ahead)
        sign = heartbeat.read(machine.clock)
        assert sign.at <= machine.now
        assert sign.ends_at is None


def counters(samples: int, in_flight: int, launches: int, several: int = 0) -> Pulse:
    return Pulse(0, 0, 0, samples, in_flight, launches, several)


def test_progress_is_what_the_counters_grew_by_since_the_last_reading() -> None:
    machine = Machine()
    heartbeat = Heartbeat(machine.read)
    machine.pulse = counters(50, 11, 300)
    assert heartbeat.progress() == CounterGrowth(50, 11, 300)
    assert heartbeat.progress() == CounterGrowth(0, 0, 0)
    machine.pulse = counters(70, 30, 301, 7)
    assert heartbeat.progress() == CounterGrowth(20, 19, 1, 7)


@pytest.mark.parametrize(
    ("written", "progress"),
    [
        (counters(40, 10, 290), CounterGrowth(0, 0, 0)),
        (counters(60, 99, 300, 77), CounterGrowth(10, 10, 0, 10)),
        (counters(60, 0, 2**64 - 1), CounterGrowth(10, 0, 2**64 - 301)),
    ],
)
def test_counters_that_go_back_or_do_not_fit_together_are_no_more_progress_than_can_be(
    written: Pulse, progress: CounterGrowth
) -> None:
    machine = Machine()
    heartbeat = Heartbeat(machine.read)
    machine.pulse = counters(50, 11, 300)
    heartbeat.progress()
    machine.pulse = written
    assert heartbeat.progress() == progress
