"""Actions of users and administrators with kubectl, and their output, as the rows of docs/what-people-do.md describe
them.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from cluster.operator_world import World, wait
from harness.api import Object

PAGE = Path(__file__).resolve().parents[2] / "docs" / "what-people-do.md"
NODES = "/api/v1/nodes"
PRINTED = {
    int(cells[1]): re.findall(r"`([^`]+)`", cells[3])
    for cells in (line.split("|") for line in PAGE.read_text().splitlines())
    if len(cells) > 5 and cells[1].strip().isdigit()
}
"""For each row of the page: the texts that kubectl prints."""


def kubectl(world: World, *arguments: str, body: Object | None = None, **options: Any) -> str:
    """Return the output of kubectl, on success or failure, with runs of blanks as one blank."""
    text = None if body is None else json.dumps(body)
    answer = world.cluster.kubectl(*arguments, input=text, check=False, timeout=90, **options)
    return " ".join((answer.stdout + answer.stderr).split())


def prints(row: int, output: str) -> None:
    """Assert that an output contains the texts of a row of the page."""
    for words in PRINTED[row]:
        assert words in output, (row, words, output)


def manifest(name: str, on: str, gpu: Object, **spec: Any) -> Object:
    containers = [{"name": "main", "image": "test", "resources": {"requests": {"cpu": "100m"}}}]
    return {
        "apiVersion": "sharepod.dev/v1alpha1",
        "kind": "SharePod",
        "metadata": {"name": name},
        "spec": {"containers": containers, "nodeSelector": {"test": on}, "gpu": gpu, **spec},
    }


def server(world: World, on: str, *, nodes: int = 1, **spec: Any) -> str:
    """Create a namespace with the SharePod `server`, and wait until it runs on nodes of its own. Return the
    namespace."""
    world.nodes(on, nodes)
    namespace = world.cluster.namespace(on)
    kubectl(world, "apply", "-n", namespace, "-f", "-", body=manifest("server", on, {"request": 0.4}, **spec))
    world.phase(namespace, "server", "Running")
    return namespace


def runs_again(world: World, namespace: str, cause: str) -> Object:
    """Wait until `server` runs again after a run that ended for this cause. Return its status."""

    def again(seen: Object) -> bool:
        last = seen["status"].get("lastEnd") or {}
        return seen["status"]["phase"] == "Running" and last.get("cause") == cause

    return world.until(namespace, "server", again, what=f"another run after {cause}")


def granted(world: World, namespace: str, milli: int) -> None:
    """Wait until `server` is granted this number of thousandths."""

    def holds(seen: Object) -> bool:
        return bool(seen["status"]["granted"]["requestMilli"] == milli)

    world.until(namespace, "server", holds, what=f"{milli} granted")


def events(world: World, namespace: str, reason: str) -> str:
    """Return the Events of `server`, once one of them has this reason."""
    world.event(namespace, "server", reason)
    return kubectl(world, "events", "-n", namespace, "--for", "sharepod/server")


@pytest.mark.promise("operator-comes-back")
def test_drain_and_uncordon(world: World) -> None:
    namespace = server(world, "drained", nodes=2)
    before = world.sharepod(namespace, "server")["status"]["node"]
    if before != "drained-0":  # SharePods on another node are moved to this one first
        kubectl(world, "drain", before, "--ignore-daemonsets")
        runs_again(world, namespace, "Drained")
        kubectl(world, "uncordon", before)
    former = world.sharepod(namespace, "server")["status"].get("restarts", 0)
    drained = kubectl(world, "drain", "drained-0", "--ignore-daemonsets")
    world.until(
        namespace,
        "server",
        lambda seen: seen["status"]["phase"] == "Running" and seen["status"]["node"] == "drained-1",
        what="another node",
    )
    prints(1, drained + events(world, namespace, "Drained"))
    columns = kubectl(world, "get", "sharepods", "-n", namespace)
    prints(2, columns)
    assert f"Running {former + 1} " in columns
    assert "drained-1" in columns
    prints(3, kubectl(world, "uncordon", "drained-0"))
    filler = manifest("filler", "drained", {"request": 0.7})
    for name in ("a", "b", "c"):
        kubectl(world, "apply", "-n", namespace, "-f", "-", body={**filler, "metadata": {"name": name}})
        world.phase(namespace, name, "Running")
    assert world.rows("drained-0")


@pytest.mark.promise("operator-comes-back", "operator-ready", "operator-started")
def test_delete_pod_and_wait(world: World) -> None:
    namespace = server(world, "podgone")
    prints(32, events(world, namespace, "Started"))
    deleted = kubectl(world, "delete", "pod", "server", "-n", namespace)
    runs_again(world, namespace, "Deleted")
    prints(5, deleted + events(world, namespace, "Deleted"))
    prints(6, kubectl(world, "wait", "--for=condition=Ready", "sharepod/server", "-n", namespace, "--timeout=60s"))
    kubectl(world, "delete", "pod", "server", "-n", namespace)
    waits = world.condition(namespace, "server", "Placed", status="False", reason="BackOff")
    assert "is placed again at" in waits
    shown = world.sharepod(namespace, "server")
    assert not shown["status"].get("gpus")
    owners = {item["operation"] for item in shown["metadata"]["managedFields"] if item.get("subresource") == "status"}
    assert owners == {"Apply"}  # a second owner would keep the list of GPUs when it should become empty


def test_delete_in_the_foreground_and_with_its_namespace(world: World) -> None:
    namespace = server(world, "going")
    body = manifest("server", "going", {"request": 0.4})
    for row, options in ((10, ()), (11, ("--cascade=foreground",))):
        prints(row, kubectl(world, "delete", "sharepod", "server", "-n", namespace, *options))
        wait(lambda: not world.rows("going-0"), what="an empty ledger")
        wait(lambda: world.pod(namespace, "server") is None, what="the end of the Pod")
        kubectl(world, "apply", "-n", namespace, "-f", "-", body=body)
        world.phase(namespace, "server", "Running")
    prints(13, kubectl(world, "delete", "namespace", namespace))
    wait(lambda: not world.rows("going-0"), what="an empty ledger")


def test_a_finalizer_holds_the_sharepod_and_not_its_share(world: World) -> None:
    namespace = server(world, "held")
    path = world.path(namespace, "server")
    world.api.patch(path, {"metadata": {"finalizers": ["example.com/hold"]}})
    kubectl(world, "delete", "sharepod", "server", "-n", namespace, "--wait=false")
    wait(lambda: not world.rows("held-0"), what="an empty ledger")
    wait(lambda: world.pod(namespace, "server") is None, what="the end of the Pod")
    assert world.sharepod(namespace, "server")["metadata"]["deletionTimestamp"]
    world.api.patch(path, {"metadata": {"finalizers": None}})
    world.cluster.wait_for(path, lambda seen: seen is None, what="the end of the SharePod")


@pytest.mark.promise("security-gpunodes-hidden")
def test_an_editor_of_a_namespace_gets_all_and_no_ledger(world: World) -> None:
    namespace = server(world, "edited")
    kubectl(world, "create", "rolebinding", "eve", "--clusterrole=edit", "--user=eve", "-n", namespace)
    eve = world.cluster.user_kubeconfig("eve")
    wait(
        lambda: "Forbidden" not in kubectl(world, "get", "sharepods", "-n", namespace, kubeconfig=eve),
        what="the right to read SharePods",
    )
    everything = kubectl(world, "get", "all", "-n", namespace, kubeconfig=eve)
    prints(15, everything)
    assert "Forbidden" not in everything
    prints(16, kubectl(world, "get", "gpunodes", kubeconfig=eve))
    prints(26, kubectl(world, "scale", "sharepod", "server", "-n", namespace, "--replicas=2", kubeconfig=eve))


@pytest.mark.promise("operator-unknown-fields", "operator-limit-default")
def test_typos_dry_runs_and_diffs(world: World) -> None:
    namespace = world.cluster.namespace("typos")
    apply = ("apply", "-n", namespace, "-f", "-")
    prints(18, kubectl(world, *apply, body=manifest("server", "typos", {"request": 0.4}, nodeSelektor={"a": "b"})))
    prints(19, kubectl(world, *apply, body=manifest("server", "typos", {"mode": "exclusive"})))
    good = manifest("server", "typos", {"request": 0.4})
    prints(20, kubectl(world, *apply, "--dry-run=server", body=good))
    assert "NotFound" in kubectl(world, "get", "sharepod", "server", "-n", namespace)
    kubectl(world, *apply, body=good)
    other = manifest("server", "typos", {"request": 0.4, "limit": 0.8})
    prints(21, kubectl(world, "diff", "-n", namespace, "-f", "-", body=other))


@pytest.mark.promise("operator-immutable", "operator-one-pod", "time-resized")
def test_edit_and_rollback(world: World) -> None:
    namespace = server(world, "changed")
    apply = ("apply", "-n", namespace, "-f", "-")
    first = manifest("server", "changed", {"request": 0.4})
    prints(22, kubectl(world, *apply, body=first))
    for row, request in ((23, 0.6), (25, 0.4)):
        prints(row, kubectl(world, *apply, body=manifest("server", "changed", {"request": request})))
        granted(world, namespace, int(request * 1000))
    image = manifest("server", "changed", {"request": 0.4})
    image["spec"]["containers"][0]["image"] = "other"
    prints(24, kubectl(world, *apply, body=image))
    prints(26, kubectl(world, "scale", "sharepod", "server", "-n", namespace, "--replicas=2"))


def container_state(world: World, namespace: str, waiting: str, restarts: int) -> None:
    """Report, as the kubelet does, that the container waits for this reason."""
    state = {"waiting": {"reason": waiting, "message": "m"}}
    status = {"name": "main", "ready": False, "restartCount": restarts, "image": "i", "imageID": "", "state": state}
    ready = [{"type": "Ready", "status": "False"}, {"type": "ContainersReady", "status": "False"}]
    path = f"/api/v1/namespaces/{namespace}/pods/server/status"
    world.api.patch(path, {"status": {"containerStatuses": [status], "conditions": ready}})


def shows(world: World, namespace: str, row: int, further: str = "") -> None:
    """Wait until `kubectl get` prints the text of this row of the page."""

    def printed() -> bool:
        output = kubectl(world, "get", "sharepods", "-n", namespace)
        return all(words in output for words in (*PRINTED[row], further))

    wait(printed, what=f"{PRINTED[row]} {further}")


@pytest.mark.promise("operator-columns", "operator-comes-back")
def test_crash_loop_bad_image_and_memory_pressure(world: World) -> None:
    namespace = server(world, "trouble")
    container_state(world, namespace, "CrashLoopBackOff", 7)
    shows(world, namespace, 27, "CrashLoopBackOff 7 ")
    container_state(world, namespace, "ImagePullBackOff", 0)
    shows(world, namespace, 28)
    status = {"phase": "Failed", "reason": "Evicted", "message": "The node was low on resource: memory."}
    world.api.patch(f"/api/v1/namespaces/{namespace}/pods/server/status", {"status": status})
    prints(29, events(world, namespace, "Evicted"))
    world.condition(namespace, "server", "Placed", status="False", reason="BackOff")
    runs_again(world, namespace, "Evicted")


@pytest.mark.promise("operator-ttl", "operator-columns")
def test_work_that_ends_shows_completed_and_goes_when_its_time_is_over(world: World) -> None:
    namespace = server(world, "finished", restartPolicy="Never")
    world.kubelets.finish(namespace, "server")
    world.phase(namespace, "server", "Succeeded")
    assert "Completed" in kubectl(world, "get", "sharepods", "-n", namespace)
    world.api.patch(world.path(namespace, "server"), {"spec": {"ttlSecondsAfterFinished": 1}})
    world.cluster.wait_for(world.path(namespace, "server"), lambda seen: seen is None, what="the end of its time")
