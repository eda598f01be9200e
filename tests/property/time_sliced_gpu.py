"""Model of GPUs that time-slice between processes, of programs with asynchronous hosts, and of hooks and agent.

- GPU: each program has one queue of kernels. One queue has the device until it is empty, or until its slice is over and
  another queue has work. A change costs `SWITCH_NS`. Kernels are preempted between slices. A collective of ranks spins
  until all ranks have begun it.
- Host: launches each kernel `host_ns` after the one before, and waits while `ahead` steps are unfinished.
- Hook: like the real one, without its errors. It requests the token, keeps its queue short, samples at random moments,
  releases the token when it is idle, and drains at the end of its quantum or when the token is revoked.
- Agent: passes frames on, each of which takes `FRAME_NS`, and calls the scheduler at the moments that it requests.
"""

from __future__ import annotations

import heapq
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from itertools import count

from sharepod.timeshare import (
    Parameters,
    Samples,
    Scheduler,
    Sharing,
    TokenGrant,
    TokenRevocation,
)

US, MS, S = 1_000, 1_000_000, 1_000_000_000
GPU = "g0"
SLICE_NS = 1024 * US
SWITCH_NS = 91 * US
FRAME_NS = 60 * US
_SAMPLE_NS = 500 * US
_LOOK_NS = 500 * US
_QUEUE_NS = 2 * MS
_ANNOUNCED_NS = 1 * MS
_POLL_NS = 25 * US
_SPINS_NS = 1 << 60
_COLLECTIVE_NS = 50 * US
"""Length of a collective from the moment at which all ranks have begun it."""


@dataclass
class Program:
    """Program of one tenant: steps of `kernels` kernels of `gpu_ns` each, launched each `host_ns`, then a pause without
    launches."""

    id: str
    gpu: str = GPU
    group: str | None = None
    request: int = 0
    limit: int = 1000
    interactive: bool = False
    concurrent: bool = True
    gpu_ns: int = 1 * MS
    host_ns: int = 5 * US
    kernels: int = 1
    pause_ns: int = 0
    waits: bool = False
    """True if each step waits for its last kernel before the pause, as in a service. False for a training."""
    ahead: int = 3
    """Most steps that may be unfinished."""
    starts_ns: int = 0
    ranks: list[Program] = field(default_factory=list)
    """All ranks of its training, including this program. Each step ends with a collective of them."""
    jitter_ns: int = 0
    """Mean of an additional random host time before each step."""
    lie: Callable[[Samples], Samples] | None = None
    """Changes the counters that the hook reports. None: the hook reports the truth."""

    queue: deque[int] = field(default_factory=deque)
    """GPU time that each kernel still takes."""
    steps_met: int = 0
    """Number of collectives that the program has begun."""
    launched: int = 0
    finished: int = 0
    gpu_used_ns: int = 0
    granted: TokenGrant | None = None
    """Grant under which the program's gate is open."""
    closes_at: int | None = None
    draining_id: int | None = None
    drained_id: int | None = None
    asked: bool = False
    held_back: bool = False
    """True if the program's host waits at the gate with a launch."""
    waits_for: int | None = None
    """Number of finished kernels that the program's host waits for."""
    samples: int = 0
    in_flight: int = 0
    open_ns: int = 0
    """Time in ns, up to `opened_at`, for which the program's gate was open or its work unfinished."""
    opened_at: int | None = None
    latencies: list[int] = field(default_factory=list)
    step_begins: int = 0
    in_step: int = 0
    ends: deque[int] = field(default_factory=deque)
    exited: bool = False

    @property
    def left_ns(self) -> int:
        return sum(_COLLECTIVE_NS if left > _SPINS_NS // 2 else left for left in self.queue)


@dataclass
class _Device:
    """One GPU: the program that runs or ran last, the start of its slice, and the time of the next decision."""

    on: Program | None = None
    running: bool = False
    run_since: int = 0
    slice_since: int = 0
    stop: int = 0
    stop_moment: int = 0


class TimeSlicedGpu:
    """Simulator: `run` programs on their GPUs. The token comes from the real scheduler; with `scheduler=None` all gates
    are open."""

    def __init__(
        self,
        programs: list[Program],
        *,
        sharing: Sharing | None = Sharing.CONCURRENT,
        parameters: Parameters | None = None,
        seed: int = 1,
    ) -> None:
        self.now = 0
        self.programs = {program.id: program for program in programs}
        self.scheduler = None if sharing is None else Scheduler(parameters or Parameters(sharing=sharing))
        self.random = random.Random(seed)
        self.check: Callable[[], None] = lambda: None
        """Called after each call of the scheduler."""
        self.together_ns = 0
        """Time for which more than one gate was open, in ns."""
        self._passed = 0
        self._events: list[tuple[int, int, Callable[[], None]]] = []
        self._order = count()
        self._due: int | None = None
        self._devices = {gpu: _Device() for gpu in sorted({program.gpu for program in programs})}
        for program in programs:
            self.at(program.starts_ns, lambda program=program: self._arrive(program))  # type: ignore[misc]

    def at(self, moment: int, what: Callable[[], None]) -> None:
        """Schedule a call at a moment. Calls of one moment keep their order."""
        heapq.heappush(self._events, (max(moment, self.now), next(self._order), what))

    def run(self, until: int) -> None:
        while self._events and self._events[0][0] <= until:
            moment, _, what = heapq.heappop(self._events)
            self._pass(moment)
            what()
        self._pass(until)

    def _pass(self, moment: int) -> None:
        if sum(program.granted is not None for program in self.programs.values()) > 1:
            self.together_ns += moment - self.now
        self.now = moment

    # ---- the GPU

    def _submit(self, program: Program, gpu_ns: int) -> None:
        device = self._devices[program.gpu]
        program.queue.append(gpu_ns)
        program.launched += 1
        if not device.running:
            self._start(program)
        elif program is not device.on and len(program.queue) == 1:
            slices = max(0, self.now - device.slice_since) // SLICE_NS + 1
            self._stop_at(device, min(device.stop_moment, device.slice_since + slices * SLICE_NS))

    def _neighbours(self, program: Program) -> list[Program]:
        """Return the programs of this program's GPU in the order of their next time slices; this program is last."""
        order = [other for other in self.programs.values() if other.gpu == program.gpu]
        if program in order:
            place = order.index(program)
            order = order[place + 1 :] + order[: place + 1]
        return order

    def _start(self, program: Program) -> None:
        device, begin = self._devices[program.gpu], self.now
        if program is not device.on:
            begin += SWITCH_NS if device.on is not None else 0
            device.on, device.slice_since = program, begin
        device.running, device.run_since = True, begin
        if program.queue[0] == _SPINS_NS:
            self._comes(program)
        end = begin + program.queue[0]
        if any(other.queue for other in self._neighbours(program) if other is not program):
            end = min(end, device.slice_since + ((begin - device.slice_since) // SLICE_NS + 1) * SLICE_NS)
        self._stop_at(device, end)

    def _comes(self, program: Program) -> None:
        """Let a rank begin its collective. When the last rank begins, the collective runs on all ranks' GPUs."""
        program.steps_met += 1
        program.queue[0] -= 1
        if any(rank.steps_met < program.steps_met for rank in program.ranks):
            return
        for rank in program.ranks:
            device = self._devices[rank.gpu]
            rank.queue[0] = _COLLECTIVE_NS
            if device.running and device.on is rank and rank is not program:
                device.run_since = self.now
                self._stop_at(device, min(device.stop_moment, self.now + _COLLECTIVE_NS))

    def _stop_at(self, device: _Device, moment: int) -> None:
        device.stop += 1
        stop, device.stop_moment = device.stop, moment
        self.at(moment, lambda: self._stopped(device, stop))

    def _stopped(self, device: _Device, stop: int) -> None:
        if stop != device.stop or device.on is None:
            return
        program, ran = device.on, max(0, self.now - device.run_since)
        program.gpu_used_ns += ran
        if program.queue[0] <= _SPINS_NS // 2:
            program.queue[0] -= ran
        device.running = False
        finished = program.queue[0] <= 0
        if finished:
            program.queue.popleft()
            program.finished += 1
        order = self._neighbours(program)
        expired = self.now >= device.slice_since + SLICE_NS
        if program.queue and not program.exited and not (expired and any(other.queue for other in order[:-1])):
            order = [program]
            device.slice_since = self.now if expired else device.slice_since
        for other in order:
            if other.queue:
                self._start(other)
                break
        if finished:
            self._finished(program)

    # ---- the host

    def _arrive(self, program: Program) -> None:
        if self.scheduler is not None:
            self.scheduler.set_tenant(
                self.now,
                program.id,
                (program.gpu,),
                request_milli=program.request,
                limit_milli=program.limit,
                interactive=program.interactive,
                group=program.group,
                read=lambda: self._counters(program),
            )
            self.scheduler.set_concurrent(self.now, program.id, concurrent=program.concurrent)
            self.scheduler.set_connected(self.now, program.id, connected=True)
        program.step_begins = self.now
        self.at(self.now + program.host_ns, lambda: self._launch(program))

    def leave(self, program: Program) -> None:
        """End the program in any state. Its work on the GPU ends at once."""
        program.exited = True
        del self.programs[program.id]
        program.queue.clear()
        device = self._devices[program.gpu]
        if device.on is program:
            device.running, device.on = False, None
            device.stop += 1
            for other in self._neighbours(program):
                if other.queue:
                    self._start(other)
                    break
        if self.scheduler is not None:
            self.scheduler.remove(self.now, program.id)
            self._tick()

    def _launch(self, program: Program) -> None:
        if program.exited:
            return
        if not self._may_launch(program):
            program.held_back = True
            return
        self._submit(program, program.gpu_ns)
        program.in_step += 1
        if program.in_step < program.kernels:
            self.at(self.now + program.host_ns, lambda: self._launch(program))
            return
        program.in_step = 0
        if program.ranks:
            self._submit(program, _SPINS_NS)
        program.ends.append(program.launched)
        if program.waits:
            program.waits_for = program.launched
        else:
            self.at(self.now + program.pause_ns, lambda: self._next_step(program))

    def _next_step(self, program: Program) -> None:
        if len(program.ends) >= program.ahead:
            program.waits_for = program.ends[-program.ahead]
            if program.finished < program.waits_for:
                return
        self._begin_step(program)

    def _begin_step(self, program: Program) -> None:
        program.waits_for = None
        program.step_begins = self.now
        jitter = int(self.random.expovariate(1 / program.jitter_ns)) if program.jitter_ns else 0
        self.at(self.now + program.host_ns + jitter, lambda: self._launch(program))

    def _finished(self, program: Program) -> None:
        if program.waits_for is not None and program.finished >= program.waits_for:
            if program.waits:
                program.latencies.append(self.now - program.step_begins)
                program.waits_for = None
                self.at(self.now + program.pause_ns, lambda: self._begin_step(program))
            else:
                self._begin_step(program)
        if program.draining_id is not None and not program.queue:
            draining_id = program.draining_id
            self.at(self.now + _POLL_NS, lambda: self._drained(program, draining_id))
        elif program.held_back and program.granted is not None:
            program.held_back = False
            self._launch(program)

    # ---- the hook

    def _may_launch(self, program: Program) -> bool:
        if self.scheduler is None:
            return True
        if program.granted is None:
            if not program.asked and program.draining_id is None:
                program.asked = True
                self.at(self.now + FRAME_NS, lambda: self._want(program))
            return False
        left = program.left_ns
        if program.granted.metered and len(program.queue) >= 2 and left >= _QUEUE_NS:
            return False
        if program.closes_at is not None and self.now + left >= program.closes_at:
            if left <= _ANNOUNCED_NS:
                self._close(program)
            return False
        return True

    def _open(self, program: Program, grant: TokenGrant) -> None:
        if program.exited:
            return
        renews = program.granted is not None
        if grant.grant_id in (program.draining_id, program.drained_id):
            return  # new terms of a grant that the program drains or has drained have no effect
        assert program.draining_id is None, "granted again before it has drained"
        assert program.granted is None or program.granted.grant_id == grant.grant_id, "granted twice"
        program.granted, program.asked = grant, False
        program.closes_at = self.now + grant.quantum_ns if grant.quantum_ns else None
        if program.closes_at is not None:
            self.at(program.closes_at, lambda: self._deadline(program, grant))
        if not renews:
            program.opened_at = self.now
            self.at(self.now + 2 * _LOOK_NS, lambda: self._look(program, grant.grant_id, program.launched))
            self._sample(program)
        if program.held_back:
            program.held_back = False
            self._launch(program)

    def _deadline(self, program: Program, grant: TokenGrant) -> None:
        if program.granted is grant:
            self._close(program)

    def _look(self, program: Program, grant_id: int, launched: int) -> None:
        if program.granted is None or program.granted.grant_id != grant_id:
            return
        if program.launched == launched and not program.queue:
            self._close(program)
            return
        self.at(self.now + _LOOK_NS, lambda: self._look(program, grant_id, program.launched))

    def _close(self, program: Program) -> None:
        assert program.granted is not None
        grant_id = program.draining_id = program.granted.grant_id
        program.granted = None
        if not program.queue:
            self.at(self.now + _POLL_NS, lambda: self._drained(program, grant_id))
            return
        expected = program.left_ns
        self.at(self.now + max(0, expected - _ANNOUNCED_NS) + FRAME_NS, lambda: self._announce(program, grant_id))

    def _announce(self, program: Program, grant_id: int) -> None:
        if not program.exited and program.draining_id == grant_id and self.scheduler is not None:
            self.scheduler.draining(self.now, program.id, expected_ns=program.left_ns)
            self._tick()

    def _drained(self, program: Program, grant_id: int) -> None:
        if program.exited or program.draining_id != grant_id:
            return
        program.draining_id, program.drained_id = None, grant_id
        wanting = program.asked = program.held_back
        if program.opened_at is not None:
            program.open_ns += self.now - program.opened_at
            program.opened_at = None
        self.at(self.now + FRAME_NS, lambda: self._tell_drained(program, wanting))

    def _sample(self, program: Program) -> None:
        if program.exited or (program.granted is None and program.draining_id is None):
            return
        program.samples += 1
        program.in_flight += bool(program.queue)
        self.at(self.now + max(20 * US, int(self.random.expovariate(1 / _SAMPLE_NS))), lambda: self._sample(program))

    # ---- the agent

    def _want(self, program: Program) -> None:
        if not program.exited and self.scheduler is not None:
            self.scheduler.want(self.now, program.id)
            self._tick()

    def _tell_drained(self, program: Program, wanting: bool) -> None:
        if not program.exited and self.scheduler is not None:
            self.scheduler.drained(self.now, program.id, wanting=wanting)
            self._tick()

    @staticmethod
    def _counters(program: Program) -> Samples:
        samples = Samples(program.samples, program.in_flight, program.launched)
        return program.lie(samples) if program.lie else samples

    def _tick(self) -> None:
        assert self.scheduler is not None
        for action in self.scheduler.tick(self.now):
            program = self.programs[action.tenant]
            if isinstance(action, TokenGrant):
                self.at(self.now + FRAME_NS, lambda p=program, a=action: self._open(p, a))  # type: ignore[misc]
            elif isinstance(action, TokenRevocation):
                self.at(self.now + FRAME_NS, lambda p=program, a=action: self._revoke(p, a.grant_id))  # type: ignore[misc]
        self.check()
        due = self.scheduler.next_deadline()
        assert due is None or due > self.now, "due transitions have been applied"
        if due is not None and due != self._due:
            self._due = due
            self.at(due, lambda: self._timer(due))

    def _timer(self, due: int) -> None:
        if due == self._due:
            self._due = None
            self._tick()

    def _revoke(self, program: Program, grant_id: int) -> None:
        if program.granted is not None and program.granted.grant_id == grant_id:
            self._close(program)


def alone(program: Program, until: int) -> int:
    """Return the number of kernels that a program like this finishes alone until a moment."""
    return _alone(program.gpu_ns, program.host_ns, program.kernels, program.pause_ns, program.waits, until)


@cache
def _alone(gpu_ns: int, host_ns: int, kernels: int, pause_ns: int, waits: bool, until: int) -> int:
    single = Program("a", gpu_ns=gpu_ns, host_ns=host_ns, kernels=kernels, pause_ns=pause_ns, waits=waits)
    TimeSlicedGpu([single], sharing=None).run(until)
    return single.finished
