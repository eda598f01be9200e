"""The agent on a real API server. It reads the ledger, and writes status, Lease and volumes. The test plays the kubelet
over the agent's sockets.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable, Iterator
from datetime import datetime
from typing import Any

import grpc
import pytest
import yaml
from cluster.agent_world import GPUNODES, GPUS, LEASES, OneNode, one_node, row
from cluster.claims_world import serves_claims
from harness.api import ApiError, Object
from harness.cluster import Cluster, suppress_reason, wait_until
from harness.installation import MANIFESTS
from sharepod.agent.cluster.device_slice import slice_name
from sharepod.agent.cluster.own_node_check import OwnNodeCheck
from sharepod.agent.cluster.status_report import Readiness
from sharepod.agent.kubelet.wire import registration_pb2 as registration
from sharepod.kube import Connection

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="mounting needs root")


@pytest.fixture
def node(cluster: Cluster) -> Iterator[OneNode]:
    made = one_node(cluster)
    yield made
    for number in range(1, made.starts + 1):
        cluster.services.ask(do="stop", name=f"agent-{made.name}-{number}", grace=5.0)
    for path in (made.path, f"/api/v1/nodes/{made.name}"):
        with suppress_reason("NotFound"):
            cluster.api.delete(path)


def uid_of(pod: Object) -> str:
    return str(pod["metadata"]["uid"])


def condition(status: Object, kind: str = "AgentReady") -> Object:
    found: Object = next((each for each in status.get("conditions", []) if each["type"] == kind), {})
    return found


def test_rows_of_the_ledger_become_tenants_and_the_status_says_so(node: OneNode) -> None:
    generation = node.make_gpunode(row("a"), row("b", mode="Exclusive", gpus=[GPUS[1]]))["metadata"]["generation"]
    node.start_agent()
    status = node.await_observed(generation)
    assert [(gpu["uuid"], gpu["index"], gpu["model"], gpu["memory"]) for gpu in status["gpus"]] == [
        (uuid, index, "Fake A100", 40 << 30) for index, uuid in enumerate(GPUS)
    ]
    assert [tenant["id"] for tenant in status["tenants"]] == ["a", "b"]
    assert status["simulated"] is True
    assert status["agentVersion"]
    assert node.connects("a")
    assert (node.tenant_directory("a") / "limits").read_text().startswith(f"gpu {GPUS[0]} request 400 limit 1000")
    generation = node.reserve(row("a", requestMilli=500), row("b", mode="Exclusive", gpus=[GPUS[1]]), row("c"))
    node.await_observed(generation)
    assert node.connects("c")
    assert (node.tenant_directory("a") / "limits").read_text().startswith(f"gpu {GPUS[0]} request 500 limit 1000")


def test_an_agent_that_comes_before_its_gpunode_waits_for_it(node: OneNode) -> None:
    service = node.start_agent()
    wait_until(lambda: node.csi_socket.exists(), what="the agent's CSI socket", timeout=30)
    generation = node.make_gpunode(row("a"))["metadata"]["generation"]
    node.await_observed(generation)
    assert service.running()


def test_readiness_follows_the_kubelets_registration_and_the_agents_end(node: OneNode) -> None:
    node.make_gpunode()
    service = node.start_agent()
    status = node.await_status(condition, "a condition")
    assert (condition(status)["status"], condition(status)["reason"]) == ("Unknown", "Starting")
    node.call(
        node.root / "kubelet/plugins_registry/gpu.sharepod.dev-reg.sock",
        "/pluginregistration.Registration/NotifyRegistrationStatus",
        registration.RegistrationStatus(plugin_registered=True),
        registration.RegistrationStatusResponse,
    )
    status = node.await_status(lambda seen: condition(seen).get("status") == "True", "AgentReady")
    assert condition(status)["reason"] == "Serving"
    since = condition(status)["lastTransitionTime"]
    other = {
        "type": "AgentAlive",
        "status": "True",
        "reason": "LeaseRenewed",
        "message": "",
        "lastTransitionTime": since,
    }
    node.api.patch(f"{node.path}/status", {"status": {"conditions": [condition(status), other]}})
    node.await_observed(node.reserve(row("a")))
    assert service.stop() == 0
    status = node.await_status(lambda seen: condition(seen).get("status") == "False", "AgentReady False")
    assert condition(status)["reason"] == "Stopped"
    assert condition(status, "AgentAlive") == other, "another writer's condition"


@pytest.mark.promise("node-inventory-missing")
def test_an_agent_without_an_inventory_serves_its_tenants_and_says_what_is_wrong(node: OneNode) -> None:
    generation = node.make_gpunode(row("a"))["metadata"]["generation"]
    service = node.start_agent()
    before = node.await_observed(generation)["gpus"]
    assert service.stop() == 0
    inventory = node.root / "inventory.yaml"
    content = inventory.read_text()
    inventory.unlink()
    service = node.start_agent()
    wait_until(lambda: node.connects("a"), what="the tenant's socket", timeout=30)
    reason = "InventoryUnavailable"
    status = node.await_status(lambda seen: condition(seen).get("reason") == reason, reason)
    assert "cannot read the inventory file" in condition(status)["message"]
    assert status["gpus"] == before
    inventory.write_text(content)
    node.await_status(lambda seen: condition(seen).get("reason") in ("Serving", "Starting"), "an inventory")
    assert service.running()


@pytest.mark.promise("install-standby")
def test_an_agent_that_is_followed_by_the_next_does_not_say_that_it_has_stopped(node: OneNode) -> None:
    generation = node.make_gpunode(row("a"))["metadata"]["generation"]
    first = node.start_agent()
    node.await_observed(generation)
    second = node.start_agent()
    wait_until(lambda: "standing by" in second.log.read_text(), what="the second agent", timeout=30)
    assert first.stop() == 0
    wait_until(lambda: "this agent serves" in second.log.read_text(), what="the second agent's turn", timeout=30)
    node.await_observed(node.reserve(row("a", requestMilli=500)))
    assert node.connects("a")
    reasons = {item["reason"] for item in node.api.get(node.path)["status"]["conditions"]}
    assert "Stopped" not in reasons


def test_the_lease_is_renewed_and_belongs_to_the_gpunode(node: OneNode) -> None:
    gpunode = node.make_gpunode()
    node.start_agent()
    path = f"{LEASES}/sharepod-agent-{node.name}"
    first = node.cluster.wait_for(path, bool, what="the lease")
    assert first is not None
    assert first["spec"]["holderIdentity"] == node.name
    assert first["spec"]["leaseDurationSeconds"] == 20
    assert [owner["uid"] for owner in first["metadata"]["ownerReferences"]] == [gpunode["metadata"]["uid"]]

    def renewed(lease: Object | None) -> bool:
        return lease is not None and lease["spec"]["renewTime"] > first["spec"]["renewTime"]

    second = node.cluster.wait_for(path, renewed, what="a renewal", timeout=15)
    assert second is not None
    times = [datetime.fromisoformat(lease["spec"]["renewTime"]) for lease in (first, second)]
    assert 4 < (times[1] - times[0]).total_seconds() < 10
    node.api.delete(path)
    again = node.cluster.wait_for(path, bool, what="the lease, made again", timeout=15)
    assert again is not None


@pytest.mark.promise("security-writers")
def test_an_agent_may_write_nothing_but_its_own_status_and_lease(node: OneNode) -> None:
    node.make_gpunode()
    other = one_node(node.cluster)
    other.make_gpunode(row("x"))
    mine = node.cluster.api_for(node.token)
    mine.patch(f"{node.path}/status", {"status": {"agentVersion": "by hand"}})
    lease = {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease"}
    attempts: list[Callable[[], Any]] = [
        lambda: mine.patch(f"{other.path}/status", {"status": {"tenants": [{"id": "x", "drained": True}]}}),
        lambda: mine.patch(node.path, {"spec": {"tenants": []}}),
        lambda: mine.delete(node.path),
        lambda: mine.create(
            GPUNODES,
            {"apiVersion": "sharepod.dev/v1alpha1", "kind": "GPUNode", "metadata": {"name": "new"}, "spec": {}},
        ),
        lambda: mine.create(LEASES, {**lease, "metadata": {"name": f"sharepod-agent-{other.name}"}}),
        lambda: mine.create(LEASES, {**lease, "metadata": {"name": "sharepod-operator"}}),
        lambda: mine.get("/api/v1/namespaces/default/pods"),
        lambda: mine.get("/api/v1/namespaces/default/secrets"),
    ]
    for attempt in attempts:
        with pytest.raises(ApiError) as refused:
            attempt()
        assert refused.value.code in (403, 422), refused.value
    for gpunode in (node.path, other.path):
        node.api.delete(gpunode)
    node.api.delete(f"/api/v1/nodes/{other.name}")


@pytest.mark.promise("security-own-node-told")
def test_an_agent_says_whether_the_policy_on_agents_is_in_force(node: OneNode) -> None:
    node.make_gpunode()
    node.start_agent()
    goal = "the verdict"
    held = node.await_status(lambda seen: condition(seen, "OwnNodeOnly").get("status") == "True", goal)
    assert condition(held, "OwnNodeOnly")["reason"] == "Held"

    async def look() -> Readiness:
        """Check the policy as a user for whom it is not effective, like an agent under another ServiceAccount."""
        api = await Connection.open(node.cluster.kubeconfig, "an agent")
        try:
            check = OwnNodeCheck(api, namespace="sharepod-system", changed=lambda: None)
            await check.look()
            return check.verdict
        finally:
            await api.close()

    verdict = asyncio.run(look())
    assert (verdict.reason.status, verdict.reason.value) == ("False", "PolicyNotInForce")
    assert "policy sharepod-agent-own-node is not installed" in verdict.message
    left = [lease["metadata"]["name"] for lease in node.api.get(LEASES)["items"]]
    assert not [name for name in left if "does.not.exist" in name], "a dry run"


@needs_root
def test_drained_is_told_once_the_volume_is_unpublished_and_not_before(node: OneNode) -> None:
    pod = node.make_pod("pod-of-a", "a")
    node.make_gpunode(row("a", podUID=uid_of(pod)), row("never-published"))
    node.start_agent()
    node.await_observed(1)
    node.publish(pod)
    releasing = row("a", podUID=uid_of(pod), state="Releasing")
    generation = node.reserve(releasing, row("never-published", state="Releasing"))

    def drained(status: Object) -> list[str]:
        assert all(not each.get("drained") or status["observedGeneration"] >= generation for each in status["tenants"])
        return [each["id"] for each in status.get("tenants", []) if each.get("drained")]

    node.await_observed(generation)
    node.await_status(lambda status: drained(status) == ["never-published"], "the unpublished tenant drained")
    assert not node.connects("a")
    with pytest.raises(grpc.RpcError, match="is being released"):
        node.publish(pod)
    node.unpublish(pod)
    status = node.await_status(lambda status: drained(status) == ["a", "never-published"], "both drained")
    assert status["observedGeneration"] == generation
    assert node.tenant_directory("a").exists()
    node.await_observed(node.reserve())
    wait_until(lambda: not node.tenant_directory("a").exists(), what="the tenant's directory removed", timeout=10)
    node.api.delete("/api/v1/namespaces/default/pods/pod-of-a", grace=0)


@pytest.mark.promise("node-pod-compared", "security-identity")
@needs_root
def test_a_volume_goes_to_the_pod_that_the_ledger_names_and_to_no_other(node: OneNode) -> None:
    mine = node.make_pod("pod-of-a", "a")
    unreserved = node.make_pod("pod-of-c", "c")
    node.make_gpunode(row("a", podUID=uid_of(mine)), row("b", podUID="another"))
    node.start_agent()
    node.await_observed(1)
    node.publish(mine, tenant="b")
    node.publish(mine)
    renamed = {"metadata": {**mine["metadata"], "name": "pod-of-b"}}
    reborn = {"metadata": {**mine["metadata"], "uid": "00000000-0000-0000-0000-000000000000"}}
    for pod, message in (
        (unreserved, "no share of a GPU is reserved on node"),
        (renamed, "is for the pod with UID another"),
        (reborn, f"is for the pod with UID {uid_of(mine)}"),
    ):
        with pytest.raises(grpc.RpcError, match=message):
            node.publish(pod)
    # The row arrives shortly after the kubelet's call, while the call waits.
    waiting = node.make_pod("pod-of-e", "e")
    node.reserve(row("a", podUID=uid_of(mine)), row("e", podUID=uid_of(waiting)))
    node.publish(waiting)
    for pod in (mine, unreserved, waiting):
        node.api.delete(f"/api/v1/namespaces/default/pods/{pod['metadata']['name']}", grace=0)


def reserved(status: Object) -> dict[str, int]:
    """Return the reserved time of each series in the consumption."""
    return {one["series"]: one["reservedMilliseconds"] for one in status.get("consumption") or ()}


def test_a_killed_agent_comes_back_to_its_tenants(node: OneNode) -> None:
    node.make_gpunode(row("a"))
    killed = node.start_agent()
    node.await_observed(1)
    before = node.await_status(lambda status: any(reserved(status).values()), "time that was reserved")
    (counted,) = before["consumption"]
    assert (counted["namespace"], counted["model"], counted["closed"]) == ("default", "Fake A100", False)
    assert counted["since"] < before["consumptionAt"]
    directory = node.tenant_directory("a").stat().st_ino
    killed.signal(signal.SIGKILL)
    killed.wait(10)
    wait_until(lambda: not node.connects("a"), what="the end of the processes that it had started", timeout=10)
    generation = node.reserve(row("a"), row("b"))
    node.start_agent()
    node.await_observed(generation)
    assert node.connects("a")
    assert node.connects("b")
    assert node.tenant_directory("a").stat().st_ino == directory, "a mounted directory is never replaced"
    so_far = counted["reservedMilliseconds"]
    status = node.await_status(lambda seen: sum(reserved(seen).values()) > so_far, "a count that goes on", 90)
    assert list(reserved(status)) == [counted["series"]], "the same series"


def test_a_vanished_ledger_takes_nothing_from_running_tenants_and_a_new_one_rules(node: OneNode) -> None:
    node.make_gpunode(row("a"))
    service = node.start_agent()
    node.await_observed(1)
    node.api.delete(node.path)
    wait_until(lambda: "no ledger" in service.log.read_text(), what="the agent seeing it", timeout=10)
    assert node.connects("a")
    node.make_gpunode(row("b"))
    node.await_observed(1)
    wait_until(lambda: node.connects("b") and not node.connects("a"), what="the new ledger is applied", timeout=10)
    lease = f"{LEASES}/sharepod-agent-{node.name}"
    uid = node.api.get(node.path)["metadata"]["uid"]

    def adopted(found: Object | None) -> bool:
        return found is not None and found["metadata"]["ownerReferences"][0]["uid"] == uid

    node.cluster.wait_for(lease, adopted, what="the lease under the new GPUNode", timeout=15)


def test_many_changes_make_few_writes(node: OneNode) -> None:
    node.make_gpunode(row("a"))
    node.start_agent()
    node.await_status(lambda status: "consumption" in status, "the first count")
    version = node.api.get(node.path)["metadata"]["resourceVersion"]
    begun = time.monotonic()
    generation = 0
    for number in range(60):
        generation = node.reserve(row("a", requestMilli=number + 1))
    node.await_observed(generation)
    lasted = time.monotonic() - begun
    query = {"fieldSelector": f"metadata.name={node.name}", "resourceVersion": version}
    statuses: list[Object] = []
    for event in node.api.watch(GPUNODES, timeout=1.0, **query):
        status = event["object"].get("status")
        if status and (not statuses or statuses[-1] != status):
            statuses.append(status)
    assert 1 <= len(statuses) <= lasted + 3, "facts are written at most each second"
    assert statuses[-1]["observedGeneration"] == generation
    versions = [node.api.get(node.path)["metadata"]["resourceVersion"]]
    time.sleep(3)  # nothing happens in this time, so nothing may be written
    versions.append(node.api.get(node.path)["metadata"]["resourceVersion"])
    assert versions[0] == versions[1]


@needs_root
def test_the_agent_outlives_the_api_server(cluster_factory: Callable[..., Cluster]) -> None:
    cluster = cluster_factory(scheduler=False, controller_manager=True)
    node = one_node(cluster)
    pod = node.make_pod("pod-of-a", "a")
    node.make_gpunode(row("a", podUID=uid_of(pod)))
    service = node.start_agent()
    node.await_observed(1)
    node.publish(pod)
    cluster.restart_apiserver(down=1.0)
    node.await_observed(node.reserve(row("a", podUID=uid_of(pod)), row("b")))
    cluster.stop_apiserver()
    assert node.connects("a")
    node.publish(pod)  # the publish needs no call of the API server
    assert service.stop() == 0
    # The agent starts while the API server is away. It serves running tenants, and volumes can be unpublished.
    node.start_agent()
    wait_until(lambda: node.connects("a") and node.connects("b"), what="the tenants' sockets", timeout=20)
    wait_until(node.csi_socket.exists, what="the CSI socket", timeout=10)
    node.unpublish(pod)
    cluster.start_apiserver()
    generation = node.reserve(row("a", state="Releasing"), row("b"))
    status = node.await_status(
        lambda seen: any(each.get("drained") for each in seen.get("tenants", [])), "the tenant drained", timeout=40
    )
    assert status["observedGeneration"] == generation


@pytest.mark.promise("node-foreign-process")
def test_a_failed_gpu_and_a_strangers_process_are_in_the_status_until_they_are_gone(node: OneNode) -> None:
    node.make_gpunode(row("a"))
    node.start_agent()
    node.await_observed(1)
    inventory = node.root / "inventory.yaml"
    healthy = inventory.read_text()
    fresh = node.root / "inventory.new"

    def play(text: str) -> None:
        fresh.write_text(text)
        fresh.rename(inventory)

    def gpus(status: Object) -> list[tuple[str, bool]]:
        return [(gpu["health"], gpu["shareable"]) for gpu in status["gpus"]]

    seen = yaml.safe_load(healthy)
    seen["gpus"][0]["xids"] = [79]
    seen["processes"] = [{"pid": 1, "uuid": GPUS[1], "memory": "1Gi"}]
    play(yaml.safe_dump(seen))
    status = node.await_status(
        lambda status: gpus(status) == [("Unhealthy", False), ("Healthy", False)], "one GPU failed, one taken"
    )
    assert "Xid 79" in status["gpus"][0]["reason"]
    assert "process 1 on the node uses it" in status["gpus"][1]["reason"]
    play(healthy)
    node.await_status(lambda status: gpus(status) == [("Healthy", True)] * 2, "both can be shared again")


@pytest.mark.promise("operator-scheduler-pool-slice", "operator-scheduler-pool-leaves")
def test_on_a_node_of_pool_scheduler_its_gpus_are_published_until_the_ledger_says_that_it_leaves(node: OneNode) -> None:
    """The agent has its own rights and token, and the admission policies are effective."""
    if not serves_claims(node.api):
        pytest.skip("the API server does not serve resource.k8s.io/v1")
    node.write_cdi()
    node.cluster.kubectl("apply", "-f", MANIFESTS / "claims" / "no-slices.yaml")
    node.make_gpunode()
    node.api.patch(node.path, {"spec": {"pool": "scheduler"}})
    node.start_agent()
    for plugin in ("gpu.sharepod.dev-reg.sock", "gpu.sharepod.dev-dra-reg.sock", "scheduler.sharepod.dev-dra-reg.sock"):
        node.registered(plugin)
    node.await_status(lambda seen: condition(seen, "SlicesPublished").get("status") == "True", "SlicesPublished")
    path = f"/apis/resource.k8s.io/v1/resourceslices/{slice_name(node.name)}"

    def devices(found: Object | None) -> list[str]:
        return [
            device["attributes"]["uuid"]["string"] for device in ((found or {}).get("spec") or {}).get("devices", ())
        ]

    made = node.cluster.wait_for(path, lambda seen: devices(seen) == GPUS, what="both GPUs as devices")
    assert made is not None
    assert made["metadata"]["ownerReferences"][0]["name"] == node.name
    capacity = made["spec"]["devices"][0]["capacity"]
    assert (capacity["timeMilli"]["value"], capacity["memory"]["value"]) == ("1k", "40Gi")
    node.api.delete(path)
    node.cluster.wait_for(path, lambda seen: devices(seen) == GPUS, what="the deleted slice is published again")
    inventory = node.root / "inventory.yaml"
    gpus = yaml.safe_load(inventory.read_text())["gpus"]
    inventory.write_text(yaml.safe_dump({"gpus": gpus[1:]}))
    node.cluster.wait_for(path, lambda seen: devices(seen) == GPUS[1:], what="a missing GPU is no device")
    node.api.patch(node.path, {"spec": {"leaving": True}})
    status = node.await_status(
        lambda seen: condition(seen, "SlicesPublished").get("reason") == "Withdrawn",
        "what it has published is withdrawn",
    )
    generation = node.api.get(node.path)["metadata"]["generation"]
    assert status["observedGeneration"] == generation
    with pytest.raises(ApiError, match="not found"):
        node.api.get(path)
