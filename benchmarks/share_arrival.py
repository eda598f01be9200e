"""Arrival of a tenant on a GPU whose only tenant has long kernels in its queue: time until the new tenant has its
share.

The first tenant launches without ever waiting for its work. The process of the new tenant starts some seconds later.
- `right_after`: seconds from the start of the new tenant until its share is right from then on. It is right if it is
  within one point of the request in each window of four seconds or longer that begins later. Added to the point is what
  each end of a window may cut off: a turn of 100 ms, or one of the first tenant's kernels if that is longer.
- `first_second`, `second_second`: the new tenant's share of the first second, in which its process starts, and of the
  second one.
- `share_error_10s`: error of this share over the first ten seconds, in points.
- `wait_p50`, `wait_p99`: the new tenant's waits for the token.
- `work_lost`: part of the time after its start in which no kernel ran.
"""

from __future__ import annotations

import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from hook.world.agent_node import running, tenant, wait_for
from results import Row
from share_window import TOLD_S, Asked, wait_rows, waits_of

STEP_S = 0.1
WINDOW_S = 4.0
WATCHED_S = 12.0
TURN_S = 0.1
ERROR_S = 10.0


@dataclass(frozen=True)
class Arrival:
    """One case. `first_request`: request of the first tenant. `first_ms`, `newcomer_ms`: length of the kernels of the
    first tenant and of the newcomer."""

    first_request: float
    first_ms: int
    newcomer_ms: int
    alone_s: float = 3.0

    @property
    def name(self) -> str:
        """Return the name of the case."""
        return f"arrival at {1 - self.first_request:g} next to {self.first_request:g}, {self.first_ms} ms"


ARRIVALS = (Arrival(0.1, 5, 5), Arrival(0.1, 70, 5), Arrival(0.1, 250, 5), Arrival(0.5, 70, 5))


def measure_arrival(arrival: Arrival) -> list[Row]:
    """Measure one case."""
    owed = 1 - arrival.first_request
    first, newcomer = Asked("first", arrival.first_request), Asked("newcomer", owed)
    rows = [tenant(one.name, one.share) for one in (first, newcomer)]
    with tempfile.TemporaryDirectory(prefix="sh") as directory, running(Path(directory), *rows) as node:
        node.launch("first", "--kernel-us", f"{arrival.first_ms}000")
        wait_for(lambda: first.busy_s(node.devices()) > 0, "device time of the first")
        time.sleep(arrival.alone_s)
        node.launch("newcomer", "--kernel-us", f"{arrival.newcomer_ms}000")
        begin, before = time.monotonic(), first.busy_s(node.devices())
        track = [(0.0, 0.0)]
        while track[-1][0] < WATCHED_S + WINDOW_S:
            time.sleep(STEP_S)
            track.append((time.monotonic() - begin, newcomer.busy_s(node.devices())))
        both = first.busy_s(node.devices()) - before + track[-1][1]
        time.sleep(TOLD_S)
        waits = waits_of(node, "newcomer")
    right = next(
        (at for at, _ in track if _right_from(track, at, owed, max(TURN_S, arrival.first_ms / 1e3))), WATCHED_S
    )
    after_first = [share for at, share in _windows(track, ERROR_S) if at >= 1.0]
    by_second = [share for at, share in _windows(track, 1.0) if at % 1.0 < STEP_S]
    return [
        Row(arrival.name, "right_after", "s", round(right, 1)),
        Row(arrival.name, "first_second", "fraction", round(by_second[0], 3)),
        Row(arrival.name, "second_second", "fraction", round(by_second[1], 3)),
        Row(arrival.name, "share_error_10s", "points", round(max(abs(share - owed) for share in after_first) * 100, 2)),
        *wait_rows(arrival.name, waits),
        Row(arrival.name, "work_lost", "fraction", round(1 - both / track[-1][0], 4)),
    ]


def _right_from(track: list[tuple[float, float]], begin: float, owed: float, turn_s: float) -> bool:
    """Return whether the share is right in every window that begins at `begin` and is `WINDOW_S` or longer."""
    before = next(busy for at, busy in track if at == begin)
    windows = [(at - begin, busy - before) for at, busy in track if at >= begin + WINDOW_S]
    return bool(windows) and all(abs(busy - owed * length) <= 0.01 * length + 2 * turn_s for length, busy in windows)


def _windows(track: list[tuple[float, float]], length_s: float) -> list[tuple[float, float]]:
    """Return (begin, share) of each window of length `length_s`."""
    found = []
    for at, busy in track:
        end = next(((later, total) for later, total in track if later >= at + length_s), None)
        if end is not None:
            found.append((at, (end[1] - busy) / (end[0] - at)))
    return found
