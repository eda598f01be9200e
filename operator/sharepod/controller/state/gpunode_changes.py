"""Concern with a new version of a GPUNode: for whom it changes something; everyone else is left alone."""

from __future__ import annotations

from .facts.node_facts import GpuNodeFacts


def tenants_concerned(before: GpuNodeFacts | None, now: GpuNodeFacts) -> set[str]:
    """Return the tenants whose row, report or release is not as it was."""
    rows = now.rows
    if before is None:
        return set(rows)
    old = before.rows
    tenants = {tenant for tenant in {*old, *rows} if _differ(old.get(tenant), rows.get(tenant))}
    seen, was = ({item.id: item for item in facts.status.tenants} for facts in (now, before))
    tenants |= before.unreadable ^ now.unreadable
    tenants |= {tenant for tenant in {*seen, *was} if _differ(seen.get(tenant), was.get(tenant))}
    health, was_health = ({gpu.uuid: (gpu.health, gpu.reason) for gpu in facts.status.gpus} for facts in (now, before))
    turned = {uuid for uuid in {*health, *was_health} if health.get(uuid) != was_health.get(uuid)}
    tenants |= {row.id for row in now.spec.tenants if turned.intersection(row.gpus)}
    if before.status.observed_generation != now.status.observed_generation:
        tenants |= {row.id for row in now.spec.tenants if row.state.value == "Releasing"}
    return tenants | (before.forced ^ now.forced)


def reconciler_facts(gpunode: GpuNodeFacts) -> tuple[object, ...]:
    """Return the part of a GPUNode that the node's reconciler acts on."""
    return gpunode.spec.pool, gpunode.forced, gpunode.status.gpus


def _differ(one: object, other: object) -> bool:
    """Return whether two entries differ. Most are one object (`facts.gpunode_facts`), which costs no comparison."""
    return one is not other and one != other
