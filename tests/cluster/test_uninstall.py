"""The printed commands of docs/install.md that remove SharePod, in a cluster with shares of SharePods, claims and plain
Pods."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import yaml
from cluster.claims_world import CLAIMS, make_claim, make_pod, runs
from cluster.fake_agents import FakeAgents
from cluster.operator_world import World, wait
from cluster.pasted import paste_uninstall
from cluster.plain_world import MILLI, install_plain, line_pod, need_mutating_policies
from harness.api import Object
from harness.cluster import Cluster
from harness.fakes import FakeKubelets
from harness.installation import MANIFESTS, POOL_LABEL

PATIENCE_S = 120.0


def left_over(cluster: Cluster) -> list[str]:
    """Return the objects of SharePod that still exist, in the whole cluster and in a team's namespace."""
    kinds = cluster.kubectl("api-resources", "--namespaced=false", "--verbs=list", "-o", "name").stdout.split()
    found = cluster.kubectl("get", ",".join(kinds), "-o", "name", timeout=60).stdout.split()
    found += [str(item["metadata"]["name"]) for item in templates(cluster)]
    return [name for name in found if "sharepod" in name]


def templates(cluster: Cluster) -> list[Object]:
    items: list[Object] = cluster.api.get(f"{CLAIMS}/resourceclaimtemplates")["items"]
    return items


@pytest.mark.promise("install-uninstall")
@pytest.mark.timeout(240)
def test_the_printed_commands_wait_for_shares_of_every_door_name_them_and_leave_nothing(tmp_path: Path) -> None:
    with (
        Cluster(keep_logs=bool(os.environ.get("KEEP_LOGS"))) as cluster,
        FakeKubelets(cluster.api) as kubelets,
        FakeAgents(cluster.api, duration=3, renew=0.5) as agents,
    ):
        world = World(cluster, kubelets, agents)
        need_mutating_policies(cluster.api)
        world.start_operator()
        install_plain(cluster)
        (node,) = world.nodes("goes")
        team = cluster.namespace("team-a")
        world.apply(team, "pod", {"request": 0.3, "memory": "1Gi"}, on="goes")
        make_claim(world, team, "own", time_milli=200, memory="1Gi")
        make_pod(world, team, "by-claim", on="goes", claims=("own",))
        cluster.api.create(f"/api/v1/namespaces/{team}/pods", line_pod(name="by-line", nodeSelector={"test": "goes"}))
        for name in ("pod", "by-claim", "by-line"):
            runs(world, team, name)
        assert templates(cluster)
        assert MILLI in cluster.api.get(f"/api/v1/nodes/{node}")["status"]["allocatable"]

        claims = {row["claim"]["name"] for row in world.rows(node) if "claim" in row}
        kept = sorted(f"{node} {team} claim {name}" for name in claims)
        assert len(kept) == 2
        overlay = {"resources": [os.path.relpath(MANIFESTS, tmp_path.resolve())]}
        (tmp_path / "kustomization.yaml").write_text(yaml.safe_dump(overlay))
        printed = tmp_path / "printed"
        script = paste_uninstall(cluster, tmp_path, printed)

        def last_look() -> list[str]:
            lines = printed.read_text().rpartition("these still hold a share:\n")[2].splitlines()
            return sorted(lines)

        try:
            wait(
                lambda: last_look() == kept,
                what="the SharePod's share is released, both others named",
                timeout=PATIENCE_S,
            )
            half = paste_uninstall(cluster, tmp_path, tmp_path / "half", strict=False, first=1)
            try:
                wait(
                    lambda: f"not deleted yet: gpunode {node}, whose node keeps" in (tmp_path / "half").read_text(),
                    what="the second block alone to wait for the shares",
                    timeout=PATIENCE_S,
                )
                (last, *_) = (tmp_path / "half").read_text().splitlines()[::-1]
                assert sorted(last.partition(" shares of ")[2].split()) == sorted(f"{team}/{one}" for one in claims)
                assert POOL_LABEL in cluster.api.get(f"/api/v1/nodes/{node}")["metadata"]["labels"]
            finally:
                half.kill()
                half.wait()
            cluster.kubectl("delete", "pods", "--all", "-n", team, timeout=60)
            wait(lambda: script.poll() is not None, what="the commands to end", timeout=PATIENCE_S)
        finally:
            script.kill()
        assert script.wait() == 0, printed.read_text()
        assert left_over(cluster) == []
        again = paste_uninstall(cluster, tmp_path, printed, strict=False)
        try:
            wait(lambda: again.poll() is not None, what="the same commands to end once more", timeout=PATIENCE_S)
        finally:
            again.kill()
            again.wait()
        assert "still hold a share" not in printed.read_text()
        assert MILLI not in cluster.api.get(f"/api/v1/nodes/{node}")["status"]["allocatable"]
