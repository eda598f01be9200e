"""Simulation of tenants and the token scheduler, thousands of times faster than real time.

The program of each tenant launches kernels of one length without gaps while it holds, and has drained when the last
kernel has ended. The simulation checks invariants at every moment: one holder per GPU unless preempted, complete gangs,
monotonic time.
"""

from __future__ import annotations

import heapq
import random
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import accumulate, count
from typing import Any

from sharepod.timeshare import Parameters, Preemption, Scheduler, TokenGrant, TokenRevocation

US = 1_000
MS = 1_000_000
S = 1_000_000_000
STALL_NS = 20 * MS
"""Lateness from which the agent counts as stalled."""


def pauses(kind: str, mean_ns: int, seed: int = 1) -> Callable[[], int]:
    """Return a source of pauses: regular, exponential, or bimodal (nine of ten short, the tenth eleven times as
    long)."""
    draw = random.Random(seed)
    if kind == "exponential":
        return lambda: max(1, int(draw.expovariate(1 / mean_ns)))
    if kind == "bimodal":
        return lambda: mean_ns // 2 * (11 if draw.random() < 0.1 else 1)
    return lambda: mean_ns


@dataclass
class Program:
    """Program of one tenant: kernels of `kernel_ns`; alternately `burst_ns` of work and `pause_ns` of pause. `burst_ns`
    0: it always works."""

    id: str
    gpus: tuple[str, ...] = ("g0",)
    group: str | None = None
    request: int = 0
    limit: int = 1000
    interactive: bool = False
    kernel_ns: int = 1 * MS
    start_ns: int = 0
    burst_ns: int = 0
    pause_ns: int = 0
    pauses: Callable[[], int] | None = None
    """Returns the length of the next pause. None: always `pause_ns`."""
    look_ns: int = 0
    """Time in ns after its last kernel until its hook finds that the program has no more work. It still holds in this
    time.
    """
    prompt_look_ns: int = 0
    """The same as `look_ns`, under a grant with `prompt`."""
    looks_ns: int = 0
    """The value of the two above that applies to the present hold; 0 if the hold ends with the quantum."""
    graphs: bool = False
    """True if each kernel is a graph whose length the hook has learned."""
    busy_from_ns: int | None = None
    """Moment from which it works without pauses. None: never."""
    hang_at_ns: int | None = None
    """Moment of a hang: at the first grant after it the program does not drain until `hang_until_ns`. None: it does not
    hang."""
    hang_until_ns: int = 0

    work_ns: int = 0
    worked_ns: int = 0
    """Total time of its kernels."""
    kernels: int = 0
    """Number of kernels in the present hold."""
    paused_ns: int = 0
    pauses_made: int = 0
    grant: TokenGrant | None = None
    granted_at: int = 0
    ends_at: int | None = None
    spans: list[tuple[int, int]] = field(default_factory=list)
    waits: list[int] = field(default_factory=list)
    owed: list[int] = field(default_factory=list)
    """For each grant after a wait: the part of that wait in ns during which the program was owed time, before common
    credit was cancelled.
    """
    lag_at_want_ns: int = 0
    """Lag when it began to wait, in ns: the time that it was owed."""
    granted: list[int] = field(default_factory=list)
    """Moments of the grants in `owed`."""
    wanted_at: int | None = None
    announced: bool = False
    """True if its gate has closed and it has announced the end of its last work."""

    def held(self, begin: int, end: int) -> int:
        """Return the nanoseconds of holding within an interval."""
        return sum(max(0, min(end, b) - max(begin, a)) for a, b in self.spans)

    def share(self, begin: int, end: int) -> float:
        """Return the part of an interval for which it held."""
        return self.held(begin, end) / (end - begin)


class Simulation:
    """Simulation of these programs. Call `run` once, then read the programs' spans."""

    def __init__(
        self,
        programs: list[Program],
        parameters: Parameters | None = None,
        *,
        hand_off_ns: int = 0,
        gap_ns: int = 0,
        announces: bool = False,
        guess: float = 1.0,
        scheduler: Any = None,
    ) -> None:
        self.scheduler: Any = Scheduler(parameters) if scheduler is None else scheduler
        """The token scheduler, or another scheduler with its interface."""
        self._is_core = isinstance(self.scheduler, Scheduler)
        self.programs = {program.id: program for program in programs}
        self.hand_off_ns = hand_off_ns
        """Nanoseconds by which a hold outlasts its kernels, as the cost of a hand-off."""
        self.gap_ns = gap_ns
        """Nanoseconds from a drain until the next grant takes effect."""
        self.announces = announces
        """True if programs, when their gate closes, announce how long their last work will take."""
        self.guess = guess
        """Factor of the announced time to the true time."""
        self.now = 0
        self.preempted: set[str] = set()
        self.renewals = 0
        self.busy_until: dict[str, int] = {}
        """For each GPU: end of the last work among tenants whose gates have closed."""
        self.preemptions_seen = 0
        self.stalls: list[tuple[int, int]] = []
        """(start, end) of each stall of the agent. Reports of programs wait for the end of a stall."""
        self.held_ns = 0
        """Time in which at least one tenant had the token and had not drained."""
        self._events: list[tuple[int, int, Callable[[], None]]] = []
        self._order = count()

    def at(self, time: int, what: Callable[[], None]) -> None:
        """Schedule a call at a moment. Calls of one moment keep their order."""
        heapq.heappush(self._events, (time, next(self._order), what))

    def run(self, until: int) -> None:
        """Simulate from 0 to `until`. Spans of unfinished holds end there."""
        for program in self.programs.values():
            self._set_tenant(program)
            self.at(program.start_ns, lambda program=program: self._wake(program))  # type: ignore[misc]
        while True:
            due = self.scheduler.next_deadline()
            next_event = self._events[0][0] if self._events else None
            times = [time for time in (due, next_event) if time is not None]
            if not times or min(times) > until:
                break
            moment = max(self.now, min(times))
            for begin, end in self.stalls:
                if begin <= moment < end:
                    moment = end
            self._pass(moment)
            if due is not None and moment - due >= STALL_NS:
                self.scheduler.stalled(moment)
            while self._events and self._events[0][0] <= self.now:
                heapq.heappop(self._events)[2]()
            self._pass(self.now + self.gap_ns)
            self._carry_out()
        self._pass(until)
        for program in self.programs.values():
            if program.grant is not None:
                program.spans.append((program.granted_at, until))

    def change(self, time: int, program: Program, request: int) -> None:
        """Give the program another request at that moment."""

        def resize() -> None:
            program.request = request
            if program.id in self.programs:
                self._set_tenant(program)

        self.at(time, resize)

    def replace(self, exits_at: int, back: int, program: Program) -> None:
        """Let the program end at `exits_at`, at any point of its work, and an equal program start at `back`."""

        def leave() -> None:
            if program.grant is not None:
                program.spans.append((program.granted_at, self.now))
            program.grant, program.announced, program.wanted_at = None, False, None
            self.preempted.discard(program.id)
            del self.programs[program.id]
            self.scheduler.remove(self.now, program.id)

        def come() -> None:
            self.programs[program.id] = program
            self._set_tenant(program)
            self._wake(program)

        self.at(exits_at, leave)
        self.at(back, come)

    def _set_tenant(self, program: Program) -> None:
        wishes: dict[str, Any] = {}  # optional arguments, which only the real scheduler accepts
        if program.interactive:
            wishes["interactive"] = True
        if program.group is not None:
            wishes["group"] = program.group
        self.scheduler.set_tenant(
            self.now, program.id, program.gpus, request_milli=program.request, limit_milli=program.limit, **wishes
        )

    def _pass(self, moment: int) -> None:
        if any(program.grant is not None for program in self.programs.values()):
            self.held_ns += moment - self.now
        self.now = moment

    def _wake(self, program: Program) -> None:
        if program.id not in self.programs:  # the program has ended in the meantime
            return
        program.work_ns = program.burst_ns
        program.wanted_at = self.now
        self.scheduler.want(self.now, program.id)
        self._note_lag(program)

    def _carry_out(self) -> None:
        for action in self.scheduler.tick(self.now):
            program = self.programs[action.tenant]
            if isinstance(action, TokenGrant):
                self._granted(program, action)
            elif isinstance(action, TokenRevocation):
                if program.grant is not None and program.grant.grant_id == action.grant_id:
                    self._end(program, self.now)
            elif isinstance(action, Preemption):
                self.preempted.add(program.id)
                self.preemptions_seen += 1
        self._check()

    def _granted(self, program: Program, grant: TokenGrant) -> None:
        if program.grant is not None and program.grant.grant_id == grant.grant_id:
            self.renewals += 1
            program.ends_at = None
            self._end(program, self.now + grant.quantum_ns)
            return
        assert program.grant is None, "granted twice"
        begin = max([self.now, *(self.busy_until.get(gpu, 0) for gpu in program.gpus)])
        program.grant, program.granted_at, program.ends_at = grant, begin, None
        if program.wanted_at is not None:
            wait = self.now - program.wanted_at
            program.waits.append(wait)
            if self._is_core:
                program.owed.append(min(wait, program.lag_at_want_ns + wait))
                program.granted.append(self.now)
            program.wanted_at = None
        if program.hang_at_ns is not None and self.now >= program.hang_at_ns:
            program.hang_at_ns = None
            self._schedule_drain(program, program.hang_until_ns)
        elif grant.quantum_ns:
            self._end(program, self.now + grant.quantum_ns)
        elif program.burst_ns:
            self._end(program, begin + program.work_ns)

    def _end(self, program: Program, close: int) -> None:
        """Close the gate at `close`. A kernel that runs at that time still ends, and the hold with it. With `graphs`,
        the program begins only graphs that end by `close`, and at least one."""
        run = close - program.granted_at
        kernels = max(1, run // program.kernel_ns if program.graphs else -(-run // program.kernel_ns))
        looks = 0
        if program.burst_ns and (left := max(1, -(-program.work_ns // program.kernel_ns))) <= kernels:
            prompt = program.grant is not None and program.grant.prompt
            kernels, looks = left, program.prompt_look_ns if prompt else program.look_ns
        program.looks_ns = looks
        program.kernels = kernels
        ends = max(self.now, program.granted_at + kernels * program.kernel_ns + self.hand_off_ns + looks)
        self._schedule_drain(program, ends, close)

    def _schedule_drain(self, program: Program, time: int, close: int | None = None) -> None:
        if program.ends_at is not None and program.ends_at <= time:
            return
        program.ends_at = time
        grant = program.grant
        assert grant is not None
        if self.announces and close is not None and close < time:
            self.at(max(self.now, close), lambda: self._announce(program, grant.grant_id, time))
        self.at(time, lambda: self._drain(program, grant.grant_id, time))

    def _announce(self, program: Program, grant_id: int, time: int) -> None:
        if program.grant is None or program.grant.grant_id != grant_id or program.ends_at != time:
            return
        program.announced = True
        for gpu in program.gpus:
            self.busy_until[gpu] = time
        self.scheduler.draining(self.now, program.id, expected_ns=int((time - self.now) * self.guess))

    def _drain(self, program: Program, grant_id: int, time: int) -> None:
        if program.grant is None or program.grant.grant_id != grant_id or program.ends_at != time:
            return
        program.grant = None
        self.preempted.discard(program.id)
        program.announced = False
        program.spans.append((program.granted_at, min(self.now, max(time, program.granted_at))))
        program.worked_ns += program.kernels * program.kernel_ns
        wanting = True
        if program.busy_from_ns is not None and self.now >= program.busy_from_ns:
            program.burst_ns = 0
        if program.burst_ns:
            program.work_ns -= program.kernels * program.kernel_ns
            wanting = program.work_ns > 0
            if not wanting:
                pause = program.pauses() if program.pauses else program.pause_ns
                program.paused_ns, program.pauses_made = program.paused_ns + pause, program.pauses_made + 1
                wakes = self.now + max(1, pause - program.looks_ns)
                if program.busy_from_ns is not None:
                    wakes = min(wakes, program.busy_from_ns)
                self.at(wakes, lambda: self._wake(program))
        if wanting:
            program.wanted_at = self.now
        self.scheduler.drained(self.now, program.id, wanting=wanting)
        self._note_lag(program)

    def _note_lag(self, program: Program) -> None:
        if self._is_core:
            program.lag_at_want_ns = self.scheduler._tenants[program.id].account.lag_ns()

    def _check(self) -> None:
        holders: dict[str, str] = {}
        for program in self.programs.values():
            if program.grant is None or program.id in self.preempted or program.announced:
                continue
            assert not self._is_core or held_grant_id(self.scheduler, program.id) == program.grant.grant_id
            for gpu in program.gpus:
                assert gpu not in holders, f"{holders[gpu]} and {program.id} both hold {gpu} at {self.now}"
                holders[gpu] = program.id


def held_grant_id(scheduler: Scheduler, tenant_id: str) -> int | None:
    """Return the id of the tenant's grant that is not drained yet; None if there is none."""
    hold = scheduler._tenants[tenant_id].hold
    return None if hold is None else hold.grant_id


def peak_share(program: Program, window: int) -> float:
    """Return the largest part of any window of this length for which a program held. The fullest window begins or ends
    with a span."""
    starts = [a for a, _ in program.spans]
    sums = [0, *accumulate(b - a for a, b in program.spans)]

    def held_before(time: int) -> int:
        index = bisect_right(starts, time)
        if index == 0:
            return 0
        return sums[index] - max(0, program.spans[index - 1][1] - time)

    edges = [begin for a, b in program.spans for begin in (a, b - window)]
    return max((held_before(begin + window) - held_before(begin) for begin in edges), default=0) / window
