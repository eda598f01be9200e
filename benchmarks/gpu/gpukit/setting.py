"""One run of the kit: its paths, its measurements, and the start of workloads."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from gpukit.agent import Agent, AgentError
from gpukit.gpu import AnyGpu
from gpukit.programs import Program, ProgramError
from gpukit.results import Cell, Results

_NOT_FOR_WORKLOADS = ("LD_PRELOAD", "PYTHONPATH", "PYTHONSTARTUP")


@dataclass
class Setting:
    """One run of the kit. `python`: interpreter of the workloads. `torch`: True if it has PyTorch. `seconds`: length of
    a measurement. `rounds`: number of repeated measurements. `start_s`: longest time in which a workload starts."""

    kit: Path
    gpu: AnyGpu
    agent: Agent
    results: Results
    logs: Path
    python: str
    torch: bool
    seconds: float
    rounds: int
    start_s: float = 180.0

    def patience_s(self, seconds: float) -> float:
        """Return the longest wait, in seconds, for the answer to a measurement that takes `seconds`."""
        return 3 * seconds + 60

    def expected_s(self, *, windows: int, window_s: float) -> float:
        """Return the seconds that a case with `windows` measurements takes, including the start of its programs."""
        return windows * (window_s + 1) + (30 if self.torch else 5)

    def keep(self, key: str, make: Callable[[], Cell]) -> None:
        """Measure a cell by `make`. If the measurement fails, store the failure and return."""
        try:
            self.results.measure(key, make)
        except (ProgramError, AgentError) as error:
            note(f"  failed: {error}")
            self.results.put(key, {"failed": str(error)})

    @staticmethod
    def missing(cell: Cell | None, columns: int) -> list[str]:
        """Return the columns of a row that has no figures: the reason, and empty columns."""
        words = "not measured yet" if cell is None or "failed" not in cell else f"FAILED: {cell['failed'][:80]}"
        return [words, *[""] * (columns - 1)]

    @contextmanager
    def workload(self, name: str, *arguments: str, label: str, tenant: str | None = None) -> Iterator[Program]:
        """Yield a workload that is ready, and end it with the block. `tenant`: whose hook it has; None: no hook."""
        program = self.begin(name, *arguments, label=label, tenant=tenant)
        try:
            program.ready(self.start_s)
            yield program
        finally:
            program.end()

    def begin(self, name: str, *arguments: str, label: str, tenant: str | None = None) -> Program:
        """Start a workload and return it, even before it is ready. The caller must end it."""
        environment = {key: value for key, value in os.environ.items() if key not in _NOT_FOR_WORKLOADS}
        environment |= {
            "PATH": environment.get("PATH", "/usr/bin:/bin"),
            "PYTHONDONTWRITEBYTECODE": "1",
            "TORCHINDUCTOR_CACHE_DIR": str(self.logs.parent / "inductor"),
            **self.gpu.environment(label),
        }
        if tenant is not None:
            environment["LD_PRELOAD"] = str(self.agent.hook(tenant))
        command = [self.python, str(self.kit / "workloads" / f"{name}.py"), *arguments]
        return Program(command, environment, self.logs / f"{label}.log")


def note(text: str) -> None:
    """Print a line of progress on standard error, separate from the tables."""
    print(text, file=sys.stderr, flush=True)
