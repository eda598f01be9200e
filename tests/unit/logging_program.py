"""A program of SharePod as a separate process, with its log as a list of events."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import Callable, Mapping
from typing import Any, Self

PATIENCE_S = 60.0
"""Seconds that a log line, or the end, may take. This includes the interpreter's start on a busy machine."""


class LoggingProgram:
    """Python process. Lines of its standard error that are not JSON also count as events."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self.log: list[dict[str, Any]] = []
        self._more = asyncio.Condition()
        self._reading = asyncio.create_task(self._read())

    @classmethod
    async def run(cls, *arguments: str, settings: Mapping[str, str], without: str) -> Self:
        """Start the interpreter with these arguments and settings. Variables whose names begin with `without`
        are removed."""
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(without)}
        return cls(
            await asyncio.create_subprocess_exec(
                sys.executable, *arguments, env={**inherited, **settings}, stderr=asyncio.subprocess.PIPE
            )
        )

    async def _read(self) -> None:
        assert self.process.stderr is not None
        async for line in self.process.stderr:
            async with self._more:
                text = line.decode()
                self.log.append(json.loads(text) if text.startswith("{") else {"event": text})
                self._more.notify_all()
        async with self._more:
            self._more.notify_all()

    async def logged(
        self, event: str, matching: Callable[[dict[str, Any]], bool] = lambda _: True, *, times: int = 1
    ) -> dict[str, Any]:
        """Return the line of the log with this event. `times`: 1 for the first such line, 2 for the second. Wait until
        it is logged."""

        def found() -> dict[str, Any] | None:
            lines = [line for line in self.log if event in line["event"] and matching(line)]
            return lines[times - 1] if len(lines) >= times else None

        async with self._more, asyncio.timeout(PATIENCE_S):
            await self._more.wait_for(lambda: found() is not None or self._reading.done())
        line = found()
        assert line is not None, f"{event!r} is not in {self.log}"
        return line

    async def ended(self) -> int:
        """Wait until the process has exited; return its exit status."""
        code = await asyncio.wait_for(self.process.wait(), PATIENCE_S)
        await self._reading
        return code

    async def end(self, number: signal.Signals = signal.SIGTERM) -> int:
        """Send the process a signal, if it still runs; return its exit status."""
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(number)
        return await self.ended()
