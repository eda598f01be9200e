"""How GPU time is shared: a token scheduler that is pure, with the clock passed in.

A *tenant* holds a *token* for its GPUs, and may launch work until its *quantum* ends. Nothing here waits, sleeps or
reads a clock.
"""

from .account import Account, AccountSnapshot, TimeUsage
from .actions import Action, Preemption, TokenGrant, TokenRevocation
from .parameters import Parameters
from .scheduler import Scheduler

__all__ = [
    "Account",
    "AccountSnapshot",
    "Action",
    "Parameters",
    "Preemption",
    "Scheduler",
    "TimeUsage",
    "TokenGrant",
    "TokenRevocation",
]
