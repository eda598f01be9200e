"""A queue of keys to work on.

Guarantees: a key is never worked on twice at the same time; a key added while it is worked on is worked on again
afterwards; a key whose work fails is tried again, later each time, up to a limit; keys added several times before
their turn are worked on once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

import structlog

from sharepod.controller import metrics
from sharepod.kube import ApiError

from .client import NotLeadingError

Key = TypeVar("Key")

_FIRST_DELAY = 0.2
_LONGEST_DELAY = 30.0

log = structlog.get_logger(__name__)


class WorkQueue(Generic[Key]):
    """Keys for `work`, at most `workers` of them at a time, while `run` runs."""

    def __init__(self, name: str, work: Callable[[Key], Awaitable[None]], workers: int) -> None:
        self._name = name
        self._work = work
        self._workers = workers
        self._waiting: dict[Key, None] = {}  # in order of arrival
        self._running: set[Key] = set()
        self._again: set[Key] = set()
        self._timers: dict[Key, asyncio.TimerHandle] = {}
        self._failures: dict[Key, int] = {}
        self._ready = asyncio.Event()

    def __len__(self) -> int:
        return len(self._waiting) + len(self._running)

    def add(self, key: Key) -> None:
        """Work on this key as soon as there is a free worker."""
        if (timer := self._timers.pop(key, None)) is not None:
            timer.cancel()
        if key in self._running:
            self._again.add(key)
        else:
            self._waiting[key] = None
            self._ready.set()

    def add_after(self, key: Key, seconds: float) -> None:
        """Work on this key in so many seconds, or earlier if it is due earlier anyway."""
        loop = asyncio.get_running_loop()
        due = loop.time() + max(0.0, seconds)
        timer = self._timers.get(key)
        if timer is not None and not timer.cancelled() and timer.when() <= due:
            return
        if timer is not None:
            timer.cancel()
        self._timers[key] = loop.call_at(due, self._due, key)

    def clear(self) -> None:
        """Forgets what waits; what is worked on now goes on."""
        for timer in self._timers.values():
            timer.cancel()
        self._timers.clear()
        self._waiting.clear()
        self._again.clear()
        self._failures.clear()

    async def run(self) -> None:
        """Works on keys until cancelled."""
        tasks: set[asyncio.Task[None]] = set()
        try:
            while True:
                await self._ready.wait()
                self._ready.clear()
                while self._waiting and len(self._running) < self._workers:
                    key = next(iter(self._waiting))
                    del self._waiting[key]
                    self._running.add(key)
                    task = asyncio.create_task(self._one(key), name=f"{self._name} {key}")
                    tasks.add(task)
                    task.add_done_callback(tasks.discard)
        finally:
            self.clear()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

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
            delay = min(_LONGEST_DELAY, _FIRST_DELAY * 2.0 ** (failures - 1))
            metrics.FAILURES.labels(self._name).inc()
            if isinstance(error, ApiError):
                log.warning(
                    "work failed; trying again", queue=self._name, key=str(key), error=str(error), retry_s=delay
                )
            else:
                log.exception(
                    "work failed; trying again", queue=self._name, key=str(key), error=str(error), retry_s=delay
                )
            self._running.discard(key)
            self.add_after(key, delay)
        else:
            self._failures.pop(key, None)
        finally:
            self._running.discard(key)
            if key in self._again:
                self._again.discard(key)
                self.add(key)
            self._ready.set()
