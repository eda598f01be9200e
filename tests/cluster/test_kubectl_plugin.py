"""`kubectl sharepod` on a real API server, started by the real kubectl, with an admin's and an editor's rights."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tarfile
import urllib.request
from pathlib import Path

import pytest
from cluster.fake_agents import gpu_uuid, wait
from cluster.operator_world import World
from harness.api import Object

CLI = Path(__file__).resolve().parents[2] / "cli"


@pytest.fixture(autouse=True)
def plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Install the plugin as kubectl finds it: a program of its name on PATH."""
    program = tmp_path / "kubectl-sharepod"
    program.write_text(f'#!/bin/sh\nPYTHONPATH={CLI} exec {sys.executable} -m kubectl_sharepod "$@"\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")


def run(world: World, *words: str, kubeconfig: Path | None = None) -> subprocess.CompletedProcess[str]:
    return world.cluster.kubectl("sharepod", *words, check=False, timeout=60, kubeconfig=kubeconfig)


def free(world: World, kubeconfig: Path | None = None) -> list[Object]:
    """Return the free shares by model and pool, as `kubectl sharepod free` shows them to a user."""
    answer = run(world, "free", "-o", "json", kubeconfig=kubeconfig)
    found: list[Object] = json.loads(answer.stdout)["items"] if answer.returncode == 0 else []
    return found


def bind_editor(world: World, namespace: str) -> Path:
    """Return the kubeconfig of a ServiceAccount that may edit its namespace."""
    body: Object = {
        "apiVersion": "rbac.authorization.k8s.io/v1",
        "kind": "RoleBinding",
        "metadata": {"name": "editor"},
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "edit"},
        "subjects": [{"kind": "ServiceAccount", "name": "default", "namespace": namespace}],
    }
    world.api.create(f"/apis/rbac.authorization.k8s.io/v1/namespaces/{namespace}/rolebindings", body)
    return world.cluster.kubeconfig_for(world.cluster.service_account_token(namespace, "default"))


@pytest.mark.promise("operator-plugin")
def test_an_admin_sees_who_holds_what_and_why_a_sharepod_waits(world: World, tmp_path: Path) -> None:
    world.nodes("plugin-admin", 1)
    namespace = world.cluster.namespace("plugin-admin")
    world.apply(namespace, "small", {"request": 0.4, "memory": "4Gi"}, on="plugin-admin")
    world.phase(namespace, "small", "Running")
    world.apply(namespace, "large", {"request": 0.9, "count": 8}, on="plugin-admin")
    world.until(namespace, "large", lambda seen: bool(seen["status"].get("conditions")), what="an answer")

    top = json.loads(run(world, "top", "-n", namespace, "-o", "json").stdout)["items"]
    assert {one["name"]: (one["kind"], one["share"]["request_milli"]) for one in top} == {
        "small": ("SharePod", 400),
        "large": ("SharePod", 900),
    }
    (held,) = [one for one in top if one["name"] == "small"]
    who = run(world, "who", f"{held['node']}:{held['indexes']}")
    assert f"{namespace}" in who.stdout, who
    why = run(world, "why", "large", "-n", namespace)
    assert (why.returncode, "Placed: " in why.stdout) == (1, True), why
    assert run(world, "why", "small", "-n", namespace).returncode == 0
    for command in ("gpus", "free", "budget", "bill", "explain"):
        answer = run(world, command)
        assert (answer.returncode, answer.stderr) == (0, ""), (command, answer)
    for command in ("doctor", "preflight"):
        answer = run(world, command)
        assert (answer.returncode in (0, 1), answer.stderr) == (True, ""), (command, answer)
    bundle = run(world, "support", "--file", str(tmp_path / "bundle.tar.gz"))
    assert (bundle.returncode, bundle.stderr) == (0, ""), bundle
    with tarfile.open(tmp_path / "bundle.tar.gz") as parts:
        assert "sharepod-support/gpunodes.json" in parts.getnames()


@pytest.mark.promise("operator-plugin-rights")
def test_an_editor_of_one_namespace_is_answered_by_its_rights(world: World, tmp_path: Path) -> None:
    world.nodes("plugin-editor", 1)
    namespace = world.cluster.namespace("plugin-editor")
    world.apply(namespace, "mine", {"request": 0.4, "memory": "4Gi"}, on="plugin-editor")
    world.phase(namespace, "mine", "Running")
    editor = bind_editor(world, namespace)

    top = run(world, "top", "-n", namespace, kubeconfig=editor)
    assert (top.returncode, "mine" in top.stdout, "sharepod-gpunode-view" in top.stderr) == (0, True, True), top
    wait(lambda: free(world) == free(world, editor) != [], what="the totals as an administrator sees them")
    secret = world.cluster.kubectl("get", "configmaps", "-n", "sharepod-system", check=False, kubeconfig=editor)
    assert "(Forbidden)" in secret.stderr, "the totals and no other ConfigMap"
    published = world.cluster.kubectl("get", "configmap", "sharepod-free", "-n", "sharepod-system", "-o", "yaml").stdout
    assert not [name for name in ("plugin-editor", "mine", namespace) if name in published]
    assert run(world, "top", "-n", "kube-system", kubeconfig=editor).returncode == 3
    file = tmp_path / "bundle.tar.gz"
    bundle = run(world, "support", "-n", namespace, "--file", str(file), kubeconfig=editor)
    assert (bundle.returncode, "gpunodes.json is missing" in bundle.stdout) == (3, True), bundle
    with tarfile.open(file) as parts:
        own = {name.removeprefix("sharepod-support/") for name in parts.getnames()}
        assert {f"{part}-of-{namespace}.json" for part in ("sharepods", "pods", "events")} <= own
    resized = run(world, "resize", "mine", "-n", namespace, "--request", "0.3", kubeconfig=editor)
    assert resized.stdout == "sharepod/mine: request 0.3, limit 1, memory 4Gi\n", resized
    for request in ("0.5", "0.2", "0.6"):  # the refusal before never answers the next change
        refused = run(world, "resize", "mine", "-n", namespace, "--memory", "4000Gi", kubeconfig=editor)
        assert (refused.returncode, "keeps its share" in refused.stdout) == (1, True), refused
        words = ("resize", "mine", "-n", namespace, "--request", request, "--memory", "4Gi")
        resized = run(world, *words, kubeconfig=editor)
        assert resized.stdout == f"sharepod/mine: request {request}, limit 1, memory 4Gi\n", resized


@pytest.mark.promise("operator-page-own")
def test_the_page_shows_what_its_user_may_see_until_ctrl_c(world: World) -> None:
    world.nodes("plugin-page", 1)
    namespace = world.cluster.namespace("plugin-page")
    world.apply(namespace, "mine", {"request": 0.4, "memory": "4Gi"}, on="plugin-page")
    world.phase(namespace, "mine", "Running")
    kubectl = world.cluster.bin / "kubectl"
    for kubeconfig, sees_gpus in ((world.cluster.kubeconfig, True), (bind_editor(world, namespace), False)):
        environment = dict(os.environ) | {"KUBECONFIG": str(kubeconfig)}
        environment["PATH"] = f"{world.cluster.bin}:{environment['PATH']}"
        command: list[str | Path] = [kubectl, "sharepod", "page", "-n", namespace]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as page:
            try:
                assert page.stdout is not None
                url = page.stdout.readline().removeprefix("Open ").strip()
                with urllib.request.urlopen(f"{url}fleet.json", timeout=20) as answer:
                    found = json.load(answer)
                page.send_signal(signal.SIGINT)
                assert page.wait(timeout=60) == 0
            finally:
                page.kill()
        tenants = [one for gpu in found["gpus"] for one in gpu["tenants"]] + found["workloads"]
        assert bool(found["gpus"]) is sees_gpus
        assert "mine" in [one["name"] for one in tenants if one["namespace"] == namespace]


@pytest.mark.promise("placement-cordon")
@pytest.mark.promise("security-cordon")
def test_a_cordoned_gpu_takes_no_new_tenants_and_a_drained_one_loses_those_that_may_move(world: World) -> None:
    (node,) = world.nodes("cordon", 1)
    namespace = world.cluster.namespace("cordon")
    movable = {"request": 0.6, "memory": "4Gi", "movable": True}
    world.apply(namespace, "first", movable, on="cordon", restartPolicy="Always")
    world.phase(namespace, "first", "Running")
    world.apply(namespace, "stays", {"request": 0.3, "memory": "4Gi"}, on="cordon")
    world.phase(namespace, "stays", "Running")
    held = {row["podName"]: row["gpus"] for row in world.rows(node)}
    assert held["first"] == held["stays"], "binpack"
    gpu = held["first"][0]
    editor = bind_editor(world, namespace)
    assert run(world, "cordon", gpu, kubeconfig=editor).returncode == 3
    annotation = f"sharepod.dev/cordoned={gpu}"
    refused = world.cluster.kubectl("annotate", "gpunode", node, annotation, check=False, kubeconfig=editor)
    assert "(Forbidden)" in refused.stderr, refused

    others = [f"{node}:{index}" for index in (0, 1) if gpu_uuid(node, index) != gpu]
    for place in (gpu, *others):
        answer = run(world, "cordon", place)
        assert (answer.returncode, answer.stderr) == (0, ""), answer
    world.apply(namespace, "waits", {"request": 0.1, "memory": "1Gi"}, on="cordon")

    def refusal(seen: Object) -> bool:
        conditions = {item["type"]: item for item in seen.get("status", {}).get("conditions") or ()}
        return "an admin has cordoned it" in conditions.get("Placed", {}).get("message", "")

    world.until(namespace, "waits", refusal, what="the reason")
    assert {"first", "stays"} <= {row["podName"] for row in world.rows(node)}
    wide = world.cluster.kubectl("get", "gpunodes", node, "-o", "wide").stdout
    assert gpu in wide
    assert "cordoned" in run(world, "gpus", "-o", "wide").stdout

    assert run(world, "uncordon", others[0]).returncode == 0
    world.phase(namespace, "waits", "Running")
    drained = run(world, "drain", gpu)
    assert drained.returncode == 1, drained
    answers = {line.split()[2]: line for line in drained.stdout.splitlines() if line.startswith(namespace)}
    assert answers["first"].endswith("evicted"), drained
    assert "stays: it may not be moved" in answers["stays"], drained

    def moved() -> bool:
        rows = {row["podName"]: row["gpus"] for row in world.rows(node)}
        return rows.get("stays") == [gpu] and rows.get("first") not in (None, [gpu])

    wait(moved, what="the SharePod that may be moved on the other GPU")
