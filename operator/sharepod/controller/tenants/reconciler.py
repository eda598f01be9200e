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
from sharepod.controller.apiserver.workqueue import Queue
from sharepod.controller.decisions import lifecycle
from sharepod.controller.decisions.lifecycle import Finish, Held, View
from sharepod.controller.decisions.resizing import asks_for_another_share
from sharepod.controller.placing.ledger_writer import LedgerWriter
from sharepod.controller.placing.loop import PlacementLoop
from sharepod.controller.settings import Settings
from sharepod.controller.state.cluster_state import Model
from sharepod.controller.state.facts import PodFacts, SharePodFacts
from sharepod.controller.state.notes import Note, Notes
from sharepod.kube import NotFoundError
from sharepod.placement.state.types import Outlook

from .confirmations import Proofs
from .evictor import Evictor
from .pods import POD_TERMINATING, Binder
from .status_writer import StatusWriter, seen_by_agent

_LOOK_AGAIN = 1.0
_LONGEST_PAUSE = 600.0

log = structlog.get_logger(__name__)


class Tenants:
    """Works on tenants by key, the SharePod's uid. `loop` and `read_priorities` are set once, before `run`."""

    loop: PlacementLoop
    read_priorities: Callable[[], Awaitable[None]]

    def __init__(
        self,
        model: Model,
        client: Client,
        ledger: LedgerWriter,
        binder: Binder,
        events: Events,
        notes: Notes,
        settings: Settings,
        clock: Callable[[], float],
    ) -> None:
        self._model = model
        self._client = client
        self._ledger = ledger
        self._binder = binder
        self._proofs = Proofs(model, client, binder)
        self._events = events
        self._notes = notes
        self._settings = settings
        self._clock = clock
        self._evictor = Evictor(client, events, settings, clock)
        self.queue: Queue[str] = Queue("tenant", self._work, settings.writers)
        self._status = StatusWriter(model, client, events, settings, clock, look_at=self.queue.add_after)

    async def run(self) -> None:
        """Works until cancelled."""
        await self.queue.run()

    # Looking

    async def _work(self, tenant: str) -> None:
        note = self._notes.of(tenant)
        view = self._view(tenant, note)
        if view.sharepod is None and (view.held or view.pod is not None):
            if not await self._sharepod_is_gone(view, tenant):
                return
            view = self._view(tenant, note)  # much can have happened meanwhile
        step = lifecycle.decide(view)
        log.debug("step", tenant=tenant, step=step)
        finish = await self._act(view, tenant, note, step)
        if isinstance(step, lifecycle.Forget):
            return
        view = self._view(tenant, note)
        if view.sharepod is not None and not view.sharepod.deleting and not self._undecided(view, note, step):
            await self._status.show(view, view.sharepod, note, finish)
            if finish is None:
                await self._watch(view, view.sharepod, note)

    @staticmethod
    def _undecided(view: View, note: Note, step: lifecycle.Step) -> bool:
        """There is nothing to show yet: no answer of placement, none in the ledger, or a row that cannot be read."""
        if view.unclear:
            return True
        if isinstance(step, lifecycle.Place):
            return note.refusal is None and (view.sharepod is None or view.sharepod.status.node is None)
        return view.pod is None and bool(view.held) and all(held.written is None for held in view.held)

    def _view(self, tenant: str, note: Note) -> View:
        sharepod, pod = self._model.sharepods.get(tenant), _as_evicted(self._model.pod_of(tenant), note)
        held = tuple(
            self._held(node, tenant, note) for node, _ in self._model.cluster.reservations_of(TenantId(tenant))
        )
        now = self._clock()
        if pod is None or pod.node is not None or pod.gated or not pod.unschedulable:
            note.unbound = None
        elif note.unbound is None or note.unbound[0] != pod.uid:
            note.unbound = (pod.uid, now)
        if not held:
            note.give_back = False
        elif note.blocked is not None and now >= note.blocked.since + self._settings.bind_timeout:
            self._hold_off(note, now)
        return View(
            sharepod=sharepod,
            pod=pod,
            held=held,
            lost=_as_evicted(self._model.lost_pods.get(tenant), note),
            returned=frozenset(note.returned),
            unbound_since=note.unbound[1] if note.unbound is not None else None,
            give_back=note.give_back,
            blocked_until=note.blocked.until if note.blocked is not None else 0.0,
            now=now,
            bind_timeout=self._settings.bind_timeout,
            unclear=self._model.unclear(tenant),
        )

    def _held(self, node: str, tenant: str, note: Note) -> Held:
        wanted = next(row for name, row in self._model.cluster.reservations_of(TenantId(tenant)) if name == node)
        gpunode = self._model.gpunodes.named(node)
        written = gpunode.rows.get(tenant) if gpunode is not None else None
        if gpunode is None or written is None:
            return Held(node=node, wanted=wanted, written=None)
        drained = False
        if written.state is TenantState.RELEASING:
            since = note.release_generation.setdefault(node, gpunode.generation)
            seen = next((item for item in gpunode.status.tenants if item.id == tenant), None)
            drained = seen is not None and seen.drained and (gpunode.status.observed_generation or 0) >= since
        return Held(
            node=node,
            wanted=wanted,
            written=written,
            drained=drained,
            override=self._override(node),
            forced=tenant in gpunode.forced,
        )

    def _override(self, name: str) -> str | None:
        node = self._model.nodes.named(name)
        if node is not None:
            return "the node is out of service" if node.out_of_service else None
        return lifecycle.NODE_GONE if name in self._model.gone_nodes else None

    def _hold_off(self, note: Note, now: float) -> None:
        """Its Pod cannot be made for long: others get the share, and it is placed again later."""
        note.give_back = True
        waits = note.blocked is not None and note.blocked.reason == POD_TERMINATING
        note.not_before = now + (_LOOK_AGAIN if waits else self._pause(note))
        if note.blocked is not None:  # still the reason to show
            note.blocked = replace(note.blocked, since=note.not_before, until=note.not_before)

    def stay_away(self, node: str, tenant: str, why: str) -> None:
        """Its reservation there was refused by the API server."""
        note, now = self._notes.of(tenant), self._clock()
        pause = self._pause(note)
        note.not_before = now + pause
        note.avoid[node] = (f"has a ledger that could not be written: {why}", now + 2 * pause)

    def _pause(self, note: Note) -> float:
        """How long to stay away after one more failure."""
        note.given_back += 1
        return min(_LONGEST_PAUSE, self._settings.bind_timeout * 2.0 ** min(note.given_back - 1, 10))

    async def _sharepod_is_gone(self, view: View, tenant: str) -> bool:
        """Confirmed by a GET; where it is there after all, it is taken in."""
        name, namespace = self._name(view)
        try:
            raw = await self._client.get(SHAREPODS, name, namespace)
        except NotFoundError:
            return True
        if str(raw["metadata"]["uid"]) != tenant:
            return True
        self._model.sharepods.revive(tenant)
        self._model.put_sharepod(raw)
        return False

    @staticmethod
    def _name(view: View) -> tuple[str, str]:
        """Name and namespace of the tenant's SharePod, which are its Pod's too."""
        known = view.sharepod or view.pod
        if known is not None:
            return known.name, known.namespace
        return view.held[0].wanted.pod_name, view.held[0].wanted.namespace

    # Acting

    async def _act(self, view: View, tenant: str, note: Note, step: lifecycle.Step) -> Finish | None:
        """Does the step; returns how the SharePod ends, if it does."""
        sharepod = view.sharepod
        if not isinstance(step, lifecycle.Place):
            self._resize_or_leave(view, tenant, note)
        match step:
            case lifecycle.Forget():
                self._model.lost_pods.pop(tenant, None)
                self._notes.forget(tenant)
            case lifecycle.Wait(until=float(until)):
                self.queue.add_after(tenant, until - view.now)
            case lifecycle.Place():
                if sharepod is not None and sharepod.priority_class is not None:
                    await self._learn_priority(sharepod.priority_class)
                self.loop.want_place(tenant)
            case lifecycle.CreatePod(node=node, row=row):
                assert sharepod is not None
                finish = await self._binder.create(sharepod, node, row, note, view.now)
                if note.blocked is not None:
                    self.queue.add_after(tenant, note.blocked.until - view.now)
                return finish
            case lifecycle.DeletePod(pod=pod):
                await self._binder.delete(pod)
            case lifecycle.TakeBack():
                await self._take_back(view, note, step)
                self.queue.add(tenant)
            case lifecycle.ClearPod():
                note.give_back = True
            case lifecycle.Unreserve(node=node):
                self._model.unreserve(node, tenant)
                self.queue.add(tenant)
            case lifecycle.BeginRelease(node=node):
                name, namespace = self._name(view)
                if await self._binder.absent(name, namespace, tenant):
                    self._model.cluster.set_releasing(node, TenantId(tenant))
                    self._ledger.add(node)
                else:
                    self.queue.add_after(tenant, _LOOK_AGAIN)
            case lifecycle.Remove(node=node, why=why):
                if self._ledger.leaving(node, tenant):
                    return None
                if await self._proofs.may_remove(view, tenant, *self._name(view), step):
                    self._remove(view, tenant, node, why)
                else:
                    self.queue.add_after(tenant, _LOOK_AGAIN)
            case Finish():
                if await self._proofs.ended(view, tenant, *self._name(view), step):
                    return step
                self.queue.add_after(tenant, _LOOK_AGAIN)
        return None

    async def _learn_priority(self, name: str) -> None:
        """Looks up a PriorityClass that no list has shown yet; one that does not exist counts as 0, and its Pod will be
        refused."""
        if name not in self._model.priorities:
            await self.read_priorities()
            self._model.priorities.setdefault(name, 0)

    def _resize_or_leave(self, view: View, tenant: str, note: Note) -> None:
        """Has the loop decide about another share while one is asked for; else it waits for nothing."""
        sharepod = view.sharepod
        if sharepod is not None and asks_for_another_share(self._model, view, note):
            in_use = note.resize_refusal is not None and note.resize_refusal.outlook is Outlook.IN_USE
            self.loop.want_resize(tenant, changed=in_use or note.resize_asked != sharepod.generation)
            note.resize_asked = sharepod.generation
        else:
            note.resize_refusal = None
            self.loop.leave(tenant)

    async def _take_back(self, view: View, note: Note, step: lifecycle.TakeBack) -> None:
        pod = step.pod
        if not await self._binder.take_back(pod, note):
            return
        now = self._clock()
        pause = self._pause(note)
        note.give_back = True
        if pod.pin is not None:
            note.avoid[pod.pin] = (f"was refused by kube-scheduler: {step.why}", now + pause)
        log.info(
            "took the pod back",
            tenant=pod.tenant,
            pod=f"{pod.namespace}/{pod.name}",
            node=pod.pin,
            why=step.why,
        )
        if view.sharepod is not None:
            text = f"took the pod back from {pod.pin}, it is placed again: {step.why}"
            self._events.warning(KIND, view.sharepod, "PodTakenBack", "Bind", text)

    def _remove(self, view: View, tenant: str, node: str, why: str) -> None:
        log.info("tenant leaves its node", tenant=tenant, node=node, why=why)
        metrics.RELEASES.labels(
            "agent" if why == "drained" else "override" if why != lifecycle.NEVER_BOUND else "unbound"
        ).inc()
        gpunode = self._model.gpunodes.named(node)
        if why not in ("drained", lifecycle.NEVER_BOUND) and gpunode is not None:
            name, namespace = self._name(view)
            text = f"gave away the share of {namespace}/{name} ({tenant}): {why}"
            self._events.warning("GPUNode", gpunode, "ShareGivenAway", "Release", text)
        self._notes.of(tenant).release_generation.pop(node, None)
        self._ledger.remove(node, tenant)

    async def _watch(self, view: View, sharepod: SharePodFacts, note: Note) -> None:
        """Ends the Pod where its share is not enforced and the policy says so."""
        again = await self._evictor.look(sharepod, view.pod, seen_by_agent(self._model, view), note)
        if again is not None:
            self.queue.add_after(sharepod.uid, again)
        elif note.eviction is not None and note.eviction.done is not None:
            self.queue.add(sharepod.uid)  # to show it


def _as_evicted(pod: PodFacts | None, note: Note) -> PodFacts | None:
    """A Pod that was evicted from here says so, however that was done."""
    eviction = note.eviction
    if pod is None or eviction is None or eviction.done is None or eviction.pod != pod.uid:
        return pod
    return replace(pod, disrupted=eviction.done)
