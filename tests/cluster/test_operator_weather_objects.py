"""Single objects that arrive late, are very large, have a name that is taken, or are deleted while a SharePod waits for
them.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from cluster.weather import objects
from cluster.weather.world import TIMES, Weather, bad_weather, report

pytestmark = pytest.mark.timeout(300)


@pytest.fixture
def hasty() -> Iterator[Weather]:
    """Start a cluster for one test, whose operator has a `bind_timeout` of 10 s: it withdraws a Pod before it reopens a
    silent watch."""
    with bad_weather(times={**TIMES, "SHAREPOD_BIND_TIMEOUT": "10"}) as running:
        yield running


@pytest.mark.promise("operator-no-ghost")
def test_an_answer_older_than_an_end_brings_no_pod_back(hasty: Weather) -> None:
    report("an answer after the Pod's end", objects.old_answer(hasty))


def test_a_namespace_that_is_being_deleted_takes_no_gpu(weather: Weather) -> None:
    report("a namespace that is being deleted", objects.terminating_namespace(weather))


def test_a_node_that_went_and_came_back_without_its_label_is_told(weather: Weather) -> None:
    report("a Node deleted and unlabelled", objects.deleted_node(weather))


def test_a_pod_name_that_is_taken_holds_no_gpu(weather: Weather) -> None:
    report("a Pod's name is taken", objects.taken_name(weather))


@pytest.fixture
def own() -> Iterator[Weather]:
    """Start a cluster for one test, because the test fills etcd."""
    with bad_weather() as running:
        yield running


@pytest.mark.promise("operator-unreadable-object")
def test_large_pods_do_not_fill_the_operators_memory(own: Weather) -> None:
    assert objects.large_pods(own) < objects.LARGE_LIMIT_MIB
