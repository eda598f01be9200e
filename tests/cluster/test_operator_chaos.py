"""Short runs of `make bench-burst` (shares that just fit) and `make bench-chaos` (an operator that is killed
repeatedly).
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from cluster import chaos
from cluster.audit import Audit
from cluster.burst import SHAREPODS, Burst, Round
from cluster.operator_world import GIB, World
from cluster.plain_world import install_plain, serves_mutating_policies
from cluster.shared_cluster import SharedCluster
from cluster.weather.storm import Storm
from cluster.weather.world import Weather

pytestmark = pytest.mark.timeout(400)


@pytest.fixture(scope="module")
def world(shared_cluster: SharedCluster) -> Iterator[World]:
    with shared_cluster.world() as running:
        if serves_mutating_policies(running.api):
            install_plain(running.cluster)
        yield running


@pytest.fixture
def audit(world: World) -> Iterator[Audit]:
    with Audit(world.api, memory=16 * GIB) as following:
        yield following
        assert following.gaps == 0


@pytest.mark.promise("operator-no-over-commit")
def test_a_burst_that_just_fits_is_placed_whole_and_never_three_on_a_gpu(world: World, audit: Audit) -> None:
    burst = Burst(world, audit, doors=serves_mutating_policies(world.api))
    for _ in range(10):
        audit.cut()  # cutting the watches must not lose any version
        assert burst.round() == Round(placed=SHAREPODS, most_on_a_gpu=2, over_committed=0)
    assert audit.doubled == []


def test_killed_at_random_the_operator_loses_doubles_and_overcommits_nothing(world: World, audit: Audit) -> None:
    thirds = serves_mutating_policies(world.api)
    asked = chaos.Asked(sharepods=60, nodes=30, kills=2, seed=1, deleted=6, timeout=200, thirds=thirds)
    outcome = chaos.run(world, audit, asked)
    wrong = (outcome.lost, outcome.doubled, outcome.over_committed, outcome.left)
    assert (outcome.running, outcome.kills, outcome.failed, wrong) == (54, 2, (), (0, 0, 0, 0)), outcome


def test_in_bad_weather_nothing_is_lost_doubled_or_overcommitted(weather: Weather) -> None:
    asked = chaos.Asked(
        sharepods=60, nodes=32, kills=1, seed=3, deleted=6, timeout=250, strangers=4, taken=3, spread=25.0, preempted=6
    )
    storm = Storm(weather, seed=asked.seed, faults=6)
    with Audit(weather.world.api, memory=16 * GIB) as audit:
        outcome = chaos.run(weather.world, audit, asked, storm=storm)
    assert storm.played.total() == 6
    wrong = (outcome.lost, outcome.doubled, outcome.over_committed, outcome.left)
    assert (outcome.running, outcome.kills, outcome.failed, wrong) == (54, 1, (), (0, 0, 0, 0)), outcome
    assert outcome.preempted > 0, outcome
