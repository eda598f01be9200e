"""Views of the tenants for readers (metrics, status report): one frozen value per row of the ledger.

Guarantees:
- A view is built once per row and reading, so that no reader looks a tenant up again by its id.
- Reading a view changes nothing and does no I/O.
- A view computes only the values that the status needs. Values that only metrics need are computed by `share` and the
  ratios.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from sharepod.agent.findings.utilization import UtilizationMeter
from sharepod.agent.shares.histogram import Histogram
from sharepod.agent.shares.tokens import Tokens
from sharepod.api.gpunode import Finding, Mode, Tenant, TenantState, TenantStatus
from sharepod.timeshare import TimeUsage

from .entry import Entry
from .served import ServedTenant


@dataclass(frozen=True, slots=True)
class ShareView:
    """Figures of a tenant that shares its GPUs and is being served. Mappings are keyed by GPU UUID."""

    usage: TimeUsage
    waits: Histogram
    """Histogram of the tenant's waits for a grant. It is live: it continues to count."""
    waited_ns: int
    """Total time that the tenant has waited, up to now."""
    alone_in_flight: float | None
    """Part of the time, 0 to 1, in which the tenant has work in flight while it holds the GPU alone. None if
    unknown."""
    throttled: int
    """Number of times that its processes were throttled because they sent too many frames."""
    denied_allocations: Mapping[str, int]
    """Number of requests for memory that were refused because of the limit, by GPU UUID."""


@dataclass(frozen=True, slots=True)
class TenantView:
    """Applied row, and the current state of its tenant."""

    row: Tenant
    processes: int
    """Processes that are connected or that the driver reports on the tenant's GPUs."""
    memory_used: Mapping[str, int]
    """Bytes in use, by GPU UUID. For an Exclusive tenant, as the driver reports them. Empty for a tenant in release."""
    usage: TimeUsage | None
    """Token time; None unless the tenant is being served."""
    connected: bool
    """True if any hook of the tenant has ever connected."""
    measured: bool
    """False while `usage` averages over time before the tenant's first hook connected."""
    enforced: bool | None
    """True if the tenant's share is enforced, False if not; None if unknown."""
    findings: tuple[Finding, ...]
    drained: bool
    """True once nothing of a released tenant is left."""
    left_behind: str | None
    """Remains of a tenant in release, as text. None if nothing remains, or not read yet."""

    _served: ServedTenant | None
    _tokens: Tokens
    _utilization: UtilizationMeter

    @classmethod
    def of(cls, entry: Entry, tokens: Tokens, utilization: UtilizationMeter) -> TenantView:
        """Return the view of one entry of the registry."""
        row, serving = entry.row, entry.serving
        return cls(
            row=row,
            processes=len(entry.processes),
            memory_used=_memory_used(entry),
            usage=tokens.usage(row.id) if serving is not None else None,
            connected=entry.served is not None and entry.served.greeted_ever,
            measured=entry.served is None or entry.served.measured,
            enforced=entry.enforced,
            findings=entry.rules.findings if serving is not None else (),
            drained=entry.drained,
            left_behind=entry.left_behind,
            _served=serving,
            _tokens=tokens,
            _utilization=utilization,
        )

    def usage_ratio(self, uuid: str) -> float | None:
        """Return the part of the last 10 s in which the tenant held a GPU. For an Exclusive tenant, the part in which
        the GPU was busy. None if unknown."""
        return self.usage.held_milli / 1000 if self.usage is not None else self.busy_ratio(uuid)

    def busy_ratio(self, uuid: str) -> float | None:
        """Return the part of the last 10 s in which kernels of the tenant ran on a GPU, by the driver. None if
        unknown."""
        return self._utilization.ratio((self.row.id, uuid))

    def busy_seconds(self, uuid: str) -> float | None:
        """Return the seconds for which kernels of the tenant have run on a GPU since the agent first saw the tenant.
        None if unknown."""
        return self._utilization.seconds((self.row.id, uuid))

    def share(self) -> ShareView | None:
        """Return the measurements of sharing. None unless the tenant is being served."""
        if self._served is None or self.usage is None:
            return None
        return ShareView(
            usage=self.usage,
            waits=self._tokens.waits(self.row.id),
            waited_ns=self._tokens.waited_ns(self.row.id),
            alone_in_flight=self._tokens.alone_in_flight(self.row.id),
            throttled=self._served.throttled,
            denied_allocations=self._served.memory.denied(),
        )

    def status(self) -> TenantStatus:
        """Return the tenant's entry in the status of the GPUNode."""
        held = round(1000 * max((self.usage_ratio(uuid) or 0.0 for uuid in self.row.gpus), default=0.0))
        progress = held if self.usage is None else self.usage.progress_milli
        return TenantStatus(
            id=self.row.id,
            processes=self.processes,
            memory=max(self.memory_used.values(), default=0),
            held_milli=held if self.measured else None,
            progress_milli=progress if self.measured else None,
            connected=self.connected,
            enforced=self.enforced,
            findings=self.findings,
            drained=self.drained,
        )


def _memory_used(entry: Entry) -> Mapping[str, int]:
    if entry.row.state is TenantState.RELEASING:
        return {}
    if entry.served is not None:
        return entry.served.memory.used()
    if entry.row.mode is not Mode.EXCLUSIVE:
        return {}
    return {uuid: sum(entry.seen.memory.get(uuid, {}).values()) for uuid in entry.row.gpus}
