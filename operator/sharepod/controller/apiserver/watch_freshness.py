"""Freshness of watches: whether the cache is recent enough to place by, and the process ready and healthy. Pure.

Guarantees:
- Nothing is placed while a needed watch has been silent for more than `BELIEF_S`.
- A process is unhealthy only if a restart can help. So it stays healthy while the API server is away, does not serve
  the kind yet, or refuses the watch. It also stays healthy while a long list arrives, because a restart would begin
  that list again.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from sharepod.kube import ApiError, ForbiddenError, NotFoundError, UnauthorizedError

BELIEF_S = 30.0
"""Longest silence, in seconds, of a watch that placement still trusts. A working watch sends something every 25 s."""
BLIND_S = 60.0
"""Seconds of a watch's silence after which the health probe fails: twice `BELIEF_S`."""


@dataclass(frozen=True, slots=True)
class WatchFreshness:
    """Freshness of the watch of one kind. Times are seconds before now."""

    kind: str
    listed: bool
    """True once everything was listed, unless etcd was restored from a backup since then."""
    silent_s: float
    """Seconds since the last bytes of the watch, since it was opened, or since the last page of a list, whichever is
    latest. Before any of these: since the start. """
    failure: ApiError | None = None
    """Error of the last try, if it failed."""
    failed_s: float = 0.0
    """Seconds since the last failed try. Has a meaning only with `failure`."""
    needed: bool = True
    """True if placement needs the kind."""
    arriving: bool = False
    """True if a part of a list arrived within the last `BELIEF_S`."""


def unready(freshness: Iterable[WatchFreshness]) -> str | None:
    """Return the kinds that have not been listed, as text. None if all have been listed."""
    missing = [_unlisted(watch) for watch in freshness if watch.needed and not watch.listed]
    return f"not listed: {'; '.join(missing)}" if missing else None


def stale(freshness: Iterable[WatchFreshness]) -> list[str]:
    """Return the kinds that placement needs and whose watch has been silent for more than `BELIEF_S`."""
    return [watch.kind for watch in freshness if watch.needed and (not watch.listed or watch.silent_s > BELIEF_S)]


def blind(freshness: Iterable[WatchFreshness], answered_s: float | None) -> str | None:
    """Return a message about a watch that brings no events, if a restart may help. None if the process is healthy.
    `answered_s`: seconds since the API server last answered any call; None if it never has.
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
