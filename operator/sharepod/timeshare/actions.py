"""What the scheduler wants done: values, carried out by whoever drives it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class TokenGrant:
    """Tell the tenant that it holds the token. `quantum_ns` 0: until it is revoked. `metered`: others wait, or its
    ceiling binds. With the id of the grant that it has: that one goes on, from now, for the quantum said."""

    tenant: str
    grant_id: int
    quantum_ns: int
    metered: bool


@dataclass(frozen=True)
class TokenRevocation:
    """Tell the holder to drain now: its quantum became shorter than it was told."""

    tenant: str
    grant_id: int


@dataclass(frozen=True)
class Preemption:
    """The holder was overtaken, a grace period after its quantum ended. To be reported, nothing to be sent."""

    tenant: str
    grant_id: int


Action = TokenGrant | TokenRevocation | Preemption
