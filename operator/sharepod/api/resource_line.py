"""The two resources of the line: their amounts in Pods, and in the Pod of a SharePod. Pure.

Guarantees:
- The Pod of a SharePod carries the SharePod's request, rounded up to whole MiB: a quota never counts less.
"""

from __future__ import annotations

from dataclasses import dataclass

from sharepod.api.objects import GROUP
from sharepod.api.sharepod import GpuRequest
from sharepod.api.units import MIB, Milli

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
    """Return the amounts in a Pod whose line has this request. Memory that is not set is not carried.

    `most_milli`: thousandths of each GPU in the line, where an annotation requests less.
    """
    memory = 0 if gpu.memory is None else -(-gpu.memory // MIB)
    return Carried((gpu.request_milli if most_milli is None else most_milli) * gpu.count, memory * gpu.count)


def line_of(gpu: GpuRequest) -> dict[str, str]:
    """Return the limits by which the Pod of a SharePod carries its line. Memory is left out if it is not set."""
    amounts = carried(gpu)
    return {MILLI: str(amounts.milli), **({} if gpu.memory is None else {MEMORY: str(amounts.mib)})}
