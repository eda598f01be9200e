"""Fault-injecting proxy between a client and the API server."""

from .calls import Call
from .faults import ErrorEvent, Fault, Hold, LoseAnswer, Mute, Refuse, Reset, Rule, Slow, Words, expired
from .server import FaultProxy, Record

__all__ = [
    "Call",
    "ErrorEvent",
    "Fault",
    "FaultProxy",
    "Hold",
    "LoseAnswer",
    "Mute",
    "Record",
    "Refuse",
    "Reset",
    "Rule",
    "Slow",
    "Words",
    "expired",
]
