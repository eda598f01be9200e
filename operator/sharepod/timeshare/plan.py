"""Turns that begin now, given the order of service.

Guarantees:
- S4: A contender, a tenant or the members of a group that want the token, gets all its GPUs in one turn, or none.
- S5: A tenant that cannot start yet reserves its GPUs from the moment at which the last of them is expected to be free.
  Until then the GPUs are granted only to turns that end by that moment (backfill).
- So tenants with one GPU do not starve a gang, and the gang's waiting wastes little time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from .groups import Contender
from .tenant import TokenTenant


@dataclass(frozen=True)
class Turn:
    """A turn of one tenant on all its GPUs."""

    tenant: TokenTenant
    quantum_ns: int
    backfill: bool
    """The GPUs are reserved for another tenant from the end of this turn."""
    rides: bool = False
    """The turn uses a group's credit: its time is guaranteed, whatever the tenant itself is owed."""


@dataclass(frozen=True)
class Anticipation:
    """Free GPUs kept idle for their sleeping tenant, which is expected back soon."""

    tenant: TokenTenant
    until: int
    """Moment of the next decision, in nanoseconds of the clock."""


def waiting_with(
    gpus: Iterable[str],
    tenants_on: Mapping[str, Sequence[TokenTenant]],
    groups: Mapping[str, Sequence[TokenTenant]],
    awaited: Mapping[str, Anticipation],
) -> list[TokenTenant]:
    """Return the runnable tenants of these GPUs, and of all GPUs that gangs and groups connect with them.

    A gang connects its GPUs while it is runnable, or while they are kept idle for it.

    Args:
        gpus: UUIDs of the GPUs.
        tenants_on: All tenants by GPU.
        groups: The tenants of each group.
        awaited: GPUs that are kept idle, with their sleeping tenant.
    """
    found: dict[str, TokenTenant] = {}
    pending = sorted(gpus)
    if len(pending) == 1 and all(len(t.gpus) == 1 and t.group is None for t in tenants_on.get(pending[0], ())):
        return [t for t in tenants_on.get(pending[0], ()) if t.waiting_since is not None and not t.throttled]
    seen, joined = set(pending), set[str]()

    def reach(others: Iterable[str]) -> None:
        for other in others:
            if other not in seen:
                seen.add(other)
                pending.append(other)

    while pending:
        gpu = pending.pop()
        if gpu in awaited:
            reach(awaited[gpu].tenant.gpus)
        for tenant in tenants_on.get(gpu, ()):
            if tenant.runnable and tenant.id not in found:
                found[tenant.id] = tenant
                reach(tenant.gpus)
            if tenant.group is not None and tenant.group not in joined:
                joined.add(tenant.group)
                for mate in groups[tenant.group]:
                    reach(mate.gpus)
    return list(found.values())


def competing_weight(
    gpus: Iterable[str], tenants_on: Mapping[str, Sequence[TokenTenant]]
) -> dict[tuple[str, bool], int]:
    """Return the weight of the competing tenants (runnable or holding) of each of these GPUs, by GPU and kind (whether
    best effort)."""
    weights: dict[tuple[str, bool], int] = {}
    for gpu in gpus:
        for tenant in tenants_on[gpu]:
            if tenant.runnable or tenant.holding:
                key = gpu, tenant.best_effort
                weights[key] = weights.get(key, 0) + tenant.weight
    return weights


def plan_turns(
    ordered: Sequence[Contender],
    free_at: Mapping[str, int],
    *,
    now: int,
    quantum: Callable[[Contender], int],
    shortest_ns: int,
) -> list[Turn]:
    """Return the turns that begin at `now`.

    Args:
        ordered: Contenders in order of service.
        free_at: Expected moment at which each held GPU is free. GPUs that are left out are free now.
        now: The present moment.
        quantum: Length of a contender's turn, in nanoseconds.
        shortest_ns: Shortest turn worth granting as backfill.
    """
    held = set(free_at)
    ends = dict(free_at)
    reserved_from: dict[str, int] = {}
    turns: list[Turn] = []
    for contender in ordered:
        length, overrun = quantum(contender), contender.overrun_ns
        if held.isdisjoint(contender.gpus):
            room = min((reserved_from[gpu] - now for gpu in contender.gpus if gpu in reserved_from), default=None)
            room = None if room is None else room - overrun
            if room is None or room >= shortest_ns:
                length = length if room is None else min(length, room)
                turns.extend(Turn(tenant, length, room is not None, contender.rides) for tenant in contender.members)
                held.update(contender.gpus)
                ends.update(dict.fromkeys(contender.gpus, now + length + overrun))
                continue
        start = max(ends.get(gpu, now) for gpu in contender.gpus)
        for gpu in contender.gpus:
            reserved_from[gpu] = min(reserved_from.get(gpu, start), start)
            ends[gpu] = start + length
    return turns
