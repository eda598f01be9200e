"""Back-off: pauses double from the first to the longest, and are spread over the second half of each."""

from __future__ import annotations

from itertools import islice

import pytest
from sharepod.backoff import Backoff


@pytest.mark.parametrize(
    ("first_s", "longest_s", "pauses"),
    [
        (0.25, 3.0, [0.25, 0.5, 1.0, 2.0, 3.0, 3.0]),
        (1.0, 300.0, [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 300.0]),
        (5.0, 2.0, [2.0, 2.0]),
        (0.1, 600.0, [0.1 * 2**doubled for doubled in range(11)] + [0.1 * 1024] * 3),
    ],
)
def test_a_pause_doubles_with_each_failure_up_to_the_longest(
    first_s: float, longest_s: float, pauses: list[float]
) -> None:
    backoff = Backoff(first_s, longest_s)
    assert [backoff.pause_s(failures) for failures in range(1, len(pauses) + 1)] == pauses
    assert list(islice(backoff, len(pauses))) == pauses
    assert list(islice(backoff, len(pauses))) == pauses, "each iteration begins with the first pause"


def test_a_pause_is_finite_after_any_number_of_failures() -> None:
    assert Backoff(0.25, 30.0).pause_s(10**9) == 30.0


@pytest.mark.parametrize(("drawn", "part"), [(0.0, 0.5), (0.5, 0.75), (1.0, 1.0)])
def test_a_spread_pause_is_half_of_it_or_more(drawn: float, part: float) -> None:
    assert Backoff(4.0, 100.0).spread_s(2, drawn) == 8.0 * part
