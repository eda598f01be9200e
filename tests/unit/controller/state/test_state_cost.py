"""Work that news cost: what was worked out once is not worked out again, and no news looks at every node."""

from __future__ import annotations

from typing import Any

import pytest
from sharepod.api import dialects
from sharepod.controller.state.agent_leases import AgentLeases
from sharepod.controller.state.cluster_state import ClusterState
from sharepod.controller.state.facts import sharepod_facts
from sharepod.kube import Json
from unit.controller.objects import PODS, TENANT, row, sharepod_object


@pytest.fixture
def state() -> ClusterState:
    return ClusterState(PODS, AgentLeases(20.0, lambda: 0.0))


@pytest.fixture
def readings(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The versions of SharePods of which was worked out what they ask."""
    read: list[str] = []
    effective = dialects.effective

    def counted(raw: Any) -> Any:
        read.append(raw["metadata"]["resourceVersion"])
        return effective(raw)

    monkeypatch.setattr(sharepod_facts, "effective", counted)
    return read


def put(state: ClusterState, version: int, **fields: Any) -> sharepod_facts.SharePodFacts:
    state.put_sharepod(sharepod_object(version=version, **fields))
    known = state.sharepods.get(TENANT)
    assert known is not None
    return known


def test_what_a_sharepod_asks_is_worked_out_again_only_when_it_has_changed(
    state: ClusterState, readings: list[str]
) -> None:
    first = put(state, 1)
    shown = put(state, 2, status={"phase": "Running"})
    assert readings == ["1"]
    assert (shown.gpu, shown.needs, shown.status.phase) == (first.gpu, first.needs, "Running")
    spec = {"gpu": {"request": 0.7}, "containers": [{"name": "main", "image": "i"}]}
    changed = put(state, 3, spec=spec)
    assert changed.gpu is not None
    assert changed.gpu.request_milli == 700
    annotated = put(state, 4, spec=spec, metadata={"annotations": {"cdi.k8s.io/x": "vendor.com/gpu=all"}})
    assert annotated.error is not None
    assert put(state, 5, spec=spec, metadata={"annotations": {"cdi.k8s.io/x": "vendor.com/gpu=all"}}).error is not None
    assert readings == ["1", "3", "4"]


def gpunode_object(name: str, version: int, requests: tuple[int, ...]) -> Json:
    rows = [row(tenant=f"{name}-{place}", gpus=(f"GPU-{name}",)) for place, _ in enumerate(requests)]
    tenants = [
        item.model_copy(update={"request_milli": milli}).dump() for item, milli in zip(rows, requests, strict=True)
    ]
    return {
        "metadata": {"name": name, "uid": f"uid-{name}", "resourceVersion": str(version), "generation": version},
        "spec": {"pool": "dedicated", "tenants": tenants},
        "status": {"gpus": [{"uuid": f"GPU-{name}", "index": 0, "model": "T", "memory": 1 << 40}]},
    }


def node_object(name: str) -> Json:
    status = {"allocatable": {"cpu": "8", "pods": "110"}, "conditions": [{"type": "Ready", "status": "True"}]}
    metadata = {
        "name": name,
        "uid": f"node-{name}",
        "resourceVersion": "1",
        "labels": {"sharepod.dev/pool": "dedicated"},
    }
    return {"metadata": metadata, "spec": {}, "status": status}


def test_a_ledger_looks_at_its_own_node_alone(state: ClusterState, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str | None] = []
    overcommits = state.cluster.overcommits

    def counted(node: str | None = None) -> Any:
        asked.append(node)
        return overcommits(node)

    monkeypatch.setattr(state.cluster, "overcommits", counted)
    for name in ("node-a", "node-b"):
        state.put_gpunode(gpunode_object(name, 1, ()))
        state.put_node(node_object(name))
        state.put_gpunode(gpunode_object(name, 2, (600, 600)))
    assert len(overcommits()) == 2
    state.put_gpunode(gpunode_object("node-a", 3, (600,)))
    state.drop_gpunode("uid-node-b")
    assert overcommits() == ()
    assert asked
    assert None not in asked
