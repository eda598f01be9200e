"""Each SharePod of examples/ runs unchanged on a real node, uses its GPU if it requests time, and restarts no
container.

The images of the examples are doubles. Their `python` launches kernels for as long as the example's code would run. The
entrypoints of servers launch kernels until they are ended.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml
from harness.api import Object
from harness.cluster import Cluster, wait_until
from harness.images import base_files, libraries_of, make_image
from harness.installation import GROUP
from harness.machines import LIBCUDA, PROGRAM, RealNode
from node.simulated_node import NODE, PATIENCE_S, simulated_node
from node.test_your_manifest import sessions

ROOT = Path(__file__).resolve().parents[2]
STAYS_S = 5.0
"""Seconds for which a running Pod is watched. The kubelet restarts a container that ends after one second."""
ELSEWHERE = {session[0][0].rpartition("/")[2] for session in sessions()}
"""Examples that this test skips, because docs/your-manifest.md shows their output and test_your_manifest.py
compares it."""
EXAMPLES = [path for path in sorted((ROOT / "examples").glob("*.yaml")) if path.name not in ELSEWHERE]
BUSYBOX = "docker.io/library/busybox:1.37"
FRAMEWORKS = (
    "docker.io/pytorch/pytorch:2.9.1-cuda12.8-cudnn9-runtime",
    "quay.io/jupyter/pytorch-notebook:cuda12-2025-11-06",
    "docker.io/rapidsai/base:25.12-cuda12-py3.12",
    "docker.io/vllm/vllm-openai:v0.12.0",
)
_KERNELS = "exec /usr/bin/launchloop --kernel-us 10000"
_PYTHON = f"""#!/bin/sh
case "$*" in
*"while True"*) {_KERNELS} ;;
*) {_KERNELS} --seconds 1 ;;
esac
"""
_GPUS = (
    ("GPU-5a9e0001-0000-4000-8000-000000000001", "NVIDIA A100-SXM4-80GB", "80Gi"),
    ("GPU-5a9e0002-0000-4000-8000-000000000002", "NVIDIA A100-SXM4-80GB", "80Gi"),
    ("GPU-0a1b2c3d-1111-2222-3333-000000000001", "NVIDIA GeForce GTX 1080", "8Gi"),
)


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Cluster, RealNode]]:
    """Run SharePod on a cluster whose only node has the GPUs, the zone and the images of the examples."""
    folder = tmp_path_factory.mktemp("node")
    with simulated_node(folder, _GPUS) as (cluster, node):
        _load_images(node, folder)
        cluster.kubectl("label", "node", NODE, "topology.kubernetes.io/zone=zone-a")
        yield cluster, node


def _load_images(node: RealNode, folder: Path) -> None:
    """Load an image with the doubles' program under the name of each framework's image."""
    files = base_files() | libraries_of(PROGRAM, [LIBCUDA.name])
    files |= {
        "/usr/bin/launchloop": PROGRAM,
        "/usr/bin/python": _PYTHON.encode(),
        "/usr/bin/serve": f"#!/bin/sh\n{_KERNELS}\n".encode(),
    }
    image = make_image(FRAMEWORKS[0], files, directory=folder, entrypoint=["/usr/bin/serve"])
    node.real.load_image(image)
    for name in FRAMEWORKS[1:]:
        node.real.tag_image(FRAMEWORKS[0], name)
    node.real.load_image(make_image(BUSYBOX, base_files(), directory=folder))


def _works(spec: Object) -> bool:
    """Return whether a container of the example launches kernels."""
    images = [container["image"] for container in spec["containers"]]
    return any(name.endswith(image) for image in images for name in FRAMEWORKS)


def _used(node: RealNode, name: str) -> bool:
    return any(busy for (sharepod, _), busy in node.busy_ns().items() if sharepod == name)


def _reached(phase: str, sharepod: Object | None) -> bool:
    if sharepod is None:
        return False
    ready = {one["type"]: one["status"] for one in sharepod["status"].get("conditions", [])}.get("Ready")
    return sharepod["status"].get("phase") == phase and ready == "True"


@pytest.mark.promise("install-examples")
@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_unchanged_example_runs_and_is_not_restarted(machine: tuple[Cluster, RealNode], path: Path) -> None:
    cluster, node = machine
    made: list[Any] = [each for each in yaml.safe_load_all(path.read_text()) if each["kind"] == "SharePod"]
    cluster.kubectl("apply", "-f", path)
    try:
        for each in made:
            meta, spec = each["metadata"], each["spec"]
            stays = spec.get("restartPolicy", "Always") == "Always"
            where = f"{GROUP}/namespaces/{meta.get('namespace', 'default')}/sharepods/{meta['name']}"
            phase = "Running" if stays else "Succeeded"
            cluster.wait_for(where, partial(_reached, phase), what=f"{meta['name']} {phase}", timeout=PATIENCE_S)
            if _works(spec):
                wait_until(partial(_used, node, meta["name"]), what=f"{meta['name']} uses its GPU", timeout=PATIENCE_S)
        time.sleep(STAYS_S)
        for each in made:
            meta = each["metadata"]
            found = cluster.api.get(f"{GROUP}/namespaces/{meta.get('namespace', 'default')}/sharepods/{meta['name']}")
            assert found["status"].get("restarts", 0) == 0
    finally:
        cluster.kubectl("delete", "--wait=false", "-f", path, timeout=PATIENCE_S)
        wait_until(lambda: not _tenants(cluster), what="an empty ledger", timeout=PATIENCE_S)


def _tenants(cluster: Cluster) -> list[object]:
    tenants: list[object] = cluster.api.get(f"{GROUP}/gpunodes/{NODE}")["spec"].get("tenants", [])
    return tenants
