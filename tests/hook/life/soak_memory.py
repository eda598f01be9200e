"""Random memory calls of several processes of one tenant, from one seed, checked after each step: `make soak-memory`.

The real agent and the real hook run on the double with two GPUs. The steps are:
- every way to take memory and to free it, and calls that must fail;
- allocations that all processes make at the same time;
- processes that are killed, and an agent that is killed and started again;
- limits that are raised and lowered.

Guarantees that are checked for each GPU after each step:
- The agent's ledger and the driver report the same memory use of the processes.
- Their use is not more than the limit. If the limit was lowered, their use is not more than before the step.
- A refused allocation would not have fitted.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import tempfile
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from harness.soak import Run
from harness.standstill import Standstill
from hook.world.agent_node import FAKE_CUDA, GPUS, Node, running, tenant, wait_for
from hook.world.allocating import CAPTURED, CONTEXTS, MODULES, PAGE, WAYS, take
from hook.world.caller import Caller, DriverError, Out
from hook.world.ledger_and_driver import Driver, Observer, ledger_use
from hook.world.memory_moves import MOVES, Held, Move
from sharepod.agent.state import handover

MIB = 1 << 20
LIMITS = (512 * MIB, 768 * MIB, 1024 * MIB)
CONTEXT = 32 * MIB
ON = GPUS[:2]
"""GPUs of the tenant. Each has a ledger of its own."""
HANDOVER = "state/handover/a"
"""File in which the agent stores its ledgers, by process."""
PROCESSES = 4
MOST_HELD = 24
OUT_OF_MEMORY = 2
IDLE_MOST = 34 * MIB
"""Bytes of credits that a process may have beyond its use: 32 MiB idle credits and the step of 2 MiB, as in
credits.c.
"""
POOL_STEP = 32 * MIB
"""Bytes by which the hook expects a pool to grow until it has seen the driver's step, as in pool_calls.c."""
AGREE_S = 5.0
"""Seconds within which ledger and driver must agree. Until then both are read again: a process may be returning idle
credits, or the agent may answer late.
"""
WANTED = {"mismatches": 0, "bytes over the limit": 0, "refused in vain": 0, "unexpected errors": 0}

EXACT = (
    "cuMemAlloc_v2", "cuMemAllocManaged", "cuMemAllocPitch_v2", "cuArrayCreate_v2", "cuArray3DCreate_v2", "cuMemCreate",
    "cuMemMap", "cuMemRetainAllocationHandle", "cuMemImportFromShareableHandle", "cuMemMapArrayAsync",
)  # fmt: skip
"""Functions that take exactly the requested bytes. So they may be refused only if these bytes do not fit."""
OLD = ("cuMemAlloc", "cuMemAllocPitch")
"""Functions with 32-bit addresses. Long runs do not call them, because the double uses each address only once."""
OTHERS = tuple(way for way in WAYS if way not in {*EXACT, *OLD, *CONTEXTS, *MODULES})


class WrongError(Exception):
    """Ledger and driver disagree, or the limit was exceeded.

    Args:
        count: Count of WANTED that is wrong.
        by: Difference from the expected value.
    """

    def __init__(self, count: str, what: str, by: int = 1) -> None:
        super().__init__(what)
        self.count = count
        self.by = by


class Process:
    """One process of the tenant, on one of its GPUs, and the memory that it holds."""

    def __init__(self, environment: dict[str, str], gpu: int) -> None:
        self.caller = Caller(environment | {"CUDA_VISIBLE_DEVICES": str(gpu)})
        self.gpu = gpu
        self.held: list[Held] = []

    def begin(self) -> bool:
        """Create the process's context. Return False if the context does not fit into the limit."""
        try:
            self.caller.start()
        except DriverError as error:
            if error.code != OUT_OF_MEMORY:
                raise
            return False
        return True


class Soak:
    """One run on one node."""

    def __init__(self, run: Run, node: Node, limit: int, standstill: Standstill) -> None:
        self.random: random.Random = run.random
        self.run = run
        self.node = node
        self.limit = limit
        self.standstill = standstill
        self.used = [0] * len(ON)
        self.observer = Observer(node.path("a") / "agent.sock")
        self.driver = Driver(node.state)
        self.processes: list[Process] = []
        self.counts = Counter(dict.fromkeys(("steps", "calls", *WANTED), 0))
        self.latest: deque[str] = deque(maxlen=12)
        self._environment = dict(os.environ) | {
            "LD_LIBRARY_PATH": str(FAKE_CUDA),
            "LD_PRELOAD": str(node.path("a") / "libsharepod.so"),
            "FAKE_CUDA_STATE": str(node.state),
            "FAKE_CUDA_VISIBLE": ",".join(ON),
            "FAKE_CUDA_LABEL": "a",
            "FAKE_CUDA_POOL_CHUNK": str(self.random.choice((2, 8, 32)) * MIB),
        }

    def go(self) -> None:
        """Take random steps until the time is over. Raise WrongError if a guarantee is broken."""
        events: list[tuple[float, Callable[[], str]]] = [
            (0.004, self.kill),
            (0.004, self.change_limit),
            (0.001, self.restart_agent),
            (0.03, self.all_at_once),
            (0.2, self.move),
            (0.33, self.give),
        ]
        try:
            while not self.run.over():
                if len(self.processes) < PROCESSES:
                    self.spawn()
                    self.check_all()
                chance = self.random.random()
                step: Callable[[], str] = self.take
                for share, event in events:
                    chance -= share
                    if chance < 0:
                        step = event
                        break
                self.counts["steps"] += 1
                self.latest.append(f"{self.counts['steps']} {step.__name__}")
                what = step()
                self.latest[-1] = f"{self.counts['steps']} {what}"
                self.check_all()
        except WrongError as wrong:
            self.counts[wrong.count] += wrong.by
            self.report(str(wrong))
        except (DriverError, AssertionError, EOFError) as error:
            self.counts["unexpected errors"] += 1
            self.report(f"{type(error).__name__}: {error}")
        finally:
            self.counts["calls"] += sum(process.caller.calls for process in self.processes)

    def report(self, what: str) -> None:
        print(f"WRONG: {what}\nthe latest steps:")
        for step in self.latest:
            print(f"  {step}")
        counted = {left.pid: left.bytes for left in handover.read(self.node.directory / HANDOVER, ON).survivors}
        for process in self.processes:
            pid, gpu = process.caller.pid, process.gpu
            held = ", ".join(held.name for held in process.held)
            has, counts = self.driver.memory(pid, gpu), counted.get(pid, [0] * len(ON))[gpu]
            print(f"  process {pid} has {has:,} of GPU {gpu}, the agent counts {counts:,} for it: {held}")
        self.tell_after_asking()
        print((self.node.directory / "agent.log").read_text()[-2000:])

    def tell_after_asking(self) -> None:
        """Print the free memory that each process reports, and the ledgers before and after these queries: a query
        makes the hook send reports.
        """
        with contextlib.suppress(DriverError, AssertionError, EOFError, OSError):
            print(f"  ledgers before: {[f'{self.observer.ask(gpu).used:,}' for gpu in range(len(ON))]}")
            for process in self.processes:
                free, _ = process.caller.ok("cuMemGetInfo_v2", Out(8), Out(8))
                print(f"  process {process.caller.pid} reads {int.from_bytes(free, 'little'):,} free")
            print(f"  ledgers after: {[f'{self.observer.ask(gpu).used:,}' for gpu in range(len(ON))]}")

    def close(self) -> None:
        for process in self.processes:
            process.caller.close()
        self.observer.close()
        self.driver.close()

    # ---- guarantees

    def on(self, gpu: int) -> list[Process]:
        return [process for process in self.processes if process.gpu == gpu]

    def use(self, gpu: int) -> int:
        return sum(self.driver.memory(process.caller.pid, gpu) for process in self.on(gpu))

    def check_all(self) -> None:
        for gpu in range(len(ON)):
            self.check(gpu)

    def check(self, gpu: int) -> None:
        callers = [process.caller for process in self.on(gpu)]
        begun, stood = time.monotonic(), self.standstill.seconds
        while True:
            used = self.use(gpu)
            granted = self.granted(gpu, callers, used)
            if granted == used == self.use(gpu):
                break
            if time.monotonic() - begun - (self.standstill.seconds - stood) > AGREE_S:
                raise WrongError("mismatches", f"of GPU {gpu} the ledger has {granted:,}, the driver {used:,}")
            self.counts["read again"] += 1
            time.sleep(0.001)
        most = max(self.limit, self.used[gpu])
        if used > most:
            what = f"{used:,} of GPU {gpu} are in use, of {self.limit:,}; {self.used[gpu]:,} were before"
            raise WrongError("bytes over the limit", what, used - most)
        self.used[gpu] = used

    def granted(self, gpu: int, callers: list[Caller], used: int) -> int:
        """Return the bytes that the ledger counts as in use.

        While the credits exceed a lowered limit, processes report no free memory, whatever they use. So idle credits
        count as used: the ledger's bytes must be the bytes that the driver has taken, plus at most `IDLE_MOST` for each
        process.
        """
        credited = self.observer.ask(gpu).used
        if credited < used:  # this also applies while the querying process is not connected to an agent
            return credited
        if callers and credited <= self.limit:
            return ledger_use(self.observer, callers, gpu)
        return used if used <= credited <= used + IDLE_MOST * len(callers) else credited

    # ---- steps

    def size(self, gpu: int) -> int:
        """Return a random size of whole pages. Sometimes it is exactly the bytes that are left, or one page more."""
        chance = self.random.random()
        left = max(0, self.limit - self.use(gpu)) // (4 * MIB) * 4 * MIB
        if chance < 0.1 and left:
            return left + self.random.choice((0, 4 * MIB))
        return self.random.choice((4, 4, 8, 12, 24, 64, 160)) * MIB

    def take(self) -> str:
        process = self.random.choice(self.processes)
        way = self.random.choice(EXACT if self.random.random() < 0.6 else OTHERS)
        size = self.size(process.gpu)
        if way.startswith("cuMemAlloc") and way in EXACT and self.random.random() < 0.4:
            way, size = "cuMemAlloc_v2", self.random.choice((1, 512, 513, 100_000, 3 * MIB + 7))
        if len(process.held) >= MOST_HELD:
            return self.give(process)
        what = f"{way}({size:,}) by {process.caller.pid}"
        if way.removesuffix(CAPTURED) == "cuCtxSetLimit" and any(held.name == way for held in process.held):
            return self.give(process)
        before = self.use(process.gpu)
        try:
            process.held.append(Held(way, take(way, process.caller, size)))
        except DriverError as error:
            return self.refused(error, what, before, self.most(way, size))
        self.counts["taken"] += 1
        return what

    def most(self, way: str, size: int) -> int:
        """Return the largest number of bytes that the function may take for `size`."""
        if way in EXACT or way == "cuCtxSetLimit":
            return (size + 511) & ~511
        if "Async" in way and CAPTURED not in way:
            return (size + POOL_STEP - 1) // POOL_STEP * POOL_STEP
        return 2 * size if "Mipmap" in way else (size + PAGE - 1) // PAGE * PAGE

    def refused(self, error: DriverError, what: str, before: int, most: int | None) -> str:
        if error.code != OUT_OF_MEMORY:
            raise error
        self.counts["refused"] += 1
        if most is not None and before + most <= self.limit:
            raise WrongError("refused in vain", f"{what} was refused with {before:,} of {self.limit:,} in use")
        return f"{what}: refused"

    def give(self, of: Process | None = None) -> str:
        process = of or self.random.choice(self.processes)
        if not process.held:
            return "nothing to give"
        held = process.held.pop(self.random.randrange(len(process.held)))
        held.give.close()
        self.counts["given"] += 1
        return f"{held.name} given back by {process.caller.pid}"

    def move(self) -> str:
        """Run one function of memory_moves.py. Return its name."""
        process = self.random.choice(self.processes)
        others = [other.caller for other in self.on(process.gpu) if other is not process]
        move: Move = self.random.choice(MOVES)
        what = f"{move.__name__} by {process.caller.pid}"
        if len(process.held) >= MOST_HELD:
            return self.give(process)
        try:
            held = move(process.caller, self.size(process.gpu), self.random, others)
        except DriverError as error:
            # the function makes several calls, and it is not known which one was refused
            return self.refused(error, what, 0, None)
        if held is not None:
            process.held.append(held)
        self.counts["moves"] += 1
        return what

    def all_at_once(self) -> str:
        """Let all processes of a GPU request the same size at the same time. Exactly as many requests must
        succeed as fit."""
        gpu = self.random.choice(self.processes).gpu
        asking, size, before = self.on(gpu), self.size(gpu), self.use(gpu)
        for process in asking:
            process.caller.post("cuMemAlloc_v2", Out(8), size)
        got = 0
        for process in asking:
            code, (address,) = process.caller.answer()
            if code == 0:
                got += 1
                free = ExitStack()
                free.callback(process.caller.ok, "cuMemFree_v2", int.from_bytes(address, "little"))
                process.held.append(Held("cuMemAlloc_v2", free))
            elif code != OUT_OF_MEMORY:
                raise DriverError("cuMemAlloc_v2", code)
        what = f"{size:,} for each of {len(asking)}: {got} got it"
        if got < len(asking) and before + (got + 1) * size <= self.limit:
            raise WrongError("refused in vain", f"{what}, with {before:,} of {self.limit:,} in use before")
        self.counts["all at once"] += 1
        return what

    def spawn(self) -> None:
        process = Process(self._environment, self.random.randrange(len(ON)))
        if process.begin():
            self.processes.append(process)
            return
        process.caller.close()
        self.counts["calls"] += process.caller.calls
        if self.processes:
            self.give()
        else:
            raise WrongError("refused in vain", "a context, and no process is left")

    def kill(self) -> str:
        """Kill a process, in half of the cases in the middle of a call."""
        process = self.processes.pop(self.random.randrange(len(self.processes)))
        if self.random.random() < 0.5:
            process.caller.post("cuMemAlloc_v2", Out(8), self.size(process.gpu))
        process.caller.kill()
        process.caller.close()
        self.driver.forget(process.caller.pid)
        self.counts["calls"] += process.caller.calls
        self.counts["kills"] += 1
        while not self.processes:
            self.spawn()
        return f"killed {process.caller.pid}"

    def change_limit(self) -> str:
        self.limit = self.random.choice(LIMITS)
        self.node.set_tenants(_row(self.limit))
        callers = [process.caller for process in self.processes]

        def seen() -> bool:
            totals = [caller.ok("cuDeviceTotalMem_v2", Out(8), 0)[0] for caller in callers]
            return all(int.from_bytes(total, "little") == self.limit for total in totals)

        wait_for(seen, "the new limit")
        self.counts["limits"] += 1
        return f"limit {self.limit:,}"

    def restart_agent(self) -> str:
        """Kill the agent and start the next one. An allocation during that time waits, unless idle credits suffice for
        it.
        """
        process = self.random.choice(self.processes)
        size, before = self.size(process.gpu), self.use(process.gpu)
        number = self.random.choice((signal.SIGTERM, signal.SIGKILL))
        self.node.stop_agent(number)
        process.caller.post("cuMemAlloc_v2", Out(8), size)
        self.node.start_agent()
        self.observer.again()
        code, (address,) = process.caller.answer()
        what = f"agent restarted after {number.name}, {size:,} meanwhile: {code}"
        if code == 0:
            free = ExitStack()
            free.callback(process.caller.ok, "cuMemFree_v2", int.from_bytes(address, "little"))
            process.held.append(Held("cuMemAlloc_v2", free))
        elif code != OUT_OF_MEMORY:
            raise DriverError("cuMemAlloc_v2", code)
        elif before + size <= self.limit:
            raise WrongError("refused in vain", what)
        self.counts["agents"] += 1
        return what


def _row(limit: int) -> dict[str, Any]:
    return tenant("a", 0.5, gpus=ON, memory=limit)


@contextlib.contextmanager
def _node(limit: int, *, nvml: bool) -> Iterator[Node]:
    with (
        tempfile.TemporaryDirectory(prefix="sm") as directory,
        running(Path(directory), _row(limit), context_bytes=CONTEXT, nvml=nvml) as node,
    ):
        yield node


def soak(run: Run) -> dict[str, int]:
    limit = run.random.choice(LIMITS)
    nvml = run.random.random() < 0.5  # without NVML, the agent knows processes only from its ledger
    with _node(limit, nvml=nvml) as node, Standstill() as standstill:
        run.begun = time.monotonic()  # on a busy machine, the agent's start takes longer than a run
        soaking = Soak(run, node, limit, standstill)
        try:
            soaking.go()
        finally:
            soaking.close()
    counts = soaking.counts
    calls = counts.pop("calls")
    return {"nvml": int(nvml), **counts, "calls": calls, "stood still, s": round(standstill.seconds)}
