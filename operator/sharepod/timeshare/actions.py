"""Decisions of the scheduler, as values. The caller of `Scheduler.tick` carries them out."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class TokenGrant:
    """Grant of the token for all GPUs of a tenant.

    If it has the id of the tenant's present hold, it renews that hold or changes its terms: the hold then lasts
    `quantum_ns` from now.
    """

    tenant: str
    grant_id: int
    quantum_ns: int
    """Nanoseconds from now for which the tenant may launch. 0: until the hold is revoked."""
    metered: bool
    """True if the hook must bound the queue of launched, unfinished work, so that the tenant drains soon after its
    quantum: other tenants are connected, or its limit is below the whole GPU."""
    short: bool = False
    """True if the tenant must keep its queue short, because an interactive tenant of the same GPU is connected."""
    prompt: bool = False
    """True if the tenant is interactive and must release the token as soon as its work has ended."""
    concurrent: bool = False
    """True if other tenants may hold at the same time. The tenant's hooks must then count samples of work in flight."""


@dataclass(frozen=True)
class TokenRevocation:
    """Order to a holder to drain now. Sent if the end of its quantum was moved forward with too little notice for a new
    grant."""

    tenant: str
    grant_id: int


@dataclass(frozen=True)
class Preemption:
    """Report that a holder was preempted, because its grace period has expired. No message is sent to the tenant."""

    tenant: str
    grant_id: int


@dataclass(frozen=True)
class Suspension:
    """Report that a hold was suspended, because its tenant has no processor time. No message is sent to the tenant."""

    tenant: str
    grant_id: int


@dataclass(frozen=True)
class PreparedHandOff:
    """Hand-off of one GPU, decided in advance so that no decision delays it. It takes effect if the holder drains
    between `since` and `until`, in nanoseconds of the clock.
    """

    gpu: str
    holder: str
    held_id: int
    """Id of the grant under which the holder drains."""
    wanting: bool
    """Condition of the hand-off. True: the holder wants the token again when it has drained. False: the holder does
    not."""
    grant: TokenGrant
    """Grant of the next tenant, valid from the moment at which the holder has drained."""
    since: int
    until: int


Action = TokenGrant | TokenRevocation | Preemption | Suspension
