"""Changes of a GPUNode: finds the tenants that a new version affects. Only these are enqueued.

Guarantees:
- A tenant is not affected while its usage and totals differ by less than a step from its written status. So an idle
  cluster causes no work.
- Any decrease of a tenant's memory affects the tenant, because it may now be possible to shrink its share.
"""

from __future__ import annotations

from collections.abc import Callable

from sharepod.api.gpunode import Tenant, TenantStatus
from sharepod.api.sharepod import SharePodStatus, Usage
from sharepod.api.units import parse_fraction
from sharepod.budgets.sharepod_totals import totals_to_write

from .facts.node_facts import GpuNodeFacts

USAGE_STEP_MILLI = 50
"""Smallest change of usage that is written to a SharePod's status: 50 thousandths of the GPU's time or of the granted
memory. Metrics and GPUNodes show smaller changes.
"""


def tenants_concerned(
    before: GpuNodeFacts | None, now: GpuNodeFacts, written: Callable[[str], SharePodStatus | None]
) -> set[str]:
    """Return the tenants of a GPUNode whose row, report by the agent, GPU or release has changed.

    Args:
        before: The former version of the GPUNode; None if unknown.
        now: The new version of the GPUNode.
        written: Returns a tenant's last written status; None for a claim.
    """
    rows = now.rows
    if before is None:
        return set(rows)
    old = before.rows
    tenants = {tenant for tenant in {*old, *rows} if _differ(old.get(tenant), rows.get(tenant))}
    seen, was = ({item.id: item for item in facts.status.tenants} for facts in (now, before))
    tenants |= before.unreadable ^ now.unreadable
    tenants |= {
        tenant
        for tenant in {*seen, *was}
        if _differ(one := seen.get(tenant), other := was.get(tenant))
        and not (_only_held(one, other) and not _moved(written(tenant), one, rows.get(tenant)))
    }
    health, was_health = ({gpu.uuid: (gpu.health, gpu.reason) for gpu in facts.status.gpus} for facts in (now, before))
    turned = {uuid for uuid in {*health, *was_health} if health.get(uuid) != was_health.get(uuid)}
    gpus = {uuid for row in now.spec.tenants for uuid in row.gpus}
    turned.update(
        set(now.missing_gpus(gpus)).symmetric_difference(before.missing_gpus(gpus))
    )  # also changes when the agent serves again, because until then no GPU counts as missing
    tenants |= {row.id for row in now.spec.tenants if turned.intersection(row.gpus)}
    if before.status.observed_generation != now.status.observed_generation:
        tenants |= {row.id for row in now.spec.tenants if row.state.value == "Releasing"}
    return tenants | (before.forced ^ now.forced)


def _moved(was: SharePodStatus | None, seen: TenantStatus | None, row: Tenant | None) -> bool:
    """Return True if the usage or totals that the agent reports differ from the written status by a step or more."""
    if usage_moved(was.usage if was is not None else None, seen, row):
        return True
    return was is not None and totals_to_write(was.consumed, seen, drained=False) is not None


def usage_moved(was: Usage | None, seen: TenantStatus | None, row: Tenant | None) -> bool:
    """Return True if reported usage differs from the written status by a step or more, so that it must be written.

    Args:
        was: Usage as last written. None counts as no time and no memory.
        seen: The agent's report of the tenant.
        row: The tenant's row. A step of memory is a part of the row's memory.
    """
    if seen is None or row is None:
        return was is not None
    if seen.held_milli is None or (was is None and not seen.connected):
        return False
    held, memory = (was.held_milli, was.memory) if was is not None else (0, 0)
    progress = parse_fraction(was.progress) if was is not None and was.progress else 0
    moved = abs(seen.memory - memory)
    return (
        abs(seen.held_milli - held) >= USAGE_STEP_MILLI
        or abs((seen.progress_milli or 0) - progress) >= USAGE_STEP_MILLI
        or (moved > 0 and moved * 1000 >= row.memory * USAGE_STEP_MILLI)
    )


def reconciler_facts(gpunode: GpuNodeFacts) -> tuple[object, ...]:
    """Return the parts of a GPUNode that the reconcilers of nodes and of plugin holders depend on, for comparison."""
    return gpunode.spec.pool, gpunode.spec.holders, gpunode.forced, gpunode.status.gpus


def _only_held(one: TenantStatus | None, other: TenantStatus | None) -> bool:
    """Return True if two reports on a tenant differ at most in its GPU time, progress, totals and number of
    processes."""
    if one is None or other is None:
        return False
    return _held_aside(one) == _held_aside(other)


def _held_aside(seen: TenantStatus) -> tuple[object, ...]:
    return seen.memory, seen.connected, seen.enforced, seen.findings, seen.drained


def _differ(one: object, other: object) -> bool:
    """Return True if two entries differ. An unchanged entry is usually the same object (`facts.gpunode_facts`), so
    identity is compared first."""
    return one is not other and one != other
