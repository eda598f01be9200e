"""Time from creation until a Pod runs on a real kubelet: bare, with a claim, of a SharePod by CSI and by a claim.

Real: control plane, kubelet, containerd, operator, agent. Simulated: the GPUs and the driver. One Pod at a time runs on
an otherwise empty node. The next Pod is created once this Pod is deleted and the ledger is empty. Needs root.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from apply_latency import percentile
from harness.api import Object
from harness.cluster import Cluster, wait_until
from harness.node import BASE_IMAGE
from node.claim_node import container
from node.claim_system import NAMESPACE, ClaimSystem, system_with_claims
from results import Row

PERIOD_S = 0.02
"""Seconds between two checks. A figure may be too long by this much."""
_SLEEPS = ["sh", "-c", "trap exit TERM; while true; do sleep 0.1; done"]
_PODS = f"/api/v1/namespaces/{NAMESPACE}/pods"
_SHAREPODS = f"/apis/sharepod.dev/v1alpha1/namespaces/{NAMESPACE}/sharepods"


def running(times: int) -> list[Row]:
    """Measure `times` Pods of each kind; return the rows."""
    rows: list[Row] = []
    with (
        tempfile.TemporaryDirectory(prefix="shp-") as directory,
        Cluster(node_lifecycle=True) as cluster,
        system_with_claims(cluster, Path(directory), {"SHAREPOD_ATTACH": "csi"}) as system,
    ):
        system.machine.await_claim_driver(system.agent)
        system.apply(system.template("share", 400))
        for case, path, body in (
            ("bare pod", _PODS, _pod()),
            ("claim of a template", _PODS, _pod(template="share")),
            ("SharePod", _SHAREPODS, _sharepod(system)),
            ("SharePod by claim", _SHAREPODS, _sharepod(system)),
        ):
            if case == "SharePod by claim":
                system.settings = {"SHAREPOD_ATTACH": "claims"}
                system.restart_operator()
            # the first Pod of each kind warms up caches, and is not counted
            took = [_once(system, path, body) for _ in range(times + 1)][1:]
            print(f"{case}: {' '.join(f'{each:.2f}' for each in took)} s", file=sys.stderr, flush=True)
            for part in (50, 99):
                rows.append(Row(case, f"created_to_running_p{part}", "ms", percentile(took, part)))
    return rows


def _pod(template: str | None = None) -> Object:
    one = container(image=BASE_IMAGE, claim="gpu" if template else None, command=_SLEEPS)
    claims = [{"name": "gpu", "resourceClaimTemplateName": template}] if template else []
    spec: dict[str, Any] = {"containers": [one], "resourceClaims": claims, "terminationGracePeriodSeconds": 1}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "one"}, "spec": spec}


def _sharepod(system: ClaimSystem) -> Object:
    return system.sharepod("one", 0.4, containers=[container(image=BASE_IMAGE, claim=None, command=_SLEEPS)])


def _once(system: ClaimSystem, path: str, body: Object) -> float:
    """Create one Pod, and return the seconds until it runs. Then delete it with its claims."""
    begun = time.monotonic()
    system.cluster.api.create(path, body)
    _until(lambda: any(pod["status"].get("phase") == "Running" for pod in system.pods()), "a Pod that runs")
    took = time.monotonic() - begun
    system.cluster.api.delete(f"{path}/one")
    _until(lambda: not system.pods() and not system.rows(), "nothing left of it")
    return took


def _until(true: Callable[[], bool], what: str) -> None:
    wait_until(true, what=what, timeout=90.0, interval=PERIOD_S)
