"""The rules of placement a second time, over plain rows and by brute force, as the reference for the engine.

The code is simple and slow. It shares only input and output values with the engine.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import combinations

from property.placement_requests import AFFINITIES, CORDONED
from sharepod.api.gpunode import Latency, Mode
from sharepod.api.units import MIB, GpuUuid, TenantId
from sharepod.placement.holders import DEVICE_PLUGIN_RESOURCE
from sharepod.placement.state.cluster_view import HeadReservation
from sharepod.placement.state.types import GpuState, NodeState, PlacementRequest, Reservation, Resources

LASTING_OF_NODE = {"FewGpus", "NodeSelector", "NodeAffinity", "Taint", "TooSmall"}
LASTING_OF_GPU = {"Uuids", "Model", "TooSmall"}
PASSING_WITH_TENANTS = {"Pods", "Resources", "Kept", "Tenants", "TakenWhole", "Exclusion", "AntiAffinity"} | {
    "Interactive",
    "Time",
    "Memory",
}
"""Names of the rules that a node or GPU without tenants and pods always passes."""

Place = tuple[str, frozenset[GpuUuid]]


@dataclass(frozen=True)
class Pod:
    """Pod whose resources count on a node. `tenant`: its tenant; None if the Pod has no share of SharePod's."""

    node: str
    resources: Resources
    tenant: TenantId | None = None


@dataclass(frozen=True)
class Rules:
    """Rules of placement for one state of the cluster.

    - `most`: for each tenant, the thousandths and bytes that the ledger may hold at most.
    - `left`: tenants whose row in the ledger is known to be releasing.
    - `holders`: Pods that obtain a GPU of the device plugin: node, and the tenant that waits for the GPU.
    - `max_excluded`: the cap on excluded GPUs of a namespace.
    - `uncounted`: tenants whose Pod is not among the node's pods yet.
    """

    states: Mapping[str, NodeState]
    rows: Mapping[str, tuple[Reservation, ...]]
    most: Mapping[TenantId, tuple[int, int]]
    left: Collection[TenantId]
    head_reservation: HeadReservation | None
    pods: Collection[Pod]
    holders: Collection[tuple[str, TenantId]]
    max_excluded: int | None = None
    uncounted: Collection[tuple[str, TenantId]] = ()

    # Rules on one node or one GPU: each method returns the names of the rules that exclude that node or GPU.

    def against_node(self, node: NodeState, request: PlacementRequest) -> set[str]:
        pod, asked = request.pod, request.pod.resources
        blocking = [
            taint
            for taint in node.taints
            if taint.effect != "PreferNoSchedule" and not any(one.key in ("", taint.key) for one in pod.tolerations)
        ]
        free, room = self.free_of_node(node)
        against = {
            "FewGpus": len(node.gpus) < request.gpu.count,
            "NodeSelector": any(node.labels[key] != value for key, value in pod.node_selector.items()),
            "NodeAffinity": not AFFINITIES[pod.node_affinity_terms](node),
            "Taint": any(taint != CORDONED for taint in blocking),
            "TooSmall": not _covers(node.allocatable, asked),
            "Unavailable": node.unavailable is not None,
            "PassingTaint": CORDONED in blocking,
            "Avoided": node.name in request.avoid,
            "Pods": room < 1,
            "Resources": not _covers(free, asked),
        }
        return {rule for rule, holds in against.items() if holds}

    def free_of_node(self, node: NodeState) -> tuple[Resources, int]:
        """Return the free resources and pod slots."""
        pods = [pod for pod in self.pods if pod.node == node.name]
        seen = {pod.tenant for pod in pods}
        taken = [pod.resources for pod in pods]
        taken += [row.needs for row in self.rows[node.name] if not row.releasing and row.tenant not in seen]
        free = node.allocatable
        for resources in taken:
            free = free - resources
        return free, node.pods - len(taken)

    def against_gpu(self, node: NodeState, gpu: GpuState, request: PlacementRequest) -> set[str]:
        asked, namespace = request.gpu, request.namespace
        here = [row for row in self.rows[node.name] if gpu.uuid in row.gpus]

        def named(row: Reservation, label: str | None) -> tuple[str, str] | None:
            return None if label is None else (row.namespace, label)

        shared = asked.mode is Mode.SHARED
        kept = self.head_reservation
        against = {
            "Uuids": bool(asked.uuids) and gpu.uuid not in asked.uuids,
            "Model": bool(asked.models) and gpu.model not in asked.models,
            "TooSmall": shared and asked.memory is not None and asked.memory > gpu.memory,
            "Unavailable": not gpu.available,
            "NotHeld": not gpu.held,
            "Kept": kept is not None
            and kept.tenant != request.tenant
            and kept.priority >= request.priority
            and (kept.open_to != namespace or kept.priority > request.priority)
            and (kept.node == node.name and gpu.uuid in kept.gpus),
            "Tenants": not shared and bool(here),
            "TakenWhole": shared and any(row.mode is Mode.EXCLUSIVE for row in here),
        }
        if shared:
            exclusion = None if asked.labels.exclusion is None else (namespace, asked.labels.exclusion)
            apart = None if asked.labels.anti_affinity is None else (namespace, asked.labels.anti_affinity)
            time, memory = self.free_of_gpu(node, gpu)
            part = gpu.memory * asked.request_milli // 1000
            default = part if part == gpu.memory else part // MIB * MIB
            size = asked.memory if asked.memory is not None else default
            against |= {
                "Exclusion": any(named(row, row.labels.exclusion) != exclusion for row in here),
                "ExclusionCap": exclusion is not None
                and self.beyond_cap(request, {named(row, row.labels.exclusion) for row in here}),
                "AntiAffinity": apart is not None
                and any(named(row, row.labels.anti_affinity) == apart for row in here),
                "Interactive": asked.latency is Latency.INTERACTIVE
                and any(row.latency is Latency.INTERACTIVE for row in here),
                "Time": asked.request_milli > time,
                "Memory": size > memory,
            }
        return {rule for rule, holds in against.items() if holds}

    def beyond_cap(self, request: PlacementRequest, labels: set[tuple[str, str] | None]) -> bool:
        """Return whether the request would make its namespace exclude others from more GPUs than the cap allows.
        `labels`: exclusion labels of the tenants already on the GPU."""
        asked = request.gpu
        joins = labels == {(request.namespace, asked.labels.exclusion)}
        if self.max_excluded is None or joins or asked.request_milli >= 500:
            return False
        return self.excluded().count(request.namespace) + asked.count > self.max_excluded

    def excluded(self) -> list[str]:
        """Return, for each GPU that only one exclusion label may use and of which less than half is requested, the
        label's namespace."""
        found = []
        for node in self.states.values():
            for gpu in node.gpus:
                here = [row for row in self.rows[node.name] if gpu.uuid in row.gpus]
                labels = {row.labels.exclusion and (row.namespace, row.labels.exclusion) for row in here}
                if len(labels) == 1 and None not in labels and self.free_of_gpu(node, gpu)[0] > 500:
                    found += [label[0] for label in labels if label]
        return found

    def free_of_gpu(self, node: NodeState, gpu: GpuState) -> tuple[int, int]:
        """Return the free thousandths of time and bytes."""
        taken = [self.most[row.tenant] for row in self.rows[node.name] if gpu.uuid in row.gpus]
        return 1000 - sum(time for time, _ in taken), gpu.memory - sum(memory for _, memory in taken)

    # Places

    def group(self, request: PlacementRequest) -> set[Place]:
        """Return the places of the request's affinity group."""
        label = request.gpu.labels.affinity
        return {
            (node, frozenset(row.gpus))
            for node in self.states
            for row in self.rows[node]
            if label is not None
            and row.tenant not in self.left
            and (row.namespace, row.labels.affinity) == (request.namespace, label)
        }

    def fitting(self, request: PlacementRequest, *, ignoring: Collection[str] = ()) -> dict[str, frozenset[GpuUuid]]:
        """Return the suitable GPUs of each node, even if they are fewer than requested. Nodes that do not suit are left
        out. `ignoring`: rules that do not apply."""
        return {
            node.name: frozenset(
                gpu.uuid
                for gpu in node.gpus
                if self.against_node(node, request) <= set(ignoring)
                and self.against_gpu(node, gpu, request) <= set(ignoring)
            )
            for node in self.states.values()
        }

    def possible(self, request: PlacementRequest, *, ignoring: Collection[str] = ()) -> dict[str, frozenset[GpuUuid]]:
        """Return the nodes that can take the request, each with GPUs of which any `count` can be chosen. `ignoring`:
        rules that do not apply.
        """
        group = self.group(request)
        found: dict[str, frozenset[GpuUuid]] = {}
        for name, fits in self.fitting(request, ignoring=ignoring).items():
            if not group and len(fits) >= request.gpu.count:
                found[name] = fits
            for node, gpus in group:
                if node == name and gpus <= fits and len(gpus) == request.gpu.count:
                    found[name] = gpus
        return found

    def choices(self, request: PlacementRequest) -> Iterator[Place]:
        for name, fits in self.possible(request).items():
            for gpus in combinations(sorted(fits), request.gpu.count):
                yield name, frozenset(gpus)

    def possible_one_day(self, request: PlacementRequest) -> dict[str, frozenset[GpuUuid]]:
        """Return the places that are possible once all tenants have left."""
        return self.possible(request, ignoring=PASSING_WITH_TENANTS)

    def possible_when_empty(self, request: PlacementRequest) -> bool:
        """Return whether the request has a place without tenants and with everything available.

        A node that has not reported a GPU yet counts as having any GPU.
        """
        for node in self.states.values():
            against = self.against_node(node, request) & LASTING_OF_NODE
            fits = [gpu for gpu in node.gpus if not self.against_gpu(node, gpu, request) & LASTING_OF_GPU]
            if against <= ({"FewGpus"} if not node.gpus else set()) and (
                not node.gpus or len(fits) >= request.gpu.count
            ):
                return True
        return False

    def cannot_join(self, request: PlacementRequest) -> bool:
        """Return whether the request can never join its affinity group, because of its count, its mode, or the group's
        places.
        """
        group = self.group(request)
        alike = [place for place in group if len(place[1]) == request.gpu.count]
        whole = request.gpu.mode is Mode.EXCLUSIVE
        return bool(group) and (whole or all(self.at_odds(place, request) for place in alike))

    def at_odds(self, place: Place, request: PlacementRequest) -> bool:
        """Return whether the request could not join its group at this place even if all other tenants left."""
        node, labels = self.states[place[0]], request.gpu.labels
        gpus = [gpu for gpu in node.gpus if gpu.uuid in place[1]]
        here = [row for row in self.rows[node.name] if place[1] & set(row.gpus)]
        members = [
            row.labels
            for row in here
            if row.tenant not in self.left
            and (row.namespace, row.labels.affinity) == (request.namespace, labels.affinity)
        ]
        return (
            bool(self.against_node(node, request) & LASTING_OF_NODE)
            or any(self.against_gpu(node, gpu, request) & LASTING_OF_GPU for gpu in gpus)
            or any(row.mode is Mode.EXCLUSIVE for row in here)
            or any(member.exclusion != labels.exclusion for member in members)
            or any(member.anti_affinity == labels.anti_affinity is not None for member in members)
        )

    # Preferences between possible places

    def replicas(self, request: PlacementRequest, place: Place) -> tuple[int, int]:
        """Return how many tenants have the request's owner: (on the place's GPUs, on its node)."""
        node, gpus = place
        same = [row for row in self.rows[node] if row.owner == request.owner is not None and not row.releasing]
        return sum(len(gpus & set(row.gpus)) for row in same), len(same)

    def distance(self, place: Place) -> tuple[int, int]:
        """Return (distance of the worst pair of the GPUs, sum of the distances of all pairs)."""
        by_name = {gpu.uuid: gpu for gpu in self.states[place[0]].gpus}
        pairs = [_distance(by_name[one], by_name[other]) for one, other in combinations(sorted(place[1]), 2)]
        return max(pairs, default=0), sum(pairs)

    def new_holders(self, request: PlacementRequest) -> dict[str, tuple[int, int]]:
        """Return the nodes where new holders would make a place, whichever GPUs they get.

        By node: the number of holders, and the number of GPUs that NVIDIA's device plugin has not assigned.
        """
        if request.gpu.uuids or self.group(request) or any(tenant == request.tenant for _, tenant in self.holders):
            return {}
        found = {}
        fitting = self.fitting(request)
        for name, node in self.states.items():
            free, _ = self.free_of_node(node)
            left = free.extended.get(DEVICE_PLUGIN_RESOURCE, 0) - sum(on == name for on, _ in self.uncounted)
            others = [gpu for gpu in node.gpus if not gpu.held and not gpu.taken]
            wanted = request.gpu.count - len(fitting[name])
            if not node.device_plugin or self.against_node(node, request) or not 0 < wanted <= min(left, len(others)):
                continue
            here = [row for row in self.rows[name] for gpu in others if gpu.uuid in row.gpus]
            suits = [not self.against_gpu(node, replace(gpu, held=True), request) for gpu in others]
            if all(suits) and not here:
                found[name] = wanted, left
        return found


def _covers(has: Resources, asked: Resources) -> bool:
    pairs = [(asked.cpu_milli, has.cpu_milli), (asked.memory, has.memory)]
    pairs += [(amount, has.extended.get(name, 0)) for name, amount in asked.extended.items()]
    return all(not wanted or wanted <= there for wanted, there in pairs)


def _distance(one: GpuState, other: GpuState) -> int:
    order = ["NVLINK", "PIX", "PXB", "PHB", "NODE", "SYS"]
    kinds = [kind for gpu, to in ((one, other), (other, one)) for uuid, kind in gpu.links if uuid == to.uuid]
    if kinds:
        return min(order.index(kind) for kind in kinds)
    alike = one.numa_node is not None and one.numa_node == other.numa_node
    return order.index("NODE" if alike else "SYS")
