"""Placeholders: keeps one Pod for each share that fits on no node, so that a cluster autoscaler adds nodes. If more
shares wait than there may be placeholders, each has one for a time, in turn.

Guarantees:
- While the setting `placeholders` is 0, a leader calls the API server only once: to delete the placeholders that exist
  from an earlier setting.
- Existing placeholders are read from the API server in each round. So a new leader keeps them, each for its full time.
- If the request of a share changes, its placeholder is created again.
- A placeholder that the API server refuses does not prevent others.
- The operator writes the condition Unschedulable only into placeholders, and only if the placeholder matches the
  share's present request.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import structlog

from sharepod.api.objects import PLACEHOLDER_FOR_ANNOTATION, PLACEHOLDER_LABEL, PLACEHOLDER_SPEC_ANNOTATION
from sharepod.api.units import TenantId
from sharepod.controller import metrics
from sharepod.controller.apiserver.client import PODS, Client, NotLeadingError
from sharepod.controller.apiserver.events import Events
from sharepod.controller.placing.claim_requests import waiting_pod
from sharepod.controller.placing.loop import PlacementLoop
from sharepod.controller.settings import OperatorSettings
from sharepod.controller.state.cluster_state import ClusterState
from sharepod.controller.state.memos import TenantMemos
from sharepod.kube import (
    AlreadyExistsError,
    ApiError,
    ConflictError,
    ForbiddenError,
    InvalidError,
    Json,
    NotFoundError,
)
from sharepod.placement.state.types import Outlook, PlacementRequest

from .asking_turns import AskingLimits, AskingTurns
from .placeholder_pod import PlaceholderSettings, new_node_helps, placeholder_name, placeholder_pod, unschedulable

PERIOD_S = 5.0
"""Seconds between two rounds: half of Cluster Autoscaler's scan interval."""
_BEGINNING_S = 30.0
"""Seconds after which a new leader has decided on every waiting share. Until then, existing placeholders of undecided
shares stay."""
_SLICE = 32
"""Number of shares that are handled before other tasks get a turn: 0.5 ms."""
_WITHOUT_ROOM = (Outlook.WAITING, Outlook.NEVER)

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class _There:
    """Placeholder in the API server. `tenant`, `namespace`: of its share. `asks`: hash of its Pod spec. `marked`: True
    if it has the condition Unschedulable."""

    tenant: str
    name: str
    uid: str
    namespace: str
    asks: str
    marked: bool


class Placeholders:
    """Placeholders of the cluster, updated every `PERIOD_S`.

    Args:
        state: The cluster state.
        client: The API server.
        events: Recorder of Events for the owners of shares.
        memos: The tenants' memos, with the refusals.
        loop: The placement loop, for the waiting tenants and their requests.
        settings: Settings of the operator.
        acts: Returns True while this process leads and its watches are fresh. Otherwise a round does nothing.
        lines_in_force: Returns True if nodes advertise the resources of the resource line.
        clock: Monotonic seconds.
    """

    def __init__(
        self,
        state: ClusterState,
        client: Client,
        events: Events,
        memos: TenantMemos,
        loop: PlacementLoop,
        settings: OperatorSettings,
        *,
        acts: Callable[[], bool],
        lines_in_force: Callable[[], bool],
        clock: Callable[[], float],
    ) -> None:
        self._state = state
        self._client = client
        self._events = events
        self._memos = memos
        self._loop = loop
        self._settings = settings
        self._acts = acts
        self._lines_in_force = lines_in_force
        self._clock = clock
        self._turns = AskingTurns(
            AskingLimits(
                most=settings.placeholders,
                per_namespace=settings.placeholders_per_namespace,
                after_s=settings.placeholder_after,
                for_s=settings.placeholder_for,
            )
        )
        self._coming: dict[str, float] = {}
        """By name of a node that has not reported GPUs yet: time since which this process knows the node."""
        self._refused: dict[str, str] = {}
        """Reason why the API server last refused a placeholder, by tenant."""
        self._begun: float | None = None
        """Time of this leader's first round."""
        self._idle = False
        """True once no placeholder is left and none will be created, because the setting is 0."""

    async def run(self) -> None:
        """Run a round every `PERIOD_S` until cancelled."""
        while True:
            if self._acts() and not self._idle:
                try:
                    await self.look()
                except (ApiError, NotLeadingError) as error:
                    log.warning("cannot bring placeholders up to date", error=str(error))
            await asyncio.sleep(PERIOD_S)

    def clear(self) -> None:
        """Drop all turns: leadership was lost."""
        self._turns.clear()
        self._coming.clear()
        self._begun, self._idle = None, False

    async def look(self) -> None:
        """Run one round: update the placeholders. Raises `ApiError` and `NotLeadingError`.

        1. Find the shares that fit on no node, and among them the shares that have a turn now.
        2. Delete placeholders that are not wanted, or whose request has changed.
        3. Create missing placeholders, and mark existing placeholders as Unschedulable.
        """
        short = await self._short()
        there = {one.tenant: one for one in await self._there()}
        self._begun = self._clock() if self._begun is None else self._begun
        kept = {tenant: one for tenant, one in there.items() if tenant not in short and self._undecided(tenant)}
        asking = self._turns.asking(
            ((tenant, request.namespace) for tenant, request in short.items()),
            self._clock(),
            node_comes=self._node_comes(),
            there=there.keys(),
            kept=[one.namespace for one in kept.values()],
        )
        bodies = {tenant: placeholder_pod(short[tenant], self._pod_settings()) for tenant in asking}
        for tenant, one in list(there.items()):
            if tenant in kept:
                continue
            if tenant not in bodies or one.asks != _asks(bodies[tenant]):
                await self._delete(one)
                del there[tenant]
        for tenant, body in bodies.items():
            found = there.get(tenant) or await self._create(short[tenant], body)
            if found is not None and not found.marked:
                await self._mark(found, short[tenant])
        self._refused = {tenant: why for tenant, why in self._refused.items() if tenant in bodies}
        metrics.PLACEHOLDERS.set(len(bodies))
        self._idle = self._settings.placeholders == 0

    # Deciding

    async def _short(self) -> dict[str, PlacementRequest]:
        """Return the requests that fit on no node although a new node could fit them, by tenant, the oldest first."""
        found: dict[str, PlacementRequest] = {}
        if not self._settings.placeholders:
            return found
        for number, tenant in enumerate(self._loop.waiting()):
            if number % _SLICE == _SLICE - 1:
                await asyncio.sleep(0)
            refusal = self._memos.of(tenant).refusal
            if refusal is None or refusal.outlook not in _WITHOUT_ROOM or self._loop.preemptions.of(tenant) is not None:
                continue
            request = self._loop.requests.of(tenant)
            if request is not None and new_node_helps(request, refusal):
                found[tenant] = request
        return found

    def _undecided(self, tenant: str) -> bool:
        """Return True if this leader has not decided on a tenant yet and has begun less than `_BEGINNING_S` ago."""
        known = bool(self._state.asking(tenant) or self._state.seen_claims.claims.get(tenant))
        placed = bool(self._state.cluster.reservations_of(TenantId(tenant)))
        early = self._begun is not None and self._clock() < self._begun + _BEGINNING_S
        return early and known and not placed and self._memos.of(tenant).refusal is None

    def _node_comes(self) -> bool:
        """Return True if a node of the pool is starting: it has reported no GPUs, and was seen first less than
        `placeholder_for` ago.
        """
        now = self._clock()
        new = {node.name for node in self._state.nodes if not self._has_told(node.name)}
        self._coming = {name: self._coming.get(name, now) for name in new}
        return any(now < since + self._settings.placeholder_for for since in self._coming.values())

    def _has_told(self, name: str) -> bool:
        gpunode = self._state.gpunodes.named(name)
        return gpunode is not None and bool(gpunode.status.gpus)

    def _pod_settings(self) -> PlaceholderSettings:
        settings = self._settings
        return PlaceholderSettings(
            namespace=settings.namespace,
            image=settings.holder_image,
            priority_class=settings.placeholder_priority_class,
            with_line=self._lines_in_force(),
        )

    # Acting

    async def _there(self) -> Iterable[_There]:
        found: list[Json] = []
        await self._client.read_all(PODS, self._settings.namespace, labels=PLACEHOLDER_LABEL, take=found.append)
        return [_read(raw) for raw in found if "deletionTimestamp" not in raw["metadata"]]

    async def _create(self, request: PlacementRequest, body: Json) -> _There | None:
        try:
            made = await self._client.create(PODS, body, self._settings.namespace, strict=True)
        # the former placeholder is still being deleted, or an answer was lost: the next round handles both
        except AlreadyExistsError:
            return None
        except ApiError as error:
            if not (isinstance(error, ForbiddenError | InvalidError) or error.of_admission):
                raise
            # Only log the refusal: the other placeholders must still be created.
            if self._refused.get(str(request.tenant)) != error.message:
                self._refused[str(request.tenant)] = error.message
                log.warning("the API server refuses a placeholder", tenant=request.tenant, error=error.message)
            return None
        log.info("requests a node", tenant=request.tenant, waits=f"{request.namespace}/{request.name}")
        self._tell(request)
        return _read(made)

    async def _mark(self, one: _There, request: PlacementRequest) -> None:
        body = {"metadata": {"uid": one.uid}, "status": unschedulable(request)}
        try:
            await self._client.patch_status(PODS, one.name, body, self._settings.namespace)
        except (ConflictError, NotFoundError):
            return

    async def _delete(self, one: _There) -> None:
        log.info("no longer requests a node", tenant=one.tenant)
        try:
            await self._client.delete(PODS, one.name, self._settings.namespace, uid=one.uid)
        except (ConflictError, NotFoundError):
            return

    def _tell(self, request: PlacementRequest) -> None:
        """Notify the owner of a share that a node is requested."""
        where = f"{self._settings.namespace}/{placeholder_name(str(request.tenant))}"
        text = f"no node has room: Pod {where} asks the cluster's autoscaler for one"
        sharepod = self._state.asking(str(request.tenant))
        claim = self._state.seen_claims.claims.get(str(request.tenant))
        pod = waiting_pod(self._state, claim) if claim is not None else None
        if sharepod is not None:
            self._events.normal(sharepod.kind, sharepod, "NodeAskedFor", "Place", text)
        elif pod is not None:
            self._events.normal("Pod", pod, "NodeAskedFor", "Place", text)


def _read(raw: Json) -> _There:
    metadata = raw["metadata"]
    annotations = metadata.get("annotations") or {}
    conditions = (raw.get("status") or {}).get("conditions") or ()
    return _There(
        tenant=str(metadata["labels"][PLACEHOLDER_LABEL]),
        name=str(metadata["name"]),
        uid=str(metadata["uid"]),
        namespace=str(annotations.get(PLACEHOLDER_FOR_ANNOTATION) or "").partition("/")[0],
        asks=str(annotations.get(PLACEHOLDER_SPEC_ANNOTATION) or ""),
        marked=any(one.get("type") == "PodScheduled" and one.get("reason") == "Unschedulable" for one in conditions),
    )


def _asks(body: Json) -> str:
    return str(body["metadata"]["annotations"][PLACEHOLDER_SPEC_ANNOTATION])
