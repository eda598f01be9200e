"""The two resources of the line: what Pods carry of them, and what the Pod of a SharePod is given to carry. Pure.

Guarantees:
- The Pod of a SharePod carries what the SharePod asks for, rounded up to whole MiB: a quota never counts less.
"""

from __future__ import annotations

from dataclasses import dataclass

from .objects import GROUP
from .sharepod import GpuRequest
from .units import MIB, Milli

MILLI = f"{GROUP}/gpu-milli"
"""Extended resource: thousandths of GPU time, of all GPUs of the Pod together."""

MEMORY = f"{GROUP}/gpu-memory-mib"
"""Extended resource: MiB of GPU memory, on all GPUs of the Pod together."""

RESOURCES = (MILLI, MEMORY)
PREFIX = f"{GROUP}/"


@dataclass(frozen=True, slots=True)
class Carried:
    """Amounts of the line's resources in a Pod, as kube-scheduler and ResourceQuota count them: thousandths and MiB, on
    all its GPUs together."""

    milli: int = 0
    mib: int = 0

    def __bool__(self) -> bool:
        return self != NOTHING

    def covers(self, other: Carried) -> bool:
        """Return whether this is at least as much of both."""
        return self.milli >= other.milli and self.mib >= other.mib


NOTHING = Carried()


def carried(gpu: GpuRequest, *, most_milli: Milli | None = None) -> Carried:
    """Return what a Pod carries whose line asks for this. Memory that is not said is not carried.

    `most_milli`: thousandths of each GPU that the line says, where an annotation asks for less.
    """
    memory = 0 if gpu.memory is None else -(-gpu.memory // MIB)
    return Carried((gpu.request_milli if most_milli is None else most_milli) * gpu.count, memory * gpu.count)


def line_of(gpu: GpuRequest) -> dict[str, str]:
    """Return the limits by which the Pod of a SharePod carries its line. Memory is left out where it is not said."""
    said = carried(gpu)
    return {MILLI: str(said.milli), **({} if gpu.memory is None else {MEMORY: str(said.mib)})}
