"""Makes, takes back and ends the Pods.

Guarantees: a Pod is made with `fieldValidation=Strict` and under the SharePod's name, so that of two operators only
one makes it; every delete names the uid, and one that takes a Pod back names the version at which it was not bound.
"""

from __future__ import annotations

from sharepod.api.gpunode import Tenant
from sharepod.api.pod import PodSettings, build_pod
from sharepod.api.sharepod import KIND, Phase, SpecError
from sharepod.controller import metrics
from sharepod.controller.apiserver.client import PODS, Client
from sharepod.controller.apiserver.events import Events
from sharepod.controller.decisions.lifecycle import Finish
from sharepod.controller.state.cluster_state import ClusterState
from sharepod.controller.state.facts import PodFacts, SharePodFacts, pod_facts
from sharepod.controller.state.memos import Blocked, TenantMemo
from sharepod.kube import AlreadyExistsError, ConflictError, ForbiddenError, InvalidError, NotFoundError

_AGAIN_WHEN_BLOCKED = 5.0
POD_TERMINATING = "PodTerminating"


class PodControl:
    """Acts on the Pods of tenants. Every method may raise an `ApiError` or `NotLeadingError`."""

    def __init__(self, state: ClusterState, client: Client, events: Events, settings: PodSettings) -> None:
        self._state = state
        self._client = client
        self._events = events
        self._settings = settings

    async def create(
        self, sharepod: SharePodFacts, node: str, row: Tenant, memo: TenantMemo, now: float
    ) -> Finish | None:
        """Makes the Pod of a reservation, or finds it made. Returns how the SharePod ends if it can never be made;
        the memo says why where it cannot be made for now.
        """
        try:
            manifest = build_pod(sharepod.raw, node, row.gpus, self._settings)
            made = await self._client.create(PODS, manifest, sharepod.namespace, strict=True)
        except SpecError as error:
            return Finish(Phase.FAILED, "Invalid", str(error))
        except InvalidError as error:
            self._events.warning(KIND, sharepod, "PodRefused", "Bind", error.message)
            return Finish(
                Phase.FAILED,
                "PodRefused",
                f"the API server refused the pod: {error.message}; correct it and make it anew",
            )
        except ForbiddenError as error:
            self._block(sharepod, memo, "PodForbidden", f"the API server forbids the pod: {error.message}", now)
            return None
        except AlreadyExistsError:
            await self._found(sharepod, memo, now)
            return None
        except NotFoundError as error:  # the namespace is being deleted
            self._block(sharepod, memo, "PodForbidden", error.message, now)
            return None
        memo.blocked = None
        metrics.PODS_CREATED.inc()
        self._state.put_pod(made)
        indexes = ",".join(row.gpus)
        self._events.normal(KIND, sharepod, "PodCreated", "Bind", f"made pod {sharepod.name} on {node} with {indexes}")
        return None

    async def _found(self, sharepod: SharePodFacts, memo: TenantMemo, now: float) -> None:
        """A Pod of that name exists: made by another operator for the same SharePod, or not ours."""
        try:
            raw = await self._client.get(PODS, sharepod.name, sharepod.namespace)
        except NotFoundError:
            return
        if pod_facts(raw).tenant == sharepod.uid:
            memo.blocked = None
            self._state.put_pod(raw)
            return
        if raw["metadata"].get("deletionTimestamp"):
            text = f"waits until the former pod named {sharepod.name} is gone, which is being deleted"
            self._block(sharepod, memo, POD_TERMINATING, text, now)
            return
        text = (
            f"a pod named {sharepod.name} exists in {sharepod.namespace} and does not belong to this SharePod; "
            "delete it, or give the SharePod another name"
        )
        self._block(sharepod, memo, "PodNameTaken", text, now)

    def _block(self, sharepod: SharePodFacts, memo: TenantMemo, reason: str, message: str, now: float) -> None:
        since = memo.blocked.since if memo.blocked is not None else now
        memo.blocked = Blocked(reason, message, since, now + _AGAIN_WHEN_BLOCKED)
        tell = self._events.normal if reason == POD_TERMINATING else self._events.warning
        tell(KIND, sharepod, reason, "Bind", message)

    async def delete(self, pod: PodFacts) -> None:
        """Begins to end a Pod."""
        try:
            await self._client.delete(PODS, pod.name, pod.namespace, uid=pod.uid)
        except NotFoundError:
            self._state.drop_pod(pod.uid)
        except ConflictError:
            await self.refresh(pod)

    async def take_back(self, pod: PodFacts, memo: TenantMemo) -> bool:
        """Deletes a Pod that is not bound; False if that cannot be said of it any more."""
        try:
            await self._client.delete(PODS, pod.name, pod.namespace, uid=pod.uid, resource_version=str(pod.version))
        except (ConflictError, NotFoundError):
            await self.refresh(pod)
            return False
        memo.returned.add(pod.uid)
        metrics.PODS_TAKEN_BACK.inc()
        await self.refresh(pod)
        return True

    async def refresh(self, pod: PodFacts) -> None:
        """Reads a Pod anew."""
        try:
            raw = await self._client.get(PODS, pod.name, pod.namespace)
        except NotFoundError:
            self._state.drop_pod(pod.uid)
            return
        if str(raw["metadata"]["uid"]) != pod.uid:
            self._state.drop_pod(pod.uid)
        self._state.put_pod(raw, sure=True)

    async def absent(self, name: str, namespace: str, tenant: str) -> bool:
        """Whether the API server itself says that this tenant has no Pod, or one that has ended."""
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
        """Whether the API server itself says that this tenant has no Pod on that node, nor one that is bound for it."""
        try:
            raw = await self._client.get(PODS, name, namespace)
        except NotFoundError:
            return True
        pod = pod_facts(raw)
        if pod.tenant != tenant:
            return True
        self._state.put_pod(raw, sure=True)
        return (pod.node or pod.pin) != node
