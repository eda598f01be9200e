"""Cluster with SharePod on a node with two simulated GPUs: `make demo` runs on it, `make play` keeps it open.

Everything but the GPU is real: API server, scheduler, kubelet, containerd, the operator and the agent under their
ServiceAccounts, the hook in the containers. The GPU is the tests' double: a libcuda whose kernels occupy a simulated
device for a stated time.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from harness.build import built
from harness.cluster import Cluster
from harness.delivered import Delivery, await_workloads
from harness.installation import NAMESPACE as SYSTEM
from harness.installation import POOL_LABEL, Installation
from harness.machines import BareMachine, Machine, RealNode
from harness.releases import CONTAINERD
from images.roots import roots_to_make, why_no_images
from images.steps import ImageError
from screen import Phase, Screen

HERE = Path(__file__).resolve().parent
NAMESPACE = "team-a"
RESTRICTED = {"pod-security.kubernetes.io/enforce": "restricted"}

CONTROL_PLANE = Phase("starting a Kubernetes control plane", 4)
NODE = Phase("starting a node with two simulated GPUs and installing SharePod: kubectl apply -k manifests", 7)
AGENT = Phase("starting the agent on the node", 3)
IMAGES = Phase("making the images of this tree", 4)
DELIVERED = Phase("starting a node with two simulated GPUs", 7)
INSTALL = Phase("installing SharePod: kubectl apply -k manifests, as it is", 15)
AS_PROCESSES = (CONTROL_PLANE, NODE, AGENT)

CONTAINERD_S = 100
"""Seconds that two cores take to build containerd. This is done once."""
ROOTS_S = 200
"""Seconds that two cores take to make the Debian roots of the images, and the contents of the images. This is
done once."""


NO_ROOTS = "their images would take three minutes once; make demo-images makes them"
"""Reason why operator and agent are processes on a machine on which images were never made."""


def as_pods() -> tuple[Phase, ...]:
    """Return the phases of `delivered`, including the phases for builds that have not been made yet."""
    images = replace(IMAGES, usual_s=ROOTS_S) if roots_to_make() else IMAGES
    node = DELIVERED if built(CONTAINERD) else replace(DELIVERED, usual_s=DELIVERED.usual_s + CONTAINERD_S)
    return images, CONTROL_PLANE, node, INSTALL


def make_images(screen: Screen, stack: ExitStack, *, with_roots: bool = True) -> Delivery | str:
    """Make the images of this tree. If that is not possible, return the reason in one line.

    `with_roots`: also make the Debian roots of the images if they do not exist.
    """
    if (reason := RealNode.unavailable() or why_no_images()) is not None:
        return reason
    if not with_roots and roots_to_make():
        return NO_ROOTS
    screen.begin(IMAGES)
    try:
        return Delivery.of(HERE.parent, Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="shp-"))))
    except ImageError as error:
        return str(error).splitlines()[0]


def as_processes(screen: Screen, stack: ExitStack, why: str, then: Sequence[Phase]) -> tuple[Cluster, Machine]:
    """Start a cluster with SharePod. The operator and the agent are processes.

    `why`: reason why they do not run from images. `then`: phases that follow.
    """
    screen.follow((*AS_PROCESSES, *then))
    screen.write(f"Operator and agent run as processes, not as pods from images: {why}")
    screen.begin(CONTROL_PLANE)
    cluster = stack.enter_context(Cluster(node_lifecycle=RealNode.unavailable() is None))
    machine, installation = _machine_and_installation(screen, stack, cluster)

    screen.begin(AGENT)
    installation.add_to_pool(machine.node)
    machine.start_agent(installation)
    return cluster, machine


def delivered(screen: Screen, stack: ExitStack, delivery: Delivery) -> tuple[Cluster, Machine]:
    """Start a cluster with SharePod, which is installed from images and from the unchanged manifests."""
    screen.begin(CONTROL_PLANE)
    cluster = stack.enter_context(Cluster(node_lifecycle=True))
    screen.begin(DELIVERED)
    machine = stack.enter_context(RealNode(cluster, HERE / "inventory.yaml", nvml=True))
    machine.real.serve_api()

    screen.begin(INSTALL)
    screen.command("kubectl apply --server-side -k manifests")
    delivery.install(cluster, machine.real)
    screen.command(f"kubectl label node {machine.node} {POOL_LABEL}=dedicated")
    cluster.kubectl("label", "node", machine.node, f"{POOL_LABEL}=dedicated")
    await_workloads(cluster)
    screen.write(cluster.kubectl("get", "pods", "-n", SYSTEM).stdout.rstrip())
    return cluster, machine


def _machine_and_installation(screen: Screen, stack: ExitStack, cluster: Cluster) -> tuple[Machine, Installation]:
    """Start the node and install SharePod in parallel."""
    reason = RealNode.unavailable()
    if reason is None:
        screen.begin(NODE)
    else:
        screen.begin(NODE, f"installing SharePod; left out: kubelet and containers ({reason})")
        screen.write("  The programs run as plain processes under the hook instead; all else is as with a node.")
    with ThreadPoolExecutor(max_workers=1) as pool:
        installing = pool.submit(_install, cluster)
        inventory = HERE / "inventory.yaml"
        machine = RealNode(cluster, inventory) if reason is None else BareMachine(cluster, inventory, NAMESPACE)
        stack.enter_context(machine)
        return machine, installing.result()


def _install(cluster: Cluster) -> Installation:
    installation = Installation(cluster)
    installation.start_operator()
    return installation


def await_gpus(screen: Screen, cluster: Cluster, machine: Machine) -> None:
    """Wait until the agent has reported all GPUs of the node."""
    screen.watch_until(cluster, lambda: _gpus_reported(cluster, machine), what="GPUs reported by the agent", timeout=60)


def _gpus_reported(cluster: Cluster, machine: Machine) -> bool:
    found = cluster.api.get("/apis/sharepod.dev/v1alpha1/gpunodes")["items"]
    return any(
        each["metadata"]["name"] == machine.node and len(each.get("status", {}).get("gpus", [])) == len(machine.gpus)
        for each in found
    )
