"""Decisions of the scheduler, as values. The caller of `Scheduler.tick` carries them out."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class TokenGrant:
    """Grant of the token for all GPUs of a tenant.

    A grant with the id of the tenant's present hold renews that hold, or changes its terms: the hold lasts `quantum_ns`
    from now.
    """

    tenant: str
    grant_id: int
    quantum_ns: int
    """Time for which the tenant may launch, in ns from now; 0: until the hold is revoked."""
    metered: bool
    """The tenant must bound its queue: other tenants are connected, or its ceiling binds."""
    short: bool = False
    """The tenant must keep its queue short: an interactive tenant of its GPUs is connected."""
    prompt: bool = False
    """The tenant is interactive: it releases the token as soon as its work has ended."""
    concurrent: bool = False
    """Other tenants may hold at the same time: the tenant's hooks must count samples while it holds."""


@dataclass(frozen=True)
class TokenRevocation:
    """Order to a holder to drain now: its deadline came forward too late for new terms."""

    tenant: str
    grant_id: int


@dataclass(frozen=True)
class Preemption:
    """Report that a holder was preempted: its grace period has expired. No message is sent."""

    tenant: str
    grant_id: int


@dataclass(frozen=True)
class Suspension:
    """Report that a hold was suspended: its tenant has no processor time. No message is sent."""

    tenant: str
    grant_id: int


@dataclass(frozen=True)
class PreparedHandOff:
    """Hand-off of one GPU that takes effect if its holder drains between two moments, in nanoseconds of the clock."""

    gpu: str
    holder: str
    held_id: int
    """Id of the grant under which the holder drains."""
    wanting: bool
    """The holder wants the token again when it has drained."""
    grant: TokenGrant
    """Grant of the next tenant, valid from the moment at which the holder has drained."""
    since: int
    until: int


Action = TokenGrant | TokenRevocation | Preemption | Suspension
