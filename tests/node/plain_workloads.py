"""Workloads of examples/plain on a real node, and their measured shares of its simulated GPUs.

The test replaces images and commands; GPUs, labels, probes and hooks of the examples stay.
"""

from __future__ import annotations

from typing import Any

import yaml
from cluster.plain_world import MILLI
from harness.api import Object
from harness.cluster import wait_until
from harness.installation import MANIFESTS
from harness.node import BASE_IMAGE
from harness.shares import LONG_WINDOW_S, POINTS
from node.claim_node import RESTRICTED, container
from node.claim_system import NAMESPACE, ClaimSystem

EXAMPLES = sorted((MANIFESTS.parent / "examples" / "plain").glob("*.yaml"))
KERNEL_US = "10000"
"""Length of the programs' kernels in microseconds. Kernels are long so that thirteen programs take little processor
time on two cores."""


def example(number: str, *, seconds: float | None = None) -> list[Object]:
    """Return the objects of an example, changed so that they can run on the test's node. `seconds`: time for which its
    Pods work."""
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
    """Return a container with a program of the test. With a line the program launches kernels, without a line
    it waits."""
    mine = container("--kernel-us", KERNEL_US, *args, name=one["name"], claim=None)
    if MILLI not in one["resources"].get("limits", {}):
        mine = {"name": one["name"], "image": BASE_IMAGE, "command": ["sleep", "600"], "securityContext": RESTRICTED}
    hooks = {"lifecycle": {"preStop": {"exec": {"command": ["true"]}}}} if "lifecycle" in one else {}
    kept = {name: value for name, value in one.items() if name not in ("image", "command", "args", "lifecycle", "env")}
    return {**kept, **hooks, **{name: value for name, value in mine.items() if name not in ("name", "resources")}}


def share_as_asked(system: ClaimSystem, rows: list[Object]) -> None:
    """Measure the shares of Pods that all want the whole GPU. Each Pod must have its request, within two points, and a
    part of the time that no Pod has requested, up to its limit. No GPU may be idle."""
    found = system.machine.shares(LONG_WINDOW_S)
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
    """Return the rows of the ledger. Each has the name of its Pod, or of the Pod that uses its claim."""
    if all(row.get("podName") for row in system.rows()):
        return system.rows()
    claims = system.cluster.api.get(f"/apis/resource.k8s.io/v1/namespaces/{NAMESPACE}/resourceclaims")["items"]
    owner = {one["metadata"]["uid"]: one["metadata"]["ownerReferences"][0]["name"] for one in claims}
    return [row | {"podName": row.get("podName") or owner.get(row["id"], "")} for row in system.rows()]


def with_line(system: ClaimSystem) -> dict[str, Object]:
    """Return the Pods with a line that have not ended, by name."""
    living = [pod for pod in system.pods() if pod["status"].get("phase") not in ("Succeeded", "Failed")]
    return {
        pod["metadata"]["name"]: pod
        for pod in living
        if "deletionTimestamp" not in pod["metadata"]
        and any(MILLI in one["resources"].get("limits", {}) for one in pod["spec"]["containers"])
    }


def await_sharing(system: ClaimSystem, count: int) -> list[Object]:
    """Wait until this number of Pods with a line run and their programs are connected. Return their rows."""

    def connected() -> bool:
        pods = with_line(system)
        if len(pods) != count or any(pod["status"].get("phase") != "Running" for pod in pods.values()):
            return False  # not even read the GPUNode: before a Pod runs, the GPUNode may not exist
        tenants = system.cluster.api.get(system.gpunode)["status"].get("tenants", [])
        reserved = {row["podName"] for row in rows_by_pod(system) if row["state"] == "Reserved"}
        return reserved == pods.keys() and sum(bool(one.get("connected")) for one in tenants) >= count

    wait_until(connected, what=f"{count} Pods that share", timeout=90)
    return [row for row in rows_by_pod(system) if row["state"] == "Reserved"]


def await_running(system: ClaimSystem, start: str, count: int) -> None:
    """Wait until the Pods with this name prefix that have not ended are `count`, and all of them run. Failed Pods are
    allowed: a container that starts during a restart of the kubelet fails with StartError (1.36.3, containerd
    2.2.9)."""

    def runs() -> bool:
        phases = [pod["status"].get("phase") for name, pod in with_line(system).items() if name.startswith(start)]
        return phases == ["Running"] * count

    wait_until(runs, what=f"{count} Pods {start}... that run", timeout=60)


def kubectl(system: ClaimSystem, *args: str) -> None:
    system.cluster.kubectl(*args, "-n", NAMESPACE, timeout=90)


def await_complete(system: ClaimSystem, job: str, completions: int) -> None:
    """Wait until a Job has completed and all of its Pods have succeeded."""
    path = f"/apis/batch/v1/namespaces/{NAMESPACE}/jobs/{job}"

    def status() -> Any:
        return system.cluster.api.get(path)["status"]

    wait_until(lambda: status().get("succeeded") == completions, what=f"{job} complete", timeout=60 * completions)
    failed = [pod for pod in system.pods() if pod["status"].get("phase") == "Failed"]
    assert not status().get("failed"), [(pod["metadata"]["name"], pod["status"], logs(system, pod)) for pod in failed]


def logs(system: ClaimSystem, pod: Object) -> str:
    """Return the last lines of a Pod's log."""
    name = pod["metadata"]["name"]
    return system.cluster.kubectl("logs", name, "-n", NAMESPACE, "--tail=20", check=False, timeout=30).stdout
