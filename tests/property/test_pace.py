"""The pace of a thread on a stream, for launches of any duration: the queue is bounded and ends with the quantum (PC1
to PC6).
"""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from property.pace_model import FENCES, FREE_MOST, LEAD, MS, WIDE_LONG, WIDE_MOST, WINDOW_LONG, WINDOW_MOST, Stream

durations = st.integers(min_value=1, max_value=400 * MS)
late = st.integers(min_value=0, max_value=2 * MS)


@settings(max_examples=200)
@given(st.lists(st.tuples(durations, late), min_size=1, max_size=400), st.sampled_from([0, 10, 50, 100]), st.booleans())
def test_at_most_two_windows_are_unfinished(launches: list[tuple[int, int]], quantum_ms: int, wide: bool) -> None:
    """A window is the launches between two fences. The thread waits for the fence of the last window but one before it
    begins another.
    """
    stream = Stream()
    stream.open(quantum_ms * MS, wide=wide)
    most = WIDE_MOST if wide else WINDOW_MOST
    for takes, delay in launches:
        if not stream.launch(takes, delay):
            drained = stream.drain()
            stream.open(quantum_ms * MS, drained, wide=wide)
        queue, window = stream.pace.queue, stream.pace.window
        assert len(stream.fences) == queue.fences <= FENCES
        assert queue.count < window.quota <= window.size <= most
        assert window.size & (window.size - 1) == 0
        assert stream.model.pace_passing(stream.pace) == window.quota - queue.count
    assert stream.most_unfinished <= FENCES * most


@pytest.mark.promise("program-wide-queue")
@settings(max_examples=50)
@given(st.integers(min_value=10_000, max_value=400 * MS), st.integers(min_value=0, max_value=10 * MS))
def test_a_tenant_that_is_alone_has_at_most_two_wide_windows_in_its_queue(takes: int, away: int) -> None:
    """Once the model knows the duration of launches, unfinished work is at most two windows (PC5), and enough that the
    GPU does not idle while the thread does other work for `away` ns."""
    stream = Stream()
    stream.open(0, wide=True)
    for _ in range(WIDE_MOST * 3):
        stream.launch(takes)
    most = 0
    for index in range(WIDE_MOST * 2):
        before = stream.ends
        if index % WIDE_MOST == 0:
            stream.now += min(away, takes * stream.pace.window.size // 2)  # the thread does other work for this time
        stream.launch(takes)
        assert stream.ends - takes == before, "the GPU does not wait"
        most = max(most, stream.ends - stream.now)
    assert most <= max(2 * WIDE_LONG, 2 * takes) + takes
    if takes * WIDE_MOST >= WIDE_LONG:
        assert most >= min(WIDE_LONG / 5, WIDE_MOST * takes)


@settings(max_examples=50)
@given(
    st.integers(min_value=10_000, max_value=60 * MS),
    st.integers(min_value=0, max_value=2 * WIDE_MOST),
    st.booleans(),
)
def test_a_queue_that_stops_being_wide_is_short_after_its_present_work(takes: int, more: int, short: bool) -> None:
    """A neighbour arrives, so from the next launch on windows are narrow."""
    stream = Stream()
    stream.open(0, wide=True)
    for _ in range(WIDE_MOST * 3 + more):
        stream.launch(takes)
    stream.model.pace_keep_short(stream.pace, short)
    stream.widen(False)
    narrow = min(WINDOW_MOST, max(1, WINDOW_LONG // takes))
    assert stream.pace.window.quota <= narrow
    for _ in range(3 * FENCES * WINDOW_MOST):
        stream.launch(takes)
    assert len(stream.unfinished) <= (FENCES + 1) * narrow


@settings(max_examples=50)
@given(st.integers(min_value=10_000, max_value=60 * MS), st.integers(min_value=0, max_value=WIDE_MOST))
def test_launches_after_a_synchronisation_of_the_program_pass_without_a_fence(takes: int, before: int) -> None:
    """One window of launches passes, whatever the queue has learned (PC9)."""
    stream = Stream()
    stream.open(0, wide=True)
    for _ in range(before):
        stream.launch(takes)
    stream.model.pace_let_pass(stream.pace)
    assert stream.model.pace_passing(stream.pace) > WINDOW_MOST
    assert not stream.model.pace_launched(stream.pace, WINDOW_MOST)


@settings(max_examples=50)
@given(st.integers(min_value=100_000, max_value=20 * MS), st.booleans())
def test_a_window_shrinks_when_launches_take_longer(takes: int, wide: bool) -> None:
    """With each fence that passes, the window is halved until it lasts no longer than allowed, or has one launch."""
    stream = Stream()
    stream.open(0, wide=wide)
    most, longest = (WIDE_MOST, WIDE_LONG) if wide else (WINDOW_MOST, WINDOW_LONG)
    while stream.pace.window.size < most:
        stream.launch(1_000)
    for _ in range((FENCES + 8) * most):
        stream.launch(takes)
    size = stream.pace.window.size
    assert size * takes <= longest or size == 1
    assert size == most or 4 * size * takes >= longest, "and no further"


@pytest.mark.promise("program-short-queue")
@settings(max_examples=200)
@given(st.integers(min_value=20_000, max_value=60 * MS), st.integers(min_value=10, max_value=100))
def test_alike_launches_end_with_the_quantum(takes: int, quantum_ms: int) -> None:
    """After three turns the model knows the duration of launches. From then on no launch begins on the GPU after the
    end of the quantum.
    """
    stream = Stream()
    for turn in range(8):
        stream.open(quantum_ms * MS, stream.drain())
        stream.begun_after_end.clear()
        launched = 0
        while launched < 10_000 and stream.launch(takes):
            launched += 1
        assert turn < 3 or stream.begun_after_end == []
        assert launched >= 1, "each turn has one launch"


@settings(max_examples=100)
@given(st.integers(min_value=50_000, max_value=5 * MS), st.integers(min_value=40, max_value=100))
def test_the_quantum_is_used(takes: int, quantum_ms: int) -> None:
    """With short launches, at most the margin and the time of one launch stay unused at the end of a quantum."""
    stream = Stream()
    for _ in range(6):
        begun = stream.drain()
        stream.open(quantum_ms * MS, begun)
        while stream.launch(takes):
            pass
    assert stream.ends - begun >= quantum_ms * MS - takes - MS // 4


@settings(max_examples=100)
@given(st.integers(min_value=20_000, max_value=60 * MS))
def test_a_queue_that_is_kept_short_has_a_window_and_no_gap(takes: int) -> None:
    """Once the duration of launches is known, the thread launches each window just before the previous window ends
    (PC4).
    """
    stream = Stream()
    stream.open(0, short=True)
    for _ in range(200):
        stream.launch(takes)
    begun, ends, launched = stream.now, stream.ends, 0
    for _ in range(300):
        before = stream.ends
        stream.launch(takes)
        launched += 1
        assert stream.ends - takes == before, "the GPU does not wait"
        assert max(0, before - stream.now) <= LEAD + max(LEAD, takes), "the unfinished work at its launch"
        if takes > LEAD:
            assert before - stream.now <= LEAD
    assert stream.ends - ends == launched * takes
    assert stream.now > begun


@given(st.integers(min_value=1, max_value=20), st.sampled_from([1, 16, WIDE_MOST]), st.booleans())
def test_after_a_useless_wait_a_growing_number_of_launches_passes(times: int, size: int, together: bool) -> None:
    """A kernel may end only after many further launches, so waiting for it is useless. Each useless wait lets more
    launches pass. `together`: the model gets all waits in one report."""
    stream = Stream()
    stream.open(0, wide=size > 1)
    stream.pace.window.size = size
    for time in range(times):
        stream.model.pace_gave_up(stream.pace, False)
        free = min(size << time, FREE_MOST)
        assert stream.pace.window.free_left == free
        if together:
            passing = stream.model.pace_passing(stream.pace)
            assert passing == free + 1
            assert stream.model.pace_launched(stream.pace, passing)
        else:
            passed = 0
            while not stream.model.pace_launched(stream.pace, 1):
                passed += 1
                assert stream.model.pace_passing(stream.pace) == free + 1 - passed
            assert passed == free, "then the next fence is due"
        stream.model.pace_fenced(stream.pace, 0, stream.deadline)


@pytest.mark.promise("program-overtaken-queue")
@given(
    st.integers(min_value=300 * MS, max_value=5_000 * MS),
    st.integers(min_value=2, max_value=100),
    st.integers(min_value=1, max_value=10),
)
def test_an_opening_before_the_drain_adds_nothing_to_the_queue(takes: int, quantum_ms: int, later_ms: int) -> None:
    """A tenant with long kernels is preempted. Its gate opens for its next turn before it has drained."""
    stream = Stream()
    stream.closes = True
    stream.open(quantum_ms * MS)
    assert stream.turn(takes, 10) == FENCES
    stream.now += later_ms * MS
    stream.open(quantum_ms * MS)
    assert stream.turn(takes, 10) == 0
    stream.open(quantum_ms * MS, stream.drain())
    assert stream.turn(takes, 10) == 1, "it is known now how long they take"


@given(st.integers(min_value=2, max_value=12))
def test_openings_without_a_drain_count_as_waits_in_vain(openings: int) -> None:
    """A kernel may spin until further launches have run. So each opening without a drain must let more launches pass,
    like a useless wait.
    """
    stream = Stream()
    stream.closes = True
    stream.open(10 * MS)
    stream.turn(1 << 50, 10)
    launched = []
    for _ in range(openings):
        stream.now += 1_000 * MS
        stream.open(10 * MS)
        launched.append(stream.turn(1 << 50, 10_000))
    assert launched[0] == 0
    assert all(now >= 1 << number for number, now in enumerate(launched[1:]))


@pytest.mark.promise("time-starved")
@settings(max_examples=50)
@given(
    st.integers(min_value=100_000, max_value=4 * MS),
    st.lists(st.tuples(st.booleans(), st.integers(min_value=10 * MS, max_value=200 * MS)), min_size=1, max_size=20),
    st.integers(min_value=1, max_value=40),
)
def test_time_in_which_the_thread_was_stopped_is_not_gpu_time(
    takes: int, stops: list[tuple[bool, int]], between: int
) -> None:
    """The thread is stopped while it waits for a fence, or between two launches. The GPU continues. So the model must
    not count the stop as duration of launches (PC7): its predicted end is at most one window late.
    """
    stream = Stream()
    stream.open(0)
    for _ in range(300):
        stream.launch(takes)
    for in_wait, stopped in stops:
        window = takes * stream.pace.window.size
        for _ in range(between):
            stream.launch(takes, stopped if in_wait else 0)
        stream.now += 0 if in_wait else stopped
        assert 0.9 * takes <= stream.pace.estimate.launch_ns <= 1.1 * takes
        window = max(window, takes * stream.pace.window.size)
        assert stream.pace.estimate.ends_at <= max(stream.ends, stream.now) + window + MS


@given(st.integers(min_value=12 * MS, max_value=40 * MS), st.integers(min_value=20 * MS, max_value=200 * MS))
def test_a_drain_seen_late_bounds_the_duration_of_launches_from_above(takes: int, stopped: int) -> None:
    """If launches outlast their turns, only drains show their duration. A late look at a drain must not make it too
    short.
    """
    stream = Stream()
    stream.closes = True
    for _ in range(4):
        stream.open(10 * MS, stream.drain())
        stream.turn(takes, 10)
    assert 0.9 * takes <= stream.pace.estimate.launch_ns <= 1.1 * takes
    before = stream.now
    stream.now = stream.drain() + stopped
    stream.open(10 * MS, stream.now, looked_before=before)
    assert 0.9 * takes <= stream.pace.estimate.launch_ns <= 1.1 * takes


@given(st.lists(durations, min_size=5, max_size=50))
def test_learned_values_outlive_the_opening_of_the_gate(launches: list[int]) -> None:
    stream = Stream()
    stream.open(0)
    for takes in launches:
        stream.launch(takes)
    learned = stream.pace.estimate.launch_ns
    stream.open(50 * MS, stream.drain())
    assert stream.pace.estimate.launch_ns == learned
    assert stream.pace.queue.count == stream.pace.queue.fences == 0


@given(st.integers(min_value=1, max_value=100), st.integers(min_value=1, max_value=200))
def test_a_graph_that_would_end_after_the_quantum_does_not_fit(quantum_ms: int, takes_ms: int) -> None:
    stream = Stream()
    stream.open(quantum_ms * MS)
    left = quantum_ms
    while stream.model.pace_graph_fits(stream.pace, stream.now, stream.deadline, takes_ms * MS):
        stream.model.pace_graph(stream.pace, stream.now, takes_ms * MS)
        left -= takes_ms
        assert left >= 0
    assert left < takes_ms
