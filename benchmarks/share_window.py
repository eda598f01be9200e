"""Measurement of the tenants of a node over a window: the GPU time of each, its difference from the request, and the
waits.

GPU time is read from the simulated device, not from the program. A wait lasts from requesting the token to getting it,
by the agent's count.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from doubles.gpus import State
from hook.world.agent_node import GPUS, Node, wait_for
from results import Row
from sharepod.agent.shares.histogram import WAIT_BOUNDS_S

SETTLE_S = 1.5
LONG_WINDOWS = 6
"""Longest measurement in cases with long kernels, as a multiple of the window."""
STEP_S = 1.0
TOLD_S = 1.1
"""Seconds after which the agent's figures include all earlier events, because the figures are up to a second old."""
_GPU_TIME = "sharepod_gpu_time_seconds_total"
SPANS_S = (10, 60)
"""Lengths in seconds of the spans for which the worst error is reported, in addition to the error of the whole
window."""


@dataclass(frozen=True)
class Asked:
    """One tenant of a case, with its requested share of each of its GPUs."""

    name: str
    share: float
    gpus: tuple[str, ...] = GPUS[:1]

    def busy_s(self, state: State) -> float:
        """Return the device time of the tenant so far, in seconds of one of its GPUs. 0 while it has no process."""
        if all(client.label != self.name for client in state.clients):
            return 0.0
        return state.busy_ns(self.name) / 1e9 / len(self.gpus)


@dataclass(frozen=True)
class Measured:
    """Figures of one tenant in one case."""

    asked: Asked
    got: float
    wait_p50_s: float
    wait_p99_s: float
    span_errors: dict[int, float]
    """For each length of a span, in seconds: largest error of the tenant's share in any span of that length, in
    points."""

    @property
    def error(self) -> float:
        """Return the error of the share over the whole window, in points."""
        return abs(self.got - self.asked.share) * 100


@dataclass(frozen=True)
class Window:
    """Figures of all tenants of a case."""

    tenants: list[Measured]
    length_s: float
    agent_cpu: float
    """Processor time of the agent, as a number of cores."""

    def rows(self, case: str, single: float) -> list[Row]:
        """Return the rows of the case. `single`: part of the GPU's time that one program gets without neighbours."""
        rows: list[Row] = []
        for one in self.tenants:
            name = f"{case}: {one.asked.name}"
            rows += [
                Row(name, "asked", "fraction", one.asked.share),
                Row(name, "share", "fraction", round(one.got, 4)),
                Row(name, "share_error", "points", round(one.error, 2)),
                *(Row(name, f"share_error_{s}s", "points", round(error, 2)) for s, error in one.span_errors.items()),
                Row(name, "wait_p50", "ms", round(one.wait_p50_s * 1e3, 2)),
                Row(name, "wait_p99", "ms", round(one.wait_p99_s * 1e3, 2)),
            ]
        gpus = {gpu for one in self.tenants for gpu in one.asked.gpus}
        work = sum(one.got * len(one.asked.gpus) for one in self.tenants) / len(gpus) / single
        rows += [
            Row(case, "share_error", "points", round(max(one.error for one in self.tenants), 2)),
            *(
                Row(case, f"share_error_{s}s", "points", round(max(one.span_errors[s] for one in self.tenants), 2))
                for s in self.tenants[0].span_errors
            ),
            Row(case, "work_ratio", "ratio", round(work, 4)),
            Row(case, "work_lost", "fraction", round(1 - work, 4)),
            Row(case, "wait_p99", "ms", round(max(one.wait_p99_s for one in self.tenants) * 1e3, 2)),
            Row(case, "window", "s", round(self.length_s, 1)),
            Row(case, "agent_cpu", "fraction of a core", round(self.agent_cpu, 4)),
        ]
        return rows


def watch(node: Node, tenants: Sequence[Asked], seconds: float, watched_s: float, *, long: bool = False) -> Window:
    """Measure tenants whose programs already run.

    Args:
        seconds: Length of the window.
        watched_s: Seconds of measurement in all, at least, for waits and for the worst spans.
        long: True if one kernel takes more than a point of the window. The window is then extended until every share
        stays within a point of its request, to at most `LONG_WINDOWS` times its length.
    """
    wait_for(lambda: all(_busy(node, tenants)[1]), "device time of every tenant", 60)
    time.sleep(SETTLE_S)
    waits = [waits_of(node, one.name) for one in tenants]
    cpu, (begin, before) = cpu_of(node), _busy(node, tenants)
    samples = [(begin, before)]
    good_since: float | None = None
    window: float | None = None
    got: list[float] = []
    while window is None or samples[-1][0] - begin < watched_s:
        time.sleep(STEP_S)
        now, after = _busy(node, tenants)
        samples.append((now, after))
        length = now - begin
        if window is not None or (not long and length < seconds):
            continue
        got = [(b - a) / length for a, b in zip(before, after, strict=True)]
        good = all(abs(part - one.share) <= 0.01 for part, one in zip(got, tenants, strict=True))
        good_since = (good_since or length) if good else None
        if not long or length >= LONG_WINDOWS * seconds:
            window = length
        elif length >= seconds and good_since is not None and length - good_since >= seconds / 4:
            window = good_since
    cpu = (cpu_of(node) - cpu) / (samples[-1][0] - begin)
    time.sleep(TOLD_S)
    measured: list[Measured] = []
    for place, (one, part, first) in enumerate(zip(tenants, got, waits, strict=True)):
        counts = waits_since(node, one.name, first)
        spans = {
            length: span_error(samples, place, one.share, length)
            for length in SPANS_S
            if length <= samples[-1][0] - begin + STEP_S / 2
        }
        p50, p99 = (quantile(WAIT_BOUNDS_S, counts, part) for part in (0.5, 0.99))
        measured.append(Measured(one, part, p50, p99, spans))
    return Window(measured, window, cpu)


def cpu_of(node: Node) -> float:
    """Return the processor time of the agent's processes so far, in seconds."""
    stats = [Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split() for pid in node.agent_pids]
    return sum(int(fields[11]) + int(fields[12]) for fields in stats) / 100


def anticipated_s(node: Node) -> float:
    """Return the seconds for which the GPU was kept idle for tenants with short pauses."""
    samples = node.metrics()
    return sum(s.value for s in samples if s.name == _GPU_TIME and s.labels["use"] == "anticipated")


def waits_of(node: Node, name: str) -> list[float]:
    """Return the histogram of the tenant's waits so far: the number of waits in each bucket."""
    cumulative = [
        sample.value
        for sample in node.metrics()
        if sample.name == "sharepod_tenant_wait_seconds_bucket" and sample.labels["tenant"] == name
    ]
    return [amount - below for amount, below in zip(cumulative, [0.0, *cumulative], strict=False)]


def waits_since(node: Node, name: str, before: Sequence[float]) -> list[float]:
    """Return the tenant's waits since `before`, which is an earlier result of `waits_of`."""
    return [late - early for early, late in zip(before, waits_of(node, name), strict=True)]


def wait_rows(case: str, counts: Sequence[float]) -> list[Row]:
    """Return the rows of one tenant's waits. `counts`: number of waits in each bucket of the histogram."""
    return [
        Row(case, f"wait_p{part * 100:g}", "ms", round(quantile(WAIT_BOUNDS_S, counts, part) * 1e3, 2))
        for part in (0.5, 0.99)
    ]


def quantile(bounds_s: Sequence[float], counts: Sequence[float], part: float) -> float:
    """Return the quantile `part` (0 to 1) of counted durations, in seconds. 0 if none was counted.

    Within a bucket the result is interpolated linearly. Durations beyond the last bound count as that bound. `counts`
    as in the agent's `Histogram`.
    """
    wanted, below = part * sum(counts), 0.0
    for index, amount in enumerate(counts):
        if amount and below + amount >= wanted:
            if index == len(bounds_s):
                return bounds_s[-1]
            lower = bounds_s[index - 1] if index else 0.0
            return lower + (bounds_s[index] - lower) * (wanted - below) / amount
        below += amount
    return 0.0


def span_error(samples: Sequence[tuple[float, list[float]]], place: int, asked: float, length_s: float) -> float:
    """Return the largest error of one tenant's share, in points, over all spans of length `length_s` between two
    samples. A sample is (time, device time of each tenant up to then), in seconds. `place`: index of the tenant."""
    worst = 0.0
    for begin, before in samples:
        later = [sample for sample in samples if sample[0] - begin >= length_s - STEP_S / 2]
        if later:
            end, after = later[0]
            worst = max(worst, abs((after[place] - before[place]) / (end - begin) - asked) * 100)
    return worst


def _busy(node: Node, tenants: Sequence[Asked]) -> tuple[float, list[float]]:
    """Return (present time, device time of each tenant up to now), in seconds."""
    state, now = node.devices(), time.monotonic()
    return now, [one.busy_s(state) for one in tenants]
