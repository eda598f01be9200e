"""Random faults of one node's agent, from one seed, and their effects on tenants: `make soak-agent`.

The real agent and the real hook run real programs on simulated GPUs. The faults:
- holders of the token are killed and stopped;
- the agent is killed and started again, or stopped for seconds;
- the agent's disk is full (only if the test runs as root, and so may mount a disk);
- programs flood the agent's sockets, report DRAINED as soon as they are granted the token, and request more memory than
  their tenants have.

Some programs are always busy. Others leave gaps between their kernels, so tenants co-run.

Counted:
- the longest time that a program, without a fault of its own, had no GPU time;
- programs that died without having been killed;
- bytes over any tenant's limit;
- GPU time that was charged twice, and time in which tenants co-ran.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from harness import floods
from harness.soak import Run
from harness.standstill import Standstill
from hook.world.agent_node import GPUS, Node, Program, running, tenant

GI = 1 << 30
LIMIT = 2 * GI
HELD = 1 * GI
TENANTS = {
    "a": (0.4, GPUS[:1]),
    "b": (0.2, GPUS[:1]),
    "c": (0.2, GPUS[:1]),
    "d": (0.5, GPUS[1:2]),
    "e": (0.3, GPUS[1:2]),
}
TOO_LONG_S = 5.0
"""Seconds without GPU time after which the run fails. A stopped holder is preempted 1 s (the grace period) after its
quantum of at most 100 ms. On a GPU with three tenants both others may be stopped, which makes 2.2 s. The rest is
reserve for a slow machine.
"""
LOOKED_BACK_S = 1.0
"""Seconds: faults in this time before the end of the longest wait are reported with the wait."""
STALLED_S = 3.0
"""Longest time for which the agent is stopped, in seconds."""
GAPS = ("e22", "e45", "decode", "busy", "requests")
"""Programs that leave gaps (tests/hook/programs/gaps.c), and one of the same kind without gaps."""
SLICES = {"FAKE_CUDA_SLICE_US": "1024", "FAKE_CUDA_SWITCH_US": "91"}
"""Time slices of the simulated GPUs, equal to the driver's."""
READ_AHEAD_S = 1.1
"""Largest age of the agent's metrics in seconds: the agent computes them once a second."""
DISK = "8m"
"""Size of the disk of the state directory."""
LIAR = """
import socket
from sharepod import protocol

with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
    sock.connect("agent.sock")
    sock.send(protocol.encode(protocol.Hello(1, 1)))
    sock.recv(protocol.FRAME_MAX)
    sock.send(protocol.encode(protocol.Want(1)))
    while packet := sock.recv(protocol.FRAME_MAX):
        frame = protocol.parse_agent(packet)
        if isinstance(frame, protocol.Grant):
            sock.send(protocol.encode(protocol.Drained(frame.grant_id, wanting=True)))
"""
"""Program of a tenant that reports DRAINED at once, whatever work it has launched."""
SETTLE_S = 1.5
"""Seconds after a start or SIGCONT during which a program does not count as waiting."""


@dataclass
class Worker:
    """Program of a tenant that works without end."""

    label: str
    program: Program
    troubled_until: float
    """time.monotonic() until which the test itself may keep the program from GPU time."""
    busy_ns: int = 0
    progress_at: float = 0.0
    stopped_until: float | None = None


@dataclass
class Soak:
    """One run on one node."""

    run: Run
    node: Node
    standstill: Standstill
    workers: dict[str, Worker] = field(default_factory=dict)
    counts: Counter[str] = field(default_factory=Counter)
    longest_ms: int = 0
    longest_gap_ms: int = 0
    """Longest time without an agent."""
    longest_after: str = ""
    """Faults in the last seconds of the longest wait."""
    lately: deque[tuple[float, str]] = field(default_factory=lambda: deque(maxlen=40))
    """Latest faults with their times, by `now`."""
    over: int = 0
    flood: subprocess.Popen[bytes] | None = None
    flood_until: float = 0.0
    liar: subprocess.Popen[bytes] | None = None
    liar_until: float = 0.0
    filler: Path | None = None
    """File that fills the disk while it exists; None: the disk of the state directory is not filled."""
    filled_until: float = 0.0
    first: tuple[float, dict[str, float]] | None = None
    """First reading of the accounts: its time, and the seconds charged by GPU."""
    twice_ms: int = 0
    """GPU time charged beyond the time that passed, on the worst GPU."""
    co_run_s: float = 0.0
    co_run_read_s: float = 0.0
    """Seconds in which tenants co-ran, as the present agent last reported. Each agent's counter begins at 0."""
    numbers: itertools.count[int] = field(default_factory=itertools.count)

    def now(self) -> float:
        """Return time.monotonic() minus the time in which the whole machine was stopped. That time does not count as
        waiting."""
        return time.monotonic() - self.standstill.seconds

    def begin(self) -> None:
        for name in TENANTS:
            self.work(name)

    def work(self, name: str) -> None:
        label = f"{name}.{next(self.numbers)}"
        if self.run.random.random() < 0.3:
            kernel_us = self.run.random.choice(("200", "2000", "10000"))
            program = self.node.launch(
                name,
                *("--sync-every", "8", "--kernel-us", kernel_us, "--memory", str(HELD), "--report", "60"),
                label=label,
                gpus=TENANTS[name][1],
                extra=SLICES,
                quiet=True,
            )
        else:
            program = self.node.launch(
                name,
                *(self.run.random.choice(GAPS), "--slept", "0.5", "--report", "60"),
                program="gaps",
                label=label,
                gpus=TENANTS[name][1],
                extra=SLICES,
                quiet=True,
            )
        self.workers[name] = Worker(label, program, self.now() + SETTLE_S)

    # ---- faults

    def kill(self) -> None:
        name = self.run.random.choice(sorted(self.workers))
        self.workers[name].program.close()
        self.note(f"{self.workers[name].label} killed")
        self.work(name)

    def stop(self) -> None:
        worker = self.workers[self.run.random.choice(sorted(self.workers))]
        if worker.stopped_until is None:
            worker.program.process.send_signal(signal.SIGSTOP)
            worker.stopped_until = self.now() + self.run.random.uniform(0.05, 2.5)
            self.note(f"{worker.label} stopped for {worker.stopped_until - self.now():.2f} s")

    def agent(self) -> None:
        """Kill the agent, which has no supervisor here, and start another one. Not on a full disk: docs/limits.md
        describes an agent that its container starts on a full disk.
        """
        self.free_disk()
        begun = self.now()
        self.node.stop_agent(signal.SIGKILL)
        self.note("agent killed")
        self.wait(self.run.random.uniform(0, 0.3))
        self.node.start_agent()
        self.longest_gap_ms = max(self.longest_gap_ms, round((self.now() - begun) * 1000))
        self.note("agent listens")
        for worker in self.workers.values():
            if not worker.busy_ns:  # the first allocation of the program needs an agent
                worker.troubled_until = self.now() + SETTLE_S

    def floods(self) -> None:
        if self.flood is None:
            there = self.node.path(self.run.random.choice(sorted(TENANTS)))
            how = self.run.random.choice(floods.KINDS)
            self.flood = subprocess.Popen(floods.command(how), cwd=there, stdout=subprocess.DEVNULL)
            self.flood_until = self.now() + self.run.random.uniform(0.3, 2.0)
            self.note(f"flood of {how} on {there.name}")

    def stall(self) -> None:
        """Stop the agent for a while. During that time the waits of its tenants do not count."""
        seconds = self.run.random.uniform(0.1, STALLED_S)
        self.note(f"agent stopped for {seconds:.2f} s")
        for worker in self.workers.values():
            worker.troubled_until = self.now() + seconds + SETTLE_S
        pids = self.node.agent_pids
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        try:
            self.wait(seconds)
        finally:
            for pid in pids:
                os.kill(pid, signal.SIGCONT)
        self.note("agent goes on")

    def lie(self) -> None:
        """Start a sibling process that reports DRAINED as soon as it is granted the token."""
        if self.liar is None:
            there = self.node.path(self.run.random.choice(sorted(TENANTS)))
            self.liar = subprocess.Popen([sys.executable, "-c", LIAR], cwd=there, stderr=subprocess.DEVNULL)
            self.liar_until = self.now() + self.run.random.uniform(0.5, 3.0)
            self.note(f"liar in {there.name}")

    def disk(self) -> None:
        """Fill the disk of the state directory for a while."""
        if self.filler is None or self.filler.exists():
            return
        with self.filler.open("ab", buffering=0) as file, contextlib.suppress(OSError):
            while file.write(bytes(4096)):
                pass
        self.filled_until = self.now() + self.run.random.uniform(0.3, 4.0)
        self.note("disk full")

    def memory(self) -> None:
        """Start two sibling processes: one requests more memory than is left, the other does not."""
        name = self.run.random.choice(sorted(TENANTS))
        for size in (LIMIT - HELD + (1 << 20), HELD // 2):
            self.node.launch(
                name,
                *("--memory", str(size), "--seconds", "0.2", "--report", "60"),
                label=f"{name}.{next(self.numbers)}",
                gpus=TENANTS[name][1],
                quiet=True,
            )

    def audit(self) -> None:
        """Compare the GPU time charged so far with the time that has passed."""
        begun = time.monotonic()
        charged: dict[str, float] = {}
        co_run_s = 0.0
        for sample in self.node.metrics():
            if sample.name == "sharepod_tenant_held_seconds_total":
                charged[sample.labels["gpu"]] = charged.get(sample.labels["gpu"], 0.0) + sample.value
            elif sample.name == "sharepod_tenant_co_run_seconds_total":
                co_run_s += sample.value
        if self.first is None:
            self.first = begun, charged
        since, charged_before = self.first
        passed = time.monotonic() - since + READ_AHEAD_S
        for gpu, seconds in charged.items():
            beyond = seconds - charged_before.get(gpu, 0.0) - passed
            self.twice_ms = max(self.twice_ms, round(beyond * 1000))
        self.co_run_s += co_run_s - self.co_run_read_s if co_run_s >= self.co_run_read_s else co_run_s
        self.co_run_read_s = co_run_s

    # ---- observations

    def note(self, what: str) -> None:
        self.lately.append((self.now(), what))

    def wait(self, seconds: float) -> None:
        """Check the devices repeatedly for `seconds`."""
        deadline = self.now() + seconds
        while True:
            self.look()
            if self.now() >= deadline:
                return
            time.sleep(0.02)

    def look(self) -> None:
        now, devices = self.now(), self.node.devices()
        taken: Counter[tuple[str, str]] = Counter()
        for client in devices.clients:
            if client.alive:
                for gpu, usage in client.usage.items():
                    taken[client.label.split(".")[0], gpu] += usage.memory
        over = max(taken.values(), default=0) - LIMIT
        if over > max(0, self.over):
            before = [f"{at - now:+.2f} s {what}" for at, what in self.lately if at >= now - TOO_LONG_S]
            names = [name for name, taken_there in taken.items() if taken_there - LIMIT == over]
            print(f"{over} bytes over for {names} after {self.run.elapsed():.1f} s: {', '.join(before)}")
        self.over = max(self.over, over)
        for name, worker in list(self.workers.items()):
            if worker.stopped_until is not None and now >= worker.stopped_until:
                worker.program.process.send_signal(signal.SIGCONT)
                worker.stopped_until, worker.troubled_until = None, now + SETTLE_S
                self.note(f"{worker.label} goes on")
            if worker.program.process.poll() is not None:
                self.counts["dead"] += 1
                print(f"{worker.label} died with {worker.program.process.returncode} after {self.run.elapsed():.1f} s")
                self.work(name)
                continue
            busy = devices.busy_ns(worker.label)
            if busy != worker.busy_ns or worker.stopped_until is not None or now < worker.troubled_until:
                worker.busy_ns, worker.progress_at = busy, now
            waited = now - worker.progress_at
            if waited * 1000 > self.longest_ms:
                self.longest_ms = round(waited * 1000)
                begun = now - waited - LOOKED_BACK_S
                before = [f"{at - now:+.2f} s {what}" for at, what in self.lately if at >= begun]
                so_far = "" if busy else " (which has had no GPU time yet)"
                self.longest_after = f"{worker.label}{so_far} after {self.run.elapsed():.1f} s: {', '.join(before)}"
            if waited > TOO_LONG_S:
                self.counts["waits_too_long"] += 1
                print(f"{worker.label} has waited for {waited:.1f} s after {self.run.elapsed():.1f} s")
                worker.progress_at = now
        if self.flood is not None and now >= self.flood_until:
            self.end_flood()
        if self.liar is not None and now >= self.liar_until:
            self.end_liar()
        if now >= self.filled_until:
            self.free_disk()

    def end_flood(self) -> None:
        if self.flood is not None:
            self.flood.kill()
            self.flood.wait(10)
            self.flood = None

    def free_disk(self) -> None:
        if self.filler is not None and self.filler.exists():
            self.filler.unlink()
            self.note("disk has room")

    def end_liar(self) -> None:
        if self.liar is not None:
            self.liar.kill()
            self.liar.wait(10)
            self.liar = None

    def finish(self) -> None:
        self.free_disk()
        self.end_flood()
        self.end_liar()
        for worker in self.workers.values():
            if worker.stopped_until is not None:
                with contextlib.suppress(ProcessLookupError):
                    worker.program.process.send_signal(signal.SIGCONT)


@contextlib.contextmanager
def small_disk(path: Path) -> Iterator[Path | None]:
    """Mount a disk at `path`. Return the name of a file that may fill the disk, or None if this process may not mount
    one.
    """
    path.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={DISK}", "tmpfs", str(path)]
    if os.geteuid() != 0 or subprocess.run(mount, check=False, capture_output=True, timeout=20).returncode != 0:
        yield None
        return
    try:
        yield path / "filler"
    finally:
        subprocess.run(["umount", "-l", str(path)], check=True, timeout=20)


def soak(run: Run) -> dict[str, int]:
    rows = [tenant(name, request, gpus=gpus, memory=LIMIT) for name, (request, gpus) in TENANTS.items()]
    with (
        tempfile.TemporaryDirectory(prefix="sa") as directory,
        small_disk(Path(directory) / "state") as filler,
        running(Path(directory), *rows) as node,
        Standstill() as standstill,
    ):
        run.begun = time.monotonic()  # on a busy machine, the agent's start takes longer than a run
        state = Soak(run, node, standstill, filler=filler)
        try:
            state.begin()
            state.wait(SETTLE_S)
            state.audit()
            deck: list[str] = []
            while not run.over():
                if not deck:
                    deck = [
                        "kill",
                        "kill",
                        "stop",
                        "stop",
                        "agent",
                        "floods",
                        "floods",
                        "memory",
                        "stall",
                        "lie",
                        "disk",
                        "audit",
                        "audit",
                    ]
                    run.random.shuffle(deck)
                trouble = deck.pop()
                state.counts[trouble] += 1
                getattr(state, trouble)()
                state.wait(run.random.uniform(0.05, 0.6))
        finally:
            state.finish()
    if state.longest_after:
        print(f"longest wait: {state.longest_after}")
    troubles = {name: state.counts[name] for name in TROUBLES}
    return troubles | {
        "longest_gap_ms": state.longest_gap_ms,
        "longest_wait_ms": state.longest_ms,
        "waits_too_long": state.counts["waits_too_long"],
        "dead": state.counts["dead"],
        "bytes_over": max(0, state.over),
        "charged_twice_ms": state.twice_ms,
        "co_run_s": round(state.co_run_s),
        "stood_still_s": round(standstill.seconds),
    }


TROUBLES = ("kill", "stop", "agent", "floods", "memory", "stall", "lie", "disk", "audit")
WANTED = {"waits_too_long": 0, "dead": 0, "bytes_over": 0, "charged_twice_ms": 0}
