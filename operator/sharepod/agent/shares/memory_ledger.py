"""The ledger of one tenant's device memory on one GPU: who was credited how much, and who may have more.

Pure: time is passed in, and what is to be sent comes back as actions. Guarantees:
- Without an over-limit handover, credits and what the driver counts beyond them never exceed the limit.
- A request that fits the limit is not refused because a sibling process sits on credits that it does not use: these
  are called back first, for a bounded time; nor because of what is kept for a lost connection, if its process ends, or
  connects and needs it no more, within that time. Requests are decided in the order in which they came.
- A client that has exited has no credits. One whose connection is gone while its process lives keeps them, until the
  process exits, declares on a new connection what it holds, or the driver tells of its memory. So it is where the
  connection was an earlier agent's.
- A reading of the driver is compared with the most that was credited while it was taken, never with what is credited
  once it is there.
- A sibling is asked for one thing at a time: it never has two recalls to answer.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Hashable
from dataclasses import dataclass, field

ClientKey = Hashable
"""One process's connection."""


class LedgerError(Exception):
    """A client gave back what it does not have, or asked for more at once than any hook would."""


@dataclass(frozen=True)
class Credited:
    """Answer the request: these bytes are its own; 0: refused, over the limit."""

    client: ClientKey
    seq: int
    bytes: int


@dataclass(frozen=True)
class RecallFrom:
    """Ask the client to give back up to so many bytes that it does not use."""

    client: ClientKey
    bytes: int


MemoryAction = Credited | RecallFrom

PENDING_MAX = 64
"""Requests of one client that may wait at once; a hook has one per thread that allocates."""

RETURN_NS = 2_000_000_000
"""How long a request waits for processes whose connection was lost, as all are when an agent comes in the place of
another: a hook tries again at least each 250 ms, and then says what it holds."""

CLAIM_MAX = 1 << 47
"""More than any GPU has: the most that one request, or all that a client hands over, may be."""
DECIDED_AT_ONCE = 64
"""Requests that `expire` decides before the agent turns to something else; what remains is due at once."""
_SUM_MAX = 1 << 62
"""What all credits may add up to where nothing is enforced; it has to fit into a frame."""


@dataclass(eq=False)
class _Pending:
    client: ClientKey
    seq: int
    bytes: int
    deadline: int | None = None
    """When it is decided at the latest; None: nobody was asked yet."""
    asked: dict[ClientKey, int] = field(default_factory=dict)
    """Siblings that were asked, and which of their answers is awaited."""
    later: set[ClientKey] = field(default_factory=set)
    """Siblings that are to be asked once they have answered what another request asked of them."""
    dropped: bool = False
    """Its client has gone."""


class MemoryLedger:
    """Bytes. `recall_ns`: how long a request waits for siblings."""

    def __init__(self, limit: int, *, enforced: bool, recall_ns: int) -> None:
        self.limit = limit
        self.enforced = enforced
        self.grown = 0
        """Bytes ever credited by `grow`."""
        self.refused = 0
        """Requests refused so far, but for those ahead of need."""
        self._recall_ns = recall_ns
        self._credits: dict[ClientKey, int] = {}
        self._left: dict[int, int] = {}
        self._left_lately: set[int] = set()
        self._handed: dict[ClientKey, int] = {}
        self._tracked = self._peak = 0
        self._untracked = 0
        self._pending: deque[_Pending] = deque()
        self._waiting: dict[ClientKey, list[_Pending]] = {}
        self._asked: dict[ClientKey, int] = {}
        self._answered: dict[ClientKey, int] = {}

    @property
    def tracked(self) -> int:
        """The sum of all credits, with those whose connection is gone."""
        return self._tracked

    @property
    def used(self) -> int:
        """What counts against the limit: credits, and what the driver uses beyond them (contexts)."""
        return self.tracked + self._untracked

    def credit(self, client: ClientKey) -> int:
        """What one client has."""
        return self._credits.get(client, 0)

    def used_without(self, client: ClientKey, idle: int) -> int:
        """`used`, less what this client has but does not use."""
        return self.used - min(idle, self.credit(client))

    def begin_reading(self) -> None:
        """From now on the driver is being read; `observe` takes what it said."""
        self._peak = self._tracked
        self._left_lately.clear()

    def observe(self, driver_bytes: int, told: Collection[int] = ()) -> None:
        """What the driver says that the tenant's processes use on this GPU. What goes beyond the credits counts as
        well. `told`: pids that it knows all about, so that what their lost connections had need not be kept."""
        for pid in [pid for pid in self._left if pid in told and pid not in self._left_lately]:
            size = self._left.pop(pid)
            self._tracked -= size
            self._peak -= size
        self._untracked = max(0, driver_bytes - self._peak)

    def set_limit(self, now: int, limit: int, *, enforced: bool) -> list[MemoryAction]:
        """From now on. Nothing is taken back; a lower limit refuses what comes."""
        self.limit, self.enforced = limit, enforced
        return self.expire(now)

    def handover(self, now: int, client: ClientKey, size: int, pid: int | None = None) -> list[MemoryAction]:
        """Credits what a process has already, known from before this ledger or from an earlier connection of `pid`,
        whatever the limit. Who waits may now have somebody to ask. Raises `LedgerError` for more than any GPU has."""
        handed = self._handed.get(client, 0) + size
        if handed > CLAIM_MAX or self._tracked + size > _SUM_MAX:
            raise LedgerError(f"{handed} bytes handed over; no GPU has as much")
        self._handed[client] = handed
        if pid in self._left:
            kept = min(size, self._left[pid])
            self._tracked -= kept
            self._left[pid] -= kept
            if self._left[pid] == 0:
                del self._left[pid]
            self._untracked = max(0, self._untracked - (size - kept))
        else:
            self._untracked = max(0, self._untracked - size)
        self._add(client, size)
        return self.expire(now)

    def grow(self, client: ClientKey, size: int) -> None:
        """Credits what the driver took for a client without a call that could have been refused, whatever the limit.
        Raises `LedgerError` for more than any GPU has."""
        if self.credit(client) + size > CLAIM_MAX or self._tracked + size > _SUM_MAX:
            raise LedgerError(f"{size} more bytes taken; no GPU has as much")
        self.grown += size
        self._untracked = max(0, self._untracked - size)
        self._add(client, size)

    def reserve(self, now: int, client: ClientKey, seq: int, size: int, *, ahead: bool = False) -> list[MemoryAction]:
        """A client asks for more; `ahead`: more than it needs, so that nobody is asked for it. Raises `LedgerError` if
        it has too many requests waiting, or asks for more than any GPU has."""
        if size > CLAIM_MAX:
            raise LedgerError(f"{size} bytes asked for; no GPU has as much")
        if ahead and self.enforced and (self._pending or self.used + size > self.limit):
            return [Credited(client, seq, 0)]
        waiting = self._waiting.setdefault(client, [])
        if len(waiting) >= PENDING_MAX:
            raise LedgerError(f"more than {PENDING_MAX} requests for memory wait at once")
        pending = _Pending(client, seq, size)
        waiting.append(pending)
        self._pending.append(pending)
        return self.expire(now)

    def release(self, now: int, client: ClientKey, size: int, *, recalled: bool) -> list[MemoryAction]:
        """A client gives back; `recalled`: that was its answer to a recall. Raises `LedgerError` if it does not have
        as much."""
        credit = self.credit(client)
        if size > credit:
            raise LedgerError(f"{size} bytes given back, {credit} credited")
        if recalled:
            if not self._owes_answer(client):
                raise LedgerError("an answer to a recall that was not sent")
            self._answered[client] = self._answered.get(client, 0) + 1
        self._tracked -= size
        if size == credit:
            self._credits.pop(client, None)
        else:
            self._credits[client] = credit - size
        return self.expire(now)

    def vanish(self, now: int, client: ClientKey) -> list[MemoryAction]:
        """A client has exited, and all that it had is free."""
        self._tracked -= self._credits.pop(client, 0)
        return self._forget(now, client)

    def disconnect(self, now: int, client: ClientKey, pid: int) -> list[MemoryAction]:
        """A client's connection is gone, but its process is not: what it had is kept in the name of `pid`."""
        credit = self._credits.pop(client, 0)
        if credit:
            self._left[pid] = self._left.get(pid, 0) + credit
            self._left_lately.add(pid)
        return self._forget(now, client)

    def restore(self, pid: int, size: int) -> None:
        """What a process that runs had under an earlier agent is kept in its name, whatever the limit."""
        if 0 < size <= min(CLAIM_MAX, _SUM_MAX - self._tracked):
            self._left[pid] = self._left.get(pid, 0) + size
            self._left_lately.add(pid)
            self._tracked += size
            self._peak = max(self._peak, self._tracked)

    def restore_untracked(self, size: int) -> None:
        """What the driver counted beyond all credits under an earlier agent counts until it is read anew."""
        self._untracked = max(0, size)

    def kept(self, pid: int) -> int:
        """What is kept in the name of a process whose connection is gone."""
        return self._left.get(pid, 0)

    def declared(self, now: int, pid: int) -> list[MemoryAction]:
        """The process has said on a new connection all that it holds: what else was kept for it is free."""
        return self.exited(now, pid)

    def exited(self, now: int, pid: int) -> list[MemoryAction]:
        """The process has ended: what was kept for it is free."""
        self._tracked -= self._left.pop(pid, 0)
        return self.expire(now)

    def expire(self, now: int) -> list[MemoryAction]:
        """Decides what can be decided at `now`, or the first of it where that is much."""
        actions: list[MemoryAction] = []
        decided = 0
        while self._pending and decided < DECIDED_AT_ONCE:
            head = self._pending[0]
            if head.dropped:
                self._pending.popleft()
                continue
            if not self.enforced or self.used + head.bytes <= self.limit:
                granted = head.bytes if self._tracked + head.bytes <= _SUM_MAX else 0
            elif self._may_yet_fit(now, head, actions):
                break
            else:
                granted = 0
            self._add(head.client, granted)
            self.refused += granted < head.bytes
            actions.append(Credited(head.client, head.seq, granted))
            decided += 1
            self._pending.popleft()
            waiting = self._waiting[head.client]
            waiting.remove(head)
            if not waiting:
                del self._waiting[head.client]
        return actions

    def next_deadline(self) -> int | None:
        """When `expire` has something to decide at the latest."""
        if not self._pending:
            return None
        return self._pending[0].deadline or 0

    # ---- inside

    def _add(self, client: ClientKey, size: int) -> None:
        if size:
            self._credits[client] = self.credit(client) + size
            self._tracked += size
            self._peak = max(self._peak, self._tracked)

    def _forget(self, now: int, client: ClientKey) -> list[MemoryAction]:
        for kept in (self._asked, self._answered, self._handed):
            kept.pop(client, None)
        for pending in self._waiting.pop(client, ()):
            pending.dropped = True
        if self._pending:  # nobody is asked for what is not the first
            self._pending[0].asked.pop(client, None)
            self._pending[0].later.discard(client)
        return self.expire(now)

    def _owes_answer(self, client: ClientKey) -> bool:
        return self._answered.get(client, 0) < self._asked.get(client, 0)

    def _may_yet_fit(self, now: int, head: _Pending, actions: list[MemoryAction]) -> bool:
        """Whether siblings, asked now or before, have still to answer, or what is kept for lost connections may go."""
        unasked = [client for client in self._credits if client != head.client and client not in head.asked]
        if head.deadline is None:
            if not (unasked or self._left) or self._untracked + head.bytes > self.limit:
                return False
            head.deadline = now + (max(self._recall_ns, RETURN_NS) if self._left else self._recall_ns)
        if now >= head.deadline:
            return False
        for client in unasked:  # also those that have come since, with what they hold from an earlier connection
            head.deadline = max(head.deadline, now + self._recall_ns)
            self._ask(head, client, actions)
        for client in list(head.later):
            if self._answered.get(client, 0) >= head.asked[client]:
                head.later.discard(client)
                if client in self._credits:
                    self._ask(head, client, actions)
        answers_due = any(self._answered.get(client, 0) < answer for client, answer in head.asked.items())
        return answers_due or bool(self._left)

    def _ask(self, head: _Pending, client: ClientKey, actions: list[MemoryAction]) -> None:
        if self._owes_answer(client):
            head.later.add(client)
        else:
            self._asked[client] = self._asked.get(client, 0) + 1
            actions.append(RecallFrom(client, self.used + head.bytes - self.limit))
        head.asked[client] = self._asked[client]
