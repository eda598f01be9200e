"""The agent's liveness: a Lease that it renews as long as its event loop turns and the API server hears it.

Nothing is decided by it here; the operator places nothing on a node whose agent's Lease stands still. There is one
agent per node, so the Lease is never contended, only renewed. It belongs to the GPUNode, and goes with it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from datetime import UTC, datetime

import structlog

from sharepod.api.gpunode import KIND
from sharepod.api.objects import API_VERSION
from sharepod.kube import MERGE_PATCH, ApiError, Connection, Json, NotFoundError

log = structlog.get_logger(__name__)

RENEW_S = 5.0
DURATION_S = 20
RENEW_TIMEOUT_S = 4.0


def lease_name(node: str) -> str:
    """The name of the Lease of this node's agent."""
    return f"sharepod-agent-{node}"


class LivenessLease:
    """Keeps one Lease renewed."""

    def __init__(self, api: Connection, *, namespace: str, node: str, owner_uid: Callable[[], str | None]) -> None:
        """`owner_uid`: UID of this node's GPUNode, None while it is not known: until then there is nothing to be alive
        for.
        """
        self._api = api
        self._collection = f"/apis/coordination.k8s.io/v1/namespaces/{namespace}/leases"
        self._name = lease_name(node)
        self._node = node
        self._owner_uid = owner_uid
        self._acquired = _now()
        self._failing: str | None = None
        self.renewed_at: float | None = None
        """When it was last renewed, in the event loop's time."""

    async def run(self) -> None:
        """Renews every few seconds, whatever an attempt came to. Ends only when cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            begun = loop.time()
            owner_uid = self._owner_uid()
            if owner_uid is not None:
                await self._renew_and_tell(owner_uid)
            # A first renewal is waited for by placement.
            pause = RENEW_S if self.renewed_at is not None else 1.0
            await asyncio.sleep(max(0.0, begun + pause - loop.time()))

    async def _renew_and_tell(self, owner_uid: str) -> None:
        try:
            await self.renew(owner_uid)
        except ApiError as error:
            if self._failing != str(error):
                log.error(
                    "cannot renew the agent's lease; the operator will take this node for dead",
                    lease=self._name,
                    error=str(error),
                )
            self._failing = str(error)
            return
        if self._failing is not None:
            log.info("the agent's lease is renewed again", lease=self._name)
        self._failing = None
        self.renewed_at = asyncio.get_running_loop().time()

    async def renew(self, owner_uid: str) -> None:
        """One renewal; makes the Lease where there is none. Raises `ApiError`."""
        body: Json = {
            "metadata": {
                "ownerReferences": [{"apiVersion": API_VERSION, "kind": KIND, "name": self._node, "uid": owner_uid}]
            },
            "spec": {
                "holderIdentity": self._node,
                "leaseDurationSeconds": DURATION_S,
                "acquireTime": self._acquired,
                "renewTime": _now(),
            },
        }
        try:
            await self._api.patch(f"{self._collection}/{self._name}", body, MERGE_PATCH, timeout_s=RENEW_TIMEOUT_S)
        except NotFoundError:
            body["metadata"]["name"] = self._name
            await self._api.create(self._collection, {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", **body})
            log.info("lease made", lease=self._name)


def _now() -> str:
    """As metav1.MicroTime."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
