"""`sharepod-agent`: reads its settings, starts the agent, and runs it until SIGTERM or SIGINT.

Ends with 0 after a signal, 1 when something that it needs is missing (said in one line), 2 for wrong settings.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import logging
import os
import resource
import signal
import sys
from collections.abc import Coroutine, Sequence
from typing import Any

import structlog
from pydantic import ValidationError

from sharepod.agent.devices.inventory import Inventory, InventoryError, SimulatedInventory
from sharepod.agent.devices.nvml import NvmlInventory
from sharepod.agent.state.directory import StateDirError
from sharepod.agent.telemetry import endpoints

from . import standalone
from .agent import Agent, agent_version
from .settings import ENV_PREFIX, Mode, Settings
from .standalone import TenantsFileError

log = structlog.get_logger("sharepod.agent")

_PREREQUISITES = (InventoryError, StateDirError, TenantsFileError, OSError)


def main(argv: Sequence[str] | None = None) -> int:
    """The program."""
    parser = argparse.ArgumentParser(
        prog="sharepod-agent",
        description="Shares this node's GPUs among its tenants.",
        epilog=f"Every setting can be given as {ENV_PREFIX}<NAME> in the environment, or in the YAML file.",
    )
    parser.add_argument("--config", metavar="FILE", help=f"YAML file of settings; default: {ENV_PREFIX}CONFIG")
    parser.add_argument("--version", action="version", version=agent_version())
    arguments = parser.parse_args(argv)
    if arguments.config:
        os.environ[f"{ENV_PREFIX}CONFIG"] = arguments.config
    try:
        settings = Settings()
    except ValidationError as error:
        print(f"sharepod-agent: wrong settings: {error}", file=sys.stderr)
        return 2
    _configure_logging(settings)
    try:
        return asyncio.run(run(settings))
    except KeyboardInterrupt:
        return 0


def inventory_of(settings: Settings) -> Inventory:
    """Simulated if the settings name a file, NVML otherwise."""
    if settings.inventory_file is not None:
        return SimulatedInventory(settings.inventory_file, settings.xids_tolerated)
    return NvmlInventory(
        settings.nvml_timeout_s, xids_tolerated=settings.xids_tolerated, xids_file=settings.state_dir / "xids.json"
    )


async def run(settings: Settings) -> int:
    """One agent, from start to a signal."""
    loop = asyncio.get_running_loop()
    stop, again = asyncio.Event(), asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    loop.add_signal_handler(signal.SIGHUP, again.set)
    try:
        os.setpriority(os.PRIO_PROCESS, 0, settings.niceness)
    except OSError as error:
        log.warning("cannot set the agent's priority", niceness=settings.niceness, error=error.strerror)
    _raise_descriptor_limit()
    agent = Agent(settings, inventory_of(settings))
    log.info("agent starts", version=agent_version(), node=settings.node_name, mode=settings.mode)
    http = None
    try:
        await agent.start()
        http = await endpoints.serve(agent)
        log.info("serving metrics and health", address=settings.http_bind, port=http.port)
        gc.collect()
        gc.freeze()  # what lives from the start on is not looked at again: shorter pauses between frames
        sys.setswitchinterval(0.0005)  # a thread that reads NVML or a file does not keep the loop from a hand-off
        return await _until(stop, _drive(agent, again))
    except _PREREQUISITES as error:
        log.error("agent cannot run", error=str(error))
        return 1
    except ExceptionGroup as group:
        log.error("agent cannot go on", error="; ".join(map(str, group.exceptions)), exc_info=group)
        return 1
    finally:
        if http is not None:
            await http.close()
        await agent.close()
        log.info("agent ends")


async def _drive(agent: Agent, again: asyncio.Event) -> None:
    if agent.settings.mode is Mode.STANDALONE:
        await standalone.run(agent, again)
        return
    from sharepod.agent.cluster import run as cluster_run

    await cluster_run.run(agent)


async def _until(stop: asyncio.Event, work: Coroutine[Any, Any, None]) -> int:
    """Runs `work` until it ends, which is a failure, or `stop` is set."""
    working = asyncio.create_task(work, name="drive")
    stopping = asyncio.create_task(stop.wait(), name="stop")
    try:
        await asyncio.wait((working, stopping), return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            working.result()
            log.error("agent cannot go on: what drives it has ended")
            return 1
        return 0
    finally:
        for task in (working, stopping):
            task.cancel()
        await asyncio.gather(working, stopping, return_exceptions=True)


def _raise_descriptor_limit() -> None:
    """Each process of a tenant costs two descriptors; the usual soft limit is for programs that know `select` only."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    except (OSError, ValueError) as error:
        log.warning("cannot raise the limit of open files", soft=soft, hard=hard, error=str(error))
        return
    log.info("limit of open files", was=soft, now=hard, processes_at_most=hard // 2)


def _configure_logging(settings: Settings) -> None:
    level = logging.getLevelNamesMapping().get(settings.log_level.upper(), logging.INFO)
    renderer: structlog.typing.Processor = (
        structlog.processors.JSONRenderer() if settings.log_format == "json" else structlog.dev.ConsoleRenderer()
    )
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(level),
        logger_factory=structlog.WriteLoggerFactory(file=sys.stderr),
        cache_logger_on_first_use=True,
    )


if __name__ == "__main__":
    sys.exit(main())
