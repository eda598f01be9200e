"""Turns of shares that request nodes: limits, times, pauses."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sharepod.controller.scaling.asking_turns import AskingLimits, AskingTurns

LIMITS = AskingLimits(most=3, per_namespace=2, after_s=30, for_s=900)


def short(*tenants: str) -> list[tuple[str, str]]:
    """Return (tenant, namespace) pairs. The namespace is the tenant's first letter."""
    return [(tenant, tenant[0]) for tenant in tenants]


def asking(turns: AskingTurns, now: float, *tenants: str, node_comes: bool = False) -> list[str]:
    return turns.asking(short(*tenants), now, node_comes=node_comes)


def test_a_share_asks_after_a_while_and_no_longer_than_it_waits() -> None:
    turns = AskingTurns(LIMITS)
    assert asking(turns, 0, "a1") == []
    assert asking(turns, 29, "a1") == []
    assert asking(turns, 30, "a1") == ["a1"]
    assert asking(turns, 31) == []
    assert asking(turns, 32, "a1") == []


@pytest.mark.promise("operator-placeholder-limits")
def test_no_namespace_and_not_all_together_ask_for_more_than_the_limits_say() -> None:
    turns = AskingTurns(LIMITS)
    asking(turns, 0, "a1", "a2", "a3")
    assert asking(turns, 30, "a1", "a2", "a3") == ["a1", "a2"], "there is room for one of another namespace"
    turns = AskingTurns(LIMITS)
    asking(turns, 0, "a1", "a2", "a3", "b1", "b2")
    assert asking(turns, 30, "a1", "a2", "a3", "b1", "b2") == ["a1", "b1", "a2"]
    assert asking(turns, 31, "b2", "a3", "a1", "a2", "b1") == ["a1", "a2", "b1"], (
        "they continue, whatever the order is now"
    )
    assert asking(turns, 32, "b2", "a3", "a2", "b1") == ["a2", "b1", "b2"]


@pytest.mark.promise("operator-placeholder-limits")
def test_the_namespace_with_fewest_asking_comes_next_however_many_shares_others_have() -> None:
    turns = AskingTurns(AskingLimits(most=4, per_namespace=2, after_s=0, for_s=900))
    many = [f"{name}{number}" for name in "ab" for number in range(40)]
    assert asking(turns, 0, *many) == ["a0", "b0", "a1", "b1"]
    late = [*many, "c1"]
    assert "c1" not in asking(turns, 899, *late), "asking tenants continue"
    assert asking(turns, 900, *late) == ["a2", "b2", "c1", "a3"]
    for number in range(1, 40):
        assert asking(turns, 900 + 450 * number, *late), "there is always a tenant that asks"
    turns = AskingTurns(AskingLimits(most=1, per_namespace=1, after_s=0, for_s=900))
    for now, expected in ((0, "a1"), (900, "a2"), (1800, "a3"), (2700, "a1")):
        assert asking(turns, now, "a1", "a2", "a3") == [expected], "a tenant that has not asked comes first"


@pytest.mark.promise("operator-placeholder-limits")
def test_those_that_stay_of_an_earlier_leader_count() -> None:
    turns = AskingTurns(AskingLimits(most=3, per_namespace=2, after_s=0, for_s=900))
    assert turns.asking(short("a1", "a2", "b1"), 0, node_comes=False, kept=["a", "b"]) == ["a1"]
    assert turns.asking(short("a1", "a2", "b1"), 0, node_comes=False, kept=["a"]) == ["a1", "b1"]


@pytest.mark.promise("operator-placeholder-ends")
def test_a_share_stops_asking_after_a_time_and_asks_again_later_each_time() -> None:
    turns = AskingTurns(LIMITS)
    asking(turns, 0, "a1")
    now, pauses = 30.0, []
    for _ in range(7):
        assert asking(turns, now, "a1") == ["a1"]
        assert asking(turns, now + 899, "a1") == ["a1"]
        ended = now + 900
        assert asking(turns, ended, "a1") == []
        now = ended
        while not asking(turns, now, "a1"):
            now += 900
        pauses.append((now - ended) / 900)
    assert pauses == [1, 2, 4, 8, 16, 16, 16]


def test_what_an_earlier_leader_has_asked_for_goes_on() -> None:
    turns = AskingTurns(LIMITS)
    assert turns.asking(short("a1", "b1"), 0, node_comes=False, there=["a1"]) == ["a1"]
    assert turns.asking(short("a1", "b1"), 899, node_comes=False, there=["a1"]) == ["a1", "b1"]
    assert turns.asking(short("a1", "b1"), 900, node_comes=False, there=["a1", "b1"]) == ["b1"]


@pytest.mark.promise("operator-placeholder-node-comes")
def test_no_node_is_requested_while_another_is_being_added() -> None:
    turns = AskingTurns(LIMITS)
    asking(turns, 0, "a1", "b1")
    assert asking(turns, 30, "a1", "b1") == ["a1", "b1"]
    assert asking(turns, 40, "a1", "b1", node_comes=True) == []
    assert asking(turns, 50, "a1", "b1") == ["a1", "b1"]


@pytest.mark.promise("operator-placeholder-limits")
@given(
    st.lists(
        st.tuples(st.lists(st.sampled_from([f"{n}{i}" for n in "abc" for i in range(4)]), unique=True), st.booleans()),
        max_size=40,
    )
)
def test_the_limits_hold_whoever_comes_and_goes(rounds: list[tuple[list[str], bool]]) -> None:
    turns, limits = AskingTurns(LIMITS), LIMITS
    for number, (tenants, comes) in enumerate(rounds):
        found = asking(turns, number * 45.0, *tenants, node_comes=comes)
        assert len(found) <= limits.most
        assert set(found) <= set(tenants)
        assert len(found) == len(set(found))
        assert all(sum(one[0] == name for one in found) <= limits.per_namespace for name in "abc")
