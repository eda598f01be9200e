"""Nodes whose GPUs belong to NVIDIA's device plugin, with the real API server and scheduler. The test plays kubelet and
agent.
"""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor

import pytest
from cluster.operator_world import GPUNODES, World, wait
from harness.api import ApiError, Object
from harness.installation import NAMESPACE
from sharepod.api.objects import HOLDER_LABEL

GPU = "nvidia.com/gpu"
ROUNDS = 6


def plugin_node(world: World, prefix: str, gpus: int = 2) -> str:
    """Create a node of pool `device-plugin` whose plugin offers this number of GPUs."""
    (name,) = world.nodes(prefix, pool="device-plugin", agents=False)
    plugin_offers(world, name, gpus)
    world.agents.start(name)
    return name


def plugin_offers(world: World, node: str, gpus: int) -> None:
    """Set the number of GPUs that the device plugin of a node offers. 0: the plugin was removed from the node."""
    amounts = {GPU: str(gpus)}
    world.api.patch(f"/api/v1/nodes/{node}/status", {"status": {"capacity": amounts, "allocatable": amounts}})


def native(world: World, namespace: str, name: str, on: str) -> str:
    """Create a Pod that requests a whole GPU of the plugin; return its path."""
    limits = {"limits": {GPU: "1"}}
    container = {"name": "main", "image": "test", "resources": limits}
    spec = {"nodeSelector": {"test": on}, "containers": [container], "terminationGracePeriodSeconds": 0}
    body = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "spec": spec}
    world.api.create(f"/api/v1/namespaces/{namespace}/pods", body)
    return f"/api/v1/namespaces/{namespace}/pods/{name}"


def holders(world: World, node: str) -> list[Object]:
    rows: list[Object] = world.api.get(f"{GPUNODES}/{node}")["spec"].get("holders") or []
    return rows


def holder_pods(world: World, node: str) -> list[Object]:
    pods = world.cluster.pods(NAMESPACE, selector=HOLDER_LABEL)
    return [pod for pod in pods if pod["spec"].get("nodeName") == node]


@pytest.mark.promise("placement-holder", "placement-holder-idle", "placement-device-plugin")
def test_sharepods_share_a_gpu_that_a_holder_has_and_it_goes_back_when_they_have_ended(world: World) -> None:
    node = plugin_node(world, "plug")
    namespace = world.cluster.namespace("plug")
    world.apply(namespace, "one", {"request": 0.4}, on="plug")
    world.phase(namespace, "one", "Running")
    world.apply(namespace, "two", {"request": 0.6}, on="plug")
    world.phase(namespace, "two", "Running")
    (holder,) = holders(world, node)
    assert holder["state"] == "Held"
    assert {gpu for row in world.rows(node) for gpu in row["gpus"]} == {holder["uuid"]}
    (pod,) = holder_pods(world, node)
    assert (pod["spec"]["priority"], pod["spec"]["preemptionPolicy"]) == (1_000_000_000, "Never")
    # The GPU of a Pod with a whole GPU stays assigned. So a holder takes the other GPU.
    first, second = (native(world, namespace, name, "plug") for name in ("whole", "waits"))
    world.cluster.wait_for(first, lambda seen: seen and seen["spec"].get("nodeName"), what="a whole GPU")
    world.apply(namespace, "three", {"request": 0.5}, on="plug")
    assert "with NVIDIA's device plugin and no holder" in world.condition(namespace, "three", "Placed", status="False")
    for name in ("one", "two", "three"):
        world.delete(namespace, name)
    wait(lambda: not holders(world, node) and not holder_pods(world, node), what="the GPU is returned")
    world.cluster.wait_for(second, lambda seen: seen and seen["spec"].get("nodeName"), what="the returned GPU is used")


@pytest.mark.promise("placement-holder-withdrawn", "placement-holder-demand")
def test_a_gpu_that_a_holder_and_a_native_pod_want_at_once_goes_to_one_and_then_to_the_other(world: World) -> None:
    node = plugin_node(world, "race", gpus=1)
    namespace = world.cluster.namespace("race")
    winners = set()
    for number in range(ROUNDS):
        name, path = f"one-{number}", f"/api/v1/namespaces/{namespace}/pods/whole-{number}"
        ask = [
            lambda name=name: world.apply(namespace, name, {"request": 0.4}, on="race"),
            lambda number=number: native(world, namespace, f"whole-{number}", "race"),
        ]
        # SharePod and native Pod are created together; from round to round the other one begins
        with ThreadPoolExecutor(2) as both:
            list(both.map(lambda one: one(), ask if number % 2 else reversed(ask)))

        def bound(path: str = path) -> bool:
            return bool(world.api.get(path)["spec"].get("nodeName"))

        wait(lambda: bound() or _held(world, node), what="an owner of the GPU")
        if bound():
            assert world.condition(namespace, name, "Placed", status="False")
            wait(lambda: not holder_pods(world, node), what="the holder withdrawn")
            assert not _held(world, node)
            winners.add("native")
            world.api.delete(path, grace=0)
            world.phase(namespace, name, "Running")
            world.delete(namespace, name)
        else:
            world.phase(namespace, name, "Running")
            assert not bound()
            winners.add("holder")
            world.delete(namespace, name)
            wait(bound, what="the GPU for the native pod")
            world.api.delete(path, grace=0)
        wait(lambda: not holders(world, node) and not holder_pods(world, node), what="no holder")
    print(f"first in {ROUNDS} rounds: {sorted(winners)}")


def _held(world: World, node: str) -> bool:
    return any(row["state"] == "Held" for row in holders(world, node))


@pytest.mark.promise("placement-pool-change")
def test_a_node_goes_from_pool_to_pool_and_back_while_its_sharepods_run_to_their_ends(world: World) -> None:
    (node,) = world.nodes("moves")
    namespace = world.cluster.namespace("moves")

    def relabel(pool: str) -> None:
        world.api.patch(f"/api/v1/nodes/{node}", {"metadata": {"labels": {"sharepod.dev/pool": pool}}})

    def pool() -> str:
        return str(world.api.get(f"{GPUNODES}/{node}")["spec"]["pool"])

    def waits_for_the_change(name: str) -> None:
        world.apply(namespace, name, {"request": 0.4}, on="moves")
        wait(
            lambda: "leaves pool" in world.condition(namespace, name, "Placed", status="False"),
            what=f"the reason why {name} waits",
        )

    world.apply(namespace, "one", {"request": 0.4}, on="moves")
    world.phase(namespace, "one", "Running")
    relabel("device-plugin")
    waits_for_the_change("two")
    assert pool() == "dedicated"
    world.phase(namespace, "one", "Running")
    world.delete(namespace, "one")
    wait(lambda: pool() == "device-plugin", what="the other pool")
    plugin_offers(world, node, 2)
    world.phase(namespace, "two", "Running")
    assert _held(world, node)

    plugin_offers(world, node, 0)
    relabel("dedicated")
    waits_for_the_change("three")
    assert pool() == "device-plugin"
    world.phase(namespace, "two", "Running")
    assert _held(world, node)
    world.delete(namespace, "two")
    world.phase(namespace, "three", "Running")
    assert (pool(), holders(world, node), holder_pods(world, node)) == ("dedicated", [], [])
    world.delete(namespace, "three")


@pytest.mark.promise("placement-holder-crash")
def test_an_operator_that_is_killed_leaves_one_holder_for_a_sharepod_and_none_after_it(world: World) -> None:
    node = plugin_node(world, "kill")
    namespace = world.cluster.namespace("kill")
    world.apply(namespace, "one", {"request": 0.4}, on="kill")
    for number, seen in enumerate((lambda: holder_pods(world, node), lambda: holders(world, node))):
        wait(seen, what="a trace of a holder", interval=0.005)
        assert world.operator is not None
        world.operator.stop(grace=0)
        world.start_operator(f"after-{number}")
    world.phase(namespace, "one", "Running")
    wait(lambda: [row["state"] for row in holders(world, node)] == ["Held"], what="one holder")
    world.delete(namespace, "one")
    wait(lambda: [row["state"] for row in holders(world, node)] == ["Releasing"], what="a release", interval=0.005)
    assert world.operator is not None
    world.operator.stop(grace=0)
    world.start_operator("last")
    wait(lambda: not holders(world, node) and not holder_pods(world, node), what="the GPU is returned")


@pytest.mark.promise("security-holders")
def test_nobody_else_makes_or_deletes_holders(world: World) -> None:
    node = plugin_node(world, "guard")
    namespace = world.cluster.namespace("guard")
    world.apply(namespace, "one", {"request": 0.4}, on="guard")
    world.phase(namespace, "one", "Running")
    (pod,) = holder_pods(world, node)
    name = pod["metadata"]["name"]
    world.cluster.kubectl("create", "rolebinding", "eve", "--clusterrole=edit", "--user=eve", "-n", NAMESPACE)
    eve = world.cluster.user_kubeconfig("eve")

    def refused(*command: str, text: str | None = None) -> str:
        done = world.cluster.kubectl(*command, "-n", NAMESPACE, kubeconfig=eve, check=False, input=text)
        assert done.returncode != 0
        return done.stderr

    assert "holds a GPU of NVIDIA's device plugin" in refused("delete", "pod", name)
    eviction = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": name, "namespace": NAMESPACE}}
    path = f"/api/v1/namespaces/{NAMESPACE}/pods/{name}/eviction"
    answer = refused("create", "--raw", path, "-f", "-", text=json.dumps(eviction))
    assert "holds a GPU of NVIDIA's device plugin" in answer
    assert "stays there" in refused("label", "pod", name, f"{HOLDER_LABEL}-")
    answer = refused("patch", "pod", name, "--patch", '{"spec": {"activeDeadlineSeconds": 1}}')
    assert "is immutable" in answer
    assert "is immutable" in refused("set", "image", f"pod/{name}", "holder=test:other")
    forged = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "forged", "labels": {HOLDER_LABEL: "true"}}}
    body = json.dumps(forged | {"spec": {"containers": [{"name": "main", "image": "test"}]}})
    assert "operator's own pods alone" in refused("create", "-f", "-", text=body)
    with pytest.raises(ApiError) as evicted:
        world.cluster.api_for(world.cluster.service_account_token(NAMESPACE, "sharepod-agent", bound_node=node)).delete(
            f"/api/v1/namespaces/{NAMESPACE}/pods/{name}"
        )
    assert evicted.value.code == 403
    assert [row["state"] for row in holders(world, node)] == ["Held"]
