"""Holders: where pods of ours should take whole GPUs from NVIDIA's device plugin, so that a request gets a place.

Guarantees:
- A new holder is asked for only where it makes a place, whichever of the node's free GPUs the kubelet gives it: not
  where the plugin offers GPUs that the agent does not report.
- A tenant that waits for a holder in flight gets no other.
- Pods that wait for whole GPUs come first: what they could have of a node is left to them.
- A node whose label `sharepod.dev/max-held-gpus` says so has no more GPUs held than that. A label that is no number
  counts as 0.
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
"""The name of a GPU of NVIDIA's device plugin among a node's resources."""


def find_holder(cluster: Cluster, request: PlacementRequest) -> NewHolder | None:
    """Choose where new holders would make a place: the fewest holders, then the node with the fewest GPUs left to give.

    The kubelet chooses among the GPUs that nobody holds, so all of them have to suit. A request for certain GPUs, and
    one whose affinity group runs, cannot be served this way.
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
    """Count the GPUs that pods which wait for whole ones could have of a node, were so many `free` there.

    A pod counts on each node that it could run on by selector, affinity, taints and requests. Other rules of
    kube-scheduler (pod affinity, spreading, volumes) are not looked at.
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
    """Return how many GPUs of a node holders may have at a time."""
    said = node.state.labels.get(MAX_HELD_LABEL) if node.state is not None else None
    return len(node.gpus) if said is None else integer(said) or 0


def left_to_give(node: NodeAccount) -> int:
    """Count the GPUs that the device plugin has given to no pod, less those that holders will get whose Pod is not
    counted among the node's yet."""
    uncounted = sum(holder not in node.pods for holder in node.holders)
    return node.taken().free.extended.get(DEVICE_PLUGIN_RESOURCE, 0) - uncounted


def _offers_unknown(node: NodeAccount) -> bool:
    """Return whether the device plugin offers more GPUs than the agent reports: one that fell off the bus may be among
    those that the kubelet gives."""
    offered = node.state.allocatable.extended.get(DEVICE_PLUGIN_RESOURCE, 0) if node.state is not None else 0
    return offered > len(node.gpus)


def _would_pass(gpu: GpuAccount, request: PlacementRequest) -> bool:
    """Return whether the GPU passes once a holder of ours has it."""
    fits = all(check.passes(gpu) for check in (*gpu_filters.static(request), *gpu_filters.within_cap(request)))
    return fits and gpu.state.available and not gpu.tenants
