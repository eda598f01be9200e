"""Worker lanes: whatever the number of owners with slow work, another owner's work waits no longer than it takes to
detect slow work.
"""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st
from sharepod.controller.apiserver.worker_lanes import FORGIVEN_S, SLOW_S, WorkerLanes

OWNERS = "abcde"
HANGS_S = 5.0
"""Seconds that a call takes if its webhook hangs: the timeout of a write."""

_steps = st.lists(
    st.tuples(st.sampled_from(OWNERS), st.floats(0, 2), st.floats(0, 20)), max_size=200
)  # Steps: the owner whose work becomes due, seconds since the step before, and seconds that the work takes.


@given(st.integers(1, 12), _steps)
def test_the_lanes_hold_no_more_than_their_bound(workers: int, steps: list[tuple[str, float, float]]) -> None:
    lanes: WorkerLanes[int] = WorkerLanes(workers, owned=True)
    under_way: dict[int, tuple[str, float]] = {}
    now = 0.0
    for key, (owner, pause, lasts) in enumerate(steps):
        now += pause
        for other, (_, ends) in list(under_way.items()):
            if ends <= now:
                lanes.end(other, ends)
                del under_way[other]
        lanes.settle(now)
        if lanes.may_begin(owner):
            lanes.begin(key, owner, now)
            under_way[key] = owner, now + lasts
        assert len(lanes) == len(under_way) <= 7 * workers
        assert all(key in lanes for key in under_way)


@given(st.integers(4, 32), st.integers(1, 20))
def test_an_owner_is_served_within_the_slow_threshold_however_many_others_hang(workers: int, hostile: int) -> None:
    """Each hostile owner always has work, which hangs. All of them arrive at the same moment, which is the
    worst case."""
    lanes: WorkerLanes[int] = WorkerLanes(workers, owned=True)
    keys, ends, waited = itertools.count(), list[tuple[float, int]](), 0.0
    step = 0.125
    for tick in range(int(4 * FORGIVEN_S / step)):
        now = tick * step
        for end, key in [item for item in ends if item[0] <= now]:
            ends.remove((end, key))
            lanes.end(key, end)
        lanes.settle(now)
        if lanes.may_begin("quick"):  # it is this owner's turn, because it has waited longest
            key = next(keys)
            lanes.begin(key, "quick", now)
            lanes.end(key, now)
            waited = 0.0
        else:
            waited += step
        assert waited <= SLOW_S + step
        for owner in map(str, range(hostile)):
            while lanes.may_begin(owner):
                ends.append((now + HANGS_S, key := next(keys)))
                lanes.begin(key, owner, now)
