"""Table (f): whether the assumptions of co-running about the GPU, the driver and the hook hold.

This table is measured first. If a row has NO, the documentation's figures of the simulated GPU do not hold for this
GPU.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial

from gpukit.agent import Tenant
from gpukit.programs import Program
from gpukit.results import Budget, Cell, table
from gpukit.setting import Setting, note

KEY = "slices"
_LONG_US = 250_000
_TAIL = 0.05
_SETTLE = 0.15
_ASSUMED_SLICE_US = (500.0, 3000.0)
_ASSUMED_SWITCH_US = 200.0
_PREEMPTS_US = 50_000.0
"""Longest median wait, in us, that shows that the GPU preempts a neighbour's kernels of 250 ms: a fifth of such a
kernel."""
_IDLE_COSTS = 0.02
_SAMPLES_COST = 0.005
"""Part of its steps that an eager program may lose because the hook samples its progress."""
_IN_FLIGHT_OFF = 0.05


def _programs(setting: Setting) -> dict[str, tuple[str, str]]:
    """Return the programs whose time in flight is measured. The first program has gaps."""
    own = {"eager, driver API": ("driver_gaps", "eager")}
    if not setting.torch:
        return own
    return {"training, eager": ("torch_work", "train"), "decode, eager": ("torch_work", "decode"), **own}


def measure(setting: Setting, budget: Budget) -> None:
    """Measure all cells that have no result yet. Raises `OutOfTime`."""
    names = ("alone", "idle context", "two", "arrival, 20 us", "arrival, 250 ms")
    if any(f"{KEY}/{name}" not in setting.results for name in names):
        budget.need(setting.expected_s(windows=5, window_s=setting.seconds / 2))
        _slices(setting)
    for name, (workload, kind) in _programs(setting).items():
        if f"{KEY}/samples, {name}" not in setting.results:
            budget.need(setting.expected_s(windows=2 * setting.rounds, window_s=setting.seconds / 2))
            note(f"slices: samples, {name}")
            setting.keep(f"{KEY}/samples, {name}", partial(_samples, setting, workload, kind))
    if f"{KEY}/captures" not in setting.results:
        budget.need(setting.expected_s(windows=1, window_s=setting.seconds / 2))
        note("slices: captures next to samples")
        setting.keep(f"{KEY}/captures", lambda: _captures(setting))


def _slices(setting: Setting) -> None:
    """Measure, without hook and agent, how the driver divides the GPU between two processes."""
    seconds = setting.seconds / 2
    window = {"settle": _SETTLE * seconds, "seconds": seconds, "tail": _TAIL * seconds}
    patience = setting.patience_s(seconds)

    def keep(name: str, make: Callable[[], Cell]) -> None:
        note(f"slices: {name}")
        setting.keep(f"{KEY}/{name}", make)

    with ExitStack() as stack:

        def start(label: str, *arguments: str, workload: str = "driver_slices") -> Program:
            program = setting.begin(workload, *arguments, label=f"slices-{label}")
            stack.callback(program.end)
            program.ready(setting.start_s)
            return program

        first = start("first")
        keep("alone", lambda: first.ask("run", **window, timeout_s=patience))
        second = start("second")
        keep("idle context", lambda: first.ask("run", **window, timeout_s=patience))

        def two() -> Cell:
            for program in (first, second):
                program.send("run", **window)
            answers = [program.answer(patience) for program in (first, second)]
            return {"rates": [answer["rate"] for answer in answers]} | {
                name: [answer[name] for answer in answers] for name in ("run_us", "away_us")
            }

        def arrival(neighbour: Program) -> Cell:
            neighbour.send("run", settle=0.0, seconds=seconds, tail=0.0)
            time.sleep(_SETTLE * seconds)
            cell = second.ask("brief", seconds=seconds * 0.7, timeout_s=patience)
            neighbour.answer(patience)
            return cell

        keep("two", two)
        keep("arrival, 20 us", lambda: arrival(first))
        long = start("long", "--kind", "long", "--kernel-us", str(_LONG_US), workload="driver_kernels")
        keep("arrival, 250 ms", lambda: arrival(long))


def _samples(setting: Setting, workload: str, kind: str) -> Cell:
    """Measure a program next to an idle tenant with the hook's samples, and in exclusive turns, which need none."""
    memory, seconds = setting.gpu.memory // 3, setting.seconds / 2
    rates: dict[bool, list[float]] = {False: [], True: []}
    idle = Tenant("second", 0.5, 1.0, memory)
    setting.agent.set(Tenant("first", 0.5, 1.0, memory), idle)
    with (
        setting.workload(workload, "--kind", kind, label=f"slices-{kind}", tenant="first") as program,
        setting.workload("driver_kernels", "--kind", "small", label="slices-idle", tenant="second") as other,
    ):
        other.ask("run", settle=0.0, seconds=0.1, timeout_s=setting.patience_s(1))
        cell: Cell = {}
        for turn in range(2 * setting.rounds):
            samples = turn % 2 == 1
            setting.agent.set(Tenant("first", 0.5, 1.0, memory - ((turn + 1) << 20), co_running=samples), idle)
            answer = program.ask("run", settle=0.5, seconds=seconds, timeout_s=setting.patience_s(seconds))
            rates[samples].append(float(answer["rate"]))
            if "gpu_us" in answer:
                cell["needs"] = answer["gpu_us"] / 1e6 * answer["rate"]
        cell["in_flight"] = setting.agent.in_flight().get("first")
    return cell | {"without": rates[False], "with": rates[True]}


def _captures(setting: Setting) -> Cell:
    memory, seconds = setting.gpu.memory // 3, setting.seconds / 2
    setting.agent.set(Tenant("first", 0.5, 1.0, memory), Tenant("second", 0.5, 1.0, memory))
    hook = str(setting.kit / "lib" / "sharepod" / "agent" / "hook" / "libsharepod.so")
    with (
        setting.workload("driver_checks", "--hook", hook, label="slices-captures", tenant="first") as program,
        setting.workload("driver_kernels", "--kind", "small", label="slices-idle", tenant="second") as other,
    ):
        other.ask("run", settle=0.0, seconds=0.1, timeout_s=setting.patience_s(1))
        return program.ask("busy_captures", seconds=seconds, timeout_s=setting.patience_s(seconds))


def show(setting: Setting) -> str:
    """Return the table as Markdown."""
    rows = [*_rows_of_slices(setting)]
    for name in _programs(setting):
        cell = setting.results.get(f"{KEY}/samples, {name}")
        if cell is None or "failed" in cell:
            rows.append([f"samples, {name}", *setting.missing(cell, 3)])
            continue
        cost = 1 - statistics.median(cell["with"]) / statistics.median(cell["without"])
        most = f"at most {100 * _SAMPLES_COST:.1f} % of the steps"
        rows.append([f"samples, {name}", most, f"{100 * cost:.1f} %", _word(cost <= _SAMPLES_COST)])
        seen, needs = cell["in_flight"], cell.get("needs")
        measured = "not measured" if seen is None else f"{seen:.2f}"
        if needs is None:
            rows.append([f"time in flight, {name}", "", measured, ""])
        else:
            holds = seen is not None and abs(seen - needs) <= _IN_FLIGHT_OFF
            rows.append([f"time in flight, {name}", f"{needs:.2f}, its kernels", measured, _word(holds)])
    cell = setting.results.get(f"{KEY}/captures")
    if cell is None or "failed" in cell:
        rows.append(["captures next to samples", *setting.missing(cell, 3)])
    else:
        made = f"{cell['made']} made, {cell['broken']} broken"
        rows.append(["captures next to samples", "none broken", made, _word(cell["broken"] == 0)])
    return table("(f) Assumptions of co-running", ("quantity", "assumed", "measured", "holds"), rows)


def _rows_of_slices(setting: Setting) -> list[list[str]]:
    cells = {name: setting.results.get(f"{KEY}/{name}") for name in ("alone", "idle context", "two")}
    known = {name: cell for name, cell in cells.items() if cell is not None and "failed" not in cell}
    rows: list[list[str]] = []
    if len(known) < len(cells):
        missing = next(cell for name, cell in cells.items() if name not in known)
        rows.append(["time slices", *setting.missing(missing, 3)])
    else:
        alone, two = known["alone"]["rate"], known["two"]
        spans = [span[1] for span in two["run_us"] if span]
        length = statistics.mean(spans) if spans else 0.0
        work = sum(two["rates"]) / alone
        switch = length * max(0.0, 1 / work - 1)
        least, most = _ASSUMED_SLICE_US
        tenths = " to ".join(f"{span:.0f}" for span in two["run_us"][0][::2])
        rows += [
            ["a time slice, two busy programs", "about 1,024 us", f"{length:.0f} us (p10 to p90 {tenths})",
             _word(least <= length <= most)],
            ["work of two busy programs in sum", "0.92", f"{work:.3f}", ""],
            ["a switch, from that loss", "about 91 us", f"{switch:.0f} us", _word(switch <= _ASSUMED_SWITCH_US)],
        ]  # fmt: skip
        cost = 1 - known["idle context"]["rate"] / alone
        rows.append(["an idle context next to it", "costs nothing", f"{100 * cost:.1f} %", _word(cost <= _IDLE_COSTS)])
    for name, kernels in (("arrival, 20 us", "20 us"), ("arrival, 250 ms", "250 ms")):
        cell = setting.results.get(f"{KEY}/{name}")
        what = f"wait of a brief kernel next to kernels of {kernels}"
        if cell is None or "failed" in cell:
            rows.append([what, *setting.missing(cell, 3)])
            continue
        waits = cell["wait_us"]
        rows.append(
            [what, "a slice: kernels are preempted", f"p50 {waits[1]:.0f}, p90 {waits[2]:.0f}, p99 {waits[3]:.0f} us",
             _word(waits[1] < _PREEMPTS_US)]
        )  # fmt: skip
    return rows


def _word(holds: bool) -> str:
    return "yes" if holds else "NO"
