"""The agent's program: reads its settings, starts the agent, and runs it until SIGTERM or SIGINT.

While another agent serves the state directory, this agent waits as its standby, with everything imported. With
`--apart` the agent runs as two child processes, which a supervisor restarts when they are killed (`apart/pair.py`).

Exit status:
- 0 after a signal;
- 1 if something that the agent needs is missing; one line names it;
- 2 for invalid settings.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import os
import resource
import signal
import socket
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

import structlog
from pydantic import ValidationError

from sharepod import logs
from sharepod.agent.devices.inventory import Inventory, InventoryError, SimulatedInventory
from sharepod.agent.devices.nvml import NvmlInventory
from sharepod.agent.state.directory import StateDirError
from sharepod.agent.state.early_sockets import EarlySockets
from sharepod.agent.state.kept_descriptors import NOTHING_KEPT, KeptDescriptor, KeptDescriptors
from sharepod.agent.state.succession import Succession
from sharepod.agent.telemetry import endpoints
from sharepod.agent.tenants.surroundings import on_this_node
from sharepod.setting_faults import explain
from sharepod.tasks import Supervisor, TaskEndedError
from sharepod.web.metrics_access import MetricsAccess, MetricsGuard

from . import on_time, standalone
from .agent import Agent, agent_version
from .apart import confinement, pair, worker
from .apart.control_end import ControlEnd
from .apart.distant_agent import AnyAgent, DistantAgent
from .settings import ENV_PREFIX, AgentMode, AgentSettings
from .standalone import TenantsFileError

if TYPE_CHECKING:
    from sharepod.web.api_reviews import ApiReviews

log = structlog.get_logger(__name__)

_SWITCH_INTERVAL_S = 0.0005
"""Seconds after which a thread that reads NVML or a file yields the interpreter to the event loop (Python's default: 5
ms). This bounds the time that a hand-off waits for such a thread."""

_CHECK_S = 10.0
"""Seconds between two checks of whether a standby agent could serve."""

_PREREQUISITES = (InventoryError, StateDirError, TenantsFileError, OSError)


def main(argv: Sequence[str], early: EarlySockets) -> int:
    """Run the program; return its exit status. `early`: sockets that were opened before the imports."""
    parser = argparse.ArgumentParser(
        prog="sharepod-agent",
        description="Shares this node's GPUs among its tenants.",
        epilog=f"Every setting can be given as {ENV_PREFIX}<NAME> in the environment, or in the YAML file.",
    )
    parser.add_argument("--config", metavar="FILE", help=f"YAML file of settings; default: {ENV_PREFIX}CONFIG")
    parser.add_argument(
        "--apart",
        action="store_true",
        help="run two supervised processes, as root; the process that parses tenants' frames has no rights on the node",
    )
    parser.add_argument("--version", action="version", version=agent_version())
    arguments = parser.parse_args(argv)
    if arguments.config:
        os.environ[f"{ENV_PREFIX}CONFIG"] = arguments.config
    try:
        settings = AgentSettings()
    except ValidationError as error:
        print(f"sharepod-agent: wrong settings: {explain(error, AgentSettings.model_fields)}", file=sys.stderr)
        return 2
    logs.configure(settings.log_level, settings.log_format)
    if settings.mode is AgentMode.CLUSTER:
        from sharepod.agent.cluster import run as _  # noqa: F401  now, while no tenant waits for it

    if os.geteuid() == 0:
        try:
            confinement.take_own_user()
        except OSError as error:
            log.error("agent cannot run", error=str(error))
            return 1
    if arguments.apart:
        return _run_apart(settings, early)
    try:
        return on_time.run(run(settings))
    except KeyboardInterrupt:
        return 0


def _run_apart(settings: AgentSettings, early: EarlySockets) -> int:
    """Run the agent as two supervised processes; return the exit status."""
    kept = {name: KeptDescriptor(*found) for name, found in early.of(settings.state_dir).items()}
    if kept:
        log.info("listened first", tenants=len(kept) - 1, state_dir=str(settings.state_dir))
    try:
        http = endpoints.Sockets.of(settings)
    except OSError as error:
        log.error("agent cannot run", error=str(error))
        return 1

    def privileged(control: socket.socket, kept: KeptDescriptors) -> int:
        http.metrics.close()
        http.health.close()
        return on_time.run(run(settings, kept, control))

    try:
        return pair.keep_pair(
            privileged,
            lambda control: worker.run(settings, control, http),
            lambda: [http.metrics.fileno(), http.health.fileno()],
            settings.niceness,
            kept,
        )
    except OSError as error:
        log.error("agent cannot run", error=str(error))
        return 1


def inventory_of(settings: AgentSettings) -> Inventory:
    """Return a simulated inventory if the settings name a file, NVML otherwise."""
    if settings.inventory_file is not None:
        return SimulatedInventory(settings.inventory_file, settings.xids_tolerated)
    return NvmlInventory(
        settings.nvml_timeout_s, xids_tolerated=settings.xids_tolerated, xids_file=settings.state_dir / "xids.json"
    )


async def run(
    settings: AgentSettings, kept: KeptDescriptors = NOTHING_KEPT, control: socket.socket | None = None
) -> int:
    """Run one agent from its start until a signal; return the exit status. `control`: socket that brings links to each
    new worker; None: this process serves the tenants itself."""
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
    guard, asks = _metrics_guard(settings)
    agent = _agent(settings, kept, control, asks, stop)
    log.info("agent starts", version=agent_version(), node=settings.node_name, mode=settings.mode)
    http = None
    stopping = False
    try:
        with Succession(settings.state_dir, kept) as succession:
            agent.stands_by = lambda: succession.stands_by
            agent.successor_waits = succession.awaited
            if isinstance(agent, Agent):
                http = await endpoints.serve(agent, guard)
            gc.collect()
            gc.freeze()  # the collector skips the objects that exist now, so its pauses are shorter
            sys.setswitchinterval(_SWITCH_INTERVAL_S)
            try:
                async with Supervisor() as supervisor:
                    supervisor.start("drive", _drive(agent, succession, again, kept))
                    await supervisor.wait(stop)
                    stopping = True
            finally:
                if isinstance(agent, DistantAgent):
                    await succession.pass_on(agent.services.state.heirlooms())
                await agent.close()
                succession.left_to_supervisor = isinstance(agent, DistantAgent) and agent.may_serve
        return 0
    except _PREREQUISITES as error:
        log.error("agent cannot run", error=str(error))
        return 1
    except TaskEndedError as ended:
        if stopping:
            log.warning("a task failed while the agent stopped", error=str(ended), exc_info=ended)
            return 0
        if isinstance(ended.__cause__, _PREREQUISITES):
            log.error("agent cannot run", error=str(ended.__cause__))
        else:
            log.error("agent cannot go on", error=str(ended), exc_info=ended)
        return 1
    finally:
        if http is not None:
            await http.close()
        if asks is not None:
            await asks.close()
        log.info("agent ends")


def _agent(
    settings: AgentSettings,
    kept: KeptDescriptors,
    control: socket.socket | None,
    asks: ApiReviews | None,
    stop: asyncio.Event,
) -> AnyAgent:
    """Return the agent. With `control`, a worker in another process serves its tenants."""
    inventory = inventory_of(settings)
    if control is None:
        return Agent(settings, inventory, on_this_node(settings))
    agent = DistantAgent(settings, inventory, kept)
    agent.services.review = asks.reviews.create if asks is not None else None
    agent.link_lost = ControlEnd(control, agent.line, stop.set).say_lost
    return agent


def _metrics_guard(settings: AgentSettings) -> tuple[MetricsGuard, ApiReviews] | tuple[None, None]:
    """Return the check of `/metrics` readers' tokens, and its client of the API server; None, None if it is open to
    all."""
    if settings.mode is AgentMode.STANDALONE or settings.metrics_access is MetricsAccess.OPEN:
        return None, None
    from sharepod.kube import Connection  # standalone does not need the API client
    from sharepod.web.api_reviews import ApiReviews

    asks = ApiReviews(lambda: Connection.open(settings.kubeconfig, f"sharepod-agent/{agent_version()}"))
    return MetricsGuard(asks.reviews), asks


async def _drive(agent: AnyAgent, succession: Succession, again: asyncio.Event, kept: KeptDescriptors) -> None:
    """Wait until no other agent serves, then run the driver of the agent's mode until cancelled."""
    if not succession.free():
        kept.drop_all_but(())  # the serving agent keeps its own copies of these descriptors
        checking = asyncio.create_task(_keep_checking(agent))
        try:
            await succession.turn()
        finally:
            checking.cancel()
            await asyncio.gather(checking, return_exceptions=True)
    await agent.start()
    succession.serve()
    log.info("this agent serves", state_dir=str(agent.settings.state_dir))
    if agent.settings.mode is AgentMode.STANDALONE:
        await standalone.run(agent, again)
        return
    from sharepod.agent.cluster import run as cluster_run  # needs grpc and the API client; standalone does not

    await cluster_run.run(agent)


async def _keep_checking(agent: AnyAgent) -> None:
    """Check every `_CHECK_S` seconds whether the standby agent could serve, and report it in `/healthz`. A standby that
    could not serve must not replace the serving agent."""
    while True:
        await agent.check()
        await asyncio.sleep(_CHECK_S)


def _raise_descriptor_limit() -> None:
    """Raise the soft limit of open files to the hard limit, because each process of a tenant needs two descriptors. The
    usual soft limit of 1024 protects only programs that use `select`."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    except (OSError, ValueError) as error:
        log.warning("cannot raise the limit of open files", soft=soft, hard=hard, error=str(error))
        return
    log.info("limit of open files", was=soft, now=hard, processes_at_most=hard // 2)
