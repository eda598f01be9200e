"""Each end of co-running is counted under its reason, a label of the agent's metric."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from property.test_timeshare_co_running import DENSE, EAGER, SERVICE, busy
from property.time_sliced_gpu import GPU, MS, Program, S, TimeSlicedGpu
from sharepod.timeshare import CoRunEnd, Scheduler


def scheduler_of(gpu: TimeSlicedGpu) -> Scheduler:
    assert gpu.scheduler is not None
    return gpu.scheduler


def ends(*programs: Program) -> Mapping[CoRunEnd, int]:
    gpu = TimeSlicedGpu(list(programs))
    gpu.run(3 * S)
    return scheduler_of(gpu).co_runs(GPU).ends


def after(program: Program) -> Program:
    program.starts_ns = MS
    return program


def test_a_trial_ends_where_a_tenant_is_owed_more_than_the_lead() -> None:
    counted = ends(Program("a", request=500, **busy(20 * MS)), after(Program("b", request=500, **busy(20 * MS))))
    assert counted[CoRunEnd.OWED] >= 1


def test_co_running_without_gain_ends_and_a_lead_is_measured_alone() -> None:
    counted = ends(Program("a", request=700, **DENSE), after(Program("b", request=300, **busy(1 * MS))))
    assert min(counted[CoRunEnd.NO_GAIN], counted[CoRunEnd.PROBE]) >= 1


def test_a_service_that_joins_leads_or_drains() -> None:
    service = Program("a", request=300, **SERVICE)
    counted = ends(Program("b", request=700, **busy(20 * MS)), after(service))
    assert counted[CoRunEnd.DRAINED] >= 10


def test_a_tenant_at_its_limit_ceases() -> None:
    limited = Program("a", request=200, limit=500, **EAGER)
    assert ends(Program("b", request=500, **EAGER), after(limited))[CoRunEnd.LIMIT] >= 1


@pytest.mark.parametrize("refuses", ["lead", "co-runner"])
def test_a_tenant_that_refuses_ends_co_running(refuses: str) -> None:
    gpu = TimeSlicedGpu([Program("a", request=500, **EAGER), after(Program("b", request=500, **EAGER))])
    scheduler = scheduler_of(gpu)

    def refuse() -> None:
        runners = scheduler._occupancy.co_runners[GPU]
        for name in "ab":
            if (name in runners) == (refuses == "co-runner"):
                scheduler.set_concurrent(gpu.now, name, concurrent=False)

    gpu.run(2 * S)
    while scheduler.co_runs(GPU).co_runners == 0:
        gpu.run(gpu.now + MS)
    refuse()
    gpu._tick()
    gpu.run(gpu.now + S)
    assert scheduler.co_runs(GPU).ends[CoRunEnd.EXCLUSIVE] >= 1


def test_all_that_have_begun_have_ended_or_run() -> None:
    gpu = TimeSlicedGpu([Program("a", request=500, **EAGER), after(Program("b", request=500, **EAGER))])
    scheduler, begun, before = scheduler_of(gpu), 0, set[str]()

    def check() -> None:
        nonlocal begun, before
        runners = set(scheduler._occupancy.co_runners.get(GPU, {}))
        begun += len(runners - before)
        before = runners

    gpu.check = check
    gpu.run(3 * S)
    co_runs = scheduler.co_runs(GPU)
    assert sum(co_runs.ends.values()) + co_runs.co_runners >= begun > 0
    assert co_runs.ends[CoRunEnd.LEADS] >= 1
