"""Requests for whole nodes: the longest wait at the head of the queue, in simulated days at a load of 0.9."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import whole_nodes


@pytest.fixture(autouse=True)
def collector_as_before() -> Iterator[None]:
    """Restore the garbage collector's settings after a benchmark, which freezes the existing objects."""
    before = gc.get_threshold()
    yield
    gc.unfreeze()
    gc.set_threshold(*before)


@pytest.mark.promise("placement-whole-nodes")
def test_a_request_for_a_whole_node_is_soon_served_once_it_is_the_oldest_and_little_stands_idle() -> None:
    days = 3.0
    jobs = whole_nodes.jobs_of(8, 2, days)
    used, waits = whole_nodes.week(8, jobs, days)
    at_head = [wait for count, wait in whole_nodes.heads(jobs, waits, days) if count == whole_nodes.GPUS and wait]
    assert len(at_head) > 10
    assert whole_nodes.part_of(at_head, 0.95) <= whole_nodes.LONGEST_HEAD_H
    assert used >= whole_nodes.LEAST_UTILISATION
