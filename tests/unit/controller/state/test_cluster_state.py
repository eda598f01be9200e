"""The cluster state: it converges for every order of watch events and lists."""

from __future__ import annotations

import copy
import datetime
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sharepod.api.objects import CORDONED_ANNOTATION
from sharepod.api.sharepod import GpuRequest
from sharepod.api.units import Bytes, Milli, TenantId
from sharepod.controller.state.agent_leases import AgentLeases
from sharepod.controller.state.cluster_state import ClusterState
from sharepod.controller.state.facts.pod_facts import pod_facts
from sharepod.kube import Json
from sharepod.placement.engine import Engine
from sharepod.placement.state.types import PlacementRequest
from structlog.testing import capture_logs
from unit.controller.objects import PODS, TENANT, pod_object, row, sharepod_object

NOW = datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC)


def new_state(*, alive: bool = True) -> ClusterState:
    agents = AgentLeases(20.0, lambda: 0.0, lambda: NOW)
    if alive:
        spec = {"holderIdentity": "a", "renewTime": "2026-01-01T00:00:00Z", "leaseDurationSeconds": 20}
        agents.put({"metadata": {"name": "sharepod-agent-node-a", "uid": "lease"}, "spec": spec})
    return ClusterState(PODS, agents)


def node_object(**fields: Json) -> Json:
    return {
        "metadata": {
            "name": "node-a",
            "uid": "node",
            "resourceVersion": "1",
            "labels": fields.get("labels", {"sharepod.dev/pool": "dedicated"}),
        },
        "spec": fields.get("spec", {}),
        "status": {
            "allocatable": {"cpu": "8", "memory": "64Gi", "pods": "110"},
            "conditions": [{"type": "Ready", "status": "True"}],
            **fields.get("status", {}),
        },
    }


def gpunode_object(*rows: str, version: int = 1, **gpu: object) -> Json:
    return {
        "metadata": {"name": "node-a", "uid": "gpunode", "resourceVersion": str(version), "generation": version},
        "spec": {"pool": "dedicated", "tenants": [row(tenant=name).dump() for name in rows]},
        "status": {"gpus": [{"uuid": "GPU-0", "index": 0, "model": "T", "memory": 1 << 34, **gpu}]},
    }


@pytest.mark.parametrize("seed", range(50))
def test_late_and_repeated_news_change_nothing(seed: int) -> None:
    """Two SharePods have the same name, one after the other, and several versions each. Every event arrives late,
    twice, or by a list."""
    chance = random.Random(seed)
    history: list[tuple[str, Json]] = []
    version = 0
    for uid in ("first", "second"):
        for _ in range(3):
            version += 1
            history.append(("put", sharepod_object(uid=uid, version=version, metadata={"labels": {"v": str(version)}})))
        if uid == "first" or chance.random() < 0.5:
            version += 1
            history.append(("drop", sharepod_object(uid=uid, version=version)))
    state = new_state()
    for number, (what, item) in enumerate(history):
        if what == "drop":
            state.drop_sharepod(item["metadata"]["uid"])
        else:
            state.put_sharepod(copy.deepcopy(item))
        for _ in range(chance.randrange(3)):  # results of a list that began earlier
            earlier = history[chance.randrange(number + 1)]
            if earlier[0] == "put":
                state.put_sharepod(copy.deepcopy(earlier[1]))
    what, last = history[-1]
    found = state.sharepods.named("one", "n")
    if what == "drop":
        assert found is None
        assert len(state.sharepods) == 0
    else:
        assert found is not None
        assert (found.uid, found.version) == (last["metadata"]["uid"], version)
        assert len(state.sharepods) == 1


def test_only_affected_tenants_are_notified() -> None:
    state = new_state()
    changed: list[str] = []
    state.on_tenant_changed = changed.append
    state.put_node(node_object())
    state.put_gpunode(gpunode_object("a", "b"))
    assert sorted(changed) == ["a", "b"]
    changed.clear()
    state.put_gpunode(gpunode_object("a", "b", "c", version=2))
    assert changed == ["c"]
    changed.clear()
    state.put_gpunode(gpunode_object("a", "c", version=3))
    assert changed == ["b"]


def test_a_pod_counts_on_the_node_it_is_pinned_to_until_it_ends() -> None:
    state = new_state()
    state.put_node(node_object())
    raw = pod_object()
    raw["spec"]["containers"][0]["resources"] = {"requests": {"cpu": "3"}}
    state.put_pod(raw)
    account = state.cluster.node("node-a")
    assert account is not None
    assert account.taken().free.cpu_milli == 5000
    ended = copy.deepcopy(raw)
    ended["metadata"]["resourceVersion"] = "2"
    ended["status"]["phase"] = "Succeeded"
    state.put_pod(ended)
    assert account.taken().free.cpu_milli == 8000


def test_what_was_last_seen_of_a_pod_is_kept_once_it_is_gone() -> None:
    state = new_state()
    state.put_pod(pod_object())
    last = pod_object(version=5, phase="Failed", deleting=True)
    state.drop_pod("pod-1", last)
    assert state.pod_of(TENANT) is None
    assert state.lost_pods[TENANT].phase == "Failed"


def test_a_pod_that_only_lost_our_label_is_there_again_once_it_was_read() -> None:
    state = new_state()
    state.put_pod(pod_object())
    state.drop_pod("pod-1", version=4)
    state.put_pod(pod_object(version=4))
    assert state.pod_of(TENANT) is None
    state.put_pod(pod_object(version=4), sure=True)
    assert state.pod_of(TENANT) is not None


@pytest.mark.promise("operator-no-ghost")
def test_an_answer_that_is_older_than_the_end_of_its_pod_brings_no_ghost_back() -> None:
    state = new_state()
    state.put_pod(pod_object())
    state.drop_pod("pod-1", pod_object(version=5), version=5)
    state.put_pod(pod_object(version=4), sure=True)
    state.drop_pod("never-seen", version=7)
    state.put_pod(pod_object(uid="never-seen", version=6), sure=True)
    assert state.pod_of(TENANT) is None
    assert len(state.pods) == 0


@pytest.mark.parametrize(
    ("node", "gpunode", "alive", "expected"),
    [
        (node_object(), gpunode_object(), True, None),
        (node_object(), None, True, "GPUNode"),
        (node_object(), gpunode_object(), False, "agent"),
        (node_object(status={"conditions": []}), gpunode_object(), True, "not ready"),
        (node_object(labels={"sharepod.dev/pool": "device-plugin"}), gpunode_object(), True, "leaves pool dedicated"),
        (node_object(labels={"sharepod.dev/pool": "mine"}), gpunode_object(), True, "mine"),
        (node_object(status={"allocatable": {"cpu": "many"}}), gpunode_object(), True, "cpu"),
        (node_object(), gpunode_object(memory="much"), True, "cannot be read"),
    ],
)
def test_a_node_that_takes_no_tenants_reports_the_reason(
    node: Json, gpunode: Json | None, alive: bool, expected: str | None
) -> None:
    state = new_state(alive=alive)
    state.put_node(node)
    if gpunode is not None:
        state.put_gpunode(gpunode)
    account = state.cluster.node("node-a")
    assert account is not None
    assert account.state is not None
    if expected is None:
        assert account.state.unavailable is None
    else:
        assert expected in str(account.state.unavailable)


@pytest.mark.parametrize(
    ("gpu", "reason"),
    [
        ({"health": "Unhealthy", "reason": "Xid 79"}, "Xid 79"),
        ({"shareable": False, "reason": "MIG is on"}, "MIG is on"),
    ],
)
def test_a_gpu_that_takes_no_tenants_reports_the_reason(gpu: Json, reason: str) -> None:
    state = new_state()
    state.put_node(node_object())
    state.put_gpunode(gpunode_object(**gpu))
    account = state.cluster.node("node-a")
    assert account is not None
    assert not account.gpus[0].state.available
    assert reason in account.gpus[0].state.reason


def test_a_gpu_of_the_device_plugin_is_not_ours_until_a_holder_has_it() -> None:
    state = new_state()
    state.put_node(node_object(labels={"sharepod.dev/pool": "device-plugin"}))
    metadata = {
        "name": "holder",
        "uid": "h1",
        "namespace": "sharepod-system",
        "labels": {"sharepod.dev/holder": "true"},
        "resourceVersion": "1",
    }
    state.other_pods.put({"metadata": metadata, "spec": {"nodeName": "node-a"}})

    def held(version: int, ledger: str, *, seen: bool) -> bool:
        raw = gpunode_object(version=version, held=seen)
        row = {"id": "h1", "podName": "holder", "state": ledger, "uuid": raw["status"]["gpus"][0]["uuid"]}
        raw["spec"] |= {"pool": "device-plugin", "holders": [row]}
        raw["metadata"]["generation"] = version
        state.put_gpunode(raw)
        account = state.cluster.node("node-a")
        assert account is not None
        return account.gpus[0].state.held

    assert not held(2, "Pending", seen=True)
    assert not held(3, "Held", seen=False)
    assert held(4, "Held", seen=True)
    assert not held(5, "Releasing", seen=True)
    assert held(6, "Held", seen=True)
    state.other_pods.drop("h1")
    account = state.cluster.node("node-a")
    assert account is not None
    assert not account.gpus[0].state.held, "its Pod is deleted"


def test_a_ledger_outlives_its_node() -> None:
    state = new_state()
    state.put_node(node_object())
    state.put_gpunode(gpunode_object("a"))
    state.drop_node("node")
    assert [row.tenant for row in state.cluster.reservations("node-a")] == ["a"]
    again = node_object()
    again["metadata"] |= {"uid": "again", "resourceVersion": "9"}
    state.put_node(again)
    account = state.cluster.node("node-a")
    assert account is not None
    assert account.gpus[0].free_milli == 600


@pytest.mark.parametrize(
    "spoiled",
    [
        {"containers": "none"},
        {"gpu": {"request": "much"}},
        {"gpu": {"request": 0.4, "limit": "wide"}},
        {"gpu": []},
        {"nodeSelector": [1]},
        {"affinity": {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": 3}}},
        {"containers": [{"name": "x", "resources": {"requests": {"cpu": {}}}}]},
    ],
)
def test_a_sharepod_of_any_shape_becomes_facts_with_an_error_and_stops_nothing(spoiled: Json) -> None:
    state = new_state()
    state.put_sharepod(sharepod_object(spec=spoiled))
    found = state.sharepods.get(TENANT)
    assert found is not None
    assert found.gpu is None
    assert found.error is not None
    assert str(found.error)


def test_a_status_of_a_newer_version_keeps_what_decides_whether_work_runs_again() -> None:
    state = new_state()
    state.put_sharepod(sharepod_object(status={"phase": "Running", "podUID": "p", "novel": 1}))
    found = state.sharepods.get(TENANT)
    assert found is not None
    assert (found.status.phase, found.status.pod_uid) == ("Running", "p")


def test_a_node_whose_pool_label_is_put_back_is_there_again() -> None:
    state = new_state()
    state.put_node(node_object())
    state.drop_node("node", 5)
    late = node_object()
    late["metadata"]["resourceVersion"] = "4"
    state.put_node(late)
    assert state.nodes.named("node-a") is None
    again = node_object()
    again["metadata"]["resourceVersion"] = "6"
    state.put_node(again)
    assert state.nodes.named("node-a") is not None


@pytest.mark.promise("security-tenant-label")
def test_a_pod_of_another_controller_is_not_the_tenants_whatever_owner_it_names() -> None:
    state = new_state()
    forged = pod_object(uid="forged", owner="attacker", node="node-b")
    forged["metadata"]["ownerReferences"][0]["uid"] = TENANT
    state.put_pod(forged)
    assert state.pod_of(TENANT) is None
    assert state.pod_of("attacker") is None
    bare = pod_object(uid="bare")
    del bare["metadata"]["labels"]
    assert pod_facts(bare).tenant is None


def test_an_orphaned_pod_stays_its_tenants() -> None:
    state = new_state()
    state.put_pod(pod_object())
    orphan = pod_object(version=2)
    del orphan["metadata"]["ownerReferences"]
    state.put_pod(orphan)
    known = state.pod_of(TENANT)
    assert known is not None
    assert known.orphaned
    changed: list[str] = []
    state.on_tenant_changed = changed.append
    taken = pod_object(version=3)
    taken["metadata"]["ownerReferences"][0]["uid"] = "another"
    state.put_pod(taken)
    assert state.pod_of(TENANT) is None
    assert changed == [TENANT]


def test_fields_of_a_newer_version_take_nothing_from_a_ledger() -> None:
    state = new_state()
    state.put_node(node_object())
    newer = gpunode_object("a", novel=1)
    newer["spec"] |= {"budget": {"milli": 1}}
    newer["spec"]["tenants"][0]["novel"] = 1
    newer["status"] |= {"novel": 1, "tenants": [{"id": "a", "drained": True, "novel": 1}]}
    state.put_gpunode(newer)
    found = state.gpunodes.named("node-a")
    assert found is not None
    assert (set(found.rows), found.error) == ({"a"}, None)
    assert found.status.tenants[0].drained
    account = state.cluster.node("node-a")
    assert account is not None
    assert account.state is not None
    assert account.state.unavailable is None


def test_a_row_that_cannot_be_read_is_kept_as_it_was_and_its_tenant_waits() -> None:
    state = new_state()
    state.put_node(node_object())
    state.put_gpunode(gpunode_object("a", "b"))
    spoiled = gpunode_object("a", "b", version=2)
    spoiled["spec"]["tenants"][0]["state"] = "Borrowed"
    state.put_gpunode(spoiled)
    found = state.gpunodes.named("node-a")
    assert found is not None
    assert set(found.rows) == {"a", "b"}
    assert found.ledger_error is not None
    assert state.ledgers.unreadable_row("a")
    assert not state.ledgers.unreadable_row("b")
    assert [row.tenant for row in state.cluster.reservations("node-a")] == ["a", "b"]
    changed: list[str] = []
    state.on_tenant_changed = changed.append
    state.put_gpunode(gpunode_object("a", "b", version=3))
    assert not state.ledgers.unreadable_row("a")
    assert "a" in changed


def test_a_node_whose_agent_is_not_ready_takes_no_tenants_until_it_is() -> None:
    state = new_state()
    state.put_node(node_object())
    account = state.cluster.node("node-a")
    assert account is not None
    for version, status in ((1, "False"), (2, "True")):
        raw = gpunode_object(version=version)
        condition = {"type": "AgentReady", "status": status, "reason": "X", "message": "kubelet refused"}
        raw["status"]["conditions"] = [condition]
        state.put_gpunode(raw)
        assert account.state is not None
        expected = None if status == "True" else "has an agent that is not ready: kubelet refused"
        assert account.state.unavailable == expected


@pytest.mark.promise("placement-cordon")
@given(
    gpus=st.integers(1, 8),
    listed=st.sets(st.integers(0, 9)),
    by_uuid=st.booleans(),
    requests=st.lists(st.tuples(st.integers(1, 1000), st.integers(1, 3)), max_size=12),
)
def test_no_request_is_placed_on_a_cordoned_gpu(
    gpus: int, listed: set[int], by_uuid: bool, requests: list[tuple[int, int]]
) -> None:
    state = new_state()
    state.put_node(node_object())
    raw = gpunode_object()
    raw["metadata"]["annotations"] = {
        CORDONED_ANNOTATION: " , ".join(f"GPU-{index}" if by_uuid else str(index) for index in sorted(listed))
    }
    raw["status"]["gpus"] = [
        {"uuid": f"GPU-{index}", "index": index, "model": "T", "memory": 1 << 34} for index in range(gpus)
    ]
    state.put_gpunode(raw)
    engine = Engine(state.cluster)
    free = {f"GPU-{index}" for index in range(gpus)} - {f"GPU-{index}" for index in listed}
    used: set[str] = set()
    for number, (request_milli, count) in enumerate(requests):
        asked = GpuRequest(
            request_milli=Milli(request_milli), limit_milli=Milli(1000), memory=Bytes(1 << 20), count=count
        )
        request = PlacementRequest(tenant=TenantId(f"t{number}"), namespace="n", name=f"t{number}", gpu=asked)
        found = engine.find(request)
        if found is not None:
            used.update(found.gpus)
            engine.reserve(request, found)
    assert used <= free
    if free and requests and requests[0][1] <= len(free):
        assert used, "the first request has room"


@pytest.mark.promise("placement-cordon")
def test_a_gpu_that_is_uncordoned_is_room_again_and_says_why_it_was_not() -> None:
    state = new_state()
    rooms: list[bool] = []
    state.on_room_changed = lambda: rooms.append(True)
    state.put_node(node_object())
    account = state.cluster.node("node-a")
    assert account is not None
    for version, value, reason in (
        (1, "GPU-0", "an admin has cordoned it"),
        (2, None, ""),
        (3, "0", "an admin has cordoned it"),
    ):
        raw = gpunode_object()
        raw["metadata"]["resourceVersion"] = str(version)
        raw["metadata"]["annotations"] = {CORDONED_ANNOTATION: value} if value is not None else {}
        rooms.clear()
        state.put_gpunode(raw)
        assert account.state is not None
        [gpu] = account.state.gpus
        assert (gpu.available, gpu.reason) == (not reason, reason)
        assert rooms


@pytest.mark.parametrize(
    ("resources", "expected"), [({"nvidia.com/gpu": "1"}, "gives its GPUs to other pods"), ({}, None)]
)
def test_a_dedicated_node_with_a_device_plugin_takes_no_tenants(
    resources: dict[str, str], expected: str | None
) -> None:
    state = new_state()
    room = {"cpu": "8", "memory": "64Gi", "pods": "110", **resources}
    state.put_node(node_object(status={"allocatable": room, "capacity": room}))
    state.put_gpunode(gpunode_object())
    account = state.cluster.node("node-a")
    assert account is not None
    assert account.state is not None
    unavailable = account.state.unavailable
    assert unavailable is None if expected is None else expected in (unavailable or "")


@pytest.mark.promise("node-hook-loads", "node-env-injection")
@pytest.mark.parametrize(
    ("kind", "status", "reason", "expected"),
    [
        ("HookLoads", "False", "NotLoaded", "does not load the hook in containers: see condition HookLoads"),
        ("HookLoads", "True", "Loaded", None),
        ("HookLoads", "Unknown", "NoSelfTest", None),
        ("EnvInjection", "True", "DefaultRuntimeInjects", "gives GPUs to every container with NVIDIA_VISIBLE_DEVICES"),
        ("EnvInjection", "True", "Accepted", None),
        ("EnvInjection", "False", "NotInjected", None),
        ("EnvInjection", "Unknown", "NoSelfTest", None),
    ],
)
def test_a_node_that_fails_its_self_test_takes_no_tenants(
    kind: str, status: str, reason: str, expected: str | None
) -> None:
    state = new_state()
    state.put_node(node_object())
    state.put_gpunode(gpunode_object())
    raw = gpunode_object(version=2)
    raw["status"]["conditions"] = [{"type": kind, "status": status, "reason": reason, "message": "at length"}]
    state.put_gpunode(raw)
    account = state.cluster.node("node-a")
    assert account is not None
    assert account.state is not None
    unavailable = account.state.unavailable
    assert unavailable is None if expected is None else expected in (unavailable or "")


@pytest.mark.promise("node-claims-attach")
@pytest.mark.parametrize(
    ("status", "expected"),
    [("False", "does not attach the devices of claims: see condition ClaimsAttach"), ("True", None), ("Unknown", None)],
)
def test_a_node_that_fails_its_self_test_by_a_claim_takes_no_claims_and_all_else(
    status: str, expected: str | None
) -> None:
    state = new_state()
    state.put_node(node_object())
    state.put_gpunode(gpunode_object())
    account = state.cluster.node("node-a")
    assert account is not None
    raw = gpunode_object(version=2)
    raw["status"]["conditions"] = [
        {"type": "CDIDevices", "status": "True", "reason": "Attachable"},
        {"type": "ClaimsAttach", "status": status, "reason": "X", "message": "at length"},
    ]
    state.put_gpunode(raw)
    assert account.state is not None
    assert account.state.unavailable is None
    refused = account.state.no_claims
    assert refused is None if expected is None else expected in (refused or "")


def test_pending_requests_are_woken_by_a_pod_that_shrinks_or_ends() -> None:
    state = new_state()
    state.put_node(node_object())
    state.put_gpunode(gpunode_object())
    rooms: list[int] = []
    state.on_room_changed = lambda: rooms.append(state.cluster.room_version)

    def other(cpu: str) -> Json:
        spec = {"nodeName": "node-a", "containers": [{"name": "c", "resources": {"requests": {"cpu": cpu}}}]}
        return {"metadata": {"uid": "other"}, "spec": spec}

    state.other_pods.put(other("2"))
    state.other_pods.put(other("2"))
    assert rooms == [], "it only takes"
    state.other_pods.put(other("1"))
    assert len(rooms) == 1
    state.put_pod(pod_object(node="node-a"))
    rooms.clear()
    state.put_pod(pod_object(node="node-a", version=2, phase="Succeeded"))
    assert rooms


def test_a_node_that_cannot_be_read_is_unavailable_and_not_too_small_for_ever() -> None:
    state = new_state()
    state.put_node(node_object(status={"allocatable": {"cpu": "1" * 500_000}}))
    state.put_gpunode(gpunode_object())
    state.put_sharepod(sharepod_object())
    account, asked = state.cluster.node("node-a"), state.sharepods.get(TENANT)
    assert account is not None
    assert account.state is not None
    assert asked is not None
    assert account.state.unavailable is not None
    assert account.state.unavailable.startswith("cannot be read: status.allocatable.cpu: ")
    assert account.state.allocatable.cpu_milli > asked.needs.resources.cpu_milli


def test_unreadable_objects_are_named_in_the_log_every_ten_seconds_at_most() -> None:
    now = 0.0
    state = ClusterState(PODS, AgentLeases(20.0, lambda: now, lambda: NOW), lambda: now)
    with capture_logs() as logs:
        for version in range(25):
            raw = node_object(spec={"taints": "many"})
            raw["metadata"]["resourceVersion"] = str(version + 1)
            state.put_node(raw)
            now += 1.0
    assert [line["name"] for line in logs] == ["node-a"] * 3
    assert "cannot be read: spec.taints: is not a list of maps" in logs[0]["error"]


@pytest.mark.promise("operator-restored-backup")
def test_invalidated_facts_stay_and_any_later_version_is_newer() -> None:
    state = new_state()
    state.put_sharepod(sharepod_object(version=500))
    state.put_pod(pod_object(version=501))
    known, its_pod = state.sharepods.get(TENANT), state.pods.get("pod-1")
    state.invalidate_sharepods()
    state.invalidate_pods()
    assert state.sharepods.get(TENANT) is known, "a copy of 10,000 SharePods' facts takes 0.25 s"
    assert state.pods.get("pod-1") is its_pod
    assert (state.sharepods.versions(), state.pods.versions()) == ({TENANT: 0}, {"pod-1": 0})
    state.put_sharepod(sharepod_object(version=3))
    state.put_sharepod(sharepod_object(version=2))
    assert state.sharepods.versions() == {TENANT: 3}
    state.put_pod(pod_object(uid="pod-2", version=4))
    newest = state.pod_of(TENANT)
    assert newest is not None
    assert newest.uid == "pod-2"
    state.put_pod(pod_object(version=3))
    assert state.pods.get("pod-1") is None, "another has its name by now"
    assert TENANT not in state.lost_pods


@pytest.mark.promise("operator-no-ghost")
def test_an_answer_older_than_the_end_of_another_pod_does_not_bring_it_back() -> None:
    state = new_state()
    state.put_node(node_object())

    def other(version: int) -> Json:
        container = {"resources": {"requests": {"cpu": "2"}}}
        metadata = {"uid": "other", "name": "other", "namespace": "n", "resourceVersion": str(version)}
        return {"metadata": metadata, "spec": {"nodeName": "node-a", "containers": [container]}}

    state.other_pods.put(other(5))
    state.other_pods.drop("other", 7)
    for late in (5, 6, 7):
        state.other_pods.put(other(late))
        assert state.other_pods.versions() == {}
        account = state.cluster.node("node-a")
        assert account is not None
        assert account.taken().free.cpu_milli == 8000
    state.other_pods.put(other(8))
    state.other_pods.drop("other", 7)
    assert state.other_pods.versions() == {"other": 8}, "it is selected again, as of a later version"
