"""Fairness over simulated weeks: the order of teams with budgets, by the benchmark's simulated month on a small
cluster."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import fairness
import fairness_month
import pytest
from packing_trace import GIB, TraceNode, TracePod
from sharepod.controller.placing.waiting import WaitingTenant
from sharepod.controller.settings import OperatorSettings
from throughput.jobs import Workload

DAYS = 28.0
NODES = tuple(TraceNode(f"node-{number}", 64_000, 262_144, 2, "A", 16 * GIB) for number in range(2))
LINES = tuple(
    (TracePod(2000, 4096, gpus, milli, ()), seconds)
    for gpus, milli, seconds in ((1, 300, 14_400.0), (1, 500, 7200.0), (1, 1000, 10_800.0), (2, 1000, 9000.0))
)
FAIR_WAIT_S = OperatorSettings.model_fields["fair_wait"].default
KEEP_AFTER_S = OperatorSettings.model_fields["keep_after"].default
WORKLOAD = Workload("tiny", NODES, LINES)


@pytest.fixture(autouse=True)
def collector() -> Iterator[None]:
    """Restore the garbage collector's settings, which the engine's policy changes."""
    before = gc.get_threshold()
    yield
    gc.unfreeze()
    gc.set_threshold(*before)


@pytest.mark.promise("budgets-entitlement")
@pytest.mark.parametrize("seed", range(2))
def test_in_a_month_of_excess_demand_each_team_gets_its_budget_and_nothing_is_lost(seed: int) -> None:
    jobs = fairness_month.jobs_of_teams(WORKLOAD, DAYS, seed)
    without, month = (fairness_month.MonthOfTeams(NODES, DAYS, budgets=budgets).run(jobs) for budgets in (False, True))
    capacity_s = WORKLOAD.gpus * DAYS * 86_400
    assert month.placed - month.evicted + month.waiting == len(jobs)
    assert sum(month.gpu_s.values()) >= 0.97 * sum(without.gpu_s.values())
    assert fairness.error_of(month, capacity_s) <= fairness.MOST_OFF
    assert any(without.beyond(team, capacity_s) < -10 for team in fairness_month.ENTITLED), (
        "without, some get much less"
    )


class _Watched(fairness_month.MonthOfTeams):
    """Simulated month that checks each reservation of GPUs for a waiting tenant: no tenant of higher priority, or
    overdue for longer, waits without one.
    """

    turns = overdue = 0

    def kept(self, owner: WaitingTenant, priority: int, now: float) -> None:
        self.turns += 1
        due = [
            one
            for one, its_priority in self.waiting()
            if one is not owner
            and its_priority == priority
            and now >= one.not_kept_before
            and now - one.since >= FAIR_WAIT_S
        ]
        self.overdue += bool(due)
        assert not due or (now - owner.since >= FAIR_WAIT_S and owner.since <= min(one.since for one in due))
        assert not [
            one
            for one, its_priority in self.waiting()
            if its_priority > priority and now >= max(one.since + KEEP_AFTER_S, one.not_kept_before)
        ]


@pytest.mark.promise("budgets-no-starvation")
def test_gpus_are_nominated_for_requests_older_than_a_day_the_oldest_first_over_weeks_and_nodes() -> None:
    nodes = tuple(TraceNode(f"node-{number}", 64_000, 262_144, 2, "A", 16 * GIB) for number in range(8))
    jobs = fairness_month.jobs_of_teams(Workload("many", nodes, LINES), 14.0, 3)
    month = _Watched(nodes, 14.0, budgets=True, idle_ratio=1.0)
    month.run(jobs)
    assert month.turns > 50
    assert month.overdue > 20
