"""Scheduled shares: enters the shares that kube-scheduler allocates (pool `scheduler`) in the ledger, and adds and
removes the operator's hold on their claims.

Guarantees:
- A share is entered only in the ledger of a node of pool `scheduler` whose GPUs NVIDIA's device plugin does not
  advertise, and only if it fits there with the other rows. Otherwise the claim's owner gets an Event with the reason.
- If a Pod is already bound when its share is entered, the row counts as used, so its release waits for the agent.
- All writes have the guarantees of `ClaimWriter` and `LedgerWriter`.
"""

from __future__ import annotations

import structlog

from sharepod.api.claims.scheduled_claims import ScheduledShare
from sharepod.api.gpunode import Pool
from sharepod.api.objects import POOL_LABEL, SCHEDULER_CLASS, device_name
from sharepod.controller.decisions.scheduled_claim_steps import Adopt, HoldClaim, LetClaimGo, reservation
from sharepod.controller.placing.ledger_writer import LedgerWriter
from sharepod.controller.state.cluster_state import ClusterState
from sharepod.controller.state.facts.claim_facts import ClaimFacts
from sharepod.controller.state.memos import TenantMemo
from sharepod.placement.state.types import PlacementError

from .claim_writer import ClaimWriter

log = structlog.get_logger(__name__)


class ScheduledShares:
    """Executor of the steps in `scheduled_claim_steps`. `act` may raise an `ApiError` or `NotLeadingError`."""

    def __init__(self, state: ClusterState, ledger: LedgerWriter, writer: ClaimWriter) -> None:
        self._state = state
        self._ledger = ledger
        self._writer = writer

    async def act(self, step: Adopt | HoldClaim | LetClaimGo, memo: TenantMemo, now: float) -> bool:
        """Perform a step. Return True if it is done. `now`: monotonic seconds.

        If it is not done, `memo.claim.not_entered` has the reason, or the claim has changed and was read again.
        """
        match step:
            case Adopt(claim=claim, share=share):
                why, until = memo.avoid.get(share.node, ("", 0.0))  # set after the API server has refused this row
                memo.claim.not_entered = f"node {share.node} {why}" if now < until else self._enter(claim, share)
                return memo.claim.not_entered is None
            case HoldClaim(claim=claim, node=node):
                gpunode = self._state.gpunodes.named(node)
                return gpunode is not None and await self._writer.hold(claim, node, gpunode.uid)
            case LetClaimGo(claim=claim):
                return await self._writer.let_go(claim)

    def _enter(self, claim: ClaimFacts, share: ScheduledShare) -> str | None:
        """Reserve the row of a share in the ledger of its node. Return None, or the reason why it cannot be entered."""
        gpunode = self._state.gpunodes.named(share.node)
        if gpunode is None or gpunode.spec.pool is not Pool.SCHEDULER:
            pool = "no pool" if gpunode is None else f"pool {gpunode.spec.pool}"
            return f"node {share.node} is of {pool}, where class {SCHEDULER_CLASS} gets nothing: delete the pod"
        node, seen = self._state.nodes.named(share.node), self._state.seen_claims
        if node is None:
            return f"node {share.node} is deleted or has lost the label {POOL_LABEL}: put it back, or delete the pod"
        if node.double_booked:
            resources = ", ".join(node.plugin_resources)
            return (
                f"node {share.node} advertises {resources}; keep NVIDIA's device plugin off the node, or delete the pod"
            )
        row = reservation(claim, share, {device_name(uuid): uuid for uuid in gpunode.gpus})
        if isinstance(row, str):
            return row
        try:
            self._state.cluster.reserve(share.node, row)
        except PlacementError as error:
            return str(error)
        log.info("entered a share that kube-scheduler has given", claim=f"{claim.namespace}/{claim.name}", row=row)
        if all(pod.node is None for pod in seen.users(claim)):
            seen.booked(claim.uid)
        self._ledger.add(share.node)
        return None
