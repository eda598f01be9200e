"""Event recorder: writes Kubernetes Events, as `kubectl describe` shows them.

Guarantees:
- Writing an Event never delays the work that the Event reports, and never makes it fail.
- An Event with the same object, reason and note is written again only after ten minutes.
- About one object and with one reason, at most `_BURST` Events are written without a pause, then one a minute.
- If the queue is full, new Events are dropped and counted. One namespace may fill a quarter of the queue.
- Namespaces take turns, so a slow admission webhook of one namespace delays only the Events of that namespace.
"""

from __future__ import annotations

import datetime
import itertools
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import structlog

from sharepod.api.bounds import clipped
from sharepod.api.claims import claims
from sharepod.api.objects import API_VERSION
from sharepod.controller import metrics
from sharepod.controller.state.facts.object_facts import ObjectFacts
from sharepod.kube import ApiError, Json
from sharepod.rate_limit import RateLimiter

from .client import EVENTS, Client
from .workqueue import WorkQueue

_WAITING = 1000
"""Largest number of Events in the queue: as many as the API server accepts in about 10 s."""
_WAITING_OF_ONE = _WAITING // 4
"""Largest number of Events of one namespace in the queue."""
_WRITERS = 4
"""Number of Events that are written at the same time."""
_REPEAT_S = 600.0
"""Seconds until an Event with the same object, reason and note is written again. The API server deletes an Event after
an hour, so a lasting state stays visible."""
_REMEMBERED = 10_000
"""Largest number of written Events that are remembered to find repetitions; also of rate limiters. About 1 MB each."""
_BURST = 10
"""Most Events of one reason about one object that are written without a pause."""
_PERIOD_S = 60.0
"""Seconds per Event of one reason about one object, after the burst."""
_VERSIONS = {"Pod": "v1", claims.KIND: claims.API_VERSION}
"""API version by kind of the objects that Events are about. Kinds that are missing here are SharePod's own."""
_NOTE_LIMIT = 1024
"""Longest note in bytes that events.k8s.io/v1 accepts."""

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class _Event:
    """Event in the queue. `kind` and `about`: the object that the Event is about."""

    kind: str
    about: ObjectFacts
    type: str
    reason: str
    action: str
    note: str


class Events:
    """Recorder of Events. `identity`: name of this operator process in the Events. `clock`: monotonic seconds."""

    def __init__(self, client: Client, identity: str, clock: Callable[[], float]) -> None:
        self._client = client
        self._identity = identity
        self._clock = clock
        self._numbers = itertools.count()
        self._waiting: dict[int, _Event] = {}
        """Events that are not written yet, by sequence number."""
        self._waiting_of: Counter[str] = Counter()
        """For each namespace: number of Events that are not written yet."""
        self._queue: WorkQueue[int] = WorkQueue(
            "event", self._write, _WRITERS, lambda number: self._waiting[number].about.namespace
        )
        self._recorded: dict[tuple[str, str, str], float] = {}
        self._limiters: dict[tuple[str, str], RateLimiter] = {}  # by uid and reason, the longest unused first

    def normal(self, kind: str, about: ObjectFacts, reason: str, action: str, note: str) -> None:
        """Record an Event of type Normal, for a regular change."""
        self._record(_Event(kind, about, "Normal", reason, action, note))

    def hint(self, kind: str, about: ObjectFacts, reason: str, action: str, note: str) -> None:
        """Record an Event of type Normal, unless the queue is so long that it would delay important Events."""
        if len(self._waiting) < _WAITING // 2:
            self.normal(kind, about, reason, action, note)
        else:
            metrics.EVENTS_DROPPED.inc()

    def warning(self, kind: str, about: ObjectFacts, reason: str, action: str, note: str) -> None:
        """Record an Event of type Warning, for a state that needs, or may need, a person's action."""
        self._record(_Event(kind, about, "Warning", reason, action, note))

    async def run(self) -> None:
        """Write Events until cancelled."""
        await self._queue.run()

    async def _write(self, number: int) -> None:
        event = self._waiting.pop(number)
        namespace = event.about.namespace
        self._waiting_of[namespace] -= 1
        if not self._waiting_of[namespace]:
            del self._waiting_of[namespace]
        try:
            await self._client.create(EVENTS, self._manifest(event), namespace or "default")
        except ApiError as error:
            log.warning(
                "cannot write an Event",
                kind=event.kind,
                name=event.about.name,
                reason=event.reason,
                error=str(error),
            )

    def _record(self, event: _Event) -> None:
        key = (event.about.uid, event.reason, event.note)
        now = self._clock()
        if now - self._recorded.get(key, -_REPEAT_S) < _REPEAT_S:
            return
        if not self._admit(event, now):
            metrics.EVENTS_DROPPED.inc()
            return
        self._recorded.pop(key, None)
        self._recorded[key] = now
        if len(self._recorded) > _REMEMBERED:
            del self._recorded[next(iter(self._recorded))]
        namespace = event.about.namespace
        if len(self._waiting) >= _WAITING or self._waiting_of[namespace] >= _WAITING_OF_ONE:
            metrics.EVENTS_DROPPED.inc()
            return
        number = next(self._numbers)
        self._waiting[number] = event
        self._waiting_of[namespace] += 1
        self._queue.add(number)

    def _admit(self, event: _Event, now: float) -> bool:
        key = (event.about.uid, event.reason)
        limiter = self._limiters.pop(key, None) or RateLimiter(now, per_s=1 / _PERIOD_S, burst=_BURST)
        self._limiters[key] = limiter
        if len(self._limiters) > _REMEMBERED:
            del self._limiters[next(iter(self._limiters))]
        return limiter.take(now)

    def _manifest(self, event: _Event) -> Json:
        about = event.about
        now = datetime.datetime.now(datetime.UTC)
        note = clipped(event.note, _NOTE_LIMIT)
        while len(note.encode("utf-8", "surrogatepass")) > _NOTE_LIMIT:  # the cut may leave half a surrogate pair
            note = note[:-2] + "…"
        version = _VERSIONS.get(event.kind, API_VERSION)
        regarding = {"apiVersion": version, "kind": event.kind, "name": about.name, "uid": about.uid}
        if about.namespace:
            regarding["namespace"] = about.namespace
        return {
            "apiVersion": "events.k8s.io/v1",
            "kind": "Event",
            "metadata": {
                "name": f"{about.name[:200].rstrip('-.')}.{int(now.timestamp() * 1e6):x}",
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
