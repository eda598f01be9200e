"""A gang next to single tenants: the gang has two GPUs at once, and a single tenant runs on each of them.

All tenants are always busy and request 0.5. The gang's kernels take 5 ms, and a separate process launches them on each
GPU. The length of the singles' kernels depends on the case. `work_lost`: the part of the time of both GPUs in which no
kernel ran, compared with one program without neighbours.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path

from hook.world.agent_node import GPUS, running, tenant
from results import Row
from share_window import Asked, watch

GANG_KERNEL_US = 5_000
BOTH = GPUS[:2]
LOST_GOAL = 0.04


@dataclass(frozen=True)
class Gang:
    """One case. `request`: of the gang. `single_ms`: length of the kernels of the single tenants."""

    single_ms: int
    request: float = 0.5

    @property
    def name(self) -> str:
        """Return the name of the case."""
        return f"gang of 2 at {self.request:g} next to singles, {self.single_ms} ms"


GANGS = tuple(Gang(single_ms) for single_ms in (1, 5, 20, 70))


def measure_gang(case: Gang, single: float, seconds: float, watched_s: float) -> list[Row]:
    """Measure one case. Other arguments as for `share_window.watch`; `single`: as for `Window.rows`."""
    gang = Asked("gang", case.request, BOTH)
    singles = [Asked(f"single{place}", 1 - case.request, (gpu,)) for place, gpu in enumerate(BOTH)]
    rows = [tenant(one.name, one.share, gpus=one.gpus) for one in (gang, *singles)]
    with tempfile.TemporaryDirectory(prefix="sh") as directory, running(Path(directory), *rows) as node:
        for device in range(len(BOTH)):
            node.launch("gang", "--kernel-us", f"{GANG_KERNEL_US}", "--device", f"{device}", gpus=BOTH)
        for one in singles:
            node.launch(one.name, "--kernel-us", f"{case.single_ms}000", gpus=one.gpus)
        window = watch(node, (gang, *singles), seconds, watched_s)
    return [*window.rows(case.name, single), Row(case.name, "goal_work_lost", "fraction", LOST_GOAL)]
