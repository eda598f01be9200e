"""Wrong shares in the demo: off by more than two points and what the host took from the machine."""

from __future__ import annotations

import pytest
from run import Share


@pytest.mark.parametrize(
    ("got", "stolen", "wrong"),
    [
        (40.0, 0.0, False),
        (38.1, 0.0, False),
        (41.9, 0.0, False),
        (37.9, 0.0, True),
        (42.1, 0.0, True),
        (32.1, 6.0, False),
        (31.9, 6.0, True),
        (48.1, 6.0, True),
    ],
)
def test_a_share_is_wrong_when_the_host_does_not_explain_it(got: float, stolen: float, wrong: bool) -> None:
    assert Share("case", due=40.0, got=got, stolen=stolen).wrong is wrong
