"""Spread beside replicas on every node: the best place, without asking the filters of every node."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from sharepod.api.sharepod import PlacementPolicy
from sharepod.api.units import TenantId
from sharepod.placement import choices
from sharepod.placement.filters.candidates import candidates
from sharepod.placement.policies import SPREAD
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
        asked = replace(request, owner="web", gpu=replace(request.gpu, placement=PlacementPolicy.SPREAD))
        nodes = cluster.known(cluster.replicas("web"))
        expected = choices.best(candidates(nodes, asked), asked, SPREAD)
        assert choices.best_beside_replicas(nodes, asked) == expected
        found += expected is not None
        answer = cluster.engine.find(request)
        if answer is not None:
            cluster.engine.reserve(request, answer)
            placed.append((answer.node, request.tenant))
        if placed and rng.random() < 0.3:
            cluster.release(*placed.pop(rng.randrange(len(placed))))
    assert found


def test_not_every_node_with_a_replica_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster: ClusterWithEngine = cluster_of(*(node(f"node-{number:02}", 2) for number in range(40)))
    for number in range(40):
        put(cluster, _spread(f"web-{number}"))
    assert len(cluster.replicas("web")) == 40
    asked = 0

    def counted(*args: object) -> object:
        nonlocal asked
        asked += 1
        return candidates(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(choices, "candidates", counted)
    assert cluster.engine.find(_spread("next")) is not None
    assert 1 <= asked <= 2
