"""Upgrade: an operator takes over SharePods, Pods and ledgers from an operator of an older commit.

CRDs, policies and rights are replaced as docs/install.md describes, while the older operator still runs.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
from cluster.fake_agents import GPUNODES, FakeAgents, wait
from cluster.operator_world import AGENT_LEASE, TIMES, World
from harness.api import Api, Object
from harness.cluster import Cluster
from harness.fakes import FakeKubelets
from harness.installation import Installation
from harness.older import BEFORE_BUDGETS, NO_OLDER, OLDER, has_older, older_package

pytestmark = [
    pytest.mark.skipif(not has_older(), reason=NO_OLDER),
    pytest.mark.timeout(400),  # the older package is built first, and each test has a cluster of its own
]

_NAMESPACE = "default"
_SHARES: dict[str, Object] = {
    "runs": {"request": 0.4, "limit": 0.7, "memory": "4Gi"},
    "ends": {"request": 0.1},
    "fails": {"request": 0.1},
    "lingers": {"request": 0.2, "memory": "1Gi"},
    "pair": {"request": 0.3, "memory": "1Gi", "count": 2},
    "alone": {"mode": "Exclusive"},
}
"""Requests of the SharePods that run under the older operator, by name."""
_WAITS: Object = {"mode": "Exclusive", "count": 2}
"""Request of the waiting SharePod: it needs a whole node."""


@dataclass(frozen=True)
class Written:
    """State that the older operator has left: rows by name, and the uid of each Pod."""

    rows: dict[str, Object]
    pods: dict[str, str]


@pytest.fixture(params=[OLDER, BEFORE_BUDGETS])
def taken_over(request: pytest.FixtureRequest) -> Iterator[tuple[World, Written]]:
    """Let this operator take over from an older one. Yield the world, and the state that the older operator left."""
    with (
        older_package(request.param) as package,
        Cluster() as cluster,
        FakeKubelets(cluster.api) as kubelets,
        FakeAgents(cluster.api, duration=AGENT_LEASE, renew=0.5) as agents,
    ):
        before = Installation(cluster, package.parent / "manifests")
        cluster.runtime_class()
        nodes = cluster.add_fake_nodes(2, labels={"sharepod.dev/pool": "dedicated", "test": "old"}, prefix="old")
        program = [sys.executable, "-c", "from sharepod.controller.main import main; main()"]
        old = before.start_operator("older", env={**TIMES, "PYTHONPATH": str(package)}, program=program)
        for node in nodes:
            cluster.wait_for(f"{GPUNODES}/{node}", bool, what=f"GPUNode {node}")
        agents.start(*nodes)
        written = _lived(cluster.api, kubelets, agents, nodes)
        world = World(cluster, kubelets, agents)
        old.stop(0.0)
        world.start_operator()
        yield world, written
        assert not kubelets.failures, kubelets.failures[:3]
        assert not agents.failures


def _rows(api: Api) -> dict[str, Object]:
    ledgers = api.get(GPUNODES)["items"]
    return {row["podName"]: row for node in ledgers for row in node["spec"].get("tenants") or []}


def _lived(api: Api, kubelets: FakeKubelets, agents: FakeAgents, nodes: list[str]) -> Written:
    """Let the older operator place SharePods. Some of them end, one leaves a process behind, and one waits."""
    path = World.path(_NAMESPACE)

    def create(name: str, gpu: Object) -> None:
        containers = [{"name": "main", "image": "test"}]
        spec = {"gpu": gpu, "restartPolicy": "Never", "nodeSelector": {"test": "old"}, "containers": containers}
        api.create(
            path,
            {"apiVersion": "sharepod.dev/v1alpha1", "kind": "SharePod", "metadata": {"name": name}, "spec": spec},
        )

    def phase(name: str) -> str | None:
        found: str | None = (api.get(f"{path}/{name}").get("status") or {}).get("phase")
        return found

    for name, gpu in _SHARES.items():
        create(name, gpu)
        wait(lambda name=name: phase(name) == "Running", what=f"{name} runs")
    create("waits", _WAITS)
    kubelets.finish(_NAMESPACE, "ends")
    kubelets.finish(_NAMESPACE, "fails", phase="Failed", exit_code=3)
    wait(lambda: (phase("ends"), phase("fails")) == ("Succeeded", "Failed"), what="two that have ended")
    agents.leave_behind(api.get(f"{path}/lingers")["metadata"]["uid"])
    api.delete(f"{path}/lingers")
    staying = {"runs", "lingers", "pair", "alone"}
    wait(
        lambda: _rows(api).keys() == staying and _rows(api)["lingers"].get("state") == "Releasing",
        what="a row that is being released",
    )
    pods = api.get(f"/api/v1/namespaces/{_NAMESPACE}/pods")["items"]
    wait(lambda: phase("waits") in ("Pending", "NoRoom"), what="a SharePod with NoRoom")
    return Written(_rows(api), {pod["metadata"]["name"]: pod["metadata"]["uid"] for pod in pods})


@pytest.mark.promise("install-upgrade-written")
def test_what_an_older_operator_has_written_goes_on_unchanged_and_obeys_this_one(
    taken_over: tuple[World, Written],
) -> None:
    world, written = taken_over
    world.nodes("new")
    world.apply(_NAMESPACE, "first", {"request": 0.5, "memory": "1Gi"}, on="new")
    # the older operator has handled all objects when this SharePod runs
    world.phase(_NAMESPACE, "first", "Running")
    rows = _rows(world.api)
    for name in ("runs", "pair", "alone", "lingers"):
        for key in ("id", "gpus", "requestMilli", "limitMilli", "memory", "state", "podUID"):
            assert rows[name].get(key) == written.rows[name].get(key), (name, key)
    for name in ("runs", "pair", "alone"):
        assert (world.pod(_NAMESPACE, name) or {})["metadata"]["uid"] == written.pods[name]
        assert world.sharepod(_NAMESPACE, name)["status"]["phase"] == "Running"
    assert world.sharepod(_NAMESPACE, "ends")["status"]["phase"] == "Succeeded"
    assert world.sharepod(_NAMESPACE, "fails")["status"]["phase"] == "Failed"
    assert not {"ends", "fails"} & rows.keys(), "nothing runs a second time"

    world.agents.end(written.rows["lingers"]["id"])
    wait(lambda: "lingers" not in _rows(world.api), what="the release to end")
    world.api.patch(world.path(_NAMESPACE, "runs"), {"spec": {"gpu": {"request": 0.6}}})
    wait(lambda: _rows(world.api)["runs"]["requestMilli"] == 600, what="a raised share")
    for name in ("runs", "pair", "alone"):
        world.delete(_NAMESPACE, name)
    world.phase(_NAMESPACE, "waits", "Running")
    if "waits" in written.pods:
        assert (world.pod(_NAMESPACE, "waits") or {})["metadata"]["uid"] == written.pods["waits"]
    wait(lambda: _rows(world.api).keys() == {"waits", "first"}, what="the release of the deleted SharePods")
