"""Quota check for raised shares: a running tenant's share may exceed its Pod's resource line only if no ResourceQuota
counts the line.

A ResourceQuota counts a Pod's line when the Pod is created, and the line cannot change. So a quota would not count the
raise.

Guarantees:
- The quotas of a namespace are read only for a raise above both the Pod's line and the present share, at most once in
  `_BELIEVED_S`.
- While the quotas are unreadable, such a raise is refused.
"""

from __future__ import annotations

from collections.abc import Callable

import structlog

from sharepod.api.resource_line import MEMORY, MILLI, Carried, carried
from sharepod.controller.apiserver.client import QUOTAS, Client
from sharepod.controller.decisions.advertised import LineOnNode
from sharepod.controller.decisions.snapshot import TenantSnapshot
from sharepod.kube import ApiError, Json
from sharepod.placement.state.types import Obstacle, Outlook, Refusal

LOOK_AGAIN_S = 10.0
"""Seconds until a refused raise is tried again. Quotas are not watched, so no event shows a quota's deletion."""
_BELIEVED_S = 2.0
"""Seconds for which a read of a namespace's quotas is used again. Raises in one namespace often come together."""
_MOST = 1000
"""Number of namespaces whose last read is kept."""
_COUNTED = frozenset(f"requests.{name}" for name in (MILLI, MEMORY))

log = structlog.get_logger(__name__)


class QuotaGate:
    """Quota check. `clock`: monotonic seconds."""

    def __init__(self, client: Client, clock: Callable[[], float]) -> None:
        self._client = client
        self._clock = clock
        self._known: dict[str, tuple[float, str]] = {}
        """By namespace: (time of the last read of its quotas, name of a quota that counts the line, or empty if none
        does)."""

    async def refusal(self, snapshot: TenantSnapshot) -> Refusal | None:
        """Return the reason why a SharePod may not have the share that it requests. None if no quota prevents it."""
        sharepod, pod = snapshot.sharepod, snapshot.pod
        row = snapshot.reserved[0].written if snapshot.reserved else None
        if sharepod is None or sharepod.gpu is None or pod is None or row is None:
            return None
        had = LineOnNode(pod.carried, row).at_least
        asked = carried(sharepod.gpu)
        if had.covers(asked):
            return None
        try:
            quota = await self._counting(sharepod.namespace)
        except ApiError as error:
            log.warning("cannot see the quotas of a namespace", namespace=sharepod.namespace, error=str(error))
            return _refusal(pod.carried, "its quotas cannot be read now", "It is tried again.")
        if not quota:
            return None
        advice = "Create the SharePod again with the share that it should have, or remove the quota."
        return _refusal(pod.carried, f"ResourceQuota {quota} counts the resource line of its Pod", advice)

    async def _counting(self, namespace: str) -> str:
        """Return the name of a quota that limits a resource of the resource line. Empty if none does. Raises
        `ApiError`."""
        now = self._clock()
        read, name = self._known.get(namespace, (-_BELIEVED_S, ""))
        if now >= read + _BELIEVED_S:
            found: list[str] = []

            def take(quota: Json) -> None:
                if _COUNTED.intersection((quota.get("spec") or {}).get("hard") or {}):
                    found.append(str(quota["metadata"]["name"]))

            await self._client.read_all(QUOTAS, namespace, take=take)
            name = min(found, default="")
            self._known.pop(namespace, None)
            self._known[namespace] = (now, name)
            if len(self._known) > _MOST:
                del self._known[next(iter(self._known))]
        return name


def _refusal(had: Carried, why: str, advice: str) -> Refusal:
    text = f"{why}, {had.milli} thousandths and {had.mib} MiB, and more would not be counted"
    return Refusal(
        outlook=Outlook.UNCOUNTED,
        headline="keeps its share",
        obstacles=(Obstacle("Quota", "SharePod", 1, text),),
        advice=advice,
    )
