"""Unreadable objects: records objects of which only the metadata can be read.

Guarantees:
- Such an object affects only its owner. A SharePod's status gives the reason; nothing is placed on an unreadable Node
  or GPUNode.
- The last readable facts are kept, in particular a GPUNode's ledger and the runs of a SharePod.
"""

from __future__ import annotations

from dataclasses import replace

from .cluster_state import ClusterState
from .facts.node_facts import node_facts
from .facts.object_facts import Json
from .facts.sharepod_facts import unreadable_sharepod


class UnreadableObjects:
    """Recorder of unreadable objects in `state`. `why`: cause as the end of a sentence that begins "the object"."""

    def __init__(self, state: ClusterState) -> None:
        self._state = state

    def put_sharepod(self, metadata: Json, why: str) -> None:
        """Record an unreadable SharePod. Its status will contain the cause."""
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
        """Record an unreadable Node. Nothing is placed there until it is readable."""
        self._state.take_node(replace(node_facts({"metadata": metadata}), error=f"cannot be read: the object {why}"))

    def put_gpunode(self, metadata: Json, why: str) -> None:
        """Record an unreadable GPUNode with its former ledger. Nothing is placed there until it is readable."""
        known = self._state.gpunodes.get(str(metadata["uid"]))
        if known is not None:
            error = f"has a GPUNode that cannot be read: the object {why}"
            version = int(metadata.get("resourceVersion") or 0)
            taken, _, _ = self._state.gpunodes.put(replace(known, version=version, error=error, ledger_error=error))
            if taken:
                self._state.refresh_node(known.name)
