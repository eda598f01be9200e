"""Faults during preemptions: requests of higher priority get their room, and no tenant is evicted without need."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from cluster.weather import preemption
from cluster.weather.world import Weather, report

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module", autouse=True)
def _priority(sky: Weather) -> None:
    preemption.high_priority(sky)


@pytest.mark.promise("placement-preempt-weather")
@pytest.mark.parametrize("fault", preemption.FAULTS, ids=lambda fault: fault.__name__)
def test_a_fault_amid_a_preemption_ends_nobody_for_nothing(weather: Weather, fault: Callable[[Weather], float]) -> None:
    report(f"{fault.__name__} amid a preemption", fault(weather))
