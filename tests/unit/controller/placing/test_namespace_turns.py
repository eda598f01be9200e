"""Order in which waiting tenants are tried: by priority, by standing, and then by turns of namespaces."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sharepod.controller.placing.namespace_turns import NamespaceTurns
from sharepod.controller.placing.waiting import RequestGroup, WaitingTenant
from sharepod.placement.engine import QueueKey

pytestmark = pytest.mark.promise("placement-namespace-turns")

KEYS = st.lists(
    st.tuples(st.integers(-1, 1), st.integers(0, 1), st.sampled_from("0123456789"), st.sampled_from("abc")), max_size=30
)


def turns_of(names: Iterable[str], *, priority: int = 0, standing: int = 0) -> list[tuple[QueueKey, WaitingTenant]]:
    """Return waiting tenants in the order of their creation. The first letter of a name is the tenant's namespace."""
    named = enumerate(names)
    return [((-priority, standing, f"{age:03}", name[0], name), WaitingTenant(name, 0.0)) for age, name in named]


def order(turns: NamespaceTurns) -> list[str]:
    found = []
    while (taken := turns.take()) is not None:
        found.append(taken.tenant)
    return found


def test_namespaces_take_turns_each_with_its_oldest_first() -> None:
    turns = NamespaceTurns()
    turns.add_all(turns_of(["a1", "a2", "a3", "b1", "c1", "b2"]))
    assert order(turns) == ["a1", "b1", "c1", "a2", "b2", "a3"]


def test_priority_and_standing_come_before_turns() -> None:
    turns = NamespaceTurns()
    turns.add_all(
        turns_of(["a1", "a2"], priority=5) + turns_of(["b1"]) + turns_of(["c1", "c2"], priority=5, standing=1)
    )
    assert order(turns) == ["a1", "a2", "c1", "c2", "b1"]


def test_one_that_comes_later_waits_for_one_of_each_other_namespace() -> None:
    turns = NamespaceTurns()
    turns.add_all(turns_of([*(f"a{number}" for number in range(9)), "b1", "b2", "b3"]))
    assert [turns.take().tenant for _ in range(5)] == ["a0", "b1", "a1", "b2", "a2"]  # type: ignore[union-attr]
    turns.add_all(turns_of(["c1", *"x" * 20, "a9"])[::21])
    assert order(turns) == ["c1", "b3", *(f"a{number}" for number in range(3, 9)), "a9"]


def group_of(keyed: Iterable[tuple[QueueKey, WaitingTenant]]) -> RequestGroup:
    """Return a request group of these tenants, all of which were refused at version 1."""
    group, waiting = RequestGroup("asks", 1), []
    for key, each in keyed:
        each.key, each.refused_at_version = key, 1
        waiting.append(each)
    group.add(waiting)
    return group


def test_of_a_lot_one_after_the_other_is_taken_or_the_rest_is_left_out() -> None:
    turns = NamespaceTurns()
    keyed = turns_of(["a1", "a2", "b1", "a3", "a4", "a5"])
    group = group_of([keyed[4], keyed[0], keyed[3]])
    turns.add_group(group)
    turns.add_all([keyed[1], keyed[2], keyed[5]])
    assert len(turns) == 6
    assert [turns.take().tenant for _ in range(3)] == ["a1", "b1", "a2"]  # type: ignore[union-attr]
    assert turns.group is None, "a2 is in none"
    assert turns.take().tenant == "a3"  # type: ignore[union-attr]
    assert turns.group is group
    assert [each.tenant for each in group.take_apart()] == ["a4"], "who was taken is in it no longer"
    turns.leave_out_group()
    assert (order(turns), len(turns)) == (["a5"], 0)


def test_one_that_leaves_its_lot_meanwhile_is_passed_over_and_the_next_taken_in_its_turn() -> None:
    turns = NamespaceTurns()
    keyed = turns_of(["a1", "a2", "b1", "a3"])
    group = group_of([keyed[0], keyed[1], keyed[3]])
    turns.add_group(group)
    turns.add_all([keyed[2]])
    keyed[0][1].refused_at_version = None
    assert order(turns) == ["a2", "b1", "a3"]


@given(KEYS, st.integers(1, 5))
def test_those_who_ask_the_same_are_taken_in_the_order_in_which_they_would_be_alone(
    keys: list[tuple[int, int, str, str]], kinds: int
) -> None:
    groups: dict[tuple[object, ...], list[tuple[QueueKey, WaitingTenant]]] = {}
    alone, alike = NamespaceTurns(), NamespaceTurns()
    for number, (priority, standing, created, namespace) in enumerate(keys):
        key = (priority, standing, created, namespace, str(number))
        groups.setdefault((key[:2], namespace, number % kinds), []).append((key, WaitingTenant(f"{number}", 0.0)))
    for group in groups.values():
        alone.add_all(group)
        alike.add_group(group_of(group))
    assert order(alike) == order(alone)


@given(KEYS)
def test_nobody_is_lost_and_the_nth_of_a_namespace_never_follows_the_next_of_another(
    keys: list[tuple[int, int, str, str]],
) -> None:
    waiting = [
        ((priority, standing, created, namespace, str(number)), WaitingTenant(f"{number}", 0.0))
        for number, (priority, standing, created, namespace) in enumerate(keys)
    ]
    key_of = {each.tenant: key for key, each in waiting}
    turns = NamespaceTurns()
    turns.add_all(waiting)
    found = [key_of[tenant] for tenant in order(turns)]
    assert sorted(found) == sorted(key_of.values())
    assert [key[:2] for key in found] == sorted(key[:2] for key in found)
    taken: dict[tuple[int, int, str], int] = {}
    level: dict[tuple[int, int], int] = {}
    for key in found:
        mine = taken[key[0], key[1], key[3]] = taken.get((key[0], key[1], key[3]), 0) + 1
        assert mine >= level.get(key[:2], 0)
        level[key[:2]] = mine
    for namespace in "abc":
        own = [key for key in found if key[3] == namespace]
        assert own == sorted(own)
