"""Excluded GPUs: counts, for each namespace, the GPUs from which its exclusion labels keep other namespaces although it
requests little of their time.

A GPU counts for a namespace while all of its tenants have one exclusion label of that namespace, and less than half of
its time is requested. From half on, the GPU no longer counts: the namespace then requests at least as much as it
excludes others from, and quotas count that.

Guarantees:
- The count follows from the rows of known GPUs: an operator that restarts gets the same count.
- Changes on a copy of a node's account count only in that copy.
"""

from __future__ import annotations

from collections import Counter

from sharepod.api.units import WHOLE_GPU

from .types import PlacementRequest

HALF_A_GPU = WHOLE_GPU // 2
"""Requested thousandths from which a GPU with an exclusion label no longer counts. So a namespace excludes others from
at most twice its request, plus the cap."""


class ExcludedGpus:
    """Number of excluded GPUs by namespace.

    Args:
        most: Most excluded GPUs of a namespace; None: any number.
        base: Count to which this one adds.
    """

    __slots__ = ("_base", "_counts", "fallen", "most")

    def __init__(self, most: int | None, base: ExcludedGpus | None = None) -> None:
        self.most = most
        self._base = base
        self._counts: Counter[str] = Counter()
        self.fallen: set[str] = set()
        """Namespaces whose number has fallen since the caller last emptied this set."""

    def of(self, namespace: str) -> int:
        """Return the number of GPUs that count for a namespace."""
        return self._counts.get(namespace, 0) + (self._base.of(namespace) if self._base is not None else 0)

    def has_room_for(self, request: PlacementRequest) -> bool:
        """Return whether the request's namespace may exclude others from as many further GPUs as the request needs."""
        asked = request.gpu
        if self.most is None or asked.labels.exclusion is None or asked.request_milli >= HALF_A_GPU:
            return True
        return self.of(request.namespace) + asked.count <= self.most

    def count(self, namespace: str, change: int) -> None:
        """Add `change` to the number of a namespace."""
        self._counts[namespace] += change
        if not self._counts[namespace]:
            del self._counts[namespace]
        if change < 0:
            self.fallen.add(namespace)

    def overlay(self) -> ExcludedGpus:
        """Return a count that starts at this one. Changes of it do not affect this one."""
        return ExcludedGpus(self.most, self)
