"""Table (c): where a device memory limit stops each allocator, and the reports of it.

A program allocates memory piece by piece until an allocation is refused. The table also shows the total memory that the
program saw, the agent's count, and the driver's: memory in use beyond that before the program started.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from importlib import metadata

from gpukit.agent import Tenant
from gpukit.results import Budget, Cell, table
from gpukit.setting import Setting, note

KEY = "memory"
_MIB = 1 << 20
_CHUNK = 64 * _MIB
_GONE_S = 20.0


@dataclass(frozen=True)
class Case:
    """Way to allocate memory. `needs`: distributions, one of which must be installed; empty: none is needed."""

    name: str
    workload: str
    arguments: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()


CASES = (
    Case("cuMemAlloc (driver API)", "driver_memory", ("--allocator", "device")),
    Case("cuMemAllocAsync (driver API)", "driver_memory", ("--allocator", "pool")),
    Case("cuMemCreate, cuMemMap (driver API)", "driver_memory", ("--allocator", "virtual")),
    Case("memory nodes of graphs (driver API)", "driver_memory", ("--allocator", "graph")),
    Case("PyTorch, native", "torch_memory", ("--allocator", "native"), ("torch",)),
    Case("PyTorch, expandable segments", "torch_memory", ("--allocator", "expandable"), ("torch",)),
    Case("PyTorch, cudaMallocAsync", "torch_memory", ("--allocator", "async"), ("torch",)),
    Case("PyTorch, graphs' pools", "torch_memory", ("--allocator", "graphs"), ("torch",)),
    Case("JAX", "jax_memory", (), ("jax",)),
    Case("CuPy", "cupy_memory", (), ("cupy", "cupy-cuda13x", "cupy-cuda12x", "cupy-cuda11x")),
)


def _limit(setting: Setting) -> int:
    return min(8 << 30, setting.gpu.memory // 4)


def _absent(setting: Setting, case: Case) -> str:
    """Return the reason why a case cannot be measured here. Empty if it can."""
    if not case.needs or ("torch" in case.needs and setting.torch):
        return ""
    if setting.gpu.fake:
        return f"left out: {case.needs[0]} does not run on the fake driver"
    for name in case.needs:
        try:
            metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
        return ""
    return f"left out: {case.needs[0]} is not installed"


def measure(setting: Setting, budget: Budget) -> None:
    """Measure all cells that have no result yet. Raises `OutOfTime`."""
    for case in CASES:
        key = f"{KEY}/{case.name}"
        if key in setting.results or _absent(setting, case):
            continue
        budget.need(setting.expected_s(windows=1, window_s=20.0))
        note(f"memory: {case.name}")
        setting.keep(key, lambda case=case: _one(setting, case))  # type: ignore[misc]


def _one(setting: Setting, case: Case) -> Cell:
    limit = _limit(setting)
    setting.agent.set(Tenant("eater", 1.0, 1.0, limit))
    before = _settled(setting)
    label = "memory-" + "-".join((case.workload, *case.arguments[1:]))
    with setting.workload(case.workload, *case.arguments, label=label, tenant="eater") as program:
        cell = program.ask("fill", chunk=_CHUNK, most=2 * limit, timeout_s=180)
        cell |= {"limit": limit, "counted": setting.agent.used_bytes("eater")}
        use = setting.gpu.use()
        if use is not None:
            cell["driver"] = use.device - before
            if use.processes is not None:
                cell["own"] = use.processes.get(program.pid)
        if case.workload == "torch_memory":
            cell |= program.ask("reuse", chunk=_CHUNK, timeout_s=60)
        program.ask("clear", timeout_s=60)
    return cell


def _settled(setting: Setting) -> int:
    """Return the device memory in use, in bytes, after the previous program has ended and freed its memory."""
    deadline = time.monotonic() + _GONE_S
    last = -1
    while time.monotonic() < deadline:
        use = setting.gpu.use()
        if use is None:
            return 0
        if use.device == last:
            break
        last = use.device
        time.sleep(0.3)
    return last


def show(setting: Setting) -> str:
    """Return the table as Markdown."""
    rows = []
    for case in CASES:
        cell = setting.results.get(f"{KEY}/{case.name}")
        if absent := _absent(setting, case):
            rows.append([case.name, absent, *[""] * 6])
            continue
        if cell is None or "failed" in cell:
            rows.append([case.name, *setting.missing(cell, 7)])
            continue
        rows.append(
            [
                case.name,
                _mib(cell["limit"]),
                _mib(cell["taken"]),
                str(cell["stopped"])[:60],
                _mib(cell.get("total")),
                _mib(cell["counted"]),
                f"{_mib(cell.get('driver'))} (of its pid: {_mib(cell.get('own'))})",
                str(cell.get("reused", ""))[:40],
            ]
        )
    head = ("allocator", "limit MiB", "got MiB", "refused by", "sees MiB in all", "agent counts MiB",
            "by the driver, MiB", "cache given back and tried again")  # fmt: skip
    return table("(c) Device memory at the limit", head, rows)


def _mib(size: int | None) -> str:
    return "not reported" if size is None else f"{size / _MIB:,.0f}"
