"""Commands of the kubectl plugin on 1,000 nodes of eight GPUs, next to kubectl's own read of the GPUNodes.

    python benchmarks/plugin_speed.py

A server in memory answers the reads. Writes build/results/plugin.json. Goal: each command within 1 s.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from harness import build
from results import Row, write

NODES, GPUS, TENANTS, WAITING, TEAMS = 1000, 8, 16, 500, 100
PLAIN, CLAIM_TEAMS = 100, 4
"""Number of waiting plain Pods with a line, and of waiting claims; number of namespaces with such claims."""
ROUNDS = 5
PENDING = "/api/v1/pods?fieldSelector=status.phase%3DPending"
"""Path of the pending Pods, with the selector that the server obeys."""
CLAIMS = "/apis/resource.k8s.io/v1"
EMPTY = (
    "/apis/resource.k8s.io/v1/deviceclasses",
    "/apis/apps/v1/deployments",
    "/apis/apps/v1/statefulsets",
    "/apis/apps/v1/daemonsets",
    "/apis/batch/v1/jobs",
    "/apis/batch/v1/cronjobs",
    "/apis/node.k8s.io/v1/runtimeclasses",
    "/api/v1/namespaces/sharepod-system/events",
)
GI = 1 << 30
CLI = Path(__file__).resolve().parents[1] / "cli"
COMMANDS = {
    "top": ["top", "-A"],
    "free": ["free"],
    "gpus": ["gpus"],
    "who": ["who", "node-500:3"],
    "why": ["why", "waiting-0", "-n", "team"],
    "doctor": ["doctor"],
    "preflight": ["preflight"],
    "bill": ["bill"],
    "budget": ["budget", "-A"],
    "explain": ["explain", "NoRoom"],
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
    """Return a pending SharePod."""
    waits = {"type": "Placed", "status": "False", "reason": "NoRoom", "message": "no GPU has 0.9 of its time free"}
    metadata = {
        "name": f"waiting-{number}",
        "namespace": "team",
        "uid": f"waiting-{number}",
        "creationTimestamp": "2026-01-01T00:00:00Z",
    }
    return {"metadata": metadata, "spec": {"gpu": {"request": 0.9}}, "status": {"conditions": [waits]}}


def other_pod(number: int) -> dict[str, Any]:
    """Return a running Pod with a share, as `preflight` reads it."""
    metadata = {"name": f"pod-{number}", "namespace": f"team-{number % TEAMS}"}
    return {"metadata": metadata, "spec": {"containers": [{"name": "main", "image": "test"}]}}


def claim(number: int, *, allocated: bool) -> dict[str, Any]:
    """Return the claim of a tenant's Pod, or a waiting claim, about as long as the API server's."""
    pod = {"apiVersion": "v1", "kind": "Pod", "name": f"pod-{number}", "uid": f"pod-{number}", "controller": True}
    fields: dict[str, Any] = {f"f:field-{index}": {".": {}, "f:first": {}, "f:second": {}} for index in range(10)}
    written = [{"manager": name, "operation": "Update", "fieldsV1": fields} for name in ("controller", "sharepod")]
    metadata = {
        "name": f"pod-{number}-gpu-abcde" if allocated else f"claim-{number}",
        "namespace": f"team-{number % CLAIM_TEAMS}",
        "uid": f"claim-{number}-{allocated}",
        "creationTimestamp": "2026-01-01T00:00:00Z",
        "ownerReferences": [pod],
        "managedFields": written,
    }
    exactly = {"deviceClassName": "sharepod.dev", "capacity": {"requests": {"timeMilli": "400", "memory": "32Gi"}}}
    result = {"request": "gpu", "driver": "gpu.sharepod.dev", "pool": "node", "device": "gpu-0"}
    terms = [{"matchFields": [{"key": "metadata.name", "operator": "In", "values": ["node"]}]}]
    status: dict[str, Any] = {
        "allocation": {"devices": {"results": [result]}, "nodeSelector": {"nodeSelectorTerms": terms}},
        "reservedFor": [{"resource": "pods", "name": f"pod-{number}", "uid": f"pod-{number}"}],
        "devices": [{**result, "data": {"requestMilli": 400}, "conditions": [{"type": "Granted", "status": "True"}]}],
    }
    spec = {"devices": {"requests": [{"name": "gpu", "exactly": exactly}]}}
    return {"metadata": metadata, "spec": spec, "status": status if allocated else {}}


def pending_pod(number: int, *, claim: bool) -> dict[str, Any]:
    """Return a Pod that waits, for its claim or by a line."""
    metadata = {
        "name": f"pending-{number}-{claim}",
        "namespace": f"team-{number % CLAIM_TEAMS}",
        "uid": f"pending-{number}-{claim}",
        "labels": {} if claim else {"sharepod.dev/line": "true"},
        "creationTimestamp": "2026-01-01T00:00:00Z",
    }
    limits = {"sharepod.dev/gpu-milli": "400", "sharepod.dev/gpu-memory-mib": "4096"}
    spec: dict[str, Any] = {"containers": [{"name": "main", "resources": {} if claim else {"limits": limits}}]}
    spec |= {"resourceClaims": [{"name": "gpu", "resourceClaimName": f"claim-{number}"}]} if claim else {}
    return {"metadata": metadata, "spec": spec, "status": {"phase": "Pending"}}


def claims_of(team: int) -> list[dict[str, Any]]:
    """Return the claims of a team, of its tenants and of its waiting Pods."""
    held = [claim(number, allocated=True) for number in range(team, NODES * TENANTS, TEAMS)]
    return held + [claim(number, allocated=False) for number in range(team, PLAIN, CLAIM_TEAMS)]


def statement(team: int) -> dict[str, Any]:
    """Return the GPUStatement of a team."""
    models = [{"model": "H100", "heldMilliseconds": 3_600_000, "reservedMilliseconds": 7_200_000}]
    return {"metadata": {"name": f"team-{team}"}, "status": {"months": [{"month": "2026-01", "models": models}]}}


def budget(team: int) -> dict[str, Any]:
    """Return the GPUBudget of a team."""
    metadata = {"name": "gpus", "namespace": f"team-{team}"}
    return {"metadata": metadata, "spec": {"gpuTime": "1000h"}, "status": {"left": 3_600_000, "percent": 0}}


def answers() -> dict[str, bytes]:
    """Return the body of the server's answer for each path."""
    group = "/apis/sharepod.dev/v1alpha1"
    pods = [sharepod(number) for number in range(WAITING)]
    found: dict[str, Any] = {
        f"{group}/gpunodes": {"items": [node(number) for number in range(NODES)]},
        f"{group}/sharepods": {"items": pods},
        f"{group}/namespaces/team/sharepods/waiting-0": pods[0],
        f"{group}/gpustatements": {"items": [statement(team) for team in range(TEAMS)]},
        f"{group}/gpubudgets": {"items": [budget(team) for team in range(TEAMS)]},
        CLAIMS: {},
        "/version": {"gitVersion": "v1.36.0"},
        "/apis/node.k8s.io/v1/runtimeclasses/nvidia": {"handler": "nvidia"},
        "/api/v1/nodes": {
            "items": [
                {"metadata": {"name": f"node-{number}", "labels": {"sharepod.dev/pool": "dedicated"}}}
                for number in range(NODES)
            ]
        },
        "/api/v1/pods": {"items": [other_pod(number) for number in range(NODES * TENANTS)]},
        "/api/v1/namespaces": {"items": []},
        **{
            f"{CLAIMS}/namespaces/team-{team}/resourceclaims": {"items": claims_of(team)} for team in range(CLAIM_TEAMS)
        },
        PENDING: {"items": [pending_pod(number, claim=claim) for number in range(PLAIN) for claim in (False, True)]},
        **{key: {"items": []} for key in EMPTY},
    }
    return {path: json.dumps(answer).encode() for path, answer in found.items()}


@contextmanager
def serving(found: dict[str, bytes]) -> Iterator[str]:
    """Context manager: serve the answers over HTTP. Yield the server's address."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = found.get(PENDING if self.path.startswith(PENDING) else self.path.partition("?")[0])
            self.send_response(404 if body is None else 200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body or b"")))
            self.end_headers()
            self.wfile.write(body or b"")

        def log_message(self, *_: object) -> None:
            """Log nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def kubeconfig(folder: Path, address: str) -> Path:
    """Write a kubeconfig for the server, as JSON, which is valid YAML. Return its path."""
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
    """Run the benchmark. Return 0 if each command answers within a second."""
    environment = dict(os.environ) | {"PYTHONPATH": str(CLI), "PATH": f"{build.programs().bin}:{os.environ['PATH']}"}
    raw = ["kubectl", "get", "--raw", "/apis/sharepod.dev/v1alpha1/gpunodes"]
    with tempfile.TemporaryDirectory() as folder, serving(answers()) as address:
        environment["KUBECONFIG"] = str(kubeconfig(Path(folder), address))
        rows = [Row("kubectl get --raw", "time", "s", round(seconds(raw, environment), 3))]
        for name, words in COMMANDS.items():
            argv = [sys.executable, "-m", "kubectl_sharepod", *words]
            rows.append(Row(name, "time", "s", round(seconds(argv, environment), 3)))
    write("plugin", rows)
    return 0 if all(row.value <= 1 for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
