"""Objects that come late, are huge, stand in the way, or go while a SharePod waits for them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from cluster.weather import objects
from cluster.weather.world import Weather, bad_weather, told
from harness.errors import HarnessError

FAULTS = (AssertionError, HarnessError)
"""What a fault that is not survived yet raises."""
pytestmark = pytest.mark.timeout(300)


@pytest.mark.xfail(raises=FAULTS, reason="a ghost pod until the next list")
def test_an_answer_older_than_an_end_brings_no_pod_back(weather: Weather) -> None:
    told("an answer after the Pod's end", objects.old_answer(weather))


@pytest.mark.xfail(raises=FAULTS, reason="placed, and holds the row for bind_timeout")
def test_a_namespace_that_is_being_deleted_takes_no_gpu(weather: Weather) -> None:
    told("a namespace that is being deleted", objects.terminating_namespace(weather))


@pytest.mark.xfail(raises=FAULTS, reason="PoolLabelGone only after a resync")
def test_a_node_that_went_and_came_back_without_its_label_is_told(weather: Weather) -> None:
    told("a Node deleted and unlabelled", objects.deleted_node(weather))


def test_a_pod_name_that_is_taken_holds_no_gpu(weather: Weather) -> None:
    told("a Pod's name is taken", objects.taken_name(weather))


@pytest.fixture
def own() -> Iterator[Weather]:
    """A cluster for one test: its store is filled."""
    with bad_weather() as running:
        yield running


@pytest.mark.xfail(raises=FAULTS, reason="a list is kept whole")
def test_large_pods_do_not_fill_the_operators_memory(own: Weather) -> None:
    assert objects.large_pods(own) < objects.LARGE_LIMIT_MIB
