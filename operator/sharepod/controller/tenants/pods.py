"""Pod control: creates the Pods of SharePods, opens their gates, withdraws, deletes and reads them.

Guarantees:
- A SharePod that is too large to keep in memory is read live when its Pod is created. If its spec has changed since the
  watch showed it, no Pod is created until the watch shows the change.
- A Pod is created with `fieldValidation=Strict` and under the SharePod's name. So if two operators try, only one Pod is
  created.
- A gate is opened at most once: the patch applies only to the Pod with this uid while its gate is closed. A refusal of
  the patch is reported.
- A SharePod fails only if the API server finds an error in the Pod itself. A denial by a quota, a policy or a webhook
  is retried.
- Every delete names the uid.
- If a creation or gate opening gets no answer while other calls do, this is reported, and the next try has a longer
  timeout (`unanswered.py`). So a slow webhook does not block a Pod or its gate permanently.
- To withdraw a Pod, the operator first adds a mark and a finalizer, then deletes the Pod. Both calls name a
  resourceVersion at which the Pod was not bound. The finalizer keeps the Pod until `let_go`.
"""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Callable

from sharepod.api.claims.share_claims import claim_name
from sharepod.api.gpunode import Tenant
from sharepod.api.objects import GPUS_ANNOTATION
from sharepod.api.pods.copied_annotations import missed
from sharepod.api.pods.pod import PodSettings, build_pod, let_go, mark_taken_back, open_gate
from sharepod.api.sharepod import KIND, Phase, SpecError
from sharepod.backoff import Backoff
from sharepod.controller import metrics
from sharepod.controller.apiserver.client import PODS, SHAREPODS, Client
from sharepod.controller.apiserver.events import Events
from sharepod.controller.decisions.ends import EndReason
from sharepod.controller.decisions.steps import Finish
from sharepod.controller.state.cluster_state import ClusterState
from sharepod.controller.state.facts.object_facts import Json
from sharepod.controller.state.facts.pod_facts import PodFacts, pod_facts
from sharepod.controller.state.facts.sharepod_facts import SharePodFacts, is_as_read
from sharepod.controller.state.memos import Blocked, BlockedReason, TenantMemo
from sharepod.kube import (
    AlreadyExistsError,
    ApiError,
    ConflictError,
    ForbiddenError,
    InvalidError,
    NotFoundError,
    UnauthorizedError,
    UnavailableError,
)

from .paced_retries import PacedRetries
from .unanswered import Patience

_TERMINATING_RETRY_S = 1.0
"""Seconds until the next try to create a Pod while a former Pod of its name is being deleted. Most deletions take
seconds."""
_DELETE_AGAIN_S = 10.0
"""Seconds after which a deletion is repeated that the API server has accepted, but the watch has not shown."""
_BACKOFF = Backoff(2.0, 60.0)
"""Pause after a refused creation of a Pod, in seconds: first and longest. If few Pods wait, a raised quota takes effect
at most the longest pause later."""

_HANGS = (
    "the API server has not answered in time, but answers other calls: most likely it waits for an admission webhook "
    "for pods of this namespace"
)
_NOT_COPIED = (
    "the pod does not have annotations of the SharePod that the operator's setting annotations does not name (ask a "
    "cluster admin): {}"
)


class PodControl:
    """Control of the tenants' Pods. Every method may raise an `ApiError` or `NotLeadingError`.

    Args:
        by_claims: Returns True if new Pods get their GPUs by claims, False if by CSI volumes.
        lines_in_force: Returns True if nodes advertise the resources of the resource line. Pods of SharePods then
            request them.
    """

    def __init__(
        self,
        state: ClusterState,
        client: Client,
        events: Events,
        settings: PodSettings,
        *,
        by_claims: Callable[[], bool] = lambda: False,
        lines_in_force: Callable[[], bool] = lambda: False,
    ) -> None:
        self._state = state
        self._client = client
        self._events = events
        self._settings = settings
        self._by_claims = by_claims
        self._lines_in_force = lines_in_force
        self.retries = PacedRetries()
        self._patience = Patience()

    async def create(self, sharepod: SharePodFacts, memo: TenantMemo, now: float) -> Finish | None:
        """Create the Pod of a SharePod behind its scheduling gate, or adopt an existing Pod of this SharePod.

        Return the end of the SharePod if its Pod can never be created, else None. If it cannot be created for now, set
        `memo.blocked`. `now`: monotonic seconds.
        """
        whole = await self._whole(sharepod)
        if whole is None:
            return None
        try:
            claim = claim_name(sharepod.name, secrets.token_hex(4)) if self._by_claims() else None
            line, request = self._lines_in_force(), sharepod.gpu
            manifest = build_pod(whole, self._settings, claim, line=line, request=request)
            with self._patience.timeout_s(sharepod.namespace, wanted=memo.unanswered) as timeout_s:
                made = await self._client.create(PODS, manifest, sharepod.namespace, strict=True, timeout_s=timeout_s)
        except SpecError as error:
            return Finish(Phase.FAILED, EndReason.INVALID, str(error))
        except InvalidError as error:
            if not error.of_object:
                self._forbidden(sharepod, memo, error, now)
                return None
            self._events.warning(KIND, sharepod, EndReason.POD_REFUSED, "Bind", error.message)
            refused = f"the API server refused the pod: {error.message}; fix the SharePod and create it again"
            return Finish(Phase.FAILED, EndReason.POD_REFUSED, refused)
        except ForbiddenError as error:
            self._forbidden(sharepod, memo, error, now)
            return None
        except (UnauthorizedError, UnavailableError) as error:
            if self._client.hangs_alone(error):
                memo.unanswered = True
                self._block(sharepod, memo, BlockedReason.FORBIDDEN, f"the pod cannot be created: {_HANGS}", now)
                return None
            if not error.of_admission:
                raise
            self._forbidden(sharepod, memo, error, now)
            return None
        except AlreadyExistsError:
            await self._found(sharepod, memo, now)
            return None
        except NotFoundError as error:  # the namespace is being deleted
            self._block(sharepod, memo, BlockedReason.FORBIDDEN, error.message, now)
            return None
        memo.blocked, memo.unanswered = None, False
        metrics.PODS_CREATED.inc()
        if names := missed(whole, self._settings.annotations):
            self._events.normal(KIND, sharepod, "AnnotationsNotCopied", "Bind", _NOT_COPIED.format(", ".join(names)))
        self._state.put_pod(made, news=False)
        return None

    async def _whole(self, sharepod: SharePodFacts) -> Json | None:
        """Return the whole SharePod, from which its Pod is made. It is read live if it was too large to keep in memory.

        Return None if it is deleted or its spec has changed. The watch then causes the next step.
        """
        if sharepod.raw_text:
            return sharepod.raw
        try:
            raw = await self._client.get(SHAREPODS, sharepod.name, sharepod.namespace)
        except NotFoundError:
            return None  # the watch reports the deletion
        if is_as_read(raw, sharepod):
            return raw
        self._state.put_sharepod(raw)
        return None

    def _forbidden(self, sharepod: SharePodFacts, memo: TenantMemo, error: ApiError, now: float) -> None:
        text = f"the API server forbids the pod for now: {error.message}"
        self._block(sharepod, memo, BlockedReason.FORBIDDEN, text, now)

    async def open_gate(
        self, sharepod: SharePodFacts, pod: PodFacts, node: str, row: Tenant, memo: TenantMemo, now: float
    ) -> bool:
        """Open a Pod's scheduling gate. Return True if the gate is open.

        It is not open in two cases:
        - The Pod has changed since it was read. It is read again.
        - The API server refuses the Pod with an open gate. `memo.blocked` has the reason.
        """
        operations = open_gate(pod.uid, pod.gates, pod.affinity, node, row.gpus)
        try:
            with self._patience.timeout_s(sharepod.namespace, wanted=memo.gate_unanswered) as timeout_s:
                made = await self._client.patch_json(PODS, pod.name, operations, pod.namespace, timeout_s=timeout_s)
        except (InvalidError, ConflictError, NotFoundError) as error:
            await self._refresh(pod)
            known = self._state.pods.get(pod.uid)
            if known is not None and known.version == pod.version:
                self._refused_share(sharepod, pod, node, memo, error.message, now)
            return False
        except (ForbiddenError, UnauthorizedError, UnavailableError) as error:
            if self._client.hangs_alone(error):  # the gate may have been opened, so the share stays reserved
                memo.gate_unanswered = True
                self._events.warning(
                    sharepod.kind, sharepod, BlockedReason.FORBIDDEN, "Bind", f"its gate stays closed: {_HANGS}"
                )
            if not (error.of_admission or isinstance(error, ForbiddenError)):
                raise
            self._refused_share(sharepod, pod, node, memo, error.message, now)
            return False
        memo.blocked, memo.gate_unanswered, memo.opened = None, False, (pod.uid, now)
        self._state.put_pod(made, news=False)
        return True

    def _refused_share(
        self, sharepod: SharePodFacts, pod: PodFacts, node: str, memo: TenantMemo, why: str, now: float
    ) -> None:
        text = (
            f"the API server refuses for now to let the pod have a share: node affinity for {node} and the annotation "
            f"{GPUS_ANNOTATION}: {why}"
        )
        self.refuse_share(sharepod, pod, memo, text, now)

    def refuse_share(self, sharepod: SharePodFacts, pod: PodFacts, memo: TenantMemo, why: str, now: float) -> None:
        """Record in the memo that a Pod cannot have its share for now, because of `why`. It is tried again after a
        pause. `now`: monotonic seconds.
        """
        self._block(sharepod, memo, BlockedReason.FORBIDDEN, why, now, pod=pod.uid)

    async def _found(self, sharepod: SharePodFacts, memo: TenantMemo, now: float) -> None:
        """Handle a Pod that exists under the SharePod's name. Adopt it if it is this SharePod's. Otherwise set
        `memo.blocked`.
        """
        try:
            raw = await self._client.get(PODS, sharepod.name, sharepod.namespace)
        except NotFoundError:
            return
        if pod_facts(raw).tenant == sharepod.uid:
            memo.blocked = None
            self._state.put_pod(raw)
            return
        if raw["metadata"].get("deletionTimestamp"):
            text = f"waits until the former pod named {sharepod.name}, which is being deleted, has ended"
            self._block(sharepod, memo, BlockedReason.TERMINATING, text, now)
            return
        text = (
            f"a pod named {sharepod.name} exists in {sharepod.namespace} and does not belong to this SharePod; "
            "delete it, or give the SharePod another name"
        )
        self._block(sharepod, memo, BlockedReason.NAME_TAKEN, text, now)

    def _block(
        self,
        sharepod: SharePodFacts,
        memo: TenantMemo,
        reason: BlockedReason,
        message: str,
        now: float,
        *,
        pod: str | None = None,
    ) -> None:
        waits = reason is BlockedReason.TERMINATING
        tries = memo.blocked.tries + 1 if memo.blocked is not None and memo.blocked.reason is reason else 1
        if waits:
            until = now + _TERMINATING_RETRY_S
        else:
            until = self.retries.next_try(sharepod.namespace, sharepod.uid, now, _BACKOFF.pause_s(tries))
        memo.blocked = Blocked(reason, message, until, tries, pod)
        emit = self._events.normal if waits else self._events.warning
        emit(sharepod.kind, sharepod, reason, "Bind", message)

    async def delete(self, pod: PodFacts, memo: TenantMemo, now: float, *, disrupts: bool = False) -> float | None:
        """Delete a Pod. Return None after the call. If the same call was made within `_DELETE_AGAIN_S`, return the
        seconds until it may be repeated.

        Args:
            pod: The Pod.
            memo: Memo of its tenant.
            now: Monotonic seconds.
            disrupts: True if the Pod ends through no fault of its own. It is then evicted, so that its condition
                DisruptionTarget shows this. If the eviction is refused, it is deleted.
        """
        if memo.deleted is not None and memo.deleted[0] == pod.uid and now < memo.deleted[1] + _DELETE_AGAIN_S:
            return memo.deleted[1] + _DELETE_AGAIN_S - now
        try:
            if not (disrupts and await self._evict(pod)):
                await self._client.delete(PODS, pod.name, pod.namespace, uid=pod.uid)
        except NotFoundError:
            self._state.drop_pod(pod.uid)
        except ConflictError:
            await self._refresh(pod)
        else:
            memo.deleted = (pod.uid, now)
        return None

    async def _evict(self, pod: PodFacts) -> bool:
        """Evict a Pod. Return False if a PodDisruptionBudget, or two budgets that select the Pod, forbid it."""
        try:
            await self._client.evict(pod.name, pod.namespace, uid=pod.uid)
        except UnavailableError:
            return False
        return True

    async def take_back(self, pod: PodFacts) -> bool:
        """Mark and delete an unbound Pod. Return True if both are done, False if the Pod has changed or is deleted.
        Either way it is read again.
        """
        try:
            version = str(pod.version)
            if not pod.marked:
                marks = mark_taken_back(pod.uid, pod.version, pod.finalizers)
                marked = await self._client.patch_json(PODS, pod.name, marks, pod.namespace)
                version = marked["metadata"]["resourceVersion"]
            await self._client.delete(PODS, pod.name, pod.namespace, uid=pod.uid, resource_version=version)
        except (InvalidError, ConflictError, NotFoundError):
            await self._refresh(pod)
            return False
        metrics.PODS_TAKEN_BACK.inc()
        await self._refresh(pod)
        return True

    async def let_go(self, pod: PodFacts) -> None:
        """Remove the operator's finalizer from a Pod, so that a withdrawn Pod disappears."""
        counts = pod.of_job and not pod.deleting
        with contextlib.suppress(InvalidError, ConflictError, NotFoundError):
            await self._client.patch_json(PODS, pod.name, let_go(pod.uid, pod.finalizers, counts=counts), pod.namespace)
        await self._refresh(pod)

    async def _refresh(self, pod: PodFacts) -> None:
        """Read a Pod live and record the result in the cluster state."""
        try:
            raw = await self._client.get(PODS, pod.name, pod.namespace)
        except NotFoundError:
            self._state.drop_pod(pod.uid)
            return
        if str(raw["metadata"]["uid"]) != pod.uid:
            self._state.drop_pod(pod.uid)
        self._state.put_pod(raw, sure=True)

    async def absent(self, name: str, namespace: str, tenant: str) -> bool:
        """Read the tenant's Pod live. Return True if there is none, or it has ended."""
        try:
            raw = await self._client.get(PODS, name, namespace)
        except NotFoundError:
            known = self._state.pod_of(tenant)
            if known is not None:
                self._state.drop_pod(known.uid)
            return True
        pod = pod_facts(raw)
        if pod.tenant != tenant:
            return True
        self._state.put_pod(raw, sure=True)
        return pod.ended

    async def not_on(self, node: str, name: str, namespace: str, tenant: str) -> bool:
        """Read the tenant's Pod live. Return True unless it is bound or pinned to that node. A withdrawn Pod does not
        count.
        """
        try:
            raw = await self._client.get(PODS, name, namespace)
        except NotFoundError:
            return True
        pod = pod_facts(raw)
        if pod.tenant != tenant:
            return True
        self._state.put_pod(raw, sure=True)
        return (pod.node or pod.pin) != node or pod.taken_back
