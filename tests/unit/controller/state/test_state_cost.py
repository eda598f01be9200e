"""Work per watch event: results are not computed twice, and no event reads every node."""

from __future__ import annotations

from typing import Any

import orjson
import pytest
from sharepod.api import dialects
from sharepod.controller.state.agent_leases import AgentLeases
from sharepod.controller.state.cluster_state import ClusterState
from sharepod.controller.state.facts import sharepod_facts
from sharepod.kube import Json
from unit.controller.objects import PODS, TENANT, pod_object, row, sharepod_object


@pytest.fixture
def state() -> ClusterState:
    return ClusterState(PODS, AgentLeases(20.0, lambda: 0.0))


@pytest.fixture
def readings(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Return the requests of SharePods that were computed so far."""
    requests: list[float] = []
    effective = dialects.effective

    def counted(raw: Any) -> Any:
        requests.append(raw["spec"]["gpu"]["request"])
        return effective(raw)

    monkeypatch.setattr(sharepod_facts, "effective", counted)
    return requests


def put(state: ClusterState, version: int, **fields: Any) -> sharepod_facts.SharePodFacts:
    state.put_sharepod(sharepod_object(version=version, **fields))
    known = state.sharepods.get(TENANT)
    assert known is not None
    return known


def test_what_a_sharepod_asks_is_worked_out_again_only_when_it_has_changed(
    state: ClusterState, readings: list[float]
) -> None:
    first = put(state, 1)
    shown = put(state, 2, status={"phase": "Running"})
    assert readings == [0.4]
    assert (shown.gpu, shown.needs, shown.status.phase) == (first.gpu, first.needs, "Running")
    spec = {"gpu": {"request": 0.7}, "containers": [{"name": "main", "image": "i"}]}
    changed = put(state, 3, spec=spec)
    assert changed.gpu is not None
    assert changed.gpu.request_milli == 700
    annotated = put(state, 4, spec=spec, metadata={"annotations": {"cdi.k8s.io/x": "vendor.com/gpu=all"}})
    assert annotated.error is not None
    assert put(state, 5, spec=spec, metadata={"annotations": {"cdi.k8s.io/x": "vendor.com/gpu=all"}}).error is not None
    assert readings == [0.4, 0.7, 0.7]


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


def test_a_ledger_reads_only_its_own_node(state: ClusterState, monkeypatch: pytest.MonkeyPatch) -> None:
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


def sharing(state: ClusterState, number: int) -> None:
    """Add a running SharePod to the state, as a watch shows it, with its Pod and its row."""
    tenant, name, node, gpu = f"{number:08x}-5f1e-4a77", f"p{number}", f"node-{number}", f"GPU-{number:08x}-9c04-4a77"
    kinds = ("Placed", "PodReady", "Ready", "Enforced")
    about = {"status": "True", "reason": "Reserved", "lastTransitionTime": f"2026-01-01T00:00:{number % 60:02d}Z"}
    conditions = [{"type": kind, **about, "message": f"GPU 0 of {node}", "observedGeneration": 1} for kind in kinds]
    gpus = [{"uuid": gpu, "index": 0, "model": "Test GPU"}]
    status = {"phase": "Running", "node": node, "gpus": gpus, "podName": name, "conditions": conditions}
    ledger = gpunode_object(node, number, ())
    tenants = [row(tenant=tenant, gpus=(gpu,), pod_name=name, pod_uid=f"pod-{number}").dump()]
    ledger |= {"spec": {"tenants": tenants}, "status": {"tenants": [{"id": tenant, "heldMilli": 400, "memory": 1}]}}
    pod = pod_object(uid=f"pod-{number}", owner=tenant, name=name, node=node, pin=node)
    state.put_gpunode(read(ledger))
    state.put_sharepod(read(sharepod_object(uid=tenant, name=name, status=status, metadata={"labels": {"app": name}})))
    state.put_pod(read(pod))


def read(raw: Json) -> Json:
    """Return an object as a server sends it: it shares no string object with another."""
    found: Json = orjson.loads(orjson.dumps(raw))
    return found


def test_ids_and_names_are_one_text_in_all_objects_that_have_them(state: ClusterState) -> None:
    sharing(state, 1)
    (known,), (its_pod,), (ledger,) = state.sharepods, state.pods, state.gpunodes
    (its_row,), (seen,) = ledger.spec.tenants, ledger.status.tenants
    assert known.uid is its_pod.tenant is its_row.id is seen.id
    assert known.name is its_pod.name is its_row.pod_name is known.status.pod_name
    assert known.namespace is its_pod.namespace is its_row.namespace
    assert ledger.name is its_pod.node is its_pod.pin is known.status.node
    assert its_pod.uid is its_row.pod_uid
    assert known.status.gpus[0].uuid is its_row.gpus[0]


def test_equal_shares_of_two_sharepods_are_one(state: ClusterState) -> None:
    sharing(state, 1)
    sharing(state, 2)
    one, other = state.sharepods
    assert one.gpu is other.gpu
