"""Reflector: list and watch of one kind of object, which keep a store up to date.

Guarantees:
- After a list the store holds each object that existed when the list began and still exists, and no deleted object.
- A list follows a watch that ends with 410 or an ERROR event, or falls silent. A watch whose connection breaks resumes.
- Before a watch resumes, a list of one object shows whether the API server's versions went back (etcd restored
  from a backup). If so, everything is listed again and the store replaced.
- An unreadable object affects only itself: it is skipped and counted, and its owner notified if known. After an event
  that does not name its object, everything is listed once the watch ends: the affected object is unknown.
- Objects are recorded one by one as they arrive: no page is held.
- A page that is late, or breaks off after a while, is requested again at its place in the list, smaller, down to one
  object. Pages grow again while they arrive fast.
- A Retry-After is obeyed, up to `LONGEST_WAIT_S`: an error page of a load balancer must not stop a watch for hours.
- A resource that is not served yet is requested every `_NOT_SERVED_S`, or `_OPTIONAL_S`.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import Callable, Mapping
from typing import Protocol

import structlog

from sharepod.backoff import Backoff
from sharepod.controller import metrics
from sharepod.controller.state.reading.unreadable_log import UnreadableLog
from sharepod.kube import (
    ApiError,
    ErrorEventError,
    GoneError,
    Json,
    NotFoundError,
    PageTokens,
    SilentError,
    UnavailableError,
    Unreadable,
)

from .client import LONGEST_WAIT_S, Client, Resource, jittered
from .watch_freshness import BELIEF_S, WatchFreshness

_BACKOFF = Backoff(0.25, 3.0)
"""Seconds before a retry: an API server that is back is noticed within the longest."""
_NOT_SERVED_S = 2.0
"""Seconds between two tries while the resource is not served: its CRD may be applied any time."""
_OPTIONAL_S = 15.0
"""The same for a kind that placement does not depend on, which an older API server never serves."""
_TURN_S = 0.005
"""Seconds of recording events or removing deleted objects before other tasks get a turn."""
_STEADY_S = 5.0
"""Seconds that a watch must have lasted for the next failure to count as the first: longer than the pauses."""
_CHECK_TIMEOUT_S = 5.0
"""Timeout, in seconds, of the list of one object before a watch: equals the timeout for a watch's first answer."""
_PAGE_STEP = 4
"""Factor by which pages shrink and grow: two or three timeouts until the largest Pods fit."""
_LONG_PAGE_S = 10.0
"""Seconds after which a break-off counts as caused by the page's size: an API server ends an answer after 60 s, proxies
earlier. A connection that is reset at once does not depend on the page."""
_PAGE_GROWS_WITHIN = 1 / 4
"""Part of the timeout within which a page that is larger by `_PAGE_STEP` must be expected to arrive."""
_LOG_S = 10.0
"""Least seconds between two log lines about a failure that lasts."""
_LOG_OPTIONAL_S = 3600.0
"""The same for a kind that placement does not depend on."""
_LONGEST_WHY = 300
"""Longest reason kept of an unreadable object, in characters: an exception may quote the object."""

log = structlog.get_logger(__name__)


class Mirror(Protocol):
    """Store of one kind of object that a reflector keeps up to date."""

    def put(self, raw: Json, /) -> None:
        """Record an object; ignore a version older than the cached one."""

    def put_unreadable(self, metadata: Json, why: str, /) -> None:
        """Record an object of which only this metadata is readable."""

    def drop(self, uid: str, version: int, last: Json | None, /) -> None:
        """Remove an object that was deleted at a version; `last`: its last state on the watch."""

    def versions(self) -> Mapping[str, int]:
        """Return the version of each known object by uid."""

    def invalidate(self) -> None:
        """Mark all cached versions stale: the API server's versions went back."""


class Reflector:
    """Reflector of one kind.

    Args:
        client: The API server.
        resource: The resource to list and watch.
        mirror: The store to keep up to date.
        kind: Name of the kind in logs and metrics.
        namespace: None: all.
        labels: Label selector.
        fields: Field selector.
        needed: Placement depends on it.
        on_listing: Called before everything is listed: changes since the last watch event were not seen.
        on_replaced: Called before the store is replaced because the API server's versions went back.
        clock: Monotonic seconds.
    """

    def __init__(
        self,
        client: Client,
        resource: Resource,
        mirror: Mirror,
        *,
        kind: str,
        namespace: str | None = None,
        labels: str = "",
        fields: str = "",
        needed: bool = True,
        on_listing: Callable[[], None] = lambda: None,
        on_replaced: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._client = client
        self._resource = resource
        self._mirror = mirror
        self.kind = kind
        self._namespace = namespace
        self._labels = labels
        self._fields = fields
        self._needed = needed
        self._on_listing = on_listing
        self._on_replaced = on_replaced
        self._clock = clock
        self._since: str | None = None
        """Version from which the watch resumes; None: list everything."""
        self._seen = 0
        """Highest version of a list or an event."""
        self._heard_at = clock()
        self._arrived_at: float | None = None
        """When a piece of a list last arrived; None: never."""
        self._opened_at: float | None = None
        """When the watch that is open, or was last, was answered."""
        self._followed_at = float("-inf")
        """When a watch was last answered, however long it lasted."""
        self._failures = 0
        self._failure: ApiError | None = None
        self._failed_at = self._told_at = clock()
        self._unreadable_log = UnreadableLog(clock)
        self._page: int | None = None
        """Objects in a page, while pages are smaller because one did not arrive in time; None: as many as usual."""
        self._watching: asyncio.Task[None] | None = None
        self._reopening = False
        self._missed = False
        """An event did not name its object."""
        self._histories = 0
        """How often the versions were found to go back, by this kind or another."""
        self.listed = False
        """True once everything was listed, and while the store is worth believing."""

    def freshness(self) -> WatchFreshness:
        """Return the present freshness."""
        now = self._clock()
        return WatchFreshness(
            self.kind,
            self.listed,
            now - self._heard_at,
            self._failure,
            now - self._failed_at,
            self._needed,
            self._arrived_at is not None and now <= self._arrived_at + BELIEF_S,
        )

    def followed_since(self, moment: float) -> bool:
        """Return whether everything was listed, and a watch answered at this time or later; a page of a list does not
        count."""
        return self.listed and self._followed_at >= moment

    async def run(self) -> None:
        """List and watch until cancelled."""
        while True:
            try:
                if self._missed:
                    self._since = None
                if self._since is not None and not await self._continues():
                    self._invalidate()
                if self._since is None:
                    await self.list_all()
                if await self._follow():
                    continue
                pause = 0.0
            except (GoneError, ErrorEventError, SilentError) as error:
                log.info("watch is lost; listing again", kind=self.kind, error=str(error))
                self._since = None
                pause = 0.0
            except NotFoundError as error:
                self._since, self.listed = None, False
                self._note("not served yet; trying again", error)
                pause = _NOT_SERVED_S if self._needed else _OPTIONAL_S
            except ApiError as error:
                self._note("watch failed; trying again", error)
                pause = jittered(min(error.retry_after_s or 0.0, LONGEST_WAIT_S))
            await asyncio.sleep(pause or self._pause())

    def _pause(self) -> float:
        """Return how long to wait before the next try: not at all after a watch that was steady."""
        if self._opened_at is not None and self._clock() >= self._opened_at + _STEADY_S:
            self._failures = 0
            if self._failure is None and self._since is not None:
                return 0.0
        self._opened_at = None
        self._failures += 1
        return _BACKOFF.spread_s(self._failures, random.random())  # noqa: S311 - spreads load, nothing secret

    def replace_all(self) -> None:
        """List again and replace the store: another kind has shown that the versions went back."""
        listed = self.listed
        self._histories += 1
        self._since, self._seen, self.listed = None, 0, False
        self._mirror.invalidate()  # also while it is not served, as a CRD for the first seconds of an API server
        if listed:
            self.reopen()

    def reopen(self) -> None:
        """Open the watch again at its version: the API server then sends at once the events since."""
        if self._watching is not None:
            self._reopening = True
            self._watching.cancel()

    async def list_all(self) -> None:
        """List everything, and remove deleted objects. Raise `ApiError`.

        A list begun before another kind has shown that the versions went back may be of the former history: it is
        repeated.
        """
        if self._seen and not await self._continues():
            self._invalidate()
        while True:
            history = self._histories
            version = await self._pages(history)
            if version < self._seen:
                self._invalidate()
            elif history == self._histories:
                break
        self._seen = version
        self._since, self._missed = str(version), False
        self.listed = True
        log.debug("listed", kind=self.kind, version=version)

    async def _pages(self, history: int) -> int:
        """List page by page, once more if the list expires midway; return its version.

        A list during which the versions went back removes no object: `history` is then outdated.
        """
        self._on_listing()
        for last in (False, False, True):
            present: set[str] = set()
            try:
                version = await self._read_pages(present, history)
                break
            except GoneError:
                if last:
                    raise
        turn = self._clock() + _TURN_S
        for uid, known in list(self._mirror.versions().items()):
            if self._clock() > turn:
                await asyncio.sleep(0)
                turn = self._clock() + _TURN_S
            if history != self._histories:
                break
            if uid not in present and known <= version:
                if self.listed:
                    log.info("object was deleted without a watch event", kind=self.kind, uid=uid)
                    metrics.SWEPT.labels(self.kind).inc()
                self._mirror.drop(uid, version, None)
        return version

    async def _read_pages(self, present: set[str], history: int) -> int:
        def take(raw: Json) -> None:
            present.add(_uid(raw.get("metadata")))
            self._put(raw)

        def unreadable(_: str, item: Unreadable) -> None:
            present.add(_uid(item.metadata))
            self._pass_over(item)

        version, tokens, token = 0, PageTokens(self._resource.path(namespace=self._namespace)), ""
        while True:
            began = self._clock()
            try:
                page = await self._client.page(
                    self._resource,
                    self._namespace,
                    labels=self._labels,
                    fields=self._fields,
                    limit=self._page,
                    token=token,
                    heard=self._take_piece,
                    take=take,
                    unreadable=unreadable,
                )
            except UnavailableError as error:
                if not self._shrink_page(error, self._clock() - began):
                    raise
                continue
            self._heard()
            self._grow_page(self._clock() - began)
            version = version or _number(page.get("resourceVersion"))
            token = tokens.after(page)
            if not token or history != self._histories:
                return version

    def _shrink_page(self, error: UnavailableError, took: float) -> bool:
        """Request smaller pages if a page was late or broke off after `took` seconds; return whether smaller pages are
        possible."""
        size = self._page or self._client.page_size
        too_large = "Timeout" in error.reason or took >= _LONG_PAGE_S
        if error.status or not too_large or size == 1:
            return False
        self._page = max(1, size // _PAGE_STEP)
        self._note(f"a page of {size} did not arrive in time; asking for {self._page}", error)
        return True

    def _grow_page(self, took: float) -> None:
        """Request larger pages again if they will arrive in time: an answer takes time proportional to the page."""
        if self._page is not None and took * _PAGE_STEP <= self._client.read_timeout * _PAGE_GROWS_WITHIN:
            larger = self._page * _PAGE_STEP
            self._page = larger if larger < self._client.page_size else None

    async def _continues(self) -> bool:
        """Return whether the API server's versions have advanced since the last seen version. Raise `ApiError`."""
        page = await self._client.page(
            self._resource,
            self._namespace,
            limit=1,
            timeout_s=_CHECK_TIMEOUT_S,
            take=lambda _: None,
            unreadable=lambda *_: None,
        )
        return _number(page.get("resourceVersion")) >= self._seen

    def _invalidate(self) -> None:
        log.error("the API server's versions went back: replacing the cache", kind=self.kind, seen=self._seen)
        metrics.REPLACED.labels(self.kind).inc()
        self._since, self._seen, self.listed = None, 0, False
        self._on_replaced()
        self._mirror.invalidate()

    async def _follow(self) -> bool:
        """Watch until the server ends the watch, or `reopen` does; return whether it was `reopen`."""
        self._watching = asyncio.create_task(self._watch(), name=f"watch of {self.kind}")
        try:
            await self._watching
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if not self._reopening or (task is not None and task.cancelling()):
                raise
            return True
        finally:
            self._reopening, self._watching = False, None
        return False

    async def _watch(self) -> None:
        assert self._since is not None
        self._opened_at = None
        turn = self._clock() + _TURN_S
        events = self._client.watch(
            self._resource,
            self._namespace,
            since=self._since,
            labels=self._labels,
            fields=self._fields,
            heard=self._hear_watch,
            unreadable=self._take_unreadable,
        )
        async with contextlib.aclosing(events):
            async for event in events:
                metadata = event["object"].get("metadata")
                if not self._moves(metadata):
                    return
                if event["type"] == "DELETED":
                    self._drop(metadata, event["object"])
                elif event["type"] != "BOOKMARK":
                    self._put(event["object"])
                if self._clock() > turn:
                    await asyncio.sleep(0)
                    turn = self._clock() + _TURN_S

    def _take_piece(self) -> None:
        self._arrived_at = self._clock()

    def _hear_watch(self) -> None:
        if self._opened_at is None:
            self._opened_at = self._followed_at = self._clock()
        self._heard()

    def _moves(self, metadata: object) -> bool:
        """Take over the version of an event; return False, and have everything listed, if the versions go back."""
        if self._since is None:
            return False
        version = _number(metadata.get("resourceVersion")) if isinstance(metadata, dict) else 0
        if 0 < version < self._seen:
            self._invalidate()
            return False
        if version:
            self._since, self._seen = str(version), version
        return True

    def _take_unreadable(self, kind: str, item: Unreadable) -> None:
        if not self._moves(item.metadata):
            return
        self._missed = self._missed or not _uid(item.metadata)
        if kind == "DELETED":
            self._drop(item.metadata, None)
        else:
            self._pass_over(item)

    def _drop(self, metadata: object, last: Json | None) -> None:
        try:
            self._mirror.drop(_uid(metadata), self._seen, last)
        except Exception as error:  # its last state cannot be read
            log.warning(
                "last state cannot be read", kind=self.kind, uid=_uid(metadata), error=repr(error)[:_LONGEST_WHY]
            )
            self._mirror.drop(_uid(metadata), self._seen, None)

    def _put(self, raw: Json) -> None:
        try:
            self._mirror.put(raw)
        except Exception as error:  # any content of the object
            metadata = raw.get("metadata")
            why = f"is not readable: {type(error).__name__}: {error}"
            self._pass_over(Unreadable(metadata if isinstance(metadata, dict) else {}, why))

    def _pass_over(self, item: Unreadable) -> None:
        metrics.UNREADABLE.labels(self.kind).inc()
        why = item.why[:_LONGEST_WHY]
        named = {key: str(item.metadata.get(key) or "")[:_LONGEST_WHY] for key in ("namespace", "name", "uid")}
        self._unreadable_log.warn(self.kind, why, **named)
        if not _uid(item.metadata):
            return
        try:
            self._mirror.put_unreadable(item.metadata, why)
        except Exception as error:
            log.warning(
                "object is passed over", kind=self.kind, uid=_uid(item.metadata), error=repr(error)[:_LONGEST_WHY]
            )

    def _note(self, event: str, error: ApiError) -> None:
        """Note a failure; log it if it is another one than the last, or that is long ago."""
        now = self._clock()
        again = now >= self._told_at + (_LOG_S if self._needed else _LOG_OPTIONAL_S)
        if self._failure is None or str(self._failure) != str(error) or again:
            self._told_at = now
            log.warning(event, kind=self.kind, error=str(error))
        self._failure, self._failed_at = error, now

    def _heard(self) -> None:
        self._heard_at = self._clock()
        self._failure = None


def _number(version: object) -> int:
    """Return a resourceVersion as the number that it is in Kubernetes; 0 if it is none."""
    return int(version) if isinstance(version, str) and version.isdecimal() and len(version) < 20 else 0


def _uid(metadata: object) -> str:
    return str(metadata.get("uid") or "") if isinstance(metadata, dict) else ""
