"""Findings and surcharges of busy time: tenants that keep to their turns get none, and all others get them in time."""

from __future__ import annotations

import random
from functools import partial

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from property.timeshare_simulation import MS, US, Program, S, Simulation
from property.utilization_driver import Driver, ran, watch
from sharepod.agent.findings.beyond_turns import CLOCK_ERROR_S

SOME = settings(max_examples=6, deadline=None, suppress_health_check=[HealthCheck.too_slow])
PROMISED_S = 12.0
BEGINS_S = 5.0
"""Time in seconds at which the tenant begins to work outside its turns."""
DRIVERS = st.builds(
    Driver,
    sample_s=st.sampled_from([1 / 6, 0.2, 0.5, 1.0]) | st.floats(1 / 6, 1.0),
    phase=st.floats(0, 1),
    tells_all=st.booleans(),
    missing=st.sampled_from([0.0, 0.3]),
    delay_s=st.sampled_from([0.0, 0.02, 1.0]),
    offset_s=st.sampled_from([0.0, CLOCK_ERROR_S / 2, CLOCK_ERROR_S, -CLOCK_ERROR_S]),
    draw=st.integers(0, 99).map(random.Random),
)
KERNELS = st.sampled_from([20, 40, 250, 300, 500, 900]).map(lambda ms: ms * MS)


def plain(sample_s: float, seed: int = 1) -> Driver:
    return Driver(sample_s, 0.0, False, 0.0, 0.02, 0.0, random.Random(seed))


@pytest.mark.promise("node-busy-honest")
@SOME
@given(
    driver=DRIVERS,
    requests=st.sampled_from([(500, 500), (300, 700), (100, 900), (200, 300, 500)]),
    kernels=st.lists(KERNELS, min_size=3, max_size=3),
    pause_ms=st.sampled_from([0, 3, 200]),
    announces=st.booleans(),
    stall_s=st.sampled_from([0.0, 0.3, 8.0]),
)
@example(plain(1 / 6), (500, 500), [250 * MS] * 3, 0, False, 0.0)
@example(plain(1 / 6), (500, 500), [500 * MS] * 3, 0, False, 0.0)
@example(plain(0.5), (500, 500), [300 * MS] * 3, 0, False, 0.0)
@example(plain(1 / 6), (500, 500), [300 * MS, 20 * MS, 20 * MS], 0, True, 8.0)
def test_a_tenant_whose_kernels_run_in_its_turns_is_neither_reported_nor_surcharged(
    driver: Driver, requests: tuple[int, ...], kernels: list[int], pause_ms: int, announces: bool, stall_s: float
) -> None:
    programs = [
        Program(
            f"t{number}",
            request=request,
            kernel_ns=kernel,
            burst_ns=2 * kernel if pause_ms and not number else 0,
            pause_ns=pause_ms * MS,
        )
        for number, (request, kernel) in enumerate(zip(requests, kernels, strict=False))
    ]
    simulation = Simulation(programs, announces=announces)
    if stall_s:
        simulation.stalls.append((15 * S, 15 * S + round(stall_s * S)))
    busy = {program.id: partial(ran, program, simulation) for program in programs}
    for tenant in watch(simulation, driver, busy, 30 * S).values():
        assert tenant.found_at is None
        assert tenant.surcharged_s == 0


@pytest.mark.promise("security-over-time")
@SOME
@given(
    driver=DRIVERS,
    kind=st.sampled_from(["without a turn", "reports DRAINED at once", "overruns"]),
    offence=st.sampled_from([(0.2, 0.05), (0.5, 0.25), (0.9, 0.25)]),
)
def test_a_tenant_that_is_busy_beyond_its_turns_is_reported_in_time(
    driver: Driver, kind: str, offence: tuple[float, float]
) -> None:
    beyond, tolerance = offence
    neighbour = Program("neighbour", request=500, kernel_ns=20 * MS)
    offender = Program("offender", request=300, kernel_ns=20 * MS)
    if kind == "without a turn":
        offender.start_ns = 1000 * S
    elif kind == "reports DRAINED at once":
        offender.kernel_ns = offender.burst_ns = 100 * US
        offender.pause_ns = 30 * MS
    simulation = Simulation([neighbour, offender])
    # The tenant works for `part` of each period of 0.1 s. With `overruns` some of that work is inside turns, so `part`
    # is larger.
    part, period = min(1.0, beyond / (1 - 0.375) if kind == "overruns" else beyond), 0.1

    def outside_turns(moment: float) -> float:
        rounds, rest = divmod(max(0.0, moment - BEGINS_S), period)
        return rounds * part * period + min(rest, part * period)

    def busy(begin: float, end: float) -> float:
        outside = outside_turns(end) - outside_turns(begin)
        if kind != "overruns":
            return outside
        held = ran(offender, simulation, begin, end)
        return held + outside * (end - begin - held) / (end - begin)

    watched = watch(simulation, driver, {"offender": busy}, 20 * S, tolerance)["offender"]
    assert watched.found_at is not None
    assert BEGINS_S < watched.found_at <= BEGINS_S + PROMISED_S + driver.delay_s
