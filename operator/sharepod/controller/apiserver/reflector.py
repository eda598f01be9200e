"""Reflector: keeps a local store of one kind of object up to date by a list and a watch.

Guarantees:
- After a list the store holds each object that existed when the list began and still exists, and no deleted object.
- If a watch ends with 410 or an ERROR event, or is silent too long, everything is listed again. If its connection
  breaks, the watch resumes at its last version.
- Before a watch resumes, a list of one object shows whether the API server's versions went back (etcd restored
  from a backup). If so, everything is listed again and the store replaced.
- An unreadable object affects only itself: it is skipped and counted, and its owner is notified if known. If a watch
  event does not name its object, everything is listed after the watch has ended, to find the affected object.
- Objects are recorded one by one as they arrive, so no whole page is in memory.
- If a page arrives late or breaks off after `_LONG_PAGE_S`, a smaller page is requested at the same place in the list,
  down to one object. Pages grow again while they arrive fast.
- A Retry-After is obeyed up to `LONGEST_WAIT_S`, so that an error page of a load balancer does not stop a watch for
  hours.
- A resource that is not served yet is requested again every `_NOT_SERVED_S`, or `_OPTIONAL_S`.
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
"""Pause before a retry, in seconds: first and longest. The longest pause bounds how late a reachable API server is
noticed."""
_NOT_SERVED_S = 2.0
"""Seconds between two tries while the resource is not served, as its CRD may be applied at any time."""
_OPTIONAL_S = 15.0
"""Seconds between two tries for a resource that is not served and that placement does not need. An older API server may
never serve it."""
_TURN_S = 0.005
"""Seconds of recording events or removing deleted objects before other tasks get a turn."""
_STEADY_S = 5.0
"""Seconds after which a watch counts as steady, so that its end causes no back-off. Longer than the longest pause."""
_CHECK_TIMEOUT_S = 5.0
"""Timeout, in seconds, of the list of one object before a watch: equals the timeout for a watch's first answer."""
_PAGE_STEP = 4
"""Factor by which pages shrink and grow. With 4, pages fit the largest Pods after two or three timeouts."""
_LONG_PAGE_S = 10.0
"""Seconds of reading after which a broken connection counts as caused by the page's size. API servers end an answer
after 60 s, proxies earlier. A connection that breaks earlier has another cause."""
_PAGE_GROWS_WITHIN = 1 / 4
"""Pages grow if the next larger page is expected to arrive within this part of the read timeout."""
_LOG_S = 10.0
"""Shortest time in seconds between two log lines about the same failure."""
_LOG_OPTIONAL_S = 3600.0
"""Shortest time in seconds between two log lines about the same failure of a kind that placement does not need."""
_LONGEST_WHY = 300
"""Longest kept reason of an unreadable object, in characters. An exception may quote the whole object."""

log = structlog.get_logger(__name__)


class Mirror(Protocol):
    """Store of one kind of object that a reflector keeps up to date."""

    def put(self, raw: Json, /) -> None:
        """Record an object. Ignore a version that is older than the cached version."""

    def put_unreadable(self, metadata: Json, why: str, /) -> None:
        """Record an object of which only this metadata is readable."""

    def drop(self, uid: str, version: int, last: Json | None, /) -> None:
        """Remove a deleted object. `version`: resourceVersion of the deletion. `last`: the object's last state, from
        the DELETED event; None if a list revealed the deletion."""

    def versions(self) -> Mapping[str, int]:
        """Return the version of each known object by uid."""

    def invalidate(self) -> None:
        """Mark all cached versions stale, because etcd was restored from a backup."""


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
        needed: True if placement needs this kind.
        on_listing: Called before everything is listed. Changes between the last watch event and the list are not seen
            one by one.
        on_replaced: Called when etcd was restored from a backup, before the store is invalidated.
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
        """resourceVersion from which the watch resumes; None: list everything first."""
        self._seen = 0
        """Highest resourceVersion of a list or an event. A lower one shows that etcd was restored from a backup."""
        self._heard_at = clock()
        self._arrived_at: float | None = None
        """Time at which a part of a list last arrived. None before the first."""
        self._opened_at: float | None = None
        """Time at which the API server answered the present watch, or the last one."""
        self._followed_at = float("-inf")
        """Time at which the API server last answered a watch, however long that watch lasted."""
        self._failures = 0
        self._failure: ApiError | None = None
        self._failed_at = self._told_at = clock()
        self._unreadable_log = UnreadableLog(clock)
        self._page: int | None = None
        """Objects per page, reduced because a page did not arrive in time. None: the client's page size."""
        self._watching: asyncio.Task[None] | None = None
        self._reopening = False
        self._missed = False
        """True after an event that did not name its object, so that the next step is a list."""
        self._histories = 0
        """Number of times that any reflector found that etcd was restored from a backup. A list during which the number
        has changed is not used."""
        self.listed = False
        """True once everything was listed. False while the resource is not served, and from when the versions went back
        until the next list."""

    def freshness(self) -> WatchFreshness:
        """Return the freshness of this watch at this moment."""
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
        """Return True if everything was listed and the API server has answered a watch at `moment` or later. An
        answered list does not count, as events may be older than it.
        """
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
        """Return the seconds until the next try. 0 after a watch that lasted `_STEADY_S`."""
        if self._opened_at is not None and self._clock() >= self._opened_at + _STEADY_S:
            self._failures = 0
            if self._failure is None and self._since is not None:
                return 0.0
        self._opened_at = None
        self._failures += 1
        return _BACKOFF.spread_s(self._failures, random.random())  # noqa: S311 - spreads load, nothing secret

    def replace_all(self) -> None:
        """List again and replace the store: another kind has shown that etcd was restored from a backup."""
        listed = self.listed
        self._histories += 1
        self._since, self._seen, self.listed = None, 0, False
        # do this even while the API server does not serve the kind, as in the first seconds after a CRD was created
        self._mirror.invalidate()
        if listed:
            self.reopen()

    def reopen(self) -> None:
        """Open the watch again at the version that it has reached. The API server then sends all later events at
        once."""
        if self._watching is not None:
            self._reopening = True
            self._watching.cancel()

    async def list_all(self) -> None:
        """List everything, and remove deleted objects. Raise `ApiError`.

        If another reflector finds during the list that the versions went back, the list may describe the state before
        the restore. It is then repeated.
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
        """Read the list page by page, then remove the objects that it does not contain. Return the list's version. If
        the list expires midway (410), begin again, at most twice.

        `history`: value of `_histories` at the start. If it changes before the end, the remaining objects stay.
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
        """Reduce the page size if a page was late, or broke off after `took` >= `_LONG_PAGE_S` seconds. Return True if
        the caller may request the smaller page; False if the error has another cause or the page had one object.
        """
        size = self._page or self._client.page_size
        too_large = "Timeout" in error.reason or took >= _LONG_PAGE_S
        if error.status or not too_large or size == 1:
            return False
        self._page = max(1, size // _PAGE_STEP)
        self._note(f"a page of {size} did not arrive in time; asking for {self._page}", error)
        return True

    def _grow_page(self, took: float) -> None:
        """Increase the page size again if a larger page is expected in time. A page arrived in `took` seconds, and the
        time is proportional to the size.
        """
        if self._page is not None and took * _PAGE_STEP <= self._client.read_timeout * _PAGE_GROWS_WITHIN:
            larger = self._page * _PAGE_STEP
            self._page = larger if larger < self._client.page_size else None

    async def _continues(self) -> bool:
        """Return True if the API server's present version is not older than the last seen version. False means that
        etcd was restored from a backup. Raises `ApiError`.
        """
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
        """Watch until the server ends the watch or `reopen` is called. Return True if `reopen` was called."""
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
        """Record the version of an event. Return True if the event must be processed. Return False if the versions went
        back; the caller must then end the watch, and everything is listed.
        """
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
        except Exception as error:  # the last stored state cannot be read
            log.warning(
                "last state cannot be read", kind=self.kind, uid=_uid(metadata), error=repr(error)[:_LONGEST_WHY]
            )
            self._mirror.drop(_uid(metadata), self._seen, None)

    def _put(self, raw: Json) -> None:
        try:
            self._mirror.put(raw)
        except Exception as error:  # an object with any content must not stop the reflector
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
        """Record a failure. Log it if it differs from the last failure, or the last log line is at least `_LOG_S`
        old.
        """
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
    """Return a resourceVersion as a number. 0 if it is not a number."""
    return int(version) if isinstance(version, str) and version.isdecimal() and len(version) < 20 else 0


def _uid(metadata: object) -> str:
    return str(metadata.get("uid") or "") if isinstance(metadata, dict) else ""
