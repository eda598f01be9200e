"""Invariants of the throughput benchmark's replay, on workloads that are simulated within a second."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
from packing_trace import GIB, TraceNode, TracePod
from throughput import eager
from throughput.jobs import Workload
from throughput.rates import Mix, Rates
from throughput.replay import Replay, Sharing

HOUR_S = 3600.0
NODES = tuple(
    TraceNode(f"node-{number}", 64_000, 262_144, gpus, "A", 16 * GIB) for number, gpus in enumerate((1, 2, 4))
)
LINES = tuple(
    (TracePod(2000, 4096, gpus, milli, ()), seconds)
    for gpus, milli, seconds in (
        (1, 300, 200.0),
        (1, 300, 900.0),
        (1, 600, 400.0),
        (1, 1000, 500.0),
        (2, 1000, 300.0),
    )
)
WORKLOAD = Workload("tiny", NODES, LINES)
RATES = Rates()
"""Rates of the mixes that occur, simulated once for all tests."""


@pytest.fixture(autouse=True)
def collector() -> Iterator[None]:
    """Restore the garbage collector's settings, which the replay's engine changes."""
    before = gc.get_threshold()
    yield
    gc.unfreeze()
    gc.set_threshold(*before)


def no_more_than_the_gpu(mix: Mix) -> tuple[float, ...]:
    """Return the rates of a mix. Fails if the mix requests, or gets, more than one GPU."""
    assert sum(request for request, _, _, _ in mix) <= 1000
    rates = RATES(mix)
    assert sum(rate * duty for rate, (_, _, duty, _) in zip(rates, mix, strict=True)) <= 1000.001
    assert all(0 < rate <= 1 for rate in rates)
    return rates


@pytest.mark.parametrize("load", [0.6, 2.5])
@pytest.mark.parametrize("sharing", Sharing)
def test_a_replay_accounts_for_every_job_and_keeps_every_guarantee(sharing: Sharing, load: float) -> None:
    jobs = WORKLOAD.draw(load, 4 * HOUR_S / 86400, seed=7)
    outcome = Replay(sharing, NODES, no_more_than_the_gpu).run(jobs, HOUR_S, 4 * HOUR_S)
    assert outcome.arrived == len(jobs)
    assert outcome.finished + outcome.running + outcome.waiting == len(jobs)
    assert len(outcome.waits_s) == sum(job.arrives_s >= HOUR_S for job in jobs)
    assert outcome.counted == len(outcome.slowdowns) > 20
    assert outcome.below == 0
    assert 0 < outcome.used <= 1
    assert 0 < outcome.worth <= WORKLOAD.bound()


def test_co_running_uses_gaps_that_turns_cannot_use() -> None:
    """One job keeps the GPU busy for a quarter of the time, the other for half."""
    mix: Mix = ((500, 1000, 250, 160), (500, 1000, 500, 160))
    in_turns, at_once = eager.EagerRates(Sharing.LENDING)(mix), eager.EagerRates(Sharing.CO_RUNNING)(mix)
    assert sum(in_turns) <= 1.1
    assert sum(at_once) >= 1.7
    assert all(rate >= 0.95 * eager.guaranteed(tenancy) for rate, tenancy in zip(in_turns, mix, strict=True))
