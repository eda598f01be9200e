"""Table (a): the hook's cost to a tenant without neighbours.

The same program runs alternately without and with the hook on an otherwise idle GPU; each round gives one ratio, the
table shows the median and the range. Then the tenant's limit is lowered to half a GPU: the work relative to half of the
work without a hook shows the cost of metering.
"""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median

from gpukit.agent import Tenant
from gpukit.programs import Program
from gpukit.results import Budget, Cell, table
from gpukit.setting import Setting, note

KEY = "overhead"
CEILING = 0.5
_SETTLE_S = 0.5
_WINDOW = 0.3
"""Length of a measurement of this table, relative to that of a measurement of shares."""


@dataclass(frozen=True)
class Case:
    """Workload of the table, and the unit of work that is counted."""

    name: str
    what: str
    workload: str
    kind: str


_DRIVER = (
    Case("micro-kernel (driver API)", "launches", "driver_kernels", "micro"),
    Case("20 ms kernels (driver API)", "kernels", "driver_kernels", "long"),
    Case("graphs of 50 kernels (driver API)", "graphs", "driver_kernels", "graph"),
)
_TORCH = (
    Case("micro-kernel", "launches", "torch_work", "launches"),
    Case("matmul 8192", "products", "torch_work", "matmul"),
    Case("training, eager", "steps", "torch_work", "train"),
    Case("training, torch.compile", "steps", "torch_work", "train-compile"),
    Case("training, CUDA graph", "steps", "torch_work", "train-graph"),
    Case("decode, eager", "tokens", "torch_work", "decode"),
    Case("decode, CUDA graph", "tokens", "torch_work", "decode-graph"),
)


def cases(setting: Setting) -> tuple[Case, ...]:
    """Return the cases that can be measured on this machine."""
    return (*_DRIVER, *_TORCH) if setting.torch else _DRIVER


def measure(setting: Setting, budget: Budget) -> None:
    """Measure all cells that have no result yet. Raises `OutOfTime`."""
    for case in cases(setting):
        key = f"{KEY}/{case.name}"
        if key in setting.results:
            continue
        budget.need(setting.expected_s(windows=2 * setting.rounds + 2, window_s=_WINDOW * setting.seconds))
        note(f"overhead: {case.name}")
        setting.keep(key, lambda case=case: _one(setting, case))  # type: ignore[misc]


def _one(setting: Setting, case: Case) -> Cell:
    whole = Tenant("solo", 1.0, 1.0, setting.gpu.memory)
    half = Tenant("solo", CEILING, CEILING, setting.gpu.memory)
    seconds = _WINDOW * setting.seconds

    def rate(program: Program) -> float:
        answer = program.ask("run", settle=_SETTLE_S, seconds=seconds, timeout_s=setting.patience_s(seconds))
        return float(answer["rate"])

    setting.agent.set(whole)
    label = f"overhead-{case.kind}"
    with (
        setting.workload(case.workload, "--kind", case.kind, label=f"{label}-bare") as bare,
        setting.workload(case.workload, "--kind", case.kind, label=f"{label}-hook", tenant="solo") as hooked,
    ):
        rounds = [(rate(bare), rate(hooked)) for _ in range(setting.rounds)]
        setting.agent.set(half)
        rate(hooked)  # the first measurement still contains launches at full speed
        bound = rate(hooked)
    return {"bare": [one for one, _ in rounds], "hook": [other for _, other in rounds], "bound": bound}


def show(setting: Setting) -> str:
    """Return the table as Markdown."""
    rows = []
    for case in cases(setting):
        cell = setting.results.get(f"{KEY}/{case.name}")
        if cell is None or "failed" in cell:
            rows.append([case.name, case.what, *setting.missing(cell, 5)])
            continue
        bare = median(cell["bare"])
        costs = sorted(100 * (1 - hook / alone) for alone, hook in zip(cell["bare"], cell["hook"], strict=True))
        each_ns = median(1e9 / hook - 1e9 / alone for alone, hook in zip(cell["bare"], cell["hook"], strict=True))
        rows.append(
            [
                case.name,
                case.what,
                f"{bare:,.1f}",
                f"{median(cell['hook']):,.1f}",
                f"{median(costs):+.2f} % ({costs[0]:+.2f} to {costs[-1]:+.2f})",
                f"{each_ns:+,.0f} ns",
                f"{100 * cell['bound'] / bare:.1f} % of {100 * CEILING:.0f} %",
            ]
        )
    head = ("workload", "counted", "per second without hook", "with hook, alone", "cost", "cost of one", "limit 0.5")
    return table("(a) Overhead for one tenant", head, rows)
