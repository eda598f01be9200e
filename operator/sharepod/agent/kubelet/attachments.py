"""Attachments: one view of the CSI volumes and the claims by which pods of this node have tenants' directories
mounted."""

from __future__ import annotations

from collections.abc import Hashable

from .csi.volumes import Volumes
from .dra.prepared_claims import PreparedClaims


class Attachments:
    """Volumes and claims of one node, by tenant. This class reads them and records pods; the drivers attach and
    detach."""

    def __init__(self, volumes: Volumes, claims: PreparedClaims) -> None:
        self._volumes = volumes
        self._claims = claims

    def attached(self, tenant_id: str) -> str | None:
        """Return as text, for a message, how the tenant's directory is attached to a pod. None if it is not."""
        published = self._volumes.published(tenant_id)
        if published:
            return f"its volume is still published at {published[0]}"
        prepared = self._claims.prepared(tenant_id)
        return f"its claim {prepared[0]} is still prepared" if prepared else None

    def run(self, tenant_id: str) -> Hashable:
        """Return a value that identifies the tenant's current run: it changes with each attachment. None if the tenant
        was never attached."""
        if tenant_id not in self.tenants():
            return None
        return (self._volumes.pods(tenant_id), self._claims.times_prepared(tenant_id))

    def pods(self, tenant_id: str) -> frozenset[str]:
        """Return the UIDs of all pods that are known to have or have had the tenant's directory."""
        return self._volumes.pods(tenant_id) | self._claims.pods(tenant_id)

    def tenants(self) -> frozenset[str]:
        """Return the ids of all tenants whose directories are attached to a pod, or were."""
        return self._volumes.tenants() | self._claims.tenants()

    def learn(self, tenant_id: str, pod_uid: str) -> None:
        """Record a pod in which a process with the tenant's directory was seen. This is needed because the kubelet does
        not name the pods of a claim."""
        if pod_uid not in self.pods(tenant_id):
            self._claims.learn(tenant_id, pod_uid)
