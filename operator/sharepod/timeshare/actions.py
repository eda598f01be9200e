"""Decisions of the scheduler: values, carried out by the caller of `Scheduler.tick`."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class TokenGrant:
    """Grant of the token for all GPUs of a tenant.

    A grant with the id of the hold that the tenant has renews that hold, or changes its terms: it goes on for
    `quantum_ns` from now.
    """

    tenant: str
    grant_id: int
    quantum_ns: int
    """Time for which the tenant may launch, in ns from now; 0: until it is revoked."""
    metered: bool
    """The tenant has to keep its queue bounded, because others are connected or its ceiling binds."""
    short: bool = False
    """The tenant has to keep its queue short: an interactive tenant of its GPUs is connected."""
    prompt: bool = False
    """The tenant is interactive: it gives the token back as soon as its work has ended."""
    concurrent: bool = False
    """Other tenants may hold at the same time: the tenant's hooks have to count samples while it holds."""


@dataclass(frozen=True)
class TokenRevocation:
    """Order to a holder to drain now: its deadline came forward too late to tell the holder before."""

    tenant: str
    grant_id: int


@dataclass(frozen=True)
class Preemption:
    """Report that a holder was preempted: its grace period has expired. Nothing is to be sent."""

    tenant: str
    grant_id: int


@dataclass(frozen=True)
class Suspension:
    """Report that a hold was suspended: its tenant has no processor time. Nothing is to be sent."""

    tenant: str
    grant_id: int


@dataclass(frozen=True)
class PreparedHandOff:
    """Hand-off of one GPU that is carried out if its holder drains between two moments, in nanoseconds of the clock."""

    gpu: str
    holder: str
    held_id: int
    """Id of the grant that the holder drains."""
    wanting: bool
    """The holder wants more as it drains."""
    grant: TokenGrant
    """Grant of the next tenant, which it has from the moment at which the holder has drained."""
    since: int
    until: int


Action = TokenGrant | TokenRevocation | Preemption | Suspension
