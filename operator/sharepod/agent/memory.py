"""The ledger of one tenant's device memory on one GPU: who was credited how much, and who may have more.

Pure: time is passed in, and what is to be sent comes back as actions. Guarantees:
- Without an over-limit handover, credits and what the driver counts beyond them never exceed the limit.
- A request that fits the limit is not refused because a sibling process sits on credits that it does not use: these
  are called back first, for a bounded time. Requests are decided in the order in which they came.
- A client that is gone has no credits.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass, field

Client = Hashable
"""One process's connection."""


class LedgerError(Exception):
    """A client gave back what it does not have, or asked for more at once than any hook would."""


@dataclass(frozen=True)
class Credited:
    """Answer the request: these bytes are its own; 0: refused, over the limit."""

    client: Client
    seq: int
    bytes: int


@dataclass(frozen=True)
class RecallFrom:
    """Ask the client to give back up to so many bytes that it does not use."""

    client: Client
    bytes: int


Action = Credited | RecallFrom

PENDING_MAX = 64
"""Requests of one client that may wait at once; a hook has one per thread that allocates."""


@dataclass
class _Pending:
    client: Client
    seq: int
    bytes: int
    deadline: int | None = None
    """When it is decided at the latest; None: nobody was asked yet."""
    asked: dict[Client, int] = field(default_factory=dict)
    """Siblings whose answer is awaited, and which of their answers that is."""


class MemoryLedger:
    """Bytes. `recall_ns`: how long a request waits for siblings."""

    def __init__(self, limit: int, *, enforced: bool, recall_ns: int) -> None:
        self.limit = limit
        self.enforced = enforced
        self._recall_ns = recall_ns
        self._credits: dict[Client, int] = {}
        self._untracked = 0
        self._pending: deque[_Pending] = deque()
        self._asked: dict[Client, int] = {}
        self._answered: dict[Client, int] = {}

    @property
    def tracked(self) -> int:
        """The sum of all credits."""
        return sum(self._credits.values())

    @property
    def used(self) -> int:
        """What counts against the limit: credits, and what the driver uses beyond them (contexts)."""
        return self.tracked + self._untracked

    def credit(self, client: Client) -> int:
        """What one client has."""
        return self._credits.get(client, 0)

    def used_without(self, client: Client, idle: int) -> int:
        """`used`, less what this client has but does not use."""
        return self.used - min(idle, self.credit(client))

    def observe(self, driver_bytes: int) -> None:
        """What the driver says that the tenant's processes use on this GPU. What goes beyond the credits counts as
        well."""
        self._untracked = max(0, driver_bytes - self.tracked)

    def set_limit(self, now: int, limit: int, *, enforced: bool) -> list[Action]:
        """From now on. Nothing is taken back; a lower limit refuses what comes."""
        self.limit, self.enforced = limit, enforced
        return self.expire(now)

    def handover(self, client: Client, size: int) -> None:
        """Credits what a process has in use already, known from before this ledger, whatever the limit."""
        self._credits[client] = self.credit(client) + size

    def reserve(self, now: int, client: Client, seq: int, size: int) -> list[Action]:
        """A client asks for more. Raises `LedgerError` if it has too many requests waiting."""
        if sum(1 for pending in self._pending if pending.client == client) >= PENDING_MAX:
            raise LedgerError(f"more than {PENDING_MAX} requests for memory wait at once")
        self._pending.append(_Pending(client, seq, size))
        return self.expire(now)

    def release(self, now: int, client: Client, size: int, *, recalled: bool) -> list[Action]:
        """A client gives back; `recalled`: that was its answer to a recall. Raises `LedgerError` if it does not have
        as much."""
        credit = self.credit(client)
        if size > credit:
            raise LedgerError(f"{size} bytes given back, {credit} credited")
        if recalled:
            if self._answered.get(client, 0) >= self._asked.get(client, 0):
                raise LedgerError("an answer to a recall that was not sent")
            self._answered[client] = self._answered.get(client, 0) + 1
        if size == credit:
            self._credits.pop(client, None)
        else:
            self._credits[client] = credit - size
        return self.expire(now)

    def vanish(self, now: int, client: Client) -> list[Action]:
        """A client is gone, and all that it had is free."""
        self._credits.pop(client, None)
        self._asked.pop(client, None)
        self._answered.pop(client, None)
        self._pending = deque(pending for pending in self._pending if pending.client != client)
        for pending in self._pending:
            pending.asked.pop(client, None)
        return self.expire(now)

    def expire(self, now: int) -> list[Action]:
        """Decides what can be decided at `now`."""
        actions: list[Action] = []
        while self._pending:
            head = self._pending[0]
            if not self.enforced or self.used + head.bytes <= self.limit:
                self._credits[head.client] = self.credit(head.client) + head.bytes
                actions.append(Credited(head.client, head.seq, head.bytes))
            elif self._may_yet_fit(now, head, actions):
                break
            else:
                actions.append(Credited(head.client, head.seq, 0))
            self._pending.popleft()
        return actions

    def next_deadline(self) -> int | None:
        """When `expire` has something to decide at the latest."""
        return self._pending[0].deadline if self._pending else None

    def _may_yet_fit(self, now: int, head: _Pending, actions: list[Action]) -> bool:
        """Whether siblings, asked now or before, have still to answer."""
        if head.deadline is None:
            return self._ask_siblings(now, head, actions)
        return now < head.deadline and any(
            self._answered.get(client, 0) < answer for client, answer in head.asked.items()
        )

    def _ask_siblings(self, now: int, head: _Pending, actions: list[Action]) -> bool:
        siblings = [client for client in self._credits if client != head.client]
        if not siblings or self._untracked + head.bytes > self.limit:
            return False
        head.deadline = now + self._recall_ns
        short = self.used + head.bytes - self.limit
        for client in siblings:
            self._asked[client] = head.asked[client] = self._asked.get(client, 0) + 1
            actions.append(RecallFrom(client, short))
        return True
