"""Commands of the kubectl plugin on 1,000 nodes of eight GPUs, next to kubectl's own read of the GPUNodes.

    python benchmarks/plugin_speed.py

A server in memory answers the reads. Writes build/results/plugin.json. Goal: each command within 1 s.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from harness import build
from results import Row, write

NODES, GPUS, TENANTS, WAITING = 1000, 8, 16, 500
ROUNDS = 5
GI = 1 << 30
CLI = Path(__file__).resolve().parents[1] / "cli"
COMMANDS = {
    "top": ["top", "-A"],
    "free": ["free"],
    "gpus": ["gpus"],
    "who": ["who", "node-500:3"],
    "why": ["why", "waiting-0", "-n", "team"],
    "doctor": ["doctor"],
}


def node(number: int) -> dict[str, Any]:
    """Return a GPUNode with its tenants."""
    uuids = [f"GPU-{number:08x}-0000-0000-0000-{index:012x}" for index in range(GPUS)]
    tenants = [
        {
            "id": f"uid-{number}-{index}",
            "namespace": f"team-{index % 10}",
            "podName": f"pod-{number}-{index}",
            "podUID": "pod",
            "gpus": [uuids[index % GPUS]],
            "requestMilli": 400,
            "limitMilli": 1000,
            "memory": 32 * GI,
        }
        for index in range(TENANTS)
    ]
    seen = [{"id": row["id"], "processes": 1, "memory": GI, "heldMilli": 400, "progressMilli": 400} for row in tenants]
    gpus = [{"uuid": uuid, "index": i, "model": "H100", "memory": 80 * GI} for i, uuid in enumerate(uuids)]
    status = {"gpus": gpus, "tenants": seen, "conditions": [{"type": "AgentAlive", "status": "True"}]}
    return {"metadata": {"name": f"node-{number}"}, "spec": {"tenants": tenants}, "status": status}


def sharepod(number: int) -> dict[str, Any]:
    """Return a SharePod that waits."""
    waits = {"type": "Placed", "status": "False", "reason": "NoRoom", "message": "no GPU has 0.9 of its time free"}
    metadata = {
        "name": f"waiting-{number}",
        "namespace": "team",
        "uid": f"waiting-{number}",
        "creationTimestamp": "2026-01-01T00:00:00Z",
    }
    return {"metadata": metadata, "spec": {"gpu": {"request": 0.9}}, "status": {"conditions": [waits]}}


def answers() -> dict[str, bytes]:
    """Return the answers by path."""
    group = "/apis/sharepod.dev/v1alpha1"
    pods = [sharepod(number) for number in range(WAITING)]
    found: dict[str, Any] = {
        f"{group}/gpunodes": {"items": [node(number) for number in range(NODES)]},
        f"{group}/sharepods": {"items": pods},
        f"{group}/namespaces/team/sharepods/waiting-0": pods[0],
        "/apis/apps/v1/deployments": {"items": []},
    }
    return {path: json.dumps(answer).encode() for path, answer in found.items()}


def serve(folder: Path) -> tuple[subprocess.Popen[str], str]:
    """Start a server of the answers, as files below a folder, and return it with its address."""
    for path, body in answers().items():
        file = folder / path.removeprefix("/")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(body)
    argv = [sys.executable, "-u", "-m", "http.server", "--bind", "127.0.0.1", "--directory", str(folder), "0"]
    server = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    assert server.stdout is not None, "it is a pipe"
    port = re.search(r"port (\d+)", server.stdout.readline())
    assert port is not None, "http.server prints its port"
    return server, f"http://127.0.0.1:{port[1]}"


def kubeconfig(folder: Path, address: str) -> Path:
    """Write the kubeconfig of a user of the server. JSON is YAML."""
    path = folder / "kubeconfig"
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "memory", "cluster": {"server": address}}],
        "users": [{"name": "user", "user": {"token": "none"}}],
        "contexts": [{"name": "memory", "context": {"cluster": "memory", "user": "user"}}],
        "current-context": "memory",
    }
    path.write_text(json.dumps(config))
    return path


def seconds(argv: list[str], environment: dict[str, str]) -> float:
    """Return the median time of a command over `ROUNDS` runs."""
    times = []
    for _ in range(ROUNDS):
        begun = time.perf_counter()
        done = subprocess.run(
            argv,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            check=False,
        )
        times.append(time.perf_counter() - begun)
        if done.returncode not in (0, 1) or b"error" in done.stderr:
            raise SystemExit(f"{argv}: {done.stderr.decode()}")
    return statistics.median(times)


def main() -> int:
    """0 when each command answers within a second."""
    folder = Path(tempfile.mkdtemp())
    server, address = serve(folder / "served")
    environment = dict(os.environ) | {"PYTHONPATH": str(CLI), "PATH": f"{build.programs().bin}:{os.environ['PATH']}"}
    environment["KUBECONFIG"] = str(kubeconfig(folder, address))
    raw = ["kubectl", "get", "--raw", "/apis/sharepod.dev/v1alpha1/gpunodes"]
    rows = [Row("kubectl get --raw", "time", "s", round(seconds(raw, environment), 3))]
    for name, words in COMMANDS.items():
        argv = [sys.executable, "-m", "kubectl_sharepod", *words]
        rows.append(Row(name, "time", "s", round(seconds(argv, environment), 3)))
    server.kill()
    server.wait()
    shutil.rmtree(folder)
    write("plugin", rows)
    return 0 if all(row.value <= 1 for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
