"""Readers of the metrics of operator and agent, as the manifests install them, decided by a real API server."""

from __future__ import annotations

import tempfile
import urllib.error
import urllib.request
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import yaml
from harness.cluster import Cluster, wait_until
from harness.installation import NAMESPACE, Installation


def _ask(port: int, token: str | None) -> tuple[int, str]:
    headers = {} if token is None else {"Authorization": f"Bearer {token}"}
    request = urllib.request.Request(f"http://127.0.0.1:{port}/metrics", headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=10) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()
    except OSError as error:
        return 0, str(error)


def _asks_for_a_token(port: int) -> bool:
    return _ask(port, None)[0] == 401


@pytest.mark.promise("security-metrics-access")
def test_operator_and_agent_show_metrics_to_who_may_get_them(cluster_factory: Callable[..., Cluster]) -> None:
    cluster = cluster_factory(scheduler=False)
    installation = Installation(cluster)
    (node,) = cluster.add_fake_nodes(1, labels={"sharepod.dev/pool": "dedicated"}, prefix="metrics")
    installation.start_operator(env={"SHAREPOD_METRICS_ACCESS": "Token"})
    with tempfile.TemporaryDirectory(prefix="shp-") as at:
        inventory = Path(at) / "inventory.yaml"
        gpu = {"uuid": "GPU-5a9e0001-0000-4000-8000-000000000001", "index": 0, "model": "Simulated", "memory": "16Gi"}
        inventory.write_text(yaml.safe_dump({"gpus": [gpu]}))
        agent = installation.start_agent_process(
            node,
            inventory,
            state=Path(at) / "state",
            kubelet_root=Path(at) / "kubelet",
            env={"SHAREPOD_AGENT_METRICS_ACCESS": "Token"},
        )
        cluster.kubectl("create", "serviceaccount", "reader", "-n", NAMESPACE)
        cluster.kubectl(
            "create",
            "clusterrolebinding",
            "reader",
            "--clusterrole=sharepod-metrics-reader",
            f"--serviceaccount={NAMESPACE}:reader",
        )
        reader = cluster.service_account_token(NAMESPACE, "reader")
        stranger = cluster.service_account_token(NAMESPACE, "sharepod-agent")
        for name, series in (("operator", "sharepod_operator_build_info"), ("agent", "sharepod_agent_build_info")):
            port = installation.ports[name]
            wait_until(partial(_asks_for_a_token, port), what=f"metrics of the {name}", timeout=60)
            assert "sharepod-metrics-reader" in _ask(port, None)[1]
            assert _ask(port, "nonsense")[0] == 401
            status, words = _ask(port, stranger)
            assert status == 403
            assert f"system:serviceaccount:{NAMESPACE}:sharepod-agent may not get /metrics" in words
            status, text = _ask(port, reader)
            assert status == 200
            assert series in text
        agent.stop()
