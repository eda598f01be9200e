"""Status writer: writes the status of a SharePod, which `decisions.status` composes, and the Events about its changes.

Guarantees:
- A status is written only if a field has changed, and composed only if an input has changed.
- After a Pod's gate was opened, the status is written once the Pod has started, kube-scheduler has refused it, or one
  second has passed.
- Usage is written only after a change of five percentage points, and at most every `usage_interval`.
- The totals of consumed GPU time are written when they have grown by an eighth, and when they are final.
- A change of fields that only inform users (`status.MINOR`, such as conditions) is written at most once a second.
- A new process writes no Event about a state that the stored status already shows.
- Each write names the resourceVersion of the SharePod from which the status was composed. If the SharePod has changed,
  it is read and reconciled again.
- The whole status is written by server-side apply with one field manager. Fields of another manager are removed.
- A SharePod with an unreadable spec or status gets an Event. Its status is written only when it ends.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache

import structlog

from sharepod.api.objects import API_VERSION
from sharepod.api.sharepod import KIND, KeptPlace
from sharepod.budgets.sharepod_totals import totals_to_write
from sharepod.controller.apiserver.client import SHAREPODS, Client
from sharepod.controller.apiserver.events import Events
from sharepod.controller.decisions import status
from sharepod.controller.decisions.announcements import announced_before, announcements
from sharepod.controller.decisions.conditions import StatusInputs
from sharepod.controller.decisions.resizing import of_next_run
from sharepod.controller.decisions.snapshot import TenantSnapshot
from sharepod.controller.decisions.steps import Ending
from sharepod.controller.settings import OperatorSettings
from sharepod.controller.state.cluster_state import ClusterState
from sharepod.controller.state.facts.sharepod_facts import SharePodFacts
from sharepod.controller.state.gpunode_changes import usage_moved
from sharepod.controller.state.memos import TenantMemo
from sharepod.kube import ConflictError, ForbiddenError, InvalidError, Json, NotFoundError

from .snapshots import asks_for_another_share

_START_S = 1.0
"""Seconds for which the write of the status waits after a gate was opened. A Pod whose image is on the node starts
within a second, so one write shows all. Such writes are among the most expensive for the API server."""
_MINOR_PERIOD_S = 1.0
"""Shortest time in seconds between two writes in which only minor fields change. So a message that alternates causes at
most one write a second."""

log = structlog.get_logger(__name__)


class StatusWriter:
    """Writer of the status of SharePods.

    Args:
        clock: Monotonic seconds.
        requeue_after: Enqueues a tenant after a number of seconds.
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

    async def totals_are_written(self, snapshot: TenantSnapshot, sharepod: SharePodFacts, memo: TenantMemo) -> bool:
        """Write the final totals of a share. The caller must do this before it removes the row, as the agent drops its
        counts with the row. Return True if the row may be removed, False if the SharePod has changed and the caller
        must retry. Totals that the API server refuses are lost: the GPU must not stay reserved for them. Raises
        `ApiError`."""
        if not sharepod.readable:
            return True
        inputs = self._inputs(snapshot, memo, last=True)
        if inputs.consumed is None:
            return True
        try:
            return await self._write(snapshot, sharepod, memo, None, inputs) or memo.tenant_deleted
        except (ForbiddenError, InvalidError) as error:
            log.warning("totals are lost", sharepod=f"{sharepod.namespace}/{sharepod.name}", error=error.message)
            return True

    async def sync(
        self,
        snapshot: TenantSnapshot,
        sharepod: SharePodFacts,
        memo: TenantMemo,
        finish: Ending | None,
    ) -> bool:
        """Write the changed fields of the status and the Events about them. Return True if the status was written.
        Raises `ApiError`.

        Fields that are not due yet are written later. If only the metadata of a SharePod is readable and it has not
        ended, only an Event is written.
        """
        if finish is None and (pause := self._about_to_start(snapshot, memo)) > 0.0:
            self._requeue_after(sharepod.uid, pause)
            return False
        if not sharepod.readable and finish is None:
            self._events.warning(KIND, sharepod, "Invalid", "Place", str(sharepod.error))
            return False
        return await self._write(snapshot, sharepod, memo, finish, self._inputs(snapshot, memo))

    def _about_to_start(self, snapshot: TenantSnapshot, memo: TenantMemo) -> float:
        """Return the seconds for which to wait for the Pod's start or refusal before the status is written. 0 if there
        is nothing to wait for.
        """
        pod = snapshot.pod
        if memo.opened is None or pod is None or pod.uid != memo.opened[0]:
            return 0.0
        if pod.phase != "Pending" or pod.unschedulable or pod.deleting:
            return 0.0
        return memo.opened[1] + _START_S - self._clock()

    async def _write(
        self,
        snapshot: TenantSnapshot,
        sharepod: SharePodFacts,
        memo: TenantMemo,
        finish: Ending | None,
        inputs: StatusInputs,
    ) -> bool:
        """Write the status that follows from these inputs. Return True if it was written.

        1. Return False if the stored status was composed from the same inputs. If only inputs of minor fields have
           changed, and the last write was less than a second ago, return False and retry later.
        2. Compose the status and compare it with the stored status.
        3. Return False if they are equal. If only minor fields differ, and the last write was less than a second ago,
           return False and retry later.
        4. Apply the status. After a conflict, read the SharePod and retry at once. If it is not found, record its
           deletion.
        5. Write Events.
        """
        pod = snapshot.pod
        cleared = pod is not None and pod.taken_back and sharepod.status.pod_uid == pod.uid
        now = self._clock()
        if usage_moved(sharepod.status.usage, inputs.seen, inputs.row):
            due = now if memo.usage_written is None else memo.usage_written + self._settings.usage_interval
            inputs = replace(inputs, usage_due=now >= due)
            if now < due:
                self._requeue_after(sharepod.uid, due - now)
        looked_at = status.looked_at(sharepod, inputs, finish)
        if looked_at == memo.shown and not cleared:
            return False
        major = (status.major(sharepod, inputs, finish), cleared)
        too_soon = memo.status_written is not None and now < memo.status_written + _MINOR_PERIOD_S
        if too_soon and major == memo.major:
            self._later(sharepod, memo, now)
            return False
        wanted = status.compose(sharepod, inputs, finish)
        changes = status.difference(sharepod.raw_status, wanted)
        if not changes:
            memo.shown = looked_at
            return False
        if too_soon and changes.keys() <= status.MINOR:
            self._later(sharepod, memo, now)
            return False
        log.debug(
            "status changes",
            tenant=sharepod.uid,
            sharepod=f"{sharepod.namespace}/{sharepod.name}",
            changes=changes,
        )
        try:
            answer = await self._apply(sharepod, wanted)
        except InvalidError as error:
            text = f"the API server refused the status of the SharePod, which is tried again: {error.message}"
            self._events.warning(KIND, sharepod, "StatusRefused", "Watch", text)
            raise
        except NotFoundError:
            memo.tenant_deleted = True  # no further GET is needed
            self._state.drop_sharepod(sharepod.uid)
            return False
        except ConflictError:
            await self._read_sharepod(sharepod)
            self._requeue_after(sharepod.uid, 0.0)
            return False
        memo.status_written, memo.major = now, major
        if "usage" in changes:
            memo.usage_written = now
        decides = finish is not None or cleared  # the next step depends on this status
        self._state.put_sharepod(answer, news=decides)
        memo.shown = None
        known = self._state.sharepods.get(sharepod.uid)
        if known is not None and str(known.version) == answer["metadata"]["resourceVersion"]:
            if inputs.usage_due or inputs.consumed is not None:
                inputs = replace(inputs, usage_due=False, consumed=None)
            memo.shown = status.looked_at(known, inputs)
        announced = memo.announced
        if announced is None:
            announced = announced_before(sharepod.status, inputs.seen)
        found, memo.announced = announcements(
            wanted, finish, inputs.seen, announced, (inputs.refusal, inputs.resize_refusal)
        )
        for item in found:
            normal = self._events.hint if item.hint else self._events.normal
            emit = self._events.warning if item.warning else normal
            emit(KIND, sharepod, item.reason, item.action, item.message)
        return True

    async def _apply(self, sharepod: SharePodFacts, wanted: Json) -> Json:
        """Write a status by server-side apply. Return the resulting SharePod.

        If another field manager also owns a list of the status, an apply that removes the list's last entry stores
        null, which no schema allows. The apply then fails or leaves a difference. A merge patch then writes the
        difference, and removes that manager's list.
        """
        metadata: Json = {"name": sharepod.name, "uid": sharepod.uid, "resourceVersion": str(sharepod.version)}
        body: Json = {"apiVersion": API_VERSION, "kind": KIND, "metadata": metadata, "status": wanted}
        try:
            answer = await self._client.apply_status(SHAREPODS, sharepod.name, body, sharepod.namespace)
        except InvalidError:
            metadata = {"uid": sharepod.uid, "resourceVersion": str(sharepod.version)}
            body = {"metadata": metadata, "status": status.difference(sharepod.raw_status, wanted)}
            return await self._client.patch_status(SHAREPODS, sharepod.name, body, sharepod.namespace)
        left = status.difference(answer.get("status") or {}, wanted)
        if not left:
            return answer
        metadata = {"uid": sharepod.uid, "resourceVersion": answer["metadata"]["resourceVersion"]}
        body = {"metadata": metadata, "status": left}
        return await self._client.patch_status(SHAREPODS, sharepod.name, body, sharepod.namespace)

    def _inputs(self, snapshot: TenantSnapshot, memo: TenantMemo, *, last: bool = False) -> StatusInputs:
        """Return the inputs of the status. `usage_due` is False; the caller sets it. `last`: True if the row will be
        removed next, so that the totals must be written now.
        """
        reserved = next((reserved for reserved in snapshot.reserved if reserved.written is not None), None)
        row = reserved.written if reserved is not None else None
        gpunode = self._state.gpunodes.named(reserved.node) if reserved is not None else None
        gpus, seen, totals = None, None, None
        missing_gpus: tuple[str, ...] = ()
        if row is not None and gpunode is not None:
            gpus, seen = status.gpus_of(row, gpunode.status.gpus), gpunode.seen(row.id)
            missing_gpus = gpunode.missing_gpus(row.gpus)
            was = snapshot.sharepod.status.consumed if snapshot.sharepod is not None else None
            totals = totals_to_write(was, seen, drained=reserved is not None and reserved.drained, last=last)
        return StatusInputs(
            snapshot=snapshot,
            node=reserved.node if reserved is not None else None,
            row=row,
            gpus=gpus,
            missing_gpus=missing_gpus,
            seen=seen,
            refusal=memo.refusal,
            resize_refusal=of_next_run(memo.resize_refusal, snapshot.sharepod),
            resizing=asks_for_another_share(self._state, snapshot, memo),
            blocked=memo.blocked,
            usage_due=False,
            now=_time_of_day(int(snapshot.wall)),
            consumed=totals,
            moves_to=_moves_to(snapshot, memo),
            unreachable=self._unreachable(snapshot),
        )

    def _unreachable(self, snapshot: TenantSnapshot) -> str | None:
        """Return the node that does not answer although the end of the tenant's Pod, or the release of its share, needs
        it. None if there is none.
        """
        pod = snapshot.pod
        if pod is not None and pod.deleting and not pod.ended and pod.node is not None:
            node = self._state.nodes.named(pod.node)
            return pod.node if node is not None and not node.ready else None
        for reserved in snapshot.reserved:
            if reserved.releasing and reserved.confirmed is None:
                node = self._state.nodes.named(reserved.node)
                if node is not None and (not node.ready or self._state.agent_away(reserved.node)):
                    return reserved.node
        return None

    def _later(self, sharepod: SharePodFacts, memo: TenantMemo, now: float) -> None:
        """Enqueue the SharePod for the time at which its minor fields may be written again."""
        assert memo.status_written is not None
        self._requeue_after(sharepod.uid, memo.status_written + _MINOR_PERIOD_S - now)

    async def _read_sharepod(self, sharepod: SharePodFacts) -> None:
        try:
            self._state.put_sharepod(await self._client.get(SHAREPODS, sharepod.name, sharepod.namespace))
        except NotFoundError:
            self._state.drop_sharepod(sharepod.uid)


@lru_cache(maxsize=2)
def _time_of_day(second: int) -> str:
    return datetime.datetime.fromtimestamp(second, datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _moves_to(snapshot: TenantSnapshot, memo: TenantMemo) -> KeptPlace | None:
    """Return the place that is reserved for a tenant that this operator moves. None once the tenant's next Pod has a
    share.
    """
    eviction, pod = memo.eviction, snapshot.pod
    if eviction is None or (pod is not None and pod.uid != eviction.pod and not pod.waits_for_share):
        return None
    return eviction.move_to
