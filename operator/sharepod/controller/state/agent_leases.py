"""Which nodes have a living agent, by the agents' Leases.

Guarantees: an agent counts as alive for `duration` after its Lease was last seen to *change*, by this process's
monotonic clock; what the machines' clocks say decides nothing but one thing: a Lease seen for the first time counts as
just changed only if its renewTime is about now, so that an agent that died long ago is not taken for alive when the
operator starts.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

PREFIX = "sharepod-agent-"


@dataclass(frozen=True, slots=True)
class _Lease:
    uid: str
    renewed: str
    changed: float | None
    duration: float


class AgentLeases:
    """The agents' Leases by node. `clock`: monotonic seconds; `now`: the time of day, in UTC."""

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

    def put(self, raw: Mapping[str, Any]) -> None:
        """A Lease as the watch brought it; one that is no agent's is ignored."""
        name = str(raw["metadata"]["name"])
        if not name.startswith(PREFIX):
            return
        node, uid = name.removeprefix(PREFIX), str(raw["metadata"]["uid"])
        spec = raw.get("spec") or {}
        renewed = str(spec.get("renewTime") or "") if spec.get("holderIdentity") else ""
        duration = float(spec.get("leaseDurationSeconds") or self._duration)
        before = self._leases.get(node)
        changed: float | None
        if not renewed:
            changed = None
        elif before is None:
            changed = self._clock() if self._recent(renewed, duration) else None
        else:
            changed = self._clock() if before.renewed != renewed else before.changed
        self._leases[node] = _Lease(uid, renewed, changed, duration)
        self._names[uid] = node

    def drop(self, uid: str) -> None:
        """A Lease that is gone, by its uid."""
        node = self._names.pop(uid, None)
        if node is not None and self._leases[node].uid == uid:
            del self._leases[node]

    def alive(self, node: str) -> bool:
        """Whether the agent of a node renews its Lease."""
        lease = self._leases.get(node)
        return lease is not None and lease.changed is not None and self._clock() < lease.changed + lease.duration

    def changed(self, nodes: Iterable[str]) -> list[str]:
        """Which of these nodes have gained or lost their agent since the last call."""
        alive = {node for node in nodes if self.alive(node)}
        turned = sorted(alive ^ self._alive)
        self._alive = alive
        return turned

    def _recent(self, renewed: str, duration: float) -> bool:
        try:
            at = datetime.datetime.fromisoformat(renewed)
        except ValueError:
            return False
        if at.tzinfo is None:
            at = at.replace(tzinfo=datetime.UTC)
        return abs((self._now() - at).total_seconds()) < duration
