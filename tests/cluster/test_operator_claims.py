"""Plain Pods get shares by ResourceClaims: the operator allocates, the real kube-scheduler binds, the real
kube-controller-manager makes, deallocates and deletes claims."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from cluster.admission import as_user
from cluster.audit import Audit
from cluster.claims_world import (
    CLAIMS,
    FINALIZER,
    allocation,
    claim_made_for,
    claim_of,
    claim_path,
    make_claim,
    make_pod,
    make_template,
    row_of,
    runs,
)
from cluster.operator_world import GIB, World, gpu_uuid, wait
from harness.api import ApiError, Object
from harness.installation import NAMESPACE

WORLD_HAS_CLAIMS = True
"""The file's world has claims."""


@pytest.mark.promise("operator-claim-bound")
def test_a_pod_with_a_claim_of_a_template_is_bound_to_the_node_of_its_row(world: World) -> None:
    (node,) = world.nodes("template")
    namespace = world.cluster.namespace("template")
    make_template(world, namespace, "shares", time_milli=400, memory="4Gi")
    make_pod(world, namespace, "one", on="template", template="shares")
    pod = runs(world, namespace, "one")
    claim = claim_made_for(world, namespace, "one")
    assert claim is not None
    row = row_of(world, node, claim["metadata"]["name"])
    assert row is not None
    assert (row["id"], row["claim"]["uid"]) == (claim["metadata"]["uid"],) * 2
    assert (row["requestMilli"], row["limitMilli"], row["memory"]) == (400, 1000, 4 * GIB)
    found = allocation(claim)
    assert found is not None
    assert found["devices"]["results"] == [
        {"request": "gpu", "driver": "gpu.sharepod.dev", "pool": node, "device": gpu_uuid(node, 0).lower()}
    ]
    assert FINALIZER in claim["metadata"]["finalizers"]
    assert [item["uid"] for item in claim["status"]["reservedFor"]] == [pod["metadata"]["uid"]]
    (shown,) = claim["status"]["devices"]
    assert shown["data"] == {"requestMilli": 400, "limitMilli": 1000, "memory": 4 * GIB}
    assert shown["conditions"][0]["message"].startswith("request 0.4")


def test_the_end_of_a_pod_ends_its_claim_and_row_and_makes_room_for_the_next(world: World) -> None:
    world.nodes("end")
    namespace = world.cluster.namespace("end")
    make_template(world, namespace, "large", time_milli=900)
    for name in ("one", "two", "three"):
        make_pod(world, namespace, name, on="end", template="large")
    names = ("one", "two", "three")

    def bound() -> list[str]:
        pods = {name: world.pod(namespace, name) or {} for name in names}
        return [name for name, pod in pods.items() if pod["spec"].get("nodeName")]

    wait(lambda: len(bound()) == 2, what="one on each of two GPUs")
    first = bound()[0]
    (waiting,) = set(names) - set(bound())
    runs(world, namespace, first)
    world.api.delete(f"/api/v1/namespaces/{namespace}/pods/{first}")
    runs(world, namespace, waiting)
    wait(lambda: claim_made_for(world, namespace, first) is None, what="its claim is deleted")


@pytest.mark.promise("operator-claim-elsewhere")
def test_a_pod_that_does_not_fit_the_node_goes_to_another(world: World) -> None:
    small, large = world.nodes("fit", 2, cpu="2")
    namespace = world.cluster.namespace("fit")
    # Binpack therefore chooses the node of this SharePod first
    world.apply(namespace, "full", {"request": 0.5}, on="fit")
    world.phase(namespace, "full", "Running")
    taken = next(node for node in (small, large) if world.rows(node))
    blocker = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "foreign"},
        "spec": {
            "nodeName": taken,
            "containers": [{"name": "main", "image": "test", "ports": [{"containerPort": 80, "hostPort": 7777}]}],
        },
    }
    world.api.create(f"/api/v1/namespaces/{namespace}/pods", blocker)
    make_claim(world, namespace, "share", time_milli=300)
    container = {
        "name": "main",
        "image": "test",
        "ports": [{"containerPort": 80, "hostPort": 7777}],
        "resources": {"claims": [{"name": "c0"}]},
    }
    make_pod(world, namespace, "picky", on="fit", claims=("share",), containers=[container])
    pod = runs(world, namespace, "picky")
    assert pod["spec"]["nodeName"] != taken
    assert row_of(world, taken, "share") is None


@pytest.mark.promise("operator-claim-refused-before")
def test_a_pod_whose_volume_does_not_exist_holds_no_share_and_gets_one_once_it_does(world: World) -> None:
    (node,) = world.nodes("volume")
    namespace = world.cluster.namespace("volume")
    make_claim(world, namespace, "share", time_milli=900)
    missing = {"name": "data", "persistentVolumeClaim": {"claimName": "data"}}
    make_pod(world, namespace, "waits", on="volume", claims=("share",), volumes=[missing])
    wait(lambda: row_of(world, node, "share") is not None, what="a share")
    wait(lambda: not world.rows(node), what="it is released after the bind timeout")
    world.event(namespace, "waits", "AllocationTakenBack")
    local = {"accessModes": ["ReadWriteOnce"], "capacity": {"storage": "1Gi"}, "hostPath": {"path": "/x"}}
    volume = {"metadata": {"name": "data"}, "spec": {**local, "storageClassName": "none"}}
    world.api.create("/api/v1/persistentvolumes", volume)
    asked = {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "1Gi"}}}
    claim = {"metadata": {"name": "data"}, "spec": {**asked, "storageClassName": "none", "volumeName": "data"}}
    world.api.create(f"/api/v1/namespaces/{namespace}/persistentvolumeclaims", claim)
    runs(world, namespace, "waits")


@pytest.mark.promise("operator-claim-no-over-commit")
def test_a_burst_of_pods_and_sharepods_never_gets_more_of_a_gpu_than_there_is(world: World) -> None:
    nodes = world.nodes("claimburst", 2)
    namespace = world.cluster.namespace("claimburst")
    make_template(world, namespace, "shares", time_milli=350)
    for number in range(8):
        make_pod(world, namespace, f"pod{number}", on="claimburst", template="shares")
        world.apply(namespace, f"share{number}", {"request": 0.35}, on="claimburst")
    wait(lambda: sum(len(world.rows(node)) for node in nodes) == 8, what="two of 0.35 on each of four GPUs")
    for node in nodes:
        for index in range(2):
            rows = [row for row in world.rows(node) if gpu_uuid(node, index) in row["gpus"]]
            assert sum(row["requestMilli"] for row in rows) <= 1000


@pytest.mark.promise("operator-claim-forced")
def test_after_a_forced_deletion_the_share_is_held_until_the_agent_says_that_nothing_is_left(world: World) -> None:
    (node,) = world.nodes("forced")
    namespace = world.cluster.namespace("forced")
    claim = make_claim(world, namespace, "share", time_milli=900, count=2)
    make_pod(world, namespace, "one", on="forced", claims=("share",))
    runs(world, namespace, "one")
    world.agents.leave_behind(claim["metadata"]["uid"])
    world.api.delete(f"/api/v1/namespaces/{namespace}/pods/one", grace=0)
    wait(lambda: (row_of(world, node, "share") or {}).get("state") == "Releasing", what="the row is being released")
    make_claim(world, namespace, "next", time_milli=900)
    make_pod(world, namespace, "two", on="forced", claims=("next",))
    world.event(namespace, "two", "NoRoom")
    assert row_of(world, node, "next") is None
    world.agents.end(claim["metadata"]["uid"])
    runs(world, namespace, "two")


@pytest.mark.promise("operator-claim-namespace")
@pytest.mark.parametrize("bound", [True, False])
def test_a_namespace_with_claims_can_be_deleted(world: World, bound: bool) -> None:
    node, *_ = world.nodes(f"space{bound}".lower())
    namespace = world.cluster.namespace(f"space{bound}".lower())
    make_claim(world, namespace, "share")
    make_claim(world, namespace, "unused")
    cpu = "100m" if bound else "1000"
    make_pod(world, namespace, "one", on=f"space{bound}".lower(), claims=("share",), cpu=cpu)
    if bound:
        runs(world, namespace, "one")
    world.api.delete(f"/api/v1/namespaces/{namespace}")
    wait(lambda: world.rows(node) == [], what="the row is removed")
    wait(
        lambda: namespace not in [item["metadata"]["name"] for item in world.api.get("/api/v1/namespaces")["items"]],
        what="the namespace is deleted",
    )


def test_pods_on_one_claim_share_one_row_and_the_claim_serves_a_next_pod(world: World) -> None:
    (node,) = world.nodes("shared")
    namespace = world.cluster.namespace("shared")
    claim = make_claim(world, namespace, "share")
    for name in ("one", "two"):
        make_pod(world, namespace, name, on="shared", claims=("share",))
    for name in ("one", "two"):
        runs(world, namespace, name)
    assert [row["id"] for row in world.rows(node)] == [claim["metadata"]["uid"]]
    for name in ("one", "two"):
        world.kubelets.finish(namespace, name)
    wait(lambda: world.rows(node) == [], what="the row is removed")
    assert allocation(claim_of(world, namespace, "share")) is None
    make_pod(world, namespace, "three", on="shared", claims=("share",))
    runs(world, namespace, "three")
    assert row_of(world, node, "share") is not None


def test_a_pod_that_is_deleted_while_it_waits_leaves_neither_row_nor_allocation(world: World) -> None:
    (node,) = world.nodes("leaves")
    namespace = world.cluster.namespace("leaves")
    make_claim(world, namespace, "share")
    make_pod(world, namespace, "one", on="leaves", claims=("share",), schedulerName="unknown")
    wait(lambda: allocation(claim_of(world, namespace, "share")), what="allocated, and no scheduler binds the pod")
    world.api.delete(f"/api/v1/namespaces/{namespace}/pods/one")
    wait(lambda: allocation(claim_of(world, namespace, "share")) is None, what="the allocation is removed")
    wait(lambda: world.rows(node) == [], what="the row is removed")
    world.api.delete(claim_path(namespace, "share"))
    wait(lambda: claim_of(world, namespace, "share") is None, what="the claim is deleted")


def test_a_claim_of_two_gpus_and_a_pod_with_two_claims_are_placed_on_one_node(world: World) -> None:
    world.nodes("gang", 2)
    namespace = world.cluster.namespace("gang")
    make_claim(world, namespace, "pair", time_milli=600, count=2)
    make_claim(world, namespace, "first", time_milli=600)
    make_claim(world, namespace, "second", time_milli=600)
    make_pod(world, namespace, "one", on="gang", claims=("pair",))
    make_pod(world, namespace, "two", on="gang", claims=("first", "second"))
    one, two = runs(world, namespace, "one"), runs(world, namespace, "two")
    assert one["spec"]["nodeName"] != two["spec"]["nodeName"]
    rows = world.rows(two["spec"]["nodeName"])
    assert len({row["gpus"][0] for row in rows}) == 2


def test_the_operator_starts_again_between_any_two_steps(world: World) -> None:
    nodes = world.nodes("again", 2)
    namespace = world.cluster.namespace("again")
    make_template(world, namespace, "shares", time_milli=240)
    for number in range(16):
        make_pod(world, namespace, f"pod{number}", on="again", template="shares")
        if number % 5 == 4:
            assert world.operator is not None
            world.operator.stop(grace=0)
            world.start_operator()
    for number in range(16):
        runs(world, namespace, f"pod{number}")
    rows = [row for node in nodes for row in world.rows(node)]
    assert len({row["id"] for row in rows}) == len(rows) == 16


def test_a_share_is_lowered_and_raised_by_annotation_while_its_pod_runs(world: World) -> None:
    (node,) = world.nodes("lower")
    namespace = world.cluster.namespace("lower")
    make_claim(world, namespace, "share", time_milli=500)
    make_pod(world, namespace, "one", on="lower", claims=("share",))
    runs(world, namespace, "one")
    for request, milli in (("0.2", 200), ("0.5", 500)):
        patch = {"metadata": {"annotations": {"sharepod.dev/gpu-request": request}}}
        world.api.patch(claim_path(namespace, "share"), patch)
        wait(lambda milli=milli: (row_of(world, node, "share") or {})["requestMilli"] == milli, what=f"row has {milli}")

        def shown() -> int:
            claim = claim_of(world, namespace, "share") or {}
            return int(claim["status"]["devices"][0]["data"]["requestMilli"])

        wait(lambda milli=milli: shown() == milli, what=f"the claim shows {milli}")


SLICES, CLASS = f"{CLAIMS}/resourceslices", f"{CLAIMS}/deviceclasses/sharepod.dev"
OURS, OTHERS = "gpu.sharepod.dev", "devices.example"
KUBECTL = ("create", "-f", "-")


def foreign_slice(node: str, driver: str) -> Object:
    """Return a ResourceSlice that names the GPUs of a node as the operator does, with room for two shares of 0.6 on
    each."""
    room: Object = {"value": "16Ti", "requestPolicy": {"default": "1", "validRange": {"min": "1"}}}
    capacity = {"timeMilli": {"value": "1200"}, "limitMilli": room, "memory": room}
    devices = [
        {"name": gpu_uuid(node, index).lower(), "allowMultipleAllocations": True, "capacity": capacity}
        for index in range(2)
    ]
    pool = {"name": node, "generation": 1, "resourceSliceCount": 1}
    spec = {"driver": driver, "nodeName": node, "pool": pool, "devices": devices}
    metadata = {"name": f"{node}-foreign"}
    return {"apiVersion": "resource.k8s.io/v1", "kind": "ResourceSlice", "metadata": metadata, "spec": spec}


def selecting(*drivers: str) -> Object:
    """Return a patch of the DeviceClass that makes it select devices of these drivers."""
    expression = " || ".join(f'device.driver == "{driver}"' for driver in drivers)
    return {"spec": {"selectors": [{"cel": {"expression": expression}}]}}


def unschedulable(world: World, namespace: str, name: str) -> bool:
    conditions = ((world.pod(namespace, name) or {}).get("status") or {}).get("conditions") or []
    return any(item.get("reason") == "Unschedulable" for item in conditions)


@pytest.mark.promise("operator-claim-no-slices", "operator-claim-class")
def test_devices_that_a_tenant_an_agent_or_a_node_publishes_are_refused_or_attract_no_claim(world: World) -> None:
    (node,) = world.nodes("publish")
    namespace = world.cluster.namespace("publish")
    world.cluster.kubectl("create", "rolebinding", "rules", "--clusterrole=admin", "--user=eve", "-n", namespace)
    tenant = world.cluster.user_kubeconfig("eve")
    agent = world.cluster.kubeconfig_for(
        world.cluster.service_account_token(NAMESPACE, "sharepod-agent", bound_node=node)
    )
    kubelet = world.cluster.user_kubeconfig(f"system:node:{node}", groups=("system:nodes",))
    for driver in (OURS, OTHERS):
        for who, refusals in (
            (tenant, ('cannot create resource "resourceslices"',)),
            (agent, ("may write ResourceSlices of", "may name its ResourceSlice", "only allocator")),
        ):
            code, answer = as_user(world.cluster, who, *KUBECTL, body=foreign_slice(node, driver))
            assert (code, any(refusal in answer for refusal in refusals)) == (1, True), answer
    for who in (tenant, agent, kubelet):
        code, answer = as_user(
            world.cluster,
            who,
            "patch",
            "deviceclass",
            "sharepod.dev",
            "--type=merge",
            "-p",
            '{"spec":{"selectors":[]}}',
        )
        assert (code, "forbidden" in answer.lower()) == (1, True), answer
    code, answer = as_user(world.cluster, kubelet, *KUBECTL, body=foreign_slice(node, OURS))
    assert (code, "only allocator" in answer) == (1, True), answer
    for wider in ({"spec": {"selectors": None}}, selecting(OURS, OTHERS)):
        with pytest.raises(ApiError, match=r"spec[.]selectors: must have the expression"):
            world.api.patch(CLASS, wider)
    code, answer = as_user(world.cluster, kubelet, *KUBECTL, body=foreign_slice(node, OTHERS))
    assert code == 0, answer
    assert world.operator is not None
    world.operator.stop(grace=0)
    make_claim(world, namespace, "share")
    make_pod(world, namespace, "one", on="publish", claims=("share",))
    wait(lambda: unschedulable(world, namespace, "one"), what="kube-scheduler finds no device")
    assert allocation(claim_of(world, namespace, "share")) is None
    world.start_operator()
    runs(world, namespace, "one")
    assert row_of(world, node, "share") is not None


@contextmanager
def published(world: World, node: str, driver: str) -> Iterator[None]:
    """Publish devices of a driver and let the class select them during the block, without the policies that forbid it:
    as in a cluster with slices and classes older than the policies."""
    bindings = "/apis/admissionregistration.k8s.io/v1/validatingadmissionpolicybindings"
    for name in ("sharepod-no-slices", "sharepod-own-devices"):
        world.api.delete(f"{bindings}/{name}")

    def taken() -> bool:
        try:
            world.api.patch(CLASS, selecting(OURS, OTHERS))
            world.api.create(SLICES, foreign_slice(node, driver))
        except ApiError:
            return False
        return True

    wait(taken, what="the policies are no longer enforced")
    try:
        yield
    finally:
        world.api.delete(f"{SLICES}/{node}-foreign")
        world.api.patch(CLASS, selecting(OURS))
        world.installation.install_claims()


@pytest.mark.promise("operator-claim-foreign-harmless")
@pytest.mark.parametrize("driver", [OURS, OTHERS])
def test_what_kube_scheduler_allocates_takes_nothing_of_a_gpu_and_its_owner_is_told(world: World, driver: str) -> None:
    on, expected = ("race-ours", "ReservationLost") if driver == OURS else ("race-others", "ForeignAllocation")
    (node,) = world.nodes(on)
    namespace = world.cluster.namespace(on)
    names = [f"pod{number}" for number in range(8)]
    with Audit(world.api, memory=16 * GIB) as audit, published(world, node, driver):
        assert world.operator is not None
        world.operator.stop(grace=0)
        for name in names:
            make_claim(world, namespace, name, time_milli=600)
        for name in names[:2]:
            make_pod(world, namespace, name, on=on, claims=(name,))
        wait(lambda: all("nodeName" in (world.pod(namespace, name) or {})["spec"] for name in names[:2]), what="bound")
        world.start_operator()
        for name in names[2:]:
            make_pod(world, namespace, name, on=on, claims=(name,))

        def answered(name: str) -> bool:
            reasons = {reason for reason, _ in world.events(namespace, name)}
            return bool(reasons & {expected, "NoRoom"}) or row_of(world, node, name) is not None

        wait(lambda: len(world.rows(node)) == 2, what="the operator assigns all shares")
        wait(lambda: all(map(answered, names)), what="each has a share or an Event that it has none")
        for name in names[:2]:
            assert row_of(world, node, name) is None
            world.event(namespace, name, expected)
        assert not audit.over_committed
    for name in names:
        world.api.delete(f"/api/v1/namespaces/{namespace}/pods/{name}")
    wait(
        lambda: all(allocation(claim_of(world, namespace, name)) is None for name in names),
        what="all shares are released",
    )
    make_pod(world, namespace, "next", on=on, claims=(names[0],))
    runs(world, namespace, "next")
    assert row_of(world, node, names[0]) is not None
