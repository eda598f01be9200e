"""Time from `helm install` until the first SharePod runs, repeatedly, each time on a new cluster.

    PYTHONPATH=tests:benchmarks:manifests python benchmarks/chart_install.py [--times 5]

Real: control plane, kubelet, containerd, Helm, the chart, operator and agent as pods of this tree's images, the hook.
Simulated: the GPUs and the driver. The node has the images already, because there is no registry, and it has the label
of the pool. In each repetition the chart is installed as in docs/install.md, and a SharePod is applied directly after
it. `to_running`: seconds until the SharePod's status is Running, the installation included. Prints a line for each
repetition and a table, and writes `build/results/chart-install.json`. Needs root and `make helm`.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path

from chart.__main__ import find_kubectl, write_chart
from harness.build import programs
from harness.cluster import Cluster, wait_until
from harness.delivered import Delivery
from harness.errors import HarnessError
from harness.helm import NO_HELM, Helm, find_helm
from harness.installation import NAMESPACE, POOL_LABEL
from harness.machines import RealNode
from images.roots import why_no_images
from results import Row, write

DEMO = Path(__file__).resolve().parent.parent / "demo"
TEAM = "team-a"
SHAREPOD = f"/apis/sharepod.dev/v1alpha1/namespaces/{TEAM}/sharepods/alpha"
REGISTRY, TAG = "registry.invalid/sharepod", "bench"
PERIOD_S = 0.05
"""Seconds between two checks. A figure may be too long by this much."""
PATIENCE_S = 120.0


def install_once(delivery: Delivery, program: Path, chart: Path, folder: Path) -> tuple[float, float]:
    """Return the seconds that `helm install` took, and the seconds from its start until the SharePod ran."""
    with Cluster(node_lifecycle=True) as cluster, RealNode(cluster, DEMO / "inventory.yaml", nvml=True) as machine:
        machine.real.serve_api()
        delivery.load(machine.real, {part: f"{REGISTRY}/{part}:{TAG}" for part in delivery.images})
        cluster.kubectl("label", "node", machine.node, f"{POOL_LABEL}=dedicated")
        cluster.namespace(TEAM)
        began = time.monotonic()
        Helm(program, folder, cluster.kubeconfig).run(
            *("install", "sharepod", chart, "--namespace", NAMESPACE, "--create-namespace"),
            *("--set", f"image.registry={REGISTRY},image.tag={TAG},image.pullPolicy=IfNotPresent"),
        )
        installed = time.monotonic() - began
        cluster.kubectl("apply", "-f", DEMO / "alpha.yaml", timeout=PATIENCE_S)

        def runs() -> bool:
            return bool(cluster.api.get(SHAREPOD).get("status", {}).get("phase") == "Running")

        wait_until(runs, what="a running SharePod", timeout=PATIENCE_S, interval=PERIOD_S)
        return installed, time.monotonic() - began


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--times", type=int, default=5)
    times = parser.parse_args().times
    if reason := RealNode.unavailable() or why_no_images():
        raise HarnessError(reason)
    if (program := find_helm()) is None:
        raise HarnessError(NO_HELM)
    programs()
    took = []
    with tempfile.TemporaryDirectory(prefix="shp-") as folder:
        delivery = Delivery.of(DEMO.parent, Path(folder) / "images")
        write_chart(Path(folder), find_kubectl(), {})
        for number in range(1, times + 1):
            took.append(install_once(delivery, program, Path(folder) / "sharepod", Path(folder) / f"helm-{number}"))
            print(f"{number} of {times}: helm {took[-1][0]:.1f} s, running {took[-1][1]:.1f} s", flush=True)
    rows = []
    for metric, values in zip(("helm", "to_running"), zip(*took, strict=True), strict=True):
        rows.append(Row("first SharePod by the chart", f"{metric}_p50", "s", round(statistics.median(values), 1)))
        rows.append(Row("first SharePod by the chart", f"{metric}_max", "s", round(max(values), 1)))
    write("chart-install", rows)
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except HarnessError as error:
        sys.exit(f"bench-chart: {error}")
