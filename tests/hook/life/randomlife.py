"""Random life under the hook, from one seed: processes start, stop, go on and are killed under scripted agents.

Several tenants have up to three processes of many threads each. Their agents grant and revoke, end and come back. The
double of libcuda counts each process's launches in a page of memory that the agent's side maps too, and the agent
compares.

Guarantees that are checked:
- From DRAINED (or WANT) to its next grant the driver accepts no launch of a process and has no work of it left, but for
  launches that DRAINED counts: threads without a processor stay inside of them for longer than the grace period (T2).
- From grant to DRAINED the driver accepts no more launches than the hook says.
- Once a metered grant is barred, each thread launches at most once more: what it was inside of.
- Every process ends when it is to end.
- No stream capture is broken, and no CUDA call fails.
- The ledger of memory stays whole.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import random
import shutil
import signal
import socket
import struct
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from doubles.gpus import create_state, submitted_at
from harness.soak import Run
from hook.conftest import BUILD, DEVICE_MEMORY, GPU_0, GPU_1, Tenant, terms
from hook.world.scripted_agent import Client, ScriptedAgent
from sharepod.protocol import ClientFrame, Drained, GpuTerms, Grant, Limits, Recall, Want, encode

NOTHING_OF = (
    "launches without a token",
    "launches under a barred grant",
    "drained too early",
    "hangs",
    "captures broken",
    "failed processes",
    "broken ledgers",
    "calls after an end",
)
WANTED = dict.fromkeys(NOTHING_OF, 0)
"""Counts that have to be 0 at the end."""

TENANTS = 3
PROCESSES_MOST = 3
THREADS = (1, 2, 4, 8)
"""Numbers of threads of a process; what one of them starts counts beside."""
OVERDUE_S = 40.0
"""Seconds after its time, not counting stops, at which a process counts as hanging: more than the 30 s for which an
allocation waits for an agent."""
_SOCKET_PID = struct.Struct("=iii")
_TO_MISUSED = 7 * 8
"""Bytes from `submitted` to `misused` in the double's counts of a process."""
_BACK_TO_PID = 8
"""Bytes from a process's counts of the first device back to its pid."""


class Counts:
    """Launches that the double of libcuda has accepted of each process, and its unfinished work."""

    def __init__(self, state: Path) -> None:
        self._path = state
        with state.open("rb") as file:
            self._page = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)

    def place(self, pid: int) -> int:
        """Return the offset of a process's counts. KeyError if it has not used CUDA."""
        return submitted_at(self._path, pid)

    def launches(self, turn: Turn) -> int | None:
        """Return the launches accepted so far; None if the process has ended and its place has gone to another."""
        count: int = struct.unpack_from("=Q", self._page, turn.place)[0]
        owner: int = struct.unpack_from("=I", self._page, turn.place - _BACK_TO_PID)[0]
        return count if owner == turn.pid else None

    def misused(self, pid: int) -> int:
        """Return the calls with handles of contexts that had ended, and those while the driver ended, of a process."""
        try:
            count: int = struct.unpack_from("=Q", self._page, self.place(pid) + _TO_MISUSED)[0]
        except KeyError:  # it has not used CUDA
            return 0
        return count

    def unfinished(self, turn: Turn) -> str:
        """Describe the work that the device still has of the process; empty if none."""
        submitted, done, _, last_end = struct.unpack_from("=QQQQ", self._page, turn.place)
        left = last_end - time.monotonic_ns()
        return f"{submitted - done} launches to begin, {left} ns of others" if done < submitted or left > 0 else ""

    def close(self) -> None:
        self._page.close()


@dataclass
class Turn:
    """State of one client's right to launch, as the agent knows it."""

    pid: int
    place: int
    """Offset of its counts."""
    held: Grant | None = None
    """The grant that the client holds, until it is drained."""
    before: int = 0
    """Launches when `held` was sent."""
    barred: int | None = None
    """Launches when `held` had been barred; None: it is not."""
    settled: int | None = None
    """Launches when the client last said that it is without the token; None while it may hold it."""
    claimed: int = 0
    """Launches that there were by its word when it had drained."""
    due: float | None = None
    """When the token that the client wants is to be granted, time.monotonic()."""
    given_up: bool = False
    """True once the client ends this connection, to go on without an agent until it has made another. Frames that it
    sent before may still come."""


class WatchedAgent(ScriptedAgent):
    """Scripted agent that grants every WANT after a while and counts launches without a grant."""

    def __init__(self, tenant: Tenant, counts: Counts, chance: random.Random) -> None:
        self.seen: Counter[str] = Counter()
        self._counts = counts
        self._chance = chance
        self._turns: dict[int, Turn] = {}
        super().__init__(tenant.directory, tenant.gpus)

    def step(self) -> None:
        """Send the grants that are due, renew or revoke held ones, and check every client's launches."""
        with self._changed:
            for client in [client for client in self.clients if not client.gone and id(client) in self._turns]:
                turn = self._turns[id(client)]
                if turn.given_up:
                    continue
                self._look(turn)
                try:
                    self._act(client, turn)
                except OSError:  # it is ending
                    turn.due = None

    def vanish(self) -> None:
        super().vanish()
        self._turns.clear()

    def _act(self, client: Client, turn: Turn) -> None:
        chance = self._chance.random()
        if turn.due is not None and time.monotonic() >= turn.due:
            turn.before = self._counts.launches(turn) or 0
            turn.due = turn.settled = turn.barred = None
            quantum_ms, metered = self._chance.choice([1, 5, 20, 50]), self._chance.random() < 0.5
            turn.held = replace(self.next_grant(quantum_ms, metered=metered), announce=self._chance.random() < 0.5)
            self.send(client, turn.held)
            self.seen["grants"] += 1
        elif turn.held is not None and chance < 0.01:
            self.revoke(client, turn.held)
        elif turn.held is not None and chance < 0.05:
            self.send(client, _renewed(turn.held, self._chance.choice([5, 20])))
            self.seen["renewals"] += 1
        elif turn.held is not None and turn.held.metered and turn.barred is None and chance < 0.06:
            self.hints.bar(turn.held.grant_id)
            turn.barred = self._counts.launches(turn)
            self.seen["bars"] += 1
        elif chance > 0.999:
            self._send_nonsense(client)
        elif chance > 0.995:
            self.recall(client, 0, self._chance.randrange(1 << 24))

    def _send_nonsense(self, client: Client) -> None:
        """Send a frame that is not valid: the hook gives up the connection and makes another."""
        sound = bytearray(encode(Limits(self.gpus, self.grace_ms)))
        match self._chance.randrange(4):
            case 0:
                packet = self._chance.randbytes(self._chance.randrange(1, 400))
            case 1:
                packet = bytes(sound[: self._chance.randrange(1, len(sound))])
            case 2:
                packet = encode(Recall(self._chance.randrange(len(self.gpus), 1 << 32), 1 << 60))
            case _:
                at = sound.index(self.gpus[0].uuid) - 8  # how many GPUs
                packet = bytes(sound[:at] + self._chance.randbytes(4) + sound[at + 4 :])
        self._turns[id(client)].given_up = True
        client.socket.send(packet)
        self.seen["nonsense"] += 1

    def _look(self, turn: Turn) -> None:
        now = self._counts.launches(turn)
        if turn.settled is not None and now is not None and now != turn.settled:
            late = max(0, min(now, turn.claimed) - turn.settled)
            self.seen["launches drained amid"] += late
            if now > turn.settled + late:
                self._accuse(turn, now - turn.settled - late, "since it was drained")
            turn.settled = now

    def _accuse(self, turn: Turn, launches: int, when: str) -> None:
        self.seen["launches without a token"] += launches
        print(f"{launches} launches {when}: {turn}", flush=True)

    def _handle(self, client: Client, frame: ClientFrame) -> None:
        if isinstance(frame, Want | Drained):
            self._cross(client)
            self._hear(client, frame)
        try:
            super()._handle(client, frame)
        except AssertionError:
            self.seen["broken ledgers"] += 1

    def _cross(self, client: Client) -> None:
        """Sometimes renew the grant of a client that has just drained, as if DRAINED had not been read yet."""
        turn = self._turns.get(id(client))
        if turn is not None and turn.held is not None and not turn.given_up and self._chance.random() < 0.1:
            with contextlib.suppress(OSError):
                self.send(client, _renewed(turn.held, 20))
            self.seen["crossings"] += 1

    def _hear(self, client: Client, frame: Want | Drained) -> None:
        if id(client) not in self._turns:
            pid = _pid_of(client)
            with contextlib.suppress(KeyError):  # it has ended meanwhile
                self._turns[id(client)] = Turn(pid, self._counts.place(pid))
        turn = self._turns.get(id(client))
        if turn is None or turn.given_up:
            return
        self._look(turn)
        now = self._counts.launches(turn)
        if now is None:
            return
        if isinstance(frame, Drained) and turn.held is not None and frame.grant_id == turn.held.grant_id:
            if now > turn.before + frame.launches:
                self._accuse(turn, now - turn.before - frame.launches, f"beyond {frame}")
            elif turn.barred is not None and now > turn.barred + 2 * THREADS[-1]:
                self.seen["launches under a barred grant"] += now - turn.barred
                print(f"{now - turn.barred} launches under a barred grant: {turn}", flush=True)
            elif unfinished := self._counts.unfinished(turn):
                self.seen["drained too early"] += 1
                print(f"{unfinished} at {frame}: {turn}", flush=True)
            turn.claimed = turn.before + frame.launches
            turn.held = None
        if turn.held is None:
            turn.settled = now
            if isinstance(frame, Want) or frame.wanting:
                turn.due = time.monotonic() + self._chance.choice([0.0, 0.0, 0.002, 0.02])


@dataclass(frozen=True)
class Program:
    """Program of the random life, and how the hook gets into it."""

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
    """One process, and when it has to have ended."""

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
        self.agents.append(WatchedAgent(tenant, self._launched, random.Random(self._chance.random())))

    def step(self) -> None:
        for index, agent in enumerate(self.agents):
            self._tend(index, agent)
        now, chance = time.monotonic(), self._chance.random()
        for life in list(self._lives):
            self._look_at(life, now)
        running = [life for life in self._lives if life.stopped_until is None and not life.killed]
        if chance < 0.05:
            self._start(self._chance.randrange(TENANTS))
        elif chance < 0.055 and running:
            self._kill(self._chance.choice(running))
        elif chance < 0.07 and running:
            self._stop(self._chance.choice(running), now)

    def finish(self) -> None:
        """End all processes; they are granted what they need to end."""
        while self._lives:
            now = time.monotonic()
            for index, agent in enumerate(self.agents):
                if index in self._away_until:
                    self._away_until[index] = now
                self._tend(index, agent, leave=False)
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
        said = [json.loads(line) for line in lines if line.startswith("{")]
        self.counts["captures broken"] += sum(line["event"] == "broken" for line in said)
        for line in said:
            if line["event"] == "end":
                self.counts.update({name: line[name] for name in ("launches", "graphs", "captures", "forks")})
        if life.process.returncode != (-signal.SIGKILL if life.killed else 0) and not (
            life.killed and life.process.returncode == 0
        ):
            self.counts["failed processes"] += 1
            print(f"ended with {life.process.returncode}: {lines}", flush=True)


def soak(run: Run, hook: Path, program: Program = Program()) -> dict[str, int]:
    """Run random life; return what happened, counted. The counts of NOTHING_OF have to be 0."""
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


def _renewed(grant: Grant, quantum_ms: float) -> Grant:
    return replace(grant, quantum_ns=int(quantum_ms * 1e6), announce=False, renews=True)


def _pid_of(client: Client) -> int:
    credentials = client.socket.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _SOCKET_PID.size)
    pid: int = _SOCKET_PID.unpack(credentials)[0]
    return pid


def _where(pid: int) -> str:
    """Describe the kernel function that each thread of the process waits in."""
    said = []
    for task in sorted(Path(f"/proc/{pid}/task").iterdir()):
        said.append(f"{(task / 'comm').read_text().strip()}: {(task / 'syscall').read_text().split()[0]}")
    return f"process {pid} ({os.cpu_count()} CPUs): " + ", ".join(said)
