"""`sharepod-agent` as a process, and the files that it follows in mode standalone."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

import aiohttp
import yaml
from sharepod.api.gpunode import Tenant
from unit.agent.client import GPU0, GPU1


def write_inventory(directory: Path, *processes: dict[str, Any]) -> None:
    gpus = [{"uuid": uuid, "index": i, "model": "Simulated", "memory": "16Gi"} for i, uuid in enumerate((GPU0, GPU1))]
    replace(directory / "inventory.yaml", yaml.safe_dump({"gpus": gpus, "processes": list(processes)}))


def write_tenants(directory: Path, rows: Sequence[Tenant]) -> None:
    replace(directory / "tenants.yaml", yaml.safe_dump({"tenants": [tenant.dump() for tenant in rows]}))


def replace(path: Path, text: str) -> None:
    fresh = path.with_suffix(".new")
    fresh.write_text(text)
    fresh.rename(path)


class Program:
    """The agent in a process of its own; its log is kept by line."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self.log: list[dict[str, Any]] = []
        self._more = asyncio.Condition()
        self._reading = asyncio.create_task(self._read())

    @classmethod
    async def start(
        cls, directory: Path, *, script: str | None = None, arguments: Sequence[str] = (), **changes: str
    ) -> Program:
        """Start the agent, or a script that runs it in its own way."""
        environment = {name: value for name, value in os.environ.items() if not name.startswith("SHAREPOD_AGENT_")}
        environment |= {
            "SHAREPOD_AGENT_MODE": "standalone",
            "SHAREPOD_AGENT_STATE_DIR": str(directory / "state"),
            "SHAREPOD_AGENT_HOOK_FILE": str(directory / "hook.so"),
            "SHAREPOD_AGENT_INVENTORY_FILE": str(directory / "inventory.yaml"),
            "SHAREPOD_AGENT_TENANTS_FILE": str(directory / "tenants.yaml"),
            "SHAREPOD_AGENT_INVENTORY_INTERVAL_S": "0.05",
            "SHAREPOD_AGENT_HTTP_BIND": "127.0.0.1",
            "SHAREPOD_AGENT_HTTP_PORT": "0",
        } | changes
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            *(("-m", "sharepod.agent.main") if script is None else ("-c", script)),
            *arguments,
            env=environment,
            stderr=asyncio.subprocess.PIPE,
        )
        return cls(process)

    async def _read(self) -> None:
        assert self.process.stderr is not None
        async for line in self.process.stderr:
            async with self._more:
                text = line.decode()
                self.log.append(json.loads(text) if text.startswith("{") else {"event": text})
                self._more.notify_all()
        async with self._more:
            self._more.notify_all()

    async def says(
        self, event: str, matching: Callable[[dict[str, Any]], bool] = lambda _: True, *, times: int = 1
    ) -> dict[str, Any]:
        """The first line of the log with this event (or the second, ...), now or when it comes."""

        def found() -> dict[str, Any] | None:
            lines = [line for line in self.log if event in line["event"] and matching(line)]
            return lines[times - 1] if len(lines) >= times else None

        async with self._more, asyncio.timeout(20):
            await self._more.wait_for(lambda: found() is not None or self._reading.done())
        line = found()
        assert line is not None, f"{event!r} is not in {self.log}"
        return line

    async def get(self, path: str, *, times: int = 1) -> tuple[int, str]:
        """Answer of the agent, or of the second that the keeper has started, ..."""
        ports = await self.says("serving metrics", times=times)
        port = ports["health_port" if path == "/healthz" else "port"]
        async with aiohttp.ClientSession() as session, session.get(f"http://127.0.0.1:{port}{path}") as response:
            return response.status, await response.text()

    async def end(self, number: signal.Signals = signal.SIGTERM) -> int:
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(number)
        code = await asyncio.wait_for(self.process.wait(), 20)
        await self._reading
        return code


@contextlib.asynccontextmanager
async def running(directory: Path, *, arguments: Sequence[str] = (), **changes: str) -> AsyncIterator[Program]:
    program = await Program.start(directory, arguments=arguments, **changes)
    try:
        yield program
    finally:
        if program.process.returncode is None:
            await program.end(signal.SIGKILL)


def tenant_directory(directory: Path, tenant_id: str) -> Path:
    return directory / "state" / "tenants" / tenant_id


def value(told: str, name: str, **labels: str) -> float:
    for line in told.splitlines():
        if line.startswith(f"{name}{{") and all(f'{key}="{text}"' in line for key, text in labels.items()):
            return float(line.rsplit(" ", 1)[1])
    raise AssertionError(f"no {name} with {labels}")
