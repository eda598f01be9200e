"""Anticipation: whether a free GPU is kept idle for a pausing tenant (the sleeper), or granted to a tenant that
overruns its turns.

Guarantees:
- S8: A GPU is kept idle only for a tenant with credit, at that tenant's cost. So the idle time is part of the sleeper's
  share, and every other tenant gets its request.
- A GPU is not kept idle against a tenant that the sleeper would not precede, that has waited long with credit, or that
  woke with credit.
- A GPU is not kept idle against a gang, or members of a group, with credit: these would wait with all their GPUs.
- A GPU is kept idle for at most a longest quantum after the sleeper has drained.
- The GPUs of a sleeping gang are all kept idle, or none (turns.py).
- No GPU is kept idle if the sleeper can wait for the candidate's overrun in each of its steps and still get its
  request.
"""

from __future__ import annotations

from collections.abc import Iterable

from .parameters import Parameters
from .plan import Anticipation
from .tenant import TokenTenant


def anticipate(
    now: int, candidate: TokenTenant, tenants: Iterable[TokenTenant], parameters: Parameters
) -> Anticipation | None:
    """Return the sleeper for which the GPU is kept idle instead of being granted to `candidate`; None if none.

    Args:
        now: The present moment.
        candidate: The tenant that would be next. Its account is settled.
        tenants: The tenants of the GPU.
        parameters: Durations of the scheduler. A candidate with credit that has waited `idle_patience_ns` is granted at
            once.
    """
    since = candidate.waiting_since
    if candidate.starving:
        return None
    waited_long = since is not None and now - since >= parameters.idle_patience_ns
    if candidate.account.assured > 0 and (candidate.woke_with_credit or waited_long):
        return None
    overrun = candidate.habits.overrun_ns
    for tenant in tenants:
        request = tenant.account.request_milli
        if tenant.asleep_since is None or tenant.hold is not None or not request:
            continue
        if overrun <= tenant.habits.tolerated_ns(request):
            continue
        window = tenant.habits.window(overrun, parameters.turn_min_ns, parameters.quantum_max_ns)
        if tenant.asleep_since + window > now:
            until = min(tenant.asleep_since + window, _goes_first_until(now, tenant, candidate))
            if until > now:
                return Anticipation(tenant, until)
    return None


def _goes_first_until(now: int, sleeper: TokenTenant, candidate: TokenTenant) -> int:
    """Return until when the sleeper precedes the candidate, if the sleeper pays from now on; `now` or earlier: it does
    not precede."""
    account, other = sleeper.account, candidate.account
    level = account.assured + (now - account.at) * account.request_milli
    if level <= 0:
        return now
    until = now + level // max(1, 1000 - account.request_milli)
    if other.request_milli:  # its lag grows by the time that passes; the sleeper's lag shrinks
        ahead = level // account.request_milli - other.lag_ns()
        until = min(until, now + ahead * account.request_milli // 1000)
    return until
