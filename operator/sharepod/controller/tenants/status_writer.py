"""Status writer: writes a SharePod's status, as `decisions.status` composes it, and the Events it is worth.

Guarantees:
- Nothing is written that did not change, and nothing is composed again of the same inputs.
- Usage is written when it has moved by five points, at most every `usage_interval`; at rest it is not written.
- A change of conditions alone is written at most once a second.
- A new process announces nothing that the status showed before.
- A write holds for the version of the SharePod that was looked at only; else the SharePod is read and looked at again.
- A status that cannot be read is not written, but for its end: the owner is told by an Event.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable
from dataclasses import replace

import structlog

from sharepod.api.sharepod import KIND
from sharepod.controller.apiserver.client import SHAREPODS, Client
from sharepod.controller.apiserver.events import Events
from sharepod.controller.decisions import status
from sharepod.controller.decisions.announcements import announced_before, announcements
from sharepod.controller.decisions.lifecycle import Finish, TenantSnapshot
from sharepod.controller.settings import OperatorSettings
from sharepod.controller.state.cluster_state import ClusterState
from sharepod.controller.state.facts import SharePodFacts
from sharepod.controller.state.memos import TenantMemo
from sharepod.kube import ConflictError, Json, NotFoundError

from .snapshots import asks_for_another_share

_MINOR = {"conditions", "usage", "observedGeneration"}
"""Fields of the status that only explain: nothing is decided by them."""
_MINOR_PERIOD_S = 1.0
"""Seconds between two writes of a status of which only `_MINOR` changes: a message that flutters costs one a second."""

log = structlog.get_logger(__name__)


class StatusWriter:
    """Writer of the status of SharePods.

    Args:
        clock: Monotonic seconds.
        requeue_after: Looks at a tenant again after so many seconds.
    """

    def __init__(
        self,
        state: ClusterState,
        client: Client,
        events: Events,
        settings: OperatorSettings,
        clock: Callable[[], float],
        *,
        requeue_after: Callable[[str, float], None],
    ) -> None:
        self._state = state
        self._client = client
        self._events = events
        self._settings = settings
        self._clock = clock
        self._requeue_after = requeue_after

    async def sync(
        self, snapshot: TenantSnapshot, sharepod: SharePodFacts, memo: TenantMemo, finish: Finish | None
    ) -> None:
        """Write what has changed, now or when it is due, and the Events that it is worth. Raises `ApiError`.

        A SharePod of which only the metadata is known gets an Event alone, unless it has ended.

        1. Return if the status as it is was made of the same inputs.
        2. Compose the status and compare it with the one that was read.
        3. Return if nothing changed; come back later if only minor fields did, too soon.
        4. Patch; after a conflict read the SharePod and come back at once.
        5. Write Events.
        """
        if not sharepod.readable and finish is None:
            self._events.warning(KIND, sharepod, "Invalid", "Place", str(sharepod.error))
            return
        reserved = next((reserved for reserved in snapshot.reserved if reserved.written is not None), None)
        gpunode = self._state.gpunodes.named(reserved.node) if reserved is not None else None
        cleared = sharepod.status.pod_uid in memo.returned
        now = self._clock()
        inputs = status.StatusInputs(
            snapshot=snapshot,
            node=reserved.node if reserved is not None else None,
            row=reserved.written if reserved is not None else None,
            report=gpunode.status if gpunode is not None else None,
            refusal=memo.refusal,
            resize_refusal=memo.resize_refusal,
            resizing=asks_for_another_share(self._state, snapshot, memo),
            blocked=memo.blocked,
            usage_due=False,
            now=datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        )
        seen = status.reported(inputs)
        if status.usage_moved(sharepod.status.usage, seen, inputs.row):
            due = now if memo.usage_written is None else memo.usage_written + self._settings.usage_interval
            inputs = replace(inputs, usage_due=now >= due)
            if now < due:
                self._requeue_after(sharepod.uid, due - now)
        looked_at = status.looked_at(sharepod, inputs, finish)
        if looked_at == memo.shown and not cleared:
            return
        wanted = status.compose(sharepod, inputs, finish)
        if cleared:
            wanted = wanted.model_copy(update={"pod_uid": None, "pod_name": None})
        changes = status.difference(sharepod.raw_status, wanted)
        if not changes:
            memo.shown = looked_at
            return
        if changes.keys() <= _MINOR and memo.status_written is not None and now < memo.status_written + _MINOR_PERIOD_S:
            self._requeue_after(sharepod.uid, memo.status_written + _MINOR_PERIOD_S - now)
            return
        log.debug(
            "status changes",
            tenant=sharepod.uid,
            sharepod=f"{sharepod.namespace}/{sharepod.name}",
            changes=changes,
        )
        metadata: Json = {"uid": sharepod.uid, "resourceVersion": str(sharepod.version)}
        try:
            answer = await self._client.patch_status(
                SHAREPODS, sharepod.name, {"metadata": metadata, "status": changes}, sharepod.namespace
            )
        except (ConflictError, NotFoundError):
            await self._read_sharepod(sharepod)
            self._requeue_after(sharepod.uid, 0.0)
            return
        memo.status_written = now
        if "usage" in changes:
            memo.usage_written = now
        decides = finish is not None or cleared  # the next step follows from what was written
        self._state.put_sharepod(answer, news=decides)
        memo.shown = None
        known = self._state.sharepods.get(sharepod.uid)
        if known is not None and str(known.version) == answer["metadata"]["resourceVersion"]:
            memo.shown = status.looked_at(known, replace(inputs, usage_due=False))
        announced = memo.announced
        if announced is None:
            announced = announced_before(sharepod.status, seen)
        found, memo.announced = announcements(wanted, finish, seen, announced)
        for item in found:
            tell = self._events.warning if item.warning else self._events.normal
            tell(KIND, sharepod, item.reason, item.action, item.message)

    async def _read_sharepod(self, sharepod: SharePodFacts) -> None:
        try:
            self._state.put_sharepod(await self._client.get(SHAREPODS, sharepod.name, sharepod.namespace))
        except NotFoundError:
            self._state.drop_sharepod(sharepod.uid)
