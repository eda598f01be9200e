"""Worker: the agent's process without rights on the node. It parses tenants' frames, and grants time and memory.

Guarantees:
- All facts about the node, and all actions on the node, go through the privileged process (`remote_node`).
- While the privileged process is away, connected tenants are served as before.
- It exits with its parent, the supervisor.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import signal
import socket
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import structlog

from sharepod.agent import on_time
from sharepod.agent.agent import Agent
from sharepod.agent.settings import AgentMode, AgentSettings
from sharepod.agent.telemetry import endpoints
from sharepod.agent.tenants.registry import UntakenRowsError
from sharepod.agent.tenants.surroundings import Surroundings
from sharepod.api.gpunode import Tenant, TenantStatus
from sharepod.web.metrics_access import MetricsAccess, MetricsGuard, Reviews

from . import calls
from .control_end import ControlEnd
from .link import Answerer, Call, Failure, Line, PartService, Taker
from .remote_node import RemoteDirectories, RemoteInventory, RemotePeers, review

log = structlog.get_logger(__name__)

SWITCH_INTERVAL_S = 0.0005
"""Seconds after which a thread yields the interpreter to the event loop (Python's default: 5 ms). This bounds the time
that a hand-off of a GPU waits for a thread."""
_REPORT_S = 1.0
"""Seconds between two reports to the privileged process while only usage changes."""
_AT_ONCE = 8
"""Tenants whose status is built before the loop runs other tasks: some 0.1 ms."""
_READ_LATE_S = 5.0
"""Seconds that a reading by the privileged process may take beyond NVML's own timeout."""


class Worker:
    """`Agent` in a process without rights, on the running loop. Await `run`.

    Args:
        settings: Settings of the agent.
        control: Socket on which the supervisor sends links to the privileged process. Its end means that the supervisor
        exited.
        http: Listening sockets for metrics and probes.
    """

    def __init__(self, settings: AgentSettings, control: socket.socket, http: endpoints.Sockets) -> None:
        self._control = control
        self._http = http
        self._loop = asyncio.get_running_loop()
        self._ended = asyncio.Event()
        self._standing = calls.ServingState(False, None)
        self._taken_in: frozenset[str] = frozenset()
        self._started = self._stocked = False
        self._line = Line(self._service())
        starts: dict[int, int] = {}
        directories = RemoteDirectories(self._line, settings.state_dir / "tenants", starts)
        self._inventory = RemoteInventory(
            self._line,
            simulated=settings.inventory_file is not None,
            timeout_s=settings.nvml_timeout_s + _READ_LATE_S,
            wanted=self._reading_wanted,
        )
        around = Surroundings(
            directories=directories,
            files=directories,
            peers=RemotePeers(self._line, directories, starts),
            end_process=self._end_process,
        )
        self._agent = agent = Agent(settings, self._inventory, around)
        agent.residue, agent.owner_of = self._inventory.residue, self._inventory.owner_of
        agent.replaced = self._inventory.replaced
        agent.stands_by = lambda: self._standing.stands_by
        agent.taken_in = lambda: self._taken_in

    async def run(self) -> int:
        """Serve until the privileged process calls for the end, or the supervisor has exited. Return the exit
        status."""
        agent = self._agent
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):  # ignored: the privileged process ends the worker
            self._loop.add_signal_handler(number, lambda: None)
        ControlEnd(self._control, self._line, self._ended.set)
        http = await endpoints.serve(agent, self._guard(), self._http)
        gc.collect()
        gc.freeze()  # the collector skips the objects that exist now, so its pauses are shorter
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        reporting = self._loop.create_task(self._send_reports(), name="tell")
        try:
            await self._ended.wait()
        finally:
            reporting.cancel()
            await asyncio.gather(reporting, return_exceptions=True)
            await http.close()
        return 0

    # ---- calls from the privileged process

    def _service(self) -> PartService:
        answers: list[tuple[Call[Any, Any], Answerer]] = [
            (calls.WORKER_START, self._start),
            (calls.WORKER_TAKE_STOCK, self._take_stock),
            (calls.WORKER_APPLY, self._apply),
            (calls.WORKER_CLOSE, self._close),
        ]
        takes: list[tuple[Call[Any, Any], Taker]] = [
            (
                calls.WORKER_KNOW_LEDGER,
                lambda facts: self._agent.held_gpus.know_ledger(facts.pool, facts.holders),
            ),
            (
                calls.WORKER_KNOW_PODS,
                lambda facts: self._agent.know_plugin_pods(facts.given, facts.problem, facts.offered),
            ),
            (calls.WORKER_TAKEN_IN, self._take_taken_in),
            (calls.WORKER_STAND, self._stand),
        ]
        return PartService(
            {call.name: (call, answer) for call, answer in answers},
            {call.name: (call, take) for call, take in takes},
            calls.ERRORS,
        )

    async def _start(self, _none: None, _descriptors: list[int]) -> tuple[None, Sequence[int]]:
        if not self._started:
            await self._agent.start()
            self._started = True
        return None, ()

    async def _take_stock(self, needed: bool, _descriptors: list[int]) -> tuple[None, Sequence[int]]:
        if not self._stocked:
            await self._agent.take_stock(needed=needed)
            self._stocked = True
        return None, ()

    async def _apply(self, rows: tuple[Tenant, ...], _descriptors: list[int]) -> tuple[calls.InForce, Sequence[int]]:
        failure = None
        try:
            await self._agent.tenants.apply(rows)
        except UntakenRowsError as error:
            filename = error.filename if isinstance(error.filename, str) else None
            failure = Failure(type(error).__name__, error.strerror or str(error), error.errno, filename)
        tenants = self._agent.tenants
        ready = tuple(row.id for row in rows if tenants.directory(row.id) is not None)
        unservable = {row.id: reason for row in rows if (reason := tenants.unservable(row.id)) is not None}
        return calls.InForce(ready, unservable, await self._report(moved=True), failure), ()

    async def _close(self, _none: None, _descriptors: list[int]) -> tuple[None, Sequence[int]]:
        await self._agent.close()
        self._loop.call_soon(self._ended.set)
        return None, ()

    def _take_taken_in(self, series: tuple[str, ...]) -> None:
        self._taken_in = frozenset(series)

    def _stand(self, standing: calls.ServingState) -> None:
        self._standing = standing
        self._agent.unfit = standing.unfit

    # ---- calls to the privileged process

    def _reading_wanted(self) -> calls.ReadingWanted:
        tenants = self._agent.tenants
        return calls.ReadingWanted(tuple(tenants.leaving), tenants.clients())

    def _end_process(self, tenant_id: str, pid: int, _is_the_tenants: object) -> bool:
        self._line.notify(calls.PRIVILEGED_END, calls.EndWanted(tenant_id, pid))
        return True

    def _guard(self) -> MetricsGuard | None:
        settings = self._agent.settings
        if settings.mode is AgentMode.STANDALONE or settings.metrics_access is MetricsAccess.OPEN:
            return None
        return MetricsGuard(Reviews(partial(_review, self._line), (OSError,)))

    # ---- reports

    async def _send_reports(self) -> None:
        """Report the facts to the privileged process, whenever they have changed and each second."""
        agent = self._agent
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_REPORT_S):
                    await agent.changed.wait()
            moved = agent.changed.is_set()
            agent.changed.clear()
            try:
                report = await self._report(moved)
            except Exception:
                log.exception("cannot build the report")
                continue
            if moved and not self._line.up:
                agent.changed.set()
                await asyncio.sleep(_REPORT_S)
            else:
                self._line.notify(calls.PRIVILEGED_REPORT, report)

    async def _report(self, moved: bool) -> calls.WorkerReport:
        agent = self._agent
        tenants: list[TenantStatus] = []
        for number, row in enumerate(agent.tenants.rows(), 1):
            status = agent.status_of(row.id)
            if status is not None:
                tenants.append(status)
            if number % _AT_ONCE == 0:
                await asyncio.sleep(0)
        series, at = agent.consumption
        return calls.WorkerReport(agent.gpus(), agent.gpus_known, tuple(tenants), agent.unhealthy(), series, at, moved)


async def _review(line: Line, path: str, body: dict[str, Any]) -> Mapping[str, Any]:
    return await review(line, path, body)


def run(settings: AgentSettings, control: socket.socket, http: endpoints.Sockets) -> int:
    """Run the worker to its end; return its exit status."""

    async def served() -> int:
        return await Worker(settings, control, http).run()

    return on_time.run(served())
