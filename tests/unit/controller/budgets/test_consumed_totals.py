"""Totals of GPU time: their sources, and the totals of deleted nodes and namespaces."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

from sharepod.api.consumption import Consumption
from sharepod.api.gpunode import Gpu, GPUNodeStatus, TenantStatus
from sharepod.budgets.budget import ConsumedTotal
from sharepod.controller.budgets.consumed_totals import ReportAges, consumed_totals
from sharepod.controller.state.facts.node_facts import GpuNodeFacts


def node(name: str, **held_ms: int) -> GpuNodeFacts:
    """Return a node that reports this consumption of namespaces."""
    reported = tuple(
        Consumption(
            series=f"{name}-{namespace}",
            namespace=namespace,
            model="T",
            since="2026-01-01T00:00:00.000Z",
            held_milliseconds=held,
        )
        for namespace, held in held_ms.items()
    )
    return cast(GpuNodeFacts, SimpleNamespace(name=name, status=GPUNodeStatus(consumption=reported)))


def test_a_total_is_what_is_written_or_what_is_reported_where_that_is_more() -> None:
    written = {("a", "T"): ConsumedTotal(9, 0), ("b", "T"): ConsumedTotal(1, 4)}
    totals = consumed_totals([node("x", a=3, b=2), node("y", a=4)], written, {})
    assert totals == {("a", "T"): ConsumedTotal(9, 0), ("b", "T"): ConsumedTotal(2, 4)}


def reserving_node(name: str, at: str, milli: int) -> GpuNodeFacts:
    """Return a node with a tenant of namespace `a` that has had its row since 00:00:10."""
    status = GPUNodeStatus(consumption_at=at, gpus=(Gpu(uuid="GPU-1", index=0, model="T", memory=1),))
    row = SimpleNamespace(id="t", namespace="a", gpus=("GPU-1", "GPU-2"), request_milli=milli)
    seen = TenantStatus(id="t", counted_since="2026-01-01T00:00:10.000Z")
    rows, gpus = {"t": row}, {gpu.uuid: gpu for gpu in status.gpus}
    return cast(GpuNodeFacts, SimpleNamespace(name=name, status=status, rows=rows, gpus=gpus, seen=lambda _: seen))


def test_reserved_time_continues_between_reports_for_rows_that_the_report_contains() -> None:
    ages = ReportAges()
    later = "2026-01-01T00:01:00.000Z"
    assert ages.update([reserving_node("x", later, 400)], 1_000) == {"x": 0}
    assert ages.update([reserving_node("x", later, 400)], 31_000) == {"x": 30_000}
    assert ages.update([reserving_node("x", later, 400)], 10**9) == {"x": 90_000}, "no agent reports"
    assert ages.update([reserving_node("x", "2026-01-01T00:02:00.000Z", 400)], 10**9) == {"x": 0}
    assert consumed_totals([reserving_node("x", later, 400)], {}, {"x": 30_000}) == {
        ("a", "T"): ConsumedTotal(0, 12_000)
    }
    before = "2026-01-01T00:00:09.000Z"
    assert consumed_totals([reserving_node("x", before, 400)], {}, {"x": 30_000}) == {}, "not reserved for so long"


def test_deleted_nodes_and_namespaces_leave_nothing_in_memory() -> None:
    assert consumed_totals([node("x", a=3), node("y", b=2)], {}, {}).keys() == {("a", "T"), ("b", "T")}
    assert consumed_totals([node("y", b=2)], {}, {}).keys() == {("b", "T")}
