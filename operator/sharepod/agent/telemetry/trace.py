"""Trace of one GPU in the format of Chrome's trace viewer and Perfetto. Pure.

Guarantees:
- One track shows the GPU: which tenants hold it, alone or together, or that no tenant does. The slices (intervals) of
  the track have no gap and no overlap.
- One track for each tenant shows its waits, its turns, and the drain at the end of each turn.
- Times are microseconds since the trace's begin.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from sharepod.agent.shares.turn_log import LoggedTurn

_GPU_TRACK = 0
Slice = tuple[str, int, int]
"""(name, begin, end). Moments in nanoseconds of the agent's clock."""


def trace(
    gpu: str, turns: Sequence[LoggedTurn], names: Mapping[str, str], begin: int, end: int, **about: Any
) -> dict[str, Any]:
    """Return the trace of a GPU between two moments in nanoseconds of the clock.

    Args:
        gpu: UUID of the GPU.
        turns: Turns on the GPU, including current turns and waits.
        names: Names of tenants by their ids.
        begin: Start of the trace.
        end: End of the trace.
        about: Further facts, for `otherData`.
    """
    tracks = {tenant: number for number, tenant in enumerate(sorted({turn.tenant for turn in turns}), _GPU_TRACK + 1)}
    events: list[dict[str, Any]] = [
        _name("process_name", _GPU_TRACK, f"GPU {gpu}"),
        _name("thread_name", _GPU_TRACK, "GPU"),
    ]
    events += [_name("thread_name", track, names.get(tenant, tenant)) for tenant, track in tracks.items()]
    slices = [(_GPU_TRACK, each) for each in gpu_slices(turns, names, begin, end)]
    slices += [(tracks[turn.tenant], each) for turn in turns for each in tenant_slices(turn, begin, end)]
    events += [
        {"ph": "X", "pid": 1, "tid": track, "name": name, "ts": (at - begin) / 1000, "dur": (until - at) / 1000}
        for track, (name, at, until) in slices
    ]
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"gpu": gpu, **about}}


def gpu_slices(turns: Iterable[LoggedTurn], names: Mapping[str, str], begin: int, end: int) -> Iterator[Slice]:
    """Yield the slices of the GPU's track: the names of its holders, `waited for` while tenants wait and none holds, or
    `idle`."""
    changes: dict[int, list[tuple[str, bool, int]]] = {begin: [], end: []}

    def between(tenant: str, holds: bool, since: int, until: int) -> None:
        if (at := max(since, begin)) < (to := min(until, end)):
            changes.setdefault(at, []).append((tenant, holds, 1))
            changes.setdefault(to, []).append((tenant, holds, -1))

    for turn in turns:
        if turn.waited_since is not None:
            between(turn.tenant, False, turn.waited_since, end if turn.begin is None else turn.begin)
        if turn.begin is not None:
            ended = end if turn.end is None else turn.end
            between(turn.tenant, True, turn.begin, ended if turn.lost is None else turn.lost)
    counts: dict[tuple[str, bool], int] = {}
    last: Slice | None = None
    moments = sorted(changes)
    for at, until in itertools.pairwise(moments):
        for tenant, holds, change in changes[at]:
            counts[tenant, holds] = counts.get((tenant, holds), 0) + change
        active = [key for key, count in counts.items() if count > 0]
        holders = sorted(names.get(tenant, tenant) for tenant, holds in active if holds)
        name = " + ".join(holders) or ("waited for" if active else "idle")
        if last is not None and last[0] == name:
            last = (name, last[1], until)
            continue
        if last is not None:
            yield last
        last = (name, at, until)
    if last is not None:
        yield last


def tenant_slices(turn: LoggedTurn, begin: int, end: int) -> Iterator[Slice]:
    """Yield the slices of a tenant's track for one turn: `waits`, `holds`, within it `drains` at the end, and
    `overruns` after the tenant has lost the GPU."""
    ended = end if turn.end is None else turn.end
    held_until = ended if turn.lost is None else turn.lost
    parts: list[tuple[str, int | None, int]] = [
        ("waits", turn.waited_since, end if turn.begin is None else turn.begin),
        ("holds", turn.begin, held_until),
        ("drains", turn.draining, held_until),
        ("overruns", turn.lost, ended),
    ]
    for name, since, until in parts:
        if since is not None and max(since, begin) < min(until, end):
            yield name, max(since, begin), min(until, end)


def _name(kind: str, track: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "pid": 1, "tid": track, "name": kind, "args": {"name": name}}
