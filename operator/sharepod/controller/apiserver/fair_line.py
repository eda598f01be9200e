"""Queue of keys, each with an owner. Owners take turns (round robin); the keys of one owner are first in, first out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

Key = TypeVar("Key")


class FairLine(Generic[Key]):
    """Queue of keys; each key is in it at most once. Adding, discarding and taking take constant time."""

    def __init__(self) -> None:
        self._arrivals: dict[Key, tuple[str, float]] = {}
        """For each key, in order of arrival: (owner, time of arrival)."""
        self._owners: dict[str, dict[Key, None]] = {}
        """For each owner, in order of turns: its keys in order of arrival."""

    def __len__(self) -> int:
        return len(self._arrivals)

    def __contains__(self, key: Key) -> bool:
        return key in self._arrivals

    def oldest(self) -> float | None:
        """Return the arrival time of the oldest key; None if the queue is empty."""
        return next((at for _, at in self._arrivals.values()), None)

    def add(self, key: Key, owner: str, now: float) -> None:
        """Append a new key to its owner's keys. `now`: seconds of any clock."""
        self._arrivals[key] = (owner, now)
        self._owners.setdefault(owner, {})[key] = None

    def discard(self, key: Key) -> None:
        """Remove a key, if queued."""
        arrived = self._arrivals.pop(key, None)
        if arrived is None:
            return
        owner, _ = arrived
        keys = self._owners[owner]
        del keys[key]
        if not keys:
            del self._owners[owner]

    def take(self, may: Callable[[str], bool]) -> tuple[Key, str] | None:
        """Remove the first key of the next owner that `may` accepts. Return (key, owner), or None if `may` accepts no
        owner.
        """
        owner = next((owner for owner in self._owners if may(owner)), None)
        if owner is None:
            return None
        keys = self._owners.pop(owner)
        key = next(iter(keys))
        del keys[key], self._arrivals[key]
        if keys:
            self._owners[owner] = keys  # this owner's next turn comes after all other owners
        return key, owner

    def clear(self) -> None:
        """Forget all keys."""
        self._arrivals.clear()
        self._owners.clear()
