"""How GPU time is shared: a token scheduler that is pure, with the clock passed in.

A *tenant* holds a *token* for its GPUs, and may launch work until its *quantum* ends. Nothing here waits, sleeps or
reads a clock.
"""

from .account import Account, AccountState, Usage
from .actions import Action, Grant, Overdue, Revoke
from .config import Config
from .scheduler import Scheduler

__all__ = ["Account", "AccountState", "Action", "Config", "Grant", "Overdue", "Revoke", "Scheduler", "Usage"]
