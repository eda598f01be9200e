"""Anticipation: decides whether a free GPU is kept idle for a pausing tenant (the sleeper), or granted to a waiting
tenant (the candidate) whose turns usually overrun.

Guarantees:
- S8: A GPU is kept idle only for a sleeper with credit, and the sleeper pays for the idle time. So that time is part of
  the sleeper's share, and every other tenant still gets its request.
- A GPU is not kept idle if the candidate would be served before the sleeper, or if the candidate woke with credit or
  has waited long with credit.
- A GPU is not kept idle if the candidate is a gang, or members of a group, with credit. Otherwise all their GPUs would
  stay idle.
- A GPU is kept idle for at most a longest quantum after the sleeper has drained.
- Either all GPUs of a sleeping gang (a tenant with several GPUs) are kept idle, or none (turns.py).
- No GPU is kept idle if the sleeper gets its request even when it waits for the candidate's overrun in each of its
  steps. A step is a hold and the pause after it.
"""

from __future__ import annotations

from collections.abc import Iterable

from .parameters import Parameters
from .plan import Anticipation
from .tenant import TokenTenant


def anticipate(
    now: int, candidate: TokenTenant, tenants: Iterable[TokenTenant], parameters: Parameters
) -> Anticipation | None:
    """Return the sleeper for which the GPU must be kept idle. None if the GPU may be granted to `candidate`.

    Args:
        now: The present moment.
        candidate: The tenant that gets the next turn unless the GPU is kept idle. Its account must be charged up to
            `now`.
        tenants: The tenants of the GPU.
        parameters: Durations of the scheduler. A candidate with credit that has waited for `idle_patience_ns` gets the
            GPU at once.
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
    """Return the moment until which the sleeper would precede the candidate in the order of service. Paying for the
    idle GPU uses up the sleeper's credit. `now` or earlier if the sleeper does not precede the candidate."""
    account, other = sleeper.account, candidate.account
    level = account.assured + (now - account.at) * account.request_milli
    if level <= 0:
        return now
    until = now + level // max(1, 1000 - account.request_milli)
    if other.request_milli:  # the other tenant's lag grows by the time that passes, and the sleeper's lag shrinks
        ahead = level // account.request_milli - other.lag_ns()
        until = min(until, now + ahead * account.request_milli // 1000)
    return until
