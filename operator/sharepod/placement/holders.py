"""Holders: decides where new holders (Pods of the operator) should take whole GPUs from NVIDIA's device plugin, so that
a request gets a place.

Guarantees:
- A new holder is requested only where it makes a place, whichever of the node's free GPUs the kubelet assigns. So a
  node is skipped if the plugin offers GPUs that the agent does not report.
- A tenant that waits for a pending holder gets no other holder.
- Pods that wait for whole GPUs have precedence: the GPUs of a node that they could use are left to them.
- A node has no more held GPUs than its label `sharepod.dev/max-held-gpus` allows. A label that is no number counts as
  0.
"""

from __future__ import annotations

from dataclasses import replace

from sharepod.api.objects import MAX_HELD_LABEL
from sharepod.api.units import Bytes

from .filters import gpu as gpu_filters
from .filters.candidates import affinity_places, gpu_checks, gpu_passes, node_passes
from .filters.node import BY_STATE, covers
from .state.accounts import GpuAccount, NodeAccount
from .state.cluster import Cluster
from .state.needs import integer
from .state.types import NewHolder, NodeState, PlacementRequest, PodNeeds, Resources

DEVICE_PLUGIN_RESOURCE = "nvidia.com/gpu"
"""Resource by which NVIDIA's device plugin offers the GPUs of a node."""


def find_holder(cluster: Cluster, request: PlacementRequest) -> NewHolder | None:
    """Choose the node for new holders for the request: fewest holders, then fewest free GPUs. None: no node.

    The kubelet chooses among the free GPUs, so all of them must suit. A request for certain GPUs, and a request whose
    affinity group runs, cannot be served this way.
    """
    nodes = cluster.plugin_nodes()
    if not nodes or request.gpu.uuids or affinity_places(cluster, request):
        return None
    if any(request.tenant in node.holders.values() for node in nodes):
        return None
    checks = gpu_checks(request)
    best: tuple[int, int, str, NewHolder] | None = None
    for node in nodes:
        ours = [gpu for gpu in node.gpus if gpu.state.held]
        others = [gpu for gpu in node.gpus if not (gpu.state.held or gpu.state.taken)]
        passing = [gpu for gpu in ours if gpu_passes(gpu, checks)][: request.gpu.count]
        wanted = request.gpu.count - len(passing)
        left = left_to_give(node)
        for_us = min(left - wanted_whole(cluster, node, left), _most_held(node) - len(ours) - len(node.holders))
        if not 0 < wanted <= min(for_us, len(others)) or _offers_unknown(node) or not node_passes(node, request):
            continue
        if not all(_would_pass(gpu, request) for gpu in others):
            continue
        memory = Bytes(min(request.gpu.memory_on(gpu.state.memory) for gpu in (*passing, *others)))
        answer = NewHolder(node=node.name, count=wanted, memory=memory)
        if best is None or (wanted, left, node.name) < best[:3]:
            best = wanted, left, node.name, answer
    return None if best is None else best[3]


def wanted_whole(cluster: Cluster, node: NodeAccount, free: int) -> int:
    """Return how many GPUs of a node with `free` GPUs are wanted by pods that wait for whole GPUs.

    A pod counts on each node where its selector, affinity, tolerations and requests would let it run. Other rules of
    kube-scheduler (pod affinity, spreading, volumes) are not checked.
    """
    state = node.state
    if state is None or not cluster.whole_gpu_pods:
        return 0
    room = node.taken().free
    room = replace(room, extended={**room.extended, DEVICE_PLUGIN_RESOURCE: free})
    return cluster.whole_gpu_pods.could_have(state, room, DEVICE_PLUGIN_RESOURCE, _could_run)


def _could_run(state: NodeState, room: Resources, needs: PodNeeds) -> bool:
    return covers(room, needs.resources) and all(passes(state, needs) for passes in BY_STATE)


def _most_held(node: NodeAccount) -> int:
    """Return the most GPUs that holders may have: by the node's label, else all."""
    label = node.state.labels.get(MAX_HELD_LABEL) if node.state is not None else None
    return len(node.gpus) if label is None else integer(label) or 0


def left_to_give(node: NodeAccount) -> int:
    """Return the number of GPUs that the device plugin can still assign. GPUs for pending holders whose Pods are not
    counted yet are subtracted."""
    uncounted = sum(holder not in node.pods for holder in node.holders)
    return node.taken().free.extended.get(DEVICE_PLUGIN_RESOURCE, 0) - uncounted


def _offers_unknown(node: NodeAccount) -> bool:
    """Return whether the device plugin offers more GPUs than the agent reports. The kubelet could then assign a holder
    a GPU that does not work."""
    offered = node.state.allocatable.extended.get(DEVICE_PLUGIN_RESOURCE, 0) if node.state is not None else 0
    return offered > len(node.gpus)


def _would_pass(gpu: GpuAccount, request: PlacementRequest) -> bool:
    """Return whether the GPU would take the request once a holder has it."""
    fits = all(check.passes(gpu) for check in (*gpu_filters.static(request), *gpu_filters.within_cap(request)))
    return fits and gpu.state.available and not gpu.tenants
