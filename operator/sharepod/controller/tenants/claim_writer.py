"""Writer of ResourceClaims: allocates claims, removes allocations, shows shares in `status.devices`.

Guarantees:
- Every write names the claim's uid and resourceVersion. If the claim has changed since it was read, the API server
  refuses the write.
- The finalizer is written before the allocation. So a deleted claim exists until kube-controller-manager has
  deallocated it.
- If the API server refuses a write as invalid, the method raises, and its caller retries with back-off.
- The annotation with a Pod's GPUs is written only into Pods with a resource line, and only the operator may write it.
- If a write fails or its answer is lost, the claim is read live before any other write.
"""

from __future__ import annotations

import datetime
from collections.abc import Awaitable, Callable

import structlog

from sharepod.api.claims.scheduled_claims import hold_entry, is_hold
from sharepod.api.gpunode import Tenant
from sharepod.api.objects import CLAIM_FINALIZER, GPUS_ANNOTATION, SHARE_REQUEST
from sharepod.api.sharepod import SpecError
from sharepod.controller.apiserver.client import CLAIMS, PODS, Client
from sharepod.controller.decisions.claim_status import allocation, devices, without_times
from sharepod.controller.state.claims_seen import ClaimsSeen
from sharepod.controller.state.facts.claim_facts import ClaimFacts, ClaimPodFacts
from sharepod.kube import ApiError, ConflictError, InvalidError, Json, NotFoundError
from sharepod.placement.state.types import Refusal

log = structlog.get_logger(__name__)


class ClaimWriter:
    """Writer of claims. `wall`: seconds since the epoch.

    Every method may raise an `ApiError` or `NotLeadingError`. A method that returns False has written nothing, because
    the claim has changed since it was read. The claim was then read again, so the caller must decide again.
    """

    def __init__(self, seen: ClaimsSeen, client: Client, wall: Callable[[], float]) -> None:
        self._seen = seen
        self._client = client
        self._wall = wall

    async def allocate(self, claim: ClaimFacts, node: str, row: Tenant, consumer: ClaimPodFacts | None) -> bool:
        """Allocate a claim to the GPUs of a row. With `consumer`, also reserve the claim for that Pod. Return True if
        this is written.
        """
        protected = await self._protected(claim)
        if protected is None or protected.request is None:
            return False
        claim = protected
        assert claim.request is not None
        now = self._now()
        names = [name for name, count in claim.request.devices for _ in range(count)]
        status: Json = {
            "allocation": allocation(node, row, names, now),
            "devices": devices(node, row, None, (), now),
        }
        if consumer is not None:
            status["reservedFor"] = [{"name": consumer.name, "resource": "pods", "uid": consumer.uid}]
        return await self._write(claim, lambda: self._patch_status(claim, status))

    async def allocate_share(self, claim: ClaimFacts, node: str, row: Tenant) -> bool:
        """Allocate the claim of a SharePod's Pod to the GPUs of the SharePod's row. Return True if the allocation is
        written.
        """
        protected = await self._protected(claim)
        if protected is None:
            return False
        status: Json = {"allocation": allocation(node, row, [SHARE_REQUEST] * len(row.gpus), self._now())}
        return await self._write(protected, lambda: self._patch_status(protected, status))

    async def _protected(self, claim: ClaimFacts) -> ClaimFacts | None:
        """Return the claim with the finalizer, which is added if necessary. None if the claim has changed since it was
        read.
        """
        if CLAIM_FINALIZER not in claim.finalizers:
            first: Json = {"op": "add", "path": "/metadata/finalizers", "value": [CLAIM_FINALIZER]}
            another: Json = {"op": "add", "path": "/metadata/finalizers/-", "value": CLAIM_FINALIZER}
            operations: list[Json] = [
                {"op": "test", "path": "/metadata/uid", "value": claim.uid},
                {"op": "test", "path": "/metadata/resourceVersion", "value": str(claim.version)},
                another if claim.finalizers else first,
            ]
            if not await self._write(claim, lambda: self._patch(claim, operations)):
                return None
            read = self._seen.claims.get(claim.uid)
            return read if read is not None and read.allocation is None else None
        return claim

    async def withdraw(self, claim: ClaimFacts) -> bool:
        """Remove all entries from the claim's `status.reservedFor`. Return True if they are removed."""
        return await self._write(claim, lambda: self._patch_status(claim, {"reservedFor": None}))

    async def deallocate(self, claim: ClaimFacts) -> bool:
        """Remove the claim's allocation and `status.devices`. Return True if they are removed."""
        return await self._write(claim, lambda: self._patch_status(claim, {"allocation": None, "devices": None}))

    async def hold(self, claim: ClaimFacts, node: str, uid: str) -> bool:
        """Add the operator's entry, the hold, to `status.reservedFor`. Return True if it is added.

        Args:
            claim: The claim.
            node: Node whose ledger has the claim's row.
            uid: Uid of that node's GPUNode.
        """
        entries = [*claim.reserved_for, hold_entry(node, uid)]
        return await self._write(claim, lambda: self._patch_status(claim, {"reservedFor": entries}))

    async def let_go(self, claim: ClaimFacts) -> bool:
        """Remove the operator's entry from `status.reservedFor`. If no other entry is left, remove the allocation too.
        Return True if this is written.
        """
        left = [entry for entry in claim.reserved_for if not is_hold(entry)]
        status: Json = {"reservedFor": left} if left else {"reservedFor": None, "allocation": None}
        return await self._write(claim, lambda: self._patch_status(claim, status))

    async def show(self, claim: ClaimFacts, node: str, row: Tenant, resize: Refusal | SpecError | None) -> None:
        """Write `status.devices` for a row, unless the claim already has it, apart from times."""
        wanted = devices(node, row, resize, claim.shown, self._now())
        if without_times(wanted) != without_times(claim.shown):
            await self._write(claim, lambda: self._patch_status(claim, {"devices": wanted}))

    async def name_gpus(self, pod: ClaimPodFacts, row: Tenant) -> None:
        """Write the UUIDs of a row's GPUs into the annotation of a Pod, unless it has them."""
        gpus = ",".join(row.gpus)
        if pod.gpus == gpus:
            return
        pointer = GPUS_ANNOTATION.replace("/", "~1")
        add: Json = (
            {"op": "add", "path": f"/metadata/annotations/{pointer}", "value": gpus}
            if pod.annotated
            else {"op": "add", "path": "/metadata/annotations", "value": {GPUS_ANNOTATION: gpus}}
        )
        operations: list[Json] = [
            {"op": "test", "path": "/metadata/uid", "value": pod.uid},
            {"op": "test", "path": "/metadata/resourceVersion", "value": str(pod.version)},
            add,
        ]
        try:
            self._seen.put_pod(await self._client.patch_json(PODS, pod.name, operations, pod.namespace))
        except (ConflictError, InvalidError, NotFoundError):
            return  # the Pod has changed, and its next reconciliation writes again

    async def deleted(self, claim_name: str, namespace: str, uid: str) -> bool:
        """Read a claim live. Return True if it is deleted; else record it in the cluster state and return False."""
        try:
            raw = await self._client.get(CLAIMS, claim_name, namespace)
        except NotFoundError:
            return True
        if str(raw["metadata"]["uid"]) != uid:
            return True
        self._seen.put_claim(raw, sure=True)
        return self._seen.claims.get(uid) is None

    async def _write(self, claim: ClaimFacts, write: Callable[[], Awaitable[Json]]) -> bool:
        """Make one write and record the resulting claim. Return True if it is written, False if the API server refused
        it because the claim has changed. After any failure, read the claim again."""
        try:
            made = await write()
        except (ConflictError, NotFoundError, InvalidError) as error:
            await self._refresh(claim)
            # the same write would be refused again, so the caller's back-off applies
            if isinstance(error, InvalidError) and error.of_object:
                log.error("claim cannot be written", claim=f"{claim.namespace}/{claim.name}", error=str(error))
                raise
            return False
        except ApiError:
            await self._refresh(claim)
            raise
        self._seen.put_claim(made, news=False)
        return True

    async def _refresh(self, claim: ClaimFacts) -> None:
        if await self.deleted(claim.name, claim.namespace, claim.uid):
            self._seen.drop_claim(claim.uid)

    async def _patch(self, claim: ClaimFacts, operations: list[Json]) -> Json:
        return await self._client.patch_json(CLAIMS, claim.name, operations, claim.namespace)

    async def _patch_status(self, claim: ClaimFacts, status: Json) -> Json:
        metadata = {"uid": claim.uid, "resourceVersion": str(claim.version)}
        return await self._client.patch_status(
            CLAIMS, claim.name, {"metadata": metadata, "status": status}, claim.namespace
        )

    def _now(self) -> str:
        return datetime.datetime.fromtimestamp(self._wall(), datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
