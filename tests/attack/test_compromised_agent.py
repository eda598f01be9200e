"""A compromised agent: false reports in the only object that it may write, the status of its own GPUNode."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

import pytest
from sharepod.api.bounds import clipped
from sharepod.api.consumption import Consumption
from sharepod.api.gpunode import GPUNodeStatus
from sharepod.budgets.amounts import Amounts
from sharepod.budgets.budget import ConsumedTotal
from sharepod.budgets.namespace_account import NamespaceAccount, NodeReading, take_in
from sharepod.controller.budgets.consumed_totals import consumed_totals
from sharepod.controller.state.facts.node_facts import GpuNodeFacts

SINCE, AT, LATER = "2026-01-01T00:00:00.000Z", "2026-01-01T01:00:00.000Z", "2026-01-01T02:00:00.000Z"
HOUR_MS = 3_600_000
FOREVER_MS = 1 << 50


def series(held_ms: int, *, closed: bool = False) -> Consumption:
    """Return a consumption series of a namespace on node-a, as its agent reports it."""
    return Consumption(
        series="of-node-a", namespace="team", model="H100", since=SINCE, held_milliseconds=held_ms, closed=closed
    )


@pytest.mark.promise("security-own-series")
@pytest.mark.parametrize("closed", [False, True])
def test_a_report_by_another_node_on_a_series_neither_counts_nor_freezes(closed: bool) -> None:
    account = take_in(NamespaceAccount(), [NodeReading("node-a", AT, (series(HOUR_MS),))])
    account = take_in(account, [NodeReading("node-b", AT, (series(FOREVER_MS, closed=closed),))])
    assert account.totals == {"H100": Amounts(held_ms=HOUR_MS)}
    account = take_in(account, [NodeReading("node-a", LATER, (series(2 * HOUR_MS),))])
    assert account.totals == {"H100": Amounts(held_ms=2 * HOUR_MS)}, "later counts of node-a"


@pytest.mark.promise("security-own-series")
def test_a_budget_is_still_charged_for_the_counts_of_its_own_nodes() -> None:

    def reported(**held_ms: int) -> ConsumedTotal:
        nodes = [
            SimpleNamespace(name=name, status=GPUNodeStatus(consumption=(series(held),), consumption_at=AT))
            for name, held in held_ms.items()
        ]
        return consumed_totals(cast(list[GpuNodeFacts], nodes), {}, {})["team", "H100"]

    before = reported(node_a=HOUR_MS, node_b=5 * HOUR_MS)
    assert reported(node_a=2 * HOUR_MS, node_b=5 * HOUR_MS).held_ms - before.held_ms == HOUR_MS


HARMFUL = "\x1b]0;x\x07\r\nroot# \x9b2J\u202e\u2028"


def texts_in(value: object) -> list[str]:
    if isinstance(value, dict):
        return [text for each in value.values() for text in texts_in(each)]
    if isinstance(value, list | tuple):
        return [text for each in value for text in texts_in(each)]
    return [value] if isinstance(value, str) else []


@pytest.mark.promise("security-clean-texts")
def test_no_text_of_an_agent_reaches_users_with_control_characters() -> None:
    harmful = {
        "gpus": [
            {"uuid": HARMFUL, "index": 0, "model": HARMFUL, "memory": 1, "reason": HARMFUL, "health": HARMFUL},
            {"uuid": "b", "index": 1, "model": "T", "memory": 1, "links": [{"uuid": "a", "kind": HARMFUL}]},
        ],
        "tenants": [{"id": "t", "findings": [{"reason": "HookReplaced", "message": HARMFUL}]}],
        "conditions": [{"type": "AgentReady", "status": "True", "reason": "Ready", "message": HARMFUL}],
        "agentVersion": HARMFUL,
    }
    status = GPUNodeStatus.model_validate(harmful)
    found = texts_in(status.model_dump(mode="json"))
    assert len(found) > 10
    assert all(text.isprintable() for text in found), found


@pytest.mark.promise("security-clean-texts")
def test_no_message_of_the_operator_has_control_characters() -> None:
    assert clipped(f"the kubelet answers {HARMFUL}").isprintable()
    assert clipped("Größe 1 → 2: 模型") == "Größe 1 → 2: 模型"
