"""Shares of a GPU that pods got on a real node, and how far the machine let them be right.

The host of a virtual machine may take its processors from it for tens of milliseconds at a time. A program, a hook or
an agent that cannot run costs its tenant GPU time that nobody can give back, so a share may be lower by what was taken.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass

from harness.host import Stolen
from harness.machines import RealNode

POINTS = 2.0
"""Percentage points by which a share may differ from what was asked for on a machine that nobody takes processors
from."""
WINDOW_S = 10.0


@dataclass(frozen=True)
class Shares:
    """Shares over one window, in percent of one GPU's time by the device's own account."""

    percent: Mapping[str, float]
    stolen: float
    """Percent of the processors' time that the host took meanwhile."""

    def expect(self, **wanted: float) -> None:
        """AssertionError if a share is not the one wanted, in percent."""
        for name, share in wanted.items():
            assert share - POINTS - self.stolen <= self.percent[name] <= share + POINTS, self


def measured(machine: RealNode, *names: str) -> Shares:
    """Measure the shares of these pods over `WINDOW_S`."""
    before, stolen, start = machine.busy_ns(), Stolen(), time.monotonic_ns()
    time.sleep(WINDOW_S)
    after, elapsed = machine.busy_ns(), time.monotonic_ns() - start
    percent = {
        name: sum(100 * (after[key] - before.get(key, 0)) / elapsed for key in after if key[0] == name)
        for name in names
    }
    return Shares(percent, 100 * stolen.part())
