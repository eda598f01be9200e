"""The next step for one claim, case by case, and results that no order of events may have."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sharepod.controller.decisions.advertised import SOON_S
from sharepod.controller.decisions.claim_status import notes
from sharepod.controller.decisions.claim_steps import Allocate, ClaimSnapshot, Deallocate, next_step
from sharepod.controller.decisions.snapshot import ReservationSnapshot
from sharepod.controller.decisions.steps import BeginRelease, Forget, Place, RemovalReason, RemoveRow, Unreserve, Wait
from sharepod.controller.state.facts.claim_facts import (
    Allocation,
    ClaimFacts,
    ClaimPodFacts,
    claim_facts,
    claim_pod_facts,
)
from unit.controller.objects import reserved

ALLOCATION = Allocation(node="node-a", devices=(("gpu", "node-a", "gpu-0"),), ours=True)


def claim(*, allocation: Allocation | None = None, **fields: Any) -> ClaimFacts:
    exactly = {"deviceClassName": "sharepod.dev", "capacity": {"requests": {"timeMilli": "400"}}}
    read = claim_facts(
        {
            "metadata": {"uid": "claim", "name": "share", "namespace": "n", "resourceVersion": "7"},
            "spec": {"devices": {"requests": [{"name": "gpu", "exactly": exactly}]}},
        }
    )
    return replace(read, allocation=allocation, **fields)


def pod(node: str | None = None, *, deleting: bool = False) -> ClaimPodFacts:
    read = claim_pod_facts({"metadata": {"uid": "pod", "name": "p", "namespace": "n", "resourceVersion": "1"}})
    return replace(read, node=node, deleting=deleting)


def step(
    has: ClaimFacts | None, *rows: ReservationSnapshot, pods: tuple[ClaimPodFacts, ...] = (), **fields: Any
) -> object:
    return next_step(ClaimSnapshot(claim=has, pods=pods, reserved=rows, **fields))


WAITS, RUNS = (pod(),), (pod("node-a"),)


def test_a_claim_that_a_pod_waits_for_is_placed_by_its_leader_alone() -> None:
    assert step(claim(), pods=WAITS, leads=True) == Place()
    assert step(claim(), pods=WAITS, leads=False) == Wait()
    assert step(claim(), pods=WAITS, leads=True, namespace_ends=True) == Wait()
    assert step(claim(deleting=True), pods=WAITS, leads=True) == Wait()
    assert step(claim()) == Wait()


def test_a_decided_row_is_waited_for_and_a_written_one_allocated() -> None:
    assert step(claim(), reserved(written=False), pods=WAITS, unused=True) == Wait()
    made = step(claim(), reserved(), pods=WAITS, unused=True)
    assert isinstance(made, Allocate)
    assert made.node == "node-a"
    assert step(claim(), reserved(written=False), unused=True) == Unreserve("node-a")


@pytest.mark.promise("operator-line-room-first")
def test_a_claim_is_allocated_once_the_node_advertises_the_line_that_it_is_for() -> None:
    assert step(claim(), reserved(), pods=WAITS, unused=True, advertised=False, now=7.0) == Wait(7.0 + SOON_S)


def test_devices_of_another_driver_are_not_those_of_the_row_whatever_their_names() -> None:
    foreign = claim(allocation=replace(ALLOCATION, ours=False))
    assert step(foreign, reserved(), pods=WAITS, unused=True) == RemoveRow("node-a", RemovalReason.NEVER_BOUND)
    assert step(foreign, pods=WAITS) == Wait()
    reasons = [note.reason for note in notes(ClaimSnapshot(claim=foreign, pods=RUNS), None, None, waited=True)]
    assert reasons == ["ForeignAllocation"]


@pytest.mark.parametrize("fields", [{"allocated": True}, {"give_up": True}])
def test_a_row_whose_allocation_is_gone_goes_in_one_step_if_nobody_used_it(fields: Any) -> None:
    never = RemoveRow("node-a", RemovalReason.NEVER_BOUND)
    assert step(claim(), reserved(), pods=WAITS, unused=True, **fields) == never
    assert step(claim(), reserved(), pods=WAITS, **fields) == BeginRelease("node-a")


def test_a_row_of_another_process_goes_in_two_steps() -> None:
    assert step(claim(), reserved(), pods=WAITS) == BeginRelease("node-a")
    assert step(claim(), reserved(ending=True), pods=WAITS) == Wait()
    assert step(claim(), reserved(releasing=True), pods=WAITS, leads=True) == Wait()
    drained = step(claim(), reserved(releasing=True, drained=True), pods=WAITS)
    assert drained == RemoveRow("node-a", RemovalReason.DRAINED)


def test_an_allocation_in_use_is_left_alone_whatever_else_holds() -> None:
    used = claim(allocation=ALLOCATION)
    for fields in ({}, {"due": 0.0, "now": 9.0}, {"give_up": True}):
        assert step(used, reserved(), pods=RUNS, **fields) == Wait()
        assert step(replace(used, consumers=("pod",)), reserved(), **fields) == Wait()


def test_an_allocation_without_a_possible_pod_is_withdrawn() -> None:
    idle = claim(allocation=ALLOCATION)
    for made in (
        step(idle, reserved()),
        step(idle, pods=WAITS),
        step(idle, reserved(), pods=WAITS, give_up=True),
        step(idle, reserved(), pods=WAITS, due=5.0, now=5.0, overdue="x"),
        step(replace(idle, allocation=replace(ALLOCATION, devices=())), reserved(), pods=WAITS, unused=True, due=9.0),
    ):
        assert isinstance(made, Deallocate | RemoveRow)
    assert step(idle, reserved(), pods=WAITS, due=5.0, now=4.0) == Wait(5.0)


@pytest.mark.promise("operator-unbound-node-gone")
@pytest.mark.parametrize("why", [RemovalReason.NODE_GONE, RemovalReason.OUT_OF_SERVICE])
def test_a_pending_pod_keeps_no_allocation_on_a_deleted_node(why: RemovalReason) -> None:
    mine, ours = claim(allocation=ALLOCATION), reserved(override=why)
    taken = step(mine, ours, pods=WAITS, due=9.0)
    assert isinstance(taken, Deallocate)
    assert (taken.node, taken.unseen) == ("node-a", False)
    assert step(mine, ours, pods=RUNS) == Wait(), "only the kubelet ends Pods that may run"
    assert step(claim(), ours, pods=WAITS, unused=True) == RemoveRow("node-a", RemovalReason.NEVER_BOUND)


def test_the_end_of_a_claim_ends_its_row() -> None:
    assert step(None, reserved()) == BeginRelease("node-a")
    assert step(None, reserved(releasing=True, override=RemovalReason.NODE_GONE)) == RemoveRow(
        "node-a", RemovalReason.NODE_GONE
    )
    assert step(None) == Forget()


def test_an_admin_gives_the_share_of_a_pod_away_that_hangs_in_its_deletion() -> None:
    used = claim(allocation=ALLOCATION)
    assert step(used, reserved(forced=True), pods=RUNS) == Wait()
    hanging = (pod("node-a", deleting=True),)
    assert step(used, reserved(forced=True), pods=hanging) == RemoveRow("node-a", RemovalReason.FORCED)


def test_an_unreadable_claim_or_row_decides_nothing() -> None:
    assert step(claim(), reserved(), pods=WAITS, unreadable_row=True) == Wait()
    assert step(claim(readable=False), reserved()) == Wait()


def test_a_foreign_allocation_is_never_changed() -> None:
    foreign = replace(ALLOCATION, ours=False)
    assert step(claim(allocation=foreign), pods=WAITS) == Wait()


_ROWS = st.builds(
    reserved,
    st.sampled_from(["node-a", "node-b"]),
    written=st.booleans(),
    releasing=st.booleans(),
    ending=st.booleans(),
    drained=st.booleans(),
    override=st.sampled_from([None, RemovalReason.NODE_GONE]),
    forced=st.booleans(),
)
_SNAPSHOTS = st.builds(
    ClaimSnapshot,
    claim=st.one_of(
        st.none(),
        st.builds(
            claim,
            allocation=st.sampled_from([None, ALLOCATION, replace(ALLOCATION, ours=False)]),
            deleting=st.booleans(),
            consumers=st.sampled_from([(), ("pod",)]),
        ),
    ),
    pods=st.lists(st.sampled_from([pod(), pod("node-a"), pod("node-a", deleting=True)]), max_size=2).map(tuple),
    reserved=st.lists(_ROWS, max_size=2).map(tuple),
    leads=st.booleans(),
    unused=st.booleans(),
    allocated=st.booleans(),
    give_up=st.booleans(),
    due=st.sampled_from([0.0, 9.0, float("inf")]),
    now=st.just(5.0),
    namespace_ends=st.booleans(),
)


@given(snapshot=_SNAPSHOTS)
def test_the_guarantees_hold_of_every_snapshot(snapshot: ClaimSnapshot) -> None:
    made = next_step(snapshot)
    if isinstance(made, Allocate):  # A1
        row = next(item for item in snapshot.reserved if item.written is made.row)
        assert not row.releasing
        assert snapshot.claim is not None
        assert snapshot.claim.allocation is None
    if isinstance(made, Place):  # A2
        assert snapshot.reserved == ()
    if isinstance(made, RemoveRow):  # A3
        rows = [item for item in snapshot.reserved if item.node == made.node]
        if made.reason is RemovalReason.NEVER_BOUND:
            assert snapshot.unused
            assert not snapshot.in_use
        elif made.reason is not RemovalReason.FORCED:
            assert any(item.releasing and item.confirmed is made.reason for item in rows)
    if isinstance(made, Deallocate):  # A4
        assert not snapshot.in_use
