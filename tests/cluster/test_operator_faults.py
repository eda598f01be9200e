"""An operator that is killed, cut off from the API server, or runs twice: no SharePod is lost, none runs twice, and no
share is assigned twice.
"""

from __future__ import annotations

import signal
import time
from collections import Counter

import pytest
from cluster.operator_world import World, gpu_uuid, wait
from harness.api import Object
from harness.webhook import Webhook

LEASE = "/apis/coordination.k8s.io/v1/namespaces/sharepod-system/leases/sharepod-operator"


def kill(world: World) -> None:
    assert world.operator is not None
    world.operator.signal(signal.SIGKILL)
    world.operator.wait(10)


def forbid_pods(world: World, namespace: str) -> str:
    """Prevent the creation of Pods in this namespace. Return the path of the object to delete to allow it again."""
    path = f"/api/v1/namespaces/{namespace}/resourcequotas"
    body = {"apiVersion": "v1", "kind": "ResourceQuota", "metadata": {"name": "none"}, "spec": {"hard": {"pods": "0"}}}
    world.api.create(path, body)
    world.cluster.wait_for(f"{path}/none", lambda seen: (seen or {}).get("status", {}).get("hard"), what="the quota")
    return f"{path}/none"


def assert_kept(world: World, nodes: list[str], namespaces: list[str]) -> None:
    """Assert that no GPU is over-committed, no tenant has two rows, and each Pod is on the node and the GPUs of its
    row."""
    taken: Counter[str] = Counter()
    rows: dict[str, tuple[str, Object]] = {}
    for node in nodes:
        for row in world.rows(node):
            assert row["id"] not in rows, f"{row['podName']} has two rows"
            rows[row["id"]] = (node, row)
            for gpu in row["gpus"]:
                taken[gpu] += row["requestMilli"]
    assert not {gpu: milli for gpu, milli in taken.items() if milli > 1000}
    for namespace in namespaces:
        for pod in world.cluster.pods(namespace):
            if pod["spec"].get("schedulingGates"):
                continue
            node, row = rows[pod["metadata"]["ownerReferences"][0]["uid"]]
            assert pod["spec"]["nodeName"] == node
            assert row["podUID"] == pod["metadata"]["uid"]
            assert pod["metadata"]["annotations"]["sharepod.dev/gpus"] == ",".join(row["gpus"])


@pytest.mark.promise("operator-crash")
def test_killed_before_its_pod_can_be_made_the_pod_appears_once(world: World) -> None:
    (node,) = world.nodes("between")
    namespace = world.cluster.namespace("between")
    quota = forbid_pods(world, namespace)
    world.apply(namespace, "one", {"request": 0.4}, on="between")
    world.condition(namespace, "one", "PodReady", status="False", reason="PodForbidden")
    kill(world)
    assert world.pod(namespace, "one") is None
    assert world.rows(node) == []
    world.api.delete(quota)
    world.start_operator()
    seen = world.phase(namespace, "one", "Running")
    pods = world.cluster.pods(namespace)
    assert [pod["metadata"]["uid"] for pod in pods] == [seen["status"]["podUID"]]
    assert len(world.rows(node)) == 1


@pytest.mark.promise("operator-crash")
def test_killed_between_ledger_and_gate_the_same_pod_goes_on(world: World) -> None:
    (node,) = world.nodes("gate")
    namespace = world.cluster.namespace("gate")
    with Webhook(world.cluster, namespace, operations=["UPDATE"], timeout=30) as webhook:
        webhook.hold()  # the patch that opens the gate must stay unanswered; a refusal would remove the row
        world.apply(namespace, "one", {"request": 0.4}, on="gate")
        wait(lambda: webhook.count("one"), what="the gate's opening to be asked for")
        kill(world)
        webhook.fail()  # calls of the killed operator must not take effect later
        wait(lambda: webhook.answered == webhook.count(), what="its answers")
    made = world.pod(namespace, "one")
    assert made is not None
    row = world.row(node, "one")
    assert row is not None
    assert row["podUID"] == made["metadata"]["uid"]
    assert made["spec"]["schedulingGates"] == [{"name": "sharepod.dev/share"}]
    world.start_operator()
    seen = world.phase(namespace, "one", "Running")
    assert seen["status"]["podUID"] == made["metadata"]["uid"]
    assert len(world.rows(node)) == 1


@pytest.mark.promise("operator-no-second-run")
def test_a_pod_lost_while_no_operator_ran_is_not_made_again(world: World) -> None:
    (node,) = world.nodes("unserved")
    namespace = world.cluster.namespace("unserved")
    world.apply(namespace, "one", {"request": 0.4}, on="unserved")
    world.phase(namespace, "one", "Running")
    kill(world)
    world.api.delete(f"/api/v1/namespaces/{namespace}/pods/one", grace=0)
    wait(lambda: world.pod(namespace, "one") is None, what="the pod's end")
    world.start_operator()
    world.phase(namespace, "one", "Failed")
    world.condition(namespace, "one", "PodReady", status="False", reason="PodLost")
    wait(lambda: not world.rows(node), what="an empty ledger")
    assert world.pod(namespace, "one") is None


def test_what_is_deleted_while_the_watch_is_cut_is_noticed(world: World) -> None:
    (node,) = world.nodes("cut")
    namespace = world.cluster.namespace("cut")
    for name in ("stays", "goes", "pod-goes"):
        world.apply(namespace, name, {"request": 0.2}, on="cut")
        world.phase(namespace, name, "Running")
    assert world.operator is not None
    world.operator.signal(signal.SIGSTOP)
    try:
        world.delete(namespace, "goes")
        wait(lambda: world.pod(namespace, "goes") is None, what="the pod's end")
        world.api.delete(f"/api/v1/namespaces/{namespace}/pods/pod-goes", grace=0)
        world.cluster.restart_apiserver()
    finally:
        world.operator.signal(signal.SIGCONT)
    wait(lambda: {row["podName"] for row in world.rows(node)} == {"stays"}, what="both releases")
    world.phase(namespace, "pod-goes", "Failed")
    assert world.sharepod(namespace, "stays")["status"]["phase"] == "Running"


def test_the_api_server_may_go_and_come_back(world: World) -> None:
    world.nodes("outage")
    namespace = world.cluster.namespace("outage")
    world.apply(namespace, "before", {"request": 0.2}, on="outage")
    world.phase(namespace, "before", "Running")
    world.cluster.restart_apiserver(down=4.0)
    world.apply(namespace, "after", {"request": 0.2}, on="outage")
    wait(lambda: world.pod(namespace, "after"), what="its pod")  # kube-scheduler needs longer to return
    assert world.operator is not None
    assert world.operator.running()


@pytest.mark.promise("operator-takeover")
def test_of_two_operators_one_acts_and_the_other_takes_over(world: World) -> None:
    nodes = world.nodes("pair", 2)
    namespace = world.cluster.namespace("pair")
    first = world.operator
    assert first is not None
    second = world.start_operator("second")
    try:
        wait(lambda: world.ready("second") and second.running(), what="a standby")
        for number in range(6):
            world.apply(namespace, f"a{number}", {"request": 0.4}, on="pair")
        wait(lambda: len(world.cluster.pods(namespace)) == 6, what="six pods")
        assert world.metric("sharepod_operator_leader") == 1.0
        assert world.metric("sharepod_operator_leader", "second") == 0.0
        wait(lambda: world.metric("sharepod_operator_pods_created_total") >= 6, what="six Pods counted")

        first.signal(signal.SIGKILL)
        first.wait(10)
        world.apply(namespace, "late", {"request": 0.4}, on="pair")
        world.phase(namespace, "late", "Running")
        assert world.metric("sharepod_operator_leader", "second") == 1.0
        wait(
            lambda: all(pod["status"].get("phase") == "Running" for pod in world.cluster.pods(namespace)),
            what="Running",
        )
        assert_kept(world, nodes, [namespace])
        transitions = world.api.get(LEASE)["spec"]["leaseTransitions"]
        assert transitions >= 1
    finally:
        second.stop()
        world.start_operator()
        wait(lambda: world.metric("sharepod_operator_leader") == 1.0, what="the first to lead again")


@pytest.mark.promise("operator-one-leads")
def test_a_stopped_leader_that_wakes_up_late_writes_nothing_before_it_leads_again(world: World) -> None:
    (node,) = world.nodes("late")
    namespace = world.cluster.namespace("late")
    sleeper = world.operator
    assert sleeper is not None
    second = world.start_operator("relief")
    try:
        wait(lambda: world.ready("relief"), what="a warm standby")
        sleeper.signal(signal.SIGSTOP)
        world.apply(namespace, "one", {"request": 0.6}, on="late")
        world.phase(namespace, "one", "Running")
        world.apply(namespace, "two", {"request": 0.6}, on="late")
        world.phase(namespace, "two", "Running")
        sleeper.signal(signal.SIGCONT)
        for number in range(4):
            world.apply(namespace, f"more{number}", {"request": 0.2}, on="late")
        wait(lambda: len(world.rows(node)) == 6, what="six rows")
        wait(lambda: len(world.cluster.pods(namespace)) == 6, what="six pods")
        assert world.metric("sharepod_operator_leader") == 0.0
        wait(lambda: world.metric("sharepod_operator_pods_created_total", "relief") == 6, what="six Pods counted")
        wait(lambda: all(pod["spec"].get("nodeName") for pod in world.cluster.pods(namespace)), what="all bound")
        assert_kept(world, [node], [namespace])
    finally:
        sleeper.signal(signal.SIGCONT)
        second.stop()
        wait(lambda: world.metric("sharepod_operator_leader") == 1.0, what="the first to lead again")
        world.operator = sleeper


@pytest.mark.promise("operator-no-over-commit")
def test_two_leaders_never_overcommit_a_gpu(world: World) -> None:
    """Each operator holds a Lease in a namespace of its own, so both lead, as if leader election did not exist."""
    elsewhere = world.cluster.namespace("elsewhere")
    body = {
        "apiVersion": "rbac.authorization.k8s.io/v1",
        "metadata": {"name": "sharepod-operator"},
        "kind": "Role",
        "rules": [
            {
                "apiGroups": ["coordination.k8s.io"],
                "resources": ["leases"],
                "verbs": ["get", "list", "watch", "create", "update"],
            }
        ],
    }
    rbac = f"/apis/rbac.authorization.k8s.io/v1/namespaces/{elsewhere}"
    world.api.create(f"{rbac}/roles", body)
    binding: Object = {
        "apiVersion": "rbac.authorization.k8s.io/v1",
        "kind": "RoleBinding",
        "metadata": {"name": "sharepod-operator"},
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": "sharepod-operator"},
        "subjects": [{"kind": "ServiceAccount", "name": "sharepod-operator", "namespace": "sharepod-system"}],
    }
    world.api.create(f"{rbac}/rolebindings", binding)
    nodes = world.nodes("two", 3)
    namespace = world.cluster.namespace("two")
    first = world.operator
    second = world.start_operator("rival", SHAREPOD_NAMESPACE=elsewhere)
    try:
        world.agents.also_in(elsewhere)
        wait(lambda: world.metric("sharepod_operator_leader", "rival") == 1.0, what="a second leader")
        wait(lambda: world.metric("sharepod_operator_agents_away", "rival") == 0.0, what="it sees the agents")
        for number in range(24):
            world.apply(namespace, f"p{number}", {"request": 0.4}, on="two")
            if number % 6 == 5:
                world.delete(namespace, f"p{number - 3}")
        rooms = len(nodes) * 2 * 2
        wait(lambda: sum(len(world.rows(node)) for node in nodes) >= rooms, what="full GPUs")
        deadline = time.monotonic() + 4
        while time.monotonic() < deadline:
            taken: Counter[str] = Counter()
            for node in nodes:
                for row in world.rows(node):
                    taken.update(dict.fromkeys(row["gpus"], row["requestMilli"]))
            assert all(milli <= 1000 for milli in taken.values()), [(node, world.rows(node)) for node in nodes]
            time.sleep(0.2)
        assert world.metric("sharepod_operator_ledger_writes_total", "rival") > 0
    finally:
        second.stop()
        world.operator = first

    def settled() -> bool:
        pods = [pod for pod in world.cluster.pods(namespace) if not pod["spec"].get("schedulingGates")]
        rows = {row["id"] for node in nodes for row in world.rows(node)}
        owners = {
            pod["metadata"]["ownerReferences"][0]["uid"] for pod in pods if "deletionTimestamp" not in pod["metadata"]
        }
        return owners == rows and all(pod["spec"].get("nodeName") for pod in pods)

    wait(settled, what="a row for each pod and a pod for each row")
    assert_kept(world, nodes, [namespace])
    assert {gpu for node in nodes for row in world.rows(node) for gpu in row["gpus"]} == {
        gpu_uuid(node, index) for node in nodes for index in range(2)
    }
