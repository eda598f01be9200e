"""The wire format between hook and agent, as `shim/include/sharepod/protocol.h` has it.

`parse_client` and `parse_agent` turn any bytes into a frozen frame or raise `ProtocolError`, nothing else; `encode`
is the way back.
"""

from .codec import encode, parse_agent, parse_client
from .frames import (
    FRAME_MAX,
    MAX_GPUS,
    VERSION_MAX,
    VERSION_MIN,
    AgentFrame,
    ClientFrame,
    Drained,
    Draining,
    Frame,
    GpuTerms,
    Grant,
    Hello,
    Limits,
    MemInfo,
    Memory,
    ProtocolError,
    Recall,
    Refused,
    RefusedReason,
    Release,
    Reserve,
    Reserved,
    Revoke,
    Want,
    Welcome,
)
from .hints import HintsPage

__all__ = [
    "FRAME_MAX",
    "MAX_GPUS",
    "VERSION_MAX",
    "VERSION_MIN",
    "AgentFrame",
    "ClientFrame",
    "Drained",
    "Draining",
    "Frame",
    "GpuTerms",
    "Grant",
    "Hello",
    "HintsPage",
    "Limits",
    "MemInfo",
    "Memory",
    "ProtocolError",
    "Recall",
    "Refused",
    "RefusedReason",
    "Release",
    "Reserve",
    "Reserved",
    "Revoke",
    "Want",
    "Welcome",
    "encode",
    "parse_agent",
    "parse_client",
]
