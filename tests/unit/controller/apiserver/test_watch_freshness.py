"""Freshness of watches: whether placement may use a cache, readiness, and whether a restart can help."""

from __future__ import annotations

import dataclasses

import pytest
from sharepod.controller.apiserver.watch_freshness import BELIEF_S, BLIND_S, WatchFreshness, blind, stale, unready
from sharepod.kube import ApiError, ForbiddenError, NotFoundError, UnauthorizedError, UnavailableError

GOOD = WatchFreshness("nodes", True, 1.0)
UNAVAILABLE = UnavailableError("LIST", 503, "ServiceUnavailable", "not now")


def test_a_kind_is_stale_that_was_silent_for_too_long_or_is_not_listed() -> None:
    old = WatchFreshness("pods", True, BELIEF_S + 0.1)
    unlisted = WatchFreshness("leases", False, 1.0)
    spare = WatchFreshness("namespaces", False, 1e9, needed=False)
    assert stale([GOOD, WatchFreshness("pods", True, BELIEF_S), spare]) == []
    assert stale([GOOD, old, unlisted, spare]) == ["pods", "leases"]


def test_readiness_names_the_kinds_that_are_not_listed_and_why() -> None:
    missing = WatchFreshness("sharepods", False, 1.0, NotFoundError("LIST", 404, "NotFound", "not served"))
    assert unready([GOOD, WatchFreshness("pods", True, 1e9)]) is None
    message = unready([GOOD, missing, WatchFreshness("pods", False, 1.0)])
    assert message is not None
    assert message.startswith("not listed: sharepods (LIST: 404 NotFound: not served); pods")


@pytest.mark.promise("operator-healthy")
@pytest.mark.parametrize(
    ("failure", "failed_s", "answered_s", "healthy"),
    [
        (None, 0.0, 1.0, False),  # no try has failed and none is running: the watch hangs
        (None, 0.0, None, False),
        (UNAVAILABLE, 1.0, None, True),  # the API server does not answer
        (UNAVAILABLE, 1.0, BELIEF_S + 1, True),
        (UNAVAILABLE, BLIND_S, BELIEF_S + 1, False),  # the reflector does not even try any more
        (UNAVAILABLE, 1.0, 1.0, False),  # the API server answers all calls except this watch
        (NotFoundError("LIST", 404, "", ""), 1.0, 1.0, True),  # the CRD is installed later
        (ForbiddenError("LIST", 403, "", ""), 1.0, 1.0, True),
        (UnauthorizedError("LIST", 401, "", ""), 1.0, 1.0, True),  # the process ends for this error anyway
    ],
)
def test_a_process_is_unhealthy_only_where_a_restart_can_help(
    failure: ApiError | None, failed_s: float, answered_s: float | None, healthy: bool
) -> None:
    watch = WatchFreshness("pods", True, BLIND_S + 1, failure, failed_s)
    assert (blind([GOOD, watch], answered_s) is None) is healthy
    assert blind([GOOD, WatchFreshness("pods", True, BLIND_S, failure, failed_s)], answered_s) is None
    assert blind([GOOD, dataclasses.replace(watch, arriving=True)], answered_s) is None
