"""Two versions of the API on a real API server: both are served, the operator's own server converts, each side reads
what the other has written, and a migration leaves one version alone."""

from __future__ import annotations

import base64
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from cluster.fake_agents import FakeAgents
from cluster.operator_world import AGENT_LEASE, TIMES, World, wait
from doubles import second_version
from harness.api import ApiError, Object
from harness.cluster import Cluster, free_ports
from harness.fakes import FakeKubelets
from harness.installation import MANIFESTS, NAMESPACE
from sharepod.api.crd.served_versions import with_versions
from sharepod.api.versions.kind_versions import KindVersions, kept_annotation

ROOT = Path(__file__).resolve().parents[2]
OLD = "/apis/sharepod.dev/v1test"
KINDS = ("sharepods", "gpunodes")
_OPERATOR: list[str | Path] = [sys.executable, Path(__file__).with_name("operator_of_two_versions.py")]


class TwoVersions:
    """World whose CRDs have both versions; v1test, the older one, is stored at first."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.cluster = world.cluster
        self.api = world.api
        self.pair = self.cluster.authority.issue("conversion", "conversion", addresses=["127.0.0.1"])
        (self.port,) = free_ports(1)

    def start_operator(self, name: str = "operator") -> None:
        env = {
            **TIMES,
            "PYTHONPATH": str(ROOT / "tests"),
            "SHAREPOD_CONVERSION_PORT": str(self.port),
            "SHAREPOD_CONVERSION_CERTIFICATE": str(self.pair.certificate),
            "SHAREPOD_CONVERSION_KEY": str(self.pair.key),
        }
        operator = self.world.operator = self.world.installation.start_operator(name, env=env, program=_OPERATOR)

        def listens() -> bool:
            assert operator.status() is None, operator.log_tail(30)
            with socket.socket() as probe:
                return probe.connect_ex(("127.0.0.1", self.port)) == 0

        wait(listens, what="the conversion server", timeout=60)

    def apply_crds(self, kinds: dict[str, KindVersions] | None) -> None:
        """Apply the CRDs with these versions; None: as they are checked in."""
        bundle = base64.b64encode(self.cluster.ca.read_bytes()).decode()
        client = {"url": f"https://127.0.0.1:{self.port}/convert", "caBundle": bundle}
        for plural in KINDS:
            crd = yaml.safe_load((ROOT / "crds" / f"{plural}.yaml").read_text())
            if kinds is None:
                crd["spec"]["conversion"] = {"strategy": "None"}
            else:
                crd = with_versions(crd, kinds[crd["spec"]["names"]["kind"]], client)
            self.cluster.kubectl(
                "apply", "--server-side", "--force-conflicts", "-f", "-", input=yaml.safe_dump(crd), timeout=60
            )

    def await_served(self, version: str, *, served: bool = True) -> None:
        def holds() -> bool:
            for plural in KINDS:
                try:
                    self.api.get(f"/apis/sharepod.dev/{version}/{plural}")
                except ApiError:
                    return not served
            return served

        wait(holds, what=f"{version} served: {served}", timeout=30)

    def stored(self, plural: str) -> list[str]:
        crd = self.api.get(f"/apis/apiextensions.k8s.io/v1/customresourcedefinitions/{plural}.sharepod.dev")
        versions: list[str] = crd["status"]["storedVersions"]
        return sorted(versions)

    def create_old(self, namespace: str, name: str, on: str, **gpu: Any) -> Object:
        body: Object = {
            "apiVersion": second_version.API_VERSION,
            "kind": "SharePod",
            "metadata": {"name": name},
            "spec": {
                "restartPolicy": "Never",
                "gpu": gpu,
                "containers": [{"name": "main", "image": "test"}],
                "nodeSelector": {"test": on},
            },
        }
        return self.api.create(f"{OLD}/namespaces/{namespace}/sharepods", body)

    def old(self, namespace: str, name: str) -> Object:
        found: Object = self.api.get(f"{OLD}/namespaces/{namespace}/sharepods/{name}")
        return found

    def migrate(self) -> subprocess.CompletedProcess[str]:
        """Run the command with the rights of the ClusterRole in manifests/conversion."""
        token = self.cluster.service_account_token(NAMESPACE, "migrator")
        config = self.cluster.kubeconfig_for(token, name="migrator")
        command = [sys.executable, "-m", "sharepod.controller.migrate", "--kubeconfig", str(config), "--settle", "1"]
        return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


@pytest.fixture(scope="module")
def versions() -> Iterator[TwoVersions]:
    with (
        Cluster(keep_logs=bool(os.environ.get("KEEP_LOGS"))) as cluster,
        FakeKubelets(cluster.api) as kubelets,
        FakeAgents(cluster.api, duration=AGENT_LEASE, renew=0.5) as agents,
    ):
        two = TwoVersions(World(cluster, kubelets, agents))
        cluster.kubectl("apply", "-f", MANIFESTS / "conversion" / "migrate.yaml")
        cluster.kubectl("create", "serviceaccount", "migrator", "-n", NAMESPACE)
        binding = ["clusterrolebinding", "migrator", "--clusterrole=sharepod-migrate"]
        cluster.kubectl("create", *binding, f"--serviceaccount={NAMESPACE}:migrator")
        two.start_operator()
        two.apply_crds(second_version.kinds(stored="v1test"))
        two.await_served("v1test")
        yield two


@pytest.mark.promise("install-two-versions")
def test_both_versions_are_placed_read_by_each_other_and_migrated_to_one(versions: TwoVersions) -> None:
    world, api = versions.world, versions.api
    team = versions.cluster.namespace("team-versions")
    (node,) = world.nodes("versions")

    # 1. Each version is placed, and read in the other; what one cannot say outlives the writes of the other.
    world.apply(team, "new", {"request": 0.4, "memory": "4096.0Mi", "latency": "Interactive"}, on="versions")
    versions.create_old(team, "old", "versions", guaranteed=0.3, memoryAmount=2, memoryUnit="Gi", team="red")
    for name in ("new", "old"):
        world.phase(team, name, "Running", timeout=40)
    as_old, as_new = versions.old(team, "new"), world.sharepod(team, "old")
    assert as_old["spec"]["gpu"]["guaranteed"] == 0.4
    assert (as_old["spec"]["gpu"]["memoryAmount"], as_old["spec"]["gpu"]["memoryUnit"]) == (4 << 30, "")
    assert as_new["spec"]["gpu"]["request"] == 0.3
    assert as_new["spec"]["gpu"]["memory"] == "2Gi"
    assert versions.old(team, "old")["spec"]["gpu"]["team"] == "red", "the operator has written its status in v1alpha1"
    new = world.sharepod(team, "new")
    assert (new["spec"]["gpu"]["memory"], new["spec"]["gpu"]["latency"]) == ("4096.0Mi", "Interactive")
    assert kept_annotation("v1alpha1") not in new["metadata"].get("annotations", {})

    # 2. The ledger: a row of the operator is read in the old version, and one that was written there by the operator.
    rows = {row["pod"]: row for row in api.get(f"{OLD}/gpunodes/{node}")["spec"]["tenants"]}
    assert rows[f"{team}/old"]["guaranteedMilli"] == 300
    for row in rows.values():
        row["rank"] = 7
    api.patch(f"{OLD}/gpunodes/{node}", {"spec": {"tenants": list(rows.values())}})
    world.apply(team, "third", {"request": 0.1, "memory": "1Gi"}, on="versions")
    world.phase(team, "third", "Running", timeout=40)
    after = {row["pod"]: row.get("rank") for row in api.get(f"{OLD}/gpunodes/{node}")["spec"]["tenants"]}
    assert after == {f"{team}/new": 7, f"{team}/old": 7, f"{team}/third": None}

    # 3. Migration to the new version, and the old one goes.
    versions.apply_crds(second_version.kinds(stored="v1alpha1"))
    assert versions.stored("sharepods") == versions.stored("gpunodes") == ["v1alpha1", "v1test"]
    done = versions.migrate()
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "sharepods.sharepod.dev: 3 written" in done.stdout
    assert versions.stored("sharepods") == versions.stored("gpunodes") == ["v1alpha1"]
    assert "nothing to do" in versions.migrate().stdout
    assert world.operator is not None
    world.operator.stop()
    versions.apply_crds(None)
    versions.await_served("v1test", served=False)

    # 4. Nothing is left that would need a conversion: an operator without one goes on where the other ended.
    world.start_operator("successor")
    assert world.sharepod(team, "old")["spec"]["gpu"]["request"] == 0.3
    world.delete(team, "third")
    wait(lambda: world.row(node, "third") is None, what="the row of third gone", timeout=40)
    assert {row["podName"] for row in world.rows(node)} == {"new", "old"}
