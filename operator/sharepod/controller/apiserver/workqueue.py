"""Work queue of keys: each is worked on once for several additions, and retried with back-off if the work fails. The
model is client-go's rate-limiting queue.

Guarantees:
- A key is never worked on twice at the same time.
- A key that is added while it is worked on is worked on again, unless the work calls `caught_up` after the addition. By
  that call the work reports that it has only now read the state.
- A key added several times before its turn is worked on once.
- A key whose work fails is retried after growing pauses, up to a limit.
- Changed keys precede the unchanged keys of a resync. While both wait, every `_RESYNC_SHARE`th turn takes a key of the
  resync.
- If keys have owners, the owners take turns. Slow work or much work of some owners does not delay the keys of other
  owners (`worker_lanes.py`).
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

import structlog

from sharepod.backoff import Backoff
from sharepod.controller import metrics
from sharepod.kube import ApiError

from .client import NotLeadingError
from .fair_line import FairLine
from .worker_lanes import WorkerLanes

Key = TypeVar("Key")

_BACKOFF = Backoff(0.2, 30.0)
"""Pause after failed work, in seconds: first and longest. The longest pause bounds how late a reachable API server is
noticed."""
_RESYNC_SHARE = 8
"""While changed keys wait, one of this many turns takes a key of the resync. So a resync of 10,000 keys ends under any
load."""

log = structlog.get_logger(__name__)


class WorkQueue(Generic[Key]):
    """Queue of keys, which calls `work` for at most `workers` keys at a time.

    Args:
        name: Name of the queue in logs and metrics.
        work: Works on one key.
        workers: Largest number of keys worked on at a time, apart from slow work (`worker_lanes.py`).
        owner: Returns the owner of a key, such as its namespace. None: keys have no owners.
    """

    def __init__(
        self,
        name: str,
        work: Callable[[Key], Awaitable[None]],
        workers: int,
        owner: Callable[[Key], str] | None = None,
    ) -> None:
        self._name = name
        self._work = work
        self._owner = owner or (lambda _: "")
        self._waiting: FairLine[Key] = FairLine()
        """Changed keys."""
        self._resyncs: FairLine[Key] = FairLine()
        """Keys of a resync. None of these keys is in `_waiting`."""
        self._turns = 0
        self._running: WorkerLanes[Key] = WorkerLanes(workers, owned=owner is not None)
        """Keys that are worked on now."""
        self._settling: asyncio.TimerHandle | None = None
        """Timer of the next check for slow work. None if no key waits."""
        self._again: set[Key] = set()
        self._timers: dict[Key, asyncio.TimerHandle] = {}
        self._failures: dict[Key, int] = {}
        self._ready = asyncio.Event()

    def __len__(self) -> int:
        return len(self._waiting) + len(self._resyncs) + len(self._running)

    def oldest_s(self) -> float:
        """Return the seconds for which the oldest changed key has waited. 0 if none waits."""
        since = self._waiting.oldest()
        return 0.0 if since is None else time.monotonic() - since

    def add(self, key: Key) -> None:
        """Enqueue a changed key. It is worked on as soon as a worker is free."""
        if (timer := self._timers.pop(key, None)) is not None:
            timer.cancel()
        if key in self._running:
            self._again.add(key)
        elif key not in self._waiting:
            self._resyncs.discard(key)
            self._waiting.add(key, self._owner(key), time.monotonic())
            self._ready.set()

    def add_resync(self, key: Key) -> None:
        """Enqueue an unchanged key behind the changed keys."""
        if key in self._running:
            self._again.add(key)
        elif key not in self._waiting and key not in self._resyncs:
            self._resyncs.add(key, self._owner(key), time.monotonic())
            self._ready.set()

    def add_after(self, key: Key, seconds: float) -> None:
        """Enqueue a key after this many seconds, or at the time that was set for it before, whichever is earlier."""
        loop = asyncio.get_running_loop()
        due = loop.time() + max(0.0, seconds)
        timer = self._timers.get(key)
        if timer is not None and not timer.cancelled() and timer.when() <= due:
            return
        if timer is not None:
            timer.cancel()
        self._timers[key] = loop.call_at(due, self._due, key)

    def caught_up(self, key: Key) -> None:
        """Record that the work on a key has just read the whole state. Additions of the key before this call need no
        further work.
        """
        self._again.discard(key)

    def clear(self) -> None:
        """Drop all waiting keys, timers and failure counts; work in progress continues."""
        for timer in self._timers.values():
            timer.cancel()
        self._timers.clear()
        if self._settling is not None:
            self._settling.cancel()
        self._waiting.clear()
        self._resyncs.clear()
        self._again.clear()
        self._failures.clear()

    async def run(self) -> None:
        """Work on keys until cancelled."""
        tasks: set[asyncio.Task[None]] = set()
        try:
            while True:
                await self._ready.wait()
                self._ready.clear()
                self._running.settle(time.monotonic())
                while (taken := self._next()) is not None:
                    key, owner = taken
                    self._running.begin(key, owner, time.monotonic())
                    task = asyncio.create_task(self._one(key), name=f"{self._name} {key}")
                    tasks.add(task)
                    task.add_done_callback(tasks.discard)
                self._settle_later()
        finally:
            self.clear()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _next(self) -> tuple[Key, str] | None:
        """Take the next key; return it with its owner. Return None if no key waits, or every owner of a waiting key has
        reached its limit in the worker lanes."""
        resync_first = (self._turns + 1) % _RESYNC_SHARE == 0
        for line in (self._resyncs, self._waiting) if resync_first else (self._waiting, self._resyncs):
            if (taken := line.take(self._running.may_begin)) is not None:
                self._turns += 1
                return taken
        return None

    def _settle_later(self) -> None:
        """Set the timer of the next check: the time at which work that keeps waiting keys from beginning becomes
        slow."""
        if self._settling is not None:
            self._settling.cancel()
            self._settling = None
        at = self._running.settles_at() if self._waiting or self._resyncs else None
        if at is not None and at < math.inf:
            pause = max(0.0, at - time.monotonic())
            self._settling = asyncio.get_running_loop().call_later(pause, self._ready.set)

    def _due(self, key: Key) -> None:
        self._timers.pop(key, None)
        self.add(key)

    async def _one(self, key: Key) -> None:
        try:
            await self._work(key)
        except NotLeadingError:
            self._failures.pop(key, None)
        except Exception as error:
            self._failures[key] = failures = self._failures.get(key, 0) + 1
            delay = _BACKOFF.pause_s(failures)
            metrics.FAILURES.labels(self._name).inc()
            if isinstance(error, ApiError):
                log.warning(
                    "work failed; trying again", queue=self._name, key=str(key), error=str(error), retry_s=delay
                )
            else:
                log.exception(
                    "work failed; trying again", queue=self._name, key=str(key), error=str(error), retry_s=delay
                )
            self._running.end(key, time.monotonic())
            self.add_after(key, delay)
        else:
            self._failures.pop(key, None)
        finally:
            self._running.end(key, time.monotonic())
            if key in self._again:
                self._again.discard(key)
                self.add(key)
            self._ready.set()
