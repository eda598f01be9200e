"""Table (e): whether programs behave under the hook as without it.

All patterns of `real_programs.py` run at the same time, first without a hook, then each as a separate tenant, with
equal shares. Each checks its own results. If a pattern fails without a hook, the table shows that; its result then
proves nothing about SharePod.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial

from gpukit.agent import Tenant
from gpukit.programs import Program, ProgramError
from gpukit.results import Budget, Cell, table
from gpukit.setting import Setting, note

KEY = "patterns"
_NEEDS_A_LIMIT = "memory up to the limit"
_DRIVER = ("contexts destroyed with work", "functions in the legacy stream", _NEEDS_A_LIMIT)
_TORCH = (
    "exported memory",
    "torch.compile with graphs",
    "worker processes and pinned memory",
    "tensors shared with a process",
    "NCCL",
    "threads that come and go",
    "PyTorch on cudaMallocAsync",
    "JAX",
    "CuPy",
)


def patterns(setting: Setting) -> tuple[str, ...]:
    """Return the patterns that can run on this machine. The memory of the fake driver cannot be read, so patterns that
    read results are left out there."""
    return (*_DRIVER, *_TORCH) if setting.torch else _DRIVER


def measure(setting: Setting, budget: Budget) -> None:
    """Measure all cells that have no result yet. Raises `OutOfTime`."""
    for how in ("bare", "hook"):
        names = [name for name in patterns(setting) if how == "hook" or name != _NEEDS_A_LIMIT]
        if any(f"{KEY}/{name}/{how}" not in setting.results for name in names):
            budget.need(setting.seconds + 60)
            note(f"patterns: {how}")
            _all(setting, how, names)


def _all(setting: Setting, how: str, names: list[str]) -> None:
    """Run these patterns at the same time. `how`: `bare` or `hook`."""
    memory = min(8 << 30, setting.gpu.memory // (len(names) + 1))
    if how == "hook":
        setting.agent.set(*(Tenant(_tenant(name), 1 / len(names), 1.0, memory) for name in names))
    with ExitStack() as stack:
        programs: dict[str, Program] = {}
        for name in names:
            tenant = _tenant(name) if how == "hook" else None
            label = f"patterns-{_tenant(name)}-{how}"
            programs[name] = setting.begin("real_programs", "--pattern", name, label=label, tenant=tenant)
            stack.callback(programs[name].end)
        ready = {}
        deadline = time.monotonic() + setting.start_s
        for name, program in programs.items():
            ready[name] = _tried(partial(program.ready, max(1.0, deadline - time.monotonic())))
        for name, program in programs.items():
            if "failed" not in ready[name]:
                program.send("run", settle=0.0, seconds=setting.seconds)
        for name, program in programs.items():
            cell = ready[name]
            if "failed" not in cell:
                cell = _tried(partial(program.answer, setting.patience_s(setting.seconds)))
            setting.results.put(f"{KEY}/{name}/{how}", cell)


def _tried(step: Callable[[], Cell]) -> Cell:
    try:
        answer: Cell = step()
    except ProgramError as error:
        note(f"  failed: {error}")
        return {"failed": str(error)}
    return answer


def _tenant(name: str) -> str:
    return "".join(letter if letter.isalnum() else "-" for letter in name.lower())


def show(setting: Setting) -> str:
    """Return the table as Markdown."""
    rows = []
    for name in patterns(setting):
        bare, hooked = (setting.results.get(f"{KEY}/{name}/{how}") for how in ("bare", "hook"))
        without = ["needs a limit", "", ""] if name == _NEEDS_A_LIMIT else _said(bare)
        rows.append([name, *without, *_said(hooked)])
    head = ("pattern", "rounds, no hook", "wrong", "longest s", "under the hook", "wrong", "longest s")
    return table("(e) Patterns of real programs", head, rows)


def _said(cell: Cell | None) -> list[str]:
    if cell is None or "failed" in cell:
        return Setting.missing(cell, 3)
    return [f"{cell['rounds']:,}", str(cell["wrong"]), f"{cell['longest_s']:.2f}"]
