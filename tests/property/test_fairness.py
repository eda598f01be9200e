"""Fairness over simulated weeks: the order of teams with budgets, by the benchmark's month on a small cluster."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import fairness
import pytest
from packing_trace import GIB, TraceNode, TracePod
from throughput.jobs import Workload

DAYS = 28.0
NODES = tuple(TraceNode(f"node-{number}", 64_000, 262_144, 2, "A", 16 * GIB) for number in range(2))
LINES = tuple(
    (TracePod(2000, 4096, gpus, milli, ()), seconds)
    for gpus, milli, seconds in ((1, 300, 14_400.0), (1, 500, 7200.0), (1, 1000, 10_800.0), (2, 1000, 9000.0))
)
WORKLOAD = Workload("tiny", NODES, LINES)


@pytest.fixture(autouse=True)
def collector() -> Iterator[None]:
    """Undo what the engine's policy sets of the garbage collector."""
    before = gc.get_threshold()
    yield
    gc.unfreeze()
    gc.set_threshold(*before)


@pytest.mark.promise("budgets-entitlement")
@pytest.mark.parametrize("seed", range(2))
def test_in_a_month_of_too_much_demand_each_team_gets_its_budget_and_nothing_is_lost(seed: int) -> None:
    jobs = fairness.jobs_of_teams(WORKLOAD, DAYS, seed)
    without, month = (fairness.MonthOfTeams(NODES, DAYS, budgets=budgets).run(jobs) for budgets in (False, True))
    capacity_s = WORKLOAD.gpus * DAYS * 86_400
    assert month.placed + month.waiting == len(jobs)
    assert sum(month.gpu_s.values()) >= fairness.LEAST_UTILISATION * sum(without.gpu_s.values())
    for team in fairness.ENTITLED:
        assert month.beyond(team, capacity_s) >= -fairness.MOST_MISSED, team
    assert any(without.beyond(team, capacity_s) < -10 for team in fairness.ENTITLED), "without, some get much less"
