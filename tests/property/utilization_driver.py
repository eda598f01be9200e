"""Simulated driver that samples the utilization of tenants, and the agent's evaluation of its readings."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from property.timeshare_simulation import Program, S, Simulation
from sharepod.agent.devices.inventory import UtilizationSample
from sharepod.agent.findings.beyond_turns import CLOCK_ERROR_S, BeyondTurnsMeter, TurnsOfTenant
from sharepod.agent.findings.rules import FindingRules, FindingThresholds
from sharepod.agent.findings.surcharge import SurchargeMeter, irregular

Busy = Callable[[float, float], float]
"""Function of begin and end of an interval in seconds. Returns the seconds of the interval in which kernels of a tenant
ran.
"""
GPU = "g0"


@dataclass
class Driver:
    """Driver whose samples are `sample_s` long. The first sample ends at `phase`, each next one `sample_s` later."""

    sample_s: float
    phase: float
    tells_all: bool
    """True if a reading contains all samples since the last reading. False if it contains only the last one."""
    missing: float
    """Part of the samples that the driver does not report."""
    delay_s: float
    """Longest time in seconds from a reading until the agent evaluates it."""
    offset_s: float
    """Seconds by which the driver's time stamps are later than the ends of the samples."""
    draw: random.Random

    def samples(self, busy: Busy, since: float, now: float) -> list[UtilizationSample]:
        """Return the reading at `now`; the previous reading was at `since`."""
        last = math.floor((now - self.phase) / self.sample_s)
        first = math.floor((since - self.phase) / self.sample_s) + 1
        reported = []
        for tick in range(first if self.tells_all else max(first, last), last + 1):
            end = self.phase + tick * self.sample_s
            if end < self.sample_s or self.draw.random() < self.missing:
                continue
            part = math.ceil(100 * busy(end - self.sample_s, end) / self.sample_s - 1e-6) / 100
            jitter = (CLOCK_ERROR_S - abs(self.offset_s)) * self.draw.uniform(-1, 1)
            reported.append(UtilizationSample(end + self.offset_s + jitter, part))
        return reported


@dataclass
class Watched:
    """Findings rules and meters of one tenant, as the agent has them."""

    busy: Busy
    rules: FindingRules
    meter: BeyondTurnsMeter = field(default_factory=BeyondTurnsMeter)
    surcharge: SurchargeMeter = field(default_factory=SurchargeMeter)
    since: float = 0.0
    busy_s: float = 0.0
    found_at: float | None = None
    """Time in seconds at which the finding began. None: it never began."""
    surcharged_s: float = 0.0
    repeated: list[UtilizationSample] = field(default_factory=list)


def ran(program: Program, simulation: Simulation, begin: float, end: float) -> float:
    """Return the seconds in which kernels of a program ran between `begin` and `end`: the time for which it holds."""
    now, ran_ns = simulation.now, 0
    holds = program.spans
    if program.grant is not None and program.granted_at < now:
        ran_ns += max(0, min(round(end * S), now, program.ends_at or now) - max(round(begin * S), program.granted_at))
    for since, until in reversed(holds):
        if until <= begin * S:
            break
        ran_ns += max(0, min(round(end * S), until) - max(round(begin * S), since))
    return ran_ns / S


def watch(
    simulation: Simulation, driver: Driver, busy: Mapping[str, Busy], until: int, tolerance: float = 0.25
) -> dict[str, Watched]:
    """Simulate until `until`, with a reading about once a second. Return the findings about each tenant."""
    watched = {
        name: Watched(each, FindingRules(FindingThresholds(busy_tolerance=tolerance))) for name, each in busy.items()
    }

    def take(name: str, samples: list[UtilizationSample]) -> None:
        tenant, now = watched[name], simulation.now / 1e9
        usage = simulation.scheduler.usage(simulation.now, name)
        turns = TurnsOfTenant(lambda: simulation.scheduler.turns(simulation.now, name))
        mean = sum(each.part for each in samples) / len(samples) if samples else 0.0
        tenant.busy_s += mean * 1.0
        sums = tenant.meter.observe(now, samples, mean, turns)
        tenant.rules.observe_time(
            now, {GPU: tenant.busy_s}, usage.held_ns / 1e9, {GPU: sums.held}, usage.overdue_ns / 1e9
        )
        tenant.surcharged_s += tenant.surcharge.observe(now, sums.charged)
        if tenant.rules.findings and tenant.found_at is None:
            tenant.found_at = now

    def read() -> None:
        now = simulation.now / 1e9
        delay = driver.draw.uniform(0, driver.delay_s)
        for name, tenant in watched.items():
            reported = driver.samples(tenant.busy, tenant.since, now)
            samples = reported + [each for each in tenant.repeated if driver.draw.random() < 0.2]
            tenant.since, tenant.repeated = now, reported
            simulation.at(simulation.now + round(delay * S), lambda name=name, samples=samples: take(name, samples))  # type: ignore[misc]
        simulation.at(simulation.now + round((irregular(1.0, driver.draw.random()) + delay) * S), read)

    simulation.at(round(driver.draw.uniform(0, 1) * S), read)
    simulation.run(until)
    return watched
