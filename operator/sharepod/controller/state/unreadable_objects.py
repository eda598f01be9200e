"""Objects of which only the metadata can be read, in the cluster state.

Guarantees:
- Such an object costs its owner alone: its SharePod is told why, its node takes no tenants.
- What was known of it before, above all a ledger and what a SharePod has run, is kept.
"""

from __future__ import annotations

from dataclasses import replace

from .cluster_state import ClusterState
from .facts.node_facts import node_facts
from .facts.object_facts import Json
from .facts.sharepod_facts import unreadable_sharepod


class UnreadableObjects:
    """Taker of such objects into `state`. `why`, everywhere: for the owner, after "the object"."""

    def __init__(self, state: ClusterState) -> None:
        self._state = state

    def put_sharepod(self, metadata: Json, why: str) -> None:
        """Take in a SharePod: its owner is told why."""
        item, known = unreadable_sharepod(metadata, why), self._state.sharepods.get(str(metadata["uid"]))
        if known is not None:
            item = replace(
                item,
                status=known.status,
                status_text=known.status_text,
                raw_text=known.raw_text,
                restart_policy=known.restart_policy,
            )
        self._state.take_sharepod(item)

    def put_node(self, metadata: Json, why: str) -> None:
        """Take in a Node: it takes no SharePods."""
        self._state.take_node(replace(node_facts({"metadata": metadata}), error=f"cannot be read: the object {why}"))

    def put_gpunode(self, metadata: Json, why: str) -> None:
        """Keep the ledger of a GPUNode that cannot be read any more, and place nothing there until it can be."""
        known = self._state.gpunodes.get(str(metadata["uid"]))
        if known is not None:
            error = f"has a GPUNode that cannot be read: the object {why}"
            version = int(metadata.get("resourceVersion") or 0)
            taken, _, _ = self._state.gpunodes.put(replace(known, version=version, error=error, ledger_error=error))
            if taken:
                self._state.refresh_node(known.name)
