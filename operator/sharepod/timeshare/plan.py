"""Who starts now, given in what order tenants are to be served.

A tenant that cannot start yet keeps the GPUs that it needs from the time on at which the last of them is expected to
be free; until then they are lent to later ones whose quantum fits in between. So a gang is not starved by tenants of
single GPUs, and its waiting wastes little.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from .tenant import TokenTenant


@dataclass(frozen=True)
class Turn:
    """`lent`: the GPUs are kept for another, who is due when the quantum ends at the latest."""

    tenant: TokenTenant
    quantum_ns: int
    lent: bool


def affected(gpus: Iterable[str], sharing: Mapping[str, Sequence[TokenTenant]]) -> list[TokenTenant]:
    """Who waits for one of these GPUs, or for one together with it, through gangs. `sharing`: all tenants by GPU."""
    found: dict[str, TokenTenant] = {}
    pending, seen = sorted(gpus), set[str]()
    if len(pending) == 1 and all(len(tenant.gpus) == 1 for tenant in sharing.get(pending[0], ())):
        return [t for t in sharing.get(pending[0], ()) if t.waiting_since is not None and not t.throttled]
    while pending:
        gpu = pending.pop()
        seen.add(gpu)
        for tenant in sharing.get(gpu, ()):
            if tenant.runnable and tenant.id not in found:
                found[tenant.id] = tenant
                pending.extend(other for other in tenant.gpus if other not in seen)
    return list(found.values())


def crowds(gpus: Iterable[str], sharing: Mapping[str, Sequence[TokenTenant]]) -> dict[str, int]:
    """How many compete for each of these GPUs: those that wait for it and nothing else, and those that hold it."""
    return {gpu: sum(1 for tenant in sharing[gpu] if tenant.runnable or tenant.holding) for gpu in gpus}


def plan(
    ordered: Sequence[TokenTenant],
    free_at: Mapping[str, int],
    *,
    now: int,
    quantum: Callable[[TokenTenant], int],
    shortest_ns: int,
) -> list[Turn]:
    """The turns that begin at `now`. `free_at`: when each GPU that is held is expected to be free; others are free
    now."""
    held = set(free_at)
    ends = dict(free_at)
    kept_from: dict[str, int] = {}
    turns: list[Turn] = []
    for tenant in ordered:
        length = quantum(tenant)
        if held.isdisjoint(tenant.gpus):
            room = min((kept_from[gpu] - now for gpu in tenant.gpus if gpu in kept_from), default=None)
            if room is None or room >= shortest_ns:
                length = length if room is None else min(length, room)
                turns.append(Turn(tenant, length, room is not None))
                held.update(tenant.gpus)
                ends.update(dict.fromkeys(tenant.gpus, now + length))
                continue
        start = max(ends.get(gpu, now) for gpu in tenant.gpus)
        for gpu in tenant.gpus:
            kept_from[gpu] = min(kept_from.get(gpu, start), start)
            ends[gpu] = start + length
    return turns
