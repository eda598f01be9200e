"""Reconciliations after a new report of an agent: unchanged usage causes none, whatever else has changed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from sharepod.controller.state.cluster_state import ClusterState
from unit.controller.objects import TENANT, sharepod_object
from unit.controller.state.test_cluster_state import gpunode_object, new_state, node_object

GIB = 1 << 30
SEEN = {"id": TENANT, "connected": True, "heldMilli": 400, "memory": GIB, "enforced": True, "processes": 1}


def reporting(*, written: bool = True) -> tuple[list[str], Callable[..., None]]:
    """Return (list of changed tenants, function that takes the next report). `written`: True if usage 400 is already
    stored."""
    changed: list[str] = []
    state: ClusterState = new_state()
    state.put_node(node_object())
    usage = {"usage": {"heldMilli": 400, "memory": GIB, "shown": "0.4"}} if written else {}
    state.put_sharepod(sharepod_object(status={"phase": "Running", **usage}))
    version = 0

    def report(**fields: Any) -> None:
        nonlocal version
        version += 1
        raw = gpunode_object(TENANT, version=version)
        raw["metadata"]["generation"] = 1
        raw["status"]["tenants"] = [SEEN | fields]
        changed.clear()
        state.put_gpunode(raw)

    report()
    state.on_tenant_changed = changed.append
    return changed, report


def test_a_drift_concerns_its_tenant_once_it_is_five_points_from_what_was_written() -> None:
    changed, report = reporting()
    for held in (410, 430, 449, 380, 351):
        report(heldMilli=held, processes=2)
        assert changed == [], held
    for held in (350, 470, 460):
        report(heldMilli=held)
        assert changed == [TENANT], held


def test_the_first_usage_concerns_its_tenant() -> None:
    changed, report = reporting(written=False)
    report(heldMilli=401)
    assert changed == [TENANT]


@pytest.mark.parametrize(
    "news",
    [
        {"memory": GIB - 1},
        {"connected": False},
        {"enforced": False},
        {"drained": True},
        {"findings": [{"reason": "HookMissing", "message": "m", "since": "2026-01-01T00:00:00Z"}]},
        {"id": "another"},
    ],
)
def test_whatever_else_is_news_concerns_its_tenant_at_once(news: dict[str, Any]) -> None:
    changed, report = reporting()
    report(heldMilli=401, **news)
    assert TENANT in changed


@pytest.mark.promise("operator-gpu-gone")
def test_an_agent_that_serves_again_without_a_gpu_concerns_the_tenants_of_it() -> None:
    changed: list[str] = []
    state = new_state()
    state.put_node(node_object())
    state.put_sharepod(sharepod_object(status={"phase": "Running"}))
    state.on_tenant_changed = changed.append
    for version, (ready, gpus) in enumerate((("False", True), ("False", False), ("True", False)), 1):
        raw = gpunode_object(TENANT, version=version)
        raw["metadata"]["generation"] = 1
        raw["status"]["conditions"] = [{"type": "AgentReady", "status": ready, "reason": "R", "message": "m"}]
        raw["status"]["gpus"] = raw["status"]["gpus"] if gpus else []
        changed.clear()
        state.put_gpunode(raw)
    assert changed == [TENANT]
