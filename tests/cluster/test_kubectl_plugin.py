"""`kubectl sharepod` on a real API server, started by the real kubectl, with an admin's and an editor's rights."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
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
    world.phase(namespace, "small", "Running", timeout=60)
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
def test_an_editor_of_one_namespace_is_answered_by_its_rights(world: World) -> None:
    world.nodes("plugin-editor", 1)
    namespace = world.cluster.namespace("plugin-editor")
    world.apply(namespace, "mine", {"request": 0.4, "memory": "4Gi"}, on="plugin-editor")
    world.phase(namespace, "mine", "Running", timeout=60)
    editor = bind_editor(world, namespace)

    top = run(world, "top", "-n", namespace, kubeconfig=editor)
    assert (top.returncode, "mine" in top.stdout, "sharepod-gpunode-view" in top.stderr) == (0, True, True), top
    assert run(world, "free", kubeconfig=editor).returncode == 3
    assert run(world, "top", "-n", "kube-system", kubeconfig=editor).returncode == 3
    resized = run(world, "resize", "mine", "-n", namespace, "--request", "0.3", kubeconfig=editor)
    assert resized.stdout == "sharepod/mine: request 0.3, limit 1, memory 4Gi\n", resized
