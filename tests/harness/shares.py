"""Shares of a GPU over one window, and the error that the machine causes.

The host of a virtual machine may take its processors for tens of milliseconds at a time. While a program, a hook or an
agent cannot run, its tenant loses GPU time that cannot be restored. So a share may be lower by the stolen time, and a
window with much stolen time is discarded and measured again.

Other processes of the machine can take more processor time still: all Pods of a node together have the weight of one
process. So a node's shares are measured while its Pods have priority (`Machine.shares`). With 13 programs on six GPUs
in turns, at a load of 11 to 13 on two processors, each GPU is used 91.5 to 97.1 % of the time by kubelets' weights,
99.5 to 99.9 % by priority.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from .host import Stolen

POINTS = 2.0
"""Percentage points by which a share may differ from the due share on a machine without stolen time."""
QUIET = 2.0
"""Percent of the processors' time that the host may take in a window that counts."""
WINDOWS = 3
"""Most windows that are measured. The window with the least stolen time counts."""
WINDOW_S = 10.0
"""Seconds of a window. A turn lasts at most the tenant's part of the target latency of 300 ms: with 0.5, one turn more
or less is 1.5 points."""
LONG_WINDOW_S = 15.0
"""Seconds of a window for GPUs on which the turns of several tenants begin and end together."""

Tenant = tuple[str, str]
"""Name of the pod or SharePod, and UUID of the GPU."""


def right(due: float, got: float, stolen: float) -> bool:
    """Return whether a share is right: it equals the due share, or is lower by at most the stolen time. All in percent.

    Without a quiet window the share may also be higher, because neighbours get unused time.
    """
    more = stolen if stolen > QUIET else 0.0
    return due - POINTS - stolen <= got <= due + POINTS + more


@dataclass(frozen=True)
class Shares:
    """Shares over one window, in percent of one GPU's time by the device's own account."""

    percent: Mapping[Tenant, float]
    stolen: float
    """Percent of the processors' time that the host took in the window."""

    def of(self, name: str) -> float:
        """Return the share of a pod on all of its GPUs. 0 if the device has no account of it."""
        return sum(share for (pod, _), share in self.percent.items() if pod == name)

    def expect(self, **due: float) -> None:
        """Raise AssertionError if a pod's share is not right. `due`: due share by pod, in percent of one GPU."""
        for name, share in due.items():
            assert right(share, self.of(name), self.stolen), (name, share, self)


def measured(
    busy_ns: Callable[[], Mapping[Tenant, int]],
    sleep: Callable[[float], None] = time.sleep,
    again: Callable[[Shares], None] = lambda _: None,
    *,
    window_s: float = WINDOW_S,
) -> Shares:
    """Measure windows of `window_s` until a quiet one, at most `WINDOWS`. Return the quietest.

    `busy_ns`: the device's account; a window uses its growth. `again`: called with a discarded window before the next
    one begins.
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
