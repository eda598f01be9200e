"""Leaky bucket: it bounds the average rate of events, and allows several at once after a time without events."""

from __future__ import annotations

from sharepod.timeshare.leaky_bucket import LeakyBucket


def test_events_follow_at_once_until_a_burst_is_full_and_then_as_it_leaks_away() -> None:
    bucket, allowed = LeakyBucket(), list[int]()
    for now in range(1000, 1100):
        if bucket.has_room(now, burst_ns=20):
            bucket.add(now, 10)
            allowed.append(now)
    assert allowed[:3] == [1000, 1001, 1002]
    assert allowed[3:] == list(range(1010, 1100, 10))


def test_a_time_without_events_saves_up_one_burst_only() -> None:
    bucket = LeakyBucket()
    bucket.add(0, 10)
    for _ in range(3):
        assert bucket.has_room(10**12, burst_ns=20)
        bucket.add(10**12, 10)
    assert not bucket.has_room(10**12, burst_ns=20)
