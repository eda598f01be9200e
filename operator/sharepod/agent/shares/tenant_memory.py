"""Device memory of one tenant: a ledger per GPU, fed by the clients' frames and by readings of the driver.

Guarantees:
- ME5 written-first: bytes are recorded in the handover file before they are credited to a client.
- A request that waits for siblings is decided by a timer if they do not answer.
- Decisions of the ledgers (memory_ledger.py) are sent to the clients at once.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Collection, Mapping
from typing import Protocol, cast

from sharepod import protocol
from sharepod.agent.state.handover import Handover, Inheritance
from sharepod.api.gpunode import MemoryIsolation, Tenant
from sharepod.protocol import ProtocolError

from .memory_ledger import Credited, DeniedAllocation, LedgerError, MemoryAction, MemoryLedger, RecallFrom


class MemoryClient(Protocol):
    """Connection of one process, as memory uses it."""

    handover_open: bool
    """True while the client may still declare memory that its process got on an earlier connection."""

    @property
    def pid(self) -> int:
        """Pid of the process that connected."""

    def __hash__(self) -> int: ...

    def send(self, frame: protocol.AgentFrame) -> None:
        """Send a frame, or close the connection. Never raises, never waits, calls no callback before it returns."""


MemoryFrame = protocol.Reserve | protocol.Release | protocol.MemInfo


class TenantMemory:
    """Memory ledgers of one tenant. Call `close` before closing the handover file.

    Args:
        row: The tenant's row of the ledger.
        recall_ms: Milliseconds that a request waits for siblings to return credits.
        handover: File that keeps credits for the next agent.
        left: Credits that an earlier agent has left in the handover file.
    """

    def __init__(self, row: Tenant, *, recall_ms: int, handover: Handover, left: Inheritance) -> None:
        self._gpus = row.gpus
        enforced = row.memory_isolation is MemoryIsolation.ENFORCED
        self._ledgers = tuple(
            MemoryLedger(row.memory, enforced=enforced, recall_ns=recall_ms * 1_000_000) for _ in row.gpus
        )
        self._handover = handover
        self._credited: tuple[Counter[int], ...] = tuple(Counter() for _ in row.gpus)
        """Credits on open connections, by pid; one counter per GPU."""
        self._timer: asyncio.TimerHandle | None = None
        self._closed = False
        for ledger, size in zip(self._ledgers, left.untracked, strict=False):
            ledger.restore_untracked(size)
        for survivor in left.survivors:
            for ledger, size in zip(self._ledgers, survivor.bytes, strict=True):
                ledger.restore(survivor.pid, size)

    # ---- changes

    def set_limits(self, row: Tenant) -> None:
        """Apply the row's memory limit. Existing credits stay: a lower limit only refuses later requests."""
        now = time.monotonic_ns()
        for index, ledger in enumerate(self._ledgers):
            actions = ledger.set_limit(now, row.memory, enforced=row.memory_isolation is MemoryIsolation.ENFORCED)
            self._carry_out(index, actions)
        self._arm()

    def begin_reading(self) -> None:
        """Start a reading of the driver in all ledgers (`MemoryLedger` K3)."""
        for ledger in self._ledgers:
            ledger.begin_reading()

    def set_gpu_memory(self, size_of: Mapping[str, int]) -> None:
        """Set the memory of the GPUs in bytes, by UUID; 0 if unknown. A process cannot declare much more than this
        (`MemoryLedger.handover`)."""
        for gpu, ledger in zip(self._gpus, self._ledgers, strict=True):
            ledger.gpu_memory = size_of.get(gpu, 0)

    def observe(
        self, memory_of: Mapping[str, Mapping[int, int]], *, unread: Collection[str], absent: Collection[int]
    ) -> None:
        """Compare a reading of the driver with the credits.

        Args:
            memory_of: Bytes that the tenant's processes use, by GPU UUID and pid.
            unread: UUIDs of GPUs that could not be read.
            absent: Pids that use no memory where `memory_of` lacks them.
        """
        for index, (gpu, ledger) in enumerate(zip(self._gpus, self._ledgers, strict=True)):
            if gpu in unread:
                continue
            by_pid = memory_of.get(gpu, {})
            covered = {pid for pid, size in by_pid.items() if size}
            covered.update(pid for pid in absent if pid not in by_pid)
            ledger.observe(sum(by_pid.values()), covered)
            self._handover.keep_untracked(index, ledger.used - ledger.tracked)

    def admit(self, client: MemoryClient) -> None:
        """Reserve a slot in the handover file for a process that may use the GPUs."""
        self._handover.add(client.pid)

    def declared(self, client: MemoryClient) -> None:
        """End the client's handover, because it has declared all memory. Free the other kept credits of its process."""
        client.handover_open = False
        now = time.monotonic_ns()
        for index, ledger in enumerate(self._ledgers):
            if ledger.kept(client.pid):
                self._carry_out(index, ledger.declared(now, client.pid))
                self._keep(index, client.pid)
        self._arm()

    def handle(self, client: MemoryClient, frame: MemoryFrame) -> None:
        """Handle a frame of a client. Raises `ProtocolError`."""
        if frame.gpu >= len(self._ledgers):
            raise ProtocolError(f"gpu {frame.gpu} is not the tenant's")
        try:
            self._handle(client, frame, self._ledgers[frame.gpu])
        except LedgerError as error:
            raise ProtocolError(str(error)) from None
        self._arm()

    def disconnected(self, client: MemoryClient, *, alive: bool) -> None:
        """Drop a closed connection. `alive`: True if its process still runs; its credits are then kept (K1), otherwise
        freed."""
        now = time.monotonic_ns()
        for index, ledger in enumerate(self._ledgers):
            self._count(index, client.pid, -ledger.credit(client))
            actions = ledger.disconnect(now, client, client.pid) if alive else ledger.vanish(now, client)
            self._keep(index, client.pid)
            self._carry_out(index, actions)
        self._arm()

    def exited(self, pid: int) -> None:
        """Free the memory credits that are still recorded for a process, because it has exited."""
        if self._closed:
            return
        now = time.monotonic_ns()
        for index, ledger in enumerate(self._ledgers):
            self._carry_out(index, ledger.exited(now, pid))
        self._handover.forget(pid)
        self._arm()

    def close(self) -> None:
        """Stop the timer; no request is decided any more."""
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    # ---- readings

    def used(self) -> dict[str, int]:
        """Return the bytes in use by GPU UUID."""
        return {gpu: ledger.used for gpu, ledger in zip(self._gpus, self._ledgers, strict=True)}

    def gaps(self) -> dict[str, int]:
        """Return the bytes that the driver counts beyond the credits, such as CUDA contexts, by GPU UUID."""
        return {gpu: ledger.used - ledger.tracked for gpu, ledger in zip(self._gpus, self._ledgers, strict=True)}

    def denied(self) -> dict[str, int]:
        """Return the number of requests refused because of the limit, by GPU UUID."""
        return {gpu: ledger.refused for gpu, ledger in zip(self._gpus, self._ledgers, strict=True)}

    def refusals(self) -> dict[str, tuple[int, DeniedAllocation]]:
        """Return, by UUID of each GPU with refused requests: (their number, the last one)."""
        return {
            gpu: (ledger.refused, ledger.last_refusal)
            for gpu, ledger in zip(self._gpus, self._ledgers, strict=True)
            if ledger.last_refusal is not None
        }

    def credited(self, gpu: str, pid: int) -> int:
        """Return the credits of a process on a GPU, on its open connections."""
        return self._credited[self._gpus.index(gpu)][pid]

    # ---- inside

    def _handle(self, client: MemoryClient, frame: MemoryFrame, ledger: MemoryLedger) -> None:
        now = time.monotonic_ns()
        match frame:
            case protocol.Reserve(handover=True):
                if not client.handover_open:
                    raise ProtocolError("a handover after the first other frame")
                actions = ledger.handover(now, client, frame.bytes, client.pid)
                self._count(frame.gpu, client.pid, frame.bytes)
                self._keep(frame.gpu, client.pid)
                client.send(protocol.Reserved(frame.seq, frame.gpu, frame.bytes))
                self._carry_out(frame.gpu, actions)
            case protocol.Reserve(grown=True):
                ledger.grow(client, frame.bytes)
                self._count(frame.gpu, client.pid, frame.bytes)
                self._keep(frame.gpu, client.pid)
                client.send(protocol.Reserved(frame.seq, frame.gpu, frame.bytes))
            case protocol.Reserve():
                self._carry_out(frame.gpu, ledger.reserve(now, client, frame.seq, frame.bytes, ahead=frame.ahead))
            case protocol.Release():
                actions = ledger.release(now, client, frame.bytes, recalled=frame.recalled)
                self._count(frame.gpu, client.pid, -frame.bytes)
                self._keep(frame.gpu, client.pid)
                self._carry_out(frame.gpu, actions)
            case protocol.MemInfo():
                used = ledger.used_without(client, frame.idle)
                client.send(protocol.Memory(frame.seq, frame.gpu, ledger.limit, used))

    def _count(self, index: int, pid: int, change: int) -> None:
        credited = self._credited[index]
        credited[pid] += change
        if not credited[pid]:
            del credited[pid]

    def _keep(self, index: int, pid: int) -> None:
        self._handover.keep(pid, index, self._credited[index][pid] + self._ledgers[index].kept(pid))

    def _carry_out(self, index: int, actions: list[MemoryAction]) -> None:
        for action in actions:
            client = cast(MemoryClient, action.client)  # this ledger has only clients of this type
            if isinstance(action, Credited):
                if action.bytes:
                    self._count(index, client.pid, action.bytes)
                    self._keep(index, client.pid)
                client.send(protocol.Reserved(action.seq, index, action.bytes))
            elif isinstance(action, RecallFrom):
                client.send(protocol.Recall(index, action.bytes))

    def _arm(self) -> None:
        """Set the one timer to the earliest deadline of a request."""
        if self._closed:
            return
        due = min((when for ledger in self._ledgers if (when := ledger.next_deadline()) is not None), default=None)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if due is not None:
            delay = max(0, due - time.monotonic_ns()) / 1e9
            self._timer = asyncio.get_running_loop().call_later(delay, self._decide)

    def _decide(self) -> None:
        self._timer = None
        now = time.monotonic_ns()
        try:
            for index, ledger in enumerate(self._ledgers):
                self._carry_out(index, ledger.expire(now))
        finally:
            self._arm()
