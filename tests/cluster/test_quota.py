"""Quotas count SharePods and plain Pods alike, because the Pods of both carry the resource line. LimitRanges bound the
line.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from cluster.admission import as_user
from cluster.claims_world import (
    claim_made_for,
    claim_path,
    claim_spec,
    make_claim,
    make_pod,
    make_template,
    row_of,
    runs,
)
from cluster.operator_world import World, condition_of, wait
from cluster.plain_world import MEMORY, MILLI, a_world_of_lines, container, line_pod
from cluster.shared_cluster import SharedCluster
from harness.api import ApiError, Object

DRY = ("create", "--dry-run=server", "-f", "-")
SHARE = {"request": 0.4, "memory": "1Gi"}
CLAIM_COUNT = "count/resourceclaims.resource.k8s.io"
CLAIM_GPUS = "sharepod.dev.deviceclass.resource.k8s.io/devices"


@pytest.fixture(scope="module")
def world(shared_cluster: SharedCluster) -> Iterator[World]:
    with a_world_of_lines(shared_cluster) as running:
        (node,) = running.nodes("first")
        wait(lambda: advertised(running, node) == "2k", what="lines are in use")
        yield running


def advertised(world: World, node: str) -> str | None:
    found: str | None = world.api.get(f"/api/v1/nodes/{node}")["status"]["allocatable"].get(MILLI)
    return found


def quota(world: World, namespace: str, **hard: str) -> str:
    """Create the ResourceQuota `gpu` for these amounts of the line or of claims. Wait until it is enforced; return its
    path."""
    names = {"milli": f"requests.{MILLI}", "mib": f"requests.{MEMORY}", "claims": CLAIM_COUNT, "gpus": CLAIM_GPUS}
    body = {
        "apiVersion": "v1",
        "kind": "ResourceQuota",
        "metadata": {"name": "gpu"},
        "spec": {"hard": {names[key]: amount for key, amount in hard.items()}},
    }
    path = f"/api/v1/namespaces/{namespace}/resourcequotas"
    world.api.create(path, body)
    wait(lambda: (world.api.get(f"{path}/gpu").get("status") or {}).get("used"), what="the quota is enforced")
    return f"{path}/gpu"


def used(world: World, path: str) -> Object:
    found: Object = world.api.get(path)["status"]["used"]
    return found


def row(world: World, node: str, name: str) -> int | None:
    """Return the thousandths in the row of a SharePod. None if it has no row."""
    found = world.row(node, name)
    return found["requestMilli"] if found is not None else None


def resize(world: World, namespace: str, name: str, request: float) -> None:
    world.api.patch(world.path(namespace, name), {"spec": {"gpu": {"request": request}}})


@pytest.mark.promise("operator-sharepod-quota")
def test_a_quota_counts_sharepods_and_plain_pods_together_and_says_so_in_the_condition(world: World) -> None:
    world.nodes("both")
    namespace = world.cluster.namespace("both")
    world.apply(namespace, "share", SHARE, on="both")
    world.phase(namespace, "share", "Running")
    world.api.create(
        f"/api/v1/namespaces/{namespace}/pods", line_pod(container(), name="plain", nodeSelector={"test": "both"})
    )
    # The quota may count a Pod twice for a while, if its creation was retried on a busy machine.
    path = quota(world, namespace, milli="1000", mib="4096")
    wait(lambda: used(world, path)[f"requests.{MILLI}"] == "800", what="both are counted")
    assert used(world, path)[f"requests.{MEMORY}"] == "2048"
    world.apply(namespace, "third", SHARE, on="both")
    answer = world.condition(namespace, "third", "PodReady", status="False", reason="PodForbidden")
    assert f"exceeded quota: gpu, requested: requests.{MILLI}=400, used: requests.{MILLI}=800" in answer
    world.api.delete(f"/api/v1/namespaces/{namespace}/pods/plain", grace=0)
    world.phase(namespace, "third", "Running")


@pytest.mark.promise("security-quota")
@pytest.mark.parametrize("way", ["deleted with its Pod left", "the Pod's owner removed"])
def test_a_pod_without_its_sharepod_counts_until_it_ends(world: World, way: str) -> None:
    name = "orphan" if way.startswith("deleted") else "unowned"
    (node,) = world.nodes(name)
    namespace = world.cluster.namespace(name)
    path = quota(world, namespace, milli="500")
    world.apply(namespace, "first", SHARE, on=name)
    world.phase(namespace, "first", "Running")
    if name == "orphan":
        world.cluster.kubectl("delete", "sharepod", "first", "-n", namespace, "--cascade=orphan", timeout=60)
    else:
        pod = f"/api/v1/namespaces/{namespace}/pods/first"
        world.api.patch(pod, {"metadata": {"ownerReferences": None}})
        world.cluster.kubectl("delete", "sharepod", "first", "-n", namespace, "--wait=false", timeout=60)
    world.apply(namespace, "second", SHARE, on=name)
    answer = world.condition(namespace, "second", "PodReady", status="False", reason="PodForbidden")
    assert "exceeded quota: gpu" in answer
    assert used(world, path)[f"requests.{MILLI}"] == "400"
    world.api.delete(f"/api/v1/namespaces/{namespace}/pods/first", grace=0)
    world.phase(namespace, "second", "Running")
    assert row(world, node, "second") == 400


@pytest.mark.promise("operator-sharepod-line-resize")
def test_a_live_resize_changes_the_share_and_not_the_line_and_kube_scheduler_believes_it(world: World) -> None:
    (node,) = world.nodes("resize")
    namespace = world.cluster.namespace("resize")
    for name in ("wide", "other"):
        world.apply(namespace, name, {"request": 0.8, "memory": "1Gi"}, on="resize")
        world.phase(namespace, name, "Running")
    pod = world.pod(namespace, "wide") or {}
    assert pod["spec"]["containers"][0]["resources"]["limits"][MILLI] == "800"
    resize(world, namespace, "wide", 0.2)
    wait(lambda: advertised(world, node) == "2600", what="the room that the lowered share has left is advertised")
    world.apply(namespace, "neighbour", {"request": 0.8, "memory": "1Gi"}, on="resize")
    world.phase(namespace, "neighbour", "Running")
    world.delete(namespace, "neighbour")
    wait(lambda: world.row(node, "neighbour") is None, what="its share is free")
    resize(world, namespace, "wide", 1.0)
    wait(lambda: row(world, node, "wide") == 1000, what="the share is raised above the line")


@pytest.mark.promise("operator-sharepod-line-counted")
def test_a_sharepod_that_is_raised_while_it_waits_is_counted_as_raised(world: World) -> None:
    (node,) = world.nodes("raised")
    namespace = world.cluster.namespace("raised")
    for name in ("one", "two"):
        world.apply(namespace, name, {"request": 1.0}, on="raised")
        world.phase(namespace, name, "Running")
    path = quota(world, namespace, milli="2500")
    world.apply(namespace, "small", {"request": 0.1}, on="raised")
    world.condition(namespace, "small", "Placed", status="False", reason="NoRoom")
    resize(world, namespace, "small", 0.4)
    wait(lambda: used(world, path)[f"requests.{MILLI}"] == "2400", what="its Pod's line equals its request")
    resize(world, namespace, "small", 0.6)
    answer = world.condition(namespace, "small", "PodReady", status="False", reason="PodForbidden")
    assert f"exceeded quota: gpu, requested: requests.{MILLI}=600" in answer
    world.delete(namespace, "one")
    wait(lambda: row(world, node, "small") == 600, what="it is placed once it is counted")


def refusal(world: World, path: str, body: Object) -> str:
    """Return the API server's refusal of a new object, by a dry run. Empty if it would accept the object."""
    try:
        world.api.create(path, body, dryRun="All")
    except ApiError as error:
        return error.message
    return ""


def asking(gpu: Object | None = None, **annotations: str) -> Object:
    """Return a SharePod that requests by the block `spec.gpu`, or by annotations."""
    written = {f"sharepod.dev/{key.replace('_', '-')}": value for key, value in annotations.items()}
    spec: Object = {"containers": [{"name": "main", "image": "test"}], **({"gpu": gpu} if gpu else {})}
    metadata = {"name": "probe", "annotations": written}
    return {"apiVersion": "sharepod.dev/v1alpha1", "kind": "SharePod", "metadata": metadata, "spec": spec}


def _may_make_claims(world: World, *namespaces: str) -> Path:
    """Return the kubeconfig of a user who may create only claims and templates in these namespaces."""
    claims = "resourceclaims.resource.k8s.io,resourceclaimtemplates.resource.k8s.io"
    for namespace in namespaces:
        make = ("--namespace", namespace, "create")
        world.cluster.kubectl(*make, "role", "claims", "--verb=create", f"--resource={claims}")
        world.cluster.kubectl(*make, "rolebinding", "claims", "--role=claims", "--user=bob")
    return world.cluster.user_kubeconfig("bob")


def _claim(spec: Object) -> Object:
    return {"apiVersion": "resource.k8s.io/v1", "kind": "ResourceClaim", "metadata": {"name": "p"}, "spec": spec}


def _template(spec: Object) -> Object:
    kind = {"apiVersion": "resource.k8s.io/v1", "kind": "ResourceClaimTemplate", "metadata": {"name": "probe"}}
    return {**kind, "spec": {"spec": spec}}


@pytest.mark.promise("operator-quota-cannot-count")
def test_what_a_quota_cannot_count_is_refused_where_one_names_the_line(world: World) -> None:
    namespace, free = world.cluster.namespace("counted"), world.cluster.namespace("uncounted")
    pods, shares = f"/api/v1/namespaces/{namespace}/pods", world.path(namespace)
    scheduled = "scheduler.sharepod.dev"
    whole = {"name": "line", "exactly": {"deviceClassName": scheduled, "allocationMode": "All"}}
    amounts = {"requests": {"timeMilli": "400", "memory": "1Gi"}}
    second = {"name": "second", "deviceClassName": scheduled, "capacity": amounts}
    specs = (
        claim_spec(),
        claim_spec(deviceClassName=scheduled),
        {"devices": {"requests": [whole]}},
        {"devices": {"requests": [{"name": "gpu", "firstAvailable": [second]}]}},
    )
    refused = {
        "a Pod without memory": (pods, line_pod(container(mib=None))),
        "a SharePod without memory": (shares, asking({"request": 0.4})),
        "a SharePod by annotations without memory": (shares, asking(gpu_request="0.4")),
        "an Exclusive SharePod": (shares, asking({"mode": "Exclusive"})),
    }
    quota(world, namespace, milli="1000", mib="4096")
    wait(lambda: "QuotaCannotCount" in refusal(world, shares, asking({"request": 0.4})), what="the quota is known")
    bob = _may_make_claims(world, namespace, free)
    for body in (body for spec in specs for body in (_claim(spec), _template(spec))):
        code, answer = as_user(world.cluster, bob, *DRY, "--namespace", namespace, body=body)
        assert (code, "QuotaCannotCount: ResourceQuota gpu" in answer) == (1, True), answer
        code, answer = as_user(world.cluster, bob, *DRY, "--namespace", free, body=body)
        assert code == 0, answer
    for what, (path, body) in refused.items():
        assert "QuotaCannotCount: ResourceQuota gpu" in refusal(world, path, body), what
    assert refusal(world, pods, line_pod()) == ""
    assert refusal(world, shares, asking({"request": 0.4, "memory": "1Gi"})) == ""
    assert refusal(world, shares, asking(gpu_request="0.4", gpu_memory="1Gi")) == ""
    assert refusal(world, world.path(free), asking({"request": 0.4})) == ""


@pytest.mark.promise("operator-quota-cannot-count")
def test_neither_scopes_nor_an_older_template_nor_annotations_of_the_lines_claim_go_past_a_quota(world: World) -> None:
    (node,) = world.nodes("older")
    namespace = world.cluster.namespace("older")
    make_template(world, namespace, "early", time_milli=500)
    pods, quotas = (f"/api/v1/namespaces/{namespace}/{kind}" for kind in ("pods", "resourcequotas"))
    world.api.create(pods, line_pod(container("main", "200"), name="lined", nodeSelector={"test": "older"}))
    runs(world, namespace, "lined")
    prioritized = {"matchExpressions": [{"scopeName": "PriorityClass", "operator": "Exists"}]}
    for name, counted, scope in (
        ("time", MILLI, {"scopes": ["NotTerminating"]}),
        ("memory", MEMORY, {"scopeSelector": prioritized}),
    ):
        spec = {"hard": {f"requests.{counted}": "1000"}, **scope}
        world.api.create(quotas, {"metadata": {"name": name}, "spec": spec})
    refused = "QuotaCannotCount: ResourceQuota memory"
    wait(lambda: refused in refusal(world, pods, line_pod(container(mib=None))), what="no scope is looked at")
    make_pod(world, namespace, "late", on="older", template="early")
    world.event(namespace, "late", note="QuotaCannotCount")
    claim = claim_made_for(world, namespace, "lined")
    assert claim is not None
    for key, value in (("request", "0.9"), ("mode", "Exclusive"), ("count", "2"), ("memory", "8Gi")):
        body = {"metadata": {"annotations": {f"sharepod.dev/gpu-{key}": value}}}
        with pytest.raises(ApiError, match=rf"annotations\[sharepod.dev/gpu-{key}\]"):
            world.api.patch(claim_path(namespace, claim["metadata"]["name"]), body)
    assert [found["requestMilli"] for found in world.rows(node)] == [200]


@pytest.mark.promise("operator-quota-cannot-count-raise")
def test_a_live_raise_above_what_the_pod_carries_is_refused_until_no_quota_counts_it(world: World) -> None:
    (node,) = world.nodes("gate")
    namespace = world.cluster.namespace("gate")
    path = quota(world, namespace, milli="1000")
    world.apply(namespace, "share", SHARE, on="gate")
    world.phase(namespace, "share", "Running")
    for request, milli in ((0.2, 200), (0.4, 400)):
        resize(world, namespace, "share", request)
        wait(lambda milli=milli: row(world, node, "share") == milli, what=f"the share is {milli}")
    resize(world, namespace, "share", 0.6)
    answer = world.condition(namespace, "share", "Resized", status="False", reason="QuotaCannotCount")
    assert "ResourceQuota gpu counts the resource line of its Pod, 400 thousandths and 1024 MiB" in answer
    world.api.patch(world.path(namespace, "share"), {"spec": {"gpu": {"memory": "2Gi", "request": 0.4}}})
    wait(lambda: (world.row(node, "share") or {})["requestMilli"] == 400, what="nothing is raised")
    world.api.delete(path)
    resize(world, namespace, "share", 0.7)
    wait(lambda: row(world, node, "share") == 700, what="the share is raised once nothing counts it")


@pytest.mark.promise("operator-line-limit-range")
def test_a_limit_range_bounds_the_line(world: World) -> None:
    namespace = world.cluster.namespace("range")
    limits = {
        "apiVersion": "v1",
        "kind": "LimitRange",
        "metadata": {"name": "gpu"},
        "spec": {"limits": [{"type": "Container", "max": {MILLI: "500"}, "min": {MILLI: "100"}}]},
    }
    world.api.create(f"/api/v1/namespaces/{namespace}/limitranges", limits)

    def refused() -> str:
        try:
            world.api.create(f"/api/v1/namespaces/{namespace}/pods", line_pod(container(milli="600")), dryRun="All")
        except ApiError as error:
            return error.message
        return ""

    wait(lambda: f"maximum {MILLI} usage per Container is 500" in refused(), what="the LimitRange is enforced")


@pytest.mark.promise("operator-line-limit-range-warned")
def test_a_default_for_every_container_is_warned_of_and_gives_each_a_share(world: World) -> None:
    world.nodes("default")
    namespace = world.cluster.namespace("default-line")

    def apply(name: str, **limits: Object) -> str:
        body = {"apiVersion": "v1", "kind": "LimitRange", "metadata": {"name": name}}
        spec = {"limits": [{"type": "Container", **limits}]}
        done = world.cluster.kubectl("apply", "-n", namespace, "-f", "-", input=json.dumps({**body, "spec": spec}))
        return done.stderr

    assert "Warning" not in apply("cpu", max={"cpu": "4"}, default={"cpu": "1"})
    assert f"spec.limits[].default[{MILLI}]: gives it to every container" in apply("most", max={MILLI: "500"})
    assert "spec.limits[].default[sharepod.dev/gpu-" in apply("most", default={MILLI: "100", MEMORY: "512"})
    silent = line_pod({"name": "main", "image": "test"}, name="silent", nodeSelector={"test": "default"})
    pods = f"/api/v1/namespaces/{namespace}/pods"
    wait(
        lambda: _limits(world.api.create(pods, silent, dryRun="All")).get(MILLI) == "100", what="the LimitRange counts"
    )
    world.api.create(pods, silent)
    assert _limits(runs(world, namespace, "silent"))[MEMORY] == "512"


@pytest.mark.promise("operator-quota-name-warned")
def test_a_quota_of_a_name_that_counts_nothing_is_warned_of(world: World) -> None:
    namespace = world.cluster.namespace("names")

    def apply(name: str) -> str:
        body = {"apiVersion": "v1", "kind": "ResourceQuota", "metadata": {"name": "gpu"}, "spec": {"hard": {name: "2"}}}
        done = world.cluster.kubectl("apply", "--dry-run=server", "-n", namespace, "-f", "-", input=json.dumps(body))
        return done.stderr

    counting = (f"requests.{MILLI}", f"requests.{MEMORY}", CLAIM_COUNT, CLAIM_GPUS, "count/sharepods.sharepod.dev")
    for name in (*counting, "requests.nvidia.com/gpu", "requests.cpu"):
        assert "Warning" not in apply(name)
    for name in (
        "requests.sharepod.dev/gpu-mili",
        MILLI,
        "requests.sharepod.dev/gpu",
        "requests.sharepods.dev/gpu-milli",
    ):
        assert f"spec.hard[{name}]: counts nothing; write requests.{MILLI} or requests.{MEMORY}" in apply(name)


def _limits(pod: Object) -> Object:
    """Return the limits of a Pod's first container."""
    found: Object = pod["spec"]["containers"][0].get("resources", {}).get("limits", {})
    return found


@pytest.mark.promise("operator-claim-quota")
def test_a_quota_on_claims_counts_them_and_their_gpus_and_what_fits_is_placed(world: World) -> None:
    (node,) = world.nodes("claims")
    namespace = world.cluster.namespace("claims")
    path = quota(world, namespace, claims="2", gpus="3")
    bob = _may_make_claims(world, namespace)
    make_claim(world, namespace, "pair", time_milli=100, count=2)

    def asked(gpus: int) -> str:
        body = {"apiVersion": "resource.k8s.io/v1", "kind": "ResourceClaim", "metadata": {"name": "probe"}}
        create = ("--namespace", namespace, "create", "-f", "-")
        code, answer = as_user(world.cluster, bob, *create, body={**body, "spec": claim_spec(count=gpus)})
        assert code == 1, answer
        return answer

    assert f"exceeded quota: gpu, requested: {CLAIM_GPUS}=2, used: {CLAIM_GPUS}=2, limited: {CLAIM_GPUS}=3" in asked(2)
    make_claim(world, namespace, "small", time_milli=300)
    assert f"{CLAIM_COUNT}=2" in asked(1)
    make_pod(world, namespace, "one", on="claims", claims=("small",))
    runs(world, namespace, "one")
    assert (row_of(world, node, "small") or {})["requestMilli"] == 300
    make_template(world, namespace, "shares", time_milli=900)
    make_pod(world, namespace, "two", on="claims", template="shares")
    world.event(namespace, "two", note="exceeded quota: gpu")
    world.api.delete(claim_path(namespace, "pair"))
    runs(world, namespace, "two")
    assert used(world, path) == {CLAIM_COUNT: "2", CLAIM_GPUS: "2"}


def phases(world: World, namespace: str) -> dict[str, str]:
    items = world.api.get(world.path(namespace))["items"]
    return {item["metadata"]["name"]: str((item.get("status") or {}).get("phase")) for item in items}


def set_milli(world: World, path: str, milli: str) -> None:
    """Change the amount of a quota, and wait until the API server enforces it."""
    world.api.patch(path, {"spec": {"hard": {f"requests.{MILLI}": milli}}})
    wait(lambda: world.api.get(path)["status"]["hard"][f"requests.{MILLI}"] == milli, what=f"a quota of {milli}")


@pytest.mark.promise("operator-forbidden")
def test_quotas_that_are_lowered_and_raised_while_sharepods_wait_decide_who_comes_next(world: World) -> None:
    (node,) = world.nodes("moved")
    namespace = world.cluster.namespace("moved")
    path = quota(world, namespace, milli="3100")
    most = {"request": 1.0, "memory": "1Gi"}
    for name in ("a", "b"):
        world.apply(namespace, name, most, on="moved")
        world.phase(namespace, name, "Running")
    world.apply(namespace, "counted", most, on="moved")  # this SharePod has its Pod, and waits for a GPU
    world.condition(namespace, "counted", "Placed", status="False", reason="NoRoom")
    set_milli(world, path, "1100")  # the quota already counts more than the new limit
    for name in ("over0", "over1", "over2"):
        world.apply(namespace, name, most, on="moved")
        answer = world.condition(namespace, name, "PodReady", status="False", reason="PodForbidden")
        assert "limited: requests.sharepod.dev/gpu-milli=1100" in answer
    world.delete(namespace, "a")
    # Pods that are already counted stay, because a quota ends no running Pod
    world.phase(namespace, "counted", "Running")
    assert sorted(found["podName"] for found in world.rows(node)) == ["b", "counted"]
    world.delete(namespace, "b")
    wait(lambda: len(world.rows(node)) == 1, what="a free GPU")
    assert not [name for name in phases(world, namespace) if name.startswith("over") and world.pod(namespace, name)]

    set_milli(world, path, "2100")
    wait(lambda: len(world.rows(node)) == 2, what="one more to run once there is room", timeout=90)
    set_milli(world, path, "4100")
    wait(lambda: len(world.cluster.pods(namespace)) == 4, what="the others' Pods", timeout=90)
    world.delete(namespace, "counted")
    wait(lambda: list(phases(world, namespace).values()).count("Running") == 2, what="two that run")


@pytest.mark.promise("operator-forbidden")
def test_a_quota_that_is_lowered_between_two_runs_keeps_the_next_one_waiting_without_a_share(world: World) -> None:
    (node,) = world.nodes("between")
    namespace = world.cluster.namespace("between")
    path = quota(world, namespace, milli="1000")
    world.apply(namespace, "one", SHARE, on="between", restartPolicy="Always")
    world.phase(namespace, "one", "Running")
    first = (world.pod(namespace, "one") or {})["metadata"]["uid"]
    set_milli(world, path, "100")
    world.api.delete(f"/api/v1/namespaces/{namespace}/pods/one", grace=0)
    wait(
        lambda: "exceeded quota: gpu" in condition_of(world.sharepod(namespace, "one"), "Placed").get("message", ""),
        what="a word on the quota",
    )
    wait(lambda: not world.rows(node), what="its share is released")
    set_milli(world, path, "400")
    world.phase(namespace, "one", "Running", timeout=90)
    seen = world.sharepod(namespace, "one")["status"]
    assert seen["podUID"] != first
    assert seen["lastEnd"]["podUID"] == first
