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
from sharepod.controller.decisions.lifecycle import Finish, Held, View
from sharepod.controller.decisions.resizing import asks_for_another_share
from sharepod.controller.settings import Settings
from sharepod.controller.state.cluster_state import Model
from sharepod.controller.state.facts import GpuNodeFacts, SharePodFacts
from sharepod.controller.state.notes import Note
from sharepod.kube import ConflictError, Json, NotFoundError

_MINOR = {"conditions", "usage", "observedGeneration"}
_CALM = 1.0  # where only these change, a status is written at most so often

log = structlog.get_logger(__name__)


def seen_by_agent(model: Model, view: View) -> TenantStatus | None:
    """What the agent of its node says of it."""
    for held in view.held:
        gpunode = model.gpunodes.named(held.node) if held.written is not None else None
        for seen in gpunode.status.tenants if gpunode is not None else ():
            if held.written is not None and seen.id == held.written.id:
                return seen
    return None


class StatusWriter:
    """`look_at`: has a tenant looked at again in so many seconds."""

    def __init__(
        self,
        model: Model,
        client: Client,
        events: Events,
        settings: Settings,
        clock: Callable[[], float],
        *,
        look_at: Callable[[str, float], None],
    ) -> None:
        self._model = model
        self._client = client
        self._events = events
        self._settings = settings
        self._clock = clock
        self._look_at = look_at

    async def show(self, view: View, sharepod: SharePodFacts, note: Note, finish: Finish | None) -> None:
        """Writes what has changed, now or when it is due, and says what is worth an Event."""
        held = next((held for held in view.held if held.written is not None), None)
        gpunode = self._model.gpunodes.named(held.node) if held is not None else None
        cleared = sharepod.status.pod_uid in note.returned
        now = self._clock()
        usage_due = note.usage_written is None or now >= note.usage_written + self._settings.usage_interval
        picture = status.Picture(
            view=view,
            node=held.node if held is not None else None,
            row=held.written if held is not None else None,
            report=gpunode.status if gpunode is not None else None,
            refusal=note.refusal,
            resize_refusal=note.resize_refusal,
            resizing=asks_for_another_share(self._model, view, note),
            blocked=note.blocked,
            usage_due=usage_due,
            now=datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        )
        wanted = status.compose(sharepod, picture, finish)
        if cleared:
            wanted = wanted.model_copy(update={"pod_uid": None, "pod_name": None})
        changes = status.difference(sharepod.raw_status, wanted)
        if not usage_due and held is not None and self._usage_waits(held, gpunode, sharepod):
            self._look_at(sharepod.uid, (note.usage_written or now) + self._settings.usage_interval - now)
        if not changes:
            return
        if changes.keys() <= _MINOR and note.status_written is not None and now < note.status_written + _CALM:
            self._look_at(sharepod.uid, note.status_written + _CALM - now)
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
        note.status_written = now
        if "usage" in changes:
            note.usage_written = now
        self._model.put_sharepod(answer)
        announce(self._events, sharepod, wanted, finish, note, seen_by_agent(self._model, view))

    def _usage_waits(self, held: Held, gpunode: GpuNodeFacts | None, sharepod: SharePodFacts) -> bool:
        seen = next((item for item in (gpunode.status.tenants if gpunode else ()) if item.id == sharepod.uid), None)
        usage = sharepod.status.usage
        return seen is not None and (
            usage is None or (usage.held_milli, usage.memory) != (seen.held_milli, seen.memory)
        )

    async def _read_sharepod(self, sharepod: SharePodFacts) -> None:
        try:
            self._model.put_sharepod(await self._client.get(SHAREPODS, sharepod.name, sharepod.namespace))
        except NotFoundError:
            self._model.drop_sharepod(sharepod.uid)
