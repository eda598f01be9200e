"""Steps for the claim of a SharePod's Pod: created, allocated, freed."""

from __future__ import annotations

from dataclasses import replace

import pytest
from sharepod.api.gpunode import ClaimReference, Tenant
from sharepod.controller.decisions.share_claim_steps import (
    AllocateClaim,
    FreeClaim,
    MakeClaim,
    before_gate,
    before_place,
    names_claim,
)
from sharepod.controller.state.facts.claim_facts import Allocation, ClaimFacts
from unit.controller.objects import pod, row

POD = replace(pod(gated=True), claim="one-0badcafe")
CLAIM = ClaimFacts(
    uid="claim-1", name="one-0badcafe", namespace="n", version=1, ours=False, of_sharepod=True, made_for=POD.uid
)
ROW: Tenant = row()
HERE = Allocation("node-a", tuple(("sharepod", "node-a", uuid.lower()) for uuid in ROW.gpus), ours=True)


def given(allocation: Allocation) -> ClaimFacts:
    return replace(CLAIM, allocation=allocation)


@pytest.mark.promise("operator-share-claim-place")
@pytest.mark.parametrize(
    "former",
    [
        replace(HERE, node="node-b"),
        replace(HERE, devices=(("sharepod", "node-a", "gpu-of-another"),)),
        replace(HERE, ours=False),
    ],
)
def test_an_allocation_that_is_not_the_rows_goes_first(former: Allocation) -> None:
    assert before_gate(POD, given(former), "node-a", ROW) == FreeClaim(POD, given(former))
    assert before_place(POD, given(former)) == FreeClaim(POD, given(former))


def test_a_claim_is_made_then_allocated_then_nothing_is_missing() -> None:
    assert before_place(POD, None) == MakeClaim(POD)
    assert before_place(POD, CLAIM) is None
    assert before_gate(POD, CLAIM, "node-a", ROW) == AllocateClaim(POD, CLAIM, "node-a", ROW)
    assert before_gate(POD, given(HERE), "node-a", ROW) is None


def test_a_pod_without_a_claim_needs_none() -> None:
    plain = replace(POD, claim=None)
    assert before_place(plain, None) is None
    assert before_gate(plain, None, "node-a", ROW) is None
    assert names_claim(None, plain, None)


@pytest.mark.promise("operator-share-claim-again")
def test_a_row_is_the_pods_only_if_it_names_the_claim_that_the_pod_has_now() -> None:
    mine, former = (ClaimReference(name=CLAIM.name, uid=uid) for uid in (CLAIM.uid, "claim-0"))
    assert names_claim(mine, POD, CLAIM)
    assert not names_claim(former, POD, CLAIM)
    assert not names_claim(mine, POD, None)
    assert not names_claim(mine, POD, replace(CLAIM, deleting=True))
    assert not names_claim(None, POD, CLAIM)
    assert not names_claim(mine, replace(POD, claim=None), None)
