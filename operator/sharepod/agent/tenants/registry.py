"""Registry of the node's tenants: applies the ledger's rows, and gives readers a view of each.

Guarantees:
- `apply` is the only way to change tenants. When it returns, exactly the given rows are applied.
- A tenant whose row is Releasing gets no more clients. Its processes are watched until nothing of it is left.
- The directory of a tenant whose row was removed stays until nothing of the tenant is left.
- A row that cannot be served, or a directory that cannot be written, affects no other row.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import cast

import structlog

from sharepod.agent.devices.inventory import Reading
from sharepod.agent.findings.attribution import Attribution
from sharepod.agent.settings import AgentSettings
from sharepod.agent.shares.consumption_meter import TenantTotals
from sharepod.agent.shares.histogram import Histogram
from sharepod.agent.shares.tokens import Tokens
from sharepod.agent.shares.turn_log import LoggedTurn
from sharepod.agent.sockets.frame_budget import FrameBudget
from sharepod.agent.sockets.refusals import ClientRefusal
from sharepod.agent.state.directory import StateDir
from sharepod.agent.state.tenant_files import FilesWanted, TenantFiles
from sharepod.api.gpunode import FindingReason, Mode, Tenant, TenantState, TenantStatus
from sharepod.timeshare import CoRuns

from .entry import Entry, limits_text, not_servable, pod_of
from .leftovers import Leftovers
from .metering import TenantMetering
from .observer import Observer, OwnerOf, Replaced, Residue, nothing_replaced
from .served import ServedTenant
from .surroundings import Surroundings, on_this_node
from .view import TenantView

log = structlog.get_logger(__name__)

_CHECKPOINT_S = 0.2
"""Seconds between two checkpoints of a time account, and so the most that a killed agent loses of the account. A
checkpoint writes a few words of mapped memory."""
_CHECKPOINTS_AT_ONCE = 12
"""Accounts written before yielding to the loop: some 0.2 ms, the longest delay of a hand-off by checkpoints, for any
number of tenants. With only four, half of the time was the loop's overhead."""

_OPENED_AT_ONCE = 16
"""Tenants whose files are opened by one call to a thread. With one tenant per call, an agent with 240 tenants takes
four times as long to serve them after an upgrade. More than 16 save nothing, and the first tenants wait longer."""

_RELEASING = "this pod's share of the GPU is being released; the pod can use the GPU no longer"
"""Text that clients of a tenant in release are sent."""


class UntakenRowsError(OSError):
    """Error for rows whose files the state directory cannot store. Every other row is applied, and tenants in release
    are no longer served."""


class TenantRegistry:
    """Tenants of one node. Call `start` first, then `apply` whenever the ledger has changed.

    Args:
        settings: Settings of the agent.
        changed: Called when `status` may have changed.
        around: Access to the node (files, processes); by default, from this process.
    """

    def __init__(
        self, settings: AgentSettings, *, changed: Callable[[], None], around: Surroundings | None = None
    ) -> None:
        around = around or on_this_node(settings)
        self._settings = settings
        self._changed = changed
        self._peers = around.peers
        self._state = around.directories
        self._tokens = Tokens(settings.timeshare())
        self._budget = FrameBudget(settings.frames_per_s)
        self._entries: dict[str, Entry] = {}
        self._leftovers = Leftovers(self._state)
        self._applying = asyncio.Lock()
        self._known = False
        self._observer = Observer(
            around.files,
            settings.thresholds(),
            self._tokens.usage,
            self._tokens.turns,
            self._tokens.surcharge,
            around.end_process,
        )
        self._checkpointing: asyncio.TimerHandle | None = None
        self._checkpoints_due: list[str] = []
        """Tenants whose accounts are still to be written in the current round of checkpoints."""
        self._metering = TenantMetering(around.files, self._tokens)
        self._refusals: Counter[ClientRefusal] = Counter()
        """Number of refused clients of tenants that are no longer served, by reason."""

    async def start(self) -> None:
        """Prepare the state directory and the hook. Raises `StateDirError`."""
        digest = await asyncio.to_thread(self._state.prepare)
        await self._observer.start()
        await self._metering.restore()
        log.info("hook installed", file=str(self._settings.hook_file), sha256=digest)

    async def close(self) -> None:
        """Close all sockets. Tenants' directories stay: their pods outlive the agent."""
        await self._leftovers.wait()
        await self._observer.close()
        if self._checkpointing is not None:
            self._checkpointing.cancel()
            self._checkpointing = None
        await self.count()
        await self.keep_count(durable=True)
        for entry in self._entries.values():
            if entry.served is not None:
                entry.served.close()
        self._tokens.close()

    async def apply(self, rows: Sequence[Tenant]) -> None:
        """Make exactly these rows the tenants of this node.

        - New row: a directory with `agent.sock`, `limits`, `libsharepod.so`, `ld.so.preload`; an Exclusive tenant's has
          no hook and no socket.
        - Changed row: clients notified, limits replaced.
        - Releasing row: socket closed, clients refused.
        - Removed row: closed; the directory is removed once nothing of the tenant is left.
        - Row that cannot be served: logged, no directory.

        Raises `UntakenRowsError` if the state directory cannot store a file. Rows whose directories were complete
        before are applied nevertheless. The caller must apply the same rows again, which continues from there.
        """
        failed: dict[str, OSError] = {}
        async with self._applying:
            wanted = {row.id: row for row in rows}
            for tenant_id in [tenant_id for tenant_id in self._entries if tenant_id not in wanted]:
                self._drop(tenant_id)
            await self._metering.begin([row for row in wanted.values() if row.id not in self._entries])
            to_serve: list[Tenant] = []
            for row in wanted.values():
                try:
                    if await self._apply_row(row):
                        to_serve.append(row)
                except OSError as error:
                    failed[row.id] = error
            failed |= await self._serve_all(to_serve)
            self._entries = {tenant_id: self._entries[tenant_id] for tenant_id in wanted if tenant_id in self._entries}
            self._metering.end_all_but(wanted)
            if not self._known:
                self._known = True
                self._state.unheard_all_but(wanted)
                self._leftovers.add(set(await asyncio.to_thread(self._state.existing)) - set(wanted))
            await self._metering.keep(durable=False)  # the count of the former rows is then in the file
        self._changed()
        if failed:
            tenant_id, first = next(iter(failed.items()))
            text = f"{first.strerror or first} (tenant {tenant_id}, {len(failed)} of {len(wanted)} rows)"
            raise UntakenRowsError(first.errno, text, first.filename) from first

    def set_open(self, gpus: frozenset[str] | None) -> None:
        """Grant time only on these GPUs from now on, given by UUID. None: on all GPUs."""
        self._tokens.set_open(gpus)

    @property
    def known(self) -> bool:
        """True once a ledger has been applied since the start."""
        return self._known

    def directory(self, tenant_id: str) -> Path | None:
        """Return the directory to mount into the tenant's pod. None if the tenant is unknown, Releasing or cannot be
        served."""
        entry = self._entries.get(tenant_id)
        return None if entry is None else entry.directory

    def unservable(self, tenant_id: str) -> str | None:
        """Return why a tenant's row cannot be served; None if it can, or is not applied."""
        entry = self._entries.get(tenant_id)
        return None if entry is None else entry.unservable

    def views(self) -> Iterator[TenantView]:
        """Yield one view per applied row, in the ledger's order."""
        utilization = self._observer.utilization
        return (TenantView.of(entry, self._tokens, utilization) for entry in self._entries.values())

    def rows(self) -> tuple[Tenant, ...]:
        """Return the applied rows, in the ledger's order."""
        return tuple(entry.row for entry in self._entries.values())

    def view(self, tenant_id: str) -> TenantView | None:
        """Return the view of one row; None if it is no longer applied."""
        entry = self._entries.get(tenant_id)
        return None if entry is None else TenantView.of(entry, self._tokens, self._observer.utilization)

    @property
    def releasing(self) -> frozenset[str]:
        """Ids of tenants in release that are not drained."""
        return frozenset(
            entry.row.id
            for entry in self._entries.values()
            if entry.row.state is TenantState.RELEASING and not entry.drained
        )

    @property
    def leaving(self) -> frozenset[str]:
        """Ids of tenants that should have left the node: in release, or without a row."""
        return self.releasing | self._leftovers.ids

    def clients(self) -> dict[str, tuple[tuple[int, ...], tuple[int, ...]]]:
        """Return, for each served tenant with connected processes: the pids of these processes, and the pids whose
        connection came from the hook."""
        return {
            entry.row.id: (tuple(entry.serving.processes.pids), tuple(entry.serving.hooked))
            for entry in self._entries.values()
            if entry.serving is not None and entry.serving.processes.pids
        }

    def status(self) -> tuple[TenantStatus, ...]:
        """Return one entry per applied row, in the ledger's order."""
        return tuple(view.status() for view in self.views())

    def gpu_busy_ratio(self, uuid: str) -> float | None:
        """Return the part of the last 10 s in which any kernel ran on a GPU, by the driver. None if unknown."""
        return self._observer.utilization.ratio(("", uuid))

    def gpu_books(self, uuid: str) -> Mapping[str, int] | None:
        """Return a GPU's time by use, in nanoseconds, since an agent first saw the GPU. None before a ledger is
        known."""
        return self._metering.gpu_books(uuid) if self._known else None

    def turns_on(self, uuid: str, since: int) -> tuple[list[LoggedTurn], int]:
        """Return the turns on a GPU that ended after `since`, see `Tokens.turns_on`."""
        return self._tokens.turns_on(uuid, since)

    def co_runs(self, uuid: str) -> CoRuns:
        """Return a GPU's co-runners, and how often co-running ended, by reason."""
        return self._tokens.co_runs(uuid)

    async def count(self, taken_in: Collection[str] = ()) -> None:
        """Count GPU time up to now. Before a ledger is known, do nothing. `taken_in`: names of closed series that the
        operator has added to its totals."""
        if self._known:
            await self._metering.count(self._entries, taken_in)

    async def keep_count(self, *, durable: bool) -> None:
        """Store the count of GPU time for the next agent. Before a ledger is known, do nothing. `durable`: flush it to
        disk."""
        if self._known:
            await self._metering.keep(durable=durable)

    def consumption(self) -> tuple[list[dict[str, object]], str | None]:
        """Return the consumption by namespace and model in the form of the GPUNode's status, and the time of the last
        count."""
        return self._metering.consumption()

    def totals(self) -> Mapping[str, TenantTotals]:
        """Return the totals of each tenant at the last count."""
        return self._metering.totals()

    def totals_now(self, tenant_id: str) -> TenantTotals | None:
        """Count a tenant's usage up to now, and return its totals; None if it is not metered."""
        entry = self._entries.get(tenant_id)
        return self._metering.totals_now(entry) if entry is not None else None

    @property
    def hand_offs(self) -> Histogram:
        """Durations of hand-offs: from reading the frame that returned a token until the next grant was sent."""
        return self._tokens.hand_offs

    @property
    def refusals(self) -> Counter[ClientRefusal]:
        """Number of refused clients of all tenants since the start, by reason."""
        return sum((e.served.refusals.counts for e in self._entries.values() if e.served), self._refusals.copy())

    @property
    def killed(self) -> Counter[FindingReason]:
        """Number of processes that were killed since the start, by the finding that was the cause."""
        return self._observer.killed

    def set_models(self, reading: Reading) -> None:
        """Set the models of the GPUs from a reading. Best before the first client connects, which is sent the memory
        that a CUDA context takes."""
        for gpu in reading.gpus:
            self._tokens.set_sharing(gpu.uuid, self._settings.sharing_of(gpu.uuid, gpu.model))
        self._observer.set_models(reading)
        self._metering.set_models(reading, self._entries.values())

    def begin_reading(self) -> None:
        """Notify the tenants that a reading of the inventory begins now, for `observe`."""
        for entry in self._entries.values():
            if entry.served is not None:
                entry.served.begin_reading()

    async def observe(
        self, reading: Reading, *, residue: Residue, owner_of: OwnerOf, replaced: Replaced = nothing_replaced
    ) -> Attribution:
        """Evaluate a reading of the inventory, once per interval; return the attribution of the processes on the GPUs.
        The evaluation takes several turns of the loop: it delays a hand-off by some 2 ms at most, for any number of
        tenants.

        Args:
            residue: See `observer.Residue`.
            owner_of: See `observer.OwnerOf`.
            replaced: See `observer.Replaced`.
        """
        steps = self._observer.observe(
            lambda: self._entries, reading, residue=residue, owner_of=owner_of, replaced=replaced
        )
        while True:
            try:
                next(steps)
            except StopIteration as done:
                self._leftovers.sweep(residue)
                return cast(Attribution, done.value)
            await asyncio.sleep(0)

    # ---- inside

    async def _apply_row(self, row: Tenant) -> bool:
        """Apply a row. Return True if its tenant is shared and its files still have to be opened by `_serve_all`."""
        entry = self._entries.get(row.id)
        if entry is not None and entry.row == row and entry.settled:
            return False
        if entry is not None:
            self._metering.update(row, entry)
        if entry is not None and (entry.row.gpus, entry.row.mode) != (row.gpus, row.mode):
            log.error("a tenant moved in the ledger; its clients have to connect again", tenant=row.id, pod=pod_of(row))
            self._close(entry)
            entry = None
        unservable = not_servable(row)
        if unservable is not None:
            if entry is None or entry.unservable != unservable:
                log.error("cannot serve this row of the ledger", tenant=row.id, pod=pod_of(row), reason=unservable)
            self._entries[row.id] = Entry(row, self._observer.rules_of(row.id), unservable=unservable)
        elif row.state is TenantState.RELEASING:
            await self._release(row, entry)
        elif entry is not None and entry.directory is not None:
            await self._change(row, entry)
        else:
            if entry is not None:
                self._close(entry)
            await self._leftovers.keep(row.id)
            if row.mode is Mode.SHARED:
                return True
            self._enter(row, await asyncio.to_thread(self._state.complete, row.id, None))
        return False

    async def _serve_all(self, rows: Sequence[Tenant]) -> dict[str, OSError]:
        """Open the files of shared tenants and start their runtimes, in batches. The next batch is opened in a thread
        while the last one starts. Return the disk's errors, by tenant."""
        failed: dict[str, OSError] = {}
        parts = [rows[begin : begin + _OPENED_AT_ONCE] for begin in range(0, len(rows), _OPENED_AT_ONCE)]
        openings = (asyncio.create_task(self._opened(part), name="open") for part in parts)
        ahead = next(openings, None)
        for part in parts:
            assert ahead is not None
            opened, ahead = await ahead, next(openings, None)
            for row, files in zip(part, opened, strict=True):
                try:
                    self._serve(row, files)
                except OSError as error:
                    failed[row.id] = error
                await asyncio.sleep(0)  # let other tasks run, because the start of a tenant takes some 0.3 ms
        return failed

    async def _opened(self, rows: Sequence[Tenant]) -> Sequence[TenantFiles | OSError]:
        slots = self._settings.connections_max
        wanted = [FilesWanted(row.id, limits_text(row), row.gpus, slots) for row in rows]
        try:
            return await asyncio.to_thread(self._state.open_all, wanted)
        except OSError as error:
            return [error] * len(rows)

    def _serve(self, row: Tenant, files: TenantFiles | OSError) -> None:
        if isinstance(files, OSError):
            raise files
        served = self._started(row, files)
        self._metering.take_up(row.id)
        self._enter(row, files.unwritten, served)

    def _enter(self, row: Tenant, untaken: OSError | None, served: ServedTenant | None = None) -> None:
        """Add the entry of a tenant whose directory may be mounted into its pod. `untaken`: the disk's error while
        completing the directory, which is raised at the end."""
        self._entries[row.id] = Entry(
            row,
            self._observer.rules_of(row.id),
            served=served,
            directory=self._state.path(row.id),
            unwritten=untaken is not None,
        )
        log.info("tenant is served", tenant=row.id, pod=pod_of(row), gpus=list(row.gpus), mode=row.mode)
        if untaken is not None:
            raise untaken

    def _started(self, row: Tenant, files: TenantFiles) -> ServedTenant:
        """Start the runtime of a tenant, from the state that an earlier agent has left. The runtime owns the files."""
        left = files.left
        try:
            served = ServedTenant(
                row,
                files.listener,
                self._tokens,
                self._settings,
                self._changed,
                budget=self._budget,
                handover=files.handover,
                left=left,
                peers=self._peers,
            )
        except OSError:
            files.close()
            raise
        served.context_kib = self._observer.context_kib
        if self._checkpointing is None:
            self._checkpointing = asyncio.get_running_loop().call_later(_CHECKPOINT_S, self._checkpoint)
        if left.survivors:
            log.info("taken over from the earlier agent", tenant=row.id, pod=pod_of(row), processes=len(left.survivors))
        return served

    def _checkpoint(self) -> None:
        if not self._checkpoints_due:
            self._checkpoints_due = list(self._entries)
        slices = max(1, -(-len(self._entries) // _CHECKPOINTS_AT_ONCE))
        self._checkpointing = asyncio.get_running_loop().call_later(_CHECKPOINT_S / slices, self._checkpoint)
        for _ in range(min(_CHECKPOINTS_AT_ONCE, len(self._checkpoints_due))):
            entry = self._entries.get(self._checkpoints_due.pop())
            if entry is not None and entry.served is not None:
                entry.served.checkpoint()

    async def _change(self, row: Tenant, entry: Entry) -> None:
        if entry.served is not None and limits_text(row) != limits_text(entry.row):
            entry.unwritten = True
            entry.served.update(row)
            log.info(
                "tenant changed",
                tenant=row.id,
                pod=pod_of(row),
                request=row.request_milli,
                limit=row.limit_milli,
                memory=row.memory,
            )
        elif entry.served is not None:
            entry.served.row = row
        entry.row = row
        if entry.unwritten:
            await asyncio.to_thread(self._state.create, row.id, _limits_of(row))
            entry.unwritten = False

    async def _release(self, row: Tenant, entry: Entry | None) -> None:
        if entry is None:
            entry = self._entries[row.id] = Entry(row, self._observer.rules_of(row.id))
            if row.id not in await asyncio.to_thread(self._state.existing):
                return
        if entry.row.state is not TenantState.RELEASING or entry.directory is not None:
            log.info("tenant is being released", tenant=row.id, pod=pod_of(row))
        entry.row, entry.directory = row, None
        if entry.served is not None:
            entry.served.stop(_RELEASING)
            self._state.unheard(row.id)
            await self._metering.keep(durable=False)
        await asyncio.to_thread(self._state.shut, row.id)

    def _drop(self, tenant_id: str) -> None:
        entry = self._entries.pop(tenant_id)
        self._metering.end(entry)
        self._close(entry)
        if StateDir.serves(tenant_id):
            self._leftovers.add([tenant_id])
        log.info("tenant was removed from the ledger", tenant=tenant_id, pod=pod_of(entry.row))

    def _close(self, entry: Entry) -> None:
        if entry.served is not None:
            self._refusals += entry.served.refusals.counts
            entry.served.close()
            entry.served = None
            self._state.unheard(entry.row.id)


def _limits_of(row: Tenant) -> str | None:
    return None if row.mode is Mode.EXCLUSIVE else limits_text(row)
