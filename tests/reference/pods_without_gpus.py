"""Placement of pods without GPUs in replays of traces: where GPU shares miss the CPU least.

In a real cluster kube-scheduler places such pods. A trace contains them together with pods that use GPUs.
"""

from __future__ import annotations

import numpy as np
from sharepod.placement.binpack.request_classes import RequestClass, needs_key
from sharepod.placement.binpack.scores import NO_PLACE
from sharepod.placement.engine import Engine
from sharepod.placement.filters.node import BY_STATE, covers
from sharepod.placement.state.accounts import NodeAccount
from sharepod.placement.state.types import PodNeeds

TOLERANCE = 20
"""Difference of the score up to which two nodes count as equally costly for GPU shares."""
FREE_TIME_STEP = 500
"""Step in thousandths of a GPU: nodes whose free time differs by less count as equal."""


def takes_pod(node: NodeAccount, needs: PodNeeds) -> bool:
    """Return whether a pod without GPU shares can run on this node."""
    taken, state = node.taken(), node.state
    assert state is not None, "the node is known"
    fits = taken.pods < state.pods and covers(taken.free, needs.resources)
    return fits and all(passes(state, needs) for passes in BY_STATE)


def find_node(engine: Engine, needs: PodNeeds, whole: float = 1.0) -> str | None:
    """Return the node on which a pod without GPUs takes the least CPU and memory that shares of GPUs could need.

    Among nodes of about the least cost, it is the node with the least free GPU time, then the node with the fewest free
    CPUs. No share needs the remaining CPUs of such a node. CPUs of idle GPUs stay free for requests of eight GPUs.

    Args:
        engine: the placement engine.
        needs: the pod's needs of its node.
        whole: part of the GPU time requested so far that belongs to requests for whole GPUs. The smaller it is, the
            fewer nodes count as equally costly: if all pods request shares, only the cheapest nodes do.
    """
    tolerance = round(TOLERANCE * whole)
    packing = engine.packing
    scores = packing.scores(("no GPU", *needs_key(needs)), RequestClass(needs))
    columns = packing.columns
    while (best := packing.best(scores)) >= 0:
        equals = np.flatnonzero(scores.score >= scores.score[best] - tolerance)
        free = columns.time[equals].sum(axis=1) // FREE_TIME_STEP
        for at in equals[np.lexsort((equals, columns.room[equals, 0], free))].tolist():
            name: str = columns.names[at]
            node = engine.cluster.node(name)
            if node is not None and takes_pod(node, needs):
                return name
            scores.score[at] = NO_PLACE
    return None
