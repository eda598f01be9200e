"""Combinations of labels that the tenants of one GPU have: a number and a worth for each combination. The worth is the
part of all arrivals whose labels allow them to join such tenants.

Guarantees:
- A combination keeps its number while a GPU has it. Free numbers are reused, so there are at most as many as GPUs and
  additions since the last renewal.
- Worths are computed in slices, however many labels there are.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import numpy as np
import numpy.typing as npt

from sharepod.placement.state.accounts import GpuAccount
from sharepod.placement.state.types import LabelKey

from .label_demand import LabelShares
from .sliced_work import Slices

_WEIGHED_AT_ONCE = 500
"""Combinations whose worth one slice computes: one or two milliseconds."""

_MAX_LABELS = 256
"""Most anti-affinity labels for which `keeping_off` caches a mask, of one byte for each combination."""

_Key = TypeVar("_Key", bound=Hashable)


class Numbers(Generic[_Key]):
    """Numbers for keys, from 0; free ones are reused. `fixed`: keys that permanently have the first numbers."""

    def __init__(self, *fixed: _Key) -> None:
        self._fixed = len(fixed)
        self._number_of = {key: number for number, key in enumerate(fixed)}
        self._free: list[int] = []
        self.keys: list[_Key | None] = list(fixed)
        """Keys by number; None: the number is free."""

    def find(self, key: _Key) -> int:
        """Return the number of a key; -1: it has none."""
        return self._number_of.get(key, -1)

    def add(self, key: _Key) -> int:
        """Give a number to a key that has none."""
        if self._free:
            number = self._free.pop()
            self.keys[number] = key
        else:
            number = len(self.keys)
            self.keys.append(key)
        self._number_of[key] = number
        return number

    def keep(self, used: npt.NDArray[Any]) -> list[tuple[int, _Key]]:
        """Drop the keys whose numbers are not in `used`, an array of any shape. Return these keys with their former
        numbers."""
        dropped: list[tuple[int, _Key]] = []
        unused = np.bincount(used.ravel(), minlength=len(self.keys)) == 0
        for number in np.flatnonzero(unused[self._fixed :]) + self._fixed:
            key = self.keys[number]
            if key is not None:
                del self._number_of[key]
                self.keys[number] = None
                self._free.append(int(number))
                dropped.append((int(number), key))
        return dropped


_NO_INTERACTIVE = -1

_Combination = tuple[frozenset[LabelKey | None], frozenset[LabelKey], int]
"""Labels of a GPU's tenants: exclusion labels, anti-affinity labels, and the number of further interactive tenants that
the GPU takes (`_NO_INTERACTIVE` if it has no interactive tenant)."""
_EMPTY: _Combination = (frozenset(), frozenset(), _NO_INTERACTIVE)
_PLAIN: _Combination = (frozenset((None,)), frozenset(), _NO_INTERACTIVE)


@dataclass(slots=True)
class _KeepingOff:
    """Cached result of `keeping_off` for one label. `seen`: value of `_changes` up to which it is current."""

    keeps: npt.NDArray[np.uint8]
    seen: int


class LabelCombinations:
    """Combinations of labels by number. Number 0: no tenants. Number 1: only tenants without labels.

    `shares`: the present shares of labels among arrivals. `worth`: by number, the part of all arrivals that may join
    such tenants.
    """

    def __init__(self) -> None:
        self.shares = LabelShares()
        self.start_over()

    def start_over(self) -> None:
        """Number the combinations again. Numbers 0 and 1 keep their meaning."""
        self._numbers = Numbers(_EMPTY, _PLAIN)
        self._added: set[int] = set()
        self.worth = [_worth(self.shares, combination) for combination in (_EMPTY, _PLAIN)]
        self._changes = 0
        self._changed_at = np.zeros(len(self), dtype=np.int64)
        self._keeping_off: dict[LabelKey, _KeepingOff] = {}
        self._with: dict[LabelKey, set[int]] = {}  # by anti-affinity label: numbers of the combinations that contain it

    def __len__(self) -> int:
        return len(self._numbers.keys)

    def number(self, gpu: GpuAccount) -> int:
        """Return the number of the combination of labels on a GPU."""
        if not gpu.tenants:
            return 0
        interactive = gpu.has_interactive
        if not gpu.anti_affinity and not interactive and len(gpu.exclusions) == 1 and None in gpu.exclusions:
            return 1
        room = gpu.interactive_room if interactive else _NO_INTERACTIVE
        combination = frozenset(gpu.exclusions), frozenset(gpu.anti_affinity), room
        number = self._numbers.find(combination)
        if number < 0:
            number = self._numbers.add(combination)
            self._added.add(number)
            self._changes += 1
            for label in combination[1]:
                self._with.setdefault(label, set()).add(number)
            if number >= len(self._changed_at):
                self._changed_at = _grown(self._changed_at, number)
            self._changed_at[number] = self._changes
            self.worth[number : number + 1] = [_worth(self.shares, combination)]
        return number

    def keeping_off(self, label: LabelKey) -> npt.NDArray[np.uint8]:
        """Return a mask by number of a combination: 1 if its tenants exclude a tenant with this anti-affinity label,
        else 0."""
        found = self._keeping_off.get(label)
        if found is None:
            if len(self._keeping_off) >= _MAX_LABELS:
                self._keeping_off.clear()
            found = self._keeping_off[label] = _KeepingOff(np.zeros(len(self), dtype=np.uint8), self._changes)
            found.keeps[list(self._with.get(label, ()))] = 1
        if found.seen < self._changes:
            if len(self) > len(found.keeps):
                found.keeps = _grown(found.keeps, len(self))
            for number in np.flatnonzero(self._changed_at > found.seen).tolist():
                combination = self._numbers.keys[number]
                found.keeps[number] = combination is not None and label in combination[1]
            found.seen = self._changes
        return found.keeps

    def weigh(self, shares: LabelShares) -> Slices[list[float]]:
        """Return the worth of all combinations under these shares of labels, computed in slices. `take` applies it."""
        self._added.clear()
        worth: list[float] = []
        while len(worth) < len(self):
            first = len(worth)
            worth += [_worth(shares, one) for one in self._numbers.keys[first : first + _WEIGHED_AT_ONCE]]
            yield
        return self._with_added(worth, shares)

    def take(self, worth: list[float], shares: LabelShares, used: npt.NDArray[Any]) -> None:
        """Apply these shares, and the worths that `weigh` computed from them. Drop combinations that are not in `used`,
        the numbers of all GPUs."""
        self.shares, self.worth = shares, self._with_added(worth, shares)
        for number, (_, anti_affinity, _) in self._numbers.keep(used):
            for label in anti_affinity:
                self._with[label].discard(number)
                if not self._with[label]:
                    del self._with[label]

    def _with_added(self, worth: list[float], shares: LabelShares) -> list[float]:
        """Return the worths, with entries for the combinations that were added since `weigh` began."""
        worth = worth[: len(self)] + [0.0] * (len(self) - len(worth))
        for number in self._added:
            worth[number] = _worth(shares, self._numbers.keys[number])
        return worth


def _grown(array: npt.NDArray[Any], number: int) -> npt.NDArray[Any]:
    """Return a copy of the array, extended by zeros to twice the length that an entry for `number` needs."""
    grown = np.zeros(2 * number + 2, dtype=array.dtype)
    grown[: len(array)] = array
    return grown


def _worth(shares: LabelShares, combination: _Combination | None) -> float:
    if combination is None:
        return 0.0
    exclusions, anti_affinity, interactive_room = combination
    return shares.worth(exclusions, anti_affinity, full=interactive_room == 0)
