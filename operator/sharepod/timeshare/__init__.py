"""Token scheduler for GPU time: decides which tenant holds which GPU, and for how long. See README.md."""

from .account import Account, AccountSnapshot, TimeUsage
from .actions import Action, Preemption, PreparedHandOff, Suspension, TokenGrant, TokenRevocation
from .gpu_time import GpuTime
from .hold import CoRunEnd
from .parameters import Parameters, Sharing
from .progress import Samples
from .scheduler import CoRuns, Scheduler
from .turn_history import TurnSpan, TurnSpans

__all__ = [
    "Account",
    "AccountSnapshot",
    "Action",
    "CoRunEnd",
    "CoRuns",
    "GpuTime",
    "Parameters",
    "Preemption",
    "PreparedHandOff",
    "Samples",
    "Scheduler",
    "Sharing",
    "Suspension",
    "TimeUsage",
    "TokenGrant",
    "TokenRevocation",
    "TurnSpan",
    "TurnSpans",
]
