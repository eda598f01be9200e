"""Liveness of the agents, derived from their Leases.

Guarantees:
- An agent counts as alive for `duration` after its Lease was last seen to *change*, by this machine's own clock.
- The clock also counts the time in which the operator's machine was suspended, as no change was seen in that time.
- If `alive` has returned another answer than `changed` last reported, the next call of `changed` reports the node, even
  if the answer is the old one by then.
- The time of day counts in one case only: a Lease that is seen for the first time counts as just changed if its
  renewTime is recent. So an agent that died long ago does not count as alive when the operator starts.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

PREFIX = "sharepod-agent-"
"""Prefix of the name of an agent's Lease; the node's name follows."""


@dataclass(frozen=True, slots=True)
class _Lease:
    uid: str
    renewed: str
    changed: float | None
    duration: float
    version: int


class AgentLeases:
    """Leases of the agents by node.

    Args:
        duration: Seconds for which an agent without `leaseDurationSeconds` in its Lease counts as alive.
        clock: Seconds since the machine started, including suspension.
        now: Time of day, in UTC.
    """

    def __init__(
        self,
        duration: float,
        clock: Callable[[], float],
        now: Callable[[], datetime.datetime] = lambda: datetime.datetime.now(datetime.UTC),
    ) -> None:
        self._duration = duration
        self._clock = clock
        self._now = now
        self._leases: dict[str, _Lease] = {}
        self._names: dict[str, str] = {}
        self._alive: set[str] = set()
        """Nodes whose agents were alive at the last call of `changed`."""
        self._otherwise: set[str] = set()
        """Nodes for which `alive` has returned another answer since that call."""

    def put(self, raw: Mapping[str, Any]) -> None:
        """Record a Lease from the watch. Ignore the Leases of other components than agents."""
        name = str(raw["metadata"]["name"])
        if not name.startswith(PREFIX):
            return
        node, uid = name.removeprefix(PREFIX), str(raw["metadata"]["uid"])
        version = int(raw["metadata"].get("resourceVersion") or 0)
        spec = raw.get("spec") or {}
        renewed = str(spec.get("renewTime") or "") if spec.get("holderIdentity") else ""
        duration = float(spec.get("leaseDurationSeconds") or self._duration)
        before = self._leases.get(node)
        if before is not None and version < before.version:
            return
        changed: float | None
        if not renewed:
            changed = None
        elif before is None:
            changed = self._clock() if self._recent(renewed, duration) else None
        else:
            changed = self._clock() if before.renewed != renewed else before.changed
        self._leases[node] = _Lease(uid, renewed, changed, duration, version)
        self._names[uid] = node

    def drop(self, uid: str) -> None:
        """Remove a deleted Lease, by its uid."""
        node = self._names.pop(uid, None)
        if node is not None and self._leases[node].uid == uid:
            del self._leases[node]

    def versions(self) -> dict[str, int]:
        """Return the version of each Lease by uid."""
        return {lease.uid: lease.version for lease in self._leases.values()}

    def invalidate(self) -> None:
        """Mark all cached versions stale, because etcd was restored from a backup."""
        self._leases = {node: replace(lease, version=0) for node, lease in self._leases.items()}

    def alive(self, node: str) -> bool:
        """Return True if the agent of a node is alive: its Lease has changed within its duration."""
        alive = self._alive_at(node, self._clock())
        if alive != (node in self._alive):
            self._otherwise.add(node)
        return alive

    def _alive_at(self, node: str, now: float) -> bool:
        lease = self._leases.get(node)
        return lease is not None and lease.changed is not None and now < lease.changed + lease.duration

    def changed(self, nodes: Iterable[str]) -> list[str]:
        """Return, sorted, the given nodes whose agents became alive or away since the last call. This includes a short
        change that only `alive` has seen."""
        nodes, now = set(nodes), self._clock()
        alive = {node for node in nodes if self._alive_at(node, now)}
        turned = sorted((alive ^ self._alive) | (self._otherwise & nodes))
        self._alive, self._otherwise = alive, set()
        return turned

    def away(self, nodes: Collection[str]) -> int:
        """Return the number of these nodes without a living agent, as of the last call of `changed`, which must have
        had the same nodes.
        """
        return len(nodes) - len(self._alive)

    def _recent(self, renewed: str, duration: float) -> bool:
        try:
            at = datetime.datetime.fromisoformat(renewed)
        except ValueError:
            return False
        if at.tzinfo is None:
            at = at.replace(tzinfo=datetime.UTC)
        return abs((self._now() - at).total_seconds()) < duration
