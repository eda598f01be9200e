"""Ledger of one tenant's device memory on one GPU: the credits (bytes that may be allocated) of each client (connection
of a process), and decisions on requests. Pure.

Time is passed in, and messages are returned as actions. Sizes are in bytes, times in nanoseconds.

Guarantees (ME as in docs/design.md, Memory):
- ME1 limit: the sum of credits, and of bytes that the driver counts beyond the credits, never exceeds an enforced
  limit. Exceptions are handovers, credits by `grow`, and a limit that was lowered.
- ME2 recall-before-refusal: a request that fits the limit is not refused while a sibling process has unused credits.
  These are recalled first, for a bounded time.
- ME4 returned-on-exit: a client that has exited has no credits.
- K1 lost-connection: the credits of a running process without connection are kept, also those from an earlier agent.
  They are freed when the process exits, declares its memory on a new connection, or the driver reports its memory. A
  request waits up to `RETURN_NS` for such credits before it is refused.
- K2 in-order: requests are decided in the order in which they came.
- K3 reading-by-peak: a reading of the driver is compared with the peak of the credits during the reading, not with the
  credits at its end.
- K4 one-recall: a process never has two unanswered recalls.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Hashable
from dataclasses import dataclass, field

ClientKey = Hashable
"""Connection of one process."""


class LedgerError(Exception):
    """A client's frame that breaks the protocol: it returns more bytes than it was credited, or requests more than any
    GPU has."""


@dataclass(frozen=True)
class Credited:
    """Answer to a request."""

    client: ClientKey
    seq: int
    """Number of the request."""
    bytes: int
    """Bytes credited. 0: refused, because the request would exceed the limit."""


@dataclass(frozen=True)
class RecallFrom:
    """Recall: request to a client to return unused credits."""

    client: ClientKey
    bytes: int
    """Bytes that the request needs: the client need not return more."""


MemoryAction = Credited | RecallFrom


@dataclass(frozen=True)
class DeniedAllocation:
    """Request that was refused because of the limit."""

    asked: int
    """Bytes of the request. The hook has subtracted the process's unused credits."""
    used: int
    """Bytes that counted against the limit at that time."""
    limit: int
    """Limit at that time, in bytes."""


PENDING_MAX = 64
"""Most waiting requests of one client. A hook has one request per allocating thread."""

RETURN_NS = 2_000_000_000
"""Nanoseconds that a request waits for processes whose connection is lost to free their kept credits. All connections
are lost when a new agent starts. A hook tries to connect every 250 ms and then declares its memory, so it has eight
attempts."""

CLAIM_MAX = 1 << 47
"""Most bytes of one request, or of all handovers of one client: 128 TiB, more than any GPU has."""
DECIDED_AT_ONCE = 64
"""Most requests that one call of `expire` decides, so that other work of the agent gets its turn. `next_deadline` is
then 0, so the caller calls again at once."""
_SUM_MAX = 1 << 62
"""Most bytes of all credits if no limit is enforced. The sum must fit into a frame's signed 64 bits."""


@dataclass(eq=False)
class _Pending:
    """Request that waits for a decision."""

    client: ClientKey
    seq: int
    bytes: int
    deadline: int | None = None
    """Latest time of the decision. None until the request first waits for siblings or for kept credits."""
    asked: dict[ClientKey, int] = field(default_factory=dict)
    """Siblings that got a recall -> the sequence number of the answer that this request awaits from each."""
    later: set[ClientKey] = field(default_factory=set)
    """Siblings that get a recall once they have answered the recall of another request (K4)."""
    dropped: bool = False
    """True once the client's connection is closed: the request is skipped."""


class MemoryLedger:
    """Memory ledger of one tenant on one GPU.

    Args:
        limit: Bytes that the tenant may use.
        enforced: True if the limit is enforced. If False, every request is credited and only counted.
        recall_ns: Nanoseconds that a request waits for siblings to return credits.
    """

    def __init__(self, limit: int, *, enforced: bool, recall_ns: int) -> None:
        self.limit = limit
        self.enforced = enforced
        self.gpu_memory = 0
        """Memory of the GPU in bytes; 0 until the driver has reported it."""
        self.grown = 0
        """Bytes credited by `grow` since the start: memory that could not be refused."""
        self.refused = 0
        """Number of requests refused since the start. Requests made ahead of need (`ahead`) do not count."""
        self.last_refusal: DeniedAllocation | None = None
        """The last refused request. None if there is none."""
        self._recall_ns = recall_ns
        self._credits: dict[ClientKey, int] = {}
        self._kept: dict[int, int] = {}
        """Credits of running processes whose connection is lost, by pid (K1)."""
        self._kept_since_reading: set[int] = set()
        """Pids in `_kept` whose connection was lost after the current reading of the driver began. That reading may
        have missed them, so it frees nothing."""
        self._handed: dict[ClientKey, int] = {}
        """Bytes that each client has declared (`handover`)."""
        self._tracked = self._peak = 0
        """Sum of all credits, and the peak of that sum since the current reading began (K3)."""
        self._untracked = 0
        """Bytes that the driver counts beyond all credits, such as contexts."""
        self._pending: deque[_Pending] = deque()
        """Requests in the order in which they came (K2)."""
        self._waiting: dict[ClientKey, list[_Pending]] = {}
        """The undecided requests of each client."""
        self._asked: dict[ClientKey, int] = {}
        """Number of recalls sent to each client."""
        self._answered: dict[ClientKey, int] = {}
        """Number of recalls that each client has answered (see `_asked`)."""

    @property
    def tracked(self) -> int:
        """Sum of all credits, including those kept for lost connections."""
        return self._tracked

    @property
    def used(self) -> int:
        """Bytes that count against the limit: credits, and the driver's bytes beyond them (contexts)."""
        return self.tracked + self._untracked

    def credit(self, client: ClientKey) -> int:
        """Return the credits of one client."""
        return self._credits.get(client, 0)

    def used_without(self, client: ClientKey, idle: int) -> int:
        """Return `used` less the client's unused credits. `idle`: the unused
        bytes, as the client reports them."""
        return self.used - min(idle, self.credit(client))

    def begin_reading(self) -> None:
        """Start a reading of the driver. It may count bytes that are freed from here on (K3)."""
        self._peak = self._tracked
        self._kept_since_reading.clear()

    def observe(self, driver_bytes: int, covered: Collection[int] = ()) -> None:
        """Compare a reading of the driver with the credits.

        Args:
            driver_bytes: Bytes that the tenant's processes use on this GPU; bytes beyond the credits count as used.
            covered: Pids whose memory the reading contains in full, so the credits kept for their lost connections are
            freed.
        """
        for pid in [pid for pid in self._kept if pid in covered and pid not in self._kept_since_reading]:
            size = self._kept.pop(pid)
            self._tracked -= size
            self._peak -= size
        self._untracked = max(0, driver_bytes - self._peak)

    def set_limit(self, now: int, limit: int, *, enforced: bool) -> list[MemoryAction]:
        """Change the limit. Existing credits stay: a lower limit only refuses later requests. Return new decisions."""
        self.limit, self.enforced = limit, enforced
        return self.expire(now)

    def handover(self, now: int, client: ClientKey, size: int, pid: int | None = None) -> list[MemoryAction]:
        """Credit memory that a process declares: it got the memory before this ledger existed, or on an earlier
        connection of `pid`. The limit does not apply. Return actions: a waiting request may now send a recall to this
        client.

        Raises `LedgerError` if `size` is more than the GPU can have given.
        """
        handed = self._handed.get(client, 0) + size
        if handed > self._claim_max() or self._tracked + size > _SUM_MAX:
            raise LedgerError(f"{handed} bytes handed over; {self._on_the_gpu()}")
        self._handed[client] = handed
        if pid in self._kept:
            kept = min(size, self._kept[pid])
            self._tracked -= kept
            self._kept[pid] -= kept
            if self._kept[pid] == 0:
                del self._kept[pid]
            self._untracked = max(0, self._untracked - (size - kept))
        else:
            self._untracked = max(0, self._untracked - size)
        self._add(client, size)
        return self.expire(now)

    def grow(self, client: ClientKey, size: int) -> None:
        """Credit memory that the driver took for a client within a call that could not be refused. The limit does not
        apply. Raises `LedgerError` if `size` is more than the GPU can have given."""
        if self.credit(client) + size > self._claim_max() or self._tracked + size > _SUM_MAX:
            raise LedgerError(f"{size} more bytes taken; {self._on_the_gpu()}")
        self.grown += size
        self._untracked = max(0, self._untracked - size)
        self._add(client, size)

    def reserve(self, now: int, client: ClientKey, seq: int, size: int, *, ahead: bool = False) -> list[MemoryAction]:
        """Add a client's request for more bytes, and return the actions that follow.

        Args:
            seq: Number of the request, for the answer.
            size: Bytes.
            ahead: True if the client does not need the bytes yet. No sibling gets a recall for them.

        Raises `LedgerError` if too many requests of the client wait, or if `size` is more than any GPU has.
        """
        if size > CLAIM_MAX:
            raise LedgerError(f"{size} bytes requested; no GPU has as much")
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
        """Free credits that a client returns. `recalled`: True if this is its answer to a recall. Raises `LedgerError`
        if the client has less."""
        credit = self.credit(client)
        if size > credit:
            raise LedgerError(f"{size} bytes returned, {credit} credited")
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
        """Free all credits of a client that has exited."""
        self._tracked -= self._credits.pop(client, 0)
        return self._forget(now, client)

    def disconnect(self, now: int, client: ClientKey, pid: int) -> list[MemoryAction]:
        """Move the credits of a client whose connection is lost to `kept`, under the `pid` of its process, which still
        runs (K1)."""
        credit = self._credits.pop(client, 0)
        if credit:
            self._kept[pid] = self._kept.get(pid, 0) + credit
            self._kept_since_reading.add(pid)
        return self._forget(now, client)

    def restore(self, pid: int, size: int) -> None:
        """Keep the credits that a running process had under an earlier agent (K1). The limit does not apply."""
        if 0 < size <= min(CLAIM_MAX, _SUM_MAX - self._tracked):
            self._kept[pid] = self._kept.get(pid, 0) + size
            self._kept_since_reading.add(pid)
            self._tracked += size
            self._peak = max(self._peak, self._tracked)

    def restore_untracked(self, size: int) -> None:
        """Set the bytes that the driver counts beyond all credits, as an earlier agent stored them. They count until
        the next reading."""
        self._untracked = max(0, size)

    def kept(self, pid: int) -> int:
        """Return the credits kept for a process whose connection is lost."""
        return self._kept.get(pid, 0)

    def declared(self, now: int, pid: int) -> list[MemoryAction]:
        """Free the remaining kept credits of a process that has declared all its memory on a new connection."""
        return self.exited(now, pid)

    def exited(self, now: int, pid: int) -> list[MemoryAction]:
        """Free the kept credits of a process that has exited."""
        self._tracked -= self._kept.pop(pid, 0)
        return self.expire(now)

    def expire(self, now: int) -> list[MemoryAction]:
        """Decide the oldest requests, at most `DECIDED_AT_ONCE`, until one has to wait. Return the resulting
        actions."""
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
            if granted < head.bytes:
                self.refused += 1
                self.last_refusal = DeniedAllocation(head.bytes, self.used, self.limit)
            self._add(head.client, granted)
            actions.append(Credited(head.client, head.seq, granted))
            decided += 1
            self._pending.popleft()
            waiting = self._waiting[head.client]
            waiting.remove(head)
            if not waiting:
                del self._waiting[head.client]
        return actions

    def next_deadline(self) -> int | None:
        """Return the moment by which `expire` must be called; 0: at once. None if no request waits."""
        if not self._pending:
            return None
        return self._pending[0].deadline or 0

    # ---- inside

    def _claim_max(self) -> int:
        """Return the most bytes that a client may declare. With an enforced limit: twice the GPU's memory, for the
        largest limit and memory that the driver took. Without one it is more, because managed memory may be larger than
        the GPU."""
        return min(2 * self.gpu_memory, CLAIM_MAX) if self.enforced and self.gpu_memory else CLAIM_MAX

    def _on_the_gpu(self) -> str:
        return f"the GPU has {self.gpu_memory}" if self._claim_max() < CLAIM_MAX else "no GPU has as much"

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
        if self._pending:  # only the first waiting request has sent recalls
            self._pending[0].asked.pop(client, None)
            self._pending[0].later.discard(client)
        return self.expire(now)

    def _owes_answer(self, client: ClientKey) -> bool:
        return self._answered.get(client, 0) < self._asked.get(client, 0)

    def _may_yet_fit(self, now: int, head: _Pending, actions: list[MemoryAction]) -> bool:
        """Send recalls for the first request (ME2), and set its deadline when it first waits. Return True if it must
        wait: a sibling has yet to answer a recall, or credits kept for lost connections may become free (K1)."""
        unasked = [client for client in self._credits if client != head.client and client not in head.asked]
        if head.deadline is None:
            if not (unasked or self._kept) or self._untracked + head.bytes > self.limit:
                return False
            head.deadline = now + (max(self._recall_ns, RETURN_NS) if self._kept else self._recall_ns)
        if now >= head.deadline:
            return False
        # siblings without a recall may have connected after the first recalls, with memory from an earlier connection
        for client in unasked:
            head.deadline = max(head.deadline, now + self._recall_ns)
            self._ask(head, client, actions)
        for client in list(head.later):
            if self._answered.get(client, 0) >= head.asked[client]:
                head.later.discard(client)
                if client in self._credits:
                    self._ask(head, client, actions)
        answers_due = any(self._answered.get(client, 0) < answer for client, answer in head.asked.items())
        return answers_due or bool(self._kept)

    def _ask(self, head: _Pending, client: ClientKey, actions: list[MemoryAction]) -> None:
        if self._owes_answer(client):
            head.later.add(client)
        else:
            self._asked[client] = self._asked.get(client, 0) + 1
            actions.append(RecallFrom(client, self.used + head.bytes - self.limit))
        head.asked[client] = self._asked[client]
