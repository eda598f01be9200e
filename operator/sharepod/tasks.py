"""Supervision of the long-running tasks of the operator and of the agent.

Guarantees:
- A supervised task that raises or returns ends the wait with a `TaskEndedError` that names the task. The program then
  ends, and its Deployment or DaemonSet starts it again.
- On leaving `async with Supervisor()`, all tasks that it started have ended.
- No failure is lost: the first is raised, each other one is logged with the name of its task.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import structlog

log = structlog.get_logger(__name__)


class TaskEndedError(Exception):
    """Error: a task has ended that should run until it is cancelled. `__cause__`: the exception that it raised, if
    any."""

    def __init__(self, task: str, cause: BaseException | None) -> None:
        super().__init__(f"{task} has ended" if cause is None else f"{task} failed: {cause}")
        self.task = task
        """Name of the task."""


@dataclass(frozen=True)
class _Supervised:
    task: asyncio.Task[None]
    stop: asyncio.Event | None
    grace_s: float


class Supervisor:
    """Group of long-running tasks of which none may end while the program runs.

    ::

        async with Supervisor() as supervisor:
            supervisor.start("lease", lease.run())
            supervisor.start("report", report.run())
            await supervisor.wait(stop)
    """

    def __init__(self) -> None:
        self._supervised: list[_Supervised] = []

    def start(
        self,
        name: str,
        work: Coroutine[Any, Any, None],
        *,
        stop: asyncio.Event | None = None,
        grace_s: float = 0.0,
    ) -> None:
        """Run `work` as a task until the group is left.

        Args:
            name: name of the task, in logs and errors.
            work: runs until it is cancelled, or until `stop` is set.
            stop: set once all tasks without a `stop` have ended; None: the task is cancelled at once.
            grace_s: seconds from `stop` until the task is cancelled.
        """
        self._supervised.append(_Supervised(asyncio.create_task(work, name=name), stop, grace_s))

    async def wait(self, stop: asyncio.Event | None = None) -> None:
        """Wait until `stop` is set; without `stop`, until this call is cancelled. Raise `TaskEndedError` once a task
        has ended."""
        stopping = asyncio.create_task((stop or asyncio.Event()).wait(), name="stop")
        tasks = [supervised.task for supervised in self._supervised]
        try:
            await asyncio.wait([*tasks, stopping], return_when=asyncio.FIRST_COMPLETED)
        finally:
            stopping.cancel()
        for name, failure in self._failures():
            raise TaskEndedError(name, failure) from failure
        if stop is None or not stop.is_set():
            raise TaskEndedError(next(task.get_name() for task in tasks if task.done()), None)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End the tasks and wait until they have ended. Raise `TaskEndedError` for the first that has failed, unless
        the block is left with `error`."""
        at_once = [supervised.task for supervised in self._supervised if supervised.stop is None]
        for task in at_once:
            task.cancel()
        await asyncio.gather(*at_once, return_exceptions=True)
        for supervised in self._supervised:
            if supervised.stop is not None:
                supervised.stop.set()
                await asyncio.wait([supervised.task], timeout=supervised.grace_s)
                supervised.task.cancel()
                await asyncio.gather(supervised.task, return_exceptions=True)
        raised = error.__cause__ if error is not None else None
        failures = [(name, failure) for name, failure in self._failures() if failure is not raised]
        for name, failure in failures if error is not None else failures[1:]:
            log.error("task failed", task=name, error=str(failure), exc_info=failure)
        if error is None and failures:
            name, failure = failures[0]
            raise TaskEndedError(name, failure) from failure

    def _failures(self) -> list[tuple[str, BaseException]]:
        """Return (name, exception) of the tasks that have raised, in the order of their start."""
        tasks = (supervised.task for supervised in self._supervised)
        return [
            (task.get_name(), failure)
            for task in tasks
            if task.done() and not task.cancelled() and (failure := task.exception()) is not None
        ]
