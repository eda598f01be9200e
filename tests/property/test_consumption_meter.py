"""The meter of a node's GPU time: no time is lost, whatever tenants begin and end and whenever the agent is killed."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sharepod.agent.shares.consumption_meter import CLOSE_AFTER_MS, ConsumptionMeter, Moment
from sharepod.agent.state.consumption_file import KeptConsumption
from sharepod.api.consumption import Consumption
from sharepod.api.gpunode import Mode, Tenant
from sharepod.timeshare import GpuTime, TimeUsage

GPU = "GPU-0"
NS = 1_000_000_000
NO_TIME = TimeUsage(0, 0, 0, 0, 0, 0, 0, 0, 0, 0)


def row(tenant_id: str, request: int = 400, **changes: object) -> Tenant:
    values = {"id": tenant_id, "namespace": f"team-{tenant_id}", "gpus": (GPU,), "memory": 2 << 30}
    return Tenant.model_validate({**values, "request_milli": request, "limit_milli": 1000, **changes})


@dataclass
class PlayedTenant:
    """Tenant with the account in its handover file, and its true reservation."""

    row: Tenant
    usage: TimeUsage = NO_TIME
    reserved_ns: int = 0
    counted_before_ns: int = 0
    """Nanoseconds for which the tenant held, and which an agent has counted, but the account in the handover file
    lacks: the file was written a little earlier."""

    @property
    def held_ns(self) -> int:
        """Return the nanoseconds held that an agent has counted or the account contains."""
        return self.usage.held_ns + self.counted_before_ns


class PlayedAgents:
    """Successive agents of a node with one GPU, by a clock that the test advances."""

    def __init__(self) -> None:
        self.now = Moment(5 * NS, 1_767_225_600_000)
        self.begun = self.now.monotonic_ns
        self.tenants: dict[str, PlayedTenant] = {}
        self.ended: list[PlayedTenant] = []
        self.books: dict[str, int] | None = None
        self.file: KeptConsumption | None = None
        self.unserved: set[str] = set()
        """Tenants that the present agent does not serve yet."""
        self.names = 0
        self.meter: ConsumptionMeter | None = None
        self.start()

    def name(self, _since_ms: int) -> str:
        self.names += 1
        return f"s-{self.names}"

    def start(self, boot: str = "one") -> None:
        """Start an agent on the files of the last agent, with the present tenants."""
        self.meter = ConsumptionMeter(lambda: self.now, self.name, boot)
        if self.file is not None:
            self.meter.restore(self.file)
        self.unserved = set(self.tenants)
        for tenant in self.tenants.values():
            self.update(tenant)
        for ended in set(self.meter.tenants) - set(self.tenants):
            self.meter.end(ended, None)
        self.count()

    def time(self) -> GpuTime | None:
        if self.books is None:
            return None
        return GpuTime(**{f"{use}_ns": spent for use, spent in self.books.items()})

    def account_of(self, tenant_id: str) -> TimeUsage | None:
        """Return a tenant's account, if an agent serves the tenant now. None otherwise."""
        known = self.books is not None and tenant_id in self.tenants and tenant_id not in self.unserved
        return self.tenants[tenant_id].usage if known else None

    def update(self, tenant: PlayedTenant) -> None:
        """Apply a row, as the registry does."""
        assert self.meter is not None
        self.meter.enter_gpu(GPU, self.time(), self.account_of)
        self.meter.update(tenant.row, {GPU: "T"}, self.account_of(tenant.row.id))
        self.unserved.discard(tenant.row.id)
        self.meter.take_up(tenant.row.id, tenant.usage)
        if self.books is None:
            self.books = dict.fromkeys(("held", "anticipated", "handed_over", "idle", "stalled"), 0)

    def remove(self, tenant_id: str) -> None:
        assert self.meter is not None
        self.meter.enter_gpu(GPU, self.time(), self.account_of)
        tenant = self.tenants.pop(tenant_id)
        self.ended.append(tenant)
        self.meter.end(tenant_id, tenant.usage)
        if not self.tenants:
            self.books = None

    def go_on(self, ns: int, use: str = "idle", holder: str = "") -> None:
        """Let time pass with this use of the GPU. Without an agent, no account records it."""
        self.now = Moment(self.now.monotonic_ns + ns, self.now.wall_ms + ns // 1_000_000)
        for tenant in self.tenants.values():
            tenant.reserved_ns += ns * tenant.row.request_milli // 1000
        if self.meter is None or self.books is None:
            return
        self.books["held" if holder else use] += ns
        if holder:
            tenant = self.tenants[holder]
            tenant.usage = replace(tenant.usage, held_ns=tenant.usage.held_ns + ns)

    def count(self) -> None:
        assert self.meter is not None
        for tenant in self.tenants.values():
            self.meter.settle(tenant.row.id, tenant.usage)
        self.meter.enter_gpu(GPU, self.time(), self.account_of)
        self.file = self.meter.kept()

    def kill(self, stale_ns: int = 0) -> None:
        """Kill the agent. The accounts in the handover files are `stale_ns` old."""
        for tenant_id, tenant in self.tenants.items():
            known = max(0, tenant.usage.held_ns - stale_ns)
            kept = self.file.tenants.get(tenant_id) if self.file is not None else None
            tenant.counted_before_ns += max(0, (kept.held_ns if kept is not None else 0) - known)
            tenant.usage = replace(tenant.usage, held_ns=known)
        self.meter = self.books = None

    def series(self) -> list[Consumption]:
        assert self.meter is not None
        return [Consumption.model_validate(one) for one in self.meter.consumption()]


@pytest.mark.promise("node-consumption-whole")
@settings(max_examples=150)
@given(st.data())
def test_the_uses_of_a_gpu_are_its_time_and_the_series_are_the_accounts_whenever_the_agent_is_killed(
    data: st.DataObject,
) -> None:
    node = PlayedAgents()
    ways = st.sampled_from(["time", "time", "held", "held", "count", "kill", "add", "remove", "resize"])
    unmetered_at_most = 0
    for number in range(data.draw(st.integers(1, 25))):
        way = data.draw(ways)
        ns = data.draw(st.integers(1, 3 * NS))
        if way == "time":
            node.go_on(ns, data.draw(st.sampled_from(["idle", "anticipated", "handed_over", "stalled"])))
        elif way == "held" and node.tenants:
            node.go_on(ns, holder=data.draw(st.sampled_from(sorted(node.tenants))))
        elif way == "count":
            node.count()
        elif way == "kill":
            last = node.file.gpus[GPU].at_ns if node.file is not None else node.now.monotonic_ns
            node.kill(data.draw(st.sampled_from([0, NS // 5])))
            node.go_on(ns)
            unmetered_at_most += node.now.monotonic_ns - last
            node.start()
        elif way == "add" and len(node.tenants) < 4:
            tenant = node.tenants[f"t{number}"] = PlayedTenant(row(f"t{number}", data.draw(st.integers(0, 1000))))
            node.update(tenant)
            node.count()
        elif way == "remove" and node.tenants:
            node.remove(data.draw(st.sampled_from(sorted(node.tenants))))
            node.count()
        elif way == "resize" and node.tenants:
            tenant = node.tenants[data.draw(st.sampled_from(sorted(node.tenants)))]
            tenant.row = tenant.row.model_copy(update={"request_milli": data.draw(st.integers(0, 1000))})
            node.update(tenant)
            node.file = node.meter.kept() if node.meter is not None else None
    node.count()
    assert node.meter is not None
    books = node.meter.gpu_books(GPU)
    assert books is not None
    assert sum(books.values()) == node.now.monotonic_ns - node.begun
    played = [*node.tenants.values(), *node.ended]
    assert books["held"] == sum(tenant.held_ns for tenant in played)
    assert books["unmetered"] <= unmetered_at_most
    assert {name: total.held_seconds for name, total in node.meter.totals().items()} == {
        name: tenant.held_ns // NS for name, tenant in node.tenants.items()
    }
    by_namespace = {one.namespace: one for one in node.series()}
    for tenant in played:
        per_namespace = by_namespace[tenant.row.namespace]
        assert per_namespace.held_milliseconds == tenant.held_ns // 1_000_000
        assert abs(per_namespace.reserved_milliseconds - tenant.reserved_ns // 1_000_000) <= 1


@pytest.mark.promise("node-consumption-kept")
def test_over_a_reboot_a_row_is_timed_by_the_wall_clock_and_keeps_its_held_time() -> None:
    node = PlayedAgents()
    tenant = node.tenants["a"] = PlayedTenant(row("a", 500))
    node.update(tenant)
    node.go_on(4 * NS, holder="a")
    node.count()
    node.kill()
    node.now = Moment(2 * NS, node.now.wall_ms + 60_000)
    tenant.usage = NO_TIME
    node.start(boot="two")
    node.go_on(1 * NS, holder="a")
    node.count()
    (entry,) = node.series()
    assert (entry.held_milliseconds, entry.reserved_milliseconds) == (5_000, 32_500)
    assert entry.memory_mebibyte_seconds == 2048 * 65
    assert node.meter is not None
    books = node.meter.gpu_books(GPU)
    assert books is not None
    assert (books["held"], books["unmetered"]) == (5 * NS, 60 * NS)


@pytest.mark.promise("node-consumption-kept")
def test_a_lost_state_directory_begins_a_new_series_without_earlier_counts() -> None:
    node = PlayedAgents()
    tenant = node.tenants["a"] = PlayedTenant(row("a"))
    node.update(tenant)
    node.go_on(4 * NS, holder="a")
    node.count()
    (before,) = node.series()
    node.kill()
    node.file = None
    node.go_on(1 * NS)
    node.start()
    node.go_on(1 * NS, holder="a")
    node.count()
    (after,) = node.series()
    assert after.series != before.series
    assert after.since > before.since
    assert after.held_milliseconds == 1_000


@pytest.mark.promise("node-consumption-told")
def test_a_series_without_tenants_is_closed_and_dropped_only_once_it_is_accounted() -> None:
    node = PlayedAgents()
    tenant = node.tenants["a"] = PlayedTenant(row("a"))
    node.update(tenant)
    node.go_on(1 * NS, holder="a")
    node.remove("a")
    assert node.meter is not None
    node.go_on((CLOSE_AFTER_MS - 1) * 1_000_000)
    node.meter.close_unused()
    (first,) = node.series()
    assert not first.closed
    node.meter.forget([first.series])
    node.go_on(1_000_000)
    node.meter.close_unused()
    (closed,) = node.series()
    assert closed == first.model_copy(update={"closed": True})
    node.tenants["a"] = PlayedTenant(row("a"))
    node.update(node.tenants["a"])
    node.count()
    assert [one.closed for one in node.series()] == [True, False]
    assert node.series()[1].since > closed.since
    node.kill()
    node.start()
    node.meter.forget([closed.series])
    (left,) = node.series()
    assert left.series != closed.series


def test_an_exclusive_tenant_holds_its_gpus_all_the_time_also_without_an_agent() -> None:
    node = PlayedAgents()
    assert node.meter is not None
    whole = row("w", 1000, mode=Mode.EXCLUSIVE.value)
    node.meter.update(whole, {GPU: "T"}, None)
    node.go_on(3 * NS)
    node.meter.settle("w", None)
    node.meter.enter_gpu(GPU, None, lambda _: None)
    node.file = node.meter.kept()
    node.kill()
    node.go_on(2 * NS)
    meter = ConsumptionMeter(lambda: node.now, node.name, "one")
    meter.restore(node.file)
    meter.enter_gpu(GPU, None, lambda _: None)
    meter.update(whole, {GPU: "T"}, None)
    reading = Consumption.model_validate(meter.consumption()[0])
    assert (reading.held_milliseconds, reading.reserved_milliseconds) == (5_000, 5_000)
    books = meter.gpu_books(GPU)
    assert books is not None
    assert books["held"] == 5 * NS


@pytest.mark.promise("node-consumption-kept")
def test_an_account_that_is_a_little_older_than_the_count_is_not_counted_again() -> None:
    node = PlayedAgents()
    tenant = node.tenants["a"] = PlayedTenant(row("a"))
    node.update(tenant)
    node.go_on(4 * NS, holder="a")
    node.count()
    node.kill(NS // 5)
    node.go_on(1 * NS)
    node.start()
    node.go_on(1 * NS, holder="a")
    node.count()
    (entry,) = node.series()
    assert entry.held_milliseconds == 5_000
