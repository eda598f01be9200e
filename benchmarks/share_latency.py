"""An interactive service with a busy neighbour: the waits of its requests, and the cost in work.

The service requests 0.3 of the GPU and launches one kernel per request. Requests arrive as a Poisson process, and do
not depend on earlier ones. Their kernels take a tenth of the time in all. The neighbour requests 0.7 and launches
kernels without end. Each case runs with `latency: Normal` and with `latency: Interactive`. The service itself measures
the wait of a request: from its arrival until its kernel has ended, minus the kernel's length. `work_lost`: the part of
the GPU's time that both tenants together get less than with Normal.
"""

from __future__ import annotations

import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from hook.world.agent_node import Program, running, tenant, wait_for
from results import Row

LOAD = 10
"""Part of the GPU's time that the service's requests take, as 1 / LOAD."""
SETTLE_S = 3.0


@dataclass(frozen=True)
class Service:
    """One case: milliseconds of a request's kernel and of the neighbour's kernels."""

    request_ms: int
    kernel_ms: int

    @property
    def name(self) -> str:
        """Return the name of the case."""
        return f"service, requests {self.request_ms} ms, {self.kernel_ms} ms"

    @property
    def p50_goal_ms(self) -> float:
        """Return the longest allowed median wait, in ms."""
        return 1.5 + self.kernel_ms / 2

    @property
    def p99_goal_ms(self) -> float:
        """Return the longest allowed 99th percentile of the waits, in ms."""
        return 5.0 + self.kernel_ms


SERVICES = tuple(Service(request, kernel) for request in (2, 5) for kernel in (1, 5, 20))


@dataclass(frozen=True)
class _Run:
    waits_ms: list[float]
    shares: dict[str, float]


def measure(service: Service, seconds: float) -> list[Row]:
    """Measure one case under both latencies."""
    runs = {latency: _run(service, latency, seconds) for latency in ("Normal", "Interactive")}
    rows = []
    for latency, run in runs.items():
        case, waits = f"{service.name}: {latency}", sorted(run.waits_ms)
        for part in (50, 99):
            rows.append(Row(case, f"wait_p{part}", "ms", round(waits[len(waits) * part // 100], 2)))
        rows += [Row(case, f"share_of_{name}", "fraction", round(share, 4)) for name, share in run.shares.items()]
    together = {latency: sum(run.shares.values()) for latency, run in runs.items()}
    lost = (together["Normal"] - together["Interactive"]) / together["Normal"]
    return [
        *rows,
        Row(service.name, "goal_p50", "ms", service.p50_goal_ms),
        Row(service.name, "goal_p99", "ms", service.p99_goal_ms),
        Row(service.name, "work_ratio", "ratio", round(together["Interactive"], 4)),
        Row(service.name, "work_lost", "fraction", round(lost, 4)),
    ]


def _run(service: Service, latency: str, seconds: float) -> _Run:
    rows = [tenant("service", 0.3, latency=latency), tenant("busy", 0.7)]
    with tempfile.TemporaryDirectory(prefix="sh") as directory, running(Path(directory), *rows) as node:
        kernel, every = f"{service.request_ms}000", f"{service.request_ms * LOAD}000"
        asking = node.launch("service", "--kernel-us", kernel, "--sync-every", "1", "--arrive-us", every)
        node.launch("busy", "--kernel-us", f"{service.kernel_ms}000")
        wait_for(lambda: all(node.devices().busy_ns(name) for name in ("service", "busy")), "device time of both", 60)
        _waits_ms(asking, SETTLE_S)
        before, begin = node.devices(), time.monotonic()
        waits = _waits_ms(asking, seconds)
        after, length = node.devices(), time.monotonic() - begin
        shares = {name: (after.busy_ns(name) - before.busy_ns(name)) / 1e9 / length for name in ("service", "busy")}
        return _Run(waits, shares)


def _waits_ms(program: Program, seconds: float) -> list[float]:
    """Return the waits that the program reports within `seconds` from now, in ms. It reports each second."""
    found: list[float] = []
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        found += program.report().get("delays_ms", [])
    return found
