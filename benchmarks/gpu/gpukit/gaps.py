"""Table (g): programs that leave gaps, bare, in exclusive turns, and co-running.

`got` is the work relative to the same work without neighbour and hook, as in table (b). `by the agent` is the same
figure from the counters of the tenants' own hooks, on which charges are based. If the two differ by more than five
points, launches do not show the work of these programs.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from gpukit.agent import AgentError, Tenant
from gpukit.programs import Program, ProgramError
from gpukit.results import Budget, Cell, table
from gpukit.setting import Setting, note

KEY = "gaps"
LATENCIES = "gap waits"
NAMES = ("first", "second", "third", "fourth", "fifth", "sixth", "seventh", "eighth", "ninth")
_SETTLE = 0.3
_TAIL = 0.05
_MODES = ("bare", "exclusive", "concurrent")
_NOTEBOOKS = 8
_CELLS_PER_S = 2.5
_SERVICE_PER_S = 39.0
_RANKS = 2
_REQUESTS = {"service": (0.3, 0.7), "notebooks": (0.06,) * _NOTEBOOKS, "notebooks + busy": (0.5, *(0.06,) * _NOTEBOOKS)}


@dataclass(frozen=True)
class Part:
    """One program: its workload, its kind, and more arguments."""

    workload: str
    kind: str
    more: tuple[str, ...] = ()

    @property
    def arguments(self) -> tuple[str, ...]:
        """Return the workload's arguments."""
        return ("--kind", self.kind, *self.more)


@dataclass(frozen=True)
class Mix:
    """Programs that run at the same time, and the requests at which they are measured, in hundredths of a GPU."""

    parts: tuple[Part, ...]
    requests: tuple[tuple[int, ...], ...]


LONG = Part("driver_kernels", "long", ("--kernel-us", "250000"))


def mixes(setting: Setting) -> dict[str, Mix]:
    """Return the mixes of programs: with PyTorch, or with the driver API if PyTorch is not installed."""
    if setting.torch:
        eager, busy, decode = Part("torch_work", "train"), Part("torch_work", "matmul"), Part("torch_work", "decode")
    else:
        eager, busy, decode = Part("driver_gaps", "eager"), Part("driver_kernels", "small"), None
    found = {
        "eager + eager": Mix((eager, eager), ((10, 90), (30, 70), (50, 50))),
        "eager + busy": Mix((eager, busy), ((10, 90), (50, 50), (90, 10))),
        "eager + kernels of 250 ms": Mix((eager, LONG), ((50, 50),)),
        "three eager": Mix((eager, eager, eager), ((20, 30, 50),)),
    }
    if decode is not None:
        found["decode + decode"] = Mix((decode, decode), ((10, 90), (50, 50)))
        found["decode + busy"] = Mix((decode, busy), ((50, 50),))
    if setting.gpu.fake:  # figures of the fake driver have no meaning, so one mix of each kind tests the kit
        return {name: Mix(mix.parts, mix.requests[-1:]) for name, mix in found.items()}
    return found


class _Tenants:
    """Tenants of this run. Each call of `set` changes their memory a little, so that the agent's files show that it has
    read the change."""

    def __init__(self, setting: Setting) -> None:
        self._setting = setting
        self._calls = itertools.count(1)

    def set(
        self, requests: Sequence[float], *, co_running: bool, interactive: bool = False, group: str | None = None
    ) -> None:
        """Create one tenant for each request. `interactive`: the first tenant requests short waits."""
        memory = self._setting.gpu.memory // (len(requests) + 1) - (next(self._calls) << 20)
        self._setting.agent.set(
            *(
                Tenant(name, request, 1.0, memory, interactive and name == NAMES[0], co_running, group)
                for name, request in zip(NAMES, requests, strict=False)
            )
        )


def measure(setting: Setting, budget: Budget) -> None:
    """Measure all cells that have no result yet. Raises `OutOfTime`."""
    tenants = _Tenants(setting)
    for name, mix in mixes(setting).items():
        _steps(setting, budget, len(mix.parts), _keys(name, mix), partial(_mix, setting, tenants, name, mix))
    for neighbour, part in _neighbours(setting).items():
        keys = [f"{LATENCIES}/service + {neighbour}/{way}" for way in ("alone", "neighbour", *_MODES, "interactive")]
        _steps(setting, budget, 2, keys, partial(_service, setting, tenants, neighbour, part))
    for name, ways in (("notebooks", _MODES), ("notebooks + busy", ("neighbour", *_MODES))):
        keys = [f"{LATENCIES}/{name}/{way}" for way in ways]
        _steps(setting, budget, len(_REQUESTS[name]), keys, partial(_notebooks, setting, tenants, name))
    _steps(setting, budget, _RANKS, [f"{KEY}/ranks/{way}" for way in _MODES], partial(_ranks, setting, tenants))


Step = tuple[str, Callable[[], Cell]]


def _steps(
    setting: Setting, budget: Budget, programs: int, keys: Sequence[str], steps: Callable[[ExitStack], list[Step]]
) -> None:
    """Start the programs of a case, and measure its cells that have no result yet."""
    if all(key in setting.results for key in keys):
        return
    budget.need(setting.expected_s(windows=1, window_s=_window(setting)) + programs)
    try:
        with ExitStack() as stack:
            for key, make in steps(stack):
                if key not in setting.results:
                    budget.need(_window(setting) + 10)
                    note(key)
                    setting.keep(key, make)
    except (ProgramError, AgentError) as error:
        note(f"  failed: {error}")
        for key in keys:
            if key not in setting.results:
                setting.results.put(key, {"failed": str(error)})


def _window(setting: Setting) -> float:
    """Return the length of one measurement in seconds. It is half as long as in the tables of shares, because this
    table has more measurements."""
    return setting.seconds / 2


def _start(setting: Setting, stack: ExitStack, label: str, parts: Sequence[Part]) -> dict[bool, list[Program]]:
    """Start each program twice, without the hook and with it. Return the programs by whether they run under the
    hook."""
    rows: dict[bool, list[Program]] = {False: [], True: []}
    for hooked, row in rows.items():
        for name, part in zip(NAMES, parts, strict=False):
            how = "hook" if hooked else "bare"
            program = setting.begin(
                part.workload, *part.arguments, label=f"{label}-{name}-{how}", tenant=name if hooked else None
            )
            stack.callback(program.end)
            row.append(program)
    for program in (*rows[False], *rows[True]):
        program.ready(setting.start_s)
    return rows


def _run(setting: Setting, *, seconds: float | None = None) -> dict[str, float]:
    seconds = _window(setting) if seconds is None else seconds
    return {"settle": _SETTLE * seconds, "seconds": seconds, "tail": _TAIL * seconds}


def _rate(setting: Setting, program: Program) -> Cell:
    answer = program.ask("run", **_run(setting), timeout_s=setting.patience_s(_window(setting)))
    return {"rate": answer["rate"]}


def _together(setting: Setting, programs: Sequence[Program], *, hooked: bool) -> Cell:
    seconds, cell = _window(setting), {}
    for program in programs:
        program.send("run", **_run(setting))
    if hooked:
        time.sleep(_SETTLE * seconds)
        before, begin = setting.agent.progress(), time.monotonic()
        time.sleep(max(0.0, seconds - 2.5))
        after, spent = setting.agent.progress(), time.monotonic() - begin
        cell["by_agent"] = [(after[name] - before[name]) / spent for name in NAMES[: len(programs)]]
    rates = [float(program.answer(setting.patience_s(seconds))["rate"]) for program in programs]
    return cell | {"rates": rates}


def _asked(requests: Sequence[int]) -> str:
    return ":".join(str(request) for request in requests)


def _keys(name: str, mix: Mix) -> list[str]:
    ways = [f"{_asked(requests)} {mode}" for requests in mix.requests for mode in _MODES[1:]]
    alone = [f"alone {place}" for place in range(len(mix.parts)) if mix.parts[place] not in mix.parts[:place]]
    return [f"{KEY}/{name}/{way}" for way in (*alone, "bare", *ways)]


def _mix(setting: Setting, tenants: _Tenants, name: str, mix: Mix, stack: ExitStack) -> list[Step]:
    tenants.set([request / 100 for request in mix.requests[-1]], co_running=True)
    rows = _start(setting, stack, f"gaps-{name.replace(' ', '-')}", mix.parts)

    def shared(requests: tuple[int, ...], mode: str) -> Cell:
        tenants.set([request / 100 for request in requests], co_running=mode == "concurrent")
        return _together(setting, rows[True], hooked=True)

    makes: list[Callable[[], Cell]] = []
    for place, part in enumerate(mix.parts):
        if part not in mix.parts[:place]:
            makes.append(lambda place=place: _rate(setting, rows[False][place]))  # type: ignore[misc]
    makes.append(lambda: _together(setting, rows[False], hooked=False))
    for requests in mix.requests:
        for mode in _MODES[1:]:
            makes.append(lambda requests=requests, mode=mode: shared(requests, mode))  # type: ignore[misc]
    return list(zip(_keys(name, mix), makes, strict=True))


def _neighbours(setting: Setting) -> dict[str, Part]:
    busy = Part("torch_work", "matmul") if setting.torch else Part("driver_kernels", "small")
    return {"busy": busy, "kernels of 250 ms": LONG}


def _infer(setting: Setting, program: Program, *, seconds: float, rate: float, seed: int = 1) -> Cell:
    return program.ask("infer", seconds=seconds, rate=rate, seed=seed, timeout_s=setting.patience_s(seconds))


def _service(setting: Setting, tenants: _Tenants, neighbour: str, part: Part, stack: ExitStack) -> list[Step]:
    own = Part("torch_work", "launches") if setting.torch else Part("driver_kernels", "micro")
    tenants.set(_REQUESTS["service"], co_running=True)
    rows = _start(setting, stack, f"service-{neighbour.replace(' ', '-')}", (own, part))
    seconds = _window(setting)
    # the first requests take longer, because the program compiles, loads and allocates
    for service in (rows[False][0], rows[True][0]):
        _infer(setting, service, seconds=min(1.0, seconds), rate=_SERVICE_PER_S)

    def next_to(mode: str) -> Cell:
        if mode != "bare":
            tenants.set(_REQUESTS["service"], co_running=mode != "exclusive", interactive=mode == "interactive")
        service, other = rows[mode != "bare"]
        other.send("run", settle=_SETTLE * seconds, seconds=seconds, tail=_TAIL * seconds)
        time.sleep(_SETTLE * seconds)
        cell = _infer(setting, service, seconds=seconds, rate=_SERVICE_PER_S)
        return cell | {"neighbour": other.answer(setting.patience_s(seconds))["rate"]}

    ways: dict[str, Callable[[], Cell]] = {
        "alone": lambda: _infer(setting, rows[False][0], seconds=seconds, rate=_SERVICE_PER_S),
        "neighbour": lambda: _rate(setting, rows[False][1]),
        **{mode: lambda mode=mode: next_to(mode) for mode in (*_MODES, "interactive")},  # type: ignore[misc]
    }
    return [(f"{LATENCIES}/service + {neighbour}/{way}", make) for way, make in ways.items()]


def _notebooks(setting: Setting, tenants: _Tenants, name: str, stack: ExitStack) -> list[Step]:
    """Return the steps of eight notebooks, each of which has work in flight for an eighth of the time. `name`: decides
    whether a training runs next to them."""
    busy = name != "notebooks"
    training = (Part("driver_kernels", "small", ("--kernel-us", "5000")),) if busy else ()
    tenants.set(_REQUESTS[name], co_running=True)
    rows = _start(setting, stack, name.replace(" ", "-"), (*training, *(Part("driver_gaps", "notebook"),) * _NOTEBOOKS))
    seconds = _window(setting)

    def together(mode: str) -> Cell:
        if mode != "bare":
            tenants.set(_REQUESTS[name], co_running=mode == "concurrent")
        programs = rows[mode != "bare"]
        cell: Cell = {}
        for program in programs[: len(training)]:
            program.send("run", **_run(setting))
        time.sleep(_SETTLE * seconds)
        cells = programs[len(training) :]
        for place, program in enumerate(cells):
            program.send("infer", seconds=seconds, rate=_CELLS_PER_S, seed=place)
        answers = [program.answer(setting.patience_s(seconds)) for program in cells]
        waits = sorted(wait for answer in answers for wait in answer.get("latencies_ms", ()))
        for program in programs[: len(training)]:
            cell["neighbour"] = program.answer(setting.patience_s(seconds))["rate"]
        if not waits:
            return cell | {"requests": 0}
        parts = {f"p{part}_ms": waits[min(len(waits) - 1, len(waits) * part // 100)] for part in (50, 90, 99)}
        return cell | parts | {"max_ms": waits[-1], "requests": len(waits)}

    ways: dict[str, Callable[[], Cell]] = {"neighbour": lambda: _rate(setting, rows[False][0])} if busy else {}
    ways |= {mode: lambda mode=mode: together(mode) for mode in _MODES}  # type: ignore[misc]
    return [(f"{LATENCIES}/{name}/{way}", make) for way, make in ways.items()]


def _ranks(setting: Setting, tenants: _Tenants, _stack: ExitStack) -> list[Step]:
    """Return the steps of two ranks of one training on one GPU. Each rank is a tenant. In a collective, a kernel spins
    until both ranks have arrived."""
    seconds = _window(setting)

    def together(mode: str) -> Cell:
        if mode != "bare":
            tenants.set((0.5,) * _RANKS, co_running=mode == "concurrent", group="ranks")
        meet = Path(setting.logs / f"meet-{mode}")
        meet.unlink(missing_ok=True)
        part = Part("driver_gaps", "rank", ("--meet", str(meet), "--ranks", str(_RANKS)))
        with ExitStack() as stack:
            programs = []
            for name in NAMES[:_RANKS]:
                label, tenant = f"ranks-{name}-{mode}", None if mode == "bare" else name
                program = setting.begin(part.workload, *part.arguments, label=label, tenant=tenant)
                stack.callback(program.end)
                program.ready(setting.start_s)
                programs.append(program)
            for program in programs:
                program.send("run", settle=_SETTLE * seconds, seconds=seconds)
            return {"rates": [float(program.answer(setting.patience_s(seconds))["rate"]) for program in programs]}

    return [(f"{KEY}/ranks/{mode}", lambda mode=mode: together(mode)) for mode in _MODES]  # type: ignore[misc]


def show(setting: Setting) -> str:
    """Return the three tables as Markdown."""
    return "\n".join((_show_mixes(setting), _show_waits(setting), _show_ranks(setting)))


def _show_mixes(setting: Setting) -> str:
    rows = []
    for name, mix in mixes(setting).items():
        cells = {key.rpartition("/")[2]: setting.results.get(key) for key in _keys(name, mix)}
        places = [mix.parts.index(part) for part in mix.parts]
        alone = [cells[f"alone {place}"] for place in places]
        bare = cells["bare"]
        for way, cell in cells.items():
            if way.startswith("alone"):
                continue
            if cell is None or any(known is None or "failed" in known for known in (cell, bare, *alone)):
                rows.append([name, way, *setting.missing(cell, 5)])
                continue
            got, by_bare = _got(cell, alone), _got(bare, alone)
            below, agent = "", ""
            if way != "bare":
                asked = [float(part) for part in way.split(" ")[0].split(":")]
                below = f"{max(0.0, *(one - other for one, other in zip(asked, got, strict=True))):.1f}"
                agent = " : ".join(f"{100 * part:.1f}" for part in cell["by_agent"])
            each = " : ".join(f"{part:.1f}" for part in got)
            rows.append([name, way, each, f"{sum(got):.1f} %", f"{sum(got) / sum(by_bare):.2f}", below, agent])
    head = ("all run", "asked", "got, % of alone", "sum", "of bare", "points below request", "got by the agent")
    return table("(g) Programs with gaps", head, rows)


def _got(cell: Cell | None, alone: Sequence[Cell | None]) -> list[float]:
    assert cell is not None
    return [100 * rate / one["rate"] for rate, one in zip(cell["rates"], alone, strict=True) if one is not None]


def _show_waits(setting: Setting) -> str:
    rows = []
    services = [f"service + {neighbour}" for neighbour in _neighbours(setting)]
    for name in (*services, "notebooks", "notebooks + busy"):
        ways = [*(("alone",) if name in services else ()), *_MODES, *(("interactive",) if name in services else ())]
        whole = setting.results.get(f"{LATENCIES}/{name}/neighbour")
        for way in ways:
            cell = setting.results.get(f"{LATENCIES}/{name}/{way}")
            if cell is None or "p50_ms" not in cell:
                rows.append([name, way, *setting.missing(cell, 5)])
                continue
            share = ""
            if "neighbour" in cell and whole is not None and "rate" in whole:
                share = f"{100 * cell['neighbour'] / whole['rate']:.1f} %"
            figures = [f"{cell[figure]:.1f}" for figure in ("p50_ms", "p90_ms", "p99_ms", "max_ms")]
            rows.append([name, way, *figures, share])
    head = ("requests", "how", "p50 ms", "p90 ms", "p99 ms", "longest ms", "neighbour's work, of alone")
    return table("(g) Waits of services and notebooks", head, rows)


def _show_ranks(setting: Setting) -> str:
    rows = []
    for mode in _MODES:
        cell = setting.results.get(f"{KEY}/ranks/{mode}")
        if cell is None or "failed" in cell:
            steps = setting.missing(cell, 1)
        else:
            steps = [" : ".join(f"{rate:.1f}" for rate in cell["rates"])]
        rows.append([mode, *steps])
    return table("(g) Two ranks of one training on this GPU, as a group", ("how", "steps/s"), rows)
