"""Run times: predicts the seconds until a running tenant ends, from the durations of ended runs. Pure.

Guarantees:
- A tenant that has run for longer than every known run of its kind is expected to run as long again. So services, which
  never end, are expected to stay.
- The prediction is a quantile: by the remembered runs, four fifths of the tenants of one kind and age end within it.
- At most `_KINDS` kinds are remembered, and the last `_RUNS` runs of each.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections import OrderedDict, deque
from typing import TypeAlias

from .state.types import Reservation

Kind: TypeAlias = tuple[str, int, int]
"""(namespace, number of GPUs, thousandths of each GPU). Tenants of one kind are assumed to have similar run times."""

_PART = 0.8
"""Part of the tenants that end within the predicted seconds. The last tenant decides when a node is free, so a median
would be too low: in simulated weeks it doubled the longest waits."""
_RUNS = 128
"""Most remembered runs of a kind: enough for a quantile at each age, and few enough to follow a change within a
week."""
_KINDS = 1000
"""Most remembered kinds: some MB of memory."""
_ENOUGH = 10
"""Least remembered runs of a kind for a prediction from them. With fewer, the runs of all kinds are used."""


class _Runs:
    """Durations of the last runs, in seconds: in order of time, and sorted."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._latest: deque[float] = deque()
        self.sorted: list[float] = []

    def add(self, seconds: float) -> None:
        """Add a run. If there are too many, drop the oldest."""
        if len(self._latest) == self._most:
            del self.sorted[bisect_left(self.sorted, self._latest.popleft())]
        self._latest.append(seconds)
        insort(self.sorted, seconds)


class RunTimes:
    """Durations of ended runs, by kind."""

    def __init__(self) -> None:
        self._of_kind: OrderedDict[Kind, _Runs] = OrderedDict()
        self._of_all = _Runs(8 * _RUNS)

    def ended(self, kind: Kind, seconds: float) -> None:
        """Remember a run that ended after these seconds."""
        runs = self._of_kind.get(kind)
        if runs is None:
            runs = self._of_kind[kind] = _Runs(_RUNS)
            if len(self._of_kind) > _KINDS:
                self._of_kind.popitem(last=False)
        self._of_kind.move_to_end(kind)
        runs.add(seconds)
        self._of_all.add(seconds)

    def left(self, kind: Kind, age: float) -> float:
        """Return the seconds within which `_PART` of the tenants of this kind and age (in seconds) end."""
        runs = self._of_kind.get(kind)
        known = runs.sorted if runs is not None and len(runs.sorted) >= _ENOUGH else self._of_all.sorted
        longer = bisect_right(known, age)
        # The tenant's own run, which has not ended, counts as one more run, longer than all others.
        at = longer + int(_PART * (len(known) - longer + 1))
        return known[at] - age if at < len(known) else max(age, known[-1] - age if known else 0.0)


def kind_of(row: Reservation) -> Kind:
    """Return the kind of a tenant."""
    return (row.namespace, len(row.gpus), row.request_milli)
