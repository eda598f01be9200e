"""Writes the status of a SharePod, which `status` composes.

Guarantees: nothing is written that did not change; usage is written at most each `usage_interval`, and what only
explains (conditions) at most once a second; a write is of the very version of the SharePod that was looked at, else it
is read and looked at again.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable

import structlog

from sharepod.api.gpunode import TenantStatus
from sharepod.controller.apiserver.client import SHAREPODS, Client
from sharepod.controller.apiserver.events import Events
from sharepod.controller.decisions import status
from sharepod.controller.decisions.announcements import announce
from sharepod.controller.decisions.lifecycle import Finish, Reserved, TenantSnapshot
from sharepod.controller.decisions.resizing import asks_for_another_share
from sharepod.controller.settings import OperatorSettings
from sharepod.controller.state.cluster_state import ClusterState
from sharepod.controller.state.facts import GpuNodeFacts, SharePodFacts
from sharepod.controller.state.memos import TenantMemo
from sharepod.kube import ConflictError, Json, NotFoundError

_MINOR = {"conditions", "usage", "observedGeneration"}
_CALM = 1.0  # where only these change, a status is written at most so often

log = structlog.get_logger(__name__)


def seen_by_agent(state: ClusterState, snapshot: TenantSnapshot) -> TenantStatus | None:
    """What the agent of its node says of it."""
    for reserved in snapshot.reserved:
        gpunode = state.gpunodes.named(reserved.node) if reserved.written is not None else None
        for seen in gpunode.status.tenants if gpunode is not None else ():
            if reserved.written is not None and seen.id == reserved.written.id:
                return seen
    return None


class StatusWriter:
    """`look_at`: has a tenant looked at again in so many seconds."""

    def __init__(
        self,
        state: ClusterState,
        client: Client,
        events: Events,
        settings: OperatorSettings,
        clock: Callable[[], float],
        *,
        look_at: Callable[[str, float], None],
    ) -> None:
        self._state = state
        self._client = client
        self._events = events
        self._settings = settings
        self._clock = clock
        self._look_at = look_at

    async def show(
        self, snapshot: TenantSnapshot, sharepod: SharePodFacts, memo: TenantMemo, finish: Finish | None
    ) -> None:
        """Writes what has changed, now or when it is due, and says what is worth an Event."""
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
            self._look_at(sharepod.uid, (memo.usage_written or now) + self._settings.usage_interval - now)
        if not changes:
            return
        if changes.keys() <= _MINOR and memo.status_written is not None and now < memo.status_written + _CALM:
            self._look_at(sharepod.uid, memo.status_written + _CALM - now)
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
            self._look_at(sharepod.uid, 0.0)
            return
        memo.status_written = now
        if "usage" in changes:
            memo.usage_written = now
        self._state.put_sharepod(answer)
        announce(self._events, sharepod, wanted, finish, memo, seen_by_agent(self._state, snapshot))

    def _usage_waits(self, reserved: Reserved, gpunode: GpuNodeFacts | None, sharepod: SharePodFacts) -> bool:
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
