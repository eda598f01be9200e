"""Single objects that are very large, or are deleted while a SharePod waits for them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from cluster.weather import objects
from cluster.weather.world import Weather, bad_weather, report

pytestmark = pytest.mark.timeout(300)


def test_a_namespace_that_is_being_deleted_takes_no_gpu(weather: Weather) -> None:
    report("a namespace that is being deleted", objects.terminating_namespace(weather))


def test_a_node_that_went_and_came_back_without_its_label_is_told(weather: Weather) -> None:
    report("a Node deleted and unlabelled", objects.deleted_node(weather))


@pytest.fixture
def own() -> Iterator[Weather]:
    """Start a cluster for one test, because the test fills etcd."""
    with bad_weather() as running:
        yield running


@pytest.mark.promise("operator-unreadable-object")
def test_large_pods_do_not_fill_the_operators_memory(own: Weather) -> None:
    assert objects.large_pods(own) < objects.LARGE_LIMIT_MIB
