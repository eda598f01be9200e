"""Allocation of self-test claims, with which an agent tests whether its node attaches a claim's devices. Such a claim
has no share, no row in a ledger and no fixed node.

Guarantees:
- Only claims of class `self-test.sharepod.dev` in the operator's own namespace are allocated here.
- The finalizer is written before the allocation. Both writes name the resourceVersion that a GET returned just before.
- If kube-scheduler removes the allocation because the Pod fits nowhere, the allocation is written again, at most every
  `_TAKEN_S`.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable

import structlog

from sharepod.api.claims.self_test_claim import has_name_of_self_test, request_of_self_test, self_test_allocation
from sharepod.api.objects import CLAIM_FINALIZER
from sharepod.kube import ConflictError, Json, NotFoundError

from .apiserver.client import CLAIMS, Client
from .apiserver.workqueue import WorkQueue
from .settings import OperatorSettings
from .state.claims_seen import ClaimsSeen

_AGAIN_S = 1.0
"""Seconds until the retry for a claim that changed between its read and its write."""
_TAKEN_S = 60.0
"""Least seconds between two allocations of one claim. kube-scheduler removes the allocation each time it finds no node
for the Pod, so without this pause both would write in a loop."""

log = structlog.get_logger(__name__)


class SelfTestClaims:
    """Reconciler of self-test claims: allocates each ResourceClaim with which an agent tests its node. Keys are uids.

    Args:
        seen: The claims that the watch shows.
        client: The API server.
        settings: The operator's settings. Used are its namespace and `writers`, the number of claims worked on at a
            time.
        clock: Monotonic seconds.
        wall: Seconds since the epoch.
    """

    def __init__(
        self,
        seen: ClaimsSeen,
        client: Client,
        settings: OperatorSettings,
        clock: Callable[[], float],
        wall: Callable[[], float],
    ) -> None:
        self._seen = seen
        self._client = client
        self._namespace = settings.namespace
        self._clock = clock
        self._wall = wall
        self._allocated: dict[str, float] = {}
        """For each claim's uid: time at which this process last allocated it."""
        self.queue: WorkQueue[str] = WorkQueue("self-test claim", self.reconcile, settings.writers)

    async def run(self) -> None:
        """Reconcile claims from the queue until cancelled."""
        await self.queue.run()

    def look_at_all(self) -> None:
        """Enqueue each claim of the self-test."""
        for claim in self._seen.claims:
            if claim.namespace == self._namespace and has_name_of_self_test(claim.name):
                self.queue.add_resync(claim.uid)

    async def reconcile(self, uid: str) -> None:
        """Allocate a claim if it has no allocation. Raises `ApiError` and `NotLeadingError`."""
        known = self._seen.claims.get(uid)
        if known is None:
            self._allocated.pop(uid, None)
            return
        if known.namespace != self._namespace:
            return
        try:
            await self._allocate(uid, await self._client.get(CLAIMS, known.name, known.namespace))
        except (ConflictError, NotFoundError):
            self.queue.add_after(uid, _AGAIN_S)

    async def _allocate(self, uid: str, claim: Json) -> None:
        metadata = claim["metadata"]
        name, request = metadata["name"], request_of_self_test(claim)
        done = request is None or (claim.get("status") or {}).get("allocation") is not None
        if done or metadata["uid"] != uid or metadata.get("deletionTimestamp"):
            return
        wait = self._allocated.get(uid, -_TAKEN_S) + _TAKEN_S - self._clock()
        if wait > 0:
            self.queue.add_after(uid, wait)
            return
        assert request is not None
        finalizers = metadata.get("finalizers") or []
        if CLAIM_FINALIZER not in finalizers:
            version = {"uid": uid, "resourceVersion": metadata["resourceVersion"]}
            body = {"metadata": {**version, "finalizers": [*finalizers, CLAIM_FINALIZER]}}
            metadata = (await self._client.patch_merge(CLAIMS, name, body, self._namespace))["metadata"]
        now = datetime.datetime.fromtimestamp(self._wall(), datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        version = {"uid": uid, "resourceVersion": metadata["resourceVersion"]}
        status = {"allocation": self_test_allocation(request, now)}
        await self._client.patch_status(CLAIMS, name, {"metadata": version, "status": status}, self._namespace)
        self._allocated[uid] = self._clock()
        log.info("claim of a self-test allocated", claim=name)
