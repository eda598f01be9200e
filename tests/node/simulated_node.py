"""SharePod, from the sources, on a cluster with one real node of simulated GPUs."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from harness.cluster import Cluster
from harness.installation import GROUP, Installation
from harness.machines import RealNode

NODE = "node-0"
"""The node that examples/17-kubeshare-gpuid.yaml names."""
PATIENCE_S = 60.0


@contextmanager
def simulated_node(folder: Path, gpus: Sequence[tuple[str, str, str]]) -> Iterator[tuple[Cluster, RealNode]]:
    """Run the cluster until the end of the block, with the node in pool `dedicated`.

    `folder`: for the inventory. `gpus`: UUID, model and memory of each.
    """
    inventory = folder / "inventory.yaml"
    listed = [
        {"uuid": uuid, "index": index, "model": model, "memory": memory}
        for index, (uuid, model, memory) in enumerate(gpus)
    ]
    inventory.write_text(json.dumps({"gpus": listed}))
    with Cluster(node_lifecycle=True) as cluster, RealNode(cluster, inventory, NODE) as node:
        installation = Installation(cluster)
        installation.start_operator()
        installation.add_to_pool(NODE)
        node.start_agent(installation)
        cluster.await_service_account("default", "default")
        cluster.wait_for(
            f"{GROUP}/gpunodes/{NODE}",
            lambda found: found and len(found.get("status", {}).get("gpus", [])) == len(gpus),
            what="GPUs reported",
            timeout=PATIENCE_S,
        )
        yield cluster, node
