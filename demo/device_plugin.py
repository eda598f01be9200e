"""`make demo-device-plugin`: two SharePods share a GPU that a holder took from NVIDIA's device plugin.

A Pod with a whole GPU runs next to them. Real: API server, scheduler, kubelet, containerd, NVIDIA's device plugin, the
operator, the agent, the hook. The GPUs, their driver and NVIDIA's container runtime are the tests' doubles. Exits
non-zero if a share differs from the request, and leaves nothing running. Needs root.
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path

from harness.build import own_programs
from harness.cluster import Cluster, wait_until
from harness.errors import HarnessError
from harness.installation import NAMESPACE
from harness.node_packages import why_no_node
from harness.releases import DEVICE_PLUGIN
from harness.shares import WINDOW_S, measured, right
from node.plugin_node import NATIVE, PluginNode, plugin_node
from screen import Phase, Screen
from sharepod.api.objects import HOLDER_LABEL

SETTLE_S = 3.0
"""Seconds between the start of a tenant and the measurement. This is three times as long as a token bucket can save
credit."""
ASKED = {"alpha": 0.4, "beta": 0.6}

START = Phase("starting a Kubernetes control plane, a node with two simulated GPUs and NVIDIA's device plugin", 15)
WHOLE = Phase("a pod requests nvidia.com/gpu: 1 as usual", 3)
SHARED = Phase("two SharePods: the operator creates a holder, which takes the other GPU for them", 5)
SHARE = Phase("measuring GPU time: alpha and beta share the held GPU", SETTLE_S + WINDOW_S)
BACK = Phase("the SharePods are deleted: the holder gives its GPU back, and the next pod has it whole", 6)
CLEAN = Phase("cleaning up", 3)
PLAN = (START, WHOLE, SHARED, SHARE, BACK, CLEAN)


def show(screen: Screen, cluster: Cluster, *command: str) -> None:
    """Print a kubectl command and its output."""
    screen.command(f"kubectl {' '.join(command)}")
    screen.write(cluster.kubectl(*command).stdout.rstrip())


def play(screen: Screen, cluster: Cluster, node: PluginNode) -> bool:
    """Run the demo on a running node; return whether the shares are right."""
    screen.begin(WHOLE)
    node.run_native("whole")
    node.seen_by("whole")
    show(screen, cluster, "logs", "-n", NATIVE, "whole")
    screen.begin(SHARED)
    for (name, request), kernel_us in zip(ASKED.items(), ("2000", "5000"), strict=True):
        node.apply(name, request, "--kernel-us", kernel_us)
        node.sharepod(name)
    show(screen, cluster, "get", "sharepods", "-n", NATIVE)
    show(screen, cluster, "get", "pods", "-n", NAMESPACE, "-l", HOLDER_LABEL)
    show(screen, cluster, "get", "gpunode", node.machine.node, "-o", "jsonpath={.spec.holders}")
    screen.begin(SHARE)
    time.sleep(SETTLE_S)
    window = measured(node.machine.busy_ns)
    screen.table(
        ["SHAREPOD", "ASKED", "GOT"],
        [[name, f"{100 * asked:.0f} %", f"{window.of(name):.1f} %"] for name, asked in ASKED.items()],
    )
    screen.begin(BACK)
    cluster.kubectl("delete", "sharepods", "--all", "-n", NATIVE, timeout=60)
    node.run_native("next")
    node.seen_by("next")
    wait_until(lambda: not node.holders(), what="the holder's row is removed", timeout=60)
    show(screen, cluster, "get", "pods", "-n", NATIVE)
    screen.begin(CLEAN)
    return all(right(100 * asked, window.of(name), window.stolen) for name, asked in ASKED.items())


def main() -> int:
    """Run the demo."""
    if (why := why_no_node()) is not None:
        print(f"This demo needs a real node: {why}")
        return 1
    own_programs(DEVICE_PLUGIN)
    screen = Screen(PLAN)
    screen.begin(START)
    try:
        with (
            tempfile.TemporaryDirectory(prefix="shp-") as directory,
            Cluster(node_lifecycle=True) as cluster,
            plugin_node(cluster, Path(directory), 2) as node,
        ):
            as_asked = play(screen, cluster, node)
    except HarnessError as error:
        print(f"failed: {error}", file=sys.stderr)
        return 1
    screen.end()
    return 0 if as_asked else 1


if __name__ == "__main__":
    sys.exit(main())
