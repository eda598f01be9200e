"""Table (b): the shares of two always busy tenants, and the effect of a noisy neighbour on a small service.

Columns: `got` is the work relative to the same work without neighbour and hook, over a window in which both are busy.
It needs only the programs' own counts, so NVIDIA's default time slicing is measured in the same way. `held` is the time
that each tenant held the token, by the agent's count. `surcharged` is the time that the agent deducted because NVML saw
a tenant busy for longer than it held the token: zero for honest tenants.
"""

from __future__ import annotations

import time
from contextlib import ExitStack

from gpukit.agent import AgentError, Tenant
from gpukit.programs import Program, ProgramError
from gpukit.results import Budget, Cell, table
from gpukit.setting import Setting, note

KEY = "shares"
NOISY = "noisy"
RATIOS = ((0.1, 0.9), (0.3, 0.7), (0.5, 0.5))
SERVICE, NEIGHBOUR = 0.3, 0.7
_BESIDE = ("alone", "default", "shared", "interactive")
_SETTLE = 0.15
_TAIL = 0.05
"""Time for which both programs are busy after the measurement; `_SETTLE`: before it. Both are parts of the length of
the measurement."""
_LOAD = 0.15
"""Part of the GPU's time that the requests of the small service need."""
_SEED = 1
_READ_S = 2.5
"""Seconds after which the agent has surely read a tenants file in which only the latency has changed. No file shows
that."""

_DRIVER = {"small kernels": ("driver_kernels", "small"), "20 ms kernels": ("driver_kernels", "long"),
           "graphs": ("driver_kernels", "graph")}  # fmt: skip
_TORCH = {"training, eager": ("torch_work", "train"), "matmul 8192": ("torch_work", "matmul"),
          "training, CUDA graph": ("torch_work", "train-graph")}  # fmt: skip


def workloads(setting: Setting) -> dict[str, tuple[str, str]]:
    """Return the small, large and graph workloads: with PyTorch, or with the driver API if PyTorch is not installed."""
    return _TORCH if setting.torch else _DRIVER


def _ratio(ratio: tuple[float, float]) -> str:
    return f"{100 * ratio[0]:.0f}:{100 * ratio[1]:.0f}"


def _keys() -> list[str]:
    return ["alone", "default", *(_ratio(ratio) for ratio in RATIOS)]


def measure(setting: Setting, budget: Budget) -> None:
    """Measure all cells that have no result yet. Raises `OutOfTime`."""
    for name in workloads(setting):
        if any(f"{KEY}/{name}/{key}" not in setting.results for key in _keys()):
            budget.need(setting.expected_s(windows=1, window_s=setting.seconds))
            try:
                _pair(setting, budget, name)
            except (ProgramError, AgentError) as error:
                _failed(setting, [f"{KEY}/{name}/{key}" for key in _keys()], error)
    if any(f"{NOISY}/{key}" not in setting.results for key in _BESIDE):
        budget.need(setting.expected_s(windows=5, window_s=setting.seconds))
        try:
            _noisy(setting, budget)
        except (ProgramError, AgentError) as error:
            _failed(setting, [f"{NOISY}/{key}" for key in _BESIDE], error)


def _failed(setting: Setting, keys: list[str], error: Exception) -> None:
    """Store a failure in all cells of these keys, because a program that they need did not start."""
    note(f"  failed: {error}")
    for key in keys:
        if key not in setting.results:
            setting.results.put(key, {"failed": str(error)})


def _tenants(setting: Setting, ratio: tuple[float, float], *, interactive: bool = False) -> None:
    memory = setting.gpu.memory // 3
    setting.agent.set(Tenant("first", ratio[0], 1.0, memory, interactive), Tenant("second", ratio[1], 1.0, memory))


def _pair(setting: Setting, budget: Budget, name: str) -> None:
    workload, kind = workloads(setting)[name]
    _tenants(setting, RATIOS[-1])
    with ExitStack() as stack:
        bare, hooked = _four(setting, stack, workload, ("--kind", kind), ("--kind", kind), f"shares-{kind}")

        def alone() -> Cell:
            answer = bare[0].ask(
                "run",
                settle=_SETTLE * setting.seconds,
                seconds=setting.seconds / 2,
                timeout_s=setting.patience_s(setting.seconds),
            )
            return {"rate": answer["rate"]}

        steps = [("alone", alone), ("default", lambda: _together(setting, bare, held=False))]
        for ratio in RATIOS:

            def shared(ratio: tuple[float, float] = ratio) -> Cell:
                _tenants(setting, ratio)
                return _together(setting, hooked, held=True)

            steps.append((_ratio(ratio), shared))
        for key, make in steps:
            if f"{KEY}/{name}/{key}" not in setting.results:
                budget.need(setting.seconds + 10)
                note(f"shares: {name}, {key}")
                setting.keep(f"{KEY}/{name}/{key}", make)


def _four(
    setting: Setting, stack: ExitStack, workload: str, first: tuple[str, ...], second: tuple[str, ...], label: str
) -> tuple[list[Program], list[Program]]:
    """Start both programs twice, without and with the hook, at the same time. Return (programs without the hook,
    programs with it)."""
    programs = []
    for how in ("bare", "hook"):
        for tenant, arguments in (("first", first), ("second", second)):
            program = setting.begin(
                workload, *arguments, label=f"{label}-{tenant}-{how}", tenant=tenant if how == "hook" else None
            )
            stack.callback(program.end)
            programs.append(program)
    for program in programs:
        program.ready(setting.start_s)
    return programs[:2], programs[2:]


def _together(setting: Setting, programs: list[Program], *, held: bool) -> Cell:
    for program in programs:
        program.send("run", settle=_SETTLE * setting.seconds, seconds=setting.seconds, tail=_TAIL * setting.seconds)
    cell: Cell = {}
    if held:
        time.sleep(_SETTLE * setting.seconds)
        before, begin = setting.agent.accounts(), time.monotonic()
        time.sleep(max(0.0, setting.seconds - 2.5))
        after, spent = setting.agent.accounts(), time.monotonic() - begin
        for figure, each in after.items():
            gained = [each[name] - before[figure][name] for name in ("first", "second")]
            cell[figure] = gained if figure == "surcharged" else [part / spent for part in gained]
    cell["rates"] = [float(program.answer(setting.patience_s(setting.seconds))["rate"]) for program in programs]
    return cell


def _noisy(setting: Setting, budget: Budget) -> None:
    workload, kind = ("torch_work", "matmul") if setting.torch else ("driver_kernels", "long")
    quiet = "launches" if setting.torch else "micro"
    _tenants(setting, (SERVICE, NEIGHBOUR))
    with ExitStack() as stack:
        bare, hooked = _four(setting, stack, workload, ("--kind", quiet), ("--kind", kind), "noisy")

        def infer(program: Program, *, rate: float, seconds: float) -> Cell:
            return program.ask("infer", seconds=seconds, rate=rate, seed=_SEED, timeout_s=setting.patience_s(seconds))

        def trial() -> Cell:
            # the first requests take longer, because the program compiles, loads and allocates
            for program in (bare[0], hooked[0]):
                infer(program, rate=20, seconds=1)
            one = infer(bare[0], rate=20, seconds=max(1.0, setting.seconds / 4))
            return {"rate": min(300.0, max(2.0, _LOAD / (one["p50_ms"] / 1e3)))}

        def with_copies(pair: list[Program], rate: float) -> Cell:
            pair[1].send("run", settle=0.5, seconds=setting.seconds, tail=1.0)
            time.sleep(0.5)
            cell = dict(infer(pair[0], rate=rate, seconds=setting.seconds))
            return cell | {"noise": pair[1].answer(setting.patience_s(setting.seconds))["rate"]}

        def interactive() -> Cell:
            _tenants(setting, (SERVICE, NEIGHBOUR), interactive=True)
            time.sleep(_READ_S)
            return with_copies(hooked, rate)

        note("noisy neighbour: trial")
        rate = float(setting.results.measure(f"{NOISY}/trial", trial)["rate"])
        steps = (
            ("alone", lambda: infer(bare[0], rate=rate, seconds=setting.seconds) | {"asked": rate}),
            ("neighbour alone", lambda: bare[1].ask(
                "run", settle=0.5, seconds=setting.seconds / 2, timeout_s=setting.patience_s(setting.seconds))),
            ("default", lambda: with_copies(bare, rate)),
            ("shared", lambda: with_copies(hooked, rate)),
            ("interactive", interactive),
        )  # fmt: skip
        for key, make in steps:
            if f"{NOISY}/{key}" not in setting.results:
                budget.need(setting.seconds + 10)
                note(f"noisy neighbour: {key}")
                setting.keep(f"{NOISY}/{key}", make)


def show(setting: Setting) -> str:
    """Return both tables as Markdown."""
    return _show_shares(setting) + "\n" + _show_noisy(setting)


def _show_shares(setting: Setting) -> str:
    rows = []
    for name in workloads(setting):
        alone = setting.results.get(f"{KEY}/{name}/alone")
        for key in _keys()[1:]:
            cell = setting.results.get(f"{KEY}/{name}/{key}")
            asked = "default time slicing" if key == "default" else key
            if cell is None or alone is None or "failed" in cell or "failed" in alone:
                rows.append([name, asked, *setting.missing(cell, 6)])
                continue
            got = [100 * rate / alone["rate"] for rate in cell["rates"]]
            off, held, more, turns = "", "", "", ""
            if key != "default":
                due = [float(part) for part in key.split(":")]
                off = f"{max(abs(one - other) for one, other in zip(got, due, strict=True)):.1f}"
                held = " : ".join(f"{100 * part:.1f}" for part in cell["held"])
                more = " : ".join(f"{part:.2f}" for part in cell["surcharged"])
                turns = " : ".join(f"{part:.0f}" for part in cell["turns"])
            works = " : ".join(f"{part:.1f}" for part in got)
            rows.append([name, asked, works, off, held, turns, more, f"{sum(got):.1f} %"])
    head = (
        "both run", "asked", "got, % of alone", "points off", "held, % of time", "turns a second", "surcharged, s",
        "work in sum",
    )  # fmt: skip
    return table("(b) Shares of two busy tenants", head, rows)


def _show_noisy(setting: Setting) -> str:
    rows = []
    alone = setting.results.get(f"{NOISY}/neighbour alone")
    for key, what in (
        ("alone", "the service alone, no hook"),
        ("default", "with the neighbour, default time slicing"),
        ("shared", "with the neighbour, SharePod 30:70"),
        ("interactive", "the same, the service Interactive"),
    ):
        cell = setting.results.get(f"{NOISY}/{key}")
        if cell is None or "failed" in cell:
            rows.append([what, *setting.missing(cell, 5)])
            continue
        noise = ""
        if "noise" in cell and alone is not None and "rate" in alone:
            noise = f"{100 * cell['noise'] / alone['rate']:.1f} %"
        figures = [f"{cell[name]:.1f}" for name in ("p50_ms", "p90_ms", "p99_ms", "max_ms")]
        rows.append([what, *figures, noise])
    asked = setting.results.get(f"{NOISY}/alone") or {}
    rate = f", {asked['asked']:.0f} requests/s" if "asked" in asked else ""
    head = (f"a small service{rate}", "p50 ms", "p90 ms", "p99 ms", "longest ms", "neighbour's work, of alone")
    return table("(b) A noisy neighbour", head, rows)
