"""Fairness: a simulated month in which teams ask for more than there is, with budgets and without.

    make bench-fairness [TRACE=DIR] [FAIRNESS_ARGS=...]

The placement engine places the jobs; queue, standings, accounts and head-of-line reservation are the operator's own
functions. Nobody is preempted: what is measured is the order alone. Prints and writes each team's GPU time against its
budget (what is missing, what it borrowed beyond it), the GPU time reserved against that without budgets, and waits. The
exit status is 1 if a team misses more than 2 % of its budget, or budgets cost more than 1 % of the GPU time.
"""

from __future__ import annotations

import argparse
import heapq
import random
import sys
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from packing_policies import SharePod
from packing_trace import TraceError, TraceNode, TracePod
from results import Row, write
from sharepod.api.gpubudget import BudgetPeriod
from sharepod.api.sharepod import GpuRequest
from sharepod.api.units import WHOLE_GPU, Milli, TenantId
from sharepod.budgets.budget import BudgetRules, BudgetState, ConsumedTotal, charged, standing_of
from sharepod.budgets.budget_account import MICRO, Terms
from sharepod.budgets.standing import WITHOUT_BUDGET, Standing
from sharepod.placement.engine import head_key, queue_key
from sharepod.placement.head_reservation import find_head_reservation
from sharepod.placement.state.types import PlacementRequest, PodNeeds, Resources
from throughput.jobs import Job, Workload, drawn, of_trace

ENTITLED = {"a": 0.4, "b": 0.3, "c": 0.2, "d": 0.1}
"""Part of the GPU time that each team is entitled to."""
ASKS = {"a": 0.35, "b": 0.3, "c": 0.2, "d": 0.15}
"""Part of the demand that each team makes: each asks for more than it is entitled to."""
DEMAND = 1.5
"""GPU time asked for, by what there is."""
BURST = 1.6
"""Demand of a team in every other week of its own, by its mean; in the weeks between it asks for as much less."""
BUDGETED = 0.9
"""Part of the GPU time that the budgets come to: what packing leaves unused cannot be promised."""
START_MS = 1_769_904_000_000
"""2026-02-01T00:00:00Z, the start of a month of four weeks: as many weeks of bursts as between for each team."""
KEEP_AFTER_S, FAIR_WAIT_S, HALF_LIFE_S = 600.0, 86_400.0, 604_800.0
"""The operator's defaults: `keep_after`, `fair_wait`, `usage_half_life`."""
LOOK_S = 300.0
"""Seconds between two looks at budgets and the head of the line."""
DAYS, NODES = 28.0, 6
MOST_MISSED, LEAST_UTILISATION = 2.0, 0.99
"""Percent of its budget that a team may miss; GPU time with budgets by that without."""
PROMISES = {"budgets-entitlement": ("max", "entitlement_missed", "with budgets")}

Key = tuple[str, TracePod]
"""Team and shape of a request: those of one key are served oldest first."""


@dataclass
class Month:
    """Figures of one month."""

    gpu_s: dict[str, float] = field(default_factory=lambda: dict.fromkeys(ENTITLED, 0.0))
    """GPU time reserved, by team."""
    waits_s: list[float] = field(default_factory=list)
    """Waits of the jobs that were placed, and of those that wait in the end, so far."""
    placed: int = 0
    waiting: int = 0

    def beyond(self, team: str, capacity_s: float) -> float:
        """Return what a team had beyond its budget, in percent of it; less than 0 where it had less."""
        due = ENTITLED[team] * BUDGETED * capacity_s
        return 100 * (self.gpu_s[team] - due) / due


class MonthOfTeams:
    """One play. `budgets`: the teams have budgets; else the queue goes by age. `run` once."""

    def __init__(self, nodes: Sequence[TraceNode], days: float, *, budgets: bool) -> None:
        policy = SharePod(nodes, ())
        self._cluster, self._engine = policy.cluster, policy.engine
        self._end_s = days * 86_400
        gpus = sum(node.gpus for node in nodes)
        self._budgets = budgets
        self._rules = {
            team: BudgetRules(terms=_terms(int(part * gpus * BUDGETED * DAYS * 86_400) * MICRO))
            for team, part in ENTITLED.items()
        }
        self._states = {team: BudgetState.begun(rules, START_MS) for team, rules in self._rules.items()}
        self._standings: dict[str, Standing] = dict.fromkeys(ENTITLED, WITHOUT_BUDGET)
        self._rates: dict[str, int] = dict.fromkeys(ENTITLED, 0)
        self._had_ms: dict[str, int] = dict.fromkeys(ENTITLED, 0)
        self._counted_s = 0.0
        self._waiting: dict[Key, deque[Job]] = {}
        self._ends: list[tuple[float, int, str, str, TenantId, int]] = []
        self.month = Month()

    def run(self, jobs: Sequence[tuple[str, Job]]) -> Month:
        """Play the month."""
        upcoming, look = deque(jobs), 0.0
        while True:
            ends = self._ends[0][0] if self._ends else float("inf")
            arrives = upcoming[0][1].arrives_s if upcoming else float("inf")
            now = min(ends, arrives, look)
            if now >= self._end_s:
                break
            self._count(now)
            if now == look:
                look += LOOK_S
                self._look(now)
            elif now == arrives:
                self._arrive(*upcoming.popleft())
            else:
                _, _, team, node, tenant, milli = heapq.heappop(self._ends)
                self._rates[team] -= milli
                self._cluster.release(node, tenant)
                self._engine.packing.settle()
                self._serve(node, now)
        self._count(self._end_s)
        for queue in self._waiting.values():
            self.month.waiting += len(queue)
            self.month.waits_s += [self._end_s - job.arrives_s for job in queue]
        self.month.gpu_s = {team: had / 1000 for team, had in self._had_ms.items()}
        return self.month

    def _count(self, now: float) -> None:
        passed, self._counted_s = now - self._counted_s, now
        for team, milli in self._rates.items():
            self._had_ms[team] += round(milli * passed)

    def _look(self, now: float) -> None:
        """Charge the budgets, as the operator does, and keep GPUs for the head of the line."""
        at_ms = START_MS + round(now * 1000)
        if self._budgets:
            for team, rules in self._rules.items():
                totals = {(team, "any"): ConsumedTotal(self._had_ms[team], self._had_ms[team])}
                state = charged(self._states[team], rules, (team,), totals, at_ms=at_ms, half_life_s=HALF_LIFE_S)
                self._states[team] = state
                self._standings[team] = standing_of(state, rules, half_life_s=HALF_LIFE_S, refill_at="")
        head = self._cluster.head_reservation
        if head is not None or not self._waiting:
            return
        late = [
            (head_key(self._request(team, queue[0]), overdue=now - queue[0].arrives_s >= FAIR_WAIT_S), team, queue[0])
            for (team, _), queue in self._waiting.items()
            if now - queue[0].arrives_s >= KEEP_AFTER_S
        ]
        if late:
            _, team, job = min(late, key=lambda item: item[0])
            self._cluster.reserve_for_head(find_head_reservation(self._cluster, self._request(team, job)))

    def _arrive(self, team: str, job: Job) -> None:
        packing = self._engine.packing
        packing.arrived(self._request(team, job))
        if packing.due:
            packing.renew()
        queue = self._waiting.get((team, job.pod))
        if queue or not self._start(team, job, job.arrives_s):
            self._waiting.setdefault((team, job.pod), deque()).append(job)

    def _serve(self, node: str, now: float) -> None:
        """Start the jobs that wait, in queue order, as far as this node's room serves them."""
        account = self._cluster.node(node)
        assert account is not None, "nodes stay"
        refused: set[Key] = set()
        while True:
            free = [gpu.free_milli for gpu in account.gpus]
            most, whole, cpu = max(free), free.count(WHOLE_GPU), account.taken().free.cpu_milli
            fitting = [
                (queue_key(self._request(key[0], queue[0])), key)
                for key, queue in self._waiting.items()
                if (key[1].milli <= most if key[1].gpus == 1 else key[1].gpus <= whole)
                and key[1].cpu <= cpu
                and key not in refused
            ]
            for _, key in sorted(fitting, key=lambda item: item[0]):
                job = self._waiting[key][0]
                request = self._request(key[0], job)
                if self._engine.serves(request, (node,)) and self._start(key[0], job, now):
                    self._waiting[key].popleft()
                    if not self._waiting[key]:
                        del self._waiting[key]
                    break
                refused.add(key)
            else:
                return

    def _start(self, team: str, job: Job, now: float) -> bool:
        request = self._request(team, job)
        answer = self._engine.find(request)
        if answer is None:
            return False
        self._engine.reserve(request, answer)
        head = self._cluster.head_reservation
        if head is not None and head.tenant == request.tenant:
            self._cluster.reserve_for_head(None)
        self._rates[team] += job.pod.demand
        heapq.heappush(self._ends, (now + job.service_s, job.number, team, answer.node, request.tenant, job.pod.demand))
        self.month.placed += 1
        self.month.waits_s.append(now - job.arrives_s)
        return True

    def _request(self, team: str, job: Job) -> PlacementRequest:
        pod, standing, name = job.pod, self._standings[team], f"job-{job.number}"
        return PlacementRequest(
            tenant=TenantId(name),
            namespace=team,
            name=name,
            gpu=GpuRequest(
                request_milli=Milli(pod.milli), limit_milli=WHOLE_GPU, memory=None, count=pod.gpus, models=pod.models
            ),
            pod=PodNeeds(resources=Resources(pod.cpu, pod.memory << 20)),
            priority=standing.effective_priority(0),
            standing=standing.step,
            created=f"{job.arrives_s:020.6f}",
        )


def _terms(amount: int) -> Terms:
    return Terms(amount=amount, cap=amount, period=BudgetPeriod.MONTH)


def jobs_of_teams(workload: Workload, days: float, seed: int) -> list[tuple[str, Job]]:
    """Draw the jobs of a month, each of a team, whose demand comes in bursts of a week."""
    asked = sum(pod.demand / 1000 * seconds for pod, seconds in workload.lines)
    whole = sum(pod.gpus * seconds for pod, seconds in workload.lines)
    chance = random.Random(seed)
    teams = list(ASKS)
    found = []
    for job in workload.draw(DEMAND * whole / asked, days, seed):
        week = int(job.arrives_s // (7 * 86_400))
        weights = [ASKS[team] * (BURST if (week + place) % 2 else 2 - BURST) for place, team in enumerate(teams)]
        found.append((chance.choices(teams, weights)[0], job))
    return found


def rows_of(month: Month, case: str, capacity_s: float, days: float) -> list[Row]:
    """Return the figures of one month."""
    rows = [Row(case, f"gpu_time_{team}", "%", 100 * had / capacity_s) for team, had in month.gpu_s.items()]
    waits = sorted(month.waits_s) or [0.0]
    return [
        *rows,
        Row(case, "entitlement_missed", "%", max(0.0, *(-month.beyond(team, capacity_s) for team in ENTITLED))),
        Row(case, "entitlement_borrowed", "%", max(0.0, *(month.beyond(team, capacity_s) for team in ENTITLED))),
        Row(case, "utilisation", "%", 100 * sum(month.gpu_s.values()) / capacity_s),
        Row(case, "jobs_per_day", "1/d", month.placed / days),
        Row(case, "wait_p50", "h", waits[len(waits) // 2] / 3600),
        Row(case, "wait_longest", "h", waits[-1] / 3600),
        Row(case, "waiting_in_the_end", "jobs", month.waiting),
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    """The program."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--trace", type=Path, help="a folder with *node_list*.csv and *pod_list*.csv; else drawn jobs")
    parser.add_argument("--pods", default="default", help="name of the folder's trace")
    parser.add_argument("--days", type=float, default=DAYS)
    parser.add_argument("--nodes", type=int, default=NODES)
    parser.add_argument("--seed", type=int, default=42)
    options = parser.parse_args(arguments)
    try:
        workload = (
            of_trace(options.trace, [options.pods], options.nodes)[0]
            if options.trace
            else drawn(options.nodes, options.seed)
        )
    except (TraceError, OSError) as error:
        print(error, file=sys.stderr)
        return 2
    jobs = jobs_of_teams(workload, options.days, options.seed)
    months, rows = {}, []
    for budgets in (False, True):
        began, case = time.monotonic(), "with budgets" if budgets else "without budgets"
        month = months[budgets] = MonthOfTeams(workload.nodes, options.days, budgets=budgets).run(jobs)
        print(f"{case}: {len(jobs)} jobs, {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)
        rows += rows_of(month, case, workload.gpus * options.days * 86_400, options.days)
    kept = sum(months[True].gpu_s.values()) / sum(months[False].gpu_s.values())
    rows.append(Row("with budgets", "utilisation_of_none", "x", kept))
    write("fairness", rows)
    missed = max(-months[True].beyond(team, workload.gpus * options.days * 86_400) for team in ENTITLED)
    return 1 if missed > MOST_MISSED or kept < LEAST_UTILISATION else 0


if __name__ == "__main__":
    sys.exit(main())
