"""Pods that wait for whole GPUs of NVIDIA's device plugin. Counts the GPUs of a node that they could use, because these
are left to them.

Guarantees:
- Pods with equal needs are checked together, and a node only again after a change of the node or of the pods. So
  thousands of waiting pods do not slow decisions down.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from .types import NodeState, PodNeeds, Resources

Could = Callable[[NodeState, Resources, PodNeeds], bool]
"""Function: returns whether a node with this free room could run a pod with these needs."""

_Alike = tuple[frozenset[tuple[str, str]], PodNeeds]
"""Key of pods with equal needs. The node selector is repeated here, because the hash of the needs leaves it out."""


class WholeGpuPods:
    """Needs of the pods that wait for whole GPUs, by UID."""

    def __init__(self) -> None:
        self._needs: dict[str, PodNeeds] = {}
        self._alike: Counter[_Alike] = Counter()
        self._answers: dict[str, tuple[NodeState, Resources, int]] = {}
        """Last answer of `could_have` for each node: (node state, room, answer). Cleared when the pods change."""

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
        """Return the number of a node's GPUs (`resource`) that the waiting pods could use in this room. `could`: check
        of one pod."""
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
