"""Request classes (requests with equal scores), and masks of the nodes that suit a pod, whatever their tenants.

Guarantees: `NodeMasks` agrees with the filters of `filters.node` that read only a node's state (`BY_STATE`).
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from sharepod.api.gpunode import Latency, Mode
from sharepod.api.units import Bytes
from sharepod.placement.filters.node import BY_STATE
from sharepod.placement.state.types import LabelKey, NodeSelectorTerm, PlacementRequest, PodNeeds, Toleration, label_key

from .columns import Columns
from .demand import MemoryShare, memory_of

_MAX_MASKS = 1024
"""Most masks that are cached: one for each combination of selector, affinity and tolerations. Each takes one byte per
node."""


@dataclass(frozen=True, slots=True)
class RequestClass:
    """Class of requests that are equal for placement: contains every property on which a score depends."""

    needs: PodNeeds
    count: int = 0
    """Number of GPUs. 0 for a pod that takes none."""
    milli: int = 0
    """Thousandths of the time of each GPU."""
    memory: Bytes | MemoryShare = MemoryShare.IN_PROPORTION
    """Memory of each GPU."""
    exclusion: LabelKey | None = None
    models: tuple[str, ...] = ()
    """GPU models; empty: any."""
    anti_affinity: LabelKey | None = None
    whole: bool = False
    """Mode Exclusive: only GPUs without tenants."""
    interactive: bool = False
    """Latency Interactive: only GPUs that take one more interactive tenant."""

    @classmethod
    def of(cls, request: PlacementRequest) -> RequestClass:
        """Return the class of a request."""
        gpu = request.gpu
        return cls(
            request.pod,
            gpu.count,
            int(gpu.request_milli),
            memory_of(request),
            label_key(request.namespace, gpu.labels.exclusion),
            gpu.models,
            label_key(request.namespace, gpu.labels.anti_affinity),
            gpu.mode is Mode.EXCLUSIVE,
            gpu.latency is Latency.INTERACTIVE,
        )


def request_key(request: PlacementRequest) -> Hashable:
    """Return a key that is equal for requests of the same class. It costs less to make than the class itself."""
    gpu = request.gpu
    labels = gpu.labels
    named = labels.exclusion is not None or labels.anti_affinity is not None
    return (
        gpu.request_milli,
        gpu.memory,
        gpu.count,
        gpu.models,
        gpu.mode,
        gpu.latency,
        (request.namespace, labels.exclusion, labels.anti_affinity) if named else None,
        *needs_key(request.pod),
    )


_SuitsKey = tuple[frozenset[tuple[str, str]], tuple[NodeSelectorTerm, ...], tuple[Toleration, ...]]

_ANY_NODE: _SuitsKey = (frozenset(), (), ())


def _suits_key(needs: PodNeeds) -> _SuitsKey:
    if not (needs.node_selector or needs.node_affinity_terms or needs.tolerations):
        return _ANY_NODE
    return frozenset(needs.node_selector.items()), needs.node_affinity_terms, needs.tolerations


def needs_key(needs: PodNeeds) -> tuple[Hashable, ...]:
    """Return a key of a pod's needs: resources, selector, affinity, tolerations."""
    resources = needs.resources
    extended: Mapping[str, int] = resources.extended
    return (
        resources.cpu_milli,
        resources.memory,
        tuple(sorted(extended.items())) if extended else None,
        _suits_key(needs),
    )


@dataclass(slots=True)
class _Mask:
    """Mask of the nodes that suit a pod. `seen`: version of the columns up to which it is current. `all_pass`: all
    nodes suit."""

    passes: npt.NDArray[np.bool_]
    seen: int
    all_pass: bool = False


class NodeMasks:
    """Cache of node masks. A mask entry is computed again only when the node's state (labels, taints, readiness)
    changes."""

    def __init__(self, columns: Columns) -> None:
        self._columns = columns
        self._masks: dict[Hashable, _Mask] = {}

    def forget(self) -> None:
        """Drop all masks, because rebuilt columns have the nodes at other indices."""
        self._masks.clear()

    def mask(self, needs: PodNeeds) -> npt.NDArray[np.bool_] | None:
        """Return the mask of nodes that suit a pod by their own state, of shape (nodes,). None: all nodes suit."""
        columns = self._columns
        key = _suits_key(needs)
        mask = self._masks.get(key)
        if mask is None:
            if len(self._masks) >= _MAX_MASKS:
                self._masks.clear()
            mask = self._masks[key] = _Mask(np.zeros(len(columns.names), dtype=bool), -1)
        if mask.seen < columns.last_state_change:
            for node in np.flatnonzero(columns.state_changed_at > mask.seen).tolist():
                state = columns.states[node]
                mask.passes[node] = state is not None and all(passes(state, needs) for passes in BY_STATE)
            mask.seen = columns.version
            mask.all_pass = bool(mask.passes.all())
        return None if mask.all_pass else mask.passes
