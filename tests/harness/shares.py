"""Shares of a GPU over one window, and how far the machine let them be right.

The host of a virtual machine may take its processors from it for tens of milliseconds at a time. A program, a hook or
an agent that cannot run costs its tenant GPU time that nobody can give back, so a share may be lower by what was taken,
and a window in which much was taken says little: then another is measured.

Other processes of the machine take as much: all Pods of a node together weigh as one of them. So a node's shares are
measured while its Pods come first (`Machine.shares`). By turns, 13 programs on six GPUs at a load of 11 to 13 on two
processors: 91.5 to 97.1 % of each GPU's time used as kubelets weigh Pods, 99.5 to 99.9 % so.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from .host import Stolen

POINTS = 2.0
"""Percentage points by which a share may differ from what was due on a machine that nobody takes processors from."""
QUIET = 2.0
"""Percent of the processors' time that the host may take from a window that counts."""
WINDOWS = 3
"""Windows that are measured at most; the quietest counts."""
WINDOW_S = 10.0
"""Seconds of a window. A turn lasts its request of 300 ms: one more or less of a tenant with 0.5 is 1.5 points."""
LONG_WINDOW_S = 15.0
"""The same where several tenants' edges come together."""

Tenant = tuple[str, str]
"""Name of the pod or SharePod, and UUID of the GPU."""


def right(due: float, got: float, stolen: float) -> bool:
    """Return whether a share is the one due, or less by no more than what the host took. All in percent.

    Where no window was quiet it may be more, too: what one could not use, the other got.
    """
    more = stolen if stolen > QUIET else 0.0
    return due - POINTS - stolen <= got <= due + POINTS + more


@dataclass(frozen=True)
class Shares:
    """Shares over one window, in percent of one GPU's time by the device's own account."""

    percent: Mapping[Tenant, float]
    stolen: float
    """Percent of the processors' time that the host took meanwhile."""

    def of(self, name: str) -> float:
        """Return the share of a pod on all of its GPUs, 0 if the device does not know it."""
        return sum(share for (pod, _), share in self.percent.items() if pod == name)

    def expect(self, **due: float) -> None:
        """AssertionError if a pod's share is not right."""
        for name, share in due.items():
            assert right(share, self.of(name), self.stolen), (name, share, self)


def measured(
    busy_ns: Callable[[], Mapping[Tenant, int]],
    sleep: Callable[[float], None] = time.sleep,
    again: Callable[[Shares], None] = lambda _: None,
    *,
    window_s: float = WINDOW_S,
) -> Shares:
    """Measure windows of `window_s` until the host left one in quiet, `WINDOWS` at most; return the quietest.

    `busy_ns`: the device's account, of which windows take the difference. `again` is told of a window that does not
    count before the next one begins.
    """
    windows = [_window(busy_ns, sleep, window_s)]
    while windows[-1].stolen > QUIET and len(windows) < WINDOWS:
        again(windows[-1])
        windows.append(_window(busy_ns, sleep, window_s))
    return min(windows, key=lambda window: window.stolen)


def _window(busy_ns: Callable[[], Mapping[Tenant, int]], sleep: Callable[[float], None], window_s: float) -> Shares:
    before, stolen, start = busy_ns(), Stolen(), time.monotonic_ns()
    sleep(window_s)
    after, elapsed = busy_ns(), time.monotonic_ns() - start
    percent = {tenant: 100 * (busy - before.get(tenant, 0)) / elapsed for tenant, busy in after.items()}
    return Shares(percent, 100 * stolen.part())
