"""Requests as the columns see them, and which nodes suit their pods whatever their tenants.

Guarantees: `NodeMasks` says what those of `node_filters` say that look at a node's state alone.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from sharepod.api.gpunode import Mode
from sharepod.placement.filters.node import BY_STATE
from sharepod.placement.state.types import LabelKey, NodeSelectorTerm, PlacementRequest, PodNeeds, Toleration, label_key

from .columns import Columns

_MAX_MASKS = 1024


@dataclass(frozen=True, slots=True)
class Ask:
    """`milli` of each of `count` GPUs, 0 GPUs for a pod that takes none; `memory` None: in proportion to `milli`."""

    needs: PodNeeds
    count: int = 0
    milli: int = 0
    memory: int | None = None
    exclusion: LabelKey | None = None
    models: tuple[str, ...] = ()
    anti_affinity: LabelKey | None = None
    whole: bool = False

    @classmethod
    def of(cls, request: PlacementRequest) -> Ask:
        gpu = request.gpu
        return cls(
            request.pod,
            gpu.count,
            int(gpu.request),
            None if gpu.memory is None else int(gpu.memory),
            label_key(request.namespace, gpu.labels.exclusion),
            gpu.models,
            label_key(request.namespace, gpu.labels.anti_affinity),
            gpu.mode is Mode.EXCLUSIVE,
        )


def request_key(request: PlacementRequest) -> Hashable:
    """Equal for requests that the columns cannot tell apart."""
    gpu = request.gpu
    labels = gpu.labels
    named = labels.exclusion is not None or labels.anti_affinity is not None
    return (
        gpu.request,
        gpu.memory,
        gpu.count,
        gpu.models,
        gpu.mode,
        (request.namespace, labels.exclusion, labels.anti_affinity) if named else None,
        *needs_key(request.pod),
    )


_PlacementKey = tuple[frozenset[tuple[str, str]], tuple[NodeSelectorTerm, ...], tuple[Toleration, ...]]

_ANYWHERE: _PlacementKey = (frozenset(), (), ())


def _placement_key(needs: PodNeeds) -> _PlacementKey:
    if not (needs.node_selector or needs.node_affinity_terms or needs.tolerations):
        return _ANYWHERE
    return frozenset(needs.node_selector.items()), needs.node_affinity_terms, needs.tolerations


def needs_key(needs: PodNeeds) -> tuple[Hashable, ...]:
    """Equal for pods that ask the same of their node."""
    resources = needs.resources
    extended: Mapping[str, int] = resources.extended
    return (
        resources.cpu_milli,
        resources.memory,
        tuple(sorted(extended.items())) if extended else None,
        _placement_key(needs),
    )


@dataclass(slots=True)
class _Mask:
    """Which nodes can take a pod with these needs, as far as it does not depend on tenants."""

    passes: npt.NDArray[np.bool_]
    seen: int
    all_pass: bool = False


class NodeMasks:
    """Keeps which nodes suit a pod whatever their tenants; that changes with the nodes alone."""

    def __init__(self, columns: Columns) -> None:
        self._columns = columns
        self._masks: dict[Hashable, _Mask] = {}

    def forget(self) -> None:
        """The rows of the columns are others."""
        self._masks.clear()

    def mask(self, needs: PodNeeds) -> npt.NDArray[np.bool_] | None:
        """By row; None: all nodes suit."""
        columns = self._columns
        key = _placement_key(needs)
        mask = self._masks.get(key)
        if mask is None:
            if len(self._masks) >= _MAX_MASKS:
                self._masks.clear()
            mask = self._masks[key] = _Mask(np.zeros(len(columns.names), dtype=bool), -1)
        if mask.seen < columns.last_fixed:
            for slot in np.flatnonzero(columns.fixed > mask.seen).tolist():
                state = columns.states[slot]
                mask.passes[slot] = state is not None and all(passes(state, needs) for passes in BY_STATE)
            mask.seen = columns.version
            mask.all_pass = bool(mask.passes.all())
        return None if mask.all_pass else mask.passes
