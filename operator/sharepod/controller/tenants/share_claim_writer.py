"""Writer of the claims that attach GPUs to SharePods' Pods: creates, allocates and deallocates these claims.

Guarantees:
- A claim is created for one Pod, whose uid it contains. If the answer to the creation is lost, the claim is found by
  its name.
- A denial by a quota, a policy or a webhook is reported, and the call is retried with back-off. Until it succeeds, the
  Pod's gate stays closed.
- All writes have the guarantees of `ClaimWriter`.
"""

from __future__ import annotations

from collections.abc import Callable

from sharepod.api.claims.share_claims import build_claim
from sharepod.controller.apiserver.client import CLAIMS, Client
from sharepod.controller.decisions.share_claim_steps import AllocateClaim, FreeClaim, MakeClaim, ShareClaimStep
from sharepod.controller.state.claims_seen import ClaimsSeen
from sharepod.controller.state.facts.claim_facts import ClaimFacts
from sharepod.controller.state.facts.pod_facts import PodFacts
from sharepod.controller.state.facts.sharepod_facts import SharePodFacts
from sharepod.controller.state.memos import TenantMemo
from sharepod.kube import (
    AlreadyExistsError,
    ForbiddenError,
    InvalidError,
    NotFoundError,
    UnauthorizedError,
    UnavailableError,
)

from .claim_writer import ClaimWriter
from .pods import PodControl

NOT_SERVED = (
    "the API server has no ResourceClaims of resource.k8s.io/v1 (Kubernetes 1.34 and newer), or the namespace is being "
    "deleted; set the operator's attach to csi or auto"
)
"""Message for an API server that does not serve ResourceClaims of this version."""


class ShareClaimWriter:
    """Writer of the claims of SharePods' Pods. Every method may raise an `ApiError` or `NotLeadingError`."""

    def __init__(self, seen: ClaimsSeen, client: Client, pod_control: PodControl, wall: Callable[[], float]) -> None:
        self._seen = seen
        self._client = client
        self._pod_control = pod_control
        self._writer = ClaimWriter(seen, client, wall)
        self.on_denied: Callable[[str], None] = lambda _why: None
        """Called with the reason when the API server has denied an allocation."""

    async def act(self, sharepod: SharePodFacts, step: ShareClaimStep, memo: TenantMemo, now: float) -> bool:
        """Perform a step. Return True if it is done. `now`: monotonic seconds.

        If it is not done, `memo.blocked` has the reason, or the claim has changed and was read again.
        """
        try:
            match step:
                case MakeClaim(pod=pod):
                    return await self._make(sharepod, pod, memo, now)
                case AllocateClaim(claim=claim, node=node, row=row):
                    return await self._writer.allocate_share(claim, node, row)
                case FreeClaim(claim=claim):
                    return await self._free(claim)
        except (ForbiddenError, InvalidError, UnauthorizedError, UnavailableError) as error:
            if not (error.of_admission or isinstance(error, ForbiddenError | InvalidError)):
                raise
            self._refused(sharepod, step, memo, error.message, now)
            return False

    async def _make(self, sharepod: SharePodFacts, pod: PodFacts, memo: TenantMemo, now: float) -> bool:
        assert pod.claim is not None
        assert sharepod.gpu is not None
        manifest = build_claim(pod.claim, pod.namespace, pod.name, pod.uid, sharepod.gpu.count)
        try:
            made = await self._client.create(CLAIMS, manifest, pod.namespace)
        except NotFoundError:
            self._refused(sharepod, MakeClaim(pod), memo, NOT_SERVED, now)
            return False
        except AlreadyExistsError:
            made = await self._client.get(CLAIMS, pod.claim, pod.namespace)
        self._seen.put_claim(made, sure=True, news=False)
        if self._seen.share_claim(pod.claim, pod.namespace, pod.uid) is None:
            text = "one of that name exists that is not of this Pod; delete it"
            self._refused(sharepod, MakeClaim(pod), memo, text, now)
            return False
        memo.blocked = None
        return True

    async def _free(self, claim: ClaimFacts) -> bool:
        if claim.consumers:
            await self._writer.withdraw(claim)
            return False
        return await self._writer.deallocate(claim)

    def _refused(self, sharepod: SharePodFacts, step: ShareClaimStep, memo: TenantMemo, why: str, now: float) -> None:
        doing = "made" if isinstance(step, MakeClaim) else "allocated"
        text = f"the ResourceClaim {step.pod.claim} that attaches the pod's GPUs cannot be {doing} for now: {why}"
        self._pod_control.refuse_share(sharepod, step.pod, memo, text, now)
        if not isinstance(step, MakeClaim):
            self.on_denied(text)
