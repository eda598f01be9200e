"""Status writer: writes a SharePod's status, as `decisions.status` composes it, and the Events it is worth.

Guarantees:
- Nothing is written that did not change.
- Usage is written at most every `usage_interval`, a change of conditions alone at most once a second.
- A write holds for the version of the SharePod that was looked at only; else the SharePod is read and looked at again.
- A status that cannot be read is not written, but for its end: the owner is told by an Event.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable

import structlog

from sharepod.api.sharepod import KIND
from sharepod.controller.apiserver.client import SHAREPODS, Client
from sharepod.controller.apiserver.events import Events
from sharepod.controller.decisions import status
from sharepod.controller.decisions.announcements import announcements
from sharepod.controller.decisions.lifecycle import Finish, ReservationSnapshot, TenantSnapshot
from sharepod.controller.settings import OperatorSettings
from sharepod.controller.state.cluster_state import ClusterState
from sharepod.controller.state.facts import GpuNodeFacts, SharePodFacts
from sharepod.controller.state.memos import TenantMemo
from sharepod.kube import ConflictError, Json, NotFoundError

from .snapshots import asks_for_another_share, seen_by_agent

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

        1. Compose the status and compare it with the one that was read.
        2. Return if nothing changed; come back later if only minor fields did, too soon.
        3. Patch; after a conflict read the SharePod and come back at once.
        4. Write Events.
        """
        if not sharepod.readable and finish is None:
            self._events.warning(KIND, sharepod, "Invalid", "Place", str(sharepod.error))
            return
        reserved = next((reserved for reserved in snapshot.reserved if reserved.written is not None), None)
        gpunode = self._state.gpunodes.named(reserved.node) if reserved is not None else None
        cleared = sharepod.status.pod_uid in memo.returned
        now = self._clock()
        usage_due = memo.usage_written is None or now >= memo.usage_written + self._settings.usage_interval
        inputs = status.StatusInputs(
            snapshot=snapshot,
            node=reserved.node if reserved is not None else None,
            row=reserved.written if reserved is not None else None,
            report=gpunode.status if gpunode is not None else None,
            refusal=memo.refusal,
            resize_refusal=memo.resize_refusal,
            resizing=asks_for_another_share(self._state, snapshot, memo),
            blocked=memo.blocked,
            usage_due=usage_due,
            now=datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        )
        wanted = status.compose(sharepod, inputs, finish)
        if cleared:
            wanted = wanted.model_copy(update={"pod_uid": None, "pod_name": None})
        changes = status.difference(sharepod.raw_status, wanted)
        if not usage_due and reserved is not None and self._usage_waits(reserved, gpunode, sharepod):
            self._requeue_after(sharepod.uid, (memo.usage_written or now) + self._settings.usage_interval - now)
        if not changes:
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
        self._state.put_sharepod(answer)
        seen = seen_by_agent(self._state, snapshot)
        found, memo.announced = announcements(wanted, finish, seen, memo.announced)
        for item in found:
            tell = self._events.warning if item.warning else self._events.normal
            tell(KIND, sharepod, item.reason, item.action, item.message)

    def _usage_waits(
        self, reserved: ReservationSnapshot, gpunode: GpuNodeFacts | None, sharepod: SharePodFacts
    ) -> bool:
        seen = next((item for item in (gpunode.status.tenants if gpunode else ()) if item.id == sharepod.uid), None)
        usage = sharepod.status.usage
        return seen is not None and (
            usage is None or (usage.held_milli, usage.memory) != (seen.held_milli, seen.memory)
        )

    async def _read_sharepod(self, sharepod: SharePodFacts) -> None:
        try:
            self._state.put_sharepod(await self._client.get(SHAREPODS, sharepod.name, sharepod.namespace))
        except NotFoundError:
            self._state.drop_sharepod(sharepod.uid)
