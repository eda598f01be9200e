"""Account of one tenant: two token buckets and the time that the tenant held.

Guarantees:
- Levels are integers in thousandths of a nanosecond, so that filling at a rate in thousandths of a GPU is exact.
- The assured bucket fills at the request, the ceiling bucket at the limit.
- The ceiling bucket is charged for all time held. Borrowed time never lowers the assured bucket below 0.
- An account holds the state as of its moment `at`, and `advance` brings it forward to now. The arguments of `advance`
  apply to the whole span since `at`, so the caller must call it before any of them changes.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from enum import Enum, auto

from .parameters import Parameters
from .turn_history import TurnHistory

_SLOTS = 100
"""Number of slots of the usage window: 100, so usage is exact to 1 % of the window."""


class Charge(Enum):
    """How the assured bucket is charged for time that the tenant held."""

    GUARANTEED = auto()
    """Full charge, below 0 (debt) if necessary. For time within the guarantee, and for overruns while other tenants
    waited."""

    BORROWED = auto()
    """Charge down to a level of 0 only. All further time counts as lent: the tenant does not owe it later."""


@dataclass(frozen=True)
class TimeUsage:
    """Usage of one tenant. Times in nanoseconds of one GPU; for a gang, of each of its GPUs."""

    held_milli: int
    """Part of the last window (10 s by default) for which the tenant held the token, in thousandths."""

    held_ns: int
    """Time held since the tenant was added, over all agents that have kept its account."""

    borrowed_ns: int
    """Part of `held_ns` that was lent: the tenant had no credit for it and does not owe it."""

    late_ns: int
    """Part of `held_ns` after the end of a quantum, until the tenant had drained or was preempted."""

    overdue_ns: int
    """Time charged beyond `held_ns`, since this process began: the tenant had not drained while other tenants held."""

    surcharged_ns: int
    """Time charged for kernels that ran without the token, since this process began. Not part of `held_ns`."""

    anticipated_ns: int
    """Time for which a GPU was kept idle for this tenant during its short pauses, since this process began. Charged
    like time held; not part of `held_ns`."""

    grants: int
    preemptions: int
    """Number of grants in which the tenant was preempted."""
    suspensions: int
    """Number of grants that were suspended because the tenant had no processor time, since this process began."""
    co_run_ns: int = 0
    """Part of `held_ns` during which other tenants held the GPU too, since this process began."""
    progress_ns: int = 0
    """Progress while other tenants held the GPU too, since this process began: the time that the same work takes on a
    GPU of its own."""
    progress_milli: int = 0
    """Work done in the last window, in thousandths of the work that the tenant would do with the GPU to itself. Time
    held alone counts in full, and time held with others by its progress. Work under earlier agents does not count."""


@dataclass(frozen=True)
class AccountSnapshot:
    """State of an account, from which the next agent resumes it, if the node was not rebooted (same clock).

    The names and the order of the fields are part of the layout of the agent's handover file.
    """

    at: int
    """Moment of the snapshot, in nanoseconds of the clock."""
    assured: int
    ceiling: int
    held_ns: int
    borrowed_ns: int
    late_ns: int
    grants: int
    overdue: int
    """Number of preemptions."""
    window_ns: int
    """Time held within the last window."""


class _Window:
    """Nanoseconds recorded in the last `length_ns`, in `_SLOTS` slots of `slot_ns` nanoseconds."""

    def __init__(self, slot_ns: int) -> None:
        self.length_ns = slot_ns * _SLOTS
        self._slot_ns = slot_ns
        self._slots: deque[tuple[int, int]] = deque()
        """(slot number, nanoseconds), oldest first; empty slots are left out."""

    def ns(self, now: int) -> int:
        """Return the nanoseconds recorded in the window that ends at `now`."""
        current, into = divmod(now, self._slot_ns)
        oldest = current - _SLOTS
        total = 0
        for slot, amount in self._slots:
            if slot > oldest:
                total += amount
            elif slot == oldest:
                total += amount * (self._slot_ns - into) // self._slot_ns
        return total

    def milli(self, ns: int) -> int:
        """Return `ns` as thousandths of the window's length, 0 to 1000."""
        return max(0, min(1000, (ns * 1000 + self.length_ns // 2) // self.length_ns))

    def record(self, start: int, end: int, ns: int) -> None:
        """Spread `ns` evenly over the slots between `start` and `end`. Drop slots older than the window."""
        elapsed = end - start
        begin = max(start, end - self._slot_ns * (_SLOTS + 1))
        done = ns * (begin - start) // elapsed
        while begin < end:
            slot = begin // self._slot_ns
            until = min(end, (slot + 1) * self._slot_ns)
            upto = ns * (until - start) // elapsed
            if self._slots and self._slots[-1][0] == slot:
                self._slots[-1] = (slot, self._slots[-1][1] + upto - done)
            else:
                self._slots.append((slot, upto - done))
            done, begin = upto, until
        last = end // self._slot_ns
        while self._slots and self._slots[0][0] < last - _SLOTS:
            self._slots.popleft()


class Account:
    """Buckets and usage of one tenant. The assured bucket starts empty, the ceiling bucket with one longest quantum."""

    def __init__(self, now: int, parameters: Parameters, *, request_milli: int, limit_milli: int) -> None:
        self._parameters = parameters
        self.at = now
        self.turns = TurnHistory(now)
        self.assured = 0
        """Level of the assured bucket, in thousandths of a nanosecond. Positive: credit. Negative: debt."""
        self.ceiling = 0
        """Level of the ceiling bucket, in thousandths of a nanosecond."""
        self.held_ns = 0
        self.borrowed_ns = 0
        self.late_ns = 0
        self._unpaid = 0
        """Charges that exceed the debt cap of the assured bucket, in thousandths of a nanosecond. Later inflow pays
        them."""
        self._unpaid_ceiling = 0
        """Charges that exceed the debt cap of the ceiling bucket, in thousandths of a nanosecond. Later inflow pays
        them."""
        self.overdue_ns = 0
        self.surcharged_ns = 0
        self.anticipated_ns = 0
        self.co_run_ns = 0
        self.progress_ns = 0
        self.grants = 0
        self.preemptions = 0
        self.suspensions = 0
        slot_ns = max(1, parameters.window_ns // _SLOTS)
        self._held = _Window(slot_ns)
        self._gained = _Window(slot_ns)
        """Progress minus time held, in nanoseconds, of spans in which other tenants held too."""
        self.request_milli = request_milli
        self.limit_milli = limit_milli
        self._assured_most = self._assured_cap()
        self._ceiling_most = self._ceiling_cap()
        self._ceiling_waited = self._ceiling_waited_cap()
        self.ceiling = parameters.quantum_max_ns * (1000 - limit_milli) if limit_milli else 0

    def snapshot(self) -> AccountSnapshot:
        """Return the account as of `at`, for another process to resume. Deferred charges are subtracted from the
        levels."""
        return AccountSnapshot(
            self.at,
            self.assured - self._unpaid,
            self.ceiling - self._unpaid_ceiling,
            self.held_ns,
            self.borrowed_ns,
            self.late_ns,
            self.grants,
            self.preemptions,
            self._held.ns(self.at),
        )

    def resume(self, snapshot: AccountSnapshot) -> None:
        """Resume the account of an earlier agent. For the time without an agent, the tenant counts as having had
        exactly its request.

        So the tenant is owed as much as before, and its ceiling bucket has filled by limit less request. Debt beyond
        the debt cap is deferred, and later inflow of the buckets pays it.
        """
        then = min(snapshot.at, self.at)
        away = self.at - then
        filled = snapshot.ceiling + away * (self.limit_milli - self.request_milli)
        self.assured = 0 if self.request_milli else min(snapshot.assured, 0)
        self.ceiling = 0 if self.limit_milli else min(filled, 0)
        self._defer_debt(min(snapshot.assured, self._assured_most), min(filled, self._ceiling_most))
        self.held_ns, self.borrowed_ns, self.late_ns = snapshot.held_ns, snapshot.borrowed_ns, snapshot.late_ns
        self.grants, self.preemptions = snapshot.grants, snapshot.overdue
        window = self._held.length_ns
        held = min(snapshot.window_ns, window)
        if held and away < window:
            self._held.record(then - window, then, held)

    def set_rates(self, *, request_milli: int, limit_milli: int) -> None:
        """Change the rates from `at` on. Credit keeps its length in seconds at the new rate, up to the new capacities.
        Debt stays the same amount.
        """
        if self.assured > 0 and self.request_milli:
            self.assured = self.assured * request_milli // self.request_milli
        self.request_milli = request_milli
        self.limit_milli = limit_milli
        self._assured_most, self._ceiling_most = self._assured_cap(), self._ceiling_cap()
        self._ceiling_waited = self._ceiling_waited_cap()
        self.assured = min(self.assured, self._assured_most)
        self.ceiling = min(self.ceiling, self._ceiling_most)

    def advance(
        self, now: int, held_ns: int, charge: Charge, *, owed_ns: int | None = None, waiting: bool = False
    ) -> None:
        """Bring the account forward to `now`: fill both buckets and charge them.

        Args:
            now: The new moment; no effect unless later than `at`.
            held_ns: Time held since `at`. It counts as usage.
            charge: How the assured bucket pays.
            owed_ns: Time charged to the buckets instead of `held_ns`, if it is more.
            waiting: True if the tenant has waited for other tenants since `at`. If it is owed time, its ceiling bucket
                may then fill beyond the usual capacity. Otherwise a tenant with a limit near its request could never
                catch up on time that others took.
        """
        elapsed = now - self.at
        if elapsed <= 0:
            return
        if self._unpaid or self._unpaid_ceiling:
            self._pay_deferred(elapsed)
        if held_ns == 0 and not owed_ns:
            self.at = now
            self.assured += elapsed * self.request_milli
            if self.assured > self._assured_most:
                self.assured = self._assured_most
            ceiling = self.ceiling + elapsed * self.limit_milli
            if ceiling > self._ceiling_most:
                most = self._ceiling_waited if waiting and self.assured > 0 else self._ceiling_most
                ceiling = min(ceiling, max(self.ceiling, most))
            self.ceiling = ceiling
            return
        fill = elapsed * self.request_milli
        cost = max(held_ns, owed_ns or 0) * 1000
        if charge is Charge.GUARANTEED:
            self.assured = min(self.assured + fill - cost, self._assured_most)
        else:
            # Borrowed time is paid from credit only: a positive level falls to 0 at most. A negative level rises by the
            # inflow, to 0 at most: inflow repays debt, and borrowing never adds debt.
            before = self.assured
            self.assured = max(before + fill - cost, 0) if before > 0 else min(before + fill, 0)
            paid = max(0, before + fill - self.assured)
            self.borrowed_ns += min(held_ns, max(0, cost - paid) // 1000)
        self.ceiling = min(self.ceiling + elapsed * self.limit_milli - cost, max(self.ceiling, self._ceiling_most))
        if held_ns:
            self.held_ns += held_ns
            self._held.record(self.at, now, held_ns)
        self.at = now

    def advance_together(self, now: int, held_ns: int, progress_ns: int, charge: Charge) -> None:
        """Bring the account forward to `now`, over a span in which other tenants held the GPU too (co-running).

        The assured bucket pays for progress only: a tenant with less progress than its request is owed the rest. The
        ceiling bucket pays for the whole span (S12): so an error in the measured progress never loosens a limit.

        Args:
            now: The new moment, later than `at`.
            held_ns: This tenant's part of the span. It counts as usage.
            progress_ns: Time that the tenant would have taken for the same work alone.
            charge: How the assured bucket pays.
        """
        elapsed = now - self.at
        if self._unpaid or self._unpaid_ceiling:
            self._pay_deferred(elapsed)
        before = self.assured
        paid = before + elapsed * self.request_milli - progress_ns * 1000
        level = paid
        if charge is Charge.BORROWED:
            # Credit is paid down to 0, and inflow repays debt up to 0. In both cases the tenant is owed the progress
            # that it lacks to its request.
            level = max(paid, min(before + elapsed * self.request_milli, 0))
            self.borrowed_ns += min(held_ns, (level - paid) // 1000)
        self.assured = min(level, self._assured_most)
        self.ceiling = min(self.ceiling + elapsed * (self.limit_milli - 1000), max(self.ceiling, self._ceiling_most))
        self.co_run_ns += held_ns
        self.progress_ns += progress_ns
        if held_ns:
            self.held_ns += held_ns
            self._held.record(self.at, now, held_ns)
        self._gained.record(self.at, now, progress_ns - held_ns)
        self.at = now

    def refund(self, ns: int) -> None:
        """Refund `ns` to the assured bucket, because the tenant was charged for this time and did not get it."""
        self.assured = min(self.assured + ns * 1000, max(self.assured, self._assured_most))

    def surcharge(self, ns: int) -> None:
        """Charge both buckets for time in which the tenant's kernels ran without the token. Charges beyond the debt
        caps are deferred, and the inflow of the buckets pays them."""
        self.surcharged_ns += ns
        self._defer_debt(self.assured - ns * 1000, self.ceiling - ns * 1000)

    def charge(self, ns: int) -> None:
        """Charge the assured bucket for GPU time that other tenants lost because of this tenant, such as hand-offs of
        very short turns. It does not count as held."""
        if self.request_milli:
            self.assured -= ns * 1000

    def skip(self, now: int) -> None:
        """Bring the account forward to `now` unchanged: no tenant pays for the time since `at`."""
        self.at = max(self.at, now)

    def cap_debt(self, hold_ns: int) -> None:
        """Cancel debt beyond the debt cap, so that no tenant waits longer than the cap to be served again. Called at
        the end of a hold that was charged `hold_ns`: debt from that hold itself is never cancelled."""
        self.assured = max(self.assured, -max(self._parameters.debt_ns * self.request_milli, hold_ns * 1000))
        self.ceiling = max(self.ceiling, -max(self._parameters.debt_ns * self.limit_milli, hold_ns * 1000))

    @property
    def in_arrears(self) -> bool:
        """True while deferred charges are not paid off. Until then the tenant fills no gaps of other tenants."""
        return (self._unpaid > 0 and self.request_milli > 0) or (self._unpaid_ceiling > 0 and self.limit_milli > 0)

    def lag_ns(self) -> int:
        """Return the lag, in nanoseconds: the time that the tenant is owed, which is the level of the assured bucket
        divided by the request. Negative: the tenant is ahead. 0 without a request."""
        return self.assured // self.request_milli if self.request_milli else 0

    def ceiling_room_ns(self) -> int | None:
        """Return the nanoseconds that the tenant can hold before its ceiling bucket is empty. None if the limit is the
        whole GPU."""
        spent = 1000 - self.limit_milli
        return max(0, self.ceiling) // spent if spent else None

    def ceiling_fits(self, hold_ns: int) -> bool:
        """Return True if the tenant can hold for `hold_ns` before its ceiling bucket is empty."""
        return self.ceiling >= hold_ns * (1000 - self.limit_milli) and self.limit_milli > 0

    def ceiling_fits_at(self, hold_ns: int) -> int | None:
        """Return the moment from which the tenant can hold for `hold_ns`, if it holds nothing until then. `at` if it
        can already, None if it never can."""
        if self.ceiling_fits(hold_ns):
            return self.at
        missing = max(1, hold_ns * (1000 - self.limit_milli)) - self.ceiling + self._unpaid_ceiling
        if self.limit_milli == 0:
            return None
        return self.at - (-missing // self.limit_milli)

    def usage(self) -> TimeUsage:
        """Return the usage as of `at`."""
        held = self._held.ns(self.at)
        return TimeUsage(
            held_milli=self._held.milli(held),
            held_ns=self.held_ns,
            borrowed_ns=self.borrowed_ns,
            late_ns=self.late_ns,
            overdue_ns=self.overdue_ns,
            surcharged_ns=self.surcharged_ns,
            anticipated_ns=self.anticipated_ns,
            grants=self.grants,
            preemptions=self.preemptions,
            suspensions=self.suspensions,
            co_run_ns=self.co_run_ns,
            progress_ns=self.progress_ns,
            progress_milli=self._held.milli(held + self._gained.ns(self.at)),
        )

    def _pay_deferred(self, elapsed: int) -> None:
        """Pay deferred surcharges from the inflow of the buckets in `elapsed` nanoseconds."""
        paid = min(self._unpaid, elapsed * self.request_milli)
        self._unpaid -= paid
        self.assured -= paid
        paid = min(self._unpaid_ceiling, elapsed * self.limit_milli)
        self._unpaid_ceiling -= paid
        self.ceiling -= paid

    def _defer_debt(self, assured: int, ceiling: int) -> None:
        """Set the levels of the buckets. Debt beyond the debt cap is deferred: it is kept apart and paid from later
        inflow.

        Without a request the assured bucket has no inflow that could pay, so charges beyond the cap are dropped.
        """
        most = self._parameters.debt_ns
        level = max(assured, min(self.assured, -most * self.request_milli))
        self._unpaid += level - assured if self.request_milli else 0
        self.assured = level
        level = max(ceiling, min(self.ceiling, -most * self.limit_milli))
        self._unpaid_ceiling += level - ceiling if self.limit_milli else 0
        self.ceiling = level

    def _assured_cap(self) -> int:
        return self._parameters.assured_burst_ns * self.request_milli

    def _ceiling_cap(self) -> int:
        burst, quantum = self._parameters.ceiling_burst_ns * self.limit_milli, self._parameters.quantum_max_ns * 1000
        return burst if burst > quantum or not self.limit_milli else quantum

    def _ceiling_waited_cap(self) -> int:
        return max(self._ceiling_most, self._parameters.assured_burst_ns * self.limit_milli)
