"""Operator: all parts of it, wired to each other, from the start of the process to its end.

Guarantees:
- It acts only while it leads, and only after each watch has said what happened before it began to lead.
- It places nothing on a belief older than `sights.BELIEF_S`.
- A part that fails ends `run` with its name.
- On its way out it stops acting first, then gives up its Lease.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Coroutine, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import structlog

from sharepod.api.pod import PodSettings
from sharepod.api.sharepod import Phase
from sharepod.api.versions.kind_versions import VERSIONS, KindVersions
from sharepod.budgets.budget import ConsumedTotal, TotalKey
from sharepod.controller.apiserver.client import Client
from sharepod.controller.apiserver.events import Events
from sharepod.controller.apiserver.leadership import Leadership
from sharepod.controller.apiserver.sights import BELIEF_S
from sharepod.controller.apiserver.watches import Watches
from sharepod.controller.apiserver.workqueue import WorkQueue
from sharepod.controller.budgets.budget_control import BudgetControl
from sharepod.controller.budgets.idle_reservations import IdleReservations
from sharepod.controller.budgets.time_of_day import TimeOfDay
from sharepod.controller.consumption.statements import Statements
from sharepod.controller.placing.ledger_writer import LedgerWriter
from sharepod.controller.placing.loop import PlacementLoop
from sharepod.controller.placing.making_room.moving import MoveLimits
from sharepod.controller.scaling.placeholders import Placeholders
from sharepod.controller.state.agent_leases import AgentLeases
from sharepod.controller.state.cluster_state import ClusterState
from sharepod.controller.state.memos import TenantMemos
from sharepod.controller.tenants.claim_reconciler import ClaimReconciler
from sharepod.controller.tenants.line_templates import LineTemplates
from sharepod.controller.tenants.pods import PodControl
from sharepod.controller.tenants.preemptor import Preemptor
from sharepod.controller.tenants.reconciler import TenantReconciler
from sharepod.kube import Connection
from sharepod.placement.state.types import Outlook, Refusal
from sharepod.tasks import Supervisor
from sharepod.web.api_reviews import ApiReviews
from sharepod.web.metrics_access import MetricsAccess, MetricsGuard

from . import metrics
from .attach_mode import AttachMode
from .conversion import ServingCertificate, serve_conversions
from .exposition import serve_health, serve_metrics
from .garbage import Garbage
from .line_policy import LinePolicy
from .nodes import NodeReconciler
from .plugin_gpus import HolderReconciler
from .settings import OperatorSettings

if TYPE_CHECKING:
    from .webhook.certificate_keeper import CertificateKeeper
    from .webhook.server import WebhookServer

_TICK_S = 1.0
"""Period of the checks of agents, watches and credentials, and of garbage collection."""
_STALLED_S = 30.0
"""Seconds without a tick after which the health probe fails: longer than any step that works takes."""
_REJECTED_S = 60.0
"""Seconds for which credentials or certificate may be rejected before the process ends: the kubelet rotates a token
long before it expires, and a process that starts anew reads everything again."""

log = structlog.get_logger(__name__)


class RejectedError(Exception):
    """API server that has rejected this process's credentials, or shown another certificate, for too long."""


def boot_seconds() -> float:
    """Return the seconds since this machine started, the time that it was suspended included."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class Operator:
    """Operator: all parts, wired to each other. `kinds`: the versions that it converts objects between."""

    def __init__(self, settings: OperatorSettings, config: Any, kinds: Mapping[str, KindVersions] = VERSIONS) -> None:
        clock = boot_seconds
        self._kinds = kinds
        self._clock = clock
        self._settings = settings
        self._active = False
        self._believed = True
        self._ticked = clock()
        self._garbage = Garbage(clock)
        self._term = 0
        """Counts the times that leadership was gained or lost, or everything was replaced."""
        self._term_begun = asyncio.Event()
        pods = PodSettings(
            runtime_class=settings.runtime_class or "",
            tolerations=tuple(toleration.manifest() for toleration in settings.tolerations),
        )
        timeout = settings.write_timeout
        self.lease_client = Client(config, read_timeout=timeout, write_timeout=timeout, tries=1)
        self._reviews = ApiReviews(partial(_reviewing, config))
        self.leadership = Leadership(
            self.lease_client,
            namespace=settings.namespace,
            identity=settings.identity,
            duration=settings.lease_duration,
            renew_deadline=settings.renew_deadline,
            retry_period=settings.retry_period,
            on_gained=self._gained,
            on_lost=self._lost,
            clock=clock,
        )
        self.client = Client(
            config,
            read_timeout=settings.read_timeout,
            write_timeout=settings.write_timeout,
            page_size=settings.page_size,
            may_write=self.leadership.acting,
        )
        now_ms = TimeOfDay(lambda: self.client.clock_behind_s, clock)
        self.state = ClusterState(
            pods,
            AgentLeases(settings.agent_duration, clock),
            interactive_per_gpu=settings.interactive_per_gpu,
            max_excluded_gpus=settings.max_excluded_gpus,
            namespace=settings.namespace,
        )
        self.watches = Watches(
            self.state,
            self.client,
            namespace=settings.namespace,
            on_lease=self.leadership.noticed,
            on_replaced=self._replaced,
            clock=clock,
        )
        self.memos = TenantMemos()
        self.events = Events(self.client, settings.identity, clock)
        self.ledger = LedgerWriter(self.state, self.client, self.events, settings.writers)
        pod_control = PodControl(
            self.state,
            self.client,
            self.events,
            pods,
            by_claims=lambda: self.attach_mode.by_claims(),
            lines_in_force=lambda: bool(self.line_policy.in_force),
        )
        self.tenant_reconciler = TenantReconciler(
            self.state, self.client, self.ledger, pod_control, self.events, self.memos, settings, clock, now_ms.seconds
        )
        self.loop = PlacementLoop(
            self.state,
            self.memos,
            may_act=lambda: self._active and self.leadership.acting() and self.watches.believed(),
            on_decided=lambda _tenant, node: self.ledger.add(node),
            on_answered=self._enqueue_tenant,
            clock=clock,
            wall=now_ms.seconds,
            head_reservation_after=settings.keep_after,
            head_reservation_for=settings.keep_for,
            head_idle_ratio=settings.keep_idle_ratio,
            on_holder_wanted=lambda request, place: self.holder_reconciler.want(request, place),
            preemptions_per_minute=settings.preemptions_per_minute,
            moves=MoveLimits(settings.moves_per_minute, settings.move_after),
            fair_wait=settings.fair_wait,
            standing=lambda namespace: self.budgets.standing(namespace),
        )
        self.holder_reconciler = HolderReconciler(
            self.state, self.client, self.ledger, self.events, self.memos, settings, clock, self.loop.retry
        )
        self.ledger.holders_of = self.holder_reconciler.rows
        self.state.on_holders_changed = self._enqueue_holders
        self.claim_reconciler = ClaimReconciler(
            self.state,
            self.client,
            self.ledger,
            self.events,
            self.memos,
            settings,
            clock,
            now_ms.seconds,
            listed=lambda: self.watches.claims.listed,
        )
        self.tenant_reconciler.loop = self.claim_reconciler.loop = self.loop
        self.preemptor = Preemptor(
            self.state,
            self.client,
            self.events,
            self.memos,
            self.loop.preemptions,
            self.loop.victims_seen,
            clock,
        )
        self.loop.preemptions.on_begun = self.preemptor.begin
        self.loop.preemptions.moving.on_moved = self.preemptor.moved
        self.budgets = BudgetControl(
            self.state,
            self.client,
            self.events,
            namespace=settings.namespace,
            half_life_s=settings.usage_half_life,
            now_ms=now_ms,
            written=self._totals_written,
            acts=lambda: self._active,
            on_changed=self.loop.order_changed,
        )
        self.idle_reservations = IdleReservations(self.state, self.events, acts=lambda: self._active, clock=clock)
        self.node_reconciler = NodeReconciler(self.state, self.client, self.ledger, self.events, settings, clock)
        self.statements = Statements(self.client, lambda: list(self.state.gpunodes), lambda: self._active)
        self.node_reconciler.take_in = self.statements.take_in
        self.line_templates = LineTemplates(self.state.seen_claims, self.client, settings.writers)
        self.line_policy = LinePolicy(self.client, lambda: self._active, self._lines_changed)
        self.attach_mode = AttachMode(
            settings.attach,
            self.state,
            self.client,
            served=lambda: self.watches.claims.listed,
            acts=lambda: self._active,
            on_changed=self._attaching_changed,
            clock=clock,
        )
        self.placeholders = Placeholders(
            self.state,
            self.client,
            self.events,
            self.memos,
            self.loop,
            settings,
            acts=lambda: self._active and self.watches.believed(),
            lines_in_force=lambda: bool(self.line_policy.in_force),
            clock=clock,
        )
        self.certificates = self._certificates() if settings.webhook_port else None
        self.tenant_reconciler.share_claims.on_denied = self.attach_mode.doubt
        self.claim_reconciler.on_share_of_line = self.tenant_reconciler.on_lowered = self._enqueue_node
        self.state.seen_claims.on_claim_lacking = self._claim_lacking
        self.ledger.on_refused = self.tenant_reconciler.back_off_from_node
        self.ledger.on_removed = lambda node, _tenant: self._row_removed(node)
        self.state.on_tenant_changed = self._enqueue_tenant
        self.state.on_node_changed = self._node_changed
        self.state.on_room_changed = self.loop.room_changed

    def _totals_written(self) -> dict[TotalKey, ConsumedTotal] | None:
        """Return what each namespace has had by model, as it is written; None as long as it is not read."""
        if not self.statements.complete:
            return None
        return {
            (namespace, model): ConsumedTotal(had.held_ms, had.reserved_ms)
            for namespace in self.statements.namespaces()
            for model, had in self.statements.totals(namespace).items()
        }

    def _lines_changed(self) -> None:
        self.node_reconciler.lines_in_force = self.line_policy.in_force
        for node in self.state.nodes:
            self._enqueue_node(node.name)

    def _attaching_changed(self) -> None:
        self.node_reconciler.attaching = self.attach_mode.now
        for node in self.state.nodes:
            self._enqueue_node(node.name)

    # Enqueueing

    def _claim_lacking(self, namespace: str) -> None:
        if self._active:
            self.line_templates.want(namespace)

    def _enqueue_tenant(self, tenant: str) -> None:
        if self._active:
            self._queue_of(tenant).add(tenant)

    def _queue_of(self, tenant: str) -> WorkQueue[str]:
        return self.claim_reconciler.queue if self.state.is_claim(tenant) else self.tenant_reconciler.queue

    def _enqueue_node(self, name: str) -> None:
        if self._active:
            self.node_reconciler.queue.add(name)

    def _enqueue_holders(self, node: str) -> None:
        if self._active:
            self.holder_reconciler.queue.add(node)

    def _row_removed(self, node: str) -> None:
        self._enqueue_node(node)
        self._enqueue_holders(node)

    def _node_changed(self, name: str) -> None:
        self._enqueue_node(name)
        self._enqueue_holders(name)
        if self.state.nodes.named(name) is None:
            self.loop.node_left()

    def _enqueue_all(self) -> None:
        for tenant in self.state.tenants():
            self._queue_of(tenant).add_resync(tenant)
        for name in {item.name for item in self.state.nodes} | {item.name for item in self.state.gpunodes}:
            self.node_reconciler.queue.add_resync(name)
            self.holder_reconciler.queue.add_resync(name)
        for namespace in self.state.seen_claims.lacking():
            self.line_templates.want(namespace)
        self.loop.room_changed()

    # Leadership

    def _gained(self) -> None:
        self._term += 1
        self._term_begun.set()

    def _lost(self) -> None:
        self._term += 1
        self._active = False
        self.statements.forget()
        self.tenant_reconciler.clear()
        self.claim_reconciler.queue.clear()
        self.preemptor.queue.clear()
        self.line_templates.queue.clear()
        self.node_reconciler.queue.clear()
        self.holder_reconciler.clear()
        self.placeholders.clear()
        self.loop.clear()
        self.ledger.abandon()
        self.memos.clear()
        self.state.seen_claims.doubt()

    def _replaced(self) -> None:
        """Begin anew: what was concluded from objects of a history that no longer exists is worth nothing."""
        if self.leadership.acting():
            self._lost()
            self._gained()

    async def _activate(self) -> None:
        """Begin to act each time that leadership was gained: once the watches have caught up, look at everything."""
        while True:
            await self._term_begun.wait()
            self._term_begun.clear()
            term = self._term
            await self.watches.catch_up()
            await self.line_policy.look()  # the first Pod that is made carries its line where lines are in use
            if term != self._term or not self.leadership.acting():
                continue
            await self.attach_mode.look()
            if term != self._term or not self.leadership.acting():
                continue
            self.node_reconciler.check_agents(acting=False)  # all are enqueued next
            self.budgets.begin()
            self.loop.take_over()
            self._active = True
            self._enqueue_all()
            log.info("acting", sharepods=len(self.state.sharepods), nodes=len(self.state.nodes))

    # Loops

    async def _resync(self) -> None:
        """Look at every tenant and node again every `resync_interval`."""
        while True:
            await asyncio.sleep(self._settings.resync_interval)
            if self._active:
                self._enqueue_all()

    async def _tick(self) -> None:
        while True:
            self._ticked = self._clock()
            self._garbage.settle()
            self._check_credentials()
            self._check_beliefs()
            self.node_reconciler.check_agents(acting=self._active)
            await asyncio.sleep(_TICK_S)

    def _check_credentials(self) -> None:
        seconds = max(self.client.rejected_for_s, self.lease_client.rejected_for_s)
        if seconds > _REJECTED_S:
            raise RejectedError(
                f"the API server has rejected the credentials (401), or shown a certificate that is not trusted, for "
                f"{seconds:.0f} s; check the ServiceAccount's token and CA, or the kubeconfig"
            )

    def _check_beliefs(self) -> None:
        """Wake the placement loop once the watches are worth believing again; say when they are not."""
        believed = self.watches.believed()
        if believed and not self._believed:
            log.info("watches are heard again: placing")
            self.loop.room_changed()
        elif not believed and self._active:
            kinds = self.watches.stale()
            if self._believed:
                log.warning("watches are silent: placing nothing", kinds=kinds)
            self._tell_waiting(kinds)
        self._believed = believed

    def _tell_waiting(self, kinds: list[str]) -> None:
        """Tell the SharePods that wait and have no answer yet why they get none."""
        headline = (
            f"the operator has heard nothing of {', '.join(kinds)} for {BELIEF_S:.0f} s and places nothing meanwhile"
        )
        for tenant in self.loop.waiting():
            memo = self.memos.of(tenant)
            if memo.refusal is None:
                memo.refusal = Refusal(outlook=Outlook.UNSEEN, headline=headline)
                self._enqueue_tenant(tenant)

    # Probes and metrics

    def measure(self) -> None:
        """Bring the gauges up to date that are read when they are asked for."""
        for sight in self.watches.sights():
            metrics.WATCH_AGE_SECONDS.labels(sight.kind).set(sight.silent_s)
        phases = Counter(item.status.phase for item in self.state.sharepods)
        for phase in Phase:
            metrics.SHAREPODS.labels(phase.value).set(phases[phase])
        metrics.UNENFORCED.set(self.state.ledgers.unenforced())
        metrics.OVERCOMMITS.set(len(self.state.cluster.overcommits()))
        queues = {
            "tenant": self.tenant_reconciler.queue,
            "claim": self.claim_reconciler.queue,
            "node": self.node_reconciler.queue,
            "holder": self.holder_reconciler.queue,
            "preemption": self.preemptor.queue,
        }
        for name, queue in queues.items():
            metrics.QUEUE_DEPTH.labels(name).set(len(queue))
            metrics.QUEUE_AGE_SECONDS.labels(name).set(queue.oldest_s())

    def unready(self) -> str | None:
        """Return which kinds have not been listed, or that the webhook does not serve yet; None if it is ready."""
        return self.watches.unready() or (self.certificates.unready() if self.certificates else None)

    def leads(self) -> bool:
        """Return whether this process leads."""
        return self.leadership.acting()

    def healthy(self) -> str:
        """Return a word for the health probe. Raise `RuntimeError` if a restart can help."""
        silent = self._clock() - self._ticked
        if silent > _STALLED_S:
            raise RuntimeError(f"the event loop has stood still for {silent:.0f} s")
        if (why := self.watches.blind()) is not None:
            raise RuntimeError(why)
        return "leads" if self.leadership.acting() else "stands by"

    async def run(self, stop: asyncio.Event) -> None:
        """Run until `stop` is set. Raise `TaskEndedError` if a part fails or ends."""
        parts: dict[str, Coroutine[Any, Any, None]] = {
            "lease": self.leadership.run(),
            "activation": self._activate(),
            "events": self.events.run(),
            "placement": self.loop.run(),
            "ledger": self.ledger.run(),
            "tenants": self.tenant_reconciler.run(),
            "claims": self.claim_reconciler.run(),
            "preemption": self.preemptor.run(),
            "line templates": self.line_templates.run(),
            "line policy": self.line_policy.run(),
            "attach mode": self.attach_mode.run(),
            "nodes": self.node_reconciler.run(),
            "holders": self.holder_reconciler.run(),
            "placeholders": self.placeholders.run(),
            "statements": self.statements.run(),
            "budgets": self.budgets.run(),
            "idle reservations": self.idle_reservations.run(),
            "resync": self._resync(),
            "tick": self._tick(),
        }
        parts |= {f"watch of {reflector.kind}": reflector.run() for reflector in self.watches.all}
        if self._settings.metrics_port:
            open_to_all = self._settings.metrics_access is MetricsAccess.OPEN
            guard = MetricsGuard(None if open_to_all else self._reviews.reviews)
            parts["metrics"] = serve_metrics(self._settings.bind_address, self._settings.metrics_port, self, guard)
        if self._settings.health_port:
            parts["health"] = serve_health(self._settings.bind_address, self._settings.health_port, self)
        if self.certificates is not None:
            parts["webhook certificates"] = self.certificates.run()
        if (conversions := self._conversions()) is not None:
            parts["conversion"] = conversions
        try:
            with self._garbage:
                async with Supervisor() as supervisor:
                    for name, part in parts.items():
                        supervisor.start(name, part)
                    await supervisor.wait(stop)
                    log.info("stopping")
        finally:
            await self.client.close()
            await self.lease_client.close()
            await self._reviews.close()

    def webhook(self) -> WebhookServer | None:
        """Return the server that Kopf is to take reviews of Pods from; None without a port."""
        if self.certificates is None:
            return None
        from .webhook.server import WebhookServer

        return WebhookServer(self.certificates, self._settings.bind_address, self._settings.webhook_port)

    def _certificates(self) -> CertificateKeeper:
        """Make the keeper of the webhook's certificates: what makes these takes 9 MB, which are loaded only here."""
        from .webhook.certificate_keeper import CertificateKeeper

        return CertificateKeeper(
            self.client,
            self._settings.namespace,
            acts=lambda: self._active and self.leadership.acting(),
            clock=self._clock,
        )

    def _conversions(self) -> Coroutine[Any, Any, None] | None:
        """Return the conversion server; None without a port, and where every kind has one version."""
        settings = self._settings
        if not settings.conversion_port or not any(each.further for each in self._kinds.values()):
            return None
        assert settings.conversion_certificate is not None
        assert settings.conversion_key is not None
        certificate = ServingCertificate(settings.conversion_certificate, settings.conversion_key)
        return serve_conversions(settings.bind_address, settings.conversion_port, self._kinds, certificate)


async def _reviewing(config: Any) -> Connection:
    """Open the connection by which the API server is asked who may read the metrics."""
    return Connection(config, "sharepod-operator")
