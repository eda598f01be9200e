"""Evictor: evicts Pods whose share is not enforced, if the administrator has chosen that policy.

Guarantees:
- A Pod is evicted only if it is bound and its node's agent has reported an offence for `unenforced_grace`. An offence
  is a process without the hook or with another hook, or use of time or memory beyond the share.
- At most `evictions_per_minute` Pods are evicted in the whole cluster. A refused eviction does not count.
- An eviction names the Pod's uid, so no other Pod is evicted.
- A PodDisruptionBudget delays an eviction by `eviction_patience` at most. Then the Pod is deleted. Otherwise a tenant
  could protect itself by a budget, at the expense of its neighbours.
- Evicted or deleted, the Pod keeps its terminationGracePeriodSeconds, and its SharePod ends as Evicted.
"""

from __future__ import annotations

from collections.abc import Callable
from http import HTTPStatus

import structlog

from sharepod.api.gpunode import OFFENCES, Finding, TenantStatus
from sharepod.controller import metrics
from sharepod.controller.apiserver.client import PODS, Client
from sharepod.controller.apiserver.events import Events
from sharepod.controller.settings import OperatorSettings
from sharepod.controller.state.facts.pod_facts import PodFacts
from sharepod.controller.state.facts.sharepod_facts import SharePodFacts
from sharepod.controller.state.memos import Eviction, TenantMemo
from sharepod.kube import ApiError, ConflictError, NotFoundError
from sharepod.rate_limit import RateLimiter

_RETRY_S = 5.0
"""Seconds until a refused eviction is tried again. A PodDisruptionBudget allows the next eviction once a replacement
Pod has started, which takes about this long."""
_ASKED_PER_S = 10.0
"""Largest number of eviction calls per second, refused calls included: the maximum of `evictions_per_minute`."""

log = structlog.get_logger(__name__)


class Evictor:
    """Evictor of Pods by the setting `unenforced_policy`. `clock`: monotonic seconds."""

    def __init__(self, client: Client, events: Events, settings: OperatorSettings, clock: Callable[[], float]) -> None:
        self._client = client
        self._events = events
        self._settings = settings
        self._clock = clock
        self._limiter = RateLimiter(clock(), per_s=settings.evictions_per_minute / 60, burst=1)
        self._asked = RateLimiter(clock(), per_s=_ASKED_PER_S, burst=1)

    async def check(
        self, sharepod: SharePodFacts, pod: PodFacts | None, seen: TenantStatus | None, memo: TenantMemo
    ) -> float | None:
        """Evict the Pod of one tenant if its eviction is due. Raises `ApiError`.

        Return the seconds until the next check. None if no check is needed until the tenant changes.
        """
        finding = _offence(seen)
        if finding is None or pod is None or pod.node is None or pod.deleting or pod.ended:
            if memo.eviction is not None and memo.eviction.done is None:
                memo.eviction = None
            return None
        if self._settings.unenforced_policy != "Evict":
            return None
        now = self._clock()
        if memo.eviction is None or memo.eviction.pod != pod.uid:
            memo.eviction = Eviction(pod=pod.uid, since=now)
        eviction = memo.eviction
        if eviction.done is not None:
            return None
        due = eviction.since + self._settings.unenforced_grace
        if now < due:
            return due - now
        if wait_s := max(self._limiter.wait_s(now), self._asked.wait_s(now)):
            return wait_s
        self._limiter.take(now)
        self._asked.take(now)
        return await self._evict(sharepod, pod, finding, eviction, now)

    async def _evict(
        self, sharepod: SharePodFacts, pod: PodFacts, finding: Finding, eviction: Eviction, now: float
    ) -> float | None:
        text = f"evicted by SharePod's operator (unenforced_policy: Evict): {finding.message}"
        try:
            if eviction.refused_since is None or now < eviction.refused_since + self._settings.eviction_patience:
                await self._client.evict(pod.name, pod.namespace, uid=pod.uid)
                how = "eviction"
            else:
                await self._client.delete(PODS, pod.name, pod.namespace, uid=pod.uid)
                how = "delete"
        except ApiError as error:
            if 400 <= error.status < 500:  # after any other error the eviction may have been granted
                self._limiter.give_back(self._clock(), now)
            if isinstance(error, NotFoundError | ConflictError):
                return _RETRY_S  # the Pod was deleted or replaced: the watch reports it
            if error.status != HTTPStatus.TOO_MANY_REQUESTS:  # a PodDisruptionBudget forbids the eviction
                raise
            if eviction.refused_since is None:
                eviction.refused_since = now
            left = eviction.refused_since + self._settings.eviction_patience - now
            refused = (
                f"the eviction is refused for now ({error.message}); the pod is deleted in {max(0.0, left):.0f} s "
                "if the finding still stands then"
            )
            self._events.warning(sharepod.kind, sharepod, "EvictionRefused", "Evict", refused)
            metrics.EVICTIONS.labels("refused").inc()
            return min(_RETRY_S, left) if left > 0 else 0.1
        eviction.done = text
        metrics.EVICTIONS.labels(how).inc()
        log.warning("evicting", tenant=sharepod.uid, pod=f"{pod.namespace}/{pod.name}", finding=finding.message)
        self._events.warning(sharepod.kind, sharepod, "Evicting", "Evict", text)
        return None


def _offence(seen: TenantStatus | None) -> Finding | None:
    """Return the most serious offence that the agent reports. None if it reports none."""
    findings = {item.reason: item for item in seen.findings} if seen is not None else {}
    return next((findings[reason] for reason in OFFENCES if reason in findings), None)
