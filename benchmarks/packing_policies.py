"""The policies that a replay compares: the present engine, and BestFit and FGD as their paper defines them.

Weng et al., "Beware of Fragmentation: Scheduling GPU-Sharing Workloads with Fragmentation Gradient Descent", USENIX ATC
2023. Both policies of the paper score in whole numbers and choose the first node among equals. On the node, BestFit
      chooses the fullest GPU that fits, and FGD the GPU with the best score. Pods with whole GPUs get the
first free ones.

The C function that counts fitting requests is shared with the engine. Reproducing the published results validates it.
"""

from __future__ import annotations

import gc
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
from packing_trace import TraceNode, TracePod
from reference.pods_without_gpus import find_node
from reference.usable_capacity import Definition
from sharepod.api.sharepod import GpuRequest
from sharepod.api.units import WHOLE_GPU, Bytes, GpuUuid, Milli, TenantId
from sharepod.placement.binpack.demand import DemandClass, MemoryShare
from sharepod.placement.binpack.usable_capacity import UsableCapacity
from sharepod.placement.engine import Engine
from sharepod.placement.state.cluster import Cluster
from sharepod.placement.state.types import Assignment, GpuState, NodeState, PlacementRequest, PodNeeds, Resources

Array = npt.NDArray[Any]


class Policy(Protocol):
    """Policy of a replay. `place` admits a pod and returns its place; None: the pod is refused. `leave` removes a pod,
    given the result of `place`. `decisions`: see `SharePod`."""

    decisions: list[float]

    def place(self, pod: TracePod) -> object | None: ...

    def leave(self, placed: Any) -> None: ...


class SharePod:
    """Policy: the placement engine with all its rules. It starts without knowledge, and learns the demand from the
    pods.

    `decisions`: seconds that each choice of a place took. Recording the choice and renewing the weights are not
    included.
    """

    def __init__(self, nodes: Sequence[TraceNode], pods: Sequence[TracePod]) -> None:
        self.cluster = Cluster()
        self.engine = Engine(self.cluster)
        for node in nodes:
            gpus = tuple(
                GpuState(
                    uuid=GpuUuid(f"GPU-{node.name}-{index}"),
                    index=index,
                    model=node.model,
                    memory=Bytes(node.gpu_memory),
                )
                for index in range(node.gpus)
            )
            allocatable = Resources(node.cpu, node.memory << 20)
            self.cluster.upsert_node(NodeState(name=node.name, allocatable=allocatable, pods=10_000, gpus=gpus))
        self.decisions: list[float] = []
        self._number = 0
        self._asked = self._asked_whole = 0
        """GPU time requested so far, in thousandths of a GPU, and the part of it in whole GPUs."""
        # set the garbage collector as the operator does after it has listed all objects; first collect the objects of
        # an earlier engine
        gc.unfreeze()
        gc.collect()
        gc.freeze()
        gc.set_threshold(20_000)

    def place(self, pod: TracePod) -> tuple[str, str] | None:
        self._number += 1
        name = f"pod-{self._number}"
        needs = PodNeeds(resources=Resources(pod.cpu, pod.memory << 20))
        packing = self.engine.packing
        if not pod.gpus:
            packing.demand.count(None)
            if packing.due:
                packing.renew()
            host = find_node(self.engine, needs, self._asked_whole / max(self._asked, 1))
            if host is not None:
                self.cluster.set_pod_usage(host, name, needs.resources)
            return None if host is None else (host, name)
        self._asked += pod.demand
        self._asked_whole += pod.demand if pod.milli == WHOLE_GPU else 0
        memory = None if pod.gpu_memory is None else Bytes(pod.gpu_memory)
        gpu = GpuRequest(
            request_milli=Milli(pod.milli), limit_milli=WHOLE_GPU, memory=memory, count=pod.gpus, models=pod.models
        )
        request = PlacementRequest(tenant=TenantId(name), namespace="trace", name=name, gpu=gpu, pod=needs)
        self.learn(request)
        if packing.due:
            packing.renew()
        began = time.perf_counter()
        answer = self.find(request)
        self.decisions.append(time.perf_counter() - began)
        if answer is None:
            return None
        self.engine.reserve(request, answer)
        return answer.node, name

    def find(self, request: PlacementRequest) -> Assignment | None:
        return self.engine.find(request)

    def learn(self, request: PlacementRequest) -> None:
        self.engine.packing.arrived(request)

    def leave(self, placed: tuple[str, str]) -> None:
        node, name = placed
        self.cluster.remove_pod(name)
        self.cluster.release(node, TenantId(name))
        self.engine.packing.settle()


class MemoryBlind(SharePod):
    """Policy: the engine, with the assumption that the memory of each request is in proportion to its time. The
    difference to `SharePod` shows the value of using the real memory."""

    def learn(self, request: PlacementRequest) -> None:
        self.engine.packing.arrived(replace(request, gpu=replace(request.gpu, memory=None)))


class _TracePolicy:
    """Base of the paper's policies. Nodes are arrays. The scores of all nodes are kept for each kind of pod, and only
    changed nodes are scored again. Memory of nodes and GPUs only excludes nodes; it does not affect scores."""

    def __init__(self, nodes: Sequence[TraceNode], pods: Sequence[TracePod]) -> None:
        width = max(node.gpus for node in nodes)
        self.models = sorted({node.model for node in nodes})
        self.model = np.array([self.models.index(node.model) for node in nodes])
        self.cpu = np.array([node.cpu for node in nodes])
        self.memory = np.array([node.memory for node in nodes])
        self.free = np.full((len(nodes), width), -1)
        self.bytes = np.zeros((len(nodes), width), dtype=np.int64)
        self.size = np.array([node.gpu_memory for node in nodes])
        for index, node in enumerate(nodes):
            self.free[index, : node.gpus] = WHOLE_GPU
            self.bytes[index, : node.gpus] = node.gpu_memory
        self.decisions: list[float] = []
        self._changed_at = np.zeros(len(nodes), dtype=np.int64)
        self._version = 0
        self._scores: dict[TracePod, tuple[Array, list[int]]] = {}

    def place(self, pod: TracePod) -> tuple[int, list[int], TracePod] | None:
        began = time.perf_counter()
        if pod not in self._scores:
            self._scores[pod] = (np.full(len(self.cpu), -1, dtype=np.int64), [-1])
        score, seen = self._scores[pod]
        changed = np.flatnonzero(self._changed_at > seen[0])
        seen[0] = self._version
        if changed.size:
            score[changed] = -1
            part, fits = self._passing(changed, pod)
            if part.size:
                score[part] = self.score(part, fits, pod)
        index = int(score.argmax())
        placed = None
        if score[index] >= 0:
            part, fits = self._passing(np.array([index]), pod)
            placed = index, self.gpus(index, np.flatnonzero(fits[0]), pod), pod
        self.decisions.append(time.perf_counter() - began)
        if placed is not None:
            self._take(placed, 1)
        return placed

    def leave(self, placed: tuple[int, list[int], TracePod]) -> None:
        self._take(placed, -1)

    def _take(self, placed: tuple[int, list[int], TracePod], sign: int) -> None:
        index, gpus, pod = placed
        self.cpu[index] -= sign * pod.cpu
        self.memory[index] -= sign * pod.memory
        self.free[index, gpus] -= sign * pod.milli
        self.bytes[index, gpus] -= sign * self._asked(np.array([index]), pod)[0]
        self._version += 1
        self._changed_at[index] = self._version

    def _asked(self, part: Array, pod: TracePod) -> Array:
        if pod.gpu_memory is not None:
            return np.full(part.size, pod.gpu_memory)
        result: Array = self.size[part] * pod.milli // WHOLE_GPU
        return result

    def _passing(self, part: Array, pod: TracePod) -> tuple[Array, Array]:
        good = (self.cpu[part] >= pod.cpu) & (self.memory[part] >= pod.memory)
        if pod.models:
            good &= np.isin(self.model[part], [self.models.index(one) for one in pod.models if one in self.models])
        fits = (self.free[part] >= max(pod.milli, 0)) & (self.bytes[part] >= self._asked(part, pod)[:, None])
        if pod.gpus:
            good &= fits.sum(axis=1) >= pod.gpus
        return part[good], fits[good]

    def score(self, part: Array, fits: Array, pod: TracePod) -> Array:
        raise NotImplementedError

    def gpus(self, index: int, passing: Array, pod: TracePod) -> list[int]:
        raise NotImplementedError


class BestFit(_TracePolicy):
    """Policy: the node on which the least CPU and GPU time would be left, each relative to the largest node's."""

    CPU, GPU = 128_000, 8_000

    def score(self, part: Array, fits: Array, pod: TracePod) -> Array:
        cpu = (self.cpu[part] - pod.cpu) / self.CPU * 0.5
        gpu = (np.maximum(self.free[part], 0).sum(axis=1) - pod.demand) / self.GPU * 0.5
        result: Array = ((1.0 - cpu - gpu) * 100).astype(np.int64)
        return np.maximum(result, 0)

    def gpus(self, index: int, passing: Array, pod: TracePod) -> list[int]:
        if pod.gpus == 1:
            return [int(passing[self.free[index, passing].argmin()])]
        return [int(gpu) for gpu in passing[: pod.gpus]]


class Fgd(_TracePolicy):
    """Policy: the node on which the expected fragmentation grows least. It knows the trace's mix from the start: the
    kinds of pods that make up 95 % of the pods."""

    def __init__(self, nodes: Sequence[TraceNode], pods: Sequence[TracePod]) -> None:
        super().__init__(nodes, pods)
        counts = Counter((pod.cpu, pod.gpus, pod.milli, pod.models) for pod in pods)
        kept, total = {}, 0
        for kind, count in counts.most_common():
            kept[kind] = count
            total += count
            if total >= 0.95 * len(pods):
                break
        shares = {
            DemandClass(gpus, milli, MemoryShare.IN_PROPORTION, cpu, models): count / total
            for (cpu, gpus, milli, models), count in kept.items()
            if gpus
        }
        self._definition = Definition(UsableCapacity(shares, models=self.models, sizes=[WHOLE_GPU], mix=1.0))

    def score(self, part: Array, fits: Array, pod: TracePod) -> Array:
        whole = np.maximum(self.free[part], 0)
        before = self._fragments(whole, self.cpu[part], self.model[part])
        if pod.gpus == 1 and pod.milli < WHOLE_GPU:
            at, gpu = np.nonzero(fits)
            after = whole[at]
            after[np.arange(at.size), gpu] -= pod.milli
            change = before[at] - self._fragments(after, self.cpu[part][at] - pod.cpu, self.model[part][at])
            return np.maximum.reduceat(_sigmoid(change), np.flatnonzero(np.diff(at, prepend=-1)))
        after = whole.copy()
        if pod.gpus:
            first = fits & (np.cumsum(fits, axis=1) <= pod.gpus)
            after[first] -= pod.milli
        return _sigmoid(before - self._fragments(after, self.cpu[part] - pod.cpu, self.model[part]))

    def _fragments(self, free: Array, cpu: Array, model: Array) -> Array:
        """Return the free capacity that kinds of pods could not use, weighted by how common they are.
        Pods without a GPU can use none of it."""
        states = np.column_stack((model, cpu, np.sort(free, axis=1)))
        if len(states) > 256:
            states, inverse = np.unique(states, axis=0, return_inverse=True)
        else:
            inverse = np.arange(len(states))
        time, zero = states[:, 2:], np.zeros((len(states), free.shape[1]), dtype=np.int64)
        sums = self._definition.gpus(time, time, zero).sum(axis=1)
        usable = self._definition.value(sums, states[:, 1].astype(np.float32), states[:, 0])
        result: Array = (time.sum(axis=1) - usable)[inverse.ravel()]
        return result

    def gpus(self, index: int, passing: Array, pod: TracePod) -> list[int]:
        if pod.gpus == 1 and pod.milli < WHOLE_GPU:
            scores = []
            for gpu in passing:
                only = np.zeros((1, self.free.shape[1]), dtype=bool)
                only[0, gpu] = True
                scores.append(int(self.score(np.array([index]), only, pod)[0]))
            return [int(passing[int(np.argmax(scores))])]
        return [int(gpu) for gpu in passing[: pod.gpus]]


def _sigmoid(change: Array) -> Array:
    result: Array = (100.0 / (1.0 + np.exp(-change / 1000.0))).astype(np.int64)
    return result
