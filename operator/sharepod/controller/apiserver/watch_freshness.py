"""Freshness of watches: whether they are fresh enough for placement, readiness and health. Pure.

Guarantees:
- No placement uses a watch that was silent for more than `BELIEF_S`.
- A process is unhealthy only where a restart can help. So it stays healthy while the API server is away, does not serve
  the kind yet or refuses it. The same holds while a long list arrives, which a restart would begin again.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from sharepod.kube import ApiError, ForbiddenError, NotFoundError, UnauthorizedError

BELIEF_S = 30.0
"""Longest silence, in seconds, of a watch that is still trusted: a working watch sends something every 25 s."""
BLIND_S = 60.0
"""Seconds of a watch's silence after which the health probe fails: twice `BELIEF_S`."""


@dataclass(frozen=True, slots=True)
class WatchFreshness:
    """Freshness of the watch of one kind. Times are seconds before now."""

    kind: str
    listed: bool
    """Everything was listed, and the store is worth believing."""
    silent_s: float
    """Since the last byte of the watch, its last opening, or the last page of a list; at first: since the start."""
    failure: ApiError | None = None
    """Error of the last try, if it failed."""
    failed_s: float = 0.0
    """Since the last try that failed."""
    needed: bool = True
    """Placement depends on the kind."""
    arriving: bool = False
    """A piece of a list of the kind arrived within the last `BELIEF_S`."""


def unready(freshness: Iterable[WatchFreshness]) -> str | None:
    """Return which kinds have not been listed; None if all have."""
    missing = [_unlisted(watch) for watch in freshness if watch.needed and not watch.listed]
    return f"not listed: {'; '.join(missing)}" if missing else None


def stale(freshness: Iterable[WatchFreshness]) -> list[str]:
    """Return the kinds that placement depends on and whose watch has been silent for too long."""
    return [watch.kind for watch in freshness if watch.needed and (not watch.listed or watch.silent_s > BELIEF_S)]


def blind(freshness: Iterable[WatchFreshness], answered_s: float | None) -> str | None:
    """Return why the process sees nothing of a kind although a restart could help; None if it is healthy.

    `answered_s`: seconds since the API server has answered any call; None if it never has.
    """
    away = answered_s is None or answered_s > BELIEF_S
    for watch in freshness:
        trying = watch.failure is not None and watch.failed_s < BLIND_S
        refused = isinstance(watch.failure, NotFoundError | ForbiddenError | UnauthorizedError)
        if watch.silent_s > BLIND_S and not watch.arriving and not (trying and (refused or away)):
            return f"the watch of {watch.kind} has been silent for {watch.silent_s:.0f} s"
    return None


def _unlisted(watch: WatchFreshness) -> str:
    return watch.kind if watch.failure is None else f"{watch.kind} ({watch.failure})"
