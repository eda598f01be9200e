"""Self-test claims: allocates the ResourceClaims with which agents test whether their nodes attach a claim's devices.
Such a claim has no share, no row in a ledger and no fixed node.

Guarantees:
- Only claims of class `self-test.sharepod.dev` in the operator's own namespace are allocated here.
- The finalizer is written before the allocation. Both writes contain the resourceVersion that was read just before.
- kube-scheduler removes the allocation if the Pod fits on no node. It is then written again, at most every `_TAKEN_S`.
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
"""Seconds until the retry for a claim that changed between its read and its write, or was not found."""
_TAKEN_S = 60.0
"""Shortest time in seconds between two allocations of one claim. Without it, kube-scheduler and the operator would
remove and write the allocation in a loop while the Pod fits on no node."""

log = structlog.get_logger(__name__)


class SelfTestClaims:
    """Reconciler of the claims with which agents test their nodes. Keys of its queue are uids of claims.

    Args:
        seen: The claims in the cluster state.
        client: The API server.
        settings: The operator's settings. Used are its namespace and `writers`, the number of claims worked on at a
            time.
        clock: Monotonic seconds.
        wall: Time of day in seconds since 1970.
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
        """Time at which this process last allocated a claim, by the claim's uid."""
        self.queue: WorkQueue[str] = WorkQueue("self-test claim", self.reconcile, settings.writers)

    async def run(self) -> None:
        """Reconcile claims from the queue until cancelled."""
        await self.queue.run()

    def look_at_all(self) -> None:
        """Enqueue each self-test claim, unchanged ones included."""
        for claim in self._seen.claims:
            if claim.namespace == self._namespace and has_name_of_self_test(claim.name):
                self.queue.add_resync(claim.uid)

    async def reconcile(self, uid: str) -> None:
        """Allocate a self-test claim if it has no allocation. Raises `ApiError` and `NotLeadingError`."""
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
