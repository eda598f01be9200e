"""Prometheus collector of the agent: fills the metric families for one scrape.

`families.FAMILIES` lists all families. A tenant's series have the same names in every mode:
- `mode="Shared"`: measured by the tenant's token and its allocations;
- `mode="Exclusive"`: a tenant with whole GPUs, measured by NVML;
- `mode="Native"`: a pod with a GPU from NVIDIA's device plugin, measured by NVML, with an empty `tenant` label.
The last two modes have no series about sharing. The label `pod` of a claim is `claim/NAME`.

Guarantee: a scrape uses the event loop in steps of one tenant each, and its text is rendered in another thread. So a
hand-off of a GPU waits at most for the samples of one tenant.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Sequence

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from sharepod.agent.agent import Agent, agent_version
from sharepod.agent.sockets.refusals import ClientRefusal
from sharepod.agent.tenants.view import ShareView, TenantView
from sharepod.api.gpunode import OFFENCES, Gpu, Health, Mode, Tenant, TenantState
from sharepod.timeshare import CoRunEnd

from .families import FAMILIES


class _Sheet:
    """Samples of one scrape, collected by family."""

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
        """Add one sample of `sharepod_<name>`."""
        family = self.families[f"sharepod_{name}"]
        assert not isinstance(family, HistogramMetricFamily), f"{name} is a histogram"
        family.add_metric(labels, value)

    def add_histogram(
        self, name: str, labels: Sequence[str], buckets: Sequence[tuple[str, float]], total_s: float
    ) -> None:
        """Add all samples of one histogram. `buckets`: cumulative counts, each with its upper bound as text."""
        family = self.families[f"sharepod_{name}"]
        assert isinstance(family, HistogramMetricFamily), f"{name} is a histogram"
        family.add_metric(labels, buckets, total_s)


class AgentCollector(Collector):
    """Collector of one agent's metrics."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent

    def describe(self) -> Iterable[Metric]:
        """Return every family, without samples."""
        return _Sheet().families.values()

    def collect(self) -> Iterable[Metric]:
        """Return every family with its current samples."""
        sheet = _Sheet()
        for _ in self._fill(sheet):
            pass
        return sheet.families.values()

    async def collect_in_steps(self) -> Iterable[Metric]:
        """Return every family with its samples; yield to the loop after each tenant."""
        sheet = _Sheet()
        for _ in self._fill(sheet):
            await asyncio.sleep(0)
        return sheet.families.values()

    def _fill(self, sheet: _Sheet) -> Iterator[None]:
        """Add all samples. Yields after each step, for other tasks; rows and GPUs may have changed then."""
        agent, tenants = self._agent, self._agent.tenants
        sheet.add("agent_inventory_simulated", (), int(agent.inventory.simulated))
        sheet.add("agent_build_info", (agent_version(),), 1)
        refusals = tenants.refusals
        for why in ClientRefusal:
            sheet.add("agent_frames_refused", (why.value,), refusals[why])
        for reason in OFFENCES:
            sheet.add("agent_processes_killed", (reason.value,), tenants.killed[reason])
        hand_offs = tenants.hand_offs
        sheet.add_histogram("agent_hand_off_seconds", (), hand_offs.buckets(), hand_offs.sum_ns / 1e9)
        rows, gpus = tenants.rows(), agent.gpus()
        self._gpus(sheet, gpus, rows)
        for known in rows:
            yield
            view = tenants.view(known.id)
            if view is None or view.row.state is not TenantState.RESERVED:
                continue
            row = view.row
            labels = (row.id, row.namespace, row.workload, row.mode.value)
            self._reserved(sheet, labels, row)
            self._measured(sheet, labels, view)
            share = view.share()
            if share is not None:
                if view.enforced is not None:
                    sheet.add("tenant_enforced", labels, int(view.enforced))
                self._shared(sheet, labels, row, share)
        self._native(sheet, gpus)

    def _gpus(self, sheet: _Sheet, gpus: Sequence[Gpu], rows: Sequence[Tenant]) -> None:
        reading = self._agent.reading
        for gpu in gpus:
            labels = (gpu.uuid, str(gpu.index))
            on_it = [row for row in rows if gpu.uuid in row.gpus]
            sheet.add("gpu_memory_bytes", (*labels, gpu.model), gpu.memory)
            sheet.add("gpu_free_memory_bytes", labels, max(0, gpu.memory - sum(row.memory for row in on_it)))
            sheet.add("gpu_free_ratio", labels, max(0, 1000 - sum(row.request_milli for row in on_it)) / 1000)
            sheet.add("gpu_tenants", labels, len(on_it))
            sheet.add("gpu_healthy", labels, int(gpu.health is Health.HEALTHY))
            sheet.add("gpu_shareable", labels, int(gpu.shareable and not gpu.taken))
            sheet.add("gpu_foreign_processes", labels, len(self._agent.foreign.get(gpu.uuid, ())))
            co_runs = self._agent.tenants.co_runs(gpu.uuid)
            sheet.add("gpu_co_runners", labels, co_runs.co_runners)
            for reason in CoRunEnd:
                sheet.add("gpu_co_runs_ended", (*labels, reason.value), co_runs.ends.get(reason, 0))
            for use, spent_ns in (self._agent.tenants.gpu_books(gpu.uuid) or {}).items():
                sheet.add("gpu_time_seconds", (*labels, use), spent_ns / 1e9)
            busy = self._agent.tenants.gpu_busy_ratio(gpu.uuid)
            if busy is not None:
                sheet.add("gpu_busy_ratio", labels, busy)
            for xid, count in sorted(reading.xids.get(gpu.uuid, {}).items()):
                sheet.add("gpu_xids", (*labels, str(xid)), count)

    @staticmethod
    def _reserved(sheet: _Sheet, labels: tuple[str, ...], row: Tenant) -> None:
        """Add what the ledger reserves for the tenant."""
        for uuid in row.gpus:
            sheet.add("tenant_request_ratio", (*labels, uuid), row.request_milli / 1000)
            sheet.add("tenant_limit_ratio", (*labels, uuid), row.limit_milli / 1000)
            sheet.add("tenant_memory_limit_bytes", (*labels, uuid), row.memory)

    @staticmethod
    def _measured(sheet: _Sheet, labels: tuple[str, ...], view: TenantView) -> None:
        """Add the tenant's measured usage: by token and allocations, or by NVML."""
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
        """Add the samples of a tenant that takes turns: waits, grants, co-running, refused allocations."""
        usage = share.usage
        sheet.add_histogram("tenant_wait_seconds", labels, share.waits.buckets(), share.waits.sum_ns / 1e9)
        sheet.add("tenant_throttled", labels, share.throttled)
        for uuid in row.gpus:
            each = (*labels, uuid)
            sheet.add("tenant_held_seconds", each, usage.held_ns / 1e9)
            sheet.add("tenant_waited_seconds", each, share.waited_ns / 1e9)
            sheet.add("tenant_co_run_seconds", each, usage.co_run_ns / 1e9)
            sheet.add("tenant_co_run_progress_seconds", each, usage.progress_ns / 1e9)
            if share.alone_in_flight is not None:
                sheet.add("tenant_in_flight_ratio", each, share.alone_in_flight)
            sheet.add("tenant_surcharged_seconds", each, usage.surcharged_ns / 1e9)
            sheet.add("tenant_overtaken", each, usage.preemptions)
            sheet.add("tenant_suspended", each, usage.suspensions)
            sheet.add("tenant_grants", each, usage.grants)
            sheet.add("tenant_denied_allocations", each, share.denied_allocations[uuid])

    def _native(self, sheet: _Sheet, gpus: Sequence[Gpu]) -> None:
        processes = self._agent.reading.processes
        for gpu in gpus:
            pod = self._agent.plugin_pods.get(gpu.uuid)
            if pod is None:
                continue
            labels: tuple[str, ...] = ("", pod.namespace, pod.name, "Native")
            each, key = (*labels, gpu.uuid), (f"{pod.namespace}/{pod.name}", gpu.uuid)
            on_it = [process for process in processes if process.uuid == gpu.uuid]
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
