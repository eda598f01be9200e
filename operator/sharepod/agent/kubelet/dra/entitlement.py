"""Entitlement of claims: finds the tenant of a ResourceClaim, if any. Pure.

Guarantees:
- Nothing that a tenant can write affects the decision: the kubelet names the claim, and only the operator writes rows.
- The row of an earlier claim does not entitle a later claim with the same name.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from sharepod.agent.kubelet.identity import KubeletIdentity
from sharepod.api.gpunode import Tenant, TenantState

_UID = re.compile(r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")
"""UIDs that are safe as part of a file name."""


class ClaimRefusedError(Exception):
    """Refusal to prepare a claim now. The message appears in the Pod's events, with the remedy.

    `lasting`: True if waiting cannot help.
    """

    def __init__(self, message: str, *, lasting: bool = False) -> None:
        super().__init__(message)
        self.lasting = lasting


class ClaimIdentity(KubeletIdentity):
    """Identity of a ResourceClaim in a call of the kubelet."""


def is_safe_uid(uid: str) -> bool:
    """Return whether a claim's UID can be part of a file name."""
    return _UID.match(uid) is not None


def entitled_tenant(rows: Iterable[Tenant], claim: ClaimIdentity, node: str) -> Tenant:
    """Return the ledger row of this claim. Raise `ClaimRefusedError` if it has no row, or its row is Releasing."""
    if not is_safe_uid(claim.uid):
        raise ClaimRefusedError(f"the kubelet names claim {claim} with the UID {claim.uid[:64]!r}", lasting=True)
    row = next((row for row in rows if row.claim is not None and row.claim.uid == claim.uid), None)
    if row is None or row.claim is None:
        raise ClaimRefusedError(
            f"no share of a GPU is reserved on node {node} for claim {claim} (UID {claim.uid}); the operator reserves "
            "one before it allocates the claim: see whether the operator runs"
        )
    if (row.namespace, row.claim.name) != (claim.namespace, claim.name):
        raise ClaimRefusedError(
            f"the ledger of node {node} names the claim with UID {claim.uid} {row.namespace}/{row.claim.name}, and the "
            f"kubelet {claim}; delete the Pod",
            lasting=True,
        )
    if row.state is not TenantState.RESERVED:
        raise ClaimRefusedError(
            f"the share of claim {claim} on node {node} is being released; the claim gets a new one when "
            "no process of it is left"
        )
    return row
