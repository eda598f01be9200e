"""The decision whether a tenant is silent (sharepod.agent.shares.silence), for any stops of its process and any
work (E2)."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sharepod.agent.shares.silence import FORGET_NS, PATIENCE_LEAST_NS, PATIENCE_MOST_NS, LookAgain, Silence, Silent
from sharepod.protocol import LastBeat

MS = 1_000_000
BEAT_NS = MS // 2
AHEAD_NS = 5 * MS // 2
"""Longest time in ns before the end of its work at which a tenant may be found silent."""

stops = st.integers(min_value=0, max_value=40 * MS)
work = st.integers(min_value=0, max_value=30 * MS)
late = st.integers(min_value=0, max_value=MS)


@dataclass
class Holder:
    """Process that holds and is stopped at times, and an agent whose checks are somewhat late."""

    silence: Silence = field(default_factory=Silence)
    now: int = 1000 * MS

    def stop(self, stopped_ns: int, work_ns: int, late_ns: int) -> int | None:
        """Stop the process for `stopped_ns` with `work_ns` of unfinished work. Then it runs again and writes a
        heartbeat. Checks of the agent are `late_ns` late.

        Returns:
            Nanoseconds from the stop until the tenant was found silent. None if it was not.
        """
        stopped_at, found = self.now, None
        sign, look = LastBeat(stopped_at, stopped_at + work_ns), stopped_at
        while look < stopped_at + stopped_ns:
            verdict = self.silence.judge(look, [(sign, 0)])
            if isinstance(verdict, Silent):
                assert verdict.ends_at == stopped_at + work_ns
                found = look - stopped_at
                break
            assert verdict.at > look, "the next look is a later one"
            look = verdict.at + late_ns
        self.now = stopped_at + stopped_ns + BEAT_NS
        self.silence.spoke(self.now)
        return found


@pytest.mark.promise("time-starved")
@given(st.lists(st.tuples(stops, work, late), max_size=20), stops, work, late)
def test_a_silent_tenant_is_found_when_its_work_is_about_to_end_and_no_sooner(
    before: list[tuple[int, int, int]], stopped_ns: int, work_ns: int, late_ns: int
) -> None:
    """After any earlier stops, the GPU is idle for at most the patience (time without heartbeats until a tenant is
    silent) plus the delay of a check.
    """
    holder = Holder()
    for stop in before:
        holder.stop(*stop)
    patience = holder.silence.patience_ns  # none of the earlier events is so long ago that the patience is reset
    due = max(patience, work_ns - AHEAD_NS)
    found = holder.stop(stopped_ns, work_ns, late_ns)
    if found is None:
        assert stopped_ns <= due + 2 * late_ns
    else:
        assert due <= found <= due + 2 * late_ns


@given(st.lists(st.tuples(st.integers(min_value=0, max_value=PATIENCE_MOST_NS - BEAT_NS - 1), work, late), max_size=50))
def test_a_thread_that_is_late_now_and_then_keeps_its_turns(delays: list[tuple[int, int, int]]) -> None:
    """Each delay is less than the patience, as on a busy node."""
    holder = Holder()
    assert [holder.stop(*delay) for delay in delays] == [None] * len(delays)
    assert holder.silence.patience_ns == PATIENCE_MOST_NS


@given(st.lists(st.tuples(stops, late), max_size=20), late)
def test_a_repeatedly_stopped_tenant_is_found_sooner_until_a_finding_was_wrong(
    before: list[tuple[int, int]], late_ns: int
) -> None:
    holder = Holder()
    for stopped_ns, was_late in before:
        holder.stop(stopped_ns, 0, was_late)
        assert PATIENCE_LEAST_NS <= holder.silence.patience_ns <= PATIENCE_MOST_NS
    for _ in range(3):
        holder.stop(20 * MS, 0, late_ns)
    assert holder.silence.patience_ns == PATIENCE_LEAST_NS
    for longer in (2, 4, 5):
        holder.stop(longer * MS - BEAT_NS - 1, 0, 0)
        assert holder.silence.patience_ns == longer * MS, "it ran again soon after it was found silent"


def test_a_tenant_that_was_stopped_before_its_grant_is_found_as_soon_the_next_time() -> None:
    """A stop that began before the grant shows only its later part. It must not lengthen the patience."""
    holder = Holder()
    for _ in range(3):
        holder.stop(20 * MS, 0, 0)
    granted = holder.now + 10 * MS
    verdict = holder.silence.judge(granted + MS, [(LastBeat(holder.now, holder.now), granted)])
    assert isinstance(verdict, Silent)
    holder.silence.spoke(granted + 3 * MS)
    assert holder.silence.patience_ns == PATIENCE_LEAST_NS


@given(st.integers(min_value=0, max_value=40 * MS))
def test_a_tenant_stopped_before_its_grant_is_found_at_once_if_it_gave_signs_while_waiting(
    ago_ns: int,
) -> None:
    holder = Holder()
    for _ in range(3):
        holder.stop(20 * MS, 0, 0)
    granted = holder.now + ago_ns
    verdict = holder.silence.judge(granted, [(LastBeat(holder.now, holder.now, waits=True), holder.now)])
    if ago_ns < PATIENCE_LEAST_NS:
        assert verdict == LookAgain(holder.now + PATIENCE_LEAST_NS)
    else:
        assert verdict == Silent(holder.now)
        holder.silence.spoke(granted)
        longer = ago_ns < PATIENCE_MOST_NS
        assert holder.silence.patience_ns == (2 * PATIENCE_LEAST_NS if longer else PATIENCE_LEAST_NS)


@given(late, st.integers(min_value=FORGET_NS + 1, max_value=10 * FORGET_NS))
def test_a_tenant_not_found_silent_for_a_while_has_its_full_timeout_again(late_ns: int, runs_ns: int) -> None:
    holder = Holder()
    for _ in range(3):
        holder.stop(20 * MS, 0, late_ns)
    holder.now += runs_ns
    found = holder.stop(20 * MS, 0, late_ns)
    assert found is not None
    assert found >= PATIENCE_MOST_NS


@given(st.lists(st.tuples(stops, st.none() | work), min_size=1, max_size=5), st.booleans())
def test_a_tenant_is_silent_only_if_each_of_its_processes_is_and_the_end_of_their_work_is_known(
    processes: list[tuple[int, int | None]], old_hook: bool
) -> None:
    """`processes`: for each, how long ago it wrote its last heartbeat, and how long its work lasts from now on."""
    now = 1000 * MS
    signs = [(LastBeat(now - ago, None if left is None else now - ago + left), 0) for ago, left in processes]
    verdict = Silence().judge(now, [*signs, (None, 0)] if old_hook else signs)
    silent = all(ago >= PATIENCE_MOST_NS and left is not None and left - ago <= AHEAD_NS for ago, left in processes)
    assert isinstance(verdict, Silent if silent and not old_hook else LookAgain)
    told_now = Silence().judge(now, [(sign, now) for sign, _ in signs])
    assert isinstance(told_now, LookAgain), "a grant that was just sent may be under way"
