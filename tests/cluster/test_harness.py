"""Tests of the harness itself. Other tests of this folder depend on its promises."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from harness import build
from harness.api import Object
from harness.assets import VARIABLE
from harness.cluster import Cluster, wait_until
from harness.errors import StartError
from harness.fakes import FakeKubelets
from harness.process import as_at_a_terminal, descendants_of, start_time

_TESTS = Path(__file__).parent.parent


def _pod(name: str, **annotations: str) -> Object:
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": name,
            "annotations": {f"test.sharepod.dev/{key.replace('_', '-')}": value for key, value in annotations.items()},
        },
        "spec": {"containers": [{"name": "main", "image": "none"}]},
    }


def _phase(cluster: Cluster, namespace: str, name: str, phase: str) -> Object:
    path = f"/api/v1/namespaces/{namespace}/pods/{name}"
    found = cluster.wait_for(path, lambda pod: pod and pod["status"]["phase"] == phase, what=f"{name} {phase}")
    assert found is not None
    return found


def test_a_stopped_node_leaves_nothing_behind(cluster_factory: Callable[..., Cluster]) -> None:
    running = cluster_factory()
    started = descendants_of(running.services.pid)
    assert len(started) == 4
    running.stop()
    assert [pid for pid in started if start_time(pid)] == []
    assert not running.state.exists()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_a_killed_harness_leaves_nothing_behind(number: signal.Signals) -> None:
    script = (
        "import time; from harness.cluster import Cluster; c = Cluster(controller_manager=False);"
        "print(c.services.pid, c.state, flush=True); time.sleep(600)"
    )
    with as_at_a_terminal(script, cwd=_TESTS) as harness:
        assert harness.stdout is not None
        words = harness.stdout.readline().split()
        supervisor, state = int(words[0]), Path(words[1])
        started = [supervisor, *descendants_of(supervisor)]
        assert len(started) == 4
        harness.send_signal(number)
        harness.wait(timeout=10)
    wait_until(lambda: not any(start_time(pid) for pid in started), what="all processes ended", timeout=15)
    wait_until(lambda: not state.exists(), what="state directory removed", timeout=5)


def test_a_standing_cluster_outlives_its_starter_and_ends_when_told() -> None:
    def harness(command: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        argv = [sys.executable, "-m", "harness", command, "--name", f"test-{os.getpid()}", *arguments]
        return subprocess.run(argv, cwd=_TESTS, capture_output=True, text=True, timeout=90)

    up = harness("up", "--fake-nodes", "1")
    try:
        assert up.returncode == 0, up.stderr
        assert harness("up").stdout == up.stdout == harness("env").stdout
        listed = subprocess.run(
            ["sh", "-c", f"{up.stdout}\nkubectl get nodes --no-headers"], capture_output=True, text=True, timeout=30
        )
        assert "node-0   Ready" in listed.stdout
        state = Path(up.stderr.split()[-1])
        assert state.is_dir()
    finally:
        down = harness("down")
    assert down.returncode == 0, down.stderr
    assert not state.exists()
    assert harness("status").returncode == 1


def test_the_doctor_names_what_is_missing(tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    for name in ("cc", "as", "ld", "ip", "unshare"):
        (tmp_path / "bin" / name).symlink_to(str(shutil.which(name)))
    nowhere = {"PIP_INDEX_URL": "http://127.0.0.1:9/", "PIP_CONFIG_FILE": os.devnull}
    environment = {"PATH": str(tmp_path / "bin"), "SHAREPOD_CACHE": str(tmp_path / "cache"), **nowhere}
    done = subprocess.run(
        [sys.executable, "-S", _TESTS / "harness" / "doctor.py"],
        env=environment, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    missing = [line.split(None, 1)[1].split(":")[0] for line in done.stdout.splitlines() if line.startswith("missing")]
    assert missing == ["make", "git", "a Python package index", "Go >= 1.26"], done.stdout + done.stderr
    assert done.returncode == 1


def test_nothing_runs_on_after_the_supervisor_is_killed(cluster_factory: Callable[..., Cluster]) -> None:
    running = cluster_factory(controller_manager=False)
    started = descendants_of(running.services.pid)
    assert len(started) == 3
    os.kill(running.services.pid, signal.SIGKILL)
    wait_until(lambda: not any(start_time(pid) for pid in started), what="all processes ended", timeout=10)
    running.stop()
    assert not running.state.exists()


def test_a_component_that_does_not_start_is_reported_with_its_log(cluster_factory: Callable[..., Cluster]) -> None:
    expected = r"(?s)kube-apiserver ended with status 1.*unknown flag: --no-such-flag"
    with pytest.raises(StartError, match=expected) as failed:
        cluster_factory(apiserver_args=["--no-such-flag"])
    assert failed.value.logs is not None
    assert {path.name for path in failed.value.logs.iterdir()} >= {"etcd.log", "kube-apiserver.log"}
    shutil.rmtree(failed.value.logs.parent)


def test_the_players_miss_nothing_while_the_api_server_is_away(cluster_factory: Callable[..., Cluster]) -> None:
    own = cluster_factory()
    own.add_fake_nodes(1)
    with FakeKubelets(own.api) as kubelets:
        pods = "/api/v1/namespaces/default/pods"
        own.api.create(pods, _pod("before", run_seconds="0.5"))
        _phase(own, "default", "before", "Running")
        own.restart_apiserver(down=1.0)
        _phase(own, "default", "before", "Succeeded")
        own.api.create(pods, _pod("after"))
        _phase(own, "default", "after", "Running")
        assert kubelets.failures == []


def test_built_programs_work_with_an_older_api_server_of_the_environments_folder(
    cluster_factory: Callable[..., Cluster], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The API server in the folder is the harness's own program, which emulates the oldest version that built programs
    can emulate."""
    own = build.built()
    if own is None:
        pytest.skip(f"all programs come from {VARIABLE}, none is built here")
    for name in ("etcd", "kubectl"):
        (tmp_path / name).symlink_to(own / name)
    server = tmp_path / "kube-apiserver"
    server.write_text(
        '#!/bin/sh\n[ "$1" = --version ] && { echo Kubernetes v1.33.0; exit; }\n'
        f'exec {own}/kube-apiserver --emulated-version=1.33 "$@"\n'
    )
    server.chmod(0o755)
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    older = cluster_factory()
    assert older.api.get("/version")["emulationMinor"] == "33"
    older.add_fake_nodes(1)
    namespace = older.namespace("older")
    with FakeKubelets(older.api) as kubelets:
        older.api.create(f"/api/v1/namespaces/{namespace}/pods", _pod("runs"))
        _phase(older, namespace, "runs", "Running")
        assert kubelets.failures == []
