"""Brings one tenant a step further: looks, lets `lifecycle` decide, acts, shows.

Guarantees: one tenant is worked on at most once at a time; everything done can be done again, so that a crash between
any two calls leaves nothing that the next look does not mend; absence is confirmed by a GET before anything is
concluded from it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import replace

import structlog

from sharepod.api.gpunode import TenantState
from sharepod.api.sharepod import KIND
from sharepod.api.units import TenantId
from sharepod.controller import metrics
from sharepod.controller.apiserver.client import SHAREPODS, Client
from sharepod.controller.apiserver.events import Events
from sharepod.controller.apiserver.workqueue import WorkQueue
from sharepod.controller.decisions import lifecycle
from sharepod.controller.decisions.lifecycle import Finish, Reserved, TenantSnapshot
from sharepod.controller.decisions.resizing import asks_for_another_share
from sharepod.controller.placing.ledger_writer import LedgerWriter
from sharepod.controller.placing.loop import PlacementLoop
from sharepod.controller.settings import OperatorSettings
from sharepod.controller.state.cluster_state import ClusterState
from sharepod.controller.state.facts import PodFacts, SharePodFacts
from sharepod.controller.state.memos import TenantMemo, TenantMemos
from sharepod.kube import NotFoundError
from sharepod.placement.state.types import Outlook

from .confirmations import Confirmations
from .evictor import Evictor
from .pods import POD_TERMINATING, PodControl
from .status_writer import StatusWriter, seen_by_agent

_LOOK_AGAIN = 1.0
_LONGEST_PAUSE = 600.0

log = structlog.get_logger(__name__)


class TenantReconciler:
    """Works on tenants by key, the SharePod's uid. `loop` and `read_priorities` are set once, before `run`."""

    loop: PlacementLoop
    read_priorities: Callable[[], Awaitable[None]]

    def __init__(
        self,
        state: ClusterState,
        client: Client,
        ledger: LedgerWriter,
        pod_control: PodControl,
        events: Events,
        memos: TenantMemos,
        settings: OperatorSettings,
        clock: Callable[[], float],
    ) -> None:
        self._state = state
        self._client = client
        self._ledger = ledger
        self._pod_control = pod_control
        self._confirmations = Confirmations(state, client, pod_control)
        self._events = events
        self._memos = memos
        self._settings = settings
        self._clock = clock
        self._evictor = Evictor(client, events, settings, clock)
        self.queue: WorkQueue[str] = WorkQueue("tenant", self._work, settings.writers)
        self._status = StatusWriter(state, client, events, settings, clock, look_at=self.queue.add_after)

    async def run(self) -> None:
        """Works until cancelled."""
        await self.queue.run()

    # Looking

    async def _work(self, tenant: str) -> None:
        memo = self._memos.of(tenant)
        snapshot = self._snapshot(tenant, memo)
        if snapshot.sharepod is None and (snapshot.reserved or snapshot.pod is not None):
            if not await self._sharepod_is_gone(snapshot, tenant):
                return
            snapshot = self._snapshot(tenant, memo)  # much can have happened meanwhile
        step = lifecycle.decide(snapshot)
        log.debug("step", tenant=tenant, step=step)
        finish = await self._act(snapshot, tenant, memo, step)
        if isinstance(step, lifecycle.Forget):
            return
        snapshot = self._snapshot(tenant, memo)
        if (
            snapshot.sharepod is not None
            and not snapshot.sharepod.deleting
            and not self._undecided(snapshot, memo, step)
        ):
            await self._status.show(snapshot, snapshot.sharepod, memo, finish)
            if finish is None:
                await self._watch(snapshot, snapshot.sharepod, memo)

    @staticmethod
    def _undecided(snapshot: TenantSnapshot, memo: TenantMemo, step: lifecycle.Step) -> bool:
        """There is nothing to show yet: no answer of placement, none in the ledger, or a row that cannot be read."""
        if snapshot.unreadable_row:
            return True
        if isinstance(step, lifecycle.Place):
            return memo.refusal is None and (snapshot.sharepod is None or snapshot.sharepod.status.node is None)
        return (
            snapshot.pod is None
            and bool(snapshot.reserved)
            and all(reserved.written is None for reserved in snapshot.reserved)
        )

    def _snapshot(self, tenant: str, memo: TenantMemo) -> TenantSnapshot:
        sharepod, pod = self._state.sharepods.get(tenant), _as_evicted(self._state.pod_of(tenant), memo)
        reserved = tuple(
            self._reserved(node, tenant, memo) for node, _ in self._state.cluster.reservations_of(TenantId(tenant))
        )
        now = self._clock()
        if pod is None or pod.node is not None or pod.gated or not pod.unschedulable:
            memo.unbound = None
        elif memo.unbound is None or memo.unbound[0] != pod.uid:
            memo.unbound = (pod.uid, now)
        if not reserved:
            memo.give_back = False
        elif memo.blocked is not None and now >= memo.blocked.since + self._settings.bind_timeout:
            self._back_off_blocked(memo, now)
        return TenantSnapshot(
            sharepod=sharepod,
            pod=pod,
            reserved=reserved,
            lost=_as_evicted(self._state.lost_pods.get(tenant), memo),
            returned=frozenset(memo.returned),
            unbound_since=memo.unbound[1] if memo.unbound is not None else None,
            give_back=memo.give_back,
            blocked_until=memo.blocked.until if memo.blocked is not None else 0.0,
            now=now,
            bind_timeout=self._settings.bind_timeout,
            unreadable_row=self._state.unreadable_row(tenant),
        )

    def _reserved(self, node: str, tenant: str, memo: TenantMemo) -> Reserved:
        wanted = next(row for name, row in self._state.cluster.reservations_of(TenantId(tenant)) if name == node)
        gpunode = self._state.gpunodes.named(node)
        written = gpunode.rows.get(tenant) if gpunode is not None else None
        if gpunode is None or written is None:
            return Reserved(node=node, wanted=wanted, written=None)
        drained = False
        if written.state is TenantState.RELEASING:
            since = memo.release_generation.setdefault(node, gpunode.generation)
            seen = next((item for item in gpunode.status.tenants if item.id == tenant), None)
            drained = seen is not None and seen.drained and (gpunode.status.observed_generation or 0) >= since
        return Reserved(
            node=node,
            wanted=wanted,
            written=written,
            drained=drained,
            override=self._override(node),
            forced=tenant in gpunode.forced,
        )

    def _override(self, name: str) -> str | None:
        node = self._state.nodes.named(name)
        if node is not None:
            return "the node is out of service" if node.out_of_service else None
        return lifecycle.NODE_GONE if name in self._state.gone_nodes else None

    def _back_off_blocked(self, memo: TenantMemo, now: float) -> None:
        """Its Pod cannot be made for long: others get the share, and it is placed again later."""
        memo.give_back = True
        waits = memo.blocked is not None and memo.blocked.reason == POD_TERMINATING
        memo.not_before = now + (_LOOK_AGAIN if waits else self._pause(memo))
        if memo.blocked is not None:  # still the reason to show
            memo.blocked = replace(memo.blocked, since=memo.not_before, until=memo.not_before)

    def back_off_from_node(self, node: str, tenant: str, why: str) -> None:
        """Its reservation there was refused by the API server."""
        memo, now = self._memos.of(tenant), self._clock()
        pause = self._pause(memo)
        memo.not_before = now + pause
        memo.avoid[node] = (f"has a ledger that could not be written: {why}", now + 2 * pause)

    def _pause(self, memo: TenantMemo) -> float:
        """How long to stay away after one more failure."""
        memo.given_back += 1
        return min(_LONGEST_PAUSE, self._settings.bind_timeout * 2.0 ** min(memo.given_back - 1, 10))

    async def _sharepod_is_gone(self, snapshot: TenantSnapshot, tenant: str) -> bool:
        """Confirmed by a GET; where it is there after all, it is taken in."""
        name, namespace = self._name(snapshot)
        try:
            raw = await self._client.get(SHAREPODS, name, namespace)
        except NotFoundError:
            return True
        if str(raw["metadata"]["uid"]) != tenant:
            return True
        self._state.sharepods.revive(tenant)
        self._state.put_sharepod(raw)
        return False

    @staticmethod
    def _name(snapshot: TenantSnapshot) -> tuple[str, str]:
        """Name and namespace of the tenant's SharePod, which are its Pod's too."""
        known = snapshot.sharepod or snapshot.pod
        if known is not None:
            return known.name, known.namespace
        return snapshot.reserved[0].wanted.pod_name, snapshot.reserved[0].wanted.namespace

    # Acting

    async def _act(
        self, snapshot: TenantSnapshot, tenant: str, memo: TenantMemo, step: lifecycle.Step
    ) -> Finish | None:
        """Does the step; returns how the SharePod ends, if it does."""
        sharepod = snapshot.sharepod
        if not isinstance(step, lifecycle.Place):
            self._resize_or_leave(snapshot, tenant, memo)
        match step:
            case lifecycle.Forget():
                self._state.lost_pods.pop(tenant, None)
                self._memos.forget(tenant)
            case lifecycle.Wait(until=float(until)):
                self.queue.add_after(tenant, until - snapshot.now)
            case lifecycle.Place():
                if sharepod is not None and sharepod.priority_class is not None:
                    await self._learn_priority(sharepod.priority_class)
                self.loop.want_place(tenant)
            case lifecycle.CreatePod(node=node, row=row):
                assert sharepod is not None
                finish = await self._pod_control.create(sharepod, node, row, memo, snapshot.now)
                if memo.blocked is not None:
                    self.queue.add_after(tenant, memo.blocked.until - snapshot.now)
                return finish
            case lifecycle.DeletePod(pod=pod):
                await self._pod_control.delete(pod)
            case lifecycle.TakeBack():
                await self._take_back(snapshot, memo, step)
                self.queue.add(tenant)
            case lifecycle.ClearPod():
                memo.give_back = True
            case lifecycle.Unreserve(node=node):
                self._state.unreserve(node, tenant)
                self.queue.add(tenant)
            case lifecycle.BeginRelease(node=node):
                name, namespace = self._name(snapshot)
                if await self._pod_control.absent(name, namespace, tenant):
                    self._state.cluster.set_releasing(node, TenantId(tenant))
                    self._ledger.add(node)
                else:
                    self.queue.add_after(tenant, _LOOK_AGAIN)
            case lifecycle.Remove(node=node, why=why):
                if self._ledger.leaving(node, tenant):
                    return None
                if await self._confirmations.may_remove(snapshot, tenant, *self._name(snapshot), step):
                    self._remove(snapshot, tenant, node, why)
                else:
                    self.queue.add_after(tenant, _LOOK_AGAIN)
            case Finish():
                if await self._confirmations.ended(snapshot, tenant, *self._name(snapshot), step):
                    return step
                self.queue.add_after(tenant, _LOOK_AGAIN)
        return None

    async def _learn_priority(self, name: str) -> None:
        """Looks up a PriorityClass that no list has shown yet; one that does not exist counts as 0, and its Pod will be
        refused."""
        if name not in self._state.priorities:
            await self.read_priorities()
            self._state.priorities.setdefault(name, 0)

    def _resize_or_leave(self, snapshot: TenantSnapshot, tenant: str, memo: TenantMemo) -> None:
        """Has the loop decide about another share while one is asked for; else it waits for nothing."""
        sharepod = snapshot.sharepod
        if sharepod is not None and asks_for_another_share(self._state, snapshot, memo):
            in_use = memo.resize_refusal is not None and memo.resize_refusal.outlook is Outlook.IN_USE
            self.loop.want_resize(tenant, changed=in_use or memo.resize_asked != sharepod.generation)
            memo.resize_asked = sharepod.generation
        else:
            memo.resize_refusal = None
            self.loop.leave(tenant)

    async def _take_back(self, snapshot: TenantSnapshot, memo: TenantMemo, step: lifecycle.TakeBack) -> None:
        pod = step.pod
        if not await self._pod_control.take_back(pod, memo):
            return
        now = self._clock()
        pause = self._pause(memo)
        memo.give_back = True
        if pod.pin is not None:
            memo.avoid[pod.pin] = (f"was refused by kube-scheduler: {step.why}", now + pause)
        log.info(
            "took the pod back",
            tenant=pod.tenant,
            pod=f"{pod.namespace}/{pod.name}",
            node=pod.pin,
            why=step.why,
        )
        if snapshot.sharepod is not None:
            text = f"took the pod back from {pod.pin}, it is placed again: {step.why}"
            self._events.warning(KIND, snapshot.sharepod, "PodTakenBack", "Bind", text)

    def _remove(self, snapshot: TenantSnapshot, tenant: str, node: str, why: str) -> None:
        log.info("tenant leaves its node", tenant=tenant, node=node, why=why)
        metrics.RELEASES.labels(
            "agent" if why == "drained" else "override" if why != lifecycle.NEVER_BOUND else "unbound"
        ).inc()
        gpunode = self._state.gpunodes.named(node)
        if why not in ("drained", lifecycle.NEVER_BOUND) and gpunode is not None:
            name, namespace = self._name(snapshot)
            text = f"gave away the share of {namespace}/{name} ({tenant}): {why}"
            self._events.warning("GPUNode", gpunode, "ShareGivenAway", "Release", text)
        self._memos.of(tenant).release_generation.pop(node, None)
        self._ledger.remove(node, tenant)

    async def _watch(self, snapshot: TenantSnapshot, sharepod: SharePodFacts, memo: TenantMemo) -> None:
        """Ends the Pod where its share is not enforced and the policy says so."""
        again = await self._evictor.look(sharepod, snapshot.pod, seen_by_agent(self._state, snapshot), memo)
        if again is not None:
            self.queue.add_after(sharepod.uid, again)
        elif memo.eviction is not None and memo.eviction.done is not None:
            self.queue.add(sharepod.uid)  # to show it


def _as_evicted(pod: PodFacts | None, memo: TenantMemo) -> PodFacts | None:
    """A Pod that was evicted from here says so, however that was done."""
    eviction = memo.eviction
    if pod is None or eviction is None or eviction.done is None or eviction.pod != pod.uid:
        return pod
    return replace(pod, disrupted=eviction.done)
