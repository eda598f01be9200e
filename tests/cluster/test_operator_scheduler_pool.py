"""Nodes of pool `scheduler`: the real kube-scheduler allocates from the slices, and the ledger follows. The operator
holds each share until the agent has reported that no process is left."""

from __future__ import annotations

import pytest
from cluster.claims_world import (
    CLAIMS,
    FINALIZER,
    allocation,
    claim_of,
    claim_path,
    make_claim,
    make_pod,
    make_template,
    row_of,
    runs,
)
from cluster.operator_world import GIB, World, gpu_uuid, wait
from cluster.scheduler_world import (
    CLASS,
    SliceAgent,
    holds,
    is_free,
    make_scheduled,
    most_reserved,
    pool_of_scheduler,
    relabel,
)
from harness.api import ApiError
from harness.cluster import wait_until

WORLD_HAS_CLAIMS = True
"""Claims are installed in the file's world."""


def refused(world: World, namespace: str, name: str) -> bool:
    conditions = ((world.pod(namespace, name) or {}).get("status") or {}).get("conditions") or []
    return any("cannot allocate all claims" in (item.get("message") or "") for item in conditions)


@pytest.mark.promise("operator-scheduler-pool-row")
def test_two_shares_of_one_gpu_run_and_a_third_waits_for_the_end_of_one(world: World) -> None:
    node = pool_of_scheduler(world, "two", gpus=1).node
    namespace = world.cluster.namespace("two")
    make_scheduled(world, namespace, "small", time_milli=400, memory="4Gi")
    make_template(world, namespace, "large", time_milli=600, memory="8Gi", deviceClassName=CLASS)
    make_pod(world, namespace, "one", on="two", claims=("small",))
    make_pod(world, namespace, "two", on="two", template="large")
    for name in ("one", "two"):
        runs(world, namespace, name)
    wait(lambda: len(world.rows(node)) == 2, what="both shares are in the ledger")
    row = row_of(world, node, "small")
    assert row is not None
    assert row["id"] == (claim_of(world, namespace, "small") or {})["metadata"]["uid"]
    assert (row["requestMilli"], row["limitMilli"], row["memory"]) == (400, 1000, 4 * GIB)
    assert row["gpus"] == [gpu_uuid(node, 0)]
    assert most_reserved(world, node) == 1000
    wait(lambda: holds(world, namespace, "small") == [node], what="the operator holds the claim")
    make_scheduled(world, namespace, "next", time_milli=300)
    make_pod(world, namespace, "three", on="two", claims=("next",))
    wait(lambda: refused(world, namespace, "three"), what="the third waits")
    world.kubelets.finish(namespace, "one")
    runs(world, namespace, "three")
    wait(lambda: is_free(world, namespace, "small"), what="the first claim is free")
    assert row_of(world, node, "small") is None
    make_pod(world, namespace, "four", on="two", claims=("small",))
    wait(lambda: refused(world, namespace, "four"), what="it has no room again: 300 are taken")


@pytest.mark.promise("operator-scheduler-pool-hold")
def test_after_a_forced_deletion_kube_scheduler_gives_the_share_to_nobody_until_nothing_is_left(world: World) -> None:
    node = pool_of_scheduler(world, "forcibly", gpus=1).node
    namespace = world.cluster.namespace("forcibly")
    make_template(world, namespace, "share", time_milli=900, deviceClassName=CLASS)
    make_pod(world, namespace, "one", on="forcibly", template="share")
    runs(world, namespace, "one")
    wait(lambda: world.rows(node), what="the share is in the ledger")
    (row,) = world.rows(node)
    name = row["claim"]["name"]
    wait(lambda: holds(world, namespace, name) == [node], what="the operator holds the claim")
    world.agents.leave_behind(row["id"])
    world.api.delete(f"/api/v1/namespaces/{namespace}/pods/one", grace=0)
    wait(lambda: [item["state"] for item in world.rows(node)] == ["Releasing"], what="the row is being released")
    make_pod(world, namespace, "two", on="forcibly", template="share")
    wait(lambda: refused(world, namespace, "two"), what="the next waits")
    assert allocation(claim_of(world, namespace, name)) is not None
    assert world.operator is not None
    world.operator.stop(grace=0)
    world.start_operator()
    world.agents.end(row["id"])
    runs(world, namespace, "two")
    wait(lambda: claim_of(world, namespace, name) is None, what="the claim is deleted")
    wait(lambda: [item["id"] != row["id"] for item in world.rows(node)] == [True], what="the next one's row alone")


def test_an_operator_that_is_killed_at_any_moment_leaves_neither_rows_nor_holds(world: World) -> None:
    agent = pool_of_scheduler(world, "killed")
    namespace = world.cluster.namespace("killed")
    names = [f"pod{number}" for number in range(8)]
    make_template(world, namespace, "share", time_milli=240, deviceClassName=CLASS)
    for number, name in enumerate(names):
        make_pod(world, namespace, name, on="killed", template="share")
        if number % 3 == 2:
            assert world.operator is not None
            world.operator.stop(grace=0)
            world.start_operator()
    for name in names:
        runs(world, namespace, name)
    wait(lambda: len(world.rows(agent.node)) == len(names), what="a row for each")
    assert most_reserved(world, agent.node) <= 1000
    for number, name in enumerate(names):
        world.api.delete(f"/api/v1/namespaces/{namespace}/pods/{name}", grace=0)
        if number % 3 == 1:
            assert world.operator is not None
            world.operator.stop(grace=0)
            world.start_operator()
    wait(lambda: not world.rows(agent.node), what="no row is left")
    wait(lambda: not world.api.get(claim_path(namespace))["items"], what="no claim is left")


def test_shares_stay_while_the_agent_is_away_and_others_follow_once_it_is_back(world: World) -> None:
    agent = pool_of_scheduler(world, "away", gpus=1)
    namespace = world.cluster.namespace("away")
    for name, milli in (("first", 400), ("second", 400)):
        make_scheduled(world, namespace, name, time_milli=milli)
    make_pod(world, namespace, "one", on="away", claims=("first",))
    runs(world, namespace, "one")
    wait(lambda: row_of(world, agent.node, "first"), what="its row")
    world.agents.stop(agent.node)
    agent.remove()
    make_pod(world, namespace, "two", on="away", claims=("second",))
    wait(lambda: refused(world, namespace, "two"), what="nothing is published")
    assert row_of(world, agent.node, "first") is not None
    world.agents.start(agent.node)
    agent.publish()
    runs(world, namespace, "two")
    wait(lambda: row_of(world, agent.node, "second"), what="its row")
    assert most_reserved(world, agent.node) == 800


@pytest.mark.promise("operator-scheduler-pool-one-allocator")
def test_the_operator_places_nothing_where_kube_scheduler_allocates_and_says_what_to_use(world: World) -> None:
    node = pool_of_scheduler(world, "alone").node
    namespace = world.cluster.namespace("alone")
    world.apply(namespace, "share", {"request": 0.3}, on="alone")
    make_claim(world, namespace, "claim", time_milli=300)
    make_pod(world, namespace, "plain", on="alone", claims=("claim",))
    answer = world.condition(namespace, "share", "Placed", status="False", reason="NeverFits")
    assert "pool scheduler, where kube-scheduler gives shares away (use a ResourceClaim of class scheduler" in answer
    world.event(namespace, "plain", note="pool scheduler")
    assert world.rows(node) == []


@pytest.mark.promise("operator-scheduler-pool-one-allocator")
def test_a_node_that_changes_its_pool_has_one_allocator_at_a_time(world: World) -> None:
    """While the pool label changes back and forth, Pods with claims of both classes are created. kube-scheduler
    allocates claims of one class, the operator claims of the other."""
    agent = pool_of_scheduler(world, "both", gpus=1)
    node, namespace = agent.node, world.cluster.namespace("both")
    make_template(world, namespace, "scheduled", time_milli=600, deviceClassName=CLASS)
    make_template(world, namespace, "placed", time_milli=600)
    most = 0

    def pools_are(pool: str) -> bool:
        nonlocal most
        most = max(most, most_reserved(world, node))
        return bool(agent.spec()["pool"] == pool)

    for turn in range(3):
        for door in ("scheduled", "placed"):
            make_pod(world, namespace, f"{door}{turn}", on="both", template=door)
        runs(world, namespace, f"scheduled{turn}")
        relabel(world, node, "dedicated")
        agent.leave()
        assert pools_are("scheduler"), "its tenant runs"
        world.kubelets.finish(namespace, f"scheduled{turn}")
        wait(lambda: pools_are("dedicated"), what="the node is the operator's")
        runs(world, namespace, f"placed{turn}")
        relabel(world, node, "scheduler")
        wait(lambda: pools_are("dedicated"), what="its tenant runs")
        world.kubelets.finish(namespace, f"placed{turn}")
        wait(lambda: pools_are("scheduler"), what="the node is kube-scheduler's")
        agent.publish()
    assert most <= 1000


def test_a_node_whose_label_says_its_pool_again_stays_in_it(world: World) -> None:
    agent = pool_of_scheduler(world, "again")
    relabel(world, agent.node, "dedicated")
    wait(lambda: agent.spec().get("leaving"), what="the node leaves its pool")
    relabel(world, agent.node, "scheduler")
    wait(lambda: not agent.spec().get("leaving"), what="the node stays in its pool")
    assert agent.spec()["pool"] == "scheduler"


@pytest.mark.promise("operator-scheduler-pool-over-commit")
def test_what_somebody_else_has_given_away_too_is_not_entered_and_told(world: World) -> None:
    agent: SliceAgent = pool_of_scheduler(world, "meddled", gpus=1)
    namespace = world.cluster.namespace("meddled")
    make_scheduled(world, namespace, "first", time_milli=700)
    make_pod(world, namespace, "one", on="meddled", claims=("first",))
    runs(world, namespace, "one")
    wait(lambda: row_of(world, agent.node, "first"), what="its row")
    given = allocation(claim_of(world, namespace, "first"))
    make_scheduled(world, namespace, "second", time_milli=700)
    make_pod(world, namespace, "two", on="meddled", claims=("second",))
    wait(lambda: refused(world, namespace, "two"), what="kube-scheduler has no room")
    made = world.api.patch(claim_path(namespace, "second"), {"metadata": {"finalizers": [FINALIZER]}})
    version = {"resourceVersion": made["metadata"]["resourceVersion"]}
    patch = {"metadata": version, "status": {"allocation": given}}
    world.api.patch(f"{claim_path(namespace, 'second')}/status", patch)
    world.event(namespace, "second", note="gives no share yet")
    assert row_of(world, agent.node, "second") is None
    world.kubelets.finish(namespace, "one")
    wait(lambda: row_of(world, agent.node, "second"), what="it is entered once there is room")


@pytest.mark.promise("operator-scheduler-pool-refused")
@pytest.mark.parametrize(
    ("annotations", "spec", "answer"),
    [
        ({"sharepod.dev/gpu-affinity": "a"}, {}, "sharepod.dev/gpu-affinity.: is not for claims of class scheduler"),
        ({}, {"adminAccess": True}, "goes past every share"),
        ({}, {"memory": None}, "write both timeMilli and memory"),
        (
            {},
            {"capacity": {"requests": {"timeMilli": "1001", "memory": "1Gi"}}},
            "1001 is not a whole number of thousandths of one GPU",
        ),
        (
            {},
            {"capacity": {"requests": {"timeMilli": "500", "limitMilli": "400", "memory": "1Gi"}}},
            "is less than timeMilli",
        ),
    ],
)
def test_what_kube_scheduler_cannot_give_is_refused_at_apply(
    world: World, annotations: dict[str, str], spec: dict[str, object], answer: str
) -> None:
    if spec.get("adminAccess"):
        world.cluster.kubectl(
            "label", "namespace", "default", "resource.kubernetes.io/admin-access=true", "--overwrite"
        )
    wait_until(lambda: policy_refuses(world), what="the policy on claims is enforced", timeout=30)
    with pytest.raises(ApiError, match=answer):
        make_scheduled(world, "default", "refused", annotations=annotations, **spec)


def policy_refuses(world: World) -> bool:
    """Return whether the API server enforces the policy on claims yet; it does so shortly after the policy's
    creation."""
    try:
        make_scheduled(world, "default", "tried", annotations={"sharepod.dev/gpu-affinity": "a"})
    except ApiError as error:
        return "is not for claims of class scheduler" in str(error)
    return False


def two_of_scheduler(world: World, prefix: str) -> dict[str, SliceAgent]:
    """Create two nodes of pool `scheduler` with one GPU each; return their slices by node."""
    agents = {node: SliceAgent(world, node, 1) for node in world.nodes(prefix, 2, pool="scheduler")}
    for agent in agents.values():
        agent.publish()
    return agents


@pytest.mark.promise("operator-scheduler-pool-elsewhere")
@pytest.mark.parametrize("lost", ["avoided", "deleted"])
def test_the_next_pod_on_a_claim_gets_another_node_where_the_first_one_is_in_its_way(world: World, lost: str) -> None:
    """The claim is named, as in a Deployment with one replica, so the next Pod waits before the first Pod is
    deleted."""
    agents, namespace = two_of_scheduler(world, lost), world.cluster.namespace(lost)
    make_scheduled(world, namespace, "share", time_milli=900)
    make_pod(world, namespace, "one", on=lost, claims=("share",))
    first = runs(world, namespace, "one")["spec"]["nodeName"]
    wait(lambda: holds(world, namespace, "share") == [first], what="the operator holds the claim")
    if lost == "deleted":
        agents[first].remove()
        world.api.delete(f"/api/v1/nodes/{first}")
    elsewhere = {"matchFields": [{"key": "metadata.name", "operator": "NotIn", "values": [first]}]}
    required = {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [elsewhere]}}
    make_pod(world, namespace, "two", on=lost, claims=("share",), affinity={"nodeAffinity": required})
    world.api.delete(f"/api/v1/namespaces/{namespace}/pods/one", grace=0)
    second = runs(world, namespace, "two")["spec"]["nodeName"]
    assert second != first
    wait(lambda: row_of(world, second, "share"), what="its row")


@pytest.mark.promise("operator-scheduler-pool-device-plugin")
def test_while_the_device_plugin_gives_gpus_away_too_no_share_is_entered(world: World) -> None:
    node, namespace = pool_of_scheduler(world, "twice", gpus=1).node, world.cluster.namespace("twice")

    def offers(count: int) -> None:
        amounts = {"nvidia.com/gpu": str(count)}
        body = {"status": {"capacity": amounts, "allocatable": amounts}}
        world.api.patch(f"/api/v1/nodes/{node}/status", body)

    offers(2)
    make_scheduled(world, namespace, "share", time_milli=300)
    make_pod(world, namespace, "one", on="twice", claims=("share",))
    world.event(namespace, "share", note="device plugin")
    assert world.rows(node) == []
    offers(0)
    wait(lambda: row_of(world, node, "share"), what="it is entered once the plugin has left")


def test_a_share_by_a_class_of_the_administrators_own_begins_and_ends_as_any_other(world: World) -> None:
    node, namespace = pool_of_scheduler(world, "own", gpus=1).node, world.cluster.namespace("own")
    selector = {"cel": {"expression": 'device.driver == "scheduler.sharepod.dev"'}}
    body = {"apiVersion": "resource.k8s.io/v1", "kind": "DeviceClass", "metadata": {"name": "own.example.com"}}
    world.api.create(f"{CLAIMS}/deviceclasses", {**body, "spec": {"selectors": [selector]}})
    make_claim(world, namespace, "share", time_milli=300, deviceClassName="own.example.com")
    make_pod(world, namespace, "one", on="own", claims=("share",))
    runs(world, namespace, "one")
    wait(lambda: row_of(world, node, "share"), what="its row")
    world.api.delete(claim_path(namespace, "share"))
    world.kubelets.finish(namespace, "one")
    wait(lambda: claim_of(world, namespace, "share") is None, what="the claim is deleted")
    wait(lambda: not world.rows(node), what="the row is removed")
