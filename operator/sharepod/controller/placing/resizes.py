"""Resizes: decides whether a placed tenant gets the changed share that it requests.

Guarantees:
- A share changes only if the tenant's present GPUs have capacity for it. Its memory never falls below the memory in use
  there.
- No decision is made for a deleted tenant, for whole GPUs, or if the request has changed since it was enqueued.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

import structlog

from sharepod.api.gpunode import Mode
from sharepod.api.sharepod import GpuRequest
from sharepod.api.units import TenantId
from sharepod.controller import metrics
from sharepod.controller.state.cluster_state import ClusterState
from sharepod.controller.state.memos import TenantMemos
from sharepod.placement.resizing import resize
from sharepod.placement.state.cluster import Cluster
from sharepod.placement.state.types import Outlook, PlacementError, Refusal

from . import slices
from .waiting import WaitingTenant

log = structlog.get_logger(__name__)


class Resizes:
    """Tenants that request another share than they have.

    Args:
        state: The cluster state. Changed shares are stored in its `cluster`.
        memos: The tenants' memos: the last requested shares, and refusals.
        on_decided: Called with (tenant, node) of each changed share, which must then be written.
        on_answered: Called with each tenant whose answer has changed.
        on_room: Called when a change may have freed capacity for waiting requests.
        clock: Monotonic seconds.
    """

    def __init__(
        self,
        state: ClusterState,
        memos: TenantMemos,
        *,
        on_decided: Callable[[str, str], None],
        on_answered: Callable[[str], None],
        on_room: Callable[[], None],
        clock: Callable[[], float],
    ) -> None:
        self._state = state
        self._memos = memos
        self._on_decided = on_decided
        self._on_answered = on_answered
        self._on_room = on_room
        self._clock = clock
        self._asking: dict[str, WaitingTenant] = {}

    def __bool__(self) -> bool:
        return bool(self._asking)

    def want(self, tenant: str, wish: int) -> bool:
        """Enqueue a tenant. Return True if it needs a decision: it is new, `wish` differs from the last one, or the
        last change was refused because memory is in use. `wish`: number that changes with the requested share.
        """
        memo = self._memos.of(tenant)
        again = memo.resize_refusal is not None and memo.resize_refusal.outlook is Outlook.IN_USE
        if memo.resize_asked != wish:
            memo.resize_asked, memo.resize_refusal, again = wish, None, True
        if tenant in self._asking and not again:
            return False
        self._asking[tenant] = WaitingTenant(tenant, self._clock())
        return True

    def leave(self, tenant: str) -> None:
        """Remove a tenant."""
        self._asking.pop(tenant, None)

    def clear(self) -> None:
        """Remove all tenants."""
        self._asking.clear()

    async def decide(self, *, of_request_0: bool, arrivals: Callable[[], int]) -> None:
        """Decide for the tenants whose cluster state has changed since their last decision, the oldest decision first.
        Yields to other tasks.

        When new requests arrive, return early; the next call continues.

        Args:
            of_request_0: True: only tenants whose row has request 0. False: only the others.
            arrivals: Returns the number of requests that have arrived so far.
        """
        cluster, began, came = self._state.cluster, time.monotonic(), arrivals()
        version = cluster.room_version
        due = [waiting for waiting in self._asking.values() if waiting.refused_at_version != version]
        for waiting in sorted(due, key=lambda each: each.refused_at_version or 0):
            began = await slices.turns_of_others(began)
            if arrivals() > came:
                return
            if self._asking.get(waiting.tenant) is not waiting:
                continue
            if _has_request_0(cluster, waiting.tenant) == of_request_0:
                self._decide(waiting)

    def _decide(self, waiting: WaitingTenant) -> None:
        """Decide on the share of one tenant. It stays enqueued if it is refused, to be tried again when capacity
        changes."""
        version = waiting.refused_at_version = self._state.cluster.room_version
        try:
            answer = _try_resize(self._state, self._memos, waiting.tenant)
        except PlacementError as error:
            row = next((row for _, row in self._state.cluster.reservations_of(TenantId(waiting.tenant))), None)
            log.error(
                "cannot resize", tenant=waiting.tenant, owner=row.title if row is not None else "", error=str(error)
            )
            return
        memo = self._memos.of(waiting.tenant)
        if isinstance(answer, Refusal):
            metrics.DECISIONS.labels("resize_refused").inc()
            if answer != memo.resize_refusal:
                memo.resize_refusal = answer
                self._on_answered(waiting.tenant)
            return
        self._asking.pop(waiting.tenant, None)
        if self._state.cluster.excluding_fewer_at > version:
            self._on_room()
        if answer is not None:
            metrics.DECISIONS.labels("resized").inc()
            memo.resize_refusal = None
            self._on_decided(waiting.tenant, answer)


def _try_resize(state: ClusterState, memos: TenantMemos, tenant: str) -> str | Refusal | None:
    """Decide on the share of a tenant. Return the node if the share was changed there, the refusal if it was refused,
    or None if there is nothing to decide.
    """
    asked = _share_asked(state, tenant)
    reserved = state.cluster.reservations_of(TenantId(tenant))
    if asked is None or len(reserved) != 1 or reserved[0][1].mode is Mode.EXCLUSIVE:
        return None
    if memos.of(tenant).resize_counted not in (None, asked) and state.sharepods.get(tenant) is not None:
        return None  # the request has changed since the tenant was enqueued; its reconciler enqueues it again
    gpunode = state.gpunodes.named(reserved[0][0])
    seen = (item.memory for item in (gpunode.status.tenants if gpunode else ()) if item.id == tenant)
    in_use = next(seen, 0)  # bytes in use, on the GPU on which the tenant uses most
    answer = resize(
        state.cluster,
        TenantId(tenant),
        request_milli=asked.request_milli,
        limit_milli=asked.limit_milli,
        memory=asked.memory,
        in_use=in_use,
    )
    return answer if isinstance(answer, Refusal) else reserved[0][0]


def _has_request_0(cluster: Cluster, tenant: str) -> bool:
    """Return True if a tenant's row has request 0, because it requested 0 or because preemption lowered it."""
    return any(row.request_milli == 0 for _, row in cluster.reservations_of(TenantId(tenant)))


def _share_asked(state: ClusterState, tenant: str) -> GpuRequest | None:
    """Return the share that a tenant requests; None if it is deleted or its request is invalid."""
    sharepod, claim = state.asking(tenant), state.seen_claims.claims.get(tenant)
    if sharepod is not None and not sharepod.plain:
        return sharepod.gpu
    asked = claim.request.gpu if claim is not None and claim.request is not None else None
    asked = sharepod.gpu if sharepod is not None else asked
    reserved = state.cluster.reservations_of(TenantId(tenant))
    if asked is None or not reserved:
        return None
    return replace(asked, memory=reserved[0][1].memory)  # the memory of a claim or a resource line stays as granted
