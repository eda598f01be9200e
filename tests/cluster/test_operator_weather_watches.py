"""Watches that fall silent, fail or expire. The operator is without events only briefly, and decides nothing in that
time.
"""

from __future__ import annotations

import pytest
from cluster.weather import watches
from cluster.weather.world import KINDS, Weather, report

pytestmark = pytest.mark.timeout(300)


@pytest.mark.promise("operator-watch-lost")
def test_half_open_watches_are_opened_again(weather: Weather) -> None:
    report("half-open watches", watches.half_open(weather))


@pytest.mark.promise("operator-no-blind-placement")
def test_nothing_is_placed_on_what_a_silent_watch_once_said(weather: Weather) -> None:
    report("silent Nodes and ledgers", watches.stale_belief(weather))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.promise("operator-watch-lost")
def test_an_error_event_is_followed_by_a_new_list(weather: Weather, kind: str) -> None:
    report(f"ERROR event, {kind}", watches.error_event(weather, kind))


@pytest.mark.promise("operator-watch-lost")
def test_shares_are_free_when_watches_expire_and_nothing_is_left_to_list(weather: Weather) -> None:
    report("expired watches, nothing left", watches.expired_and_empty(weather))


@pytest.mark.promise("operator-watch-lost")
def test_watches_and_lists_of_all_kinds_that_expire_at_once_are_begun_again(weather: Weather) -> None:
    report("all kinds expired at once", watches.expired_together(weather))


@pytest.mark.promise("operator-watch-lost")
def test_whatever_a_watch_says_the_operator_goes_on(weather: Weather) -> None:
    operator = weather.world.operator
    assert operator is not None
    process = operator.pid
    report("odd words of watches", watches.odd_words(weather))
    assert weather.world.operator is not None
    assert weather.world.operator.pid == process
