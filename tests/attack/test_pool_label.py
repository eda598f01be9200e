"""The label of a node's pool, changed by root on that node with the kubelet's credentials."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from harness.api import Object
from harness.cluster import Cluster
from harness.errors import CommandError

POOL = "sharepod.dev/pool"


def node(name: str, labels: dict[str, str]) -> Object:
    return {"apiVersion": "v1", "kind": "Node", "metadata": {"name": name, "labels": labels}}


def kubelet(server: Cluster, of: str) -> Path:
    return server.user_kubeconfig(f"system:node:{of}", groups=["system:nodes"])


@pytest.mark.promise("security-pool-label")
@pytest.mark.parametrize("part", ["", "/status"])
def test_a_kubelet_adds_its_node_to_no_pool_and_removes_it_from_none(server: Cluster, part: str) -> None:
    of = f"of-a-kubelet{part.replace('/', '-')}"
    path, theirs = f"/api/v1/nodes/{of}", kubelet(server, of)
    server.api.create("/api/v1/nodes", node(of, {}))

    def label(pool: str | None) -> None:
        body = server.api.get(path)
        # no precondition on the version, because other clients also write to the Node
        del body["metadata"]["resourceVersion"]
        labels = body["metadata"].get("labels", {}) | {POOL: pool, "mine": str(pool)}
        body["metadata"]["labels"] = {name: value for name, value in labels.items() if value is not None}
        server.kubectl("replace", "--raw", f"{path}{part}", "-f", "-", input=json.dumps(body), kubeconfig=theirs)

    with pytest.raises(CommandError, match="cannot be changed by its kubelet"):
        label("dedicated")
    server.kubectl("label", "node", of, f"{POOL}=dedicated")
    label("dedicated")
    assert server.api.get(path)["metadata"]["labels"]["mine"] == "dedicated", "other labels of its own"
    for pool in ("device-plugin", None):
        with pytest.raises(CommandError, match="cannot be changed by its kubelet"):
            label(pool)


@pytest.mark.promise("security-pool-label")
def test_a_kubelet_may_register_its_node_with_the_label_as_node_groups_do(server: Cluster) -> None:
    body = json.dumps(node("registered", {POOL: "dedicated"}))
    server.kubectl("create", "-f", "-", input=body, kubeconfig=kubelet(server, "registered"))
    assert server.api.get("/api/v1/nodes/registered")["metadata"]["labels"][POOL] == "dedicated"
