"""What an agent tells Prometheus. `FAMILIES` is the whole of it; `docs/reference.md` has the same table.

A tenant's series have the same names whether it shares (`mode="Shared"`: measured by its token and its allocations),
has GPUs of its own (`Exclusive`), or is a pod with a GPU from NVIDIA's device plugin (`Native`, without a tenant's id):
the latter two are measured by NVML, and have no series for what only sharing has. Series end with the tenant; there are
as many as there are tenants times their GPUs.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from sharepod.agent.agent import Agent, AgentFacts
from sharepod.agent.sockets.refusals import ClientRefusal
from sharepod.agent.tenants.view import ShareView, TenantView
from sharepod.api.gpunode import Health, Mode, Tenant, TenantState

_TENANT = ("tenant", "namespace", "pod", "mode")
_EACH = (*_TENANT, "gpu")
_GPU = ("gpu", "index")


@dataclass(frozen=True)
class Family:
    """`kind`: `counter` (its samples end in `_total`), `gauge` or `histogram`."""

    kind: str
    labels: tuple[str, ...]
    help: str


FAMILIES = {
    "sharepod_tenant_request_ratio": Family("gauge", _EACH, "Guaranteed part of the GPU's time"),
    "sharepod_tenant_limit_ratio": Family("gauge", _EACH, "Most that it may use of the GPU's time"),
    "sharepod_tenant_usage_ratio": Family("gauge", _EACH, "Part of the last 10 s that it held (or kept busy) the GPU"),
    "sharepod_tenant_held_seconds": Family("counter", _EACH, "Time that it held (or kept busy) the GPU"),
    "sharepod_tenant_waited_seconds": Family("counter", _EACH, "Time that it wanted the GPU and did not have it"),
    "sharepod_tenant_borrowed_seconds": Family("counter", _EACH, "Held beyond what it was guaranteed"),
    "sharepod_tenant_overuse_seconds": Family("counter", _EACH, "Held beyond the end of its turns"),
    "sharepod_tenant_overtaken": Family("counter", _EACH, "Times that the next was granted before it had drained"),
    "sharepod_tenant_grants": Family("counter", _EACH, "Times that it was given the GPU"),
    "sharepod_tenant_busy_ratio": Family(
        "gauge", _EACH, "Part of the last 10 s that NVML saw its kernels run; absent where NVML does not tell"
    ),
    "sharepod_tenant_memory_used_bytes": Family("gauge", _EACH, "Device memory in use: tracked or NVML's, the larger"),
    "sharepod_tenant_memory_limit_bytes": Family("gauge", _EACH, "Device memory that it may use"),
    "sharepod_tenant_memory_gap_bytes": Family("gauge", _EACH, "What NVML counts beyond what its allocations explain"),
    "sharepod_tenant_denied_allocations": Family("counter", _EACH, "Allocations refused: they would exceed the limit"),
    "sharepod_tenant_wait_seconds": Family("histogram", _TENANT, "How long it waited for each grant"),
    "sharepod_tenant_throttled": Family("counter", _TENANT, "Times that it had to wait for sending the agent too much"),
    "sharepod_tenant_processes": Family("gauge", _TENANT, "Its processes that use GPUs"),
    "sharepod_tenant_unhooked_processes": Family("gauge", _TENANT, "Of these, those that use a GPU without the hook"),
    "sharepod_tenant_enforced": Family(
        "gauge", _TENANT, "1: its share is enforced, 0: it is not; absent while unknown"
    ),
    "sharepod_gpu_memory_bytes": Family("gauge", (*_GPU, "model"), "Device memory that tenants can have"),
    "sharepod_gpu_free_memory_bytes": Family("gauge", _GPU, "Of it, what no tenant has reserved"),
    "sharepod_gpu_free_ratio": Family("gauge", _GPU, "Part of the GPU's time that no tenant has reserved"),
    "sharepod_gpu_tenants": Family("gauge", _GPU, "Tenants that have a share of it"),
    "sharepod_gpu_busy_ratio": Family(
        "gauge", _GPU, "Part of the last 10 s that any kernel ran; absent where not told"
    ),
    "sharepod_gpu_healthy": Family("gauge", _GPU, "1 if the GPU is healthy"),
    "sharepod_gpu_shareable": Family("gauge", _GPU, "1 if it can be shared"),
    "sharepod_gpu_foreign_processes": Family("gauge", _GPU, "Processes on it that are no tenant's"),
    "sharepod_gpu_xids": Family("counter", (*_GPU, "xid"), "Xids that the driver has reported"),
    "sharepod_agent_hand_off_seconds": Family(
        "histogram", (), "From reading that a token came back to having sent the next grant"
    ),
    "sharepod_agent_frames_refused": Family(
        "counter", ("why",), "Times that a client was closed for what it sent, or did not send"
    ),
    "sharepod_agent_inventory_simulated": Family("gauge", (), "1 if there is no GPU behind the inventory"),
    "sharepod_agent_build_info": Family("gauge", ("version",), "Always 1; the version is a label"),
}


class _Sheet:
    """One scrape: a family for each name, filled by name."""

    def __init__(self) -> None:
        self.families: dict[str, GaugeMetricFamily | CounterMetricFamily | HistogramMetricFamily] = {}
        for name, family in FAMILIES.items():
            kind = {
                "gauge": GaugeMetricFamily,
                "counter": CounterMetricFamily,
                "histogram": HistogramMetricFamily,
            }[family.kind]
            self.families[name] = kind(name, family.help, labels=family.labels)

    def add(self, name: str, labels: Sequence[str], value: float) -> None:
        """One sample of `sharepod_<name>`."""
        family = self.families[f"sharepod_{name}"]
        assert not isinstance(family, HistogramMetricFamily), f"{name} is a histogram"
        family.add_metric(labels, value)

    def add_histogram(
        self, name: str, labels: Sequence[str], buckets: Sequence[tuple[str, float]], total_s: float
    ) -> None:
        """All samples of one histogram."""
        family = self.families[f"sharepod_{name}"]
        assert isinstance(family, HistogramMetricFamily), f"{name} is a histogram"
        family.add_metric(labels, buckets, total_s)


class AgentCollector(Collector):
    """What one agent knows, as metrics with the prefix `sharepod_`."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent

    def describe(self) -> Iterable[Metric]:
        """Every family, without a sample."""
        return _Sheet().families.values()

    def collect(self) -> Iterable[Metric]:
        """One family after another."""
        sheet, facts, tenants = _Sheet(), self._agent.facts(), self._agent.tenants
        sheet.add("agent_inventory_simulated", (), int(facts.simulated))
        sheet.add("agent_build_info", (facts.agent_version,), 1)
        refusals = tenants.refusals
        for why in ClientRefusal:
            sheet.add("agent_frames_refused", (why.value,), refusals[why])
        hand_offs = tenants.hand_offs
        sheet.add_histogram("agent_hand_off_seconds", (), hand_offs.buckets(), hand_offs.sum_ns / 1e9)
        views = tuple(tenants.views())
        self._gpus(sheet, facts, [view.row for view in views])
        for view in views:
            row = view.row
            if row.state is not TenantState.RESERVED:
                continue
            labels = (row.id, row.namespace, row.pod_name, row.mode.value)
            sheet.add("tenant_processes", labels, view.processes)
            self._reserved(sheet, labels, row)
            self._measured(sheet, labels, view)
            share = view.share()
            if share is not None:
                if view.enforced is not None:
                    sheet.add("tenant_enforced", labels, int(view.enforced))
                self._shared(sheet, labels, row, share)
        self._native(sheet, facts)
        return sheet.families.values()

    def _gpus(self, sheet: _Sheet, facts: AgentFacts, rows: Sequence[Tenant]) -> None:
        reading = self._agent.reading
        for gpu in facts.gpus:
            labels = (gpu.uuid, str(gpu.index))
            on_it = [row for row in rows if gpu.uuid in row.gpus]
            sheet.add("gpu_memory_bytes", (*labels, gpu.model), gpu.memory)
            sheet.add("gpu_free_memory_bytes", labels, max(0, gpu.memory - sum(row.memory for row in on_it)))
            sheet.add("gpu_free_ratio", labels, max(0, 1000 - sum(row.request_milli for row in on_it)) / 1000)
            sheet.add("gpu_tenants", labels, len(on_it))
            sheet.add("gpu_healthy", labels, int(gpu.health is Health.HEALTHY))
            sheet.add("gpu_shareable", labels, int(gpu.shareable))
            sheet.add("gpu_foreign_processes", labels, len(self._agent.foreign.get(gpu.uuid, ())))
            busy = self._agent.tenants.gpu_busy_ratio(gpu.uuid)
            if busy is not None:
                sheet.add("gpu_busy_ratio", labels, busy)
            for xid, count in sorted(reading.xids.get(gpu.uuid, {}).items()):
                sheet.add("gpu_xids", (*labels, str(xid)), count)

    @staticmethod
    def _reserved(sheet: _Sheet, labels: tuple[str, ...], row: Tenant) -> None:
        """Add what the ledger reserves for a tenant."""
        for uuid in row.gpus:
            sheet.add("tenant_request_ratio", (*labels, uuid), row.request_milli / 1000)
            sheet.add("tenant_limit_ratio", (*labels, uuid), row.limit_milli / 1000)
            sheet.add("tenant_memory_limit_bytes", (*labels, uuid), row.memory)

    @staticmethod
    def _measured(sheet: _Sheet, labels: tuple[str, ...], view: TenantView) -> None:
        """Add what is measured of every tenant, by token and allocations or by NVML."""
        for uuid, used in view.memory_used.items():
            sheet.add("tenant_memory_used_bytes", (*labels, uuid), used)
        for uuid in view.row.gpus:
            ratio, busy = view.usage_ratio(uuid), view.busy_ratio(uuid)
            seconds = view.busy_seconds(uuid) if view.row.mode is Mode.EXCLUSIVE else None
            if ratio is not None:
                sheet.add("tenant_usage_ratio", (*labels, uuid), ratio)
            if busy is not None:
                sheet.add("tenant_busy_ratio", (*labels, uuid), busy)
            if seconds is not None:
                sheet.add("tenant_held_seconds", (*labels, uuid), seconds)

    @staticmethod
    def _shared(sheet: _Sheet, labels: tuple[str, ...], row: Tenant, share: ShareView) -> None:
        """Add what only sharing has."""
        usage = share.usage
        sheet.add_histogram("tenant_wait_seconds", labels, share.waits.buckets(), share.waits.sum_ns / 1e9)
        sheet.add("tenant_throttled", labels, share.throttled)
        sheet.add("tenant_unhooked_processes", labels, len(share.unhooked))
        for uuid in row.gpus:
            each = (*labels, uuid)
            sheet.add("tenant_held_seconds", each, usage.held_ns / 1e9)
            sheet.add("tenant_waited_seconds", each, share.waited_ns / 1e9)
            sheet.add("tenant_borrowed_seconds", each, usage.borrowed_ns / 1e9)
            sheet.add("tenant_overuse_seconds", each, usage.late_ns / 1e9)
            sheet.add("tenant_overtaken", each, usage.preemptions)
            sheet.add("tenant_grants", each, usage.grants)
            sheet.add("tenant_memory_gap_bytes", each, share.memory_gaps[uuid])
            sheet.add("tenant_denied_allocations", each, share.denied_allocations[uuid])

    def _native(self, sheet: _Sheet, facts: AgentFacts) -> None:
        processes = self._agent.reading.processes
        counted: dict[tuple[str, ...], int] = {}
        for gpu in facts.gpus:
            pod = self._agent.plugin_pods.get(gpu.uuid)
            if pod is None:
                continue
            labels: tuple[str, ...] = ("", pod.namespace, pod.name, "Native")
            each, key = (*labels, gpu.uuid), (f"{pod.namespace}/{pod.name}", gpu.uuid)
            on_it = [process for process in processes if process.uuid == gpu.uuid]
            counted[labels] = counted.get(labels, 0) + len(on_it)
            sheet.add("tenant_request_ratio", each, 1)
            sheet.add("tenant_limit_ratio", each, 1)
            sheet.add("tenant_memory_limit_bytes", each, gpu.memory)
            sheet.add("tenant_memory_used_bytes", each, sum(process.memory for process in on_it))
            busy, seconds = (
                self._agent.plugin_pod_utilization.ratio(key),
                self._agent.plugin_pod_utilization.seconds(key),
            )
            if busy is not None:
                sheet.add("tenant_usage_ratio", each, busy)
                sheet.add("tenant_busy_ratio", each, busy)
            if seconds is not None:
                sheet.add("tenant_held_seconds", each, seconds)
        for whose, count in counted.items():
            sheet.add("tenant_processes", whose, count)
