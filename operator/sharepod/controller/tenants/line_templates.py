"""ResourceClaimTemplates for Pods with a resource line: one in each namespace where such a Pod waits. Also creates
claims again that were deleted while their Pods wait.

Guarantees:
- A namespace gets its template once a Pod there waits for the claim of its line. If the template is deleted while a Pod
  waits, it is created again.
- A template of that name that is not SharePod's is replaced, even if claims were created from it; their Pods get an
  Event. Such a template can only be older than the admission policy that protects the name.
- A namespace without Pods with a line gets no template.
- A refusal by the API server, such as a quota's, is reported by Events on the waiting Pods, and retried with back-off.
- Checks of a namespace without progress become less frequent, from every `LOOK_AGAIN_S` to every minute.
- If the claim that a waiting Pod's status names is deleted, it is created again under its name. kube-controller-manager
  would not do this for an hour: its mutation cache still contains the claim (Kubernetes 1.30 to 1.36).
"""

from __future__ import annotations

import structlog

from sharepod.api.bounds import clipped
from sharepod.api.objects import DEVICE_CLASS, LINE_CLAIM, LINE_REQUEST
from sharepod.backoff import Backoff
from sharepod.controller.apiserver.client import CLAIM_TEMPLATES, CLAIMS, Client
from sharepod.controller.apiserver.events import Events
from sharepod.controller.apiserver.workqueue import WorkQueue
from sharepod.controller.state.claims_seen import ClaimsSeen
from sharepod.controller.state.facts.claim_facts import MADE_FOR, ClaimPodFacts
from sharepod.kube import AlreadyExistsError, ForbiddenError, Json, NotFoundError

from .snapshots import LOOK_AGAIN_S

log = structlog.get_logger(__name__)

_BACKOFF = Backoff(LOOK_AGAIN_S, 60.0)
"""Pause between two checks of a namespace without progress, in seconds: first and longest."""
_WAS_ANOTHER = "differed, and has been replaced: delete the claim, and it is created again with the size of the line"
_DEVICES: Json = {
    "requests": [
        {
            "name": LINE_REQUEST,
            "exactly": {"deviceClassName": DEVICE_CLASS, "allocationMode": "ExactCount", "count": 1},
        }
    ]
}


class LineTemplates:
    """Reconciler of the templates by namespace. `workers`: number of namespaces worked on at a time."""

    def __init__(self, seen: ClaimsSeen, client: Client, events: Events, workers: int) -> None:
        self._seen = seen
        self._client = client
        self._events = events
        self._looks: dict[str, int] = {}
        """By namespace: number of consecutive checks that found a waiting Pod."""
        self.queue: WorkQueue[str] = WorkQueue("line template", self.reconcile, workers)

    async def run(self) -> None:
        """Reconcile namespaces from the queue until cancelled."""
        await self.queue.run()

    def want(self, namespace: str) -> None:
        """Enqueue a namespace in which a Pod waits for its claim. If the namespace was checked before, its template
        should exist, so the check is delayed.
        """
        if namespace in self._looks:
            self.queue.add_after(namespace, LOOK_AGAIN_S)
        else:
            self.queue.add(namespace)

    def forget(self, namespace: str) -> None:
        """Drop the count of a deleted namespace."""
        self._looks.pop(namespace, None)

    async def reconcile(self, namespace: str) -> None:
        """Create the missing template and claims of a namespace. Raises `ApiError` and `NotLeadingError`."""
        waits = False
        try:
            for pod in [pod for pod in self._seen.without_claim() if pod.namespace == namespace]:
                waits |= await self._make_claim(pod)
            if namespace in self._seen.lacking():
                await self._have_template(namespace)
                waits = True
        except NotFoundError:  # the namespace is deleted
            self.forget(namespace)
            return
        if not waits:
            if namespace in self._looks:
                self._looks[namespace] = 0
            return
        self._looks[namespace] = self._looks.get(namespace, 0) + 1
        self.queue.add_after(namespace, _BACKOFF.pause_s(self._looks[namespace]))

    async def _have_template(self, namespace: str) -> None:
        """Create the template, or replace a template that is not SharePod's. If the API server forbids it, write Events
        on the waiting Pods."""
        try:
            await self._make(namespace)
        except AlreadyExistsError:
            found = await self._client.get(CLAIM_TEMPLATES, LINE_CLAIM, namespace)
            if not _is_ours(found):
                await self._replace(namespace, found)
        except ForbiddenError as error:
            log.info("no template", namespace=namespace, error=str(error))
            for pod in self._seen.lacking_in(namespace):
                self._tell(pod, f"template {LINE_CLAIM} of its claim cannot be made: {error.message}")

    def _tell(self, pod: ClaimPodFacts, why: str) -> None:
        self._events.warning("Pod", pod, "Waiting", "Place", clipped(why))

    async def _make(self, namespace: str) -> None:
        body = {
            "apiVersion": "resource.k8s.io/v1",
            "kind": "ResourceClaimTemplate",
            "metadata": {"name": LINE_CLAIM},
            "spec": {"spec": {"devices": _DEVICES}},
        }
        await self._client.create(CLAIM_TEMPLATES, body, namespace)
        log.info("made the template of resource lines", namespace=namespace)

    async def _make_claim(self, pod: ClaimPodFacts) -> bool:
        """Create the claim of a Pod's resource line again, unless it exists. Return True if the API server forbids it,
        so that the caller must retry."""
        owner = {"apiVersion": "v1", "kind": "Pod", "name": pod.name, "uid": pod.uid, "controller": True}
        metadata = {
            "name": pod.claim_of_line,
            "annotations": {MADE_FOR: LINE_CLAIM},
            "ownerReferences": [owner | {"blockOwnerDeletion": True}],
        }
        body = {
            "apiVersion": "resource.k8s.io/v1",
            "kind": "ResourceClaim",
            "metadata": metadata,
            "spec": {"devices": _DEVICES},
        }
        try:
            self._seen.put_claim(await self._client.create(CLAIMS, body, pod.namespace))
        except AlreadyExistsError:
            return False  # the watch reports the existing claim
        except ForbiddenError as error:
            log.info("no claim", namespace=pod.namespace, pod=pod.name, error=str(error))
            self._tell(
                pod, f"claim {pod.claim_of_line} of its line was deleted and cannot be created again: {error.message}"
            )
            return True
        log.info("made the claim of a line again", namespace=pod.namespace, pod=pod.name, claim=pod.claim_of_line)
        return False

    async def _replace(self, namespace: str, found: Json) -> None:
        log.warning("replaced a template of another shape", namespace=namespace, name=LINE_CLAIM)
        uid = str(found["metadata"]["uid"])
        await self._client.delete(CLAIM_TEMPLATES, LINE_CLAIM, namespace, uid=uid)
        await self._make(namespace)
        for pod in self._seen.lacking_in(namespace):
            if (claim := pod.claim_of_line) is not None:
                self._tell(pod, f"claim {claim} was made from a template {LINE_CLAIM} that {_WAS_ANOTHER}")


def _is_ours(template: Json) -> bool:
    """Return True if a template is SharePod's: it requests one device without sizes."""
    return bool(((template.get("spec") or {}).get("spec") or {}).get("devices") == _DEVICES)
