"""`sharepod-agent` as a process, and the files that it reads in mode standalone."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any, Self

import aiohttp
import yaml
from sharepod.api.gpunode import Tenant
from unit.agent.client import GPU0, GPU1
from unit.logging_program import LoggingProgram


def write_inventory(directory: Path, *processes: dict[str, Any]) -> None:
    gpus = [{"uuid": uuid, "index": i, "model": "Simulated", "memory": "16Gi"} for i, uuid in enumerate((GPU0, GPU1))]
    replace(directory / "inventory.yaml", yaml.safe_dump({"gpus": gpus, "processes": list(processes)}))


def write_tenants(directory: Path, rows: Sequence[Tenant]) -> None:
    replace(directory / "tenants.yaml", yaml.safe_dump({"tenants": [tenant.dump() for tenant in rows]}))


def replace(path: Path, text: str) -> None:
    fresh = path.with_suffix(".new")
    fresh.write_text(text)
    fresh.rename(path)


class Program(LoggingProgram):
    """The agent as a separate process."""

    @classmethod
    async def start(
        cls, directory: Path, *, script: str | None = None, arguments: Sequence[str] = (), **changes: str
    ) -> Self:
        """Start the agent, or a script that runs the agent differently."""
        settings = {
            "SHAREPOD_AGENT_MODE": "standalone",
            "SHAREPOD_AGENT_STATE_DIR": str(directory / "state"),
            "SHAREPOD_AGENT_HOOK_FILE": str(directory / "hook.so"),
            "SHAREPOD_AGENT_INVENTORY_FILE": str(directory / "inventory.yaml"),
            "SHAREPOD_AGENT_TENANTS_FILE": str(directory / "tenants.yaml"),
            "SHAREPOD_AGENT_INVENTORY_INTERVAL_S": "0.05",
            "SHAREPOD_AGENT_HTTP_BIND": "127.0.0.1",
            "SHAREPOD_AGENT_HTTP_PORT": "0",
        } | changes
        what = ("-m", "sharepod.agent.main") if script is None else ("-c", script)
        return await cls.run(*what, *arguments, settings=settings, without="SHAREPOD_AGENT_")

    async def get(self, path: str, *, times: int = 1) -> tuple[int, str]:
        """Return (status, text) of the agent's answer at a path. `times`: 2 queries the agent that the supervisor has
        started second, and so on."""
        ports = await self.logged("serving metrics", times=times)
        port = ports["health_port" if path == "/healthz" else "port"]
        async with aiohttp.ClientSession() as session, session.get(f"http://127.0.0.1:{port}{path}") as response:
            return response.status, await response.text()


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


def value(metrics: str, name: str, **labels: str) -> float:
    for line in metrics.splitlines():
        if line.startswith(f"{name}{{") and all(f'{key}="{text}"' in line for key, text in labels.items()):
            return float(line.rsplit(" ", 1)[1])
    raise AssertionError(f"no {name} with {labels}")
