"""Snapshots of tenants: composes them from the cluster state and the tenant's memo."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from sharepod.api.gpunode import Health, TenantState, TenantStatus
from sharepod.api.units import TenantId
from sharepod.controller.decisions.ends import MOVED, PREEMPTED
from sharepod.controller.decisions.resizing import resize_wish
from sharepod.controller.decisions.snapshot import ReservationSnapshot, TenantSnapshot
from sharepod.controller.decisions.steps import RemovalReason
from sharepod.controller.settings import OperatorSettings
from sharepod.controller.state.cluster_state import ClusterState
from sharepod.controller.state.facts.pod_facts import PodFacts
from sharepod.controller.state.facts.sharepod_facts import SharePodFacts
from sharepod.controller.state.memos import TenantMemo
from sharepod.controller.state.reading.timestamps import seconds
from sharepod.placement.state.types import Reservation

LOOK_AGAIN_S = 1.0
"""Seconds until a step is retried that was not possible yet. Watches normally lag by less than this."""


class Snapshots:
    """Builder of snapshots. It also records in the memo since when states last, such as "refused by kube-scheduler".

    Args:
        state: The cluster state.
        settings: The operator's settings, for the timeouts of Pods.
        clock: Monotonic seconds.
        wall: Time of day in seconds since 1970.
        advertises: Returns True if a node advertises enough of the resource line's resources for the shares in its
            ledger.
    """

    def __init__(
        self,
        state: ClusterState,
        settings: OperatorSettings,
        clock: Callable[[], float],
        wall: Callable[[], float],
        *,
        advertises: Callable[[str], bool],
    ) -> None:
        self._advertises = advertises
        self._wall = wall
        self._state = state
        self._settings = settings
        self._clock = clock

    def take(self, tenant: str, memo: TenantMemo) -> TenantSnapshot:
        """Return all facts about a tenant now."""
        sharepod, pod = self._state.asking(tenant), _as_evicted(self._state.pod_of(tenant), memo)
        reserved = self.reserved(tenant, memo)
        now = self._clock()
        if pod is None or pod.node is not None or pod.gates or not pod.unschedulable:
            memo.unbound = None
        elif memo.unbound is None or memo.unbound[0] != pod.uid:
            memo.unbound = (pod.uid, now)
        if pod is None or pod.begun or pod.waits_for_share:
            memo.unstarted = None
        elif memo.unstarted is None or memo.unstarted[0] != pod.uid:
            memo.unstarted = (pod.uid, now)
        waits_on_node = sharepod is not None and sharepod.plain and pod is not None and pod.node is not None
        wall, blocked = self._wall(), memo.blocked
        return TenantSnapshot(
            sharepod=sharepod,
            pod=pod,
            reserved=reserved,
            claim=self._state.claim_of_pod(pod) if pod is not None else None,
            lost=_as_evicted(self._state.lost_pods.get(tenant), memo),
            unbound_since=memo.unbound[1] if memo.unbound is not None else None,
            unstarted_since=memo.unstarted[1] if memo.unstarted is not None and not waits_on_node else None,
            ended_since=_ended_since(sharepod, memo, now, wall),
            blocked_until=blocked.until if blocked is not None and blocked.pod is None else 0.0,
            refused_until=blocked.until if blocked is not None and pod is not None and blocked.pod == pod.uid else 0.0,
            now=now,
            wall=wall,
            bind_timeout=self._settings.bind_timeout,
            start_timeout=self._settings.start_timeout,
            namespace_ends=sharepod is not None and sharepod.namespace in self._state.ending_namespaces,
            unreadable_row=self._state.ledgers.unreadable_row(tenant),
            gpu_failed=pod is not None and any(self._gpu_failed(item) for item in reserved),
            advertised=pod is None or not (pod.waits_for_share and pod.carried) or self.advertised(reserved),
        )

    def advertised(self, reserved: tuple[ReservationSnapshot, ...]) -> bool:
        """Return True if, for each of these rows that is written, the node advertises enough for its ledger."""
        return all(self._advertises(item.node) for item in reserved if item.written is not None)

    def reserved(self, tenant: str, memo: TenantMemo) -> tuple[ReservationSnapshot, ...]:
        """Return the reservations of a tenant. `tenant`: uid of a SharePod, plain Pod or claim."""
        reservations = self._state.cluster.reservations_of(TenantId(tenant))
        return tuple(self._reserved(node, wanted, tenant, memo) for node, wanted in reservations)

    def _gpu_failed(self, reserved: ReservationSnapshot) -> bool:
        """Return True if a GPU of a row has failed: the agent reports it as unhealthy, or no longer reports it."""
        gpunode = self._state.gpunodes.named(reserved.node) if reserved.written is not None else None
        if gpunode is None or reserved.written is None:
            return False
        gpus = [gpunode.gpus.get(uuid) for uuid in reserved.written.gpus]
        ill = any(gpu is not None and gpu.health is Health.UNHEALTHY for gpu in gpus)
        return ill or bool(gpunode.missing_gpus(reserved.written.gpus))

    def _reserved(self, node: str, wanted: Reservation, tenant: str, memo: TenantMemo) -> ReservationSnapshot:
        gpunode = self._state.gpunodes.named(node)
        written = gpunode.rows.get(tenant) if gpunode is not None else None
        if written is None or written.state is not TenantState.RELEASING:
            memo.release_generation.pop(node, None)  # the value is about a former row
        if gpunode is None or written is None:
            return ReservationSnapshot(node=node, wanted=wanted, written=None)
        drained = False
        if written.state is TenantState.RELEASING:
            uid, since = memo.release_generation.get(node, ("", 0))
            if uid != gpunode.uid:  # this is the first check of the release, or the Node was registered again
                since = gpunode.generation
                memo.release_generation[node] = (gpunode.uid, since)
            seen = gpunode.seen(tenant)
            drained = seen is not None and seen.drained and (gpunode.status.observed_generation or 0) >= since
        return ReservationSnapshot(
            node=node,
            wanted=wanted,
            written=written,
            drained=drained,
            override=self._override(node),
            forced=tenant in gpunode.forced,
        )

    def _override(self, name: str) -> RemovalReason | None:
        node = self._state.nodes.named(name)
        if node is not None:
            return RemovalReason.OUT_OF_SERVICE if node.out_of_service else None
        return RemovalReason.NODE_GONE if name in self._state.gone_nodes else None


def seen_by_agent(state: ClusterState, snapshot: TenantSnapshot) -> TenantStatus | None:
    """Return the status of a tenant as its node's agent reports it. None if no agent reports it."""
    for reserved in snapshot.reserved:
        gpunode = state.gpunodes.named(reserved.node) if reserved.written is not None else None
        seen = gpunode.seen(reserved.wanted.tenant) if gpunode is not None else None
        if seen is not None:
            return seen
    return None


def asks_for_another_share(state: ClusterState, snapshot: TenantSnapshot, memo: TenantMemo) -> bool:
    """Return True if a tenant requests another share than it has (`resize_wish`). Update `memo.memory_settled`."""
    gpunode = state.gpunodes.named(snapshot.reserved[0].node) if snapshot.reserved else None
    wish = resize_wish(snapshot, gpunode, memo.memory_settled)
    memo.memory_settled = wish.memory_settled
    return wish.wanted


def _ended_since(sharepod: SharePodFacts | None, memo: TenantMemo, now: float, wall: float) -> float | None:
    """Return the time at which a SharePod ended, in monotonic seconds. None if it has not ended, or has no end time.

    The end time in the status is converted once. If it is in the future, the time of the conversion counts.
    """
    end_time = sharepod.status.end_time if sharepod is not None else None
    if end_time is None or (ended := seconds(end_time)) is None:
        memo.ended = None
    elif memo.ended is None or memo.ended[0] != end_time:
        memo.ended = (end_time, now - max(0.0, wall - ended))
    return memo.ended[1] if memo.ended is not None else None


def _as_evicted(pod: PodFacts | None, memo: TenantMemo) -> PodFacts | None:
    """Return the Pod. If this process has evicted it, mark it as disrupted, which the watch may not show yet."""
    eviction = memo.eviction
    if pod is None or eviction is None or eviction.done is None or eviction.pod != pod.uid:
        return pod
    by = MOVED if eviction.move_to is not None else PREEMPTED if eviction.preempted else ""
    return replace(pod, disrupted=eviction.done, disrupted_by=by)
