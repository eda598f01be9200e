"""Pods without GPUs, as replays of traces place them: where the CPU they take is missed least by GPU shares.

In a cluster kube-scheduler places such pods; a trace has them among the others.
"""

from __future__ import annotations

from sharepod.placement.binpack.packing import Offers
from sharepod.placement.binpack.request_classes import RequestClass, needs_key
from sharepod.placement.engine import Engine
from sharepod.placement.filters.node import BY_STATE, covers
from sharepod.placement.state.accounts import NodeAccount
from sharepod.placement.state.types import PodNeeds


def takes_pod(node: NodeAccount, needs: PodNeeds) -> bool:
    """Return whether a pod without GPU shares can run on this node."""
    taken, state = node.taken(), node.state
    assert state is not None, "the node is known"
    fits = taken.pods < state.pods and covers(taken.free, needs.resources)
    return fits and all(passes(state, needs) for passes in BY_STATE)


def find_node(engine: Engine, needs: PodNeeds) -> str | None:
    """Return a node for the pod: of those that take it, where it is least in the way of GPU shares."""
    key = ("no GPU", *needs_key(needs))
    offers = Offers(engine.packing, engine.packing.scores(key, RequestClass(needs)))
    while (name := offers.next()) is not None:
        node = engine.cluster.node(name)
        if node is not None and takes_pod(node, needs):
            return name
        offers.reject()
    return None
