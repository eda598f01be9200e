"""Fairness: the simulated month of four teams that `fairness.py` measures.

The simulation uses these parts of the operator, with its defaults: placement engine, preemption planner, turns and rate
of preemptions, order of the queue, standings, accounts and head of the queue. Assumptions: an evicted job ends at once.
It returns as a new job, as the Pod of a Job does, and starts from the beginning. No time passes between a decision and
the start of a job. The trace has no memory sizes, so the memory of each share is in proportion to its time. Therefore
lowering a tenant's time never makes enough room, and the case of a borrower at request 0 does not occur.
"""

from __future__ import annotations

import asyncio
import heapq
import random
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from packing_policies import SharePod
from packing_trace import TraceNode, TracePod
from sharepod.api.gpubudget import BudgetPeriod
from sharepod.api.sharepod import GpuRequest
from sharepod.api.units import WHOLE_GPU, Milli, TenantId
from sharepod.budgets.budget import BudgetRules, BudgetState, ConsumedTotal, charged, standing_of
from sharepod.budgets.budget_account import MICRO, Terms
from sharepod.budgets.standing import WITHOUT_BUDGET, Standing
from sharepod.controller.placing.head_of_queue import HeadOfQueue
from sharepod.controller.placing.making_room.preemptions import whose_turn
from sharepod.controller.placing.stays import Stays
from sharepod.controller.placing.waiting import WaitingTenant, WorkedOut, asks
from sharepod.controller.settings import OperatorSettings
from sharepod.controller.state.memos import TenantMemos
from sharepod.placement.engine import QueueKey, queue_key
from sharepod.placement.preemption.planner import plan_preemption
from sharepod.placement.preemption.victims import PreemptionPlan, VictimFacts, Victims, victims_of
from sharepod.placement.state.types import Outlook, PlacementRequest, PodNeeds, Refusal, Resources
from sharepod.rate_limit import RateLimiter
from throughput.jobs import Job, Workload

ENTITLED = {"a": 0.4, "b": 0.3, "c": 0.2, "d": 0.1}
"""Part of the GPU time that each team is entitled to."""
ASKS = {"a": 0.35, "b": 0.3, "c": 0.2, "d": 0.15}
"""Part of the demand that each team makes. With `DEMAND`, each team requests more than its entitlement."""
DEMAND = 1.5
"""GPU time that all teams request, as a multiple of the capacity."""
BURST = 1.6
"""Demand of a team in every second week, as a multiple of its mean demand. In the other weeks, the team requests
correspondingly less."""
BUDGETED = 0.9
"""Sum of the budgets, as a part of the GPU time. It is less than 1, because capacity that is lost to packing cannot be
promised."""
START_MS = 1_769_904_000_000
"""Start of the simulated time, in milliseconds since 1970: 2026-02-01T00:00:00Z. The month has four weeks, so each team
has two weeks with a burst and two without."""
_DEFAULTS = {name: field.default for name, field in OperatorSettings.model_fields.items()}
HALF_LIFE_S, PER_MINUTE = _DEFAULTS["usage_half_life"], _DEFAULTS["preemptions_per_minute"]
LOOK_S = 300.0
"""Seconds between two updates of the budgets and of the head of the queue, and longest time between two
searches for room."""
SOON_S = 1.0
"""Seconds until the next search for room, after a search has found room or a request has arrived that may take
the room."""
DAYS, NODES = 28.0, 6
_NO_ROOM = Refusal(outlook=Outlook.WAITING, headline="no room")
Key = tuple[str, TracePod]
"""(team, shape of its request). Waiting requests with equal keys are served oldest first."""


@dataclass
class Month:
    """Figures of one month."""

    gpu_s: dict[str, float] = field(default_factory=lambda: dict.fromkeys(ENTITLED, 0.0))
    """Reserved GPU time by team, in seconds."""
    alone_s: dict[str, float] = field(default_factory=lambda: dict.fromkeys(ENTITLED, 0.0))
    """Part of `gpu_s` that a team borrowed while no team within its budget waited, in seconds."""
    waits_s: list[float] = field(default_factory=list)
    """Seconds that each job has waited; for an evicted job, the sum of its waits."""
    wait_of: dict[int, float] = field(default_factory=dict)
    """The same seconds, by the number of the job."""
    placed: int = 0
    ended: int = 0
    waiting: int = 0
    evicted: int = 0
    lowered: int = 0
    lost_s: float = 0.0
    """Seconds of GPU time that evicted jobs had used since their start. This work is lost."""

    def beyond(self, team: str, capacity_s: float, *, contended: bool = False) -> float:
        """Return how far a team's GPU time exceeds its budget, in per cent of the budget; negative if the team had
        less. `contended`: True to leave out time that the team borrowed while no team within its budget waited."""
        due = ENTITLED[team] * BUDGETED * capacity_s
        return 100 * (self.gpu_s[team] - (self.alone_s[team] if contended else 0.0) - due) / due


@dataclass(frozen=True, slots=True)
class RunningJob:
    """Running job. `began`: simulated second of its start."""

    team: str
    job: Job
    node: str
    began: float


class MonthOfTeams:
    """Simulation of one month; call `run` once. `budgets` true: teams have budgets, and teams within their budget
    preempt others. `budgets` false: the queue is ordered by age. `idle_ratio`: largest part of the GPU time that may
    stay idle for the head of the queue; 0: no GPUs are reserved."""

    def __init__(
        self,
        nodes: Sequence[TraceNode],
        days: float,
        *,
        budgets: bool,
        idle_ratio: float = _DEFAULTS["keep_idle_ratio"],
    ) -> None:
        policy = SharePod(nodes, ())
        self._cluster, self._engine = policy.cluster, policy.engine
        self._end_s = days * 86_400
        gpus = sum(node.gpus for node in nodes)
        self._budgets, self._keeps, self._now = budgets, idle_ratio > 0, 0.0
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
        self._firsts: dict[Key, tuple[Job, QueueKey, PlacementRequest]] = {}
        self._memos = TenantMemos()
        self._queued: dict[TenantId, WaitingTenant] = {}
        self._wanted: dict[TenantId, tuple[str, Job]] = {}
        self._runner = asyncio.Runner()
        self._stays = Stays(lambda: self._now, lambda _tenant: 0.0)
        self._cluster.on_released(self._stays.ended)
        self._head = HeadOfQueue(
            self._cluster,
            self._memos,
            request_of=lambda waiting: self._request(*self._wanted[TenantId(waiting.tenant)]),
            clock=lambda: self._now,
            after=_DEFAULTS["keep_after"],
            lasts=_DEFAULTS["keep_for"],
            idle_ratio=idle_ratio,
            fair_wait=_DEFAULTS["fair_wait"],
            left=self._stays.left,
            later=lambda _at: None,
            wake=lambda: None,
        )
        self._running: dict[TenantId, RunningJob] = {}
        self._ends: list[tuple[float, int, TenantId, float]] = []
        self._waited: dict[int, float] = {}
        self._limiter = RateLimiter(0.0, per_s=PER_MINUTE / 60, burst=max(1.0, PER_MINUTE / 4))
        self._room_at = 0.0
        self.month = Month()

    def run(self, jobs: Sequence[tuple[str, Job]]) -> Month:
        """Simulate the month. Return its figures."""
        upcoming, look = deque(jobs), 0.0
        while True:
            ends = self._ends[0][0] if self._ends else float("inf")
            arrives = upcoming[0][1].arrives_s if upcoming else float("inf")
            now = min(ends, arrives, look, self._room_at)
            if now >= self._end_s:
                break
            self._count(now)
            self._now = now
            if now == look:
                look += LOOK_S
                self._look(now)
            elif now == self._room_at:
                self._make_room(now)
            elif now == arrives:
                self._arrive(*upcoming.popleft(), now)
            else:
                _, _, tenant, began = heapq.heappop(self._ends)
                running = self._running.get(tenant)
                if running is not None and running.began == began:
                    self.month.ended += 1
                    self._leave(tenant)
                    self._serve(running.node, now)
        self._count(self._end_s)
        for queue in self._waiting.values():
            self.month.waiting += len(queue)
            for job in queue:
                self._waited[job.number] = self._waited.get(job.number, 0.0) + self._end_s - job.arrives_s
        self.month.wait_of = self._waited
        self.month.waits_s = list(self._waited.values())
        self._runner.close()
        self.month.gpu_s = {team: had / 1000 for team, had in self._had_ms.items()}
        return self.month

    def _count(self, now: float) -> None:
        passed, self._counted_s = now - self._counted_s, now
        alone = all(self._standings[team].lowered_to is not None for team, _ in self._waiting)
        for team, milli in self._rates.items():
            self._had_ms[team] += round(milli * passed)
            if alone and self._standings[team].lowered_to is not None:
                self.month.alone_s[team] += milli * passed / 1000

    def _look(self, now: float) -> None:
        """Charge the budgets, and reserve GPUs for the head of the queue, as the operator does at intervals."""
        at_ms = START_MS + round(now * 1000)
        if self._budgets:
            for team, rules in self._rules.items():
                totals = {(team, "any"): ConsumedTotal(self._had_ms[team], self._had_ms[team])}
                state = charged(self._states[team], rules, (team,), totals, at_ms=at_ms, half_life_s=HALF_LIFE_S)
                self._states[team] = state
                self._standings[team] = standing_of(state, rules, half_life_s=HALF_LIFE_S, refill_at="")
            self._firsts.clear()
        if self._keeps:
            self._keep(now)

    def _keep(self, now: float) -> None:
        """Choose the head of the queue, and reserve GPUs for it. Candidates are the oldest jobs of each team and
        shape."""
        before = self._cluster.head_reservation
        eligible = {one.tenant: one for queue in self._waiting.values() for one in self._eligible(queue, now)}
        for tenant, one in eligible.items():
            one.key = queue_key(self._request(*self._wanted[TenantId(tenant)]))
        self._runner.run(self._head.look(eligible, asyncio.Event()))
        after = self._cluster.head_reservation
        if after is not None and (before is None or before.tenant != after.tenant):
            self.kept(self._queued[after.tenant], after.priority, now)
        if before is not None and before != after:
            self._serve(before.node, now)

    def kept(self, owner: WaitingTenant, priority: int, now: float) -> None:
        """Do nothing (called when GPUs are reserved for a job)."""

    def waiting(self) -> Iterator[tuple[WaitingTenant, int]]:
        """Return the jobs that wait, each with its effective priority."""
        for tenant, waiting in self._queued.items():
            yield waiting, self._standings[self._wanted[tenant][0]].effective_priority(0)

    def _eligible(self, queue: deque[Job], now: float) -> Iterator[WaitingTenant]:
        head = self._cluster.head_reservation
        for job in queue:
            waiting = self._queued[_tenant(job)]
            yield waiting
            if now >= waiting.not_kept_before and (head is None or head.tenant != waiting.tenant):
                return

    def _make_room(self, now: float) -> None:
        """Let jobs of teams within their budgets preempt others, as the operator's preemption loop does."""
        self._room_at = now + LOOK_S
        effective = {team: standing.effective_priority(0) for team, standing in self._standings.items()}
        lowest = min((effective[item.team] for item in self._running.values()), default=0)
        version = self._cluster.room_version
        asked = [
            (first[2], waiting)
            for key in self._waiting
            if effective[key[0]] > lowest
            for first in (self._first(key),)
            for waiting in (self._queued[first[2].tenant],)
            if waiting.room_looked_for is None or waiting.room_looked_for[0] != version
        ]
        if not asked:
            return
        turns = whose_turn(asked)
        if len(asked) > len(turns):
            self._room_at = now + SOON_S
        victims = self._victims(now)
        for request, waiting in turns:
            wait_s = self._limiter.wait_s(now)
            if wait_s > 0:
                self._room_at = now + max(SOON_S, wait_s)
                return
            plan = plan_preemption(self._cluster, request, victims)
            if plan is None or not plan.evict + plan.lower:
                waiting.room_looked_for = (version, now)
                continue
            self._carry_out(plan, now)
            team, job = self._wanted[request.tenant]
            if self._start(team, job, now):
                self._pop((team, job.pod))
            self._serve(plan.node, now)
            self._room_at = now + SOON_S
            return

    def _victims(self, now: float) -> Victims:
        """Return the running jobs in the form that the operator's preemption planner takes."""
        return victims_of(
            {
                tenant: VictimFacts(
                    unit=tenant,
                    priority=self._standings[item.team].effective_priority(0),
                    over_budget_milli=self._standings[item.team].over_budget_milli,
                    started=int(item.began),
                    lost_seconds=int(now - item.began) * item.job.pod.demand // WHOLE_GPU,
                    lowerable=True,
                )
                for tenant, item in self._running.items()
            }
        )

    def _carry_out(self, plan: PreemptionPlan, now: float) -> None:
        assert not plan.lower, "shares have memory in proportion: time is never short alone"
        self._limiter.charge(len(plan.evict))
        for tenant in plan.evict:
            item = self._running[tenant]
            self.month.evicted += 1
            self.month.lost_s += item.job.pod.demand * (now - item.began) / 1000
            self._leave(tenant)
            self._wait(item.team, replace(item.job, arrives_s=now), now)

    def _leave(self, tenant: TenantId) -> None:
        item = self._running.pop(tenant)
        self._rates[item.team] -= item.job.pod.demand
        self._cluster.release(item.node, tenant)
        self._engine.packing.settle()

    def _arrive(self, team: str, job: Job, now: float) -> None:
        packing = self._engine.packing
        packing.arrived(self._request(team, job))
        if packing.due:
            packing.renew()
        queue = self._waiting.get((team, job.pod))
        if queue or not self._start(team, job, now):
            self._wait(team, job, now)
            if not queue:
                self._room_at = min(self._room_at, now + SOON_S)

    def _wait(self, team: str, job: Job, now: float) -> None:
        self._waiting.setdefault((team, job.pod), deque()).append(job)
        tenant = _tenant(job)
        self._wanted[tenant] = team, job
        waiting = self._queued[tenant] = WaitingTenant(tenant, now)
        request = self._request(team, job)
        waiting.worked_out = WorkedOut((), request, asks(request), queue_key(request))
        self._memos.of(tenant).refusal = _NO_ROOM

    def _serve(self, node: str, now: float) -> None:
        """Start waiting jobs on this node, in queue order, until the node has no room for the next one."""
        account = self._cluster.node(node)
        assert account is not None, "nodes stay"
        refused: set[Key] = set()
        while True:
            free = [gpu.free_milli for gpu in account.gpus]
            most, whole, cpu = max(free), free.count(WHOLE_GPU), account.taken().free.cpu_milli
            fitting = [
                (self._first(key)[1], key)
                for key in self._waiting
                if (key[1].milli <= most if key[1].gpus == 1 else key[1].gpus <= whole)
                and key[1].cpu <= cpu
                and key not in refused
            ]
            for _, key in sorted(fitting, key=lambda item: item[0]):
                job, _, request = self._first(key)
                if self._engine.serves(request, (node,)) and self._start(key[0], job, now):
                    self._pop(key)
                    break
                refused.add(key)
            else:
                return

    def _first(self, key: Key) -> tuple[Job, QueueKey, PlacementRequest]:
        """Return the job of a team and shape that has waited longest, with its queue key and request."""
        found = self._firsts.get(key)
        if found is None or found[0] is not self._waiting[key][0]:
            job = self._waiting[key][0]
            request = self._request(key[0], job)
            found = self._firsts[key] = (job, queue_key(request), request)
        return found

    def _pop(self, key: Key) -> None:
        tenant = _tenant(self._waiting[key].popleft())
        del self._queued[tenant], self._wanted[tenant]
        self._memos.forget(tenant)
        if not self._waiting[key]:
            del self._waiting[key]

    def _start(self, team: str, job: Job, now: float) -> bool:
        request = self._request(team, job)
        answer = self._engine.find(request)
        if answer is None:
            return False
        self._engine.reserve(request, answer)
        self._stays.began(request.tenant)
        head = self._cluster.head_reservation
        if head is not None and head.tenant == request.tenant:
            self._cluster.reserve_for_head(None)
        self._rates[team] += job.pod.demand
        self._running[request.tenant] = RunningJob(team, job, answer.node, now)
        heapq.heappush(self._ends, (now + job.service_s, job.number, request.tenant, now))
        self.month.placed += 1
        self._waited[job.number] = self._waited.get(job.number, 0.0) + now - job.arrives_s
        return True

    def _request(self, team: str, job: Job) -> PlacementRequest:
        pod, standing, tenant = job.pod, self._standings[team], _tenant(job)
        return PlacementRequest(
            tenant=tenant,
            namespace=team,
            name=tenant,
            gpu=GpuRequest(
                request_milli=Milli(pod.milli), limit_milli=WHOLE_GPU, memory=None, count=pod.gpus, models=pod.models
            ),
            pod=PodNeeds(resources=Resources(pod.cpu, pod.memory << 20)),
            priority=standing.effective_priority(0),
            standing=standing.step,
            created=f"{job.arrives_s:020.6f}",
        )


def _tenant(job: Job) -> TenantId:
    return TenantId(f"job-{job.number}")


def _terms(amount: int) -> Terms:
    return Terms(amount=amount, cap=amount, period=BudgetPeriod.MONTH)


def jobs_of_teams(workload: Workload, days: float, seed: int) -> list[tuple[str, Job]]:
    """Draw the jobs of a month, as (team, job). The demand of each team comes in bursts of a week."""
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
