"""One tenant's device memory: a ledger for each of its GPUs, fed by its clients' frames and by what the driver says.

Guarantees: what a client is told that it has stands in the hand-over before; a request that waits for siblings is
decided by a timer, whatever else happens.
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

from .memory_ledger import Credited, LedgerError, MemoryAction, MemoryLedger, RecallFrom


class MemoryClient(Protocol):
    """A process's connection, as far as memory goes."""

    handover_open: bool
    """It may still declare what it holds from an earlier connection."""

    @property
    def pid(self) -> int:
        """Of the process that connected."""

    def __hash__(self) -> int: ...

    def send(self, frame: protocol.AgentFrame) -> None:
        """Sends, or gives the client up. Never raises, never waits, calls nothing back before it returns."""


MemoryFrame = protocol.Reserve | protocol.Release | protocol.MemInfo


class TenantMemory:
    """`handover`: where it is written down; `left`: what an earlier agent wrote. `close` before the former is."""

    def __init__(self, row: Tenant, *, recall_ms: int, handover: Handover, left: Inheritance) -> None:
        self._gpus = row.gpus
        enforced = row.memory_isolation is MemoryIsolation.ENFORCED
        self._ledgers = tuple(
            MemoryLedger(row.memory, enforced=enforced, recall_ns=recall_ms * 1_000_000) for _ in row.gpus
        )
        self._handover = handover
        self._credited: tuple[Counter[int], ...] = tuple(Counter() for _ in row.gpus)
        """Of each GPU, what each process has by the connections that it has."""
        self._timer: asyncio.TimerHandle | None = None
        self._closed = False
        for ledger, size in zip(self._ledgers, left.untracked, strict=False):
            ledger.restore_untracked(size)
        for survivor in left.survivors:
            for ledger, size in zip(self._ledgers, survivor.bytes, strict=True):
                ledger.restore(survivor.pid, size)

    # ---- what happens

    def set_limits(self, row: Tenant) -> None:
        """From now on. Nothing is taken back; a lower limit refuses what comes."""
        now = time.monotonic_ns()
        for index, ledger in enumerate(self._ledgers):
            actions = ledger.set_limit(now, row.memory, enforced=row.memory_isolation is MemoryIsolation.ENFORCED)
            self._carry_out(index, actions)
        self._arm()

    def begin_reading(self) -> None:
        """From now on the driver is being read."""
        for ledger in self._ledgers:
            ledger.begin_reading()

    def observe(
        self, memory_of: Mapping[str, Mapping[int, int]], *, unread: Collection[str], absent: Collection[int]
    ) -> None:
        """What the driver says that the tenant's processes use, in bytes by UUID and pid. `unread`: GPUs that it did
        not say it of. `absent`: processes that use nothing on a GPU where they are not listed."""
        for index, (gpu, ledger) in enumerate(zip(self._gpus, self._ledgers, strict=True)):
            if gpu in unread:
                continue
            by_pid = memory_of.get(gpu, {})
            told = {pid for pid, size in by_pid.items() if size}
            told.update(pid for pid in absent if pid not in by_pid)
            ledger.observe(sum(by_pid.values()), told)
            self._handover.keep_untracked(index, ledger.used - ledger.tracked)

    def admit(self, client: MemoryClient) -> None:
        """A process that may use the GPUs has connected."""
        self._handover.add(client.pid)

    def declared(self, client: MemoryClient) -> None:
        """The process has declared on this connection what it holds from earlier ones."""
        client.handover_open = False
        now = time.monotonic_ns()
        for index, ledger in enumerate(self._ledgers):
            if ledger.kept(client.pid):
                self._carry_out(index, ledger.declared(now, client.pid))
                self._keep(index, client.pid)
        self._arm()

    def handle(self, client: MemoryClient, frame: MemoryFrame) -> None:
        """A frame of a client. Raises `ProtocolError`."""
        if frame.gpu >= len(self._ledgers):
            raise ProtocolError(f"gpu {frame.gpu} is not the tenant's")
        try:
            self._handle(client, frame, self._ledgers[frame.gpu])
        except LedgerError as error:
            raise ProtocolError(str(error)) from None
        self._arm()

    def gone(self, client: MemoryClient, *, alive: bool) -> None:
        """A connection is gone. With it goes what its process had, unless that is still `alive`."""
        now = time.monotonic_ns()
        for index, ledger in enumerate(self._ledgers):
            self._count(index, client.pid, -ledger.credit(client))
            actions = ledger.disconnect(now, client, client.pid) if alive else ledger.vanish(now, client)
            self._keep(index, client.pid)
            self._carry_out(index, actions)
        self._arm()

    def exited(self, pid: int) -> None:
        """A process has ended."""
        if self._closed:
            return
        now = time.monotonic_ns()
        for index, ledger in enumerate(self._ledgers):
            self._carry_out(index, ledger.exited(now, pid))
        self._handover.forget(pid)
        self._arm()

    def close(self) -> None:
        """Decides nothing any more."""
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    # ---- what is known

    def used(self) -> dict[str, int]:
        """Bytes in use by UUID."""
        return {gpu: ledger.used for gpu, ledger in zip(self._gpus, self._ledgers, strict=True)}

    def gaps(self) -> dict[str, int]:
        """By UUID, the bytes that the driver counts beyond what was credited."""
        return {gpu: ledger.used - ledger.tracked for gpu, ledger in zip(self._gpus, self._ledgers, strict=True)}

    def denied(self) -> dict[str, int]:
        """By UUID, requests that were refused because they would have gone over the limit."""
        return {gpu: ledger.refused for gpu, ledger in zip(self._gpus, self._ledgers, strict=True)}

    def credited(self, gpu: str, pid: int) -> int:
        """What a process has on a GPU by the connections that it has."""
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
            client = cast(MemoryClient, action.client)  # who else would have asked this ledger
            if isinstance(action, Credited):
                if action.bytes:
                    self._count(index, client.pid, action.bytes)
                    self._keep(index, client.pid)
                client.send(protocol.Reserved(action.seq, index, action.bytes))
            elif isinstance(action, RecallFrom):
                client.send(protocol.Recall(index, action.bytes))

    def _arm(self) -> None:
        """One timer for whichever request has to be decided first."""
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
