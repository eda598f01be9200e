"""Durations of launches while other tenants co-run are measured apart from durations of launches alone (PC8,
pace.h).
"""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from property.pace_model import MS, POLL, Stream


class SharedStream(Stream):
    """Stream whose launches take twice as long while `co_runs` is odd."""

    def __init__(self, takes: int) -> None:
        super().__init__()
        self.takes = takes
        self.co_runs = 0

    def wait(self, late: int = 0) -> None:
        self.model.pace_others(self.pace, self.co_runs)
        super().wait(late)

    def run(self, launches: int) -> None:
        for _ in range(launches):
            self.launch(self.takes * (1 + self.co_runs % 2))

    def others(self, co_runs: int) -> None:
        """Let other tenants begin or cease to co-run, after all launched work has ended."""
        self.drain()
        self.co_runs = co_runs


@settings(max_examples=100)
@given(
    st.integers(min_value=100_000, max_value=20 * MS),
    st.lists(st.tuples(st.integers(1, 3), st.integers(1, 300)), min_size=1, max_size=20),
)
def test_what_is_learned_while_others_run_leaves_what_is_known_of_launches_alone(
    takes: int, spans: list[tuple[int, int]]
) -> None:
    stream = SharedStream(takes)
    stream.open(0)
    stream.run(400)
    alone = stream.pace.estimate.launch_ns
    assert alone <= takes + POLL
    for begun_or_ceased, launches in spans:
        stream.others(stream.co_runs + begun_or_ceased)
        stream.run(launches)
        estimate = stream.pace.estimate
        known = estimate.other_ns if estimate.shared else estimate.launch_ns
        assert known <= takes + POLL


def test_the_durations_of_launches_that_share_the_gpu_are_learned_and_found_again() -> None:
    stream = SharedStream(MS)
    stream.open(0)
    for co_runs in range(6):
        stream.others(co_runs)
        stream.run(400)
        takes = MS * (1 + co_runs % 2)
        assert takes - POLL <= stream.pace.estimate.launch_ns <= takes + POLL
