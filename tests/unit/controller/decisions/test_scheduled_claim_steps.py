"""The next step for a claim that kube-scheduler allocates, case by case, and over every order of events and crashes."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sharepod.api.claims.scheduled_claims import hold_entry
from sharepod.api.gpunode import TenantState
from sharepod.api.objects import SCHEDULER_CLASS, SCHEDULER_DRIVER, device_name
from sharepod.controller.decisions import claim_steps
from sharepod.controller.decisions.claim_status import notes
from sharepod.controller.decisions.claim_steps import ClaimSnapshot
from sharepod.controller.decisions.scheduled_claim_steps import Adopt, HoldClaim, LetClaimGo, next_step, reservation
from sharepod.controller.decisions.snapshot import ReservationSnapshot
from sharepod.controller.decisions.steps import BeginRelease, Forget, RemovalReason, RemoveRow, Unreserve, Wait
from sharepod.controller.state.facts.claim_facts import ClaimFacts, ClaimPodFacts, claim_facts, claim_pod_facts
from sharepod.placement.state.types import Reservation

UUID = "GPU-0"
GPUS = {device_name(UUID): UUID}
POD = {"resource": "pods", "name": "p", "uid": "pod"}


def claim(
    *, allocated: bool = True, pods: bool = True, hold: bool = False, milli: int = 400, **metadata: Any
) -> ClaimFacts:
    """Return a claim's facts. `pods`: Pods for which it is reserved. `hold`: True if it has the operator's entry."""
    consumed = {"timeMilli": str(milli), "limitMilli": "1k", "memory": "1Gi", "tenants": "1"}
    result = {"request": "gpu", "driver": SCHEDULER_DRIVER, "pool": "node-a", "device": device_name(UUID)}
    entries = [*([POD] if pods else []), *([hold_entry("node-a", "node-uid")] if hold else [])]
    given = {"devices": {"results": [{**result, "consumedCapacity": consumed}]}}
    return claim_facts(
        {
            "metadata": {"uid": "claim", "name": "share", "namespace": "n", "resourceVersion": "7", **metadata},
            "spec": {"devices": {"requests": [{"name": "gpu", "exactly": {"deviceClassName": SCHEDULER_CLASS}}]}},
            "status": {"reservedFor": entries, **({"allocation": given} if allocated else {})},
        }
    )


def pod(node: str | None = None, *, deleting: bool = False) -> ClaimPodFacts:
    read = claim_pod_facts({"metadata": {"uid": "pod", "name": "p", "namespace": "n", "resourceVersion": "1"}})
    return replace(read, node=node, deleting=deleting)


def row(*, written: bool = True, releasing: bool = False, milli: int = 400, **fields: Any) -> ReservationSnapshot:
    given = claim(milli=milli)
    assert given.allocation is not None
    decided = reservation(given, given.allocation.scheduled, GPUS)  # type: ignore[arg-type]
    assert isinstance(decided, Reservation)
    decided = replace(decided, releasing=releasing)
    return ReservationSnapshot(node="node-a", wanted=decided, written=decided.row() if written else None, **fields)


def step(
    has: ClaimFacts | None, *rows: ReservationSnapshot, pods: tuple[ClaimPodFacts, ...] = (), **fields: Any
) -> object:
    return next_step(ClaimSnapshot(claim=has, pods=pods, reserved=rows, **fields))


WAITS, RUNS, ENDS = (pod(),), (pod("node-a"),), (pod("node-a", deleting=True),)


@pytest.mark.parametrize("pods", [WAITS, RUNS])
def test_an_allocation_that_a_pod_has_is_entered_as_it_is(pods: tuple[ClaimPodFacts, ...]) -> None:
    found = step(claim(), pods=pods)
    assert isinstance(found, Adopt)
    decided = reservation(found.claim, found.share, GPUS)
    assert isinstance(decided, Reservation)
    assert (decided.tenant, decided.gpus, decided.request_milli) == ("claim", (UUID,), 400)
    assert (decided.limit_milli, decided.memory) == (1000, 1 << 30)
    assert "has no GPU gpu-0" in str(reservation(found.claim, found.share, {}))


def test_nothing_is_entered_for_a_pod_that_ends_is_not_known_or_has_not_got_it() -> None:
    assert step(claim(), pods=ENDS) == Wait()
    assert step(claim()) == Wait()
    assert step(claim(pods=False), pods=WAITS) == Wait()
    assert step(claim(allocated=False, pods=False), pods=WAITS) == Wait()


def test_what_cannot_be_had_is_not_entered_and_told() -> None:
    annotated = claim(annotations={"sharepod.dev/gpu-mode": "Exclusive"})
    assert step(annotated, pods=RUNS) == Wait()
    events = notes(ClaimSnapshot(claim=annotated, pods=RUNS), None, None, waited=False)
    assert [(note.reason, "only by size" in note.message) for note in events] == [("Invalid", True)]
    beyond = notes(ClaimSnapshot(claim=claim(), pods=RUNS), None, "GPU 0 is full", waited=False)
    assert [(note.reason, note.message[-13:]) for note in beyond] == [("ReservationLost", "GPU 0 is full")]
    assert not list(notes(ClaimSnapshot(claim=claim(), pods=RUNS), None, None, waited=False))


def test_the_hold_comes_once_a_pod_is_on_the_node_and_the_row_is_written() -> None:
    assert step(claim(), row(written=False), pods=RUNS) == Wait()
    assert step(claim(), row(), pods=WAITS) == Wait()
    assert isinstance(step(claim(), row(), pods=RUNS), HoldClaim)
    assert step(claim(hold=True), row(), pods=RUNS) == Wait()
    assert step(claim(deletionTimestamp="now"), row(), pods=RUNS) == Wait(), "the API server refuses an entry then"


def test_the_row_of_a_deleted_pod_is_removed_in_two_steps_and_then_its_hold() -> None:
    left = claim(pods=False, hold=True)
    assert step(left, row()) == BeginRelease("node-a")
    assert step(left, row(releasing=True)) == Wait()
    assert step(left, row(releasing=True, drained=True)) == RemoveRow("node-a", RemovalReason.DRAINED)
    assert step(left) == LetClaimGo(left)
    assert step(claim(pods=False)) == LetClaimGo(claim(pods=False)), "no Pod has it or waits for it"


def test_a_pod_that_comes_while_the_row_is_being_released_gets_a_row_after_it() -> None:
    again = claim(hold=True)
    assert step(again, row(releasing=True), pods=RUNS) == Wait()
    assert isinstance(step(again, row(releasing=True, drained=True), pods=RUNS), RemoveRow)
    assert isinstance(step(again, pods=RUNS), Adopt)


@pytest.mark.promise("operator-scheduler-pool-elsewhere")
def test_a_pod_that_waits_for_a_held_claim_may_have_it_anywhere_once_it_is_refused_or_the_node_is_gone() -> None:
    held, node_lost = claim(pods=False, hold=True), RemovalReason.NODE_GONE
    assert step(held, row(), pods=WAITS) == Wait()
    assert step(held, row(), pods=WAITS, now=59.0, due=60.0) == Wait(60.0)
    assert step(held, row(), pods=WAITS, now=60.0, due=60.0) == BeginRelease("node-a")
    assert step(held, row(override=node_lost), pods=WAITS) == BeginRelease("node-a")
    assert step(held, row(releasing=True, override=node_lost), pods=WAITS) == RemoveRow("node-a", node_lost)
    assert step(held, pods=WAITS) == LetClaimGo(held)
    assert step(claim(hold=True), row(override=node_lost), pods=RUNS, now=60.0, due=60.0) == Wait(), "it is used"
    assert step(claim(), row(), pods=WAITS, now=60.0, due=60.0) == Wait(), "without a hold kube-scheduler takes it back"


def test_a_row_of_another_allocation_goes_first() -> None:
    assert step(claim(), row(milli=300), pods=RUNS) == BeginRelease("node-a")
    assert step(claim(), row(milli=300), pods=WAITS, unused=True) == RemoveRow("node-a", RemovalReason.NEVER_BOUND)
    assert step(claim(), row(milli=300, written=False), pods=WAITS) == Unreserve("node-a")
    assert step(claim(allocated=False, pods=False), row(), pods=WAITS) == BeginRelease("node-a")


def test_an_admin_gives_the_share_of_a_pod_away_that_is_being_deleted() -> None:
    held = claim(hold=True)
    assert step(held, row(forced=True), pods=RUNS) == Wait()
    assert step(held, row(forced=True), pods=ENDS) == RemoveRow("node-a", RemovalReason.FORCED)
    assert step(held, pods=ENDS) == LetClaimGo(held)


def test_an_unreadable_row_or_claim_decides_nothing() -> None:
    assert step(claim(), pods=RUNS, unreadable_row=True) == Wait()
    assert step(replace(claim(pods=False, hold=True), readable=False)) == Wait()


@dataclass
class Life:
    """One claim that successive Pods name, with all components that act on it. The process of a Pod outlives a forced
    deletion."""

    allocated: bool = False
    reserved: bool = False
    hold: bool = False
    pod: str = "waits"
    """waits, runs or deleted."""
    row: str = ""
    """State of the row: decided, written or releasing. Empty: there is no row."""
    unused: bool = False
    process: bool = False
    drained: bool = False
    refused: bool = False
    """True if kube-scheduler has refused the waiting Pod for `bind_timeout`."""
    log: list[str] = field(default_factory=list)

    def snapshot(self) -> ClaimSnapshot:
        rows: tuple[ReservationSnapshot, ...] = ()
        if self.row:
            releasing = self.row == "releasing"
            rows = (row(written=self.row != "decided", releasing=releasing, drained=releasing and self.drained),)
        pods = {"waits": WAITS, "runs": RUNS, "deleted": ()}[self.pod]
        has = claim(allocated=self.allocated, pods=self.reserved, hold=self.hold)
        due = 0.0 if self.refused else float("inf")
        return ClaimSnapshot(claim=has, pods=pods, reserved=rows, unused=self.unused, due=due)

    def act(self, actor: str) -> None:
        self.log.append(actor)
        getattr(self, f"_{actor}")()
        assert not self.process or self.row in ("written", "releasing"), self.log
        if self.hold and self.row in ("written", "releasing"):
            assert self.allocated, self.log

    def _schedules(self) -> None:
        if self.pod == "waits" and (not self.allocated or not self.reserved):
            self.allocated = self.reserved = True

    def _unreserves(self) -> None:
        """Give up the Pod and remove the unused allocation, as kube-scheduler does."""
        if self.pod == "waits":
            self.reserved = False
            self.allocated = self.hold and self.allocated

    def _binds(self) -> None:
        if self.pod == "waits" and self.reserved:
            self.pod, self.unused, self.refused = "runs", False, False

    def _refuses(self) -> None:
        self.refused = self.pod == "waits"

    def _returns(self) -> None:
        """Create the next Pod, once the former one's entry is removed."""
        if self.pod == "deleted" and not self.reserved:
            self.pod, self.refused = "waits", False

    def _starts(self) -> None:
        if self.pod == "runs" and self.row == "written":
            self.process = True

    def _deletes(self) -> None:
        self.pod, self.unused, self.refused = "deleted", self.unused and not self.reserved, False

    def _collects(self) -> None:
        """Remove the entry of a deleted Pod, as kube-controller-manager does."""
        if self.pod == "deleted" and self.reserved:
            self.reserved = False
            self.allocated = self.hold

    def _exits(self) -> None:
        if self.pod != "runs":
            self.process = False

    def _writes(self) -> None:
        self.row = "written" if self.row == "decided" else self.row

    def _reports(self) -> None:
        self.drained = self.row == "releasing" and not self.process

    def _crashes(self) -> None:
        self.row, self.unused = "" if self.row == "decided" else self.row, False

    def _operates(self) -> None:
        match next_step(self.snapshot()):
            case Adopt():
                assert not self.row
                self.row, self.unused, self.drained = "decided", True, False
            case HoldClaim():
                self.hold = True
            case LetClaimGo():
                assert not self.row
                self.hold = False
                self.allocated = self.allocated and self.reserved
            case BeginRelease():
                self.row = "releasing"
            case RemoveRow() | Unreserve():
                self.row = ""


_ACTORS = (
    *("schedules", "unreserves", "binds", "starts", "refuses", "deletes", "returns"),
    *("collects", "exits", "writes", "reports", "crashes"),
)


_HELD = ("schedules", "operates", "writes", "binds", "operates", "starts")
"""Steps after which a Pod runs with a claim that the operator holds. Few random orders lead to this state."""


@settings(max_examples=600)
@given(st.sampled_from(((), _HELD)), st.lists(st.sampled_from((*_ACTORS, *["operates"] * 6)), max_size=40))
def test_in_every_order_a_process_has_a_row_a_held_row_its_allocation_and_in_the_end_nothing_is_left(
    first: tuple[str, ...], order: list[str]
) -> None:
    life = Life()
    for actor in (*first, *order):
        life.act(actor)
    for actor in ("deletes", *["collects", "exits", "writes", "reports", "operates"] * 6):
        life.act(actor)
    assert (life.allocated, life.reserved, life.hold, life.row) == (False, False, False, "")


@settings(max_examples=600)
@given(st.lists(st.sampled_from((*_ACTORS, *["operates"] * 6)), max_size=40))
def test_in_every_order_a_pod_that_is_refused_is_in_the_end_kept_nowhere(order: list[str]) -> None:
    life = Life()
    for actor in (*_HELD, *order):
        life.act(actor)
    for actor in ("deletes", "collects", "returns", "refuses", *["exits", "writes", "reports", "operates"] * 6):
        life.act(actor)
    life.act("unreserves")
    assert (life.pod, life.allocated, life.hold) == ("waits", False, False)


def test_a_deleted_claim_leaves_its_row_to_the_steps_of_claims() -> None:
    assert claim_steps.next_step(ClaimSnapshot(claim=None, reserved=(row(),))) == BeginRelease("node-a")
    assert claim_steps.next_step(ClaimSnapshot(claim=None)) == Forget()
    assert row().wanted.row().state is TenantState.RESERVED
