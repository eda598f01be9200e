"""What a process's context takes of a GPU's memory beyond what its calls ask for, learnt from what the driver counts.

It depends on the GPU's model and the driver, and is the same for most programs. Learnt only from processes that were
told nothing about it, and so have reserved nothing for it: else what is learnt would feed on itself. Of each process
the least counts that was ever seen of it, because modules and libraries come on top later; over all processes the
median, because one strange program proves nothing. What was learnt is kept in a file.
"""

from __future__ import annotations

import statistics
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from sharepod.agent.state import files

LOOKS = 3
"""A process counts from so many readings on."""
LEAST = 16 << 20
"""No context takes less; such a figure is another process's memory, or a reading between two calls."""
MOST = 4 << 30
PROCESSES = 16
"""Learnt from so many; then it stands."""


class _OverheadFile(BaseModel):
    model_config = ConfigDict(extra="ignore")
    bytes: dict[str, list[int]] = {}


class ContextOverhead:
    """`path`: the file that it is kept in. `changed` says that `save` has something to write."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._learnt: dict[str, list[int]] = {}
        self._seen: dict[tuple[str, int, str], tuple[int, int]] = {}
        self.changed = False

    def load(self) -> None:
        """What an earlier agent learnt; a file that cannot be read is as none."""
        try:
            self._learnt = _OverheadFile.model_validate_json(self._path.read_bytes()).bytes
        except (OSError, ValidationError):
            self._learnt = {}

    def save(self) -> None:
        """Raises `OSError`."""
        self.changed = False
        files.replace(self._path, _OverheadFile(bytes=self._learnt).model_dump_json().encode())

    def kib(self, model: str, driver: str) -> int:
        """What to reserve for a process's context; 0 while that is not known."""
        learnt = self._learnt.get(_key(model, driver))
        return round(statistics.median_low(learnt)) >> 10 if learnt else 0

    def observe(self, model: str, driver: str, uuid: str, samples: dict[int, int]) -> None:
        """By pid, what one reading counts beyond the credits of each process on this GPU that reserved nothing for its
        context. A pid that is missing has ended."""
        key = _key(model, driver)
        for pid in [pid for kind, pid, gpu in self._seen if (kind, gpu) == (key, uuid) and pid not in samples]:
            del self._seen[key, pid, uuid]
        learnt = self._learnt.get(key, [])
        for pid, size in samples.items():
            if not LEAST <= size <= MOST:
                continue
            least, looks = self._seen.get((key, pid, uuid), (size, 0))
            least, looks = min(least, size), looks + 1
            self._seen[key, pid, uuid] = (least, looks)
            if looks == LOOKS and len(learnt) < PROCESSES:
                learnt = self._learnt[key] = [*learnt, least]
                self.changed = True


def _key(model: str, driver: str) -> str:
    return f"{model} / {driver}"
