"""Pods that wait for whole GPUs of NVIDIA's device plugin: counts the GPUs of a node that they could use.

Guarantees:
- Pods with equal needs are checked once, and a node once per change of the node or of the pods. So thousands of waiting
  pods do not slow decisions down.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from .types import NodeState, PodNeeds, Resources

Could = Callable[[NodeState, Resources, PodNeeds], bool]
"""Returns whether a node with this room could run a pod with these needs."""

_Alike = tuple[frozenset[tuple[str, str]], PodNeeds]
"""Key of pods with equal needs. The node selector is repeated here, because the hash of the needs leaves it out."""


class WholeGpuPods:
    """Pods that wait for whole GPUs, by uid."""

    def __init__(self) -> None:
        self._needs: dict[str, PodNeeds] = {}
        self._alike: Counter[_Alike] = Counter()
        self._answers: dict[str, tuple[NodeState, Resources, int]] = {}
        """(node state, room, answer) of the last check, by node. Cleared when the pods change."""

    def __len__(self) -> int:
        return len(self._needs)

    def set(self, uid: str, needs: PodNeeds | None) -> bool:
        """Record a waiting pod's needs. None: the pod no longer waits. Return whether that is a change."""
        before = self._needs.get(uid)
        if before == needs:
            return False
        if before is not None:
            del self._needs[uid]
            alike = _alike(before)
            self._alike[alike] -= 1
            if not self._alike[alike]:
                del self._alike[alike]
        if needs is not None:
            self._needs[uid] = needs
            self._alike[_alike(needs)] += 1
        self._answers.clear()
        return True

    def could_have(self, state: NodeState, room: Resources, resource: str, could: Could) -> int:
        """Count the GPUs (`resource`) of a node with this room that these pods could use."""
        known = self._answers.get(state.name)
        if known is not None and known[0] is state and known[1] == room:
            return known[2]
        fitting = (
            needs.resources.extended[resource] * number
            for (_, needs), number in self._alike.items()
            if could(state, room, needs)
        )
        found = sum(fitting)
        self._answers[state.name] = state, room, found
        return found


def _alike(needs: PodNeeds) -> _Alike:
    return frozenset(needs.node_selector.items()), needs
