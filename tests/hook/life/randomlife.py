"""Random life under the hook, from one seed: processes under scripted agents start, stop, continue and are killed.

Each of several tenants has up to three processes with many threads. A debugger holds single threads for longer than the
grace period. The agents grant and revoke, end and come back. The double of libcuda counts each process's launches in
shared memory, which the agents read and compare with the hook's reports.

Guarantees that are checked, in addition to the guarantees of `watched_agent.py`:
- Every process ends at most `OVERDUE_S` after its planned end.
- No stream capture is broken, and no CUDA call fails.
- No stream waits for a stream that the program has blocked, full or not, unless the program has ordered the two
  streams.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from doubles.gpus import create_state
from harness.soak import Run
from hook.conftest import BUILD, DEVICE_MEMORY, GPU_0, GPU_1, Tenant, terms
from hook.life.watched_agent import THREADS_MOST, Counts, WatchedAgent
from hook.world.gate_state import Gate, caught_inside
from hook.world.held_thread import Hold
from sharepod.protocol import GpuTerms

NOTHING_OF = (
    "launches without a token",
    "launches under a barred grant",
    "drained too early",
    "hangs",
    "captures broken",
    "orders broken",
    "failed processes",
    "broken ledgers",
    "calls after an end",
)
WANTED = dict.fromkeys(NOTHING_OF, 0)
"""Counts that must be 0 at the end."""

TENANTS = 3
PROCESSES_MOST = 3
THREADS = (1, 2, 4, THREADS_MOST)
"""Numbers of threads that a process may have, without threads that these threads start."""
HUNT_LOOKS = 20
"""Consecutive attempts to find a thread inside a launch."""
OVERDUE_S = 40.0
"""Seconds after its planned end (stops excluded) at which a process counts as hanging: more than the 30 s for which an
allocation waits for an agent.
"""


@dataclass(frozen=True)
class Program:
    """Program of the random life, and the way in which the hook is loaded into it."""

    path: Path = BUILD / "programs" / "randomlife"
    linked: bool = False
    """True if the program is linked with the hook, found in the tenant's directory; otherwise the hook is preloaded."""
    more: Mapping[str, str] = field(default_factory=dict)

    def environment(self, tenant: Tenant, label: str) -> dict[str, str]:
        if not self.linked:
            return tenant.environment(label) | dict(self.more)
        environment = tenant.environment(label) | dict(self.more)
        del environment["LD_PRELOAD"]
        return environment | {"LD_LIBRARY_PATH": f"{tenant.directory}:{tenant.double}"}


@dataclass
class Life:
    """One process, and the time by which it must have ended."""

    tenant: int
    process: subprocess.Popen[bytes]
    output: Path
    until: float
    stopped_until: float | None = None
    killed: bool = False


class Soak:
    """One run of random life: call `step` until the run is over, then `finish`."""

    def __init__(self, run: Run, directory: Path, hook: Path, program: Program) -> None:
        self._run = run
        self._program = program
        self._hook = hook
        self._chance = run.random
        self._directory = directory
        self.counts: Counter[str] = Counter(dict.fromkeys(NOTHING_OF, 0))
        devices = [(gpu, "Simulated GPU", DEVICE_MEMORY) for gpu in (GPU_0, GPU_1)]
        self._state = create_state(directory / "gpus", devices)
        self._launched = Counts(self._state)
        self._tenants: list[Tenant] = []
        self.agents: list[WatchedAgent] = []
        self._away_until: dict[int, float] = {}
        self._lives: list[Life] = []
        self._holds: list[tuple[Hold, float]] = []
        """Threads that are held, and the time until which each is held."""
        self._started = 0
        for index in range(TENANTS):
            self._add_tenant(index, hook, terms(request=self._chance.choice([200, 500, 1000])))

    def _add_tenant(self, index: int, hook: Path, gpu: GpuTerms) -> None:
        folder = self._directory / f"t{index}"
        folder.mkdir()
        shutil.copy2(hook, folder / "libsharepod.so")
        tenant = Tenant(folder, self._state, BUILD / "doubles" / "libcuda", (gpu,))
        tenant.write_limits()
        self._tenants.append(tenant)
        self.agents.append(WatchedAgent(tenant, self._launched, random.Random(self._chance.random()), hook))

    def step(self) -> None:
        for index, agent in enumerate(self.agents):
            self._tend(index, agent)
        now, chance = time.monotonic(), self._chance.random()
        self._tend_holds(now)
        for life in list(self._lives):
            self._look_at(life, now)
        running = [life for life in self._lives if life.stopped_until is None and not life.killed]
        if chance < 0.05:
            self._start(self._chance.randrange(TENANTS))
        elif chance < 0.055 and running:
            self._kill(self._chance.choice(running))
        elif chance < 0.07 and running:
            self._stop(self._chance.choice(running), now)
        elif chance < 0.08 and running:
            self._hold(self._chance.choice(running), now)
        elif chance < 0.5 and running:
            self._hunt(self._chance.choice(running), now)

    def finish(self) -> None:
        """End all processes. The agents grant them the token so that they can end."""
        while self._lives:
            now = time.monotonic()
            for index, agent in enumerate(self.agents):
                if index in self._away_until:
                    self._away_until[index] = now
                self._tend(index, agent, leave=False)
            self._tend_holds(now)
            for life in list(self._lives):
                self._look_at(life, now)
            time.sleep(0.002)
        for agent in self.agents:
            self.counts.update(agent.seen)

    def close(self) -> None:
        for life in self._lives:
            life.process.kill()
            life.process.wait()
        for agent in self.agents:
            agent.close()
        self._launched.close()

    def _tend(self, index: int, agent: WatchedAgent, *, leave: bool = True) -> None:
        now = time.monotonic()
        away_until = self._away_until.get(index)
        if away_until is None:
            agent.step()
            if leave and self._chance.random() < 0.001:
                agent.vanish()
                self._away_until[index] = now + self._chance.choice([0.0, 0.05, 1.0])
                self.counts["agent restarts"] += 1
            elif self._chance.random() < 0.01:
                agent.hints.contended = not agent.hints.contended
        elif now >= away_until:
            agent.appear()
            del self._away_until[index]

    def _start(self, tenant: int) -> None:
        left = self._run.seconds - self._run.elapsed()
        if sum(life.tenant == tenant for life in self._lives) >= PROCESSES_MOST or left < 0.5:
            return
        seconds = min(self._chance.choice([0.1, 1.0, 3.0, 6.0]), left - 0.3)
        under = ["nomembarrier"] if self._chance.random() < 0.1 else []
        command: Sequence[str] = [
            *(str(BUILD / "programs" / name) for name in under),
            str(self._program.path),
            *(str(self._chance.randrange(1 << 30)), f"{seconds:.2f}", str(self._chance.choice(THREADS))),
        ]
        self._started += 1
        output = self._directory / f"life-{self._started}"
        with output.open("wb") as file:
            environment = self._program.environment(self._tenants[tenant], f"t{tenant}")
            process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, env=environment)
        self._lives.append(Life(tenant, process, output, time.monotonic() + seconds))
        self.counts["processes"] += 1

    def _kill(self, life: Life) -> None:
        life.process.kill()
        life.killed = True
        self.counts["kills"] += 1

    def _stop(self, life: Life, now: float) -> None:
        life.process.send_signal(signal.SIGSTOP)
        life.stopped_until = now + self._chance.choice([0.005, 0.1, 0.1, 1.5])
        life.until += life.stopped_until - now
        self.counts["stops"] += 1

    def _hold(self, life: Life, now: float) -> None:
        """Hold one thread of a process, perhaps the hook thread. The main thread is never held, because it only starts
        other threads and waits for them.
        """
        with contextlib.suppress(OSError):  # the thread has just ended
            tasks = {int(task.name) for task in Path(f"/proc/{life.process.pid}/task").iterdir()}
            others = sorted(tasks - {life.process.pid})
            if others:
                self._keep(Hold(self._chance.choice(others)), life, now)
                self.counts["holds"] += 1

    def _hunt(self, life: Life, now: float) -> None:
        """Hold one thread of a process inside a launch, if a thread is found there."""
        with contextlib.suppress(OSError, LookupError):  # the process has just ended, or has not used CUDA yet
            hold = caught_inside(Gate(life.process.pid, self._hook), HUNT_LOOKS)
            if hold is not None:
                self._keep(hold, life, now)
                self.counts["holds inside a launch"] += 1

    def _keep(self, hold: Hold, life: Life, now: float) -> None:
        until = now + self._chance.choice([0.02, 0.3, 1.5, 2.5])
        self._holds.append((hold, until))
        life.until += until - now

    def _tend_holds(self, now: float) -> None:
        self._holds = [
            (hold, until) for hold, until in self._holds if (not hold.release() if now >= until else hold.look())
        ]

    def _look_at(self, life: Life, now: float) -> None:
        if life.stopped_until is not None and now >= life.stopped_until:
            life.process.send_signal(signal.SIGCONT)
            life.stopped_until = None
        if life.process.poll() is not None:
            self._count(life)
        elif now > life.until + OVERDUE_S:
            self.counts["hangs"] += 1
            print(f"hangs: {_where(life.process.pid)}", flush=True)
            life.process.kill()
            life.process.wait()
            self._count(life)

    def _count(self, life: Life) -> None:
        self._lives.remove(life)
        self.counts["calls after an end"] += self._launched.misused(life.process.pid)
        lines = life.output.read_text().splitlines()
        life.output.unlink()
        events = [json.loads(line) for line in lines if line.startswith("{")]
        self.counts["captures broken"] += sum(line["event"] == "broken" for line in events)
        self.counts["orders broken"] += sum('"event": "order"' in line for line in lines)
        for line in events:
            if line["event"] == "end":
                self.counts.update({name: line[name] for name in ("launches", "graphs", "captures", "forks", "held")})
        if life.process.returncode != (-signal.SIGKILL if life.killed else 0) and not (
            life.killed and life.process.returncode == 0
        ):
            self.counts["failed processes"] += 1
            print(f"ended with {life.process.returncode}: {lines}", flush=True)


def soak(run: Run, hook: Path, program: Program = Program()) -> dict[str, int]:
    """Run random life. Return counts of what happened. The counts of NOTHING_OF must be 0."""
    with tempfile.TemporaryDirectory(prefix="soak-") as directory:
        life = Soak(run, Path(directory), hook, program)
        try:
            while not run.over():
                life.step()
                time.sleep(0.002)
            life.finish()
        finally:
            life.close()
    return {
        **{name: count for name, count in life.counts.items() if name not in WANTED},
        **{name: life.counts[name] for name in NOTHING_OF},
    }


def _where(pid: int) -> str:
    """Describe the function of the operating system that each thread of the process waits in."""
    threads = []
    for task in sorted(Path(f"/proc/{pid}/task").iterdir()):
        with contextlib.suppress(OSError):  # the thread has ended
            threads.append(f"{(task / 'comm').read_text().strip()}: {(task / 'syscall').read_text().split()[0]}")
    return f"process {pid} ({os.cpu_count()} CPUs): " + ", ".join(threads)
