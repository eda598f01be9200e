"""Operator and agent of different versions, on a real API server with the CRDs and rights of the operator's version.

`harness/older.py` names the commit of the older version.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import yaml
from cluster.operator_world import TIMES
from harness.api import Object
from harness.cluster import Cluster
from harness.fakes import FakeKubelets
from harness.installation import AGENT, OPERATOR, Installation
from harness.older import NO_OLDER, has_older, older_package

pytestmark = [
    pytest.mark.skipif(not has_older(), reason=NO_OLDER),
    pytest.mark.timeout(400),  # the older package is built first, and each test has a cluster of its own
]

GPUNODES = "/apis/sharepod.dev/v1alpha1/gpunodes"
SHAREPODS = "/apis/sharepod.dev/v1alpha1/namespaces/default/sharepods"
GPU = "GPU-5e500001-0000-4000-8000-000000000001"


@pytest.fixture(scope="module")
def older() -> Iterator[Path]:
    with older_package() as package:
        yield package


@pytest.mark.promise("install-skew")
def test_an_older_agent_takes_what_this_operator_writes_and_is_understood(
    cluster_factory: Callable[..., Cluster], older: Path
) -> None:
    cluster = cluster_factory()
    _run_side_by_side(cluster, Installation(cluster), agent=_of(older, "sharepod.agent.main"))


@pytest.mark.promise("install-skew-agents")
def test_an_older_operator_understands_what_this_agent_reports(
    cluster_factory: Callable[..., Cluster], older: Path
) -> None:
    """Operator, CRDs and rights are rolled back to the older version. The agents still have the newer one."""
    cluster = cluster_factory()
    installation = Installation(cluster, older.parent / "manifests")
    _run_side_by_side(cluster, installation, operator=_of(older, "sharepod.controller.main"))


@dataclass(frozen=True)
class _Program:
    """Program of one version: its command, and its additional environment."""

    command: Sequence[str | Path]
    environment: Mapping[str, str] = field(default_factory=dict)


def _of(package: Path, module: str) -> _Program:
    command = [sys.executable, "-c", f"from {module} import main; main()"]
    return _Program(command, {"PYTHONPATH": str(package)})


def _run_side_by_side(
    cluster: Cluster, installation: Installation, *, operator: _Program | None = None, agent: _Program | None = None
) -> None:
    operator, agent = operator or _Program(OPERATOR), agent or _Program(AGENT)
    cluster.runtime_class()
    (node,) = cluster.add_fake_nodes(1, labels={"sharepod.dev/pool": "dedicated"}, prefix="skew")
    with tempfile.TemporaryDirectory(prefix="shp-") as at, FakeKubelets(cluster.api) as kubelets:
        inventory, hook = Path(at) / "inventory.yaml", Path(at) / "hook.so"
        inventory.write_text(
            yaml.safe_dump({"gpus": [{"uuid": GPU, "index": 0, "model": "Simulated", "memory": "16Gi"}]})
        )
        hook.write_bytes(b"a hook")
        decides = installation.start_operator(env={**TIMES, **operator.environment}, program=operator.command)
        serves = installation.start_agent_process(
            node,
            inventory,
            state=Path(at) / "state",
            kubelet_root=Path(at) / "kubelet",
            env={"SHAREPOD_AGENT_HOOK_FILE": str(hook), **agent.environment},
            program=agent.command,
        )
        try:
            _live_through(cluster, node)
        except Exception as error:
            raise AssertionError(f"{error}\n{decides.log_tail(30)}\n{serves.log_tail(30)}") from error
        assert not kubelets.failures, kubelets.failures[:3]
        serves.stop()


def _live_through(cluster: Cluster, node: str) -> None:
    """Place, apply, change and release a share. Check that each side has read the other side's writes."""
    api = cluster.api

    def in_force(request: int) -> Callable[[Object | None], bool]:
        def holds(seen: Object | None) -> bool:
            rows = (seen or {}).get("spec", {}).get("tenants") or []
            status = (seen or {}).get("status") or {}
            observed = status.get("observedGeneration") == (seen or {}).get("metadata", {}).get("generation")
            return [row["requestMilli"] for row in rows] == [request] and observed and status.get("tenantCount") == 1

        return holds

    spec = {
        "gpu": {"request": 0.4, "limit": 0.7, "memory": "4Gi"},
        "restartPolicy": "Never",
        "containers": [{"name": "main", "image": "test"}],
    }
    body = {"apiVersion": "sharepod.dev/v1alpha1", "kind": "SharePod", "metadata": {"name": "train"}, "spec": spec}
    api.create(SHAREPODS, body)
    cluster.wait_for(
        f"{SHAREPODS}/train",
        lambda seen: (seen or {}).get("status", {}).get("phase") == "Running",
        what="the SharePod runs",
        timeout=60,
    )
    cluster.wait_for(f"{GPUNODES}/{node}", in_force(400), what="the row is applied", timeout=60)
    api.patch(f"{SHAREPODS}/train", {"spec": {"gpu": {"request": 0.6}}})
    cluster.wait_for(f"{GPUNODES}/{node}", in_force(600), what="the raised share is applied", timeout=60)
    api.delete(f"{SHAREPODS}/train")
    cluster.wait_for(
        f"{GPUNODES}/{node}",
        lambda seen: seen is not None and not seen["spec"].get("tenants") and seen["status"].get("tenantCount") == 0,
        what="the share released, which takes the agent's word",
        timeout=60,
    )


def test_the_older_program_is_older(older: Path) -> None:
    """Otherwise the other tests would compare a version with itself."""
    ask = [sys.executable, "-c", "import sharepod.protocol.frames as f; print(f.__file__)"]
    env = {**os.environ, "PYTHONPATH": str(older)}
    shown = subprocess.run(ask, env=env, capture_output=True, text=True, timeout=60, check=True)
    assert shown.stdout.strip().startswith(str(older))
    assert not (older / "sharepod" / "api" / "claims.py").exists()
