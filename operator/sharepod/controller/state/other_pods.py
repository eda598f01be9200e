"""Pods without the tenant label: counts their resource requests on their nodes, and finds Pods that use claims, are
plugin holders, or wait for whole GPUs.

Guarantees:
- A Pod's requests count once, on the node of its newest version. The Pod of a plugin holder also counts before it is
  bound, on the node to which it is pinned.
- Of a Pod that uses claims, the facts are stored; of any other Pod, only the resourceVersion.
- A GET or a list that is older than the end of a Pod does not restore the Pod.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from sharepod.api.units import TenantId
from sharepod.placement.state.cluster import Cluster

from .claims_seen import ClaimsSeen
from .facts.claim_facts import uses_claims
from .facts.pod_facts import other_pod, waits_for_whole_gpus
from .holders_seen import HoldersSeen
from .store import Latest

Json = Mapping[str, Any]


class OtherPods:
    """Store of the Pods without the tenant label.

    Args:
        cluster: Placement's model, in which the Pods' requests are counted.
        claims: Store of Pods that use claims.
        holders: Store of plugin holders.
        is_tenant: Returns True if the Pod with this uid now has the tenant label.
        on_room_changed: Called when capacity may have become free.
        on_whole_gpus_wanted: Called when the set of Pods that wait for whole GPUs has changed.
    """

    def __init__(
        self,
        cluster: Cluster,
        claims: ClaimsSeen,
        holders: HoldersSeen,
        *,
        is_tenant: Callable[[str], bool],
        on_room_changed: Callable[[], None],
        on_whole_gpus_wanted: Callable[[], None],
    ) -> None:
        self._cluster = cluster
        self._claims = claims
        self._holders = holders
        self._is_tenant = is_tenant
        self._on_room_changed = on_room_changed
        self._on_whole_gpus_wanted = on_whole_gpus_wanted
        self._versions: dict[str, int] = {}
        self._ended: Latest[float] = Latest()
        """By uid of a Pod that was deleted or stopped matching the selector: the version at which it did."""

    def put(self, raw: Json) -> None:
        """Count the requests of a Pod on its node. Store its facts if it uses claims or belongs to a plugin holder."""
        uid, version = str(raw["metadata"]["uid"]), int(raw["metadata"].get("resourceVersion") or 0)
        if version < self._versions.get(uid, 0) or version <= self._ended.get(uid, -1):
            return
        self._ended.pop(uid, None)
        node, needs = other_pod(raw)
        self._versions[uid] = version
        tenant = self._claim_of(raw) if uses_claims(raw) else None
        holder = self._holders.put(raw)
        node = node or (holder.node if holder is not None else "")
        waits = waits_for_whole_gpus(raw) if holder is None else None
        if self._cluster.set_whole_gpu_pod(uid, waits):
            self._on_whole_gpus_wanted()
        if node:
            before = self._cluster.room_version
            self._cluster.set_pod_usage(node, uid, needs, tenant=tenant)
            if self._cluster.room_version != before:
                self._on_room_changed()

    def _claim_of(self, raw: Json) -> TenantId | None:
        """Record a Pod that uses claims. Return its first claim, with whose reservation the Pod's requests are counted
        already. None if it has no known claim.
        """
        pod = self._claims.put_pod(raw)
        first = next(self._claims.of_pod(pod), None) if pod is not None else None
        return TenantId(first.uid) if first is not None else None

    def drop(self, uid: str, version: float = math.inf) -> None:
        """Stop counting a Pod that was deleted or stopped matching the selector at `version`. A later version is
        counted again."""
        if self._versions.get(uid, 0) > version:
            return
        self._versions.pop(uid, None)
        self._ended[uid] = version
        self._claims.drop_pod(uid, version)
        self._holders.drop(uid)
        if self._cluster.set_whole_gpu_pod(uid, None):
            self._on_room_changed()
        if not self._is_tenant(uid):
            self._cluster.remove_pod(uid)
            self._on_room_changed()

    def versions(self) -> Mapping[str, int]:
        """Return the version of each Pod by uid, as a view that changes with the store."""
        return self._versions

    def invalidate(self) -> None:
        """Mark all cached versions stale, because etcd was restored from a backup."""
        self._versions = dict.fromkeys(self._versions, 0)
        self._ended.clear()
        self._claims.invalidate_pods()
