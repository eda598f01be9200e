"""Pods without GPUs, as replays of traces place them: where the CPU they take is missed least by GPU shares.

In a cluster kube-scheduler places such pods; a trace has them among the others.
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
"""Steps of the score within which nodes cost whole GPUs about the same."""
FREE_TIME_STEP = 500
"""Thousandths of a GPU: nodes whose free time is nearer than this have as much."""


def takes_pod(node: NodeAccount, needs: PodNeeds) -> bool:
    """Return whether a pod without GPU shares can run on this node."""
    taken, state = node.taken(), node.state
    assert state is not None, "the node is known"
    fits = taken.pods < state.pods and covers(taken.free, needs.resources)
    return fits and all(passes(state, needs) for passes in BY_STATE)


def find_node(engine: Engine, needs: PodNeeds, whole: float = 1.0) -> str | None:
    """Return a node for the pod: where it is least in the way of GPU shares.

    Of the nodes that cost them about the least, the node with the least GPU time free, then the fullest: no share
    needs the rest of its processors, while a request of eight GPUs needs the processors of idle GPUs.

    Args:
        engine: the placement engine.
        needs: what the pod asks of its node.
        whole: part of the GPU time asked for so far that was asked for in whole GPUs. The smaller it is, the fewer
            nodes cost about the least: where all ask for shares, only the cheapest nodes.
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
