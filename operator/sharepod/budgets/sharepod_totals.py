"""Totals of a SharePod: sums its agents' reports, and decides when the sums must be written. Pure.

Guarantees:
- Totals are the sum, over the SharePod's shares, of the largest count reported of each. So a report that is read twice
  counts once, and a share's count continues after a restart of its agent.
- They are written when time or memory has grown by an eighth and by `_LEAST_S` or `_LEAST_MIB_S`, and when they are
  final. A SharePod at rest causes no write.
- A report of an earlier share, which its agent has not replaced yet, does not count for the present share.
"""

from __future__ import annotations

from sharepod.api.consumption import MAX_COUNTER
from sharepod.api.gpunode import TenantStatus
from sharepod.api.sharepod import GpuTotals, SharePodConsumption

_LEAST_S = 600
"""Smallest growth that is written, in seconds of GPU time held plus reserved. A SharePod with one GPU causes at most
one such write in five minutes."""
_LEAST_MIB_S = 300 * 80 * 1024
"""Smallest growth of memory x time that is written, in MiB x s: five minutes of 80 GiB."""
_PART = 8
"""Totals are written when they have grown by the last written total divided by this number. That is some 30 writes on
the first day, and a few on each later day."""
_AMOUNTS = tuple(GpuTotals.model_fields)


def totals_to_write(
    was: SharePodConsumption | None, seen: TenantStatus | None, *, drained: bool, last: bool = False
) -> SharePodConsumption | None:
    """Return the present totals if they must be written; None if not.

    Args:
        was: The totals as last written.
        seen: The agent's report.
        drained: True if the agent has confirmed that the share is drained, so the count is final.
        last: True if no further report will come, because the row is being removed.
    """
    if seen is None or seen.drained != drained:
        return None
    now = _totals(was, seen)
    if now is None:
        return None
    if drained or last:
        return now if was is None or any(getattr(now, name) > getattr(was, name) for name in _AMOUNTS) else None
    due = _is_due(_time(was), _time(now), _LEAST_S) or _is_due(_memory(was), _memory(now), _LEAST_MIB_S)
    return now if due else None


def _is_due(was: int, now: int, least: int) -> bool:
    return now - was >= least and (now - was) * _PART >= was


def _totals(was: SharePodConsumption | None, seen: TenantStatus) -> SharePodConsumption | None:
    """Return the totals, including the agent's report. None if the report has no count."""
    if seen.counted_since is None:
        return None
    same = was is not None and was.counted_since == seen.counted_since
    former = GpuTotals() if was is None else was.former if same else _as_former(was)
    amounts = {name: min(getattr(former, name) + (getattr(seen, name) or 0), MAX_COUNTER) for name in _AMOUNTS}
    if was is not None:
        amounts = {name: max(amount, getattr(was, name)) for name, amount in amounts.items()}
    since = was.since if was is not None else seen.counted_since
    return SharePodConsumption(since=since, counted_since=seen.counted_since, former=former, **amounts)


def _as_former(was: SharePodConsumption) -> GpuTotals:
    return GpuTotals(**{name: getattr(was, name) for name in _AMOUNTS})


def _time(totals: GpuTotals | None) -> int:
    return totals.held_seconds + totals.reserved_seconds if totals is not None else 0


def _memory(totals: GpuTotals | None) -> int:
    return totals.memory_mebibyte_seconds if totals is not None else 0
