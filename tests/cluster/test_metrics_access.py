"""Access to the metrics of operator and agent with the installed manifests. A real API server decides who may read."""

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


def _ask(port: int, token: str | None, path: str = "/metrics") -> tuple[int, str]:
    headers = {} if token is None else {"Authorization": f"Bearer {token}"}
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=10) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()
    except OSError as error:
        return 0, str(error)


def _answers(port: int, token: str | None, status: int, path: str = "/metrics") -> bool:
    return _ask(port, token, path)[0] == status


@pytest.mark.promise("security-metrics-access")
@pytest.mark.promise("security-trace-access")
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
            # The request is retried while the API server does not know the binding yet, or is slow.
            for token, status in ((None, 401), ("nonsense", 401), (stranger, 403), (reader, 200)):
                wait_until(partial(_answers, port, token, status), what=f"metrics of the {name}: {status}", timeout=60)
            assert "sharepod-metrics-reader" in _ask(port, None)[1]
            assert f"system:serviceaccount:{NAMESPACE}:sharepod-agent may not get /metrics" in _ask(port, stranger)[1]
            assert series in _ask(port, reader)[1]
        path = f"/trace?gpu={gpu['uuid']}"
        viewer = cluster.service_account_token(NAMESPACE, "sharepod-trace")
        for token, status in ((None, 401), (reader, 403), (viewer, 200)):
            asked = partial(_answers, installation.ports["agent"], token, status, path)
            wait_until(asked, what=f"trace: {status}", timeout=60)
        wait_until(partial(_answers, installation.ports["agent"], viewer, 403), what="no metrics for it", timeout=60)
        agent.stop()
