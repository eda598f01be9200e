"""Resizes: deciding about another share for a tenant that has one.

Guarantees:
- A share changes only where the same GPUs have room for it, and never below what is in use of their memory.
- Nothing is decided for a tenant that is gone, whole GPUs, or a request that has changed since it was queued.
"""

from __future__ import annotations

from dataclasses import replace

import structlog

from sharepod.api.gpunode import Mode
from sharepod.api.sharepod import GpuRequest
from sharepod.api.units import TenantId
from sharepod.controller.state.cluster_state import ClusterState
from sharepod.controller.state.memos import TenantMemos
from sharepod.placement.resizing import resize
from sharepod.placement.state.cluster import Cluster
from sharepod.placement.state.types import Refusal

log = structlog.get_logger(__name__)


def try_resize(state: ClusterState, memos: TenantMemos, tenant: str) -> str | Refusal | None:
    """Decide about the share of a tenant.

    Return the node where the share changed, the refusal, or None where nothing is to be decided.
    """
    asked = _share_asked(state, tenant)
    reserved = state.cluster.reservations_of(TenantId(tenant))
    if asked is None or len(reserved) != 1 or reserved[0][1].mode is Mode.EXCLUSIVE:
        return None
    if memos.of(tenant).resize_counted not in (None, asked) and state.sharepods.get(tenant) is not None:
        return None  # it asks for something else by now, and is looked at for that
    gpunode = state.gpunodes.named(reserved[0][0])
    seen = (item.memory for item in (gpunode.status.tenants if gpunode else ()) if item.id == tenant)
    in_use = next(seen, 0)  # of the GPU where it uses most
    answer = resize(
        state.cluster,
        TenantId(tenant),
        request_milli=asked.request_milli,
        limit_milli=asked.limit_milli,
        memory=asked.memory,
        in_use=in_use,
    )
    return answer if isinstance(answer, Refusal) else reserved[0][0]


def has_request_0(cluster: Cluster, tenant: str) -> bool:
    """Return whether a tenant has no time of its own: it asked for none, or it was lowered."""
    return any(row.request_milli == 0 for _, row in cluster.reservations_of(TenantId(tenant)))


def _share_asked(state: ClusterState, tenant: str) -> GpuRequest | None:
    """Return the share that a SharePod or claim asks for; None if it is gone or its request is invalid."""
    if (sharepod := state.sharepods.get(tenant)) is not None:
        return sharepod.gpu
    claim = state.seen_claims.claims.get(tenant)
    reserved = state.cluster.reservations_of(TenantId(tenant))
    if claim is None or claim.request is None or not reserved:
        return None
    return replace(claim.request.gpu, memory=reserved[0][1].memory)  # a claim's memory stays as it was granted
