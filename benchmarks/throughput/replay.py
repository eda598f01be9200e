"""Replay of jobs: they arrive, wait, run together, and leave.

The placement engine places them and reserves GPUs for the head of the queue, as the operator does. All policies use the
same engine and queue.

Guarantees:
- A job that fits starts at once. When a job ends, waiting jobs that fit on its node start, oldest first.
- Every job is finished, running or waiting at the end.
- A job progresses at the rate of the mix of jobs on its GPU, from one change of that mix to the next.
"""

from __future__ import annotations

import heapq
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from statistics import median

from packing_policies import SharePod
from packing_trace import TraceNode, TracePod
from sharepod.api.sharepod import GpuRequest
from sharepod.api.units import WHOLE_GPU, Bytes, GpuUuid, Milli, TenantId
from sharepod.placement.head_reservation import find_head_reservation
from sharepod.placement.state.types import PlacementRequest, PodNeeds, Resources

from throughput.jobs import Job
from throughput.rates import Mix, Tenancy, guaranteed

KEPT_AFTER_S = 600.0
"""Seconds for which the oldest job waits before GPUs are reserved for it. This is the operator's default of
`keep_after`."""
TOLERANCE = 0.95
"""A job is below its guarantee if its speed is less than this part of the guaranteed speed. If requests take the whole
GPU and all jobs want more, hand-offs (2 to 3 % of the time with short steps) belong to no job."""


class Sharing(StrEnum):
    """Policy of a replay. The values are the names in the printed results."""

    EXCLUSIVE = "exclusive"
    """Each job has whole GPUs, as without SharePod."""
    STATIC = "static"
    """The request is also the limit: idle time is not lent."""
    LENDING = "SharePod"
    """Idle time is lent, up to a whole GPU."""
    CO_RUNNING = "SharePod, co-running"
    """Jobs also run at the same time, in the gaps of each other. Only for jobs with gaps between their kernels."""


@dataclass(slots=True)
class RunningJob:
    """Job that runs on its GPUs."""

    job: Job
    tenant: TenantId
    node: str
    gpus: tuple[GpuUuid, ...]
    tenancy: Tenancy
    began_s: float
    left_s: float
    """Seconds of service at rate 1 that are left at `at_s`."""
    at_s: float
    rate: float = 1.0
    version: int = 0
    """Number of changes of its rate. An end of the job that was computed before the last change is invalid."""


@dataclass
class Outcome:
    """Figures of one policy at one load. Most of them count only the part of the time after the warm-up."""

    seconds: float
    gpus: int
    arrived: int = 0
    """Number of jobs that arrived in the whole replay. The next three numbers are also for the whole replay."""
    finished: int = 0
    running: int = 0
    waiting: int = 0
    counted: int = 0
    """Number of jobs that finished in the counted time."""
    counted_whole: int = 0
    """Number of jobs among `counted` that requested whole GPUs."""
    waits_s: list[float] = field(default_factory=list)
    """Seconds in the queue, of each job that arrived in the counted time. A job that still waits at the end has its
    seconds so far."""
    slowdowns: list[float] = field(default_factory=list)
    """For each counted job: its running time, relative to the running time without neighbours."""
    below: int = 0
    """Number of counted jobs that ran slower than their guarantee."""
    worst: float = float("inf")
    """Lowest speed of a counted job, relative to its guaranteed speed."""
    used_gpu_s: float = 0.0
    served_s: float = 0.0
    """Progress in the counted time, in seconds of one exclusive GPU."""

    @property
    def median_wait_s(self) -> float:
        """Median wait in the queue, in seconds."""
        return median(self.waits_s) if self.waits_s else 0.0

    @property
    def per_day(self) -> float:
        """Number of jobs that finished per day."""
        return self.counted / self.seconds * 86400

    @property
    def used(self) -> float:
        """Part of the GPU time in which a job's kernels ran."""
        return self.used_gpu_s / (self.seconds * self.gpus)

    @property
    def worth(self) -> float:
        """Number of exclusive GPUs, busy without a gap, that would do the same work, relative to the capacity."""
        return self.served_s / (self.seconds * self.gpus)


class Replay:
    """Replay of one list of jobs under one policy. Call `run` once.

    Args:
        rates: Returns the rate of each job of a sorted mix on one GPU.
        guarantee: Returns the rate that a job's request guarantees.
    """

    def __init__(
        self,
        sharing: Sharing,
        nodes: Sequence[TraceNode],
        rates: Callable[[Mix], tuple[float, ...]],
        guarantee: Callable[[Tenancy], float] = guaranteed,
    ) -> None:
        policy = SharePod(nodes, ())
        self._sharing = sharing
        self._rates = rates
        self._guarantee = guarantee
        self._cluster, self._engine = policy.cluster, policy.engine
        self._gpus = sum(node.gpus for node in nodes)
        self._waiting: dict[TracePod, deque[Job]] = {}
        self._on_gpu: dict[GpuUuid, list[RunningJob]] = defaultdict(list)
        self._running: dict[TenantId, RunningJob] = {}
        self._ends: list[tuple[float, int, int, RunningJob]] = []
        self._oldest: Job | None = None
        """Job that had waited longest when a job last ended."""
        self._begin_s = 0.0
        self._outcome = Outcome(0.0, self._gpus)

    def run(self, jobs: Sequence[Job], begin_s: float, end_s: float) -> Outcome:
        """Simulate until `end_s`. Events before `begin_s` are not counted."""
        self._begin_s = begin_s
        self._outcome = outcome = Outcome(end_s - begin_s, self._gpus)
        upcoming = iter(jobs)
        job = next(upcoming, None)
        while True:
            ends = self._ends[0][0] if self._ends else float("inf")
            arrives = job.arrives_s if job is not None else float("inf")
            if min(ends, arrives) >= end_s:
                break
            if job is not None and arrives <= ends:
                self._arrive(job)
                job = next(upcoming, None)
                continue
            _, _, version, running = heapq.heappop(self._ends)
            if version == running.version:
                self._finish(running, ends)
        for running in self._running.values():
            self._account(running, end_s)
        outcome.running = len(self._running)
        for late in (late for queue in self._waiting.values() for late in queue):
            outcome.waiting += 1
            if late.arrives_s >= begin_s:
                outcome.waits_s.append(end_s - late.arrives_s)
        return outcome

    # ---- queue

    def _arrive(self, job: Job) -> None:
        self._outcome.arrived += 1
        packing = self._engine.packing
        packing.arrived(self._request(job))
        if packing.due:
            packing.renew()
        queue = self._waiting.get(job.pod)
        if queue or not self._start(job, job.arrives_s):
            self._waiting.setdefault(job.pod, deque()).append(job)

    def _serve_queue(self, node: str, now: float) -> None:
        """Start waiting jobs, oldest first, while this node has room for them."""
        account = self._cluster.node(node)
        assert account is not None, "nodes stay"
        refused: set[TracePod] = set()
        while True:
            free = [gpu.free_milli for gpu in account.gpus]
            most, whole = max(free), free.count(WHOLE_GPU)
            fitting = [
                (queue[0].arrives_s, queue[0].number, pod)
                for pod, queue in self._waiting.items()
                if pod not in refused
                and (self._milli(pod) <= most if pod.gpus == 1 else pod.gpus <= whole)
                and pod.cpu <= account.taken().free.cpu_milli
            ]
            if not fitting:
                return
            for _, _, pod in sorted(fitting, key=lambda one: one[:2]):
                queue = self._waiting[pod]
                if self._engine.serves(self._request(queue[0]), (node,)) and self._start(queue[0], now):
                    queue.popleft()
                    if not queue:
                        del self._waiting[pod]
                    break
                refused.add(pod)
            else:
                return

    def _keep_for_head(self, now: float) -> None:
        """Reserve GPUs for the oldest waiting job if it has waited for `KEPT_AFTER_S` and there was no room for it."""
        if self._cluster.head_reservation is not None or not self._waiting:
            return
        oldest = min((queue[0] for queue in self._waiting.values()), key=lambda job: job.number)
        passed_over, self._oldest = oldest is self._oldest, oldest
        if passed_over and now - oldest.arrives_s >= KEPT_AFTER_S:
            self._cluster.reserve_for_head(find_head_reservation(self._cluster, self._request(oldest)))

    def _start(self, job: Job, now: float) -> bool:
        """Place the job and start it. Return False if there is no room."""
        request = self._request(job)
        answer = self._engine.find(request)
        if answer is None:
            return False
        self._engine.reserve(request, answer)
        head = self._cluster.head_reservation
        if head is not None and head.tenant == request.tenant:
            self._cluster.reserve_for_head(None)
        running = RunningJob(
            job, request.tenant, answer.node, answer.gpus, self._tenancy(job), now, job.service_s, at_s=now
        )
        self._running[request.tenant] = running
        for gpu in answer.gpus:
            self._on_gpu[gpu].append(running)
        if job.arrives_s >= self._begin_s:
            self._outcome.waits_s.append(now - job.arrives_s)
        self._pace(answer.gpus, now)
        return True

    def _request(self, job: Job) -> PlacementRequest:
        pod = job.pod
        gpu = GpuRequest(
            request_milli=Milli(self._milli(pod)),
            limit_milli=WHOLE_GPU,
            memory=Bytes(pod.gpu_memory) if pod.gpu_memory is not None else None,
            count=pod.gpus,
            models=pod.models,
        )
        name = f"job-{job.number}"
        needs = PodNeeds(resources=Resources(pod.cpu, pod.memory << 20))
        return PlacementRequest(tenant=TenantId(name), namespace="trace", name=name, gpu=gpu, pod=needs)

    def _milli(self, pod: TracePod) -> int:
        return WHOLE_GPU if self._sharing is Sharing.EXCLUSIVE else pod.milli

    # ---- progress

    def _tenancy(self, job: Job) -> Tenancy:
        request = self._milli(job.pod)
        return (request, request if self._sharing is Sharing.STATIC else WHOLE_GPU, job.duty, job.step_ms)

    def _finish(self, running: RunningJob, now: float) -> None:
        self._account(running, now)
        del self._running[running.tenant]
        for gpu in running.gpus:
            self._on_gpu[gpu].remove(running)
        self._cluster.release(running.node, running.tenant)
        self._engine.packing.settle()
        outcome = self._outcome
        outcome.finished += 1
        if now >= self._begin_s:
            outcome.counted += 1
            outcome.counted_whole += running.job.pod.milli >= WHOLE_GPU
            took = (now - running.began_s) / running.job.service_s
            outcome.slowdowns.append(took)
            of_guarantee = 1.0 / (took * self._guarantee(running.tenancy))
            outcome.worst = min(outcome.worst, of_guarantee)
            outcome.below += of_guarantee < TOLERANCE
        self._pace(running.gpus, now)
        self._serve_queue(running.node, now)
        self._keep_for_head(now)

    def _pace(self, gpus: Sequence[GpuUuid], now: float) -> None:
        """Update the rates of the jobs on these GPUs, and the times at which the jobs will end."""
        for gpu in gpus[:1]:  # a job with several GPUs shares none of them, so the first represents all
            there = sorted(self._on_gpu[gpu], key=lambda running: running.tenancy)
            alone = len(there) == 1 and there[0].tenancy[1] == WHOLE_GPU
            rates = (1.0,) if alone else self._rates(tuple(running.tenancy for running in there)) if there else ()
            for running, rate in zip(there, rates, strict=True):
                self._account(running, now)
                running.rate = rate
                running.version += 1
                ends = now + running.left_s / rate
                heapq.heappush(self._ends, (ends, running.job.number, running.version, running))

    def _account(self, running: RunningJob, now: float) -> None:
        """Subtract the progress of the job since the last call from `left_s`, and add it to the figures."""
        running.left_s = max(0.0, running.left_s - (now - running.at_s) * running.rate)
        progress = max(0.0, now - max(running.at_s, self._begin_s)) * running.rate * len(running.gpus)
        self._outcome.served_s += progress
        self._outcome.used_gpu_s += progress * running.job.duty / 1000
        running.at_s = now
