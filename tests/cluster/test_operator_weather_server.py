"""Faults of the API server as a whole: it is away, overloaded, rejects the token, lacks the CRDs, or was restored from
a backup.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from cluster.weather import server
from cluster.weather.world import Weather, bad_weather, report

pytestmark = pytest.mark.timeout(300)


@pytest.fixture
def own() -> Iterator[Weather]:
    """Start a cluster for one test, without an operator."""
    with bad_weather(start=False) as running:
        yield running


@pytest.mark.promise("operator-late-kinds")
def test_a_minute_of_503_is_outlived(weather: Weather) -> None:
    report("503 for a minute", server.outage(weather))


def test_retry_after_is_honoured(weather: Weather) -> None:
    report("429: later than Retry-After", server.too_many_requests(weather))


@pytest.mark.promise("operator-no-second-run")
def test_writes_whose_answers_are_lost_happen_once(weather: Weather) -> None:
    report("lost answers and resets", server.lost_answers(weather))


def test_a_lasting_401_is_said_and_ends_the_process(weather: Weather) -> None:
    report("permanent 401, until the process ends", server.unauthorized(weather))


@pytest.mark.promise("operator-late-kinds")
def test_crds_that_come_late_are_replaced_in_place_or_are_gone_for_a_while_are_picked_up(own: Weather) -> None:
    report("late CRDs", server.late_crds(own))
    report("CRDs replaced in place, three times", server.replaced_crds(own))
    report("CRDs deleted and created again, until ready", server.crds_gone_and_back(own))


@pytest.mark.promise("operator-restored-backup")
def test_a_store_restored_from_an_older_backup_is_noticed(own: Weather) -> None:
    own.start()
    report("restored backup", server.restored_backup(own))
