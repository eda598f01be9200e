"""Liveness of the agents, by their Leases.

Guarantees:
- An agent counts as alive for `duration` after its Lease was last seen to *change*, by this machine's own clock.
- The clock counts suspension, because no Lease change is seen while the operator's machine is suspended.
- If `alive` has returned another answer than `changed` last reported, the next `changed` reports the node, however
  short the change was.
- The time of day decides only one case: a Lease that is seen for the first time counts as just changed if its renewTime
  is recent. So an agent that died long ago is not alive when the operator starts.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

PREFIX = "sharepod-agent-"
"""The Lease of an agent is named after its node."""


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
        duration: Seconds after which a Lease that names no duration ends.
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
        """Nodes for which `alive` has returned the opposite answer since then."""

    def put(self, raw: Mapping[str, Any]) -> None:
        """Record a Lease from the watch; ignore a Lease that is not an agent's."""
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
        """Mark all cached versions stale: the API server's versions went back."""
        self._leases = {node: replace(lease, version=0) for node, lease in self._leases.items()}

    def alive(self, node: str) -> bool:
        """Return True if the agent of a node renews its Lease."""
        alive = self._alive_at(node, self._clock())
        if alive != (node in self._alive):
            self._otherwise.add(node)
        return alive

    def _alive_at(self, node: str, now: float) -> bool:
        lease = self._leases.get(node)
        return lease is not None and lease.changed is not None and now < lease.changed + lease.duration

    def changed(self, nodes: Iterable[str]) -> list[str]:
        """Return, sorted, the given nodes whose agent became alive or away since the last call. This includes a short
        change that only an answer of `alive` has shown."""
        nodes, now = set(nodes), self._clock()
        alive = {node for node in nodes if self._alive_at(node, now)}
        turned = sorted((alive ^ self._alive) | (self._otherwise & nodes))
        self._alive, self._otherwise = alive, set()
        return turned

    def away(self, nodes: Collection[str]) -> int:
        """Return the number of these nodes without a living agent. The caller must have passed the same nodes to
        `changed` before.
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
