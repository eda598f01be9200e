"""Plain Pods that get shares by a resource line. The real API server's policies give them claims. The operator sizes
and allocates these claims by the Pods' lines, and the real controllers and scheduler do the rest.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from cluster.claims_world import (
    CLAIMS,
    allocation,
    claim_made_for,
    claim_path,
    make_claim,
    make_pod,
    row_of,
    runs,
)
from cluster.operator_world import GIB, TIMES, World, gpu_uuid, wait
from cluster.plain_world import MEMORY, MILLI, a_world_of_lines, container, line_pod
from cluster.shared_cluster import SharedCluster
from harness.api import Object
from harness.installation import MANIFESTS

EXAMPLES = sorted((MANIFESTS.parent / "examples" / "plain").glob("*.yaml"))


@pytest.fixture(scope="module")
def world(shared_cluster: SharedCluster) -> Iterator[World]:
    with a_world_of_lines(shared_cluster, times={**TIMES, "SHAREPOD_MOVE_AFTER": "1"}) as running:
        yield running


def start(world: World, namespace: str, name: str, *containers: Object, on: str, **options: Any) -> Object:
    """Create a Pod with a line, on nodes with the label `test=ON`."""
    body = line_pod(*containers, name=name, nodeSelector={"test": on}, **options)
    return world.api.create(f"/api/v1/namespaces/{namespace}/pods", body)


def row(world: World, namespace: str, pod: str, node: str) -> Object | None:
    """Return the ledger's row of a Pod with a line. None if there is none."""
    claim = claim_made_for(world, namespace, pod)
    return row_of(world, node, claim["metadata"]["name"]) if claim is not None else None


def advertised(world: World, node: str) -> tuple[str | None, str | None]:
    allocatable = world.api.get(f"/api/v1/nodes/{node}")["status"]["allocatable"]
    return allocatable.get(MILLI), allocatable.get(MEMORY)


def template(world: World, namespace: str) -> Object:
    found: Object = world.api.get(f"{CLAIMS}/namespaces/{namespace}/resourceclaimtemplates/sharepod")
    return found


@pytest.mark.promise("operator-line-bound")
def test_a_pod_made_with_its_namespace_gets_the_share_of_its_line(world: World) -> None:
    (node,) = world.nodes("line")
    namespace = world.cluster.namespace("line")
    start(
        world,
        namespace,
        "one",
        container(milli="400", mib="4096"),
        on="line",
        annotations={"sharepod.dev/gpu-limit": "0.8"},
    )
    pod = runs(world, namespace, "one")
    assert pod["spec"]["nodeName"] == node
    found = row(world, namespace, "one", node)
    assert found is not None
    assert (found["requestMilli"], found["limitMilli"], found["memory"]) == (400, 800, 4 * GIB)
    claim = claim_made_for(world, namespace, "one")
    results = (allocation(claim) or {})["devices"]["results"]
    assert [(item["request"], item["pool"], item["device"]) for item in results] == [
        ("line", node, gpu_uuid(node, 0).lower())
    ]
    wait(
        lambda: (
            (world.pod(namespace, "one") or {})["metadata"]["annotations"].get("sharepod.dev/gpus") == gpu_uuid(node, 0)
        ),
        what="the Pod names its GPU",
    )


@pytest.mark.promise("operator-line-several-gpus")
def test_a_line_of_whole_gpus_is_one_claim_with_several_devices(world: World) -> None:
    (node,) = world.nodes("gang")
    namespace = world.cluster.namespace("gang")
    start(world, namespace, "two", container(milli="2000", mib=None), on="gang")
    runs(world, namespace, "two")
    found = row(world, namespace, "two", node)
    assert found is not None
    assert (found["requestMilli"], len(found["gpus"])) == (1000, 2)


@pytest.mark.promise("operator-line-template")
def test_a_template_that_is_gone_or_another_is_made_again(world: World) -> None:
    world.nodes("again")
    namespace = world.cluster.namespace("again")
    start(world, namespace, "first", on="again")
    runs(world, namespace, "first")
    first = template(world, namespace)["metadata"]["uid"]
    world.api.delete(f"{CLAIMS}/namespaces/{namespace}/resourceclaimtemplates/sharepod")
    start(world, namespace, "second", on="again")
    runs(world, namespace, "second")
    assert template(world, namespace)["metadata"]["uid"] != first


@pytest.mark.promise("operator-line-end")
def test_the_share_ends_with_its_pod_and_the_next_one_gets_it(world: World) -> None:
    world.nodes("next")
    namespace = world.cluster.namespace("next")
    for name in ("one", "two", "three"):
        start(world, namespace, name, container(milli="900"), on="next")

    def bound() -> list[str]:
        names = ("one", "two", "three")
        return [name for name in names if (world.pod(namespace, name) or {})["spec"].get("nodeName")]

    wait(lambda: len(bound()) == 2, what="one on each of two GPUs")
    (waiting,) = {"one", "two", "three"} - set(bound())
    note = world.event(namespace, waiting, "NoRoom")
    assert "sharepod.dev/gpu-milli: 100 would fit now" in note
    assert not [word for word in ("timeMilli", "spec.gpu", "claim ") if word in note]
    world.api.delete(f"/api/v1/namespaces/{namespace}/pods/{bound()[0]}")
    runs(world, namespace, waiting)


@pytest.mark.promise("operator-line-claim-again")
def test_a_claim_that_is_deleted_while_its_pod_waits_is_there_again_and_gets_the_share(world: World) -> None:
    world.nodes("bereft")
    namespace = world.cluster.namespace("bereft")
    for name in ("one", "two"):
        start(world, namespace, name, container(milli="900"), on="bereft")
        runs(world, namespace, name)
    start(world, namespace, "waits", container(milli="900"), on="bereft")
    world.event(namespace, "waits", "NoRoom")
    before = claim_made_for(world, namespace, "waits")
    assert before is not None
    world.api.delete(claim_path(namespace, before["metadata"]["name"]))

    def again() -> bool:
        found = claim_made_for(world, namespace, "waits")
        return found is not None and found["metadata"]["uid"] != before["metadata"]["uid"]

    wait(again, what="another claim", timeout=10)
    world.api.delete(f"/api/v1/namespaces/{namespace}/pods/one")
    runs(world, namespace, "waits")


@pytest.mark.promise("operator-line-unmeant-sums")
def test_sums_with_init_containers_are_refused_by_an_event(world: World) -> None:
    world.nodes("sum")
    namespace = world.cluster.namespace("sum")
    first = container("first", milli="1500", mib="1024")
    start(world, namespace, "unmeant", on="sum", initContainers=[first])
    world.event(namespace, "unmeant", "Invalid", note="1500 is neither")
    assert not (world.pod(namespace, "unmeant") or {})["spec"].get("nodeName")


@pytest.mark.promise("operator-line-forged-claim")
def test_a_claim_with_a_borrowed_owner_gets_nothing(world: World) -> None:
    (node,) = world.nodes("forged")
    namespace = world.cluster.namespace("forged")
    start(world, namespace, "owner", on="forged")
    pod = runs(world, namespace, "owner")
    sizeless = {"devices": {"requests": [{"name": "line", "exactly": {"deviceClassName": "sharepod.dev"}}]}}
    owner = {"apiVersion": "v1", "kind": "Pod", "name": "owner", "uid": pod["metadata"]["uid"], "controller": True}
    metadata = {
        "name": "borrowed",
        "ownerReferences": [owner],
        "annotations": {"resource.kubernetes.io/pod-claim-name": "sharepod"},
    }
    body = {"apiVersion": "resource.k8s.io/v1", "kind": "ResourceClaim", "metadata": metadata, "spec": sizeless}
    world.api.create(claim_path(namespace), body)
    thief = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "thief"},
        "spec": {
            "nodeSelector": {"test": "forged"},
            "resourceClaims": [{"name": "gpu", "resourceClaimName": "borrowed"}],
            "containers": [{"name": "main", "image": "test", "resources": {"claims": [{"name": "gpu"}]}}],
        },
    }
    world.api.create(f"/api/v1/namespaces/{namespace}/pods", thief)
    world.event(namespace, "borrowed", "Invalid")
    assert row_of(world, node, "borrowed") is None
    assert allocation(world.api.get(claim_path(namespace, "borrowed"))) is None


@pytest.mark.promise("operator-line-claim-of-another")
def test_a_pod_cannot_use_the_claim_of_another_pods_line(world: World) -> None:
    world.nodes("guest")
    namespace = world.cluster.namespace("guest")
    start(world, namespace, "host", on="guest")
    runs(world, namespace, "host")
    claim = claim_made_for(world, namespace, "host")
    assert claim is not None
    guest = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "guest"},
        "spec": {
            "nodeSelector": {"test": "guest"},
            "resourceClaims": [{"name": "gpu", "resourceClaimName": claim["metadata"]["name"]}],
            "containers": [{"name": "main", "image": "test", "resources": {"claims": [{"name": "gpu"}]}}],
        },
    }
    world.api.create(f"/api/v1/namespaces/{namespace}/pods", guest)
    world.event(namespace, "guest", note="not for guest")
    assert not (world.pod(namespace, "guest") or {})["spec"].get("nodeName")


@pytest.mark.promise("operator-line-resize")
def test_a_lowered_share_makes_room_that_kube_scheduler_believes(world: World) -> None:
    (node,) = world.nodes("lower")
    namespace = world.cluster.namespace("lower")
    for name in ("wide", "other"):
        start(world, namespace, name, container(milli="800", mib="1024"), on="lower")
        runs(world, namespace, name)
    assert advertised(world, node)[0] == "2k"
    path = f"/api/v1/namespaces/{namespace}/pods/wide"
    world.api.patch(path, {"metadata": {"annotations": {"sharepod.dev/gpu-request": "0.2"}}})
    wait(lambda: (row(world, namespace, "wide", node) or {}).get("requestMilli") == 200, what="the share is lowered")
    start(world, namespace, "neighbour", container(milli="800", mib="1024"), on="lower")
    runs(world, namespace, "neighbour")
    assert advertised(world, node)[0] == "2600"


@pytest.mark.promise("operator-line-capacity")
def test_a_node_that_has_lost_the_resources_gets_them_again(world: World) -> None:
    (node,) = world.nodes("lost")
    wait(lambda: advertised(world, node)[0] == "2k", what="the node advertises its GPUs")
    removal = [
        {"op": "remove", "path": f"/status/{kind}/sharepod.dev~1gpu-milli"} for kind in ("capacity", "allocatable")
    ]
    world.api.patch(f"/api/v1/nodes/{node}/status", removal, content_type="application/json-patch+json")
    wait(lambda: advertised(world, node)[0] == "2k", what="the node advertises them again")


@pytest.mark.promise("operator-line-quota")
def test_a_quota_counts_lines_and_the_replica_set_says_why_the_third_is_missing(world: World) -> None:
    world.nodes("quota")
    namespace = world.cluster.namespace("quota")
    quota = {
        "apiVersion": "v1",
        "kind": "ResourceQuota",
        "metadata": {"name": "gpu"},
        "spec": {"hard": {f"requests.{MILLI}": "1000"}},
    }
    quotas = f"/api/v1/namespaces/{namespace}/resourcequotas"
    world.api.create(quotas, quota)
    wait(lambda: (world.api.get(f"{quotas}/gpu").get("status") or {}).get("used"), what="the quota is enforced")
    pod = line_pod(nodeSelector={"test": "quota"})
    del pod["spec"]["restartPolicy"]
    deployment = {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": "web"},
        "spec": {
            "replicas": 3,
            "selector": {"matchLabels": {"app": "web"}},
            "template": {"metadata": {"labels": {"app": "web"}}, "spec": pod["spec"]},
        },
    }
    world.api.create(f"/apis/apps/v1/namespaces/{namespace}/deployments", deployment)

    def running() -> int:
        pods = world.api.get(f"/api/v1/namespaces/{namespace}/pods", labelSelector="app=web")["items"]
        return sum(one["status"].get("phase") == "Running" for one in pods)

    wait(lambda: running() == 2, what="two of three run")
    wait(
        lambda: (
            f"exceeded quota: gpu, requested: requests.{MILLI}=400"
            in world.cluster.kubectl("--namespace", namespace, "describe", "rs").stdout
        ),
        what="the reason stands in kubectl describe rs",
    )


def _pods_with_a_line(body: Object) -> int:
    """Return the number of Pods with a line that an object is, or creates at once."""
    spec = body["spec"]
    pod = spec if body["kind"] == "Pod" else spec.get("template", {}).get("spec", {})
    limits = [container["resources"].get("limits", {}) for container in pod.get("containers", ())]
    return int(spec.get("replicas") or spec.get("parallelism") or 1) if any(MILLI in limit for limit in limits) else 0


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_pods_of_an_example_are_bound_with_shares(world: World, path: Path) -> None:
    assert path.read_text().startswith("# ")
    name = path.stem.partition("-")[2]
    world.nodes(name, 2)
    namespace = world.cluster.namespace(name)
    world.cluster.kubectl("apply", "--server-side", "--namespace", namespace, "-f", str(path))
    pods = sum(_pods_with_a_line(body) for body in yaml.safe_load_all(path.read_text()))

    def placed() -> int:
        claims = world.api.get(claim_path(namespace))["items"]
        found = world.api.get(f"/api/v1/namespaces/{namespace}/pods")["items"]
        bound = [pod for pod in found if pod["spec"].get("nodeName") and pod["spec"].get("resourceClaims")]
        return min(len(bound), sum(allocation(claim) is not None for claim in claims))

    wait(lambda: placed() >= pods, what=f"{pods} Pods are bound with shares")


@pytest.mark.promise("placement-preempt-plain")
def test_plain_pods_make_room_for_each_other_by_priority(world: World) -> None:
    (node,) = world.nodes("yields")
    namespace = world.cluster.namespace("yields")
    world.api.create("/apis/scheduling.k8s.io/v1/priorityclasses", {"metadata": {"name": "line-high"}, "value": 1000})
    for name in ("low0", "low1"):
        start(world, namespace, name, container(milli="600", mib="6144"), on="yields")
        runs(world, namespace, name)
    start(world, namespace, "time", container(milli="600", mib="6144"), on="yields", priorityClassName="line-high")
    runs(world, namespace, "time")
    shares = [(row(world, namespace, name, node) or {})["requestMilli"] for name in ("low0", "low1")]
    assert sorted(shares) == [0, 600], "only time was short: no Pod ended"
    start(world, namespace, "memory", container(milli="100", mib="12288"), on="yields", priorityClassName="line-high")
    runs(world, namespace, "memory")
    left = [name for name in ("low0", "low1") if (world.pod(namespace, name) or {}).get("metadata")]
    assert len(left) == 1, "one made room for the memory"
    assert len(world.rows(node)) == 3


@pytest.mark.promise("operator-line-room-first")
def test_where_time_changes_hands_on_a_full_node_kube_scheduler_evicts_nobody_for_the_line(world: World) -> None:
    (node,) = world.nodes("full")
    namespace = world.cluster.namespace("full")
    world.api.create("/apis/scheduling.k8s.io/v1/priorityclasses", {"metadata": {"name": "full"}, "value": 1000})
    low = [f"low{number}" for number in range(4)]
    for name in low:
        start(world, namespace, name, container(milli="500"), on="full")
        runs(world, namespace, name)
    for name in ("high0", "high1"):
        world.apply(namespace, name, {"request": 0.5, "memory": "1Gi"}, on="full", priorityClassName="full")
        world.phase(namespace, name, "Running")
    start(world, namespace, "high2", container(milli="500"), on="full", priorityClassName="full")
    runs(world, namespace, "high2")
    assert [name for name in low if _ends(world.pod(namespace, name))] == []
    assert sorted(found["requestMilli"] for found in world.rows(node)) == [0, 0, 0, 500, 500, 500, 500]


def _ends(pod: Object | None) -> bool:
    return pod is None or "deletionTimestamp" in pod["metadata"]


@pytest.mark.promise("placement-preempt-claims")
def test_a_pod_with_several_claims_has_room_made_for_all_of_them_on_one_node(world: World) -> None:
    (node,) = world.nodes("several")
    namespace = world.cluster.namespace("several")
    world.api.create("/apis/scheduling.k8s.io/v1/priorityclasses", {"metadata": {"name": "several"}, "value": 1000})
    for name in ("low0", "low1"):
        start(world, namespace, name, container(milli="600", mib="8192"), on="several")
        runs(world, namespace, name)
    for claim in ("first", "second"):
        make_claim(world, namespace, claim, time_milli=300, memory="12Gi")
    make_pod(world, namespace, "high", on="several", claims=("first", "second"), priorityClassName="several")
    runs(world, namespace, "high")
    assert sorted(row["claim"]["name"] for row in world.rows(node)) == ["first", "second"]
    assert len({gpu for row in world.rows(node) for gpu in row["gpus"]}) == 2


@pytest.mark.promise("placement-move-plain")
def test_a_movable_pod_of_a_deployment_makes_room_and_its_next_pod_has_the_place_that_was_kept(world: World) -> None:
    (node,) = world.nodes("movers")
    namespace = world.cluster.namespace("movers")
    pod = line_pod(container(milli="400"), nodeSelector={"test": "movers"}, restartPolicy="Always")
    labels = {"app": "mover"}
    template = {
        "metadata": {"labels": labels, "annotations": {"sharepod.dev/gpu-movable": "true"}},
        "spec": pod["spec"],
    }
    body = {"metadata": {"name": "mover"}, "spec": {"selector": {"matchLabels": labels}, "template": template}}
    world.api.create(f"/apis/apps/v1/namespaces/{namespace}/deployments", body)

    def movers() -> list[Object]:
        items: list[Object] = world.api.get(f"/api/v1/namespaces/{namespace}/pods?labelSelector=app=mover")["items"]
        return [one for one in items if one["status"].get("phase") == "Running"]

    wait(lambda: len(movers()) == 1, what="the mover runs")
    (first,) = movers()
    for name, milli in (("blocker", "600"), ("fixed", "500")):
        start(world, namespace, name, container(milli=milli), on="movers")
        runs(world, namespace, name)
    world.api.delete(f"/api/v1/namespaces/{namespace}/pods/blocker")
    former = row(world, namespace, first["metadata"]["name"], node)
    start(world, namespace, "waits", container(milli="800"), on="movers")
    runs(world, namespace, "waits")
    wait(
        lambda: [one["metadata"]["uid"] for one in movers()] not in ([], [first["metadata"]["uid"]]),
        what="its next Pod",
    )
    (second,) = movers()
    moved, fixed = (row(world, namespace, name, node) or {} for name in (second["metadata"]["name"], "fixed"))
    assert former is not None
    assert moved["gpus"] == fixed["gpus"] != former["gpus"]
    for reason in ("Moving", "Moved"):
        world.event(namespace, "waits", reason)
