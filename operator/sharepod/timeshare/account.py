"""One tenant's account: two token buckets, and the time it held.

Levels are integers in thousandths of a nanosecond, so that filling at a rate in thousandths of a GPU is exact. An
account is brought up to a moment by `advance`; between two calls the conditions it is given must have been constant.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from enum import Enum, auto

from .parameters import Parameters

_SLOTS = 100


class Charge(Enum):
    """How time held is charged to the assured bucket. The ceiling bucket pays always."""

    OWN = auto()
    """The guaranteed time pays, into debt if need be: others wait, and this time was given as guaranteed, or was
    taken."""

    BORROWED = auto()
    """What credit there is pays; the rest is lent and never owed."""


@dataclass(frozen=True)
class TimeUsage:
    """What a tenant used. Times in nanoseconds of one GPU; a gang's are those of each of its GPUs."""

    held_milli: int
    """Thousandths of the last window that it held the token."""

    held_ns: int
    """Time held, ever."""

    borrowed_ns: int
    """The part of it beyond what it was guaranteed."""

    late_ns: int
    """The part of it beyond the end of its quanta, until it had drained or was overtaken."""

    grants: int
    preemptions: int
    """Grants that it was preempted in: it had not drained when the grace period expired."""


@dataclass(frozen=True)
class AccountSnapshot:
    """All that an account needs to go on in another process of the same clock."""

    at: int
    assured: int
    ceiling: int
    held_ns: int
    borrowed_ns: int
    late_ns: int
    grants: int
    overdue: int
    """Preemptions. The names of the fields are part of the layout of the agent's hand-over file."""
    window_ns: int
    """Held within the last window."""


class Account:
    """Buckets and usage of one tenant. The assured bucket starts empty, the ceiling one with what one quantum takes."""

    def __init__(self, now: int, parameters: Parameters, *, request_milli: int, limit_milli: int) -> None:
        self._parameters = parameters
        self.at = now
        self.assured = 0
        self.ceiling = 0
        self.held_ns = 0
        self.borrowed_ns = 0
        self.late_ns = 0
        self.grants = 0
        self.preemptions = 0
        self._slot_ns = max(1, parameters.window_ns // _SLOTS)
        self._slots: deque[tuple[int, int]] = deque()
        self.request_milli = request_milli
        self.limit_milli = limit_milli
        self.ceiling = parameters.quantum_max_ns * (1000 - limit_milli) if limit_milli else 0

    def snapshot(self) -> AccountSnapshot:
        """As of `at`."""
        return AccountSnapshot(
            self.at,
            self.assured,
            self.ceiling,
            self.held_ns,
            self.borrowed_ns,
            self.late_ns,
            self.grants,
            self.preemptions,
            self._window_held_ns(),
        )

    def resume(self, state: AccountSnapshot) -> None:
        """Goes on from an earlier account. In between nobody gave out time, and the tenant is taken to have had what it
        was guaranteed: it is owed as much as before, and its ceiling bucket filled by the rest."""
        then = min(state.at, self.at)
        away = self.at - then
        self.assured = min(state.assured, self._assured_cap())
        filled = state.ceiling + away * (self.limit_milli - self.request_milli)
        self.ceiling = min(filled, self._ceiling_cap())
        self.held_ns, self.borrowed_ns, self.late_ns = state.held_ns, state.borrowed_ns, state.late_ns
        self.grants, self.preemptions = state.grants, state.overdue
        window = self._slot_ns * _SLOTS
        held = min(state.window_ns, window)
        if held and away < window:
            self._record(then - window, then, held)

    def set_rates(self, *, request_milli: int, limit_milli: int) -> None:
        """New rates from `at` on. Credit stands for as many seconds as before; what is saved up beyond the new
        capacities is lost; debt stays as it is."""
        if self.assured > 0 and self.request_milli:
            self.assured = self.assured * request_milli // self.request_milli
        self.request_milli = request_milli
        self.limit_milli = limit_milli
        self.assured = min(self.assured, self._assured_cap())
        self.ceiling = min(self.ceiling, self._ceiling_cap())

    def advance(self, now: int, held_ns: int, charge: Charge, *, owed_ns: int | None = None) -> None:
        """Fills both buckets up to `now` and charges `held_ns` nanoseconds of holding since `at`.

        `owed_ns`: charged to the buckets in its place, where that is more than what counts as usage.
        """
        elapsed = now - self.at
        if elapsed <= 0:
            return
        if held_ns == 0 and not owed_ns:
            self.at = now
            self.assured += elapsed * self.request_milli
            if self.assured > (most := self._assured_cap()):
                self.assured = most
            self.ceiling += elapsed * self.limit_milli
            if self.ceiling > (most := self._ceiling_cap()):
                self.ceiling = most
            return
        fill = elapsed * self.request_milli
        cost = max(held_ns, owed_ns or 0) * 1000
        if charge is Charge.OWN:
            self.assured = min(self.assured + fill - cost, self._assured_cap())
        else:
            # Credit is used up first, debt is worked off; neither sinks below zero by it, nor rises above.
            before = self.assured
            self.assured = max(before + fill - cost, 0) if before > 0 else min(before + fill, 0)
            paid = max(0, before + fill - self.assured)
            self.borrowed_ns += min(held_ns, max(0, cost - paid) // 1000)
        self.ceiling = min(self.ceiling + elapsed * self.limit_milli - cost, self._ceiling_cap())
        if held_ns:
            self.held_ns += held_ns
            self._record(self.at, now, held_ns)
        self.at = now

    def settle_debt(self, hold_ns: int) -> None:
        """At the end of a hold that was charged `hold_ns`: forgives what goes beyond the most that can be owed."""
        self.assured = max(self.assured, -max(self._parameters.debt_ns * self.request_milli, hold_ns * 1000))
        self.ceiling = max(self.ceiling, -max(self._parameters.debt_ns * self.limit_milli, hold_ns * 1000))

    def owed_ns(self) -> int:
        """How long ago the tenant should have had what its assured bucket holds: level over request."""
        return self.assured // self.request_milli if self.request_milli else 0

    def room_ns(self) -> int | None:
        """How long it can hold before its ceiling bucket is empty; None: as long as it likes."""
        spent = 1000 - self.limit_milli
        return max(0, self.ceiling) // spent if spent else None

    def fits(self, hold_ns: int) -> bool:
        """Whether the ceiling leaves room for a hold of that length."""
        return self.ceiling >= hold_ns * (1000 - self.limit_milli) and self.limit_milli > 0

    def ready_at(self, hold_ns: int) -> int | None:
        """When a hold of that length fits if nothing is held meanwhile; `at` if it does, None if never."""
        if self.fits(hold_ns):
            return self.at
        missing = max(1, hold_ns * (1000 - self.limit_milli)) - self.ceiling
        if self.limit_milli == 0:
            return None
        return self.at - (-missing // self.limit_milli)

    def usage(self) -> TimeUsage:
        """As of `at`."""
        held = self._window_held_ns()
        return TimeUsage(
            held_milli=min(1000, (held * 1000 + self._slot_ns * _SLOTS // 2) // (self._slot_ns * _SLOTS)),
            held_ns=self.held_ns,
            borrowed_ns=self.borrowed_ns,
            late_ns=self.late_ns,
            grants=self.grants,
            preemptions=self.preemptions,
        )

    def _window_held_ns(self) -> int:
        current, into = divmod(self.at, self._slot_ns)
        oldest = current - _SLOTS
        held = 0
        for slot, amount in self._slots:
            if slot > oldest:
                held += amount
            elif slot == oldest:
                held += amount * (self._slot_ns - into) // self._slot_ns
        return held

    def _assured_cap(self) -> int:
        return self._parameters.assured_burst_ns * self.request_milli

    def _ceiling_cap(self) -> int:
        burst, quantum = self._parameters.ceiling_burst_ns * self.limit_milli, self._parameters.quantum_max_ns * 1000
        return burst if burst > quantum or not self.limit_milli else quantum

    def _record(self, start: int, end: int, held_ns: int) -> None:
        """Spreads `held_ns` evenly over the slots between `start` and `end`; only the last window is kept."""
        elapsed = end - start
        begin = max(start, end - self._slot_ns * (_SLOTS + 1))
        done = held_ns * (begin - start) // elapsed
        while begin < end:
            slot = begin // self._slot_ns
            until = min(end, (slot + 1) * self._slot_ns)
            upto = held_ns * (until - start) // elapsed
            if self._slots and self._slots[-1][0] == slot:
                self._slots[-1] = (slot, self._slots[-1][1] + upto - done)
            else:
                self._slots.append((slot, upto - done))
            done, begin = upto, until
        last = end // self._slot_ns
        while self._slots and self._slots[0][0] < last - _SLOTS:
            self._slots.popleft()
