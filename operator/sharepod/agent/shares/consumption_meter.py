"""Meter of the tenants' GPU consumption: series of counters by namespace and model, and an account of each GPU's time.

Guarantees:
- CM1 whole-books: the uses of a GPU's time (held, gap, anticipated, handed over, idle, stalled, unmetered) add up to
  the time since the GPU was first seen. This holds across all agents that have continued the account.
- CM2 unmetered: a GPU's time is `unmetered` only while a tenant shares the GPU and no agent counts: from the last
  stored count to the next agent's first count. Time that a tenant's account shows as held in this interval is moved to
  `held`.
- CM3 growing: a series never falls, and a closed series does not grow (CO1 to CO3 in `api/consumption.py`).
- CM4 resumed: time that an account shows as held since its last count is counted exactly once, by the next agent that
  counts.

Clocks are passed in: nanoseconds of the node's monotonic clock, which agents of one boot share, and milliseconds since
1970.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime

from sharepod.agent.state.consumption_file import KeptConsumption, KeptGpu, KeptSeries, KeptTenant
from sharepod.api.consumption import MAX_CONSUMPTION, MAX_COUNTER, MAX_MODEL
from sharepod.api.gpunode import Mode, Tenant
from sharepod.timeshare import GpuTime, TimeUsage

CLOSE_AFTER_MS = 3_600_000
"""Milliseconds without a tenant after which a series is closed: an hour, so that successive jobs share one series."""
CLOSED_AT_MOST = MAX_CONSUMPTION // 2
"""Most closed series that wait until the operator has stored them. At this number no further series is closed."""
UNKNOWN_MODEL = "unknown"
"""Model of a GPU that has not been read yet."""

_USES = ("held", "gap", "anticipated", "handed_over", "idle", "stalled")


@dataclass(frozen=True)
class Moment:
    """One moment, by the node's monotonic clock and by the time of day."""

    monotonic_ns: int
    wall_ms: int


@dataclass(frozen=True, slots=True)
class TenantTotals:
    """Consumption of one tenant since it got its row, over all agents; for a tenant with several GPUs, summed over
    them. `since`: the time at which the totals were 0. It identifies this count."""

    since: str
    held_seconds: int
    borrowed_seconds: int
    reserved_seconds: int
    memory_mebibyte_seconds: int


@dataclass
class _MeteredTenant:
    namespace: str
    gpus: dict[str, str]
    request_milli: int
    memory_mib: int
    exclusive: bool
    held_ns: int
    borrowed_ns: int
    at_ns: int
    since_ms: int
    total_held_ns: int = 0
    total_borrowed_ns: int = 0
    total_reserved_ns: int = 0
    total_memory_mib_ns: int = 0
    resumed: bool = False
    """True until this agent has read the tenant's time account: time held without an agent still counts as
    `unmetered`."""


@dataclass
class _MeteredGpu:
    books: dict[str, int]
    at_ns: int
    seen: dict[str, int] = field(default_factory=dict)
    """Uses of the GPU's time in nanoseconds, by the scheduler's account at the last count; empty without account."""
    away: bool = False
    """True until this agent's first count of the GPU: no agent counted since `at_ns`."""


class ConsumptionMeter:
    """Meter of one node.

    Args:
        fresh_name: Returns a unique name for a new series, given the series' start in milliseconds since 1970.
        boot: Identity of the node's current boot.
    """

    def __init__(self, now: Callable[[], Moment], fresh_name: Callable[[int], str], boot: str) -> None:
        self._now = now
        self._fresh_name = fresh_name
        self._boot = boot
        self._tenants: dict[str, _MeteredTenant] = {}
        self._series: dict[tuple[str, str], KeptSeries] = {}
        self._closed: list[KeptSeries] = []
        self._gpus: dict[str, _MeteredGpu] = {}
        self._last_since_ms = 0
        self._metered_at_ms = 0

    # ---- state across agents

    def restore(self, kept: KeptConsumption) -> None:
        """Continue from an earlier agent's state. Its tenants stay metered by their former rows until `update` or `end`
        is called for them."""
        now = self._now()
        same_boot, shift = kept.boot == self._boot, 0
        if not same_boot:  # after a reboot the monotonic clock restarts, so the wall clock gives the time in between
            shift = now.monotonic_ns - kept.monotonic_ns - max(0, now.wall_ms - kept.wall_ms) * 1_000_000
        for tenant_id, one in kept.tenants.items():
            self._tenants[tenant_id] = _MeteredTenant(
                one.namespace,
                dict(one.gpus),
                one.request_milli,
                one.memory_mib,
                one.exclusive,
                one.held_ns if same_boot else 0,
                one.borrowed_ns if same_boot else 0,
                min(one.at_ns + shift, now.monotonic_ns),
                one.since_ms or now.wall_ms,
                one.total_held_ns,
                one.total_borrowed_ns,
                one.total_reserved_ns,
                one.total_memory_mib_ns,
                resumed=True,
            )
        for series in kept.series:
            if series.closed:
                self._closed.append(series)
            else:
                self._series[series.namespace, series.model] = series
        for uuid, gpu in kept.gpus.items():
            books = {use: getattr(gpu, use) for use in (*_USES, "unmetered")}
            self._gpus[uuid] = _MeteredGpu(books, min(gpu.at_ns + shift, now.monotonic_ns), away=True)
        self._last_since_ms = kept.last_since_ms
        self._metered_at_ms = kept.wall_ms

    def kept(self) -> KeptConsumption:
        """Return the state for the next agent."""
        now = self._now()
        return KeptConsumption(
            boot=self._boot,
            monotonic_ns=now.monotonic_ns,
            wall_ms=now.wall_ms,
            last_since_ms=self._last_since_ms,
            tenants={
                tenant_id: KeptTenant(
                    namespace=one.namespace,
                    gpus=dict(one.gpus),
                    request_milli=one.request_milli,
                    memory_mib=one.memory_mib,
                    exclusive=one.exclusive,
                    held_ns=one.held_ns,
                    borrowed_ns=one.borrowed_ns,
                    at_ns=one.at_ns,
                    since_ms=one.since_ms,
                    total_held_ns=one.total_held_ns,
                    total_borrowed_ns=one.total_borrowed_ns,
                    total_reserved_ns=one.total_reserved_ns,
                    total_memory_mib_ns=one.total_memory_mib_ns,
                )
                for tenant_id, one in self._tenants.items()
            },
            series=(*self._closed, *self._series.values()),
            gpus={uuid: KeptGpu(**gpu.books, at_ns=gpu.at_ns) for uuid, gpu in self._gpus.items()},
        )

    # ---- tenants

    @property
    def tenants(self) -> tuple[str, ...]:
        """Ids of the metered tenants."""
        return tuple(self._tenants)

    def update(self, row: Tenant, models: Mapping[str, str], usage: TimeUsage | None) -> None:
        """Meter a tenant by the new content of its row from now on. Time until now counts by the former content, if the
        tenant is already metered.

        Args:
            models: Model of each GPU that has been read, by UUID.
            usage: Token time of the tenant so far; None: it has no time account.
        """
        known = self._tenants.get(row.id)
        if known is not None:
            self.settle(row.id, usage)
        before = known.gpus if known is not None else {}
        gpus = {uuid: models.get(uuid, before.get(uuid, UNKNOWN_MODEL))[:MAX_MODEL] for uuid in row.gpus}
        moved = known is not None and known.gpus.keys() != gpus.keys()
        self._tenants[row.id] = _MeteredTenant(
            row.namespace,
            gpus,
            row.request_milli,
            row.memory >> 20,
            row.mode is Mode.EXCLUSIVE,
            known.held_ns if known and not moved else usage.held_ns if usage else 0,
            known.borrowed_ns if known and not moved else usage.borrowed_ns if usage else 0,
            self._now().monotonic_ns,
            known.since_ms if known is not None else self._now().wall_ms,
            known.total_held_ns if known is not None else 0,
            known.total_borrowed_ns if known is not None else 0,
            known.total_reserved_ns if known is not None else 0,
            known.total_memory_mib_ns if known is not None else 0,
            resumed=known.resumed if known is not None else False,
        )
        for model in set(gpus.values()):
            self._series[row.namespace, model] = self._open(row.namespace, model, self._now())

    def take_up(self, tenant_id: str, usage: TimeUsage) -> None:
        """Start to count a tenant at the present state of its time account: time held before is not counted. If an
        earlier agent has metered the tenant, continue from that agent's count instead."""
        one = self._tenants[tenant_id]
        if one.resumed:
            self.settle(tenant_id, usage)
        else:
            one.held_ns, one.borrowed_ns = usage.held_ns, usage.borrowed_ns

    def settle(self, tenant_id: str, usage: TimeUsage | None) -> None:
        """Count what a tenant has consumed since its last count. `usage`: its token time so far; None: no time
        account."""
        one = self._tenants[tenant_id]
        now = self._now()
        elapsed = max(0, now.monotonic_ns - one.at_ns)
        held = borrowed = 0
        if one.exclusive:
            held = elapsed
        elif usage is not None:
            # An account that shows less than was counted is a stored copy from before that count. Count nothing, and
            # continue from the copy.
            held = max(0, usage.held_ns - one.held_ns)
            borrowed = max(0, usage.borrowed_ns - one.borrowed_ns)
            one.held_ns, one.borrowed_ns = usage.held_ns, usage.borrowed_ns
            if one.resumed:
                self._found_in_accounts(one.gpus, held)
                one.resumed = False
        one.at_ns = now.monotonic_ns
        one.total_held_ns += held * len(one.gpus)
        one.total_borrowed_ns += min(borrowed, held) * len(one.gpus)
        one.total_reserved_ns += elapsed * one.request_milli // 1000 * len(one.gpus)
        one.total_memory_mib_ns += elapsed * one.memory_mib * len(one.gpus)
        for model in set(one.gpus.values()):
            gpus = sum(1 for each in one.gpus.values() if each == model)
            was = self._open(one.namespace, model, now)
            self._series[one.namespace, model] = was.model_copy(
                update={
                    "held_ns": was.held_ns + held * gpus,
                    "borrowed_ns": was.borrowed_ns + min(borrowed, held) * gpus,
                    "reserved_ns": was.reserved_ns + elapsed * one.request_milli // 1000 * gpus,
                    "memory_mib_ns": was.memory_mib_ns + elapsed * one.memory_mib * gpus,
                    "used_ms": now.wall_ms,
                }
            )
        self._metered_at_ms = max(self._metered_at_ms, now.wall_ms)

    def end(self, tenant_id: str, usage: TimeUsage | None) -> None:
        """Count what a tenant has consumed since its last count, and stop metering it."""
        if tenant_id in self._tenants:
            self.settle(tenant_id, usage)
            del self._tenants[tenant_id]

    def totals(self) -> dict[str, TenantTotals]:
        """Return the totals of each tenant at its last count."""
        second = 1_000_000_000
        return {
            tenant_id: TenantTotals(
                since=_timestamp(one.since_ms),
                held_seconds=min(one.total_held_ns // second, MAX_COUNTER),
                borrowed_seconds=min(one.total_borrowed_ns // second, MAX_COUNTER),
                reserved_seconds=min(one.total_reserved_ns // second, MAX_COUNTER),
                memory_mebibyte_seconds=min(one.total_memory_mib_ns // second, MAX_COUNTER),
            )
            for tenant_id, one in self._tenants.items()
        }

    # ---- GPUs

    def enter_gpu(self, uuid: str, time: GpuTime | None, account_of: Callable[[str], TimeUsage | None]) -> None:
        """Count a GPU and all of its tenants up to now, so that both are stored as of one moment. The caller must do
        this before the scheduler opens or closes its account of the GPU.

        Args:
            time: Uses of the GPU's time by the scheduler's account; None if no tenant shares the GPU.
            account_of: Returns the token time that a tenant has used; None if it has no time account now.
        """
        for tenant_id in [tenant_id for tenant_id, one in self._tenants.items() if uuid in one.gpus]:
            self.settle(tenant_id, account_of(tenant_id))
        now = self._now().monotonic_ns
        gpu = self._gpus.get(uuid)
        if gpu is None:
            gpu = self._gpus[uuid] = _MeteredGpu(dict.fromkeys((*_USES, "unmetered"), 0), now)
        left = max(0, now - gpu.at_ns)
        present = _by_use(time) if time is not None else {}
        for use, spent in present.items():
            part = min(left, max(0, spent - gpu.seen.get(use, 0)))
            gpu.books[use] += part
            left -= part
        gpu.at_ns = now
        if present and gpu.seen:
            gpu.at_ns -= left  # time since the scheduler's account was read is counted by the next call
        else:
            gpu.books[self._use_beside(uuid, gpu)] += left
        gpu.seen, gpu.away = present, False

    def _use_beside(self, uuid: str, gpu: _MeteredGpu) -> str:
        """Return the use of a GPU's time for which the scheduler had no account of the GPU: `held` if an Exclusive
        tenant has it, `unmetered` if tenants share it and no agent counted, else `idle`."""
        having = [one.exclusive for one in self._tenants.values() if uuid in one.gpus]
        if any(having):
            return "held"
        return "unmetered" if having and gpu.away else "idle"

    def gpu_books(self, uuid: str) -> Mapping[str, int] | None:
        """Return the account of a GPU in nanoseconds by use; None if the GPU was never seen."""
        gpu = self._gpus.get(uuid)
        return gpu.books if gpu is not None else None

    # ---- report

    def close_unused(self) -> None:
        """Close the series of namespaces that have had no tenant here for `CLOSE_AFTER_MS`."""
        now = self._now()
        used = {(one.namespace, model) for one in self._tenants.values() for model in one.gpus.values()}
        for key, series in list(self._series.items()):
            if (
                key not in used
                and now.wall_ms - series.used_ms >= CLOSE_AFTER_MS
                and len(self._closed) < CLOSED_AT_MOST
            ):
                self._closed.append(series.model_copy(update={"closed": True}))
                del self._series[key]

    def forget(self, taken_in: Collection[str]) -> None:
        """Drop closed series. `taken_in`: names of series that the operator has added to its own totals."""
        self._closed = [series for series in self._closed if series.name not in taken_in]

    def consumption(self) -> list[dict[str, object]]:
        """Return the series in the form of the GPUNode's status (`Consumption`), closed series first. At most
        `MAX_CONSUMPTION` are returned; others follow when there is room."""
        return [
            {
                "series": one.name,
                "namespace": one.namespace,
                "model": one.model,
                "since": _timestamp(one.since_ms),
                "heldMilliseconds": min(one.held_ns // 1_000_000, MAX_COUNTER),
                "borrowedMilliseconds": min(one.borrowed_ns // 1_000_000, MAX_COUNTER),
                "reservedMilliseconds": min(one.reserved_ns // 1_000_000, MAX_COUNTER),
                "memoryMebibyteSeconds": min(one.memory_mib_ns // 1_000_000_000, MAX_COUNTER),
                "closed": one.closed,
            }
            for one in (*self._closed, *self._series.values())[:MAX_CONSUMPTION]
        ]

    @property
    def metered_at(self) -> str | None:
        """Time of the last count. None before the first count."""
        return _timestamp(self._metered_at_ms) if self._metered_at_ms else None

    # ---- inside

    def _open(self, namespace: str, model: str, now: Moment) -> KeptSeries:
        found = self._series.get((namespace, model))
        if found is None:
            since = self._last_since_ms = max(now.wall_ms, self._last_since_ms + 1)
            found = KeptSeries(name=self._fresh_name(since), namespace=namespace, model=model, since_ms=since)
        return found

    def _found_in_accounts(self, gpus: Collection[str], held_ns: int) -> None:
        """Move up to `held_ns` of each GPU's time from unmetered to held, because the tenant's account shows that it
        held the GPUs."""
        for uuid in gpus:
            gpu = self._gpus.get(uuid)
            if gpu is not None:
                found = min(held_ns, gpu.books["unmetered"])
                gpu.books["unmetered"] -= found
                gpu.books["held"] += found


def _by_use(time: GpuTime) -> dict[str, int]:
    return {
        "held": time.held_ns,
        "gap": time.gap_ns,
        "anticipated": time.anticipated_ns,
        "handed_over": time.handed_over_ns,
        "idle": time.idle_ns,
        "stalled": time.stalled_ns,
    }


def _timestamp(ms: int) -> str:
    moment = datetime.fromtimestamp(ms // 1000, UTC)
    return f"{moment:%Y-%m-%dT%H:%M:%S}.{ms % 1000:03}Z"
