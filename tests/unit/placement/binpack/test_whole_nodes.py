"""Requests for whole nodes of the largest kind count as demand before the first one arrives."""

from __future__ import annotations

import pytest
from sharepod.placement.binpack.demand import DemandClass, MemoryShare
from sharepod.placement.binpack.whole_nodes import EXPECTED, largest_kinds, with_whole_nodes
from sharepod.placement.state.types import NodeState
from unit.placement.world import node

SMALL = DemandClass(1, 500, MemoryShare.IN_PROPORTION, 4_000)


def test_a_kind_that_another_is_as_large_as_in_both_is_none_of_the_largest() -> None:
    nodes = [
        None,
        node("a", 8, cpu=96_000),
        node("b", 8, cpu=128_000),
        node("c", 4, cpu=128_000),
        node("d", 2, cpu=192_000),
        node("e", 1, cpu=8_000),
        node("f", 0, cpu=256_000),
    ]
    assert largest_kinds(nodes) == [(8, 128_000), (2, 192_000)]


def test_there_are_four_at_most() -> None:
    nodes = [node(f"node-{gpus}", gpus, cpu=100_000 - gpus) for gpus in range(1, 9)]
    nodes.append(node("small", 1, cpu=1_000))
    assert [gpus for gpus, _ in largest_kinds(nodes)] == [8, 7, 6, 5]


def test_they_share_what_is_expected() -> None:
    shares = with_whole_nodes({SMALL: 1.0}, [(8, 100_000), (2, 200_000)])
    assert list(shares.items()) == [
        (SMALL, 1.0),
        (DemandClass(2, 1000, MemoryShare.IN_PROPORTION, 180_000), EXPECTED / 2),
        (DemandClass(8, 1000, MemoryShare.IN_PROPORTION, 90_000), EXPECTED / 2),
    ]


@pytest.mark.parametrize("share", [EXPECTED / 10, 0.5])
def test_of_what_is_known_and_what_is_expected_the_more_counts(share: float) -> None:
    whole = DemandClass(8, 1000, MemoryShare.IN_PROPORTION, 90_000)
    assert with_whole_nodes({SMALL: 0.5, whole: share}, [(8, 100_000)]) == {SMALL: 0.5, whole: max(share, EXPECTED)}


@pytest.mark.parametrize("others", [[], [node("b", 2, cpu=128_000)]], ids=["one kind", "more of either"])
def test_nothing_is_expected_where_no_node_is_smaller_than_another(others: list[NodeState]) -> None:
    assert largest_kinds([node("a", 8, cpu=96_000), *others]) == []


def test_nothing_is_expected_of_nodes_of_one_gpu() -> None:
    kinds = largest_kinds([node("a", 1, cpu=8_000), node("b", 1, cpu=4_000)])
    assert kinds == [(1, 8_000)]
    assert with_whole_nodes({SMALL: 1.0}, kinds) == {SMALL: 1.0}
