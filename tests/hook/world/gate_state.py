"""The hook's gate in a running process, read from the memory of that process: evidence that does not depend on the
hook's reports.

Guarantees:
- If the gate was closed before `Gate.inside` was called, and the driver accepts a launch while the gate is still
  closed, then `inside` returned that launch. All other launches find the gate closed (G1, gate.h).
- The process is not affected.
"""

from __future__ import annotations

import json
import struct
import subprocess
import time
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import NamedTuple

from hook.conftest import BUILD
from hook.world.held_thread import Hold


@dataclass(frozen=True)
class _Layout:
    """Offsets in the hook's memory, in bytes."""

    process: int
    """Offset of the pointer `the_process` in the hook's file."""
    count: int
    """Offset of `slot_count` from the address in `the_process`."""
    slots: int
    slot: int
    """Size of a thread's slot in the gate's table."""
    sequence: int
    """Offset of `sequence` in a slot. `thread` is an offset in a slot, too."""
    thread: int


@cache
def _layout(hook: Path) -> _Layout:
    debug = hook.with_name(f"{hook.name}.debug")
    symbols = subprocess.run(
        ["nm", str(debug if debug.is_file() else hook)], capture_output=True, text=True, check=True, timeout=60
    ).stdout.split("\n")
    addresses = [int(line.split()[0], 16) for line in symbols if line.endswith(" the_process")]
    layout = subprocess.run(
        [str(BUILD / "programs" / "gatelayout")], capture_output=True, text=True, check=True, timeout=60
    ).stdout
    return _Layout(addresses[0], **json.loads(layout))


class Passage(NamedTuple):
    """One launch of one thread, from the gate to the return of the driver."""

    thread: int
    """Thread id of the operating system."""
    sequence: int
    """Number of the launch: it differs between the thread's launches."""


class Gate:
    """Gate of one process.

    Raises:
        OSError: The process has ended.
        LookupError: It has not loaded the hook.
    """

    def __init__(self, pid: int, hook: Path) -> None:
        self._tasks = Path(f"/proc/{pid}/task")
        self._layout = _layout(hook)
        self._memory = Path(f"/proc/{pid}/mem")
        maps = [line.split() for line in Path(f"/proc/{pid}/maps").read_text().splitlines()]
        bases = [int(line[0].split("-")[0], 16) for line in maps if line[-1].endswith("/libsharepod.so")]
        if not bases:
            raise LookupError(f"process {pid} has no hook")
        (self._process,) = struct.unpack("=Q", self._read(min(bases) + self._layout.process, 8))

    def inside(self) -> list[Passage]:
        """Return the launches that threads are inside of. A thread that is just checking whether the gate is open
        counts as inside.

        Threads without a slot of their own are missing.
        """
        at = self._layout
        try:
            (count,) = struct.unpack("=I", self._read(self._process + at.count, 4))
            slots = self._read(self._process + at.slots, count * at.slot)
        except OSError:  # the process has ended
            return []
        found = []
        for slot in range(0, count * at.slot, at.slot):
            (sequence,) = struct.unpack_from("=Q", slots, slot + at.sequence)
            if sequence & 1:
                found.append(Passage(struct.unpack_from("=i", slots, slot + at.thread)[0], sequence))
        return found

    def describe(self, thread: int) -> str:
        """Describe a thread: its state, the system call that it is in, and the time for which it has waited for a
        processor since it began.
        """
        task = self._tasks / str(thread)
        try:
            state = (task / "stat").read_text().rpartition(")")[2].split()[0]
            call = (task / "syscall").read_text().split()[0]
            waited_ms = int((task / "schedstat").read_text().split()[1]) // 1_000_000
        except OSError:
            return f"thread {thread}: gone"
        return f"thread {thread}: state {state}, in system call {call}, has waited {waited_ms} ms for a processor"

    def _read(self, address: int, size: int) -> bytes:
        with self._memory.open("rb", buffering=0) as memory:
            memory.seek(address)
            got = memory.read(size)
        if len(got) < size:
            raise OSError(f"{len(got)} of {size} bytes at {address:#x}")
        return got


def caught_inside(gate: Gate, looks: int = 500) -> Hold | None:
    """Stop a thread while it is inside a launch: after the gate, and before the driver returns. Return the held thread,
    or None if none was caught in `looks` checks.
    """
    for _ in range(looks):
        for passage in gate.inside()[:1]:
            hold = Hold(passage.thread)
            if hold.stopped() and passage in gate.inside():
                return hold
            while not hold.release():
                time.sleep(0.0001)
    return None
