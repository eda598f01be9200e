"""Reflector: list and watch of many objects of which little is kept (other pods' requests, agents' Leases).

Guarantees:
- `put` and `drop` see every object that matches, in the API server's order.
- After a gap (410, connection cut, server away) everything is listed again, and objects that are gone are dropped.
- `listed` is set once the first list was taken in.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import structlog

from sharepod.kube import ApiError, GoneError, Json

from .client import Client, Resource

_PAUSE_S = 0.2
"""Seconds between two watches, and before the first retry after a failure; doubles with each further failure."""
_LONGEST_PAUSE_S = 10.0
"""Longest of these pauses: how much later than necessary an API server that is back is noticed."""

log = structlog.get_logger(__name__)


class Reflector:
    """Reflector of one resource; keeps nothing of the objects but their uids.

    Args:
        client: The API server.
        resource: What is listed and watched.
        put: Called with each object that is there.
        drop: Called with the uid of each object that is gone.
        namespace: None: all.
        labels: Label selector.
        fields: Field selector.
    """

    def __init__(
        self,
        client: Client,
        resource: Resource,
        *,
        put: Callable[[Json], None],
        drop: Callable[[str], None],
        namespace: str | None = None,
        labels: str = "",
        fields: str = "",
    ) -> None:
        self._client = client
        self._resource = resource
        self._put = put
        self._drop = drop
        self._namespace = namespace
        self._labels = labels
        self._fields = fields
        self._known: set[str] = set()
        self.listed = asyncio.Event()

    async def run(self) -> None:
        """List and watch until cancelled."""
        pause = _PAUSE_S
        while True:
            try:
                since = await self._list()
                pause = _PAUSE_S
                while True:
                    since = await self._follow(since)
            except GoneError:
                log.debug("watch expired; listing again", resource=self._resource.plural)
            except ApiError as error:
                log.warning(
                    "watch failed; trying again", resource=self._resource.plural, error=str(error), retry_s=pause
                )
                await asyncio.sleep(pause)
                pause = min(_LONGEST_PAUSE_S, pause * 2)

    async def _list(self) -> str:
        items, since = await self._client.list_all(
            self._resource, self._namespace, labels=self._labels, fields=self._fields
        )
        present = {str(item["metadata"]["uid"]) for item in items}
        for uid in self._known - present:
            self._drop(uid)
        self._known = present
        for item in items:
            self._put(item)
        self.listed.set()
        return since

    async def _follow(self, since: str) -> str:
        """Watch from `since` until the server ends the watch; return the version to go on from."""
        async for event in self._client.watch(
            self._resource, self._namespace, since=since, labels=self._labels, fields=self._fields
        ):
            item = event["object"]
            since = str(item["metadata"]["resourceVersion"])
            if event["type"] == "BOOKMARK":
                continue
            uid = str(item["metadata"]["uid"])
            if event["type"] == "DELETED":
                self._known.discard(uid)
                self._drop(uid)
            else:
                self._known.add(uid)
                self._put(item)
        await asyncio.sleep(_PAUSE_S)
        return since
