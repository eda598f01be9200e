"""Liveness of the agent: a Lease that it renews while its event loop runs and the API server answers.

Guarantees:
- Only one agent writes the Lease, because a node has one agent.
- The Lease is owned by the GPUNode and is deleted with it.
- The agent itself decides nothing by the Lease. The operator places no tenant on a node whose agent does not renew its
  Lease.
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
"""Seconds between renewals. Three of them may fail before the Lease expires."""
DURATION_S = 20
"""Validity of a renewal in seconds, as written into the Lease."""
RENEW_TIMEOUT_S = 4.0
"""Timeout of one renewal in seconds. It is shorter than `RENEW_S`, so that at most one renewal is running."""
FIRST_RETRY_S = 1.0
"""Seconds between attempts until the first renewal has succeeded, because placement on the node waits for it."""


def lease_name(node: str) -> str:
    """Return the name of the Lease of this node's agent."""
    return f"sharepod-agent-{node}"


class LivenessLease:
    """Lease of this node's agent, renewed by `run`."""

    def __init__(self, api: Connection, *, namespace: str, node: str, owner_uid: Callable[[], str | None]) -> None:
        """Args:
        api: connection to the API server.
        namespace: namespace of the Lease.
        node: name of the node.
        owner_uid: returns the UID of this node's GPUNode; while that is None (unknown), the Lease is not renewed.
        """
        self._api = api
        self._collection = f"/apis/coordination.k8s.io/v1/namespaces/{namespace}/leases"
        self._name = lease_name(node)
        self._node = node
        self._owner_uid = owner_uid
        self._acquired = _now()
        self._failing: str | None = None
        self.renewed_at: float | None = None
        """Time of the last renewal, on the event loop's clock; None before the first."""

    async def run(self) -> None:
        """Renew the Lease at intervals, until cancelled. A failed renewal is logged."""
        loop = asyncio.get_running_loop()
        while True:
            begun = loop.time()
            owner_uid = self._owner_uid()
            if owner_uid is not None:
                await self._renew_and_tell(owner_uid)
            pause = RENEW_S if self.renewed_at is not None else FIRST_RETRY_S
            await asyncio.sleep(max(0.0, begun + pause - loop.time()))

    async def _renew_and_tell(self, owner_uid: str) -> None:
        try:
            await self.renew(owner_uid)
        except ApiError as error:
            if self._failing != str(error):
                log.error(
                    "cannot renew the agent's Lease; the operator will place nothing on this node",
                    lease=self._name,
                    error=str(error),
                )
            self._failing = str(error)
            return
        if self._failing is not None:
            log.info("agent's Lease is renewed again", lease=self._name)
        self._failing = None
        self.renewed_at = asyncio.get_running_loop().time()

    async def renew(self, owner_uid: str) -> None:
        """Renew the Lease once, or create it. Raise `ApiError`."""
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
            log.info("created the agent's Lease", lease=self._name)


def _now() -> str:
    """Return the current time in the format of metav1.MicroTime."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
