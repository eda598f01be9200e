"""Handover file: the memory that each process of one tenant has, and the tenant's time account, for the next agent on
this node.

Guarantees:
- ME5 written-first: bytes are recorded before they are credited to a client, and stay recorded until the agent knows
  that they are free. So after a kill of the agent at any moment, its successor never grants the same bytes twice.
- Only processes that still run are restored: pid, start time and boot of the node must be the same.
- A file that is damaged, has another layout or belongs to other GPUs counts as empty. A damaged slot counts as free.
- A write never blocks on a disk and never fails.

The file is mapped shared memory: writes survive any end of the process, and need no system call. It is useless after a
restart of the node, so it is never flushed. All words are signed, have 64 bits and are written at once:

    layout, boot, GPUs, slots, greeted, valid account | untracked bytes of each GPU | two accounts | slots

`valid account` (0 or 1) selects one of the two accounts; each account ends with a checksum. A slot is a pid (0: free
slot), its start time, and its bytes on each GPU. Each word of a slot, and of the untracked bytes, has its checksum in
its upper bits, so that a partial write is detected.
"""

from __future__ import annotations

import hashlib
import mmap
import os
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from functools import cache
from operator import attrgetter
from pathlib import Path

import structlog

from sharepod.timeshare import AccountSnapshot

from . import files
from .boot import boot_id
from .kept_descriptors import NOTHING_KEPT, KeptDescriptors

log = structlog.get_logger(__name__)

_LAYOUT_WORD, _BOOT, _GPUS, _SLOTS, _GREETED, _TURN = range(6)
_HEAD = 6
_ACCOUNT_FIELDS = tuple(field.name for field in fields(AccountSnapshot))
_account_values = attrgetter(*_ACCOUNT_FIELDS)
_ACCOUNT_WORDS = struct.Struct(f"={len(_ACCOUNT_FIELDS)}q")
_ACCOUNT = len(_ACCOUNT_FIELDS) + 1
_VALUE_BITS = 48
"""Bits for the value in a word with a checksum: enough for the bytes of any GPU and the clock ticks since any boot."""
_BYTES_MAX = 1 << 47
"""Largest plausible size in bytes, 128 TiB: more than any GPU has. A larger size is damage."""
_SLOTS_MAX = 1 << 17
"""Most slots of a file. A longer file is damaged, and is not read."""


@dataclass(frozen=True)
class Survivor:
    """Client process of an earlier agent that still runs."""

    pid: int
    start: int
    """Start time, in clock ticks since the node's boot."""
    bytes: tuple[int, ...]
    """Device memory that the process has on each of the tenant's GPUs."""


@dataclass(frozen=True)
class Inheritance:
    """State of one tenant that an earlier agent has left."""

    survivors: tuple[Survivor, ...] = ()
    untracked: tuple[int, ...] = ()
    """On each GPU, bytes that the driver counted beyond all credits."""
    account: AccountSnapshot | None = None
    """Time account; None if it is missing or damaged."""
    greeted: bool = False
    """A hook of the tenant has connected before."""


NOTHING_INHERITED = Inheritance()


class Handover:
    """Handover file of one tenant, open for writing. `open` and `made` do I/O: call them from a thread."""

    def __init__(
        self,
        pages: mmap.mmap,
        gpus: Sequence[str],
        slots: int,
        start_of: Callable[[int], int | None] | None = None,
    ) -> None:
        self._pages = pages
        self._start_of = start_of or start_time
        self._words = memoryview(pages).cast("q")
        self._untracked = _HEAD
        self._accounts = _HEAD + len(gpus)
        self._first = self._accounts + 2 * _ACCOUNT
        self._width = 2 + len(gpus)
        self._free = list(range(self._first + (slots - 1) * self._width, self._first - 1, -self._width))
        self._slot_of: dict[int, int] = {}
        self._full_logged = False
        self._words[_BOOT], self._words[_GPUS], self._words[_SLOTS] = _digest([boot_id()]), _digest(gpus), slots
        self._words[_LAYOUT_WORD] = _layout()

    @classmethod
    def open(
        cls, path: Path, gpus: Sequence[str], slots: int, *, kept: KeptDescriptors = NOTHING_KEPT, name: str = ""
    ) -> tuple[Handover, Inheritance]:
        """Open the file of a tenant; return it with the state of an earlier agent.

        If the disk cannot store the file, create it in memory only, and log a warning. The supervisor then keeps a copy
        of its descriptor for the next agent.

        Args:
            gpus: UUIDs of the tenant's GPUs.
            slots: least number of processes to have room for.
            kept: descriptors that survive a kill of this agent.
            name: name of this tenant's in-memory file among `kept`.
        """
        descriptor, slots, left = cls.made(path, gpus, slots, kept=kept, name=name)
        return cls.adopt(descriptor, gpus, slots, left), left

    @classmethod
    def adopt(
        cls,
        descriptor: int,
        gpus: Sequence[str],
        slots: int,
        left: Inheritance,
        start_of: Callable[[int], int | None] | None = None,
    ) -> Handover:
        """Return the file of `made`, open for writing. Closes the descriptor.

        Args:
            descriptor: descriptor of the file.
            gpus: UUIDs of the tenant's GPUs.
            slots: number of processes that it has room for.
            left: state to write into the file.
            start_of: returns the start time of a process by its pid, None if it has exited. Default: `start_time`.
        """
        try:
            handover = cls(mmap.mmap(descriptor, _size(gpus, slots)), gpus, slots, start_of)
        finally:
            os.close(descriptor)
        handover._restore(left)
        return handover

    @classmethod
    def made(
        cls, path: Path, gpus: Sequence[str], slots: int, *, kept: KeptDescriptors = NOTHING_KEPT, name: str = ""
    ) -> tuple[int, int, Inheritance]:
        """Create a tenant's file again, with the state that an earlier agent has left. Return its descriptor, its
        number of slots, and that state. Arguments as for `open`."""
        # newer than the file on disk, which the earlier agent could not write
        in_memory = kept.take(name)
        if in_memory is None:
            left = read(path, gpus)
        else:
            left = read(Path(f"/proc/self/fd/{in_memory.fd}"), gpus)
            os.close(in_memory.fd)
        slots = max(slots, 2 * len(left.survivors))
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            with files.replacing(path) as fresh:
                descriptor = os.open(fresh, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
                try:
                    # This reserves the space: a full disk fails here, instead of with a signal at a later write.
                    os.posix_fallocate(descriptor, 0, _size(gpus, slots))
                    cls.adopt(os.dup(descriptor), gpus, slots, left).close()
                except OSError:
                    os.close(descriptor)
                    raise
        except OSError as error:
            log.warning(
                "cannot keep a tenant's state for the next agent", tenant=path.name, file=str(path), error=str(error)
            )
            return cls._in_memory(gpus, slots, left, kept, name), slots, left
        if in_memory is not None:
            kept.drop(name)
        return descriptor, slots, left

    @classmethod
    def _in_memory(cls, gpus: Sequence[str], slots: int, left: Inheritance, kept: KeptDescriptors, name: str) -> int:
        descriptor = os.memfd_create("handover")
        os.ftruncate(descriptor, _size(gpus, slots))
        cls.adopt(os.dup(descriptor), gpus, slots, left).close()
        kept.keep(name, descriptor)
        return descriptor

    def add(self, pid: int) -> None:
        """Reserve a slot for a process that may be credited from now on. Do nothing if it has one, or has exited."""
        if pid <= 0 or pid in self._slot_of:
            return
        start = self._start_of(pid)
        if start is None:
            return
        if not self._free:
            if not self._full_logged:
                log.warning("no room to keep a process's memory for the next agent", pid=pid)
                self._full_logged = True
            return
        self._occupy(pid, start)

    def keep(self, pid: int, gpu: int, size: int) -> None:
        """Record that the process has `size` bytes on the tenant's GPU number `gpu`."""
        slot = self._slot_of.get(pid)
        if slot is not None:
            self._write(slot + 2 + gpu, size)

    def forget(self, pid: int) -> None:
        """Free the slot of a process that has exited."""
        slot = self._slot_of.pop(pid, None)
        if slot is not None:
            self._write(slot, 0)
            self._free.append(slot)

    def keep_untracked(self, gpu: int, size: int) -> None:
        """Record that the driver counts `size` bytes beyond all credits on the tenant's GPU number `gpu`."""
        self._write(self._untracked + gpu, size)

    def keep_greeted(self) -> None:
        """Record that a hook of the tenant has connected."""
        self._words[_GREETED] = 1

    def keep_account(self, state: AccountSnapshot) -> None:
        """Record the tenant's time account: write the account that is not valid, then make it the valid one. A kill in
        between leaves the former account valid."""
        turn = 1 - self._words[_TURN]
        begin = self._accounts + turn * _ACCOUNT
        content = _ACCOUNT_WORDS.pack(*_account_values(state))
        self._pages[8 * begin : 8 * begin + len(content)] = content
        self._words[begin + _ACCOUNT - 1] = _sum(content)
        self._words[_TURN] = turn

    def close(self) -> None:
        """Close the file; it stays for the next agent."""
        self._words.release()
        self._pages.close()

    def _occupy(self, pid: int, start: int) -> None:
        slot = self._slot_of[pid] = self._free.pop()
        for at in range(slot + 2, slot + self._width):
            self._write(at, 0)
        self._write(slot + 1, start)
        self._write(slot, pid)

    def _write(self, at: int, value: int) -> None:
        """Write a word and its checksum by a single store."""
        self._words[at] = value | _check(value, at) << _VALUE_BITS

    def _restore(self, left: Inheritance) -> None:
        for gpu, size in enumerate(left.untracked):
            self.keep_untracked(gpu, size)
        if left.account is not None:
            self.keep_account(left.account)
        if left.greeted:
            self.keep_greeted()
        for survivor in left.survivors:
            self._occupy(survivor.pid, survivor.start)
            for gpu, size in enumerate(survivor.bytes):
                self.keep(survivor.pid, gpu, size)


def read(path: Path, gpus: Sequence[str]) -> Inheritance:
    """Return the state that an earlier agent left of a tenant on these GPUs, reduced to processes that still run."""
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            content = file.read(size) if size <= _size(gpus, _SLOTS_MAX) else b""
    except FileNotFoundError:
        return NOTHING_INHERITED
    except OSError as error:
        log.warning("cannot read the earlier agent's handover file", tenant=path.name, file=str(path), error=str(error))
        return NOTHING_INHERITED
    words = memoryview(content[: len(content) // 8 * 8]).cast("q")
    first, width = _HEAD + len(gpus) + 2 * _ACCOUNT, 2 + len(gpus)
    if len(words) < first or words[_LAYOUT_WORD] != _layout() or words[_SLOTS] * width != len(words) - first:
        log.warning("earlier agent's handover file is damaged or has another layout", tenant=path.name, file=str(path))
        return NOTHING_INHERITED
    if words[_BOOT] != _digest([boot_id()]) or words[_GPUS] != _digest(gpus):
        return NOTHING_INHERITED
    begin = _HEAD + len(gpus) + (words[_TURN] & 1) * _ACCOUNT
    *account, checksum = words[begin : begin + _ACCOUNT]
    survivors: dict[int, Survivor] = {}  # by pid, because a damaged file may have several slots for it
    for at in range(first, len(words), width):
        if words[at] == 0:  # the slot is free, as most slots are
            continue
        pid, start, *sizes = (_checked(words[place], place) for place in range(at, at + width))
        if pid == 0:
            continue
        if pid is None or start is None or None in sizes:
            log.warning("a process's place in the handover file is damaged", tenant=path.name, file=str(path))
            continue
        survivor = Survivor(pid, start, tuple(size for size in sizes if size is not None))
        if _possible(survivor.bytes) and start_time(pid) == start:
            survivors[pid] = survivor
    return Inheritance(
        tuple(survivors.values()),
        tuple(_checked(words[at], at) or 0 for at in range(_HEAD, _HEAD + len(gpus))),
        AccountSnapshot(*account) if account[0] > 0 and checksum == _sum(_ACCOUNT_WORDS.pack(*account)) else None,
        bool(words[_GREETED]),
    )


def _size(gpus: Sequence[str], slots: int) -> int:
    """Return the size of a file in bytes."""
    return 8 * (_HEAD + len(gpus) + 2 * _ACCOUNT + slots * (2 + len(gpus)))


def start_time(pid: int) -> int | None:
    """Return the start time of a process, in clock ticks since the node's boot; None if there is no such process."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return None
    after_name = stat[stat.rfind(b")") + 2 :].split()
    return int(after_name[19])


def _possible(sizes: Sequence[int]) -> bool:
    return all(0 <= size <= _BYTES_MAX for size in sizes)


def _check(value: int, at: int) -> int:
    """Return a 15-bit checksum of a value and its position in the file. For the value 0 it is 0, so that a new file,
    all zeros, is valid."""
    return (value * (0x9E3779B97F4A7C15 + 2 * at) & 0xFFFFFFFFFFFFFFFF) >> 49


def _checked(word: int, at: int) -> int | None:
    """Return the value of a word with its checksum; None if it is damaged."""
    value = word & (1 << _VALUE_BITS) - 1
    return value if word >> _VALUE_BITS == _check(value, at) else None


def _sum(content: bytes) -> int:
    """Return a checksum of the content, as one signed 64-bit word."""
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "little", signed=True)


@cache
def _layout() -> int:
    """Return a digest of the file's layout, which changes with the account's fields. A file with another digest
    counts as empty."""
    return _digest(["handover 3", *_ACCOUNT_FIELDS])


def _digest(texts: Sequence[str]) -> int:
    return int.from_bytes(hashlib.blake2b("\n".join(texts).encode(), digest_size=8).digest(), "little", signed=True)
