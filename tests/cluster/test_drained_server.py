"""An HTTP server that is drained from node to node: real operator, agents, hook and processes, and kubectl."""

from __future__ import annotations

import urllib.request
from collections.abc import Callable
from functools import partial

import pytest
from harness.cluster import Cluster, wait_until
from harness.installation import SHAREPODS, Installation
from harness.process_nodes import ProcessNodes

POD = "/api/v1/namespaces/default/pods/server"


@pytest.mark.promise("operator-comes-back", "operator-one-run-at-a-time")
def test_a_server_that_is_drained_answers_under_its_name_on_the_other_node_and_is_never_there_twice(
    cluster_factory: Callable[..., Cluster],
) -> None:
    cluster = cluster_factory()
    installation = Installation(cluster)
    cluster.runtime_class()
    installation.start_operator()
    with ProcessNodes(cluster, installation, 2, "serves") as nodes:
        container = {"name": "main", "image": "test", "args": ["1000"]}
        spec = {"containers": [container], "gpu": {"request": 0.4, "memory": "4Gi"}}
        kind = {"apiVersion": "sharepod.dev/v1alpha1", "kind": "SharePod"}
        cluster.api.create(SHAREPODS, {**kind, "metadata": {"name": "server"}, "spec": spec})
        pids: list[int] = []

        def answers(on: set[str]) -> bool:
            """Return whether the Pod runs on one of these nodes and answers requests. Its pid is added to `pids`."""
            found = cluster.api.get("/api/v1/namespaces/default/pods", fieldSelector="metadata.name=server")["items"]
            if not found or found[0]["spec"].get("nodeName") not in on:
                return False
            process = nodes.kubelets.processes.get(found[0]["metadata"]["uid"])
            if process is None or process.address is None:
                return False
            with urllib.request.urlopen(f"http://{process.address}/", timeout=10) as answer:
                pids.append(int(answer.read()))
            return True

        wait_until(lambda: answers(set(nodes.names)), what="an answer", timeout=60)
        for _ in range(2):  # the second drain follows soon after the first, so the next run begins after a pause
            node = cluster.api.get(POD)["spec"]["nodeName"]
            cluster.kubectl("drain", node, "--ignore-daemonsets", "--timeout=60s", timeout=90)
            (other,) = set(nodes.names) - {node}
            wait_until(partial(answers, {other}), what="an answer of the other", timeout=90)
            cluster.kubectl("uncordon", node)
        assert len(set(pids)) == 3
        assert nodes.kubelets.most_at_once == {"server": 1}
        assert nodes.kubelets.failures == []
