"""Turns that begin now, given the order in which tenants are to be served.

Guarantees:
- S4: A tenant gets all its GPUs in one turn, or none.
- S5: A tenant that cannot start yet reserves its GPUs from the moment at which the last of them is expected to be free.
  Until then they are given only to turns that end by that moment (backfill). So tenants of single GPUs do not starve a
  gang, and the gang's waiting wastes little.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from .tenant import TokenTenant


@dataclass(frozen=True)
class Turn:
    """A turn of one tenant on all its GPUs."""

    tenant: TokenTenant
    quantum_ns: int
    backfill: bool
    """The GPUs are reserved for another tenant from the end of this turn at the latest."""


@dataclass(frozen=True)
class Anticipation:
    """A free GPU kept idle for a tenant of one GPU that sleeps and is expected back soon."""

    tenant: TokenTenant
    until: int
    """Moment at which the decision is to be made again, in nanoseconds of the clock."""


def waiting_with(gpus: Iterable[str], tenants_on: Mapping[str, Sequence[TokenTenant]]) -> list[TokenTenant]:
    """Return the runnable tenants of these GPUs, and of all GPUs that runnable gangs connect with them.

    Args:
        gpus: UUIDs of the GPUs.
        tenants_on: All tenants by GPU.
    """
    found: dict[str, TokenTenant] = {}
    pending, seen = sorted(gpus), set[str]()
    if len(pending) == 1 and all(len(tenant.gpus) == 1 for tenant in tenants_on.get(pending[0], ())):
        return [t for t in tenants_on.get(pending[0], ()) if t.waiting_since is not None and not t.throttled]
    while pending:
        gpu = pending.pop()
        seen.add(gpu)
        for tenant in tenants_on.get(gpu, ()):
            if tenant.runnable and tenant.id not in found:
                found[tenant.id] = tenant
                pending.extend(other for other in tenant.gpus if other not in seen)
    return list(found.values())


def competing_weight(
    gpus: Iterable[str], tenants_on: Mapping[str, Sequence[TokenTenant]]
) -> dict[tuple[str, bool], int]:
    """Return the weight of the tenants that compete for each of these GPUs, by GPU and kind (whether best effort):
    those that are runnable, and those that hold it."""
    weights: dict[tuple[str, bool], int] = {}
    for gpu in gpus:
        for tenant in tenants_on[gpu]:
            if tenant.runnable or tenant.holding:
                key = gpu, tenant.best_effort
                weights[key] = weights.get(key, 0) + tenant.weight
    return weights


def plan_turns(
    ordered: Sequence[TokenTenant],
    free_at: Mapping[str, int],
    *,
    now: int,
    quantum: Callable[[TokenTenant], int],
    shortest_ns: int,
    overrun: Callable[[TokenTenant], int],
) -> list[Turn]:
    """Return the turns that begin at `now`.

    Args:
        ordered: Tenants that want a turn, the first to be served first.
        free_at: Expected moment at which each GPU that is held is free. GPUs that are left out are free now.
        now: The present moment.
        quantum: Length of a tenant's turn, in nanoseconds.
        shortest_ns: Shortest turn worth giving as backfill.
        overrun: Time for which a tenant usually holds beyond the end of its turn, in nanoseconds.
    """
    held = set(free_at)
    ends = dict(free_at)
    reserved_from: dict[str, int] = {}
    turns: list[Turn] = []
    for tenant in ordered:
        length = quantum(tenant)
        if held.isdisjoint(tenant.gpus):
            room = min((reserved_from[gpu] - now for gpu in tenant.gpus if gpu in reserved_from), default=None)
            room = None if room is None else room - overrun(tenant)
            if room is None or room >= shortest_ns:
                length = length if room is None else min(length, room)
                turns.append(Turn(tenant, length, room is not None))
                held.update(tenant.gpus)
                ends.update(dict.fromkeys(tenant.gpus, now + length + overrun(tenant)))
                continue
        start = max(ends.get(gpu, now) for gpu in tenant.gpus)
        for gpu in tenant.gpus:
            reserved_from[gpu] = min(reserved_from.get(gpu, start), start)
            ends[gpu] = start + length
    return turns
