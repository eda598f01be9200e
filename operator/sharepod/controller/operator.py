"""Operator: creates all parts, connects them, and runs them from the start of the process to its end.

Guarantees:
- The operator acts only while it leads, and only after each watch has delivered all events from before its leadership.
- The operator places nothing while any watch has been silent for longer than `watch_freshness.BELIEF_S`.
- If a part fails or ends, `run` raises an error that names the part.
- On shutdown the operator first stops acting, then releases its Lease.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import structlog

from sharepod.controller.apiserver.client import Client
from sharepod.controller.apiserver.events import Events
from sharepod.controller.apiserver.leadership import Leadership
from sharepod.controller.apiserver.watches import Watches
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
from sharepod.tasks import Supervisor
from sharepod.web.api_reviews import ApiReviews
from sharepod.web.metrics_access import MetricsAccess, MetricsGuard

from .attach_mode import AttachMode
from .exposition import serve_health, serve_metrics
from .free_shares import FreeShares
from .garbage import Garbage
from .health import OperatorHealth
from .line_policy import LinePolicy
from .nodes import NodeReconciler
from .plugin_gpus import HolderReconciler
from .routes import Routes
from .self_test_claims import SelfTestClaims
from .settings import OperatorSettings

if TYPE_CHECKING:
    from .webhook.certificate_keeper import CertificateKeeper
    from .webhook.server import WebhookServer

_TICK_S = 1.0
"""Period, in seconds, of the checks of agents, watches, credentials and the daily garbage collection."""

log = structlog.get_logger(__name__)


def boot_seconds() -> float:
    """Return the seconds since this machine started, including the time that it was suspended."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


@dataclass(frozen=True, slots=True)
class OperatorPart:
    """Part of the operator that runs as a task of its own.

    Args:
        name: Name of the task, for `TaskEndedError`.
        run: Coroutine function that runs until cancelled.
        clear: Drops pending work; called each time that leadership is lost.
    """

    name: str
    run: Callable[[], Coroutine[Any, Any, None]]
    clear: Callable[[], None] = lambda: None


class Operator:
    """All parts of one operator. `clock`: monotonic seconds. `wall_ns`: this machine's time of day in nanoseconds."""

    def __init__(
        self,
        settings: OperatorSettings,
        config: Any,
        clock: Callable[[], float] | None = None,
        wall_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        self._settings = settings
        clock = self._clock = clock or boot_seconds
        self._active = False
        self._garbage = Garbage(clock)
        self._term = 0
        """Number of terms so far. A term begins when leadership is gained or lost, and when etcd was restored from a
        backup. A step that spans two terms is not used."""
        self._term_begun = asyncio.Event()
        pods, timeout = settings.pods(), settings.write_timeout
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

        def acts() -> bool:
            return self._active

        def lines_in_force() -> bool:
            return bool(self.line_policy.in_force)

        now_ms = TimeOfDay(lambda: self.client.clock_behind_s, clock, wall_ns)
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
        self.node_reconciler = NodeReconciler(self.state, self.client, self.ledger, self.events, settings, clock)
        pod_control = PodControl(
            self.state,
            self.client,
            self.events,
            pods,
            by_claims=lambda: self.attach_mode.by_claims(),
            lines_in_force=lines_in_force,
        )
        self.tenant_reconciler = TenantReconciler(
            self.state,
            self.client,
            self.ledger,
            pod_control,
            self.events,
            self.memos,
            settings,
            clock,
            now_ms.seconds,
            advertises=self.node_reconciler.advertises_enough,
        )
        self.loop = PlacementLoop(
            self.state,
            self.memos,
            may_act=self.may_place,
            on_decided=lambda _tenant, node: self.ledger.add(node),
            on_answered=lambda tenant: self.routes.tenant_changed(tenant),
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
            advertises=self.node_reconciler.advertises_enough,
        )
        self.tenant_reconciler.loop = self.claim_reconciler.loop = self.loop
        self.tenant_reconciler.line_pods.in_force = lines_in_force
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
            written=lambda: self.statements.consumed(),
            acts=acts,
            on_changed=self.loop.order_changed,
        )
        self.idle_reservations = IdleReservations(self.state, self.events, acts=acts, clock=clock)
        self.statements = Statements(
            self.client, lambda: list(self.state.gpunodes), acts, now_ms.seconds, settings.prices
        )
        self.node_reconciler.take_in = self.statements.take_in
        self.line_templates = LineTemplates(self.state.seen_claims, self.client, self.events, settings.writers)
        self.self_test_claims = SelfTestClaims(self.state.seen_claims, self.client, settings, clock, now_ms.seconds)
        self.line_policy = LinePolicy(self.client, acts, self._lines_changed)
        self.free_shares = FreeShares(self.state, self.client, settings.namespace, acts)
        self.attach_mode = AttachMode(
            settings.attach,
            self.state,
            self.client,
            served=lambda: self.watches.claims.listed,
            acts=acts,
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
            acts=self.may_place,
            lines_in_force=lines_in_force,
            clock=clock,
        )
        self.certificates = self._certificates() if settings.webhook_port else None
        self.tenant_reconciler.share_claims.on_denied = self.attach_mode.not_honoured
        self.routes = Routes(
            self.state,
            self.loop,
            tenants=self.tenant_reconciler,
            claims=self.claim_reconciler,
            nodes=self.node_reconciler,
            holders=self.holder_reconciler,
            line_templates=self.line_templates,
            self_test_claims=self.self_test_claims,
            acts=acts,
        )
        self.claim_reconciler.on_share_of_line = self.tenant_reconciler.on_lowered = self.routes.ledger_changed
        self.state.namespace_labels.on_gone = self.line_templates.forget
        self.state.seen_claims.on_claim_lacking = self.routes.claim_lacking
        self.state.seen_claims.on_self_test = self.routes.self_test_changed
        self.ledger.on_refused = self.tenant_reconciler.back_off_from_node
        self.ledger.on_removed = lambda node, _tenant: self.routes.row_removed(node)
        self.state.on_tenant_changed = self.routes.tenant_changed
        self.state.on_node_changed = self.routes.node_changed
        self.state.on_holders_changed = self.routes.holders_changed
        self.state.on_room_changed = self.loop.room_changed
        self.health = OperatorHealth(
            self.state,
            self.watches,
            (self.client, self.lease_client),
            self.leadership,
            self.loop,
            self.memos,
            queues={
                "tenant": self.tenant_reconciler.queue,
                "claim": self.claim_reconciler.queue,
                "node": self.node_reconciler.queue,
                "holder": self.holder_reconciler.queue,
                "preemption": self.preemptor.queue,
            },
            acts=acts,
            enqueue_tenant=self.routes.tenant_changed,
            webhook_unready=lambda: self.certificates.unready() if self.certificates else None,
            clock=clock,
        )

        self._parts = self._all_parts()

    def _all_parts(self) -> list[OperatorPart]:
        """Return the tasks that every operator runs. They are started and cleared in this order."""
        return [
            OperatorPart("lease", self.leadership.run),
            OperatorPart("activation", self._activate),
            OperatorPart("events", self.events.run),
            OperatorPart("statements", self.statements.run, self.statements.forget),
            OperatorPart("tenants", self.tenant_reconciler.run, self.tenant_reconciler.clear),
            OperatorPart("claims", self.claim_reconciler.run, self.claim_reconciler.queue.clear),
            OperatorPart("preemption", self.preemptor.run, self.preemptor.queue.clear),
            OperatorPart("line templates", self.line_templates.run, self.line_templates.queue.clear),
            OperatorPart("self-test claims", self.self_test_claims.run, self.self_test_claims.queue.clear),
            OperatorPart("nodes", self.node_reconciler.run, self.node_reconciler.queue.clear),
            OperatorPart("holders", self.holder_reconciler.run, self.holder_reconciler.clear),
            OperatorPart("placeholders", self.placeholders.run, self.placeholders.clear),
            OperatorPart("placement", self.loop.run, self.loop.clear),
            OperatorPart("ledger", self.ledger.run, self.ledger.abandon),
            OperatorPart("line policy", self.line_policy.run),
            OperatorPart("attach mode", self.attach_mode.run),
            OperatorPart("free shares", self.free_shares.run, self.free_shares.forget),
            OperatorPart("budgets", self.budgets.run),
            OperatorPart("idle reservations", self.idle_reservations.run),
            OperatorPart("resync", self._resync),
            OperatorPart("tick", self._tick),
            OperatorPart("garbage", self._garbage.run),
            *(OperatorPart(f"watch of {reflector.kind}", reflector.run) for reflector in self.watches.all),
        ]

    def _lines_changed(self) -> None:
        self.node_reconciler.lines_in_force = self.line_policy.in_force
        self.routes.all_nodes_changed()
        for item in self.state.lines:
            self.routes.tenant_changed(item.uid)

    def _attaching_changed(self) -> None:
        self.node_reconciler.attaching = self.attach_mode.now
        self.routes.all_nodes_changed()

    # Leadership

    def may_place(self) -> bool:
        """Return True if this process acts as the leader and every needed watch is fresh enough."""
        return self._active and self.leadership.acting() and self.watches.believed()

    def _gained(self) -> None:
        self._term += 1
        self._term_begun.set()

    def _lost(self) -> None:
        self._term += 1
        self._active = False
        for part in self._parts:
            part.clear()
        self.memos.clear()
        self.state.seen_claims.forget_unused()

    def _replaced(self) -> None:
        """Drop all pending work and derived state, and begin again as a new leader. Called when the API server's
        versions went back (etcd restored from a backup).
        """
        if self.leadership.acting():
            self._lost()
            self._gained()

    async def _activate(self) -> None:
        """After each gain of leadership: wait until the watches have caught up, then begin to act and enqueue every
        object.
        """
        while True:
            await self._term_begun.wait()
            self._term_begun.clear()
            term = self._term
            await self.watches.catch_up()
            # before the first Pod is created, which has a resource line if lines are in use
            await self.line_policy.look()
            if term != self._term or not self.leadership.acting():
                continue
            await self.attach_mode.look()
            if term != self._term or not self.leadership.acting():
                continue
            self.node_reconciler.check_agents(acting=False)  # every node is enqueued below
            self.budgets.begin()
            self.loop.take_over()
            self._active = True
            await self.routes.look_at_all()
            log.info("acting", sharepods=len(self.state.sharepods), nodes=len(self.state.nodes))

    # Loops

    async def _resync(self) -> None:
        """Enqueue every tenant and node every `resync_interval`."""
        while True:
            await asyncio.sleep(self._settings.resync_interval)
            if self._active:
                await self.routes.look_at_all()

    async def _tick(self) -> None:
        while True:
            self._garbage.settle()
            self.health.look()
            self.node_reconciler.check_agents(acting=self._active)
            await asyncio.sleep(_TICK_S)

    async def run(self, stop: asyncio.Event) -> None:
        """Run until `stop` is set. Raise `TaskEndedError` if a part fails or ends."""
        settings = self._settings
        servers: dict[str, Coroutine[Any, Any, None]] = {}
        if settings.metrics_port:
            guard = None if settings.metrics_access is MetricsAccess.OPEN else MetricsGuard(self._reviews.reviews)
            servers["metrics"] = serve_metrics(settings.bind_address, settings.metrics_port, self.health, guard)
        if settings.health_port:
            servers["health"] = serve_health(settings.bind_address, settings.health_port, self.health)
        if self.certificates is not None:
            servers["webhook certificates"] = self.certificates.run()
        try:
            with self._garbage:
                async with Supervisor() as supervisor:
                    for part in self._parts:
                        supervisor.start(part.name, part.run())
                    for name, server in servers.items():
                        supervisor.start(name, server)
                    await supervisor.wait(stop)
                    log.info("stopping")
        finally:
            await self.client.close()
            await self.lease_client.close()
            await self._reviews.close()

    def webhook(self) -> WebhookServer | None:
        """Return the server on which Kopf receives the API server's reviews of Pods. None if `webhook_port` is 0."""
        if self.certificates is None:
            return None
        from .webhook.server import WebhookServer

        return WebhookServer(self.certificates, self._settings.bind_address, self._settings.webhook_port)

    def _certificates(self) -> CertificateKeeper:
        """Create the keeper of the webhook's certificates. Its libraries take 9 MB and are imported only here, so an
        operator without a webhook does not need them.
        """
        from .webhook.certificate_keeper import CertificateKeeper

        return CertificateKeeper(
            self.client,
            self._settings.namespace,
            acts=lambda: self._active and self.leadership.acting(),
            clock=self._clock,
        )


async def _reviewing(config: Any) -> Connection:
    """Open the connection by which the operator asks the API server whether a client may read the metrics."""
    return Connection(config, "sharepod-operator")
