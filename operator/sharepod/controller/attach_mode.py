"""Attach mode: whether new Pods of SharePods get their GPUs by a ResourceClaim, or by the runtime class and a CSI
volume.

Guarantees:
- With the setting `csi` no call of the API server is made.
- While the API server does not answer, the mode stays as it is.
- After the kubelet refused an allocation or attached other GPUs, new Pods use CSI for `NOT_HONOURED_S`. Then claims are
  tried again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import structlog

from sharepod.api.claims.share_claims import Attach
from sharepod.api.objects import SHARE_CLAIMS_POLICY
from sharepod.kube import ApiError, NotFoundError

from .apiserver.client import POLICY_BINDINGS, Client
from .decisions.attaching import Attaching, AttachReason, AttachSituation, attaching
from .state.cluster_state import ClusterState

PERIOD_S = 5.0
"""Seconds between two checks, and so the longest delay until the mode follows a change of a node."""
NOT_HONOURED_S = 600.0
"""Seconds for which Pods are attached by CSI after an allocation was not honoured. So claims are used again at most ten
minutes after the cause is fixed. While the cause lasts, each trial of claims delays one Pod, by `bind_timeout`."""

log = structlog.get_logger(__name__)


class AttachMode:
    """Attach mode of the cluster, checked every `PERIOD_S`.

    Args:
        setting: The operator's setting.
        state: The cluster state, for the nodes' conditions.
        client: The API server.
        served: Returns True if the API server serves ResourceClaims.
        acts: Returns True while this process acts as the leader. Otherwise nothing is checked.
        on_changed: Called when the mode or its reason has changed.
        clock: Monotonic seconds.
    """

    def __init__(
        self,
        setting: Attach,
        state: ClusterState,
        client: Client,
        *,
        served: Callable[[], bool],
        acts: Callable[[], bool],
        on_changed: Callable[[], None],
        clock: Callable[[], float],
    ) -> None:
        self._setting = setting
        self._state = state
        self._client = client
        self._served = served
        self._acts = acts
        self._on_changed = on_changed
        self._clock = clock
        self._guarded: bool | None = None
        self._not_honoured: tuple[str, float] | None = None
        self.now = Attaching(setting is Attach.CLAIMS, AttachReason.SETTING)
        """Present mode."""

    def by_claims(self) -> bool:
        """Return True if a Pod that is created now gets its GPUs by a claim."""
        return self.now.by_claims

    def not_honoured(self, why: str) -> None:
        """Record that an allocation of the operator was refused or not honoured, and decide again. `why`: the reason as
        text."""
        self._not_honoured = (why, self._clock() + NOT_HONOURED_S)
        self._decide()

    async def run(self) -> None:
        """Check the mode every `PERIOD_S` until cancelled."""
        while True:
            if self._acts():
                await self.look()
            await asyncio.sleep(PERIOD_S)

    async def look(self) -> None:
        """Read whether the policy on claims is enforced, then decide the mode."""
        if self._setting is Attach.AUTO:
            try:
                await self._client.get(POLICY_BINDINGS, SHARE_CLAIMS_POLICY)
                self._guarded = True
            except NotFoundError:
                self._guarded = False
            except ApiError as error:
                log.warning("cannot read whether the policy on claims of SharePods is enforced", error=str(error))
        self._decide()

    def _decide(self) -> None:
        if self._not_honoured is not None and self._clock() >= self._not_honoured[1]:
            self._not_honoured = None
        situation = AttachSituation(
            setting=self._setting,
            served=self._served(),
            guarded=self._guarded,
            not_honoured=self._not_honoured[0] if self._not_honoured is not None else "",
        )
        found = attaching(situation, self._state.gpunodes)
        if found != self.now:
            self.now = found
            log.info("attaching", by_claims=found.by_claims, reason=found.reason.value, why=found.message)
            self._on_changed()
