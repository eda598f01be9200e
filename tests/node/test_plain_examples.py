"""The examples of plain Pods on a real node: each workload as it stands in examples/plain, with its one line more, gets
the shares that its line says, is scaled, outlives a drain of what its budget lets go, and ends.

API server, its policies, scheduler, controllers, kubelet, containerd, operator, agent and hook are real; the GPUs are
the double's. Images and commands are the test's; what the examples say of GPUs, labels, probes and hooks stays.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import yaml
from cluster.plain_world import MILLI
from harness.api import Object
from harness.cluster import Cluster, wait_until
from harness.installation import MANIFESTS
from harness.node import BASE_IMAGE
from harness.shares import POINTS, measured
from node.claim_node import RESTRICTED, container
from node.claim_system import NAMESPACE, ClaimSystem, system_with_claims

EXAMPLES = sorted((MANIFESTS.parent / "examples" / "plain").glob("*.yaml"))
GPUS = 8
KERNEL_US = "10000"
"""Length of the kernels: thirteen programs that launch long ones take little of two cores."""


@pytest.fixture(scope="module")
def system(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ClaimSystem]:
    with system_with_claims(cluster, tmp_path_factory.mktemp("gpus"), gpus=GPUS, plain=True) as running:
        yield running


def example(number: str, *, seconds: float | None = None) -> list[Object]:
    """The objects of an example, able to run on the test's node. `seconds`: for which its Pods work."""
    (path,) = [each for each in EXAMPLES if each.name.startswith(number)]
    objects: list[Object] = list(yaml.safe_load_all(path.read_text()))
    for each in objects:
        for spec in pod_specs(each):
            ends = ("--seconds", str(seconds)) if seconds is not None else ()
            spec["containers"] = [runnable(one, *ends) for one in spec["containers"]]
            spec["terminationGracePeriodSeconds"] = 2
    return objects


def pod_specs(item: Object) -> list[Object]:
    if item["kind"] == "Pod":
        return [item["spec"]]
    return [item["spec"]["template"]["spec"]] if "template" in item["spec"] else []


def runnable(one: Object, *args: str) -> Object:
    """A container with a program of the test: one that launches kernels where it has a line, else one that waits."""
    mine = container("--kernel-us", KERNEL_US, *args, name=one["name"], claim=None)
    if MILLI not in one["resources"].get("limits", {}):
        mine = {"name": one["name"], "image": BASE_IMAGE, "command": ["sleep", "600"], "securityContext": RESTRICTED}
    hooks = {"lifecycle": {"preStop": {"exec": {"command": ["true"]}}}} if "lifecycle" in one else {}
    kept = {name: value for name, value in one.items() if name not in ("image", "command", "args", "lifecycle", "env")}
    return {**kept, **hooks, **{name: value for name, value in mine.items() if name not in ("name", "resources")}}


def share_as_asked(system: ClaimSystem, rows: list[Object]) -> None:
    """Measure the shares of Pods that all want everything: on each GPU each has its request, within two points, and of
    what nobody has requested a part, up to its limit; and no time of the GPU is left."""
    found = measured(system.machine.busy_ns)
    slack = POINTS + found.stolen
    for uuid in {uuid for row in rows for uuid in row["gpus"]}:
        here = [row for row in rows if uuid in row["gpus"]]
        free = 100 - sum(row["requestMilli"] for row in here) / 10
        got = {row["podName"]: found.percent.get((row["podName"], uuid), 0.0) for row in here}
        for row in here:
            asked, limit = row["requestMilli"] / 10, row["limitMilli"] / 10
            most = min(asked + free, limit) + slack
            assert asked - slack <= got[row["podName"]] <= most, (row["podName"], asked, most, got, found.stolen)
        usable = min(100.0, sum(row["limitMilli"] for row in here) / 10)
        assert sum(got.values()) >= usable - slack, (uuid, got, found.stolen)


def rows_by_pod(system: ClaimSystem) -> list[Object]:
    """The ledger, each row with the name of the Pod that its claim was made for."""
    claims = system.cluster.api.get(f"/apis/resource.k8s.io/v1/namespaces/{NAMESPACE}/resourceclaims")["items"]
    owner = {one["metadata"]["uid"]: one["metadata"]["ownerReferences"][0]["name"] for one in claims}
    return [row | {"podName": owner.get(row["id"], "")} for row in system.rows()]


def with_line(system: ClaimSystem) -> dict[str, Object]:
    """Pods with a line that have not ended, by name."""
    living = [pod for pod in system.pods() if pod["status"].get("phase") not in ("Succeeded", "Failed")]
    return {
        pod["metadata"]["name"]: pod
        for pod in living
        if "deletionTimestamp" not in pod["metadata"]
        and any(MILLI in one["resources"].get("limits", {}) for one in pod["spec"]["containers"])
    }


def await_sharing(system: ClaimSystem, count: int) -> list[Object]:
    """Wait until so many Pods with a line run and their programs are connected; their rows."""

    def connected() -> bool:
        told = system.cluster.api.get(system.gpunode)["status"].get("tenants", [])
        pods = with_line(system)
        return (
            len(pods) == count
            and all(pod["status"].get("phase") == "Running" for pod in pods.values())
            and {row["podName"] for row in rows_by_pod(system) if row["state"] == "Reserved"} == pods.keys()
            and sum(bool(one.get("connected")) for one in told) >= count
        )

    wait_until(connected, what=f"{count} Pods that share", timeout=90)
    return [row for row in rows_by_pod(system) if row["state"] == "Reserved"]


@pytest.mark.promise("operator-line-examples")
@pytest.mark.alone
def test_workloads_with_one_line_more_share_scale_drain_and_end(system: ClaimSystem) -> None:
    # 1. All that run on, then a Job beside them: as due, each one.
    for number in ("01", "04", "05", "06", "07"):
        system.apply(*example(number))
    await_sharing(system, 11)
    system.apply(*example("02", seconds=25))
    rows = await_sharing(system, 13)
    assert sorted(row["requestMilli"] for row in rows) == [200] * 2 + [250] * 4 + [300] * 3 + [500] * 4
    assert {row["limitMilli"] for row in rows if row["requestMilli"] == 300} == {800}
    store = {row["gpus"][0] for row in rows if row["podName"].startswith("line-store-")}
    assert len(store) == 2, "anti-affinity"
    share_as_asked(system, rows)

    # 2. The kubelet starts again; the Job ends, and an indexed one on two GPUs each runs beside the others.
    running = {name for name in with_line(system) if not name.startswith("line-batch")}
    system.machine.real.restart_kubelet()
    wait_until(lambda: ready(system), what="the node is ready again", timeout=60)
    system.apply(*example("03", seconds=3))
    wide = one_of_sweep(system)
    assert (wide["requestMilli"], len(wide["gpus"])) == (400, 2)
    await_complete(system, "line-batch", 4)
    await_complete(system, "line-sweep", 3)
    assert running == with_line(system).keys()
    assert system.restarts() == 0

    # 3. Scaled up and down.
    kubectl(system, "scale", "deployment/line-scaled", "--replicas=4")
    await_sharing(system, 13)
    kubectl(system, "scale", "deployment/line-scaled", "--replicas=2")
    await_sharing(system, 11)

    # 4. The others end; of the two that are left a drain takes one, and its replacement comes once the node is back.
    kubectl(system, "delete", "deployment/line-inference", "deployment/line-cluster-workers", "statefulset/line-store")
    kubectl(system, "delete", "pod", "-l", "app=line-jupyterhub")
    await_sharing(system, 2)
    kept = drained(system)
    assert len(kept) == 1, "the budget keeps one"
    rows = await_sharing(system, 2)
    assert kept < {row["podName"] for row in rows}
    share_as_asked(system, rows)
    kubectl(system, "delete", "deployment/line-scaled")
    wait_until(lambda: not system.rows(), what="the shares given back", timeout=60)


def one_of_sweep(system: ClaimSystem) -> Object:
    """The row of a Pod of the indexed Job."""

    def found() -> list[Object]:
        return [row for row in rows_by_pod(system) if row["podName"].startswith("line-sweep")]

    seen: list[Object] = []

    def came() -> bool:
        seen.extend(found())
        return bool(seen)

    wait_until(came, what="a row of the indexed Job", timeout=60, interval=0.2)
    return seen[0]


def await_complete(system: ClaimSystem, job: str, completions: int) -> None:
    path = f"/apis/batch/v1/namespaces/{NAMESPACE}/jobs/{job}"

    def status() -> Any:
        return system.cluster.api.get(path)["status"]

    wait_until(lambda: status().get("succeeded") == completions, what=f"{job} complete", timeout=60 * completions)
    assert not status().get("failed")


def drained(system: ClaimSystem) -> set[str]:
    """Drain the node as far as the budget allows, and let it be used again; the Pods of the Deployment that stay."""
    before = set(with_line(system))
    options = ("--ignore-daemonsets", "--force", "--pod-selector=app=line-scaled", "--timeout=8s")
    said = system.cluster.kubectl("drain", system.machine.node, *options, check=False, timeout=60)
    assert said.returncode != 0
    assert "disruption budget" in said.stderr
    stay = before & set(with_line(system))
    system.cluster.kubectl("uncordon", system.machine.node)
    return stay


def kubectl(system: ClaimSystem, *args: str) -> None:
    system.cluster.kubectl(*args, "-n", NAMESPACE, timeout=90)


def ready(system: ClaimSystem) -> bool:
    conditions = system.cluster.api.get(f"/api/v1/nodes/{system.machine.node}")["status"]["conditions"]
    return any(one["type"] == "Ready" and one["status"] == "True" for one in conditions)
