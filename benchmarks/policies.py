"""SharePod's token scheduler compared with schedulers from the literature, on the same mixes of tenants in simulated
time.

All kernels of a mix have the same length. Busy tenants launch without end. A *pausing* tenant works, then pauses, and
should get request x work / (work + pause). A hand-off takes 0.2 ms. A program returns the token 0.5 ms after the end of
its work. Prints a table, writes `build/results/policies.json`, and draws `policies.svg`: the part of its expected share
that the pausing tenant gets, by the length of its neighbour's kernels.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

from policy_schedulers import POLICIES
from property.timeshare_simulation import MS, US, Program, S, Simulation, pauses
from results import RESULTS, Row, write
from sharepod.timeshare import Scheduler

CORE = "SharePod"
WARM_UP_S = 20
HAND_OFF_NS = 200 * US
LOOK_NS = 500 * US
KERNELS_MS = (1, 5, 40, 250, 900)
KINDS = ("regular", "exponential", "bimodal")
_COLOURS = ("#1f77b4", "#d62728", "#2ca02c", "#9467bd", "#ff7f0e")


@dataclass(frozen=True)
class Mix:
    """Tenants of one GPU. `requests`: in thousandths. With `pause_ms`, the first tenant pauses. All other tenants are
    always busy."""

    requests: tuple[int, ...]
    kernel_ms: int
    work_ms: int = 0
    pause_ms: int = 0
    kind: str = "regular"

    @property
    def name(self) -> str:
        """Return the name of the case."""
        few = len(self.requests) <= 3
        shares = ":".join(f"{r / 10:g}" for r in self.requests) if few else f"{len(self.requests)} x {self.requests[0]}"
        pauses = f", {self.work_ms}/{self.pause_ms} ms {self.kind}" if self.pause_ms else ""
        return f"{shares}{pauses}, kernels {self.kernel_ms} ms"


PAUSING = ((700, 300, 20, 5), (900, 0, 5, 2), (500, 500, 20, 10))
"""(request of the pausing tenant, request of its neighbour, work, pause) of each such case. Requests in thousandths,
durations in milliseconds."""
BUSY = ((20, 980), (100, 900), (300, 700), (200, 300, 500), (20,) * 50)

MIXES = [
    *(
        Mix((request, other), kernel, work, pause, kind)
        for request, other, work, pause in PAUSING
        for kind in KINDS
        for kernel in KERNELS_MS
    ),
    *(Mix(requests, kernel) for requests in BUSY for kernel in (1, 5, 50)),
]


def play(mix: Mix, policy: str, seconds: int) -> dict[str, tuple[str, float]]:
    """Simulate one mix under one policy. Return its metrics: name -> (unit, value)."""
    programs = [
        Program(f"t{index}", request=request, kernel_ns=mix.kernel_ms * MS)
        for index, request in enumerate(mix.requests)
    ]
    if mix.pause_ms:
        drawn = pauses(mix.kind, mix.pause_ms * MS)
        programs[0] = Program(
            "t0",
            request=mix.requests[0],
            kernel_ns=1 * MS,
            burst_ns=mix.work_ms * MS,
            look_ns=LOOK_NS,
            pauses=drawn,
        )
    first = programs[0]
    scheduler = Scheduler() if policy == CORE else POLICIES[policy]()
    simulation = Simulation(programs, gap_ns=HAND_OFF_NS, announces=policy == CORE, scheduler=scheduler)
    begin, end = WARM_UP_S * S, (WARM_UP_S + seconds) * S
    worked: list[int] = []
    seen: list[int] = []

    def mark() -> None:
        worked.append(first.worked_ns)
        seen.extend((len(first.waits), anticipated(scheduler, simulation.now)))

    simulation.at(begin, mark)
    simulation.run(end)
    shares = [program.share(begin, end) for program in programs]  # a busy tenant works whenever it holds the token
    if mix.pause_ms:
        shares[0] = (first.worked_ns - worked[0]) / (end - begin)
    waits = sorted(first.waits[seen[0] :]) or [0]
    metrics = {
        "wait_p50": ("ms", waits[len(waits) // 2] / MS),
        "wait_p99": ("ms", waits[len(waits) * 99 // 100] / MS),
        "neighbours_short": ("points", max(max(0.0, r / 10 - 100 * s) for r, s in _neighbours(mix, shares))),
    }
    idle = (anticipated(scheduler, end) - seen[1]) / (end - begin)
    if mix.pause_ms:
        expected = mix.requests[0] / 1000 * mix.work_ms / (mix.work_ms + mix.pause_ms)
        metrics |= {
            "pausing_share": ("fraction", shares[0]),
            "pausing_expected": ("fraction", expected),
            "pausing_idle": ("fraction", idle),
        }
    else:
        error = max(abs(r / 10 - 100 * s) for r, s in zip(mix.requests, shares, strict=True))
        metrics |= {"share_error": ("points", error), "work_ratio": ("ratio", sum(shares))}
    return {name: (unit, round(value, 4)) for name, (unit, value) in metrics.items()}


def _neighbours(mix: Mix, shares: Sequence[float]) -> list[tuple[int, float]]:
    pairs = list(zip(mix.requests, shares, strict=True))
    return pairs[1:] if mix.pause_ms else pairs


def anticipated(scheduler: object, now: int) -> int:
    """Return the nanoseconds for which the GPU was kept idle for the first tenant."""
    return scheduler.usage(now, "t0").anticipated_ns if isinstance(scheduler, Scheduler) else 0


def svg(curves: Mapping[str, Sequence[float]], title: str) -> str:
    """Plot, for each policy, what the pausing tenant got over what it should get, against the length of the neighbour's
    kernels."""
    left, top, width, height = 60, 40, 560, 300

    def x(place: int) -> float:
        return left + width * place / (len(KERNELS_MS) - 1)

    def y(ratio: float) -> float:
        return top + height * (1 - min(ratio, 1.6) / 1.6)

    parts = [
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 720 400" font-family="sans-serif">',
        "<style>text { font-size: 12px }</style>",
        '<rect width="720" height="400" fill="white"/>',
        f'<text x="340" y="20" text-anchor="middle">{escape(title)}</text>',
        '<text x="340" y="392" text-anchor="middle">kernels of the neighbour, ms</text>',
        f'<path d="M{left} {y(1):.1f}h{width}" stroke="#888" stroke-dasharray="4"/>',
    ]
    for ratio in (0, 0.5, 1, 1.5):
        parts.append(f'<text x="{left - 8}" y="{y(ratio) + 4:.1f}" text-anchor="end">{ratio:g}</text>')
    for place, kernel in enumerate(KERNELS_MS):
        parts.append(f'<text x="{x(place):.1f}" y="{top + height + 18}" text-anchor="middle">{kernel}</text>')
    for number, (name, ratios) in enumerate(curves.items()):
        colour = _COLOURS[number % len(_COLOURS)]
        line = "L".join(f"{x(place):.1f} {y(ratio):.1f}" for place, ratio in enumerate(ratios))
        parts.append(f'<path d="M{line}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts.append(f'<text x="{left + width + 10}" y="{top + 20 * number}" fill="{colour}">{escape(name)}</text>')
    return "\n".join([*parts, "</svg>", ""])


def main() -> int:
    """Run the benchmark. Return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=int, default=60, help="simulated time of each case (default 60)")
    parser.add_argument("--case", default="", help="only cases whose name contains this")
    arguments = parser.parse_args()
    rows: list[Row] = []
    ratios: dict[tuple[str, Mix], float] = {}
    for mix in MIXES:
        if arguments.case not in mix.name:
            continue
        for policy in (CORE, *POLICIES):
            metrics = play(mix, policy, arguments.seconds)
            rows += [Row(f"{mix.name}: {policy}", name, unit, value) for name, (unit, value) in metrics.items()]
            if mix.pause_ms:
                ratios[policy, mix] = metrics["pausing_share"][1] / metrics["pausing_expected"][1]
    write("policies", rows)
    request, other, work, pause = PAUSING[0]
    drawn = [Mix((request, other), kernel, work, pause, "exponential") for kernel in KERNELS_MS]
    if all((CORE, mix) in ratios for mix in drawn):
        curves = {policy: [ratios[policy, mix] for mix in drawn] for policy in (CORE, *POLICIES)}
        title = f"Got over expected: {request / 1000:g}, works {work} ms, thinks {pause} ms, next to {other / 1000:g}"
        (RESULTS / "policies.svg").write_text(svg(curves, title))
    return 0


if __name__ == "__main__":
    sys.exit(main())
