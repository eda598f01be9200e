"""Claims in unusual orders on a real node: shared, several in one Pod, and claims and templates that are replaced."""

from __future__ import annotations

import time
from typing import Any

import pytest
from harness.api import Object
from harness.cluster import wait_until
from harness.node_packages import why_no_user_namespaces
from node.claim_node import RESOURCE, container
from node.claim_system import NAMESPACE, ClaimSystem

CLAIMS = f"{RESOURCE}/namespaces/{NAMESPACE}/resourceclaims"


def delete(system: ClaimSystem, kind: str, name: str, *options: str) -> None:
    system.cluster.kubectl("delete", kind, name, "-n", NAMESPACE, *options, timeout=60)


def tenant(system: ClaimSystem, tenant_id: str) -> Object:
    tenants = system.cluster.api.get(system.gpunode).get("status", {}).get("tenants", [])
    return next((one for one in tenants if one["id"] == tenant_id), {})


def await_tenant(system: ClaimSystem, tenant_id: str, **fields: Any) -> None:
    wait_until(
        lambda: fields.items() <= tenant(system, tenant_id).items(), what=f"{tenant_id} with {fields}", timeout=60
    )


def restart_agent(system: ClaimSystem) -> None:
    system.kill_agent()
    system.start_agent()
    system.machine.await_claim_driver(system.agent)


@pytest.mark.promise("node-claim-shared", "node-claim-drained")
def test_a_shared_claim_outlives_the_forced_deletion_of_one_of_its_pods_while_the_agent_is_away(
    system: ClaimSystem,
) -> None:
    system.apply(system.claim("both", 500), system.pod("one", claim="both"), system.pod("two", claim="both"))
    system.await_running("one")
    system.await_running("two")
    (row,) = system.rows()
    await_tenant(system, row["id"], processes=2, connected=True)
    system.kill_agent()
    delete(system, "pod", "one", "--force", "--grace-period=0")
    wait_until(lambda: not system.pods("one"), what="the Pod removed", timeout=30)
    system.start_agent()
    system.machine.await_claim_driver(system.agent)
    await_tenant(system, row["id"], processes=1, connected=True)
    assert system.rows() == [row]
    system.apply(system.pod("three", claim="both"))
    system.await_running("three", timeout=120)
    await_tenant(system, row["id"], processes=2, connected=True)
    assert system.restarts() == 0
    assert system.rows() == [row]


@pytest.mark.alone
def test_a_pod_with_two_claims_gets_both_or_none(system: ClaimSystem) -> None:
    system.apply(
        system.template("whole", 1000),
        system.pod("whole", template="whole"),
        system.template("most", 700, limit=700),
        system.pod("most", template="most"),
    )
    system.await_running("whole")
    system.await_running("most")
    before = system.rows()
    named = [system.template(name, milli, limit=milli) for name, milli in (("small", 200), ("large", 600))]
    pod = system.pod("pair", template="small")
    pod["spec"]["resourceClaims"] = [
        {"name": "small", "resourceClaimTemplateName": "small"},
        {"name": "large", "resourceClaimTemplateName": "large"},
    ]
    pod["spec"]["containers"] = [container(name="a", claim="small"), container(name="b", claim="large")]
    system.apply(*named, pod)
    system.cluster.wait_for(
        CLAIMS, lambda found: len((found or {})["items"]) == 4, what="the claims of the Pod", timeout=30
    )
    wait_until(lambda: "NoRoom" in event_reasons(system, "pair"), what="a reason", timeout=30)
    assert system.rows() == before
    allocated = [one for one in system.cluster.api.get(CLAIMS)["items"] if one.get("status", {}).get("allocation")]
    assert len(allocated) == 2
    delete(system, "pod", "whole")
    system.await_running("pair")
    assert sorted(row["requestMilli"] for row in system.rows()) == [200, 600, 700]
    time.sleep(3)
    found = system.machine.shares()
    found.expect(pair=80.0, most=70.0)


def event_reasons(system: ClaimSystem, pod: str) -> str:
    """Return the reasons of the Events about a Pod."""
    events = system.cluster.api.get(f"/api/v1/namespaces/{NAMESPACE}/events")["items"]
    return " ".join(str(one.get("reason")) for one in events if one["involvedObject"].get("name") == pod)


def test_each_pod_has_the_share_of_its_template_at_creation(system: ClaimSystem) -> None:
    system.apply(system.template("shape", 500, limit=500), system.workload("Deployment", "web", "shape", replicas=1))
    (first,) = system.await_running("web")
    delete(system, "resourceclaimtemplate", "shape")
    system.cluster.kubectl("scale", "deployment", "web", "--replicas=2", "-n", NAMESPACE)
    wait_until(lambda: len(system.pods("web")) == 2, what="a Pod that waits for its template", timeout=30)
    changed = system.template("shape", 200, limit=300)
    changed["spec"]["metadata"] = {"annotations": {"sharepod.dev/gpu-anti-affinity": "web"}}
    system.apply(changed)
    system.await_running("web", 2, timeout=120)
    shapes = sorted((row["requestMilli"], row["limitMilli"]) for row in system.rows())
    assert shapes == [(200, 300), (500, 500)]
    restart_agent(system)
    system.machine.real.run("sh", "-c", "kill $(pgrep launchloop)")
    wait_until(lambda: system.restarts() == 2, what="both containers again", timeout=60)
    for row in system.rows():
        await_tenant(system, row["id"], processes=1, connected=True)
    assert sorted((row["requestMilli"], row["limitMilli"]) for row in system.rows()) == shapes
    assert first in system.await_running("web", 2)


@pytest.mark.promise("node-claim-drained")
def test_a_claim_deleted_under_a_running_pod_frees_no_share_before_the_pod_ends(
    system: ClaimSystem,
) -> None:
    """A user with the right to edit claims may remove the finalizer, delete the claim, and create another claim with
    that name."""
    system.apply(system.claim("mine", 900), system.pod("keeps", claim="mine"))
    system.await_running("keeps")
    (row,) = system.rows()
    await_tenant(system, row["id"], processes=1, connected=True)
    delete(system, "resourceclaim", "mine", "--wait=false")
    system.cluster.api.patch(f"{CLAIMS}/mine", {"metadata": {"finalizers": None}})
    wait_until(lambda: not system.cluster.api.get(CLAIMS)["items"], what="no claim", timeout=30)
    system.apply(system.claim("mine", 900), system.pod("next", claim="mine"))
    wait_until(lambda: len(system.rows()) == 2, what="a share for the next claim", timeout=30)
    rows = {one["id"]: one for one in system.rows()}
    assert rows[row["id"]]["state"] == "Releasing"
    (new,) = (one for one in rows.values() if one["id"] != row["id"])
    assert new["gpus"] != row["gpus"], "the GPU of a process that still runs is not given away"
    restart_agent(system)
    await_tenant(system, row["id"], drained=False)
    assert row["id"] in {one["id"] for one in system.rows()}
    # The kubelet prepares no claim while it still has another claim with the same name.
    delete(system, "pod", "keeps")
    wait_until(lambda: [one["id"] for one in system.rows()] == [new["id"]], what="the first share back", timeout=60)


@pytest.mark.promise("node-claim-user-namespace")
@pytest.mark.alone
def test_pods_in_user_namespaces_of_their_own_have_their_shares(system: ClaimSystem) -> None:
    if why := why_no_user_namespaces():
        pytest.skip(why)
    apart = [system.pod(name, template=name) for name in ("third", "rest")]
    apart.append(system.sharepod("left", 0.2, gpu={"limit": 0.2}))
    for each in apart:
        each["spec"]["hostUsers"] = False
    system.apply(system.template("third", 300, limit=300), system.template("rest", 500, limit=500), *apart)
    for name in ("third", "rest"):
        system.await_running(name)
    wait_until(
        lambda: any(pod["metadata"]["name"] == "left" and pod["status"]["phase"] == "Running" for pod in system.pods()),
        what="the SharePod's Pod",
        timeout=60,
    )
    for row in system.rows():
        await_tenant(system, row["id"], processes=1, connected=True, enforced=True)
    mapped = system.machine.real.run("sh", "-c", "for p in $(pgrep launchloop); do cat /proc/$p/uid_map; done").stdout
    firsts = [line.split()[1] for line in mapped.splitlines()]
    assert len(set(firsts)) == 3, mapped
    assert "0" not in firsts
    time.sleep(3)
    system.machine.shares().expect(third=30.0, rest=50.0, left=20.0)
    restart_agent(system)
    for row in system.rows():
        await_tenant(system, row["id"], processes=1, connected=True)
    assert system.restarts() == 0
