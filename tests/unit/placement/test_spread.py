"""Spread with replicas on every node: it finds the best place without filtering every node."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from sharepod.api.sharepod import PlacementPolicy
from sharepod.api.units import TenantId
from sharepod.placement import beside_replicas, choices
from sharepod.placement.filters.candidates import candidates
from sharepod.placement.policies import SPREAD, least_spread
from sharepod.placement.state.types import PlacementRequest
from unit.placement.world import GI, ClusterWithEngine, ask, cluster_of, node, put


def _spread(name: str, request: int = 100, *, count: int = 1) -> PlacementRequest:
    return ask(name, request, count=count, owner="web", placement=PlacementPolicy.SPREAD)


def _drawn(rng: random.Random, number: int) -> PlacementRequest:
    memory = rng.choice((None, GI, 9 * GI))
    request = ask(f"t{number}", rng.choice((0, 100, 300)), count=rng.choice((1, 1, 2)), memory=memory)
    placement = rng.choice((PlacementPolicy.SPREAD, PlacementPolicy.BINPACK))
    return replace(request, owner=rng.choice((None, "web", "other")), gpu=replace(request.gpu, placement=placement))


@pytest.mark.parametrize("seed", range(30))
def test_the_best_place_beside_replicas_is_that_of_all_nodes(seed: int) -> None:
    rng = random.Random(seed)
    cluster = cluster_of(*(node(f"node-{number}", rng.randint(1, 4)) for number in range(rng.randint(1, 6))))
    placed: list[tuple[str, TenantId]] = []
    found = 0
    for number in range(40):
        request = _drawn(rng, number)
        if seed % 2 or rng.random() < 0.2:  # many nodes have changed, or few
            asked = replace(request, owner="web", gpu=replace(request.gpu, placement=PlacementPolicy.SPREAD))
            nodes = cluster.known(cluster.replicas_on("web"))
            expected = choices.best(candidates(nodes, asked), asked, SPREAD)
            cluster.engine.packing.settle()
            assert cluster.engine.beside_replicas.best(asked) == expected
            having = cluster.engine.beside_replicas.nodes(asked)
            names = [] if having is None else np.array(cluster.engine.packing.columns.names)[having].tolist()
            assert names == sorted(cluster.replicas_on("web"))
            found += expected is not None
        answer = cluster.engine.find(request)
        if answer is not None:
            cluster.engine.reserve(request, answer)
            placed.append((answer.node, request.tenant))
        if placed and rng.random() < 0.3:
            cluster.release(*placed.pop(rng.randrange(len(placed))))
        if rng.random() < 0.1:
            cluster.remove_node(f"node-{rng.randint(0, 6)}")
        if rng.random() < 0.2:
            cluster.upsert_node(node(f"node-{rng.randint(0, 6)}", rng.randint(1, 4)))
    assert found or not seed % 2


def test_nodes_without_replicas_that_have_changed_are_not_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = cluster_of(*(node(f"node-{number:03}", 2) for number in range(200)))
    put(cluster, _spread("web-0"))
    put(cluster, _spread("web-1"))
    kept = cluster.engine.beside_replicas
    for number in range(200):
        cluster.upsert_node(replace(node(f"node-{number:03}", 2), labels={"seen": "again"}))
    looked_at = 0

    class Counted(dict[str, int]):
        def get(self, *args: Any) -> Any:
            nonlocal looked_at
            looked_at += 1
            return super().get(*args)

        def __getitem__(self, name: str) -> int:
            nonlocal looked_at
            looked_at += 1
            return super().__getitem__(name)

    monkeypatch.setattr(kept, "_changed", Counted(kept._changed))
    put(cluster, _spread("web-2"))
    assert 0 < looked_at <= 4, "the nodes with replicas alone"


def test_not_every_node_with_a_replica_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster: ClusterWithEngine = cluster_of(*(node(f"node-{number:02}", 2) for number in range(40)))
    for number in range(40):
        put(cluster, _spread(f"web-{number}"))
    assert len(cluster.replicas_on("web")) == 40
    asked = worked_out = 0

    def counted(*args: object) -> object:
        nonlocal asked
        asked += 1
        return candidates(*args)  # type: ignore[arg-type]

    def counted_least(*args: object) -> object:
        nonlocal worked_out
        worked_out += 1
        return least_spread(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(beside_replicas, "candidates", counted)
    monkeypatch.setattr(beside_replicas, "least_spread", counted_least)
    for number in range(3):
        put(cluster, _spread(f"next-{number}"))
    assert 3 <= asked <= 6
    assert worked_out <= 3, "of the nodes that have changed alone"


def test_orders_of_owners_asked_for_long_ago_and_changes_of_nodes_that_are_gone_are_dropped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(beside_replicas, "_MAX_NODES", 20)
    cluster = cluster_of(*(node(f"node-{number:02}", 2) for number in range(8)))
    kept = cluster.engine.beside_replicas
    for number in range(200):
        owner = f"owner-{number % 5}"
        request = replace(_spread(f"t{number}", 10), owner=owner)
        nodes = cluster.known(cluster.replicas_on(owner))
        expected = choices.best(candidates(nodes, request), request, SPREAD)
        assert kept.best(request) == expected
        place = put(cluster, request)
        if number % 3:
            cluster.release(place.node, request.tenant)
        cluster.upsert_node(node(f"brief-{number}", 1))
        cluster.remove_node(f"brief-{number}")
    assert sum(len(order.least) for order in kept._orders.values()) <= 20
    assert len(kept._changed) <= 2 * len(cluster.accounts) + 18
