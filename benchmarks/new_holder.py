"""Time from apply of a SharePod until it runs, if a holder must first take a GPU from NVIDIA's device plugin.

    PYTHONPATH=tests:benchmarks python benchmarks/new_holder.py [--times 30]

Real: control plane, kubelet, containerd, the device plugin, operator, agent, hook. Simulated: the GPUs and the driver.
In each repetition a SharePod is applied on a node without holders (`new holder`), and then a second one on the GPU that
is now held (`held`). Then both are deleted, and the next repetition begins once the holder is deleted. `to_held`: time
until the ledger shows that the holder has a GPU. `to_running`: time until the SharePod's status is Running. Prints a
line for each repetition and a table, and writes `build/results/new-holder.json`. Needs root.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from harness.cluster import Cluster, wait_until
from harness.node_packages import why_no_node
from node.plugin_node import NATIVE, SHAREPODS, PluginNode, plugin_node
from results import Row, write

PERIOD_S = 0.02
"""Seconds between two checks. A figure may be too long by this much."""
PATIENCE_S = 60.0


def measure(node: PluginNode, times: int) -> dict[tuple[str, str], list[float]]:
    """Return the measured times in seconds, by case and metric."""
    found: dict[tuple[str, str], list[float]] = {}
    node.apply("warm", 0.4)
    node.sharepod("warm")
    _clear(node)
    for number in range(1, times + 1):
        began = started = time.monotonic()
        node.apply("first", 0.4)
        held = _until(lambda: [row["state"] for row in node.holders()] == ["Held"], "a held GPU", began)
        found.setdefault(("new holder", "to_held"), []).append(held)
        found.setdefault(("new holder", "to_running"), []).append(_until(lambda: _runs(node, "first"), "first", began))
        began = time.monotonic()
        node.apply("second", 0.4)
        found.setdefault(("held", "to_running"), []).append(_until(lambda: _runs(node, "second"), "second", began))
        ran = time.monotonic()
        _clear(node)
        latest = ", ".join(f"{case} {metric} {seconds[-1]:.2f}" for (case, metric), seconds in found.items())
        ended = time.monotonic()
        print(
            f"{number} of {times}: {latest}, cleared {ended - ran:.2f}, in all {ended - started:.2f} s",
            file=sys.stderr,
            flush=True,
        )
    return found


def _clear(node: PluginNode) -> None:
    """Delete the SharePods and wait until the holder is deleted."""
    node.cluster.kubectl("delete", "sharepods", "--all", "-n", NATIVE, timeout=PATIENCE_S)
    wait_until(lambda: not node.holders() and not node.holder_pods(), what="no holder", timeout=PATIENCE_S)


def _runs(node: PluginNode, name: str) -> bool:
    status = node.cluster.api.get(f"{SHAREPODS}/{name}").get("status", {})
    return bool(status.get("phase") == "Running")


def _until(true: Callable[[], bool], what: str, began: float) -> float:
    wait_until(true, what=what, timeout=PATIENCE_S, interval=PERIOD_S)
    return time.monotonic() - began


def rows(found: dict[tuple[str, str], list[float]]) -> list[Row]:
    """Return rows with the median and the 99th percentile of each figure. Of 30 repetitions, the 99th percentile is the
    longest time."""
    made = []
    for (case, metric), seconds in found.items():
        ordered = sorted(seconds)
        for name, part in (("p50", 0.5), ("p99", 0.99)):
            value = ordered[min(len(ordered) - 1, int(part * len(ordered)))]
            made.append(Row(case, f"{metric}_{name}", "s", round(value, 3)))
    return made


def main() -> int:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=int, default=30)
    times = parser.parse_args().times
    if (why := why_no_node()) is not None:
        print(f"not run: {why}")
        return 1
    with (
        tempfile.TemporaryDirectory(prefix="shp-") as directory,
        Cluster(node_lifecycle=True) as cluster,
        plugin_node(cluster, Path(directory), 2) as node,
    ):
        result = rows(measure(node, times))
    print(write("new-holder", result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
