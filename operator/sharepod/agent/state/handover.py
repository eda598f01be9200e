"""What an agent leaves to the one that comes after it, of one tenant: who has how much memory, and the time account.

Guarantees:
- Bytes stand here before the client is told that they are its own, and go on standing here until the agent knows that
  they are free. So an agent that was killed at any moment leaves nothing that its successor could grant twice.
- Only processes that still run are restored: the same process, by pid and start time, since the same start of the node.
- A file that is damaged, of another layout, or not of these GPUs, is as none; whoever writes here is never stopped by a
  disk.

The file is memory that is mapped and shared: the kernel keeps what is written to it, however the process ends, and no
write needs a system call. It is of no use after a restart of the node, so it is never flushed. All words are signed, of
64 bits and written at once:

    layout, boot, GPUs, slots, greeted, account's turn | untracked bytes of each GPU | two accounts | slots

Of the two accounts that one is true whose turn it is; each ends with a sum of its words. A slot is pid (0: free), start
time, bytes on each GPU.
"""

from __future__ import annotations

import hashlib
import mmap
import os
from collections.abc import Sequence
from dataclasses import astuple, dataclass, fields
from functools import cache
from pathlib import Path

import structlog

from sharepod.timeshare import AccountSnapshot

from .boot import boot_id

log = structlog.get_logger(__name__)

_LAYOUT_WORD, _BOOT, _GPUS, _SLOTS, _GREETED, _TURN = range(6)
_HEAD = 6
_ACCOUNT = len(fields(AccountSnapshot)) + 1
_BYTES_MAX = 1 << 47
"""More than any GPU has."""


@dataclass(frozen=True)
class Survivor:
    """A process and the bytes that it has on each GPU. `start`: when it began, in the kernel's ticks."""

    pid: int
    start: int
    bytes: tuple[int, ...]


@dataclass(frozen=True)
class Inheritance:
    """What an earlier agent left. `untracked`: on each GPU, bytes that the driver counted beyond all credits."""

    survivors: tuple[Survivor, ...] = ()
    untracked: tuple[int, ...] = ()
    account: AccountSnapshot | None = None
    greeted: bool = False


NOTHING_INHERITED = Inheritance()


class Handover:
    """The file of one tenant. `open` it from a thread; everything else is quick and may be called anywhere."""

    def __init__(self, pages: mmap.mmap, gpus: Sequence[str], slots: int) -> None:
        self._pages = pages
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
    def open(cls, path: Path, gpus: Sequence[str], slots: int) -> tuple[Handover, Inheritance]:
        """The file for a tenant on these GPUs with room for so many processes, and what an earlier agent left in it.

        Where the disk does not take it, it is kept in memory only, and the log says so.
        """
        left = read(path, gpus)
        slots = max(slots, 2 * len(left.survivors))
        size = 8 * (_HEAD + len(gpus) + 2 * _ACCOUNT + slots * (2 + len(gpus)))
        fresh = path.with_name(f".{path.name}.new")
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            fresh.unlink(missing_ok=True)
            descriptor = os.open(fresh, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            try:
                os.posix_fallocate(descriptor, 0, size)  # a full disk is told here, not by a signal at some later write
                pages = mmap.mmap(descriptor, size)
            finally:
                os.close(descriptor)
            kept = cls(pages, gpus, slots)
            kept._restore(left)
            fresh.rename(path)
        except OSError as error:
            log.warning("cannot keep what a tenant has for the next agent", file=str(path), error=str(error))
            kept = cls(mmap.mmap(-1, size), gpus, slots)
            kept._restore(left)
        return kept, left

    def add(self, pid: int) -> None:
        """A process may be credited from now on."""
        if pid <= 0 or pid in self._slot_of:
            return
        start = start_time(pid)
        if start is None:
            return
        if not self._free:
            if not self._full_logged:
                log.warning("no room to keep what a process has for the next agent", pid=pid)
                self._full_logged = True
            return
        self._occupy(pid, start)

    def keep(self, pid: int, gpu: int, size: int) -> None:
        """So many bytes of this GPU are the process's."""
        slot = self._slot_of.get(pid)
        if slot is not None:
            self._words[slot + 2 + gpu] = size

    def forget(self, pid: int) -> None:
        """The process has ended."""
        slot = self._slot_of.pop(pid, None)
        if slot is not None:
            self._words[slot] = 0
            self._free.append(slot)

    def keep_untracked(self, gpu: int, size: int) -> None:
        """The driver counts so many bytes beyond all credits."""
        self._words[self._untracked + gpu] = size

    def keep_greeted(self) -> None:
        """A hook of the tenant has connected."""
        self._words[_GREETED] = 1

    def keep_account(self, state: AccountSnapshot) -> None:
        """Its time account is this now."""
        turn = 1 - self._words[_TURN]
        begin = self._accounts + turn * _ACCOUNT
        values = astuple(state)
        for at, value in enumerate((*values, _sum(values)), begin):
            self._words[at] = value
        self._words[_TURN] = turn

    def close(self) -> None:
        """Leaves the file to the next agent."""
        self._words.release()
        self._pages.close()

    def _occupy(self, pid: int, start: int) -> None:
        slot = self._slot_of[pid] = self._free.pop()
        for at in range(slot + 1, slot + self._width):
            self._words[at] = 0
        self._words[slot + 1] = start
        self._words[slot] = pid

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
    """What an earlier agent left of a tenant on these GPUs, whoever of its processes still runs."""
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return NOTHING_INHERITED
    except OSError as error:
        log.warning("cannot read what the agent before has left", file=str(path), error=str(error))
        return NOTHING_INHERITED
    words = memoryview(content[: len(content) // 8 * 8]).cast("q")
    first, width = _HEAD + len(gpus) + 2 * _ACCOUNT, 2 + len(gpus)
    if len(words) < first or words[_LAYOUT_WORD] != _layout() or words[_SLOTS] * width != len(words) - first:
        log.warning("what the agent before has left is damaged or of another kind", file=str(path))
        return NOTHING_INHERITED
    if words[_BOOT] != _digest([boot_id()]) or words[_GPUS] != _digest(gpus):
        return NOTHING_INHERITED
    begin = _HEAD + len(gpus) + (words[_TURN] & 1) * _ACCOUNT
    *account, told = words[begin : begin + _ACCOUNT]
    survivors = [
        Survivor(words[at], words[at + 1], tuple(words[at + 2 : at + width]))
        for at in range(first, len(words), width)
        if words[at] > 0
    ]
    return Inheritance(
        tuple(
            survivor
            for survivor in survivors
            if _possible(survivor.bytes) and start_time(survivor.pid) == survivor.start
        ),
        tuple(size if _possible([size]) else 0 for size in words[_HEAD : _HEAD + len(gpus)]),
        AccountSnapshot(*account) if account[0] > 0 and told == _sum(account) else None,
        bool(words[_GREETED]),
    )


def start_time(pid: int) -> int | None:
    """When a process began, in ticks since the start of the node; None if there is no such process."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return None
    after_name = stat[stat.rfind(b")") + 2 :].split()
    return int(after_name[19])


def _possible(sizes: Sequence[int]) -> bool:
    return all(0 <= size <= _BYTES_MAX for size in sizes)


def _sum(words: Sequence[int]) -> int:
    """Differs where any one word does, and where two have changed places."""
    return sum((2 * place + 3) * word for place, word in enumerate(words)) % (1 << 62)


@cache
def _layout() -> int:
    """What an agent whose accounts are made otherwise does not write."""
    return _digest(["handover 2", *(field.name for field in fields(AccountSnapshot))])


def _digest(texts: Sequence[str]) -> int:
    return int.from_bytes(hashlib.blake2b("\n".join(texts).encode(), digest_size=8).digest(), "little", signed=True)
