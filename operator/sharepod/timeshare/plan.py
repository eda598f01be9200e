"""Plan of the turns that begin now, given the order of service.

Guarantees:
- S4: A contender (a tenant, or the members of a group that want the token) gets all its GPUs in one turn, or none.
- S5: For a contender that cannot start yet, its GPUs are reserved from the moment at which the last of them is expected
  to be free. Before that moment, they are granted only for turns that end by then (backfill).
- So tenants with one GPU do not starve a gang, and little GPU time is idle while a gang waits.
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
    """True if the GPUs are reserved for another tenant. This turn then must end before that tenant's turn begins."""
    rides: bool = False
    """True if the turn uses the credit of the tenant's group. Its time is then charged as guaranteed, even if the
    tenant itself has no credit."""


@dataclass(frozen=True)
class Anticipation:
    """Decision to keep the free GPUs of a sleeping tenant idle, because the tenant will probably want them again
    soon."""

    tenant: TokenTenant
    until: int
    """Moment of the next decision, in nanoseconds of the clock."""


def waiting_with(
    gpus: Iterable[str],
    tenants_on: Mapping[str, Sequence[TokenTenant]],
    groups: Mapping[str, Sequence[TokenTenant]],
    awaited: Mapping[str, Anticipation],
) -> list[TokenTenant]:
    """Return the runnable tenants whose turns must be decided together: the tenants of these GPUs, and of all GPUs that
    gangs and groups link with these.

    A gang links its GPUs while it is runnable, or while its GPUs are kept idle for it.

    Args:
        gpus: UUIDs of the GPUs.
        tenants_on: All tenants by GPU.
        groups: The tenants of each group.
        awaited: For each GPU that is kept idle: the decision, with the sleeping tenant.
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
    """Return the sum of the weights of the tenants that compete for each GPU: they hold it, or wait and are not
    throttled. Key: (GPU, True for best-effort tenants)."""
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
        free_at: By held GPU: the moment at which it is expected to be free. All other GPUs are free now.
        now: The present moment.
        quantum: Returns the length of a contender's turn, in nanoseconds.
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
