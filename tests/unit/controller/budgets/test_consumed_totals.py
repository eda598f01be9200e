"""Totals of GPU time: their sources, and the totals of deleted nodes and namespaces."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

from sharepod.api.consumption import Consumption
from sharepod.api.gpunode import GPUNodeStatus
from sharepod.budgets.budget import ConsumedTotal
from sharepod.controller.budgets.consumed_totals import consumed_totals
from sharepod.controller.state.facts.node_facts import GpuNodeFacts


def node(name: str, **held_ms: int) -> GpuNodeFacts:
    """Return a node that reports this much of namespaces."""
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
    totals = consumed_totals([node("x", a=3, b=2), node("y", a=4)], written)
    assert totals == {("a", "T"): ConsumedTotal(9, 0), ("b", "T"): ConsumedTotal(2, 4)}


def test_deleted_nodes_and_namespaces_leave_nothing_in_memory() -> None:
    assert consumed_totals([node("x", a=3), node("y", b=2)], {}).keys() == {("a", "T"), ("b", "T")}
    assert consumed_totals([node("y", b=2)], {}).keys() == {("b", "T")}
