"""Rights of the accounts in manifests/: which of them may write ledgers, Leases and status."""

from __future__ import annotations

from pathlib import Path

import pytest
from cluster.admission import GPUNODES, LEASES, as_user, refusal, sharepod
from cluster.malformed_case import UUID
from harness.api import Api, ApiError, Object
from harness.cluster import Cluster
from harness.installation import NAMESPACE, SHAREPODS


def test_two_tenants_of_one_id_cannot_stand_in_a_ledger(server: Cluster) -> None:
    row = {"id": "a", "namespace": "x", "podName": "p", "gpus": [UUID], "requestMilli": 1, "limitMilli": 1, "memory": 1}
    body: Object = {"apiVersion": "sharepod.dev/v1alpha1", "kind": "GPUNode", "metadata": {"name": "twice"}}
    with pytest.raises(ApiError) as refused:
        server.api.create(GPUNODES, {**body, "spec": {"tenants": [row, row]}})
    assert "Duplicate value" in refused.value.message
    with pytest.raises(ApiError) as refused:
        server.api.create(GPUNODES, {**body, "spec": {"tenants": [row | {"requestMilli": 2}]}})
    assert "requestMilli is more than limitMilli" in refused.value.message


def test_a_ledger_with_tenants_cannot_be_deleted(server: Cluster) -> None:
    row = {
        "id": "a",
        "namespace": "team",
        "podName": "p",
        "gpus": [UUID],
        "requestMilli": 1,
        "limitMilli": 1,
        "memory": 1,
    }
    body: Object = {"apiVersion": "sharepod.dev/v1alpha1", "kind": "GPUNode", "metadata": {"name": "kept"}}
    server.api.create(GPUNODES, {**body, "spec": {"tenants": [row]}})
    with pytest.raises(ApiError) as refused:
        server.api.delete(f"{GPUNODES}/kept")
    assert "is the ledger of 1 tenants, the first of them team/p; delete their SharePods first" in refused.value.message
    server.api.patch(f"{GPUNODES}/kept", {"spec": {"tenants": []}})
    server.api.delete(f"{GPUNODES}/kept")


@pytest.fixture(scope="module")
def agent(server: Cluster) -> Api:
    """Return a client with the rights of the agent of node-a, and a token like a kubelet's."""
    server.add_fake_nodes(2, prefix="agents")
    for node in ("agents-0", "agents-1"):
        server.api.create(
            GPUNODES, {"apiVersion": "sharepod.dev/v1alpha1", "kind": "GPUNode", "metadata": {"name": node}, "spec": {}}
        )
    return server.api_for(server.service_account_token(NAMESPACE, "sharepod-agent", bound_node="agents-0"))


def lease(name: str) -> Object:
    return {
        "apiVersion": "coordination.k8s.io/v1",
        "kind": "Lease",
        "metadata": {"name": name},
        "spec": {"holderIdentity": "x"},
    }


@pytest.mark.promise("security-writers", "security-agent-own-node")
def test_an_agent_writes_its_own_node_and_no_other(server: Cluster, agent: Api) -> None:
    agent.patch(f"{GPUNODES}/agents-0/status", {"status": {"agentVersion": "0.1.0"}})
    agent.create(LEASES, lease("sharepod-agent-agents-0"))
    agent.patch(f"{LEASES}/sharepod-agent-agents-0", {"spec": {"leaseDurationSeconds": 20}})
    message = refusal(agent, f"{GPUNODES}/agents-1/status", {"status": {"agentVersion": "0.1.0"}})
    assert "the agent of node agents-0 may write the GPUNode agents-0 only, not agents-1" in message
    for name in ("sharepod-agent-agents-1", "sharepod-operator"):
        with pytest.raises(ApiError) as refused:
            agent.create(LEASES, lease(name))
        assert f"Lease sharepod-agent-agents-0 only, not {name}" in refused.value.message
    server.api.create(LEASES, lease("sharepod-operator"))
    assert "only, not sharepod-operator" in refusal(
        agent, f"{LEASES}/sharepod-operator", {"spec": {"holderIdentity": "me"}}
    )


@pytest.mark.promise("security-writers", "security-agent-own-node")
def test_an_agent_can_write_no_ledger_and_read_no_secret(agent: Api) -> None:
    assert "cannot patch resource" in refusal(agent, f"{GPUNODES}/agents-0", {"spec": {"pool": "dedicated"}})
    for path in ("/api/v1/namespaces/sharepod-system/secrets", "/api/v1/pods", SHAREPODS):
        with pytest.raises(ApiError) as refused:
            agent.get(path)
        assert refused.value.code == 403


def test_a_token_that_names_no_node_writes_nothing(server: Cluster, agent: Api) -> None:
    unbound = server.api_for(server.service_account_token(NAMESPACE, "sharepod-agent"))
    assert "names no node" in refusal(unbound, f"{GPUNODES}/agents-0/status", {"status": {"agentVersion": "0.1.0"}})


@pytest.mark.promise("security-ledger", "security-rights", "security-gpunodes-hidden")
def test_who_edits_a_namespace_edits_its_sharepods_but_neither_status_nor_ledger(server: Cluster, alice: Path) -> None:
    code, answer = as_user(server, alice, "apply", "-f", "-", body=sharepod("alices", {"request": 0.5}))
    assert code == 0, answer
    code, answer = as_user(
        server,
        alice,
        "patch",
        "shp",
        "alices",
        "--subresource=status",
        "--type=merge",
        "-p",
        '{"status": {"podUID": "x"}}',
    )
    assert code != 0
    assert "cannot patch resource" in answer
    for verb in ("create", "patch", "delete", "get"):
        code, answer = as_user(server, alice, "auth", "can-i", verb, "gpunodes.sharepod.dev")
        assert "no" in answer.split()
