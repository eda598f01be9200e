"""SharePod, run from its sources, on a cluster with one real node of simulated GPUs."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from harness.cluster import Cluster
from harness.installation import GROUP, Installation
from harness.machines import RealNode

NODE = "node-0"
"""Name of the node in examples/17-kubeshare-gpuid.yaml."""
PATIENCE_S = 60.0


@contextmanager
def simulated_node(folder: Path, gpus: Sequence[tuple[str, str, str]]) -> Iterator[tuple[Cluster, RealNode]]:
    """Run, during the block, the cluster with one node in pool `dedicated`.

    `folder`: folder for the inventory. `gpus`: UUID, model and memory of each GPU.
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
