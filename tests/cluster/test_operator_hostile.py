"""Hostile objects on a real API server: each is refused, or affects only its owner, who is notified of the reason. A
valid SharePod is still placed, also by an operator that starts while the hostile object exists.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from cluster.operator_world import World, a_world, condition_of, wait
from harness.api import Api, ApiError, Object
from property import hostile_objects as hostile

_LEVELS = 60_000
"""Python's recursion limit in the test process, which sends and reads deeply nested objects. The operator is another
process with the usual limit."""


pytestmark = pytest.mark.timeout(400)


@contextmanager
def deep() -> Iterator[None]:
    before = sys.getrecursionlimit()
    sys.setrecursionlimit(_LEVELS)
    try:
        yield
    finally:
        sys.setrecursionlimit(before)


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    """Start a cluster whose simulated kubelets and agents can read deeply nested objects."""
    with deep(), a_world() as running:
        yield running


def user_of(world: World, namespace: str) -> Api:
    """Return a client with the rights of a user who may edit the namespace."""
    rbac = f"/apis/rbac.authorization.k8s.io/v1/namespaces/{namespace}/rolebindings"
    body: Object = {
        "apiVersion": "rbac.authorization.k8s.io/v1",
        "kind": "RoleBinding",
        "metadata": {"name": "user"},
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "edit"},
        "subjects": [{"kind": "ServiceAccount", "name": "default", "namespace": namespace}],
    }
    world.api.create(rbac, body)
    return world.cluster.api_for(world.cluster.service_account_token(namespace, "default"))


def good_ones_run(world: World, on: str) -> None:
    """Check that a valid SharePod of another namespace runs, and another one after a restart of the operator."""
    elsewhere = world.cluster.namespace(f"{on}-good")
    world.apply(elsewhere, "before", {"request": 0.1}, on=on)
    world.phase(elsewhere, "before", "Running")
    assert world.operator is not None
    world.operator.stop()
    world.apply(elsewhere, "after", {"request": 0.1}, on=on)
    world.start_operator()
    world.phase(elsewhere, "after", "Running")


def corpus() -> Iterator[tuple[str, Object]]:
    """Yield (name, SharePod) for hostile SharePods that a user may try. All their numbers are valid for an API
    server."""
    for name, raw in hostile.sharepods():
        if name.startswith("value") or raw.get("status"):
            continue
        if name.startswith("number") and name.split()[1] not in ("0", "2", "3", "7", "20", "26", "30"):
            continue
        if raw["spec"].get("gpu") == {"request": 0.4}:
            raw["spec"]["gpu"]["request"] = 0.001
        yield name, raw


INVALID = {
    "sums beyond 64 bits": "ask for more memory together than any node has",
    "a long argument": "has more than 524288 characters of text",
    "a long selector value": "characters of text",
    "sums of a device beyond 64 bits": "ask for more rdma/hca together than any node has",
    "affinity of a bound of many digits": "Gt takes exactly one whole number",
}
"""The operator's message for the owner of each SharePod that the API server accepts, by name."""


@pytest.mark.promise("operator-one-object-one-owner", "security-input", "security-one-owner")
def test_no_sharepod_that_a_user_can_create_costs_anybody_else(world: World) -> None:
    world.nodes("hostile", 2)
    namespace = world.cluster.namespace("hostile")
    user = user_of(world, namespace)
    created: dict[str, str] = {}
    refused: dict[str, str] = {}
    for number, (name, raw) in enumerate(corpus()):
        given = {key: raw["metadata"][key] for key in ("labels", "annotations") if key in raw["metadata"]}
        body = {**raw, "metadata": {"name": f"bad-{number}", **given}}
        try:
            user.request("POST", world.path(namespace), body, query={"fieldValidation": "Ignore"}, timeout=60)
            created[name] = f"bad-{number}"
        except ApiError as error:
            refused[name] = error.message
    assert set(created) >= set(INVALID), sorted(created)
    assert "1500 nested maps for a quantity" in refused
    assert "than 64" in refused["number 0 asked of memory"]
    good_ones_run(world, "hostile")

    def reported(seen: Object) -> bool:
        return bool(condition_of(seen, "Placed"))

    assert "metadata.annotations: has 20000 entries" in refused["many foreign annotations"]
    assert "metadata.labels: has 20000 entries" in refused["many labels"]
    for name in created:
        seen = world.until(namespace, created[name], reported, what=f"{name}: a word to its owner")
        assert len(condition_of(seen, "Placed").get("message", "")) <= 1024
    for name, words in INVALID.items():
        message = world.condition(namespace, created[name], "Placed", status="False", reason="Invalid")
        assert words in message, name
        world.event(namespace, created[name], "Invalid", note=words)
    assert world.operator is not None
    assert world.operator.running()


@pytest.mark.promise("operator-one-object-one-owner")
def test_no_object_of_other_kinds_costs_anybody_else(world: World) -> None:
    (node,) = world.nodes("crowd")
    world.nodes("spoilt", agents=False)
    namespace = world.cluster.namespace("crowd")
    user = user_of(world, namespace)
    pods = f"/api/v1/namespaces/{namespace}/pods"
    for name, containers in (
        ("many", [{"name": f"c{number}", "image": "x"} for number in range(2_000)]),
        ("digits", [hostile.asking("memory", "1" * 20_000)]),
        ("power", [hostile.asking("memory", "1e999")]),
        ("sum", [{**hostile.asking("memory", "8E"), "name": f"c{number}"} for number in range(20)]),
    ):
        body: Object = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}}
        user.create(pods, {**body, "spec": {"nodeName": node, "containers": containers}})
    taints = [{"key": f"k{number}", "value": "v", "effect": "NoSchedule"} for number in range(2_000)]
    labels = {f"example.com/l{number}": "v" for number in range(2_000)}
    world.api.patch("/api/v1/nodes/spoilt-0", {"metadata": {"labels": labels}, "spec": {"taints": taints}})
    world.api.patch("/api/v1/nodes/spoilt-0/status", {"status": {"allocatable": {"memory": "9" * 20_000}}})
    gpunode = "/apis/sharepod.dev/v1alpha1/gpunodes/spoilt-0/status"
    gpu = {"uuid": "GPU-x", "index": 0, "model": "x" * 100_000, "memory": 1 << 34, "reason": "y" * 100_000}
    world.api.patch(gpunode, {"status": {"gpus": [gpu | {"shareable": False}]}})
    for wrong in ({"memory": 1e30}, {"memory": (1 << 63) - 1}, {"index": 1 << 40}):
        with pytest.raises(ApiError):
            world.api.patch(gpunode, {"status": {"gpus": [gpu | wrong]}})
    times = {"far": "9999-12-31T23:59:59.999999Z", "near": "0001-01-01T00:00:00.000000Z"}
    for name, renewed in times.items():
        spec = {"holderIdentity": "x" * 10_000, "leaseDurationSeconds": (1 << 31) - 1, "renewTime": renewed}
        lease = {
            "apiVersion": "coordination.k8s.io/v1",
            "kind": "Lease",
            "metadata": {"name": f"sharepod-agent-{name}"},
        }
        world.api.create("/apis/coordination.k8s.io/v1/namespaces/sharepod-system/leases", {**lease, "spec": spec})
    good_ones_run(world, "crowd")
    waits = world.cluster.namespace("waits")
    world.apply(waits, "one", {"request": 0.1}, on="spoilt")
    message = world.condition(waits, "one", "Placed", status="False")
    assert "cannot be read: spec.taints: has 2000 entries" in message
    wait(lambda: world.operator is not None and world.operator.running(), what="the operator")


def test_fields_of_a_manager_that_nest_deep_cost_nobody(world: World) -> None:
    """Any user who may patch an object can write its managedFields, which have no schema, not even in Pods."""
    (node,) = world.nodes("managed")
    namespace = world.cluster.namespace("managed")
    user = user_of(world, namespace)
    world.apply(namespace, "mine", {"request": 0.1}, on="managed")
    world.phase(namespace, "mine", "Running")
    pods = f"/api/v1/namespaces/{namespace}/pods"
    body: Object = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "plain"}}
    user.create(pods, {**body, "spec": {"nodeName": node, "containers": [hostile.asking("cpu", 1)]}})
    fields: Object = {}
    for _ in range(4_000):
        fields = {"f:a": fields}
    entry = {"manager": "x", "operation": "Update", "fieldsType": "FieldsV1", "fieldsV1": {"f:spec": fields}}
    paths = {world.path(namespace, "mine"): "sharepod.dev/v1alpha1", f"{pods}/mine": "v1", f"{pods}/plain": "v1"}
    for path, version in paths.items():
        user.patch(path, {"metadata": {"managedFields": [entry | {"apiVersion": version}]}})
    good_ones_run(world, "managed")
    assert world.sharepod(namespace, "mine")["status"]["phase"] == "Running"
    assert world.row(node, "mine") is not None
    assert "Invalid" not in dict(world.events(namespace, "mine"))
