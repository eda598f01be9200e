"""Context overhead: device memory that a process's CUDA context takes beyond its allocations, estimated from NVML.
Hooks reserve this amount for each context.

The overhead depends on the GPU's model and the driver, and is the same for most programs.
- Samples come only from processes that started before an overhead was known, and so reserved no memory for it.
  Otherwise each estimate would depend on the estimate before.
- The smallest reading of each process counts, because modules and libraries add memory later.
- The estimate is the median over processes, so that an unusual program does not change it.
- The estimates are kept in a file.
"""

from __future__ import annotations

import statistics

from pydantic import BaseModel, ConfigDict, ValidationError

from sharepod.agent.state.files import KeptFiles

FILE = "contexts.json"

READINGS_MIN = 3
"""Readings of a process after which its smallest reading counts. The first few may fall between two calls that create
the context."""
OVERHEAD_MIN = 16 << 20
"""Smallest plausible overhead in bytes. A smaller reading was taken while the process created its context."""
OVERHEAD_MAX = 4 << 30
"""Largest plausible overhead in bytes. A larger reading includes memory that bypassed the hook."""
PROCESSES_MAX = 16
"""Processes that make an estimate final; later processes are ignored."""


class _OverheadFile(BaseModel):
    model_config = ConfigDict(extra="ignore")
    bytes: dict[str, list[int]] = {}


class ContextOverhead:
    """Estimates of the context overhead, by GPU model and driver version."""

    def __init__(self, files: KeptFiles) -> None:
        """`files`: storage of the estimates."""
        self._files = files
        self._learnt: dict[str, list[int]] = {}
        self._seen: dict[tuple[str, int, str], tuple[int, int]] = {}
        self.changed = False
        """True if the estimates have changed since the last `save`."""

    def load(self) -> None:
        """Read the estimates that an earlier agent has stored. A file that cannot be read counts as empty."""
        try:
            self._learnt = _OverheadFile.model_validate_json(self._files.read(FILE)).bytes
        except (OSError, ValidationError):
            self._learnt = {}

    def save(self) -> None:
        """Write the estimates to the file. Raise `OSError`."""
        self.changed = False
        self._files.replace(FILE, _OverheadFile(bytes=self._learnt).model_dump_json().encode())

    def kib(self, model: str, driver: str) -> int:
        """Return the KiB to reserve for the context of each process. 0 while the overhead is unknown."""
        learnt = self._learnt.get(_key(model, driver))
        return round(statistics.median_low(learnt)) >> 10 if learnt else 0

    def observe(self, model: str, driver: str, uuid: str, samples: dict[int, int]) -> None:
        """Update the estimate from one reading of one GPU.

        Args:
            model: the GPU's model.
            driver: the driver's version.
            samples: For each running process that has reserved nothing for its context: pid -> bytes beyond its
            credits.
        """
        key = _key(model, driver)
        for pid in [pid for kind, pid, gpu in self._seen if (kind, gpu) == (key, uuid) and pid not in samples]:
            del self._seen[key, pid, uuid]
        learnt = self._learnt.get(key, [])
        for pid, size in samples.items():
            if not OVERHEAD_MIN <= size <= OVERHEAD_MAX:
                continue
            least, looks = self._seen.get((key, pid, uuid), (size, 0))
            least, looks = min(least, size), looks + 1
            self._seen[key, pid, uuid] = (least, looks)
            if looks == READINGS_MIN and len(learnt) < PROCESSES_MAX:
                learnt = self._learnt[key] = [*learnt, least]
                self.changed = True


def _key(model: str, driver: str) -> str:
    return f"{model} / {driver}"
