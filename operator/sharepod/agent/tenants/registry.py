"""The node's tenants: what the ledger says is made so, and what became of it is told.

`apply` is the only way in. A tenant whose row says Releasing is refused and watched until nothing of it is left; a
row that is gone leaves its directory until then, too.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import structlog

from sharepod.agent.devices.inventory import Reading
from sharepod.agent.findings.attribution import Attribution
from sharepod.agent.settings import AgentSettings
from sharepod.agent.shares.histogram import Histogram
from sharepod.agent.shares.tokens import Tokens
from sharepod.agent.sockets.frame_budget import FrameBudget
from sharepod.agent.sockets.refusals import ClientRefusal
from sharepod.agent.state.directory import StateDir
from sharepod.agent.state.handover import Handover
from sharepod.api.gpunode import Mode, Tenant, TenantState, TenantStatus

from .entry import Entry, limits_text, not_servable
from .observer import Observer, OwnerOf, Residue
from .served import ServedTenant
from .view import TenantView

log = structlog.get_logger(__name__)

_CHECKPOINT_S = 0.2
"""How much of the time accounts an agent that is killed takes with it."""

_RELEASING = "this pod's share of the GPU is being given away; nothing more runs in its name"


class TenantRegistry:
    """`start`, then `apply` whenever the ledger changed. `changed` is called when `status` may have become
    different."""

    def __init__(self, settings: AgentSettings, *, changed: Callable[[], None]) -> None:
        self._settings = settings
        self._changed = changed
        self._state = StateDir(settings.state_dir, settings.hook_file, fail_open=settings.fail_open)
        self._tokens = Tokens(settings.timeshare())
        self._budget = FrameBudget(settings.frames_per_s)
        self._entries: dict[str, Entry] = {}
        self._leftovers: set[str] = set()
        self._applying = asyncio.Lock()
        self._removing: asyncio.Task[None] | None = None
        self._known = False
        self._observer = Observer(settings.state_dir, settings.watch(), self._tokens.usage)
        self._checkpointing: asyncio.TimerHandle | None = None
        self._refusals: Counter[ClientRefusal] = Counter()
        """By tenants that are gone."""

    async def start(self) -> None:
        """Prepares the state directory and the hook. Raises `StateDirError`."""
        digest = await asyncio.to_thread(self._state.prepare)
        await self._observer.start()
        log.info("hook", file=str(self._settings.hook_file), sha256=digest)

    async def close(self) -> None:
        """Closes every socket; directories stay, for pods outlive the agent."""
        await self._removals()
        await self._observer.close()
        if self._checkpointing is not None:
            self._checkpointing.cancel()
            self._checkpointing = None
        for entry in self._entries.values():
            if entry.served is not None:
                entry.served.close()
        self._tokens.close()

    async def apply(self, rows: Sequence[Tenant]) -> None:
        """Makes these rows, and no others, the tenants of this node. When it returns they are in force.

        New: a directory with `agent.sock`, `limits`, `libsharepod.so`, `ld.so.preload`; an Exclusive tenant's has no
        hook and no socket. Changed: limits replaced, clients told. Releasing: socket closed, clients refused. Gone:
        closed; the directory goes once nothing is left of the tenant. A row that cannot be served is logged and has
        no directory. Raises `OSError` where the state directory does not take what has to be written, once every row
        has been tried; applying the same rows again goes on from there.
        """
        failed: dict[str, OSError] = {}
        async with self._applying:
            wanted = {row.id: row for row in rows}
            for tenant_id in [tenant_id for tenant_id in self._entries if tenant_id not in wanted]:
                self._drop(tenant_id)
            for row in wanted.values():
                try:
                    await self._apply_row(row)
                except OSError as error:
                    failed[row.id] = error
            self._entries = {tenant_id: self._entries[tenant_id] for tenant_id in wanted if tenant_id in self._entries}
            if not self._known:
                self._known = True
                self._leftovers.update(set(await asyncio.to_thread(self._state.existing)) - set(wanted))
        self._changed()
        if failed:
            tenant_id, first = next(iter(failed.items()))
            words = f"{first.strerror or first} (tenant {tenant_id}, {len(failed)} of {len(wanted)} rows)"
            raise OSError(first.errno, words, first.filename) from first

    @property
    def known(self) -> bool:
        """Whether the node's ledger has been applied since the start."""
        return self._known

    def directory(self, tenant_id: str) -> Path | None:
        """The directory to publish to the tenant's pod; None if the tenant is unknown, Releasing or cannot be
        served."""
        entry = self._entries.get(tenant_id)
        return None if entry is None else entry.directory

    def unservable(self, tenant_id: str) -> str | None:
        """Return why a row cannot be served, or None."""
        entry = self._entries.get(tenant_id)
        return None if entry is None else entry.unservable

    def views(self) -> Iterator[TenantView]:
        """Yield one view per row in force, in the ledger's order."""
        busy = self._observer.busy
        return (TenantView.of(entry, self._tokens, busy) for entry in self._entries.values())

    def status(self) -> tuple[TenantStatus, ...]:
        """Return one entry per row in force, in the ledger's order."""
        return tuple(view.status() for view in self.views())

    def gpu_busy_ratio(self, uuid: str) -> float | None:
        """Return the part of the last 10 s in which any kernel ran on a GPU, by the driver. None if not known."""
        return self._observer.busy.ratio(("", uuid))

    @property
    def hand_offs(self) -> Histogram:
        """How long the agent took from each token that came back to the next grant."""
        return self._tokens.hand_offs

    @property
    def refusals(self) -> Counter[ClientRefusal]:
        """How often a client was closed for what it sent, or did not send."""
        return sum((e.served.refusals.counts for e in self._entries.values() if e.served), self._refusals.copy())

    def know_models(self, reading: Reading) -> None:
        """What GPUs there are. Before the first client comes: it is told what its contexts take."""
        self._observer.know_models(reading)

    def begin_reading(self) -> None:
        """From now on the inventory is being read: what `observe` is given next is from no earlier."""
        for entry in self._entries.values():
            if entry.served is not None:
                entry.served.begin_reading()

    def observe(self, reading: Reading, *, residue: Residue, owner_of: OwnerOf) -> Attribution:
        """Takes note of what a reading of the inventory says about the tenants, and says whose the processes are.
        Called once per inventory interval."""
        attribution = self._observer.observe(self._entries, reading, residue=residue, owner_of=owner_of)
        self._remove_leftovers(residue)
        return attribution

    # ---- inside

    async def _apply_row(self, row: Tenant) -> None:
        entry = self._entries.get(row.id)
        if entry is not None and entry.row == row and entry.settled:
            return
        if entry is not None and (entry.row.gpus, entry.row.mode) != (row.gpus, row.mode):
            log.error("a tenant moved in the ledger; its clients have to connect anew", tenant=row.id)
            self._close(entry)
            entry = None
        unservable = not_servable(row)
        if unservable is not None:
            if entry is None or entry.unservable != unservable:
                log.error("cannot serve this row of the ledger", tenant=row.id, pod=row.pod_name, reason=unservable)
            self._entries[row.id] = Entry(row, self._observer.watch_of(row.id), unservable=unservable)
        elif row.state is TenantState.RELEASING:
            await self._release(row, entry)
        elif entry is None or entry.directory is None:
            await self._serve(row, entry)
        else:
            await self._change(row, entry)

    async def _serve(self, row: Tenant, entry: Entry | None) -> None:
        if entry is not None:
            self._close(entry)
        self._leftovers.discard(row.id)
        await self._removals()
        limits = None if row.mode is Mode.EXCLUSIVE else limits_text(row)
        directory = await asyncio.to_thread(self._state.create, row.id, limits)
        served = None
        if row.mode is Mode.SHARED:
            served = await self._listen(row)
        self._entries[row.id] = Entry(row, self._observer.watch_of(row.id), served=served, directory=directory)
        log.info("tenant", tenant=row.id, pod=f"{row.namespace}/{row.pod_name}", gpus=list(row.gpus), mode=row.mode)

    async def _listen(self, row: Tenant) -> ServedTenant:
        """Goes on from what an earlier agent left of the tenant."""
        handover, left = await asyncio.to_thread(
            Handover.open, self._state.handover(row.id), row.gpus, self._settings.connections_max
        )
        listener = None
        try:
            listener = await asyncio.to_thread(self._state.listen, row.id)
            served = ServedTenant(
                row,
                listener,
                self._tokens,
                self._settings,
                self._changed,
                budget=self._budget,
                handover=handover,
                left=left,
            )
        except OSError:
            handover.close()
            if listener is not None:
                listener.close()
            raise
        served.context_kib = self._observer.context_kib
        if self._checkpointing is None:
            self._checkpointing = asyncio.get_running_loop().call_later(_CHECKPOINT_S, self._checkpoint)
        if left.survivors:
            log.info("goes on from the agent before", tenant=row.id, processes=len(left.survivors))
        return served

    def _checkpoint(self) -> None:
        self._checkpointing = asyncio.get_running_loop().call_later(_CHECKPOINT_S, self._checkpoint)
        for entry in self._entries.values():
            if entry.served is not None:
                entry.served.checkpoint()

    async def _change(self, row: Tenant, entry: Entry) -> None:
        if entry.served is not None and limits_text(row) != limits_text(entry.row):
            await asyncio.to_thread(self._state.write_limits, row.id, limits_text(row))
            entry.served.update(row)
            log.info(
                "tenant changed", tenant=row.id, request=row.request_milli, limit=row.limit_milli, memory=row.memory
            )
        elif entry.served is not None:
            entry.served.row = row
        entry.row = row

    async def _release(self, row: Tenant, entry: Entry | None) -> None:
        if entry is None:
            entry = self._entries[row.id] = Entry(row, self._observer.watch_of(row.id))
            if row.id not in await asyncio.to_thread(self._state.existing):
                return
        if entry.row.state is not TenantState.RELEASING or entry.directory is not None:
            log.info("tenant is being released", tenant=row.id, pod=f"{row.namespace}/{row.pod_name}")
        entry.row, entry.directory = row, None
        if entry.served is not None:
            entry.served.stop(_RELEASING)
        await asyncio.to_thread(self._state.shut, row.id)

    def _drop(self, tenant_id: str) -> None:
        entry = self._entries.pop(tenant_id)
        self._close(entry)
        if self._state.serves(tenant_id):
            self._leftovers.add(tenant_id)
        log.info("tenant is gone from the ledger", tenant=tenant_id)

    def _close(self, entry: Entry) -> None:
        if entry.served is not None:
            self._refusals += entry.served.refusals.counts
            entry.served.close()
            entry.served = None

    def _remove_leftovers(self, residue: Residue) -> None:
        if not self._leftovers or (self._removing is not None and not self._removing.done()):
            return
        free = [tenant_id for tenant_id in sorted(self._leftovers) if residue(tenant_id) is None]
        if free:
            self._leftovers.difference_update(free)
            self._removing = asyncio.create_task(self._remove(free), name="remove-tenants")

    async def _remove(self, tenant_ids: list[str]) -> None:
        for tenant_id in tenant_ids:
            try:
                await asyncio.to_thread(self._state.remove, tenant_id)
                log.info("tenant's directory removed", tenant=tenant_id)
            except FileNotFoundError:
                pass
            except OSError as error:
                log.warning("cannot remove a tenant's directory, trying again", tenant=tenant_id, error=str(error))
                self._leftovers.add(tenant_id)

    async def _removals(self) -> None:
        if self._removing is not None:
            await asyncio.gather(self._removing, return_exceptions=True)
