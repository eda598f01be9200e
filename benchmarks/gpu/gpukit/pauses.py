"""Table (d): the share of a pausing tenant with a neighbour that never pauses, and whether NVML confirms the token.

Every workload uses the driver API, so its work is known in GPU time: kernels times their length. A pausing tenant
should get request x work / (work + pause).
"""

from __future__ import annotations

import time
from contextlib import ExitStack
from dataclasses import dataclass

from gpukit.agent import Tenant
from gpukit.programs import Program
from gpukit.results import Budget, Cell, table
from gpukit.setting import Setting, note

KEY = "pauses"
SEEN = "seen"
_SETTLE = 0.45
"""Part of the measurement before counting starts. It is long, because the agent must first learn the lengths of a
tenant's pauses."""
_TAIL = 0.05
_SEEN_S = 11.0
"""Length of a measurement in seconds: more than the 10 s over which the agent averages."""


@dataclass(frozen=True)
class Case:
    """Pausing tenant and neighbour: their requests, the lengths of work and pause in a step, and the length of the
    neighbour's kernels."""

    request: float
    work_ms: int
    pause_ms: int
    neighbour: float
    kernel_ms: int

    @property
    def name(self) -> str:
        next_to = f"{self.neighbour}" if self.neighbour else "best effort"
        step = f"{self.work_ms} ms of work, {self.pause_ms} of pause"
        return f"{self.request}, {step}, next to {next_to}, {self.kernel_ms} ms"

    @property
    def due(self) -> float:
        """Return the part of the GPU's time that the pausing tenant should get."""
        return self.request * self.work_ms / (self.work_ms + self.pause_ms)


CASES = (Case(0.7, 20, 5, 0.3, 40), Case(0.7, 20, 5, 0.3, 250), Case(0.9, 5, 2, 0.0, 40), Case(0.9, 5, 2, 0.0, 250))


def measure(setting: Setting, budget: Budget) -> None:
    """Measure all cells that have no result yet. Raises `OutOfTime`."""
    steps = [(f"{KEY}/{case.name}", lambda case=case: _one(setting, case)) for case in CASES]
    for key, make in (*steps, (f"{SEEN}/30:70", lambda: _seen(setting))):
        if key not in setting.results:
            budget.need(setting.seconds + _SEEN_S + 10)
            note(f"pauses: {key}")
            setting.keep(key, make)


def _pair(setting: Setting, stack: ExitStack, *arguments: tuple[str, ...]) -> list[Program]:
    programs = []
    for tenant, of_program in zip(("first", "second"), arguments, strict=True):
        label = f"pauses-{tenant}"
        program = setting.begin("driver_kernels", *of_program, label=label, tenant=tenant)
        stack.callback(program.end)
        programs.append(program)
    for program in programs:
        program.ready(setting.start_s)
    return programs


def _one(setting: Setting, case: Case) -> Cell:
    memory = setting.gpu.memory // 3
    setting.agent.set(Tenant("first", case.request, 1.0, memory), Tenant("second", case.neighbour, 1.0, memory))
    pausing = ("--kind", "pausing", "--work-ms", str(case.work_ms), "--pause-ms", str(case.pause_ms))
    with ExitStack() as stack:
        programs = _pair(setting, stack, pausing, ("--kind", "long", "--kernel-us", str(case.kernel_ms * 1000)))
        for program in programs:
            program.send("run", settle=_SETTLE * setting.seconds, seconds=setting.seconds, tail=_TAIL * setting.seconds)
        time.sleep(_SETTLE * setting.seconds)
        before, begin = setting.agent.accounts()["held"], time.monotonic()
        time.sleep(max(0.0, setting.seconds - 3.0))
        after, end = setting.agent.accounts()["held"], time.monotonic()
        rates = [float(program.answer(setting.patience_s(setting.seconds))["rate"]) for program in programs]
    got = [rates[0] * case.work_ms / 1e3, rates[1] * case.kernel_ms / 1e3]
    held = [(after[name] - before[name]) / (end - begin) for name in ("first", "second")]
    return {"got": got, "held": held}


def _seen(setting: Setting) -> Cell:
    """Run two busy tenants for longer than the agent averages. Return its averages of held and busy time."""
    memory = setting.gpu.memory // 3
    setting.agent.set(Tenant("first", 0.3, 1.0, memory), Tenant("second", 0.7, 1.0, memory))
    with ExitStack() as stack:
        programs = _pair(setting, stack, ("--kind", "small"), ("--kind", "small"))
        for program in programs:
            program.send("run", settle=0.5, seconds=_SEEN_S, tail=2.5)
        time.sleep(_SEEN_S)
        held, busy = setting.agent.usage_ratios(), setting.agent.busy_ratios()
        surcharged = setting.agent.accounts()["surcharged"]
        for program in programs:
            program.answer(setting.patience_s(_SEEN_S))
    names = ("first", "second")
    return {
        "held": [held[name] for name in names],
        "busy": [busy.get(name) for name in names],
        "surcharged": [surcharged[name] for name in names],
    }


def show(setting: Setting) -> str:
    """Return both tables as Markdown."""
    rows = []
    for case in CASES:
        cell = setting.results.get(f"{KEY}/{case.name}")
        if cell is None or "failed" in cell:
            rows.append([case.name, *setting.missing(cell, 5)])
            continue
        got, held = cell["got"], cell["held"]
        rows.append(
            [
                case.name,
                f"{case.due:.3f}",
                f"{got[0]:.3f}",
                f"{got[0] / case.due:.2f}",
                f"{got[1]:.3f}",
                f"{held[0]:.3f} : {held[1]:.3f}",
            ]
        )
    head = ("pausing tenant, and the neighbour's kernels", "should get", "got", "ratio", "neighbour got", "held")
    seen = setting.results.get(f"{SEEN}/30:70")
    if seen is None or "failed" in seen:
        summary = [["30:70", *setting.missing(seen, 3)]]
    else:
        busy = ("not reported" if part is None else f"{part:.3f}" for part in seen["busy"])
        summary = [
            [
                "30:70",
                " : ".join(f"{part:.3f}" for part in seen["held"]),
                " : ".join(busy),
                " : ".join(f"{part:.2f}" for part in seen["surcharged"]),
            ]
        ]
    return (
        table("(d) Pauses", head, rows)
        + "\n"
        + table(
            "(d) The token and NVML, last 10 s",
            ("both busy, kernels of 100 us", "held", "busy, by NVML", "surcharged so far, s"),
            summary,
        )
    )
