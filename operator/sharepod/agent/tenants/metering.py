"""Metering of the registry's tenants: feeds the meter of GPU time from the tenants' accounts, and stores its counters
for the next agent.

Guarantees:
- A tenant's time account is counted before it is removed. The count is stored before the file of the account is
  removed.
- Counting delays no hand-off by more than some 0.6 ms, with as many tenants as a ledger has room for.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Collection, Iterable, Mapping

from sharepod.agent.devices.inventory import Reading
from sharepod.agent.shares.consumption_meter import ConsumptionMeter, Moment, TenantTotals
from sharepod.agent.shares.tokens import Tokens
from sharepod.agent.state.boot import boot_id
from sharepod.agent.state.consumption_file import keep_consumption, read_consumption
from sharepod.agent.state.files import KeptFiles
from sharepod.api.gpunode import Tenant

from .entry import Entry


class TenantMetering:
    """Metering of one node.

    Args:
        files: Files that an agent leaves to the next.
        tokens: The node's token scheduler.
    """

    def __init__(self, files: KeptFiles, tokens: Tokens) -> None:
        self._files = files
        self._tokens = tokens
        self._models: Mapping[str, str] = {}
        """Model of each GPU that has been read, by UUID."""
        self._meter = ConsumptionMeter(_moment, _series_name, boot_id())

    async def restore(self) -> None:
        """Continue from the count of an earlier agent."""
        kept = await asyncio.to_thread(read_consumption, self._files)
        if kept is not None:
            self._meter.restore(kept)

    def set_models(self, reading: Reading, entries: Iterable[Entry]) -> None:
        """Set the GPUs' models from a reading, also for these tenants, which are already metered."""
        self._models = {gpu.uuid: gpu.model for gpu in reading.gpus}
        for entry in entries:
            self._meter.update(entry.row, self._models, self._tokens.account_of(entry.row.id))

    async def begin(self, rows: Iterable[Tenant]) -> None:
        """Start to meter rows that are new to this agent, yielding to the loop after each set of GPUs. Rows on the same
        GPUs are handled together, because advancing the GPU's account takes time in proportion to its tenants."""
        by_gpus: dict[tuple[str, ...], list[Tenant]] = {}
        for row in rows:
            by_gpus.setdefault(row.gpus, []).append(row)
        for gpus, some in by_gpus.items():
            self._enter(gpus)
            for row in some:
                self._meter.update(row, self._models, self._tokens.account_of(row.id))
            await asyncio.sleep(0)

    def update(self, row: Tenant, entry: Entry) -> None:
        """Meter a tenant by the new content of its row from now on. `entry`: its entry, still with the former content;
        so call this before changing the entry."""
        self._enter((*row.gpus, *entry.row.gpus))
        self._meter.update(row, self._models, self._tokens.account_of(row.id))

    def take_up(self, tenant_id: str) -> None:
        """Start to count a tenant that is served now, at the present state of its time account."""
        self._meter.take_up(tenant_id, self._tokens.usage(tenant_id))

    def end(self, entry: Entry) -> None:
        """Stop metering a tenant. Call this before its time account is removed."""
        self._enter(entry.row.gpus)
        self._meter.end(entry.row.id, self._tokens.account_of(entry.row.id))

    def end_all_but(self, tenant_ids: Collection[str]) -> None:
        """Stop metering all other tenants: their rows were removed while no agent ran."""
        for tenant_id in self._meter.tenants:
            if tenant_id not in tenant_ids:
                self._meter.end(tenant_id, None)

    async def count(self, entries: Mapping[str, Entry], taken_in: Collection[str]) -> None:
        """Count all GPUs and tenants up to now, in several turns of the loop.

        Args:
            entries: The registry's rows, which may change during the count.
            taken_in: Names of closed series that the operator has added to its totals; they are dropped.
        """
        known = dict.fromkeys(self._models)
        for uuid in known:
            self._enter([uuid])
            await asyncio.sleep(0)
        for tenant_id, entry in list(entries.items()):
            if known.keys().isdisjoint(entry.row.gpus) and tenant_id in entries:
                self._meter.settle(tenant_id, self._tokens.account_of(tenant_id))
        self._meter.close_unused()
        self._meter.forget(taken_in)

    async def keep(self, *, durable: bool) -> None:
        """Store the count for the next agent. `durable`: flush it, so that it survives a power cut."""
        await asyncio.to_thread(keep_consumption, self._files, self._meter.kept(), durable=durable)

    def gpu_books(self, uuid: str) -> Mapping[str, int] | None:
        """Return a GPU's time by use, in nanoseconds, since an agent first saw the GPU."""
        self._enter([uuid])
        return self._meter.gpu_books(uuid)

    def consumption(self) -> tuple[list[dict[str, object]], str | None]:
        """Return all series in the form of the GPUNode's status, and the time of the last count."""
        return self._meter.consumption(), self._meter.metered_at

    def totals(self) -> Mapping[str, TenantTotals]:
        """Return the totals of each tenant at the last count."""
        return self._meter.totals()

    def totals_now(self, entry: Entry) -> TenantTotals | None:
        """Count a tenant's usage up to now, and return its totals; None if it is not metered."""
        self._enter(entry.row.gpus)
        return self._meter.totals().get(entry.row.id)

    def _enter(self, uuids: Iterable[str]) -> None:
        for uuid in uuids:
            self._meter.enter_gpu(uuid, self._tokens.gpu_time(uuid), self._tokens.account_of)


def _moment() -> Moment:
    return Moment(time.monotonic_ns(), time.time_ns() // 1_000_000)


def _series_name(since_ms: int) -> str:
    return f"{since_ms:x}-{secrets.token_hex(6)}"
