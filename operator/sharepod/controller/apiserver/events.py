"""Events, as `kubectl describe` shows them.

Guarantees: writing them never delays nor fails what they tell of; the same reason and message about an object is told
again only after ten minutes; of one reason about one object no more than a few are told at once, then one a minute;
when too many wait, the newest are dropped and counted.
"""

from __future__ import annotations

import asyncio
import datetime
from collections.abc import Callable
from dataclasses import dataclass

import structlog

from sharepod.api.objects import API_VERSION
from sharepod.controller import metrics
from sharepod.controller.state.facts import ObjectFacts
from sharepod.kube import ApiError, Json
from sharepod.rate_limit import RateLimiter

from .client import EVENTS, Client, NotLeadingError

_WAITING = 1000
_AGAIN = 600.0
_REMEMBERED = 10_000
_BURST = 10  # of one reason about one object
_EVERY = 60.0
_NOTE_LIMIT = 1024  # of events.k8s.io/v1

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class _Event:
    kind: str
    about: ObjectFacts
    type: str
    reason: str
    action: str
    note: str


class Events:
    """Tells of what happened to an object. `clock`: monotonic seconds."""

    def __init__(self, client: Client, identity: str, clock: Callable[[], float]) -> None:
        self._client = client
        self._identity = identity
        self._clock = clock
        self._waiting: asyncio.Queue[_Event] = asyncio.Queue(_WAITING)
        self._told: dict[tuple[str, str, str], float] = {}
        self._limiters: dict[tuple[str, str], RateLimiter] = {}  # by uid and reason, the longest unused first

    def normal(self, kind: str, about: ObjectFacts, reason: str, action: str, note: str) -> None:
        """Something went as it should."""
        self._tell(_Event(kind, about, "Normal", reason, action, note))

    def warning(self, kind: str, about: ObjectFacts, reason: str, action: str, note: str) -> None:
        """Something needs a person, or may."""
        self._tell(_Event(kind, about, "Warning", reason, action, note))

    async def run(self) -> None:
        """Writes Events until cancelled."""
        while True:
            event = await self._waiting.get()
            try:
                await self._client.create(EVENTS, self._manifest(event), event.about.namespace or "default")
            except NotLeadingError:
                continue
            except ApiError as error:
                log.warning(
                    "cannot write an Event",
                    kind=event.kind,
                    name=event.about.name,
                    reason=event.reason,
                    error=str(error),
                )

    def _tell(self, event: _Event) -> None:
        key = (event.about.uid, event.reason, event.note)
        now = self._clock()
        if now - self._told.get(key, -_AGAIN) < _AGAIN:
            return
        if not self._admit(event, now):
            metrics.EVENTS_DROPPED.inc()
            return
        self._told.pop(key, None)
        self._told[key] = now
        if len(self._told) > _REMEMBERED:
            del self._told[next(iter(self._told))]
        try:
            self._waiting.put_nowait(event)
        except asyncio.QueueFull:
            metrics.EVENTS_DROPPED.inc()

    def _admit(self, event: _Event, now: float) -> bool:
        key = (event.about.uid, event.reason)
        limiter = self._limiters.pop(key, None) or RateLimiter(now, per_s=1 / _EVERY, burst=_BURST)
        self._limiters[key] = limiter
        if len(self._limiters) > _REMEMBERED:
            del self._limiters[next(iter(self._limiters))]
        return limiter.take(now)

    def _manifest(self, event: _Event) -> Json:
        about = event.about
        now = datetime.datetime.now(datetime.UTC)
        note = event.note if len(event.note) <= _NOTE_LIMIT else event.note[: _NOTE_LIMIT - 1] + "…"
        while len(note.encode()) > _NOTE_LIMIT:
            note = note[:-2] + "…"
        regarding = {"apiVersion": API_VERSION, "kind": event.kind, "name": about.name, "uid": about.uid}
        if about.namespace:
            regarding["namespace"] = about.namespace
        return {
            "apiVersion": "events.k8s.io/v1",
            "kind": "Event",
            "metadata": {
                "name": f"{about.name[:200]}.{int(now.timestamp() * 1e6):x}",
                "namespace": about.namespace or "default",
            },
            "eventTime": now.strftime("%Y-%m-%dT%H:%M:%S.%fZ"),
            "reportingController": "sharepod.dev/operator",
            "reportingInstance": self._identity[:128],
            "type": event.type,
            "reason": event.reason,
            "action": event.action,
            "note": note,
            "regarding": regarding,
        }
