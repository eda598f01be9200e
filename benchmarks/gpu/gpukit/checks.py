"""Checks of the driver: whether it answers calls as hook and agent expect."""

from __future__ import annotations

import time
from contextlib import ExitStack

from gpukit.agent import Tenant
from gpukit.results import Budget, Cell, table
from gpukit.setting import Setting, note

KEY = "checks"
_MIB = 1 << 20
_BUSY_S = 0.5


def measure(setting: Setting, budget: Budget) -> None:
    """Measure all cells that have no result yet. Raises `OutOfTime`."""
    steps = (
        ("symbols", _symbols),
        ("symbols under the hook", _symbols_under_the_hook),
        ("captures", _captures),
        ("captures under the hook", _captures_under_the_hook),
        ("context", _context),
        *((("mixed programs", _mixed),) if setting.torch else ()),
    )
    for key, make in steps:
        if f"{KEY}/{key}" not in setting.results:
            budget.need(20)
            note(f"checks: {key}")
            setting.keep(f"{KEY}/{key}", lambda make=make: make(setting))  # type: ignore[misc]


def _hook(setting: Setting) -> str:
    return str(setting.kit / "lib" / "sharepod" / "agent" / "hook" / "libsharepod.so")


def _symbols(setting: Setting) -> Cell:
    with setting.workload("driver_checks", "--hook", _hook(setting), label="checks-bare") as program:
        return program.ask("version", timeout_s=30) | program.ask("symbols", timeout_s=60)


def _symbols_under_the_hook(setting: Setting) -> Cell:
    setting.agent.set(Tenant("solo", 1.0, 1.0, setting.gpu.memory))
    hook = _hook(setting)
    with setting.workload("driver_checks", "--hook", hook, label="checks-hook", tenant="solo") as program:
        return program.ask("symbols", timeout_s=60)


def _captures(setting: Setting) -> Cell:
    with setting.workload("driver_checks", "--hook", _hook(setting), label="checks-captures") as program:
        return program.ask("captures", timeout_s=60)


def _captures_under_the_hook(setting: Setting) -> Cell:
    setting.agent.set(Tenant("solo", 0.5, 0.5, setting.gpu.memory))
    hook = _hook(setting)
    seconds = _BUSY_S * setting.seconds
    with setting.workload("driver_checks", "--hook", hook, label="checks-busy", tenant="solo") as program:
        return program.ask("busy_captures", seconds=seconds, timeout_s=setting.patience_s(seconds))


def _context(setting: Setting) -> Cell:
    """Measure the memory that a context takes, and what the driver reports about its process."""
    with setting.workload("driver_checks", "--hook", _hook(setting), label="checks-context") as program:
        time.sleep(0.5)
        before = setting.gpu.use()
        program.ask("context", timeout_s=60)
        after = setting.gpu.use()
        if before is None or after is None:
            return {"nvml": False}
        cell: Cell = {"nvml": True, "device": after.device - before.device}
        if after.processes is None:
            return cell | {"known": False}
        own = after.processes.get(program.pid)
        return cell | {"known": True, "processes": len(after.processes), "own": own}


def _mixed(setting: Setting) -> Cell:
    """Run two tenants that both mix streams, copies, graphs and captures. Each tenant checks its own results."""
    memory = setting.gpu.memory // 3
    setting.agent.set(Tenant("first", 0.5, 1.0, memory), Tenant("second", 0.5, 1.0, memory))
    with ExitStack() as stack:
        programs = []
        for name in ("first", "second"):
            program = setting.begin("torch_mixed", label=f"checks-mixed-{name}", tenant=name)
            stack.callback(program.end)
            programs.append(program)
        for program in programs:
            program.ready(setting.start_s)
        for program in programs:
            program.send("run", settle=0.0, seconds=setting.seconds)
        answers = [program.answer(setting.patience_s(setting.seconds)) for program in programs]
    return {
        "steps": [answer["steps"] for answer in answers],
        "wrong": sum(answer["wrong"] for answer in answers),
        "named": [what for answer in answers for what in answer["named"]],
    }


def show(setting: Setting) -> str:
    """Return the table as Markdown."""
    rows: list[list[str]] = []
    for key, rows_of in (
        ("symbols", _say_symbols),
        ("symbols under the hook", _say_hooked),
        ("captures", _say_captures),
        ("captures under the hook", _say_busy),
        ("context", _say_context),
        *((("mixed programs", _say_mixed),) if setting.torch else ()),
    ):
        cell = setting.results.get(f"{KEY}/{key}")
        if cell is None or "failed" in cell:
            rows.append([key, *setting.missing(cell, 1)])
        else:
            rows += rows_of(cell)
    return table("What the driver answers", ("asked", "answer"), rows)


def _some(names: list[str]) -> str:
    return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")


def _say_symbols(cell: Cell) -> list[list[str]]:
    rows = [
        ["driver", f"CUDA {cell['version'] // 1000}.{cell['version'] % 1000 // 10}, {cell['library']}"],
        ["cuGetProcAddress of what the hook wraps", f"{cell['answers']} answers for {cell['wrapped']} symbols"],
        ["... pointers that no exported name has", _some(cell["unnamed"]) or "none: each could be given its wrapper"],
        ["... forms that the hook has no wrapper for", _some(cell["unwrapped"]) or "none"],
    ]
    if cell["absent"]:
        rows.append(["... names that this driver does not know", _some(cell["absent"])])
    return rows


def _say_hooked(cell: Cell) -> list[list[str]]:
    outside = cell["answers"] - cell["hook"]
    summary = f"{cell['hook']} of {cell['answers']} answers are the hook's"
    return [["cuGetProcAddress under the hook", summary + (f"; {outside} are NOT" if outside else "")]]


def _say_captures(cell: Cell) -> list[list[str]]:
    rows = []
    for how, codes in cell["captures"].items():
        whole = "the capture stays whole" if codes["end"] == 0 else f"the capture ends with {codes['end']}"
        rows.append([f"cuEventQuery on another thread, {how}", f"answers {codes['query']}; {whole}"])
    return rows


def _say_busy(cell: Cell) -> list[list[str]]:
    broken = f"{cell['broken']} broken" + (f" {cell['codes']}" if cell["broken"] else "")
    return [["captures under the hook, metered, GPU busy", f"{cell['made']} made, {broken}"]]


def _say_mixed(cell: Cell) -> list[list[str]]:
    """Return the table's rows about wrong results; no rows if all results were right."""
    checked = " and ".join(f"{steps:,}" for steps in cell["steps"])
    wrong = f"{cell['wrong']} wrong" + (f": {_some(cell['named'])}" if cell["wrong"] else "")
    return [["results of two tenants that mix streams, copies, graphs", f"{checked} checked, {wrong}"]]


def _say_context(cell: Cell) -> list[list[str]]:
    if not cell["nvml"]:
        return [["device memory of a context", "not reported: no NVML"]]
    rows = [["device memory of a context", f"{cell['device'] / _MIB:.0f} MiB"]]
    if not cell["known"]:
        return [*rows, ["processes, by the driver", "not reported"]]
    own = "under another pid, or without its memory" if cell["own"] is None else f"with {cell['own'] / _MIB:.0f} MiB"
    return [*rows, ["processes, by the driver", f"{cell['processes']} on the device; this one stands there {own}"]]
