"""Tenants whose programs leave gaps on a shared GPU: bare, in exclusive turns, and concurrently.

Each case runs the same programs three times on the simulated GPU: `bare` without agent and hook, and `Exclusive` and
`Concurrent` under the agent with that setting of `sharing`. The driver's time slices are `SLICE_US` long, and a switch
between processes takes `SWITCH_US`. Progress is the steps per second of a program, relative to its steps without
neighbours in the bare run.

- `progress`: progress of one program, in percent of its speed without neighbours
- `sum`: sum of the progress of all programs of the case, in percent
- `sum_of_bare`: `sum`, relative to the `sum` of the bare run
- `below_request`: points by which the progress of the worst tenant is below its request; 0 if all reach theirs
- `wait_p50`, `wait_p99`: latency of requests, from their arrival to their end, in ms

The machine has two processors, which limits programs that spin on the host. So the programs sleep for half of their
host time. Judge by `sum_of_bare`, not by `sum`.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from hook.world.agent_node import GPUS, PROGRAMS, Node, Program, running, tenant
from results import Row

SLICE_US, SWITCH_US = 1024, 91
"""Microseconds: length of the driver's default time slices, and of a switch between two slices."""
SLEPT = "0.5"
SETTLE_S = 3.0
MODES = ("bare", "Exclusive", "Concurrent")
_REPORT_S = 0.5


@dataclass(frozen=True)
class Part:
    """One program of a case: its kind (tests/hook/programs/gaps.c), the request and limit of its tenant, and further
    arguments."""

    kind: str
    request: float
    limit: float = 1.0
    arguments: tuple[str, ...] = ()
    gpu: str = GPUS[0]
    training: str | None = None
    """Name of the training of which the program is one of `RANKS` ranks. The tenants of all ranks are a group, so they
    get their turns together."""


@dataclass(frozen=True)
class Gaps:
    """One case. `parts`: its programs, which run at the same time."""

    name: str
    parts: tuple[Part, ...]


def _pairs(first: str, second: str, mixes: tuple[tuple[float, float], ...]) -> Iterator[Gaps]:
    for one, other in mixes:
        name = f"gaps, {first} + {second}, {one * 100:.0f}:{other * 100:.0f}"
        yield Gaps(name, (Part(first, one), Part(second, other)))


RANKS = 2


def _ranks(training: str, request: float, gpus: tuple[str, ...] = GPUS[:RANKS]) -> tuple[Part, ...]:
    return tuple(Part("rank", request, gpu=gpu, training=training) for gpu in gpus)


_LONG = ("--kernel-us", "250000")
GAPS = (
    *_pairs("e22", "e22", ((0.1, 0.9), (0.3, 0.7), (0.5, 0.5))),
    *_pairs("e45", "e45", ((0.1, 0.9), (0.3, 0.7), (0.5, 0.5))),
    *_pairs("decode", "decode", ((0.1, 0.9), (0.3, 0.7), (0.5, 0.5))),
    *_pairs("e45", "busy", ((0.1, 0.9), (0.3, 0.7), (0.5, 0.5), (0.9, 0.1))),
    *_pairs("busy", "busy", ((0.1, 0.9), (0.5, 0.5))),
    Gaps("gaps, three eager, 20:30:50", (Part("e22", 0.2), Part("e22", 0.3), Part("e22", 0.5))),
    Gaps("gaps, e45 + busy 250 ms, 50:50", (Part("e45", 0.5), Part("busy", 0.5, arguments=_LONG))),
    Gaps("gaps, service + busy 1.8 ms", (Part("service", 0.3), Part("busy", 0.7, arguments=("--kernel-us", "1800")))),
    Gaps("gaps, requests + busy 20 ms", (Part("requests", 0.3), Part("busy", 0.7, arguments=("--kernel-us", "20000")))),
    Gaps("gaps, requests + busy 250 ms", (Part("requests", 0.3), Part("busy", 0.7, arguments=_LONG))),
    Gaps("gaps, e45 limit 0.5 + e45, 30:50", (Part("e45", 0.3, limit=0.5), Part("e45", 0.5))),
    Gaps("gaps, thirty notebooks", (Part("notebook", 0.033),) * 30),
    Gaps(
        "gaps, fifteen notebooks + training",
        (Part("busy", 0.5, arguments=("--kernel-us", "5000")), *(Part("notebook", 0.033),) * 15),
    ),
    Gaps("gaps, two trainings of two ranks, 50:50", (*_ranks("a", 0.5), *_ranks("b", 0.5))),
    Gaps("gaps, two trainings of two ranks, 30:70", (*_ranks("a", 0.3), *_ranks("b", 0.7))),
    Gaps("gaps, two ranks on one GPU, 50:50", _ranks("a", 0.5, GPUS[:1] * RANKS)),
    Gaps("gaps, two ranks on one GPU + busy", (*_ranks("a", 0.25, GPUS[:1] * RANKS), Part("busy", 0.5))),
    Gaps("gaps, two ranks + two busy", (*_ranks("a", 0.5), *(Part("busy", 0.5, gpu=gpu) for gpu in GPUS[:RANKS]))),
)


@dataclass
class _Ran:
    units_per_s: float
    latencies_ms: list[float] = field(default_factory=list)


class GapsBenchmark:
    """Runner of the cases. The speed of a program without neighbours is measured only once."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._alone: dict[tuple[str, tuple[str, ...]], float] = {}

    def rows(self, case: Gaps) -> list[Row]:
        """Measure one case; return its rows."""
        alone = [self._speed_alone(part) for part in case.parts]
        rows: list[Row] = []
        bare = 0.0
        for mode in MODES:
            name = f"{case.name}: {mode}"
            ran = self._run(case, mode)
            progress = [100 * one.units_per_s / speed for one, speed in zip(ran, alone, strict=True)]
            below = [100 * part.request - got for part, got in zip(case.parts, progress, strict=True)]
            if len(case.parts) <= 4:
                rows += [Row(f"{name}: t{place}", "progress", "%", round(got, 1)) for place, got in enumerate(progress)]
            if mode == "bare":
                bare = sum(progress)
            rows += [
                Row(name, "sum", "%", round(sum(progress), 1)),
                Row(name, "sum_of_bare", "ratio", round(sum(progress) / bare, 3)),
                Row(name, "below_request", "points", round(max(0.0, *below), 2)),
            ]
            latencies = sorted(latency for one in ran for latency in one.latencies_ms)
            if latencies:
                for part in (50, 99):
                    value = latencies[min(len(latencies) - 1, len(latencies) * part // 100)]
                    rows.append(Row(name, f"wait_p{part}", "ms", round(value, 2)))
        return rows

    def _speed_alone(self, part: Part) -> float:
        key = (part.kind, part.arguments)
        if key not in self._alone:
            parts = (part,) if part.training is None else _ranks(part.training, part.request)
            self._alone[key] = self._run(Gaps("alone", parts), "bare")[0].units_per_s
        return self._alone[key]

    def _run(self, case: Gaps, mode: str) -> list[_Ran]:
        rows = [
            tenant(f"t{place}", part.request, part.limit, gpus=(part.gpu,), memory=64 << 20)
            | ({} if part.training is None else {"group": part.training})
            for place, part in enumerate(case.parts)
        ]
        with tempfile.TemporaryDirectory(prefix="sh") as directory:
            if mode == "bare":
                return self._watch(Node(Path(directory), {}), case, hooked=False)
            with running(Path(directory), *rows, sharing=mode) as node:
                return self._watch(node, case, hooked=True)

    def _watch(self, node: Node, case: Gaps, *, hooked: bool) -> list[_Ran]:
        programs: list[Program] = []
        try:
            for place, part in enumerate(case.parts):
                environment = node.environment(f"t{place}", gpus=(part.gpu,)) | {
                    "FAKE_CUDA_SLICE_US": str(SLICE_US),
                    "FAKE_CUDA_SWITCH_US": str(SWITCH_US),
                }
                if not hooked:
                    del environment["LD_PRELOAD"]
                arguments = ["--slept", SLEPT, "--seed", str(place + 1), "--report", str(_REPORT_S), *part.arguments]
                if part.training is not None:
                    arguments += ["--meet", str(node.directory / f"meet-{part.training}"), "--ranks", str(RANKS)]
                programs.append(Program([str(PROGRAMS / "gaps"), part.kind, *arguments], environment))
            return [self._ran(program) for program in programs]
        finally:
            for program in programs:
                program.close()

    def _ran(self, program: Program) -> _Ran:
        """Read the reports of a program for the measured window, which begins `SETTLE_S` after the program's start."""
        begin: tuple[float, int] | None = None
        latencies: list[float] = []
        while True:
            report = program.report()
            if report["event"] == "start":
                continue
            assert report["event"] == "progress", report
            if begin is None:
                if report["elapsed"] >= SETTLE_S:
                    begin = report["elapsed"], report["units"]
                continue
            latencies += report["latencies_ms"]
            length = report["elapsed"] - begin[0]
            if length >= self._seconds:
                return _Ran((report["units"] - begin[1]) / length, latencies)


def chosen(names: list[str]) -> list[Gaps]:
    """Return the cases whose name contains one of these texts; without texts, all cases."""
    return [case for case in GAPS if not names or any(name in case.name for name in names)]
