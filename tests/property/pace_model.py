"""The hook's pace model (shim/src/time/queue/pace.c), compiled without the rest of the hook, and a GPU stream that it
meters.

`library()` returns the model as C functions. `Stream` simulates the launching thread and the GPU in simulated time.
Tests choose how long each launch runs, and how late the thread checks its fences (events behind launches).
"""

from __future__ import annotations

import functools
import re
import subprocess
import tempfile
from collections import deque
from pathlib import Path
from typing import Any

import cffi

ROOT = Path(__file__).resolve().parents[2]
NEVER = 2**64 - 1
FENCES = 2
WINDOW_MOST = 64
WIDE_MOST = 512
FREE_MOST = 1 << 14
LEAD = 500_000
POLL = 20_000
MS = 1_000_000
WINDOW_LONG = 5 * MS
WIDE_LONG = 50 * MS


@functools.cache
def library() -> tuple[Any, Any]:
    """Compile the model with the undefined-behaviour sanitizer; return (ffi, functions)."""
    header = (ROOT / "shim/src/time/queue/pace.h").read_text()
    plain = re.sub(r"/\*.*?\*/|^#.*?$", "", header, flags=re.DOTALL | re.MULTILINE).replace("PACE_FENCES]", "2]")
    ffi = cffi.FFI()
    ffi.cdef(plain)
    folder = Path(tempfile.mkdtemp(prefix="sharepod-pace-"))
    target = folder / "pace.so"
    command = ["cc", "-std=c11", "-O1", "-fPIC", "-shared", "-fsanitize=undefined", "-fno-sanitize-recover=all"]
    command += [f"-I{ROOT / 'shim/src'}", "-o", str(target), str(ROOT / "shim/src/time/queue/pace.c")]
    subprocess.run(command, check=True, timeout=60)
    functions = ffi.dlopen(str(target))
    target.unlink()
    folder.rmdir()
    return ffi, functions


class Stream:
    """Thread that launches into one stream under the model, and the GPU. Times in ns."""

    def __init__(self) -> None:
        self.ffi, self.model = library()
        self.pace = self.ffi.new("struct pace *")
        self.now = 1_000 * MS
        self.ends = 0
        """Time at which all launched work ends."""
        self.deadline = NEVER
        self.fences: deque[int] = deque()
        """Times at which fences pass, for the fences that the thread has not yet seen pass."""
        self.unfinished: deque[int] = deque()
        """Times at which unfinished launches end."""
        self.begun_after_end: list[int] = []
        """For each launch that began on the GPU after its quantum had ended: nanoseconds from that end to its start."""
        self.most_unfinished = 0
        self.closes = False
        """True if the gate closes at the deadline even while the thread waits for a fence."""

    def open(
        self,
        quantum: int,
        drained: int = 0,
        *,
        short: bool = False,
        wide: bool = False,
        looked_before: int | None = None,
    ) -> None:
        """Open the gate.

        Args:
            quantum: Length of the opening; 0: without end.
            drained: Time at which the last opening was observed as drained.
            short: True if the queue is kept short, as next to an interactive tenant (PC4 of pace.h).
            wide: True if windows may take 20 to 50 ms, as for a tenant that holds the GPU alone (PC1, PC5).
            looked_before: Time of the check before `drained`; by default POLL ns earlier.
        """
        self.model.pace_widen(self.pace, wide)
        self.model.pace_keep_short(self.pace, short)
        self.deadline = self.now + quantum if quantum else NEVER
        if self.model.pace_undrained(self.pace, drained) and self.ends > self.now:
            self.model.pace_carry(self.pace, self.now, self.deadline)
            return
        self.fences.clear()
        before = max(drained - POLL, 0) if looked_before is None else looked_before
        self.model.pace_open(self.pace, self.now, self.deadline, (before, drained))

    def widen(self, wide: bool) -> None:
        """Change the width of the queue within the opening."""
        self.model.pace_widen(self.pace, wide)
        self.model.pace_plan(self.pace, self.now, self.deadline)

    def drain(self) -> int:
        """Wait until all launched work has ended. Return that time."""
        self.now = max(self.now, self.ends)
        return self.now

    def wait(self, late: int = 0) -> None:
        """Wait for the oldest fence. The thread polls: POLL ns before the fence passes it finds the fence pending, and
        `late` ns after that it finds the fence passed."""
        if self.closes and self.fences[0] > self.deadline:
            self.now = max(self.now, self.deadline)
            self.model.pace_gave_up(self.pace, True)
            return
        passes = self.fences.popleft()
        waited, begun = passes > self.now, self.now
        self.now = max(self.now, passes) + (late if waited else 0)
        self.model.pace_passed(self.pace, (max(begun, passes - POLL) if waited else 0, self.now))

    def turn(self, takes: int, most: int) -> int:
        """Launch until the gate closes, at most `most` times. Return the number of launches."""
        launched = 0
        while launched < most and self.now < self.deadline and self.launch(takes):
            launched += 1
        self.now = max(self.now, self.deadline)
        return launched

    def launch(self, takes: int, late: int = 0) -> bool:
        """Launch, unless the model holds the launch back. Return whether it was launched."""
        if self.pace.window.full and self.model.pace_holds_back(self.pace, self.now, self.deadline):
            return False
        self.now = max(self.now, self.model.pace_next_launch(self.pace, self.now))
        if self.ends <= self.now:
            self.model.pace_ran_dry(self.pace, self.now)
        begins = max(self.now, self.ends)
        if begins > self.deadline:
            self.begun_after_end.append(begins - self.deadline)
        self.ends = begins + takes
        self.unfinished.append(self.ends)
        while self.unfinished[0] <= self.now:
            self.unfinished.popleft()
            if not self.unfinished:
                break
        self.most_unfinished = max(self.most_unfinished, len(self.unfinished))
        if self.model.pace_launched(self.pace, 1):
            if self.pace.queue.put_off:
                self.wait(late)
            self.fences.append(self.ends)
            if self.model.pace_fenced(self.pace, self.now, self.deadline):
                self.wait(late)
                self.model.pace_plan(self.pace, self.now, self.deadline)
        return True
