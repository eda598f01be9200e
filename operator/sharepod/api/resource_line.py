"""The two resources of the resource line: amounts in the Pods of lines and of SharePods. Pure.

Guarantees:
- The Pod of a SharePod has the resource line of the SharePod's request, rounded up to whole MiB, so a ResourceQuota
  never counts less.
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
    """Amounts of the two resources in a Pod, as kube-scheduler and ResourceQuota count them: thousandths and MiB, each
    summed over the Pod's GPUs."""

    milli: int = 0
    mib: int = 0

    def __bool__(self) -> bool:
        return self != NOTHING

    def covers(self, other: Carried) -> bool:
        """Return whether both amounts are at least as large as the other's."""
        return self.milli >= other.milli and self.mib >= other.mib


NOTHING = Carried()


def carried(gpu: GpuRequest, *, most_milli: Milli | None = None) -> Carried:
    """Return the amounts in a Pod whose line has this request. Memory that is not set counts 0. `most_milli`:
    thousandths of each GPU in the line, if an annotation of the Pod requests less than its line."""
    memory = 0 if gpu.memory is None else -(-gpu.memory // MIB)
    return Carried((gpu.request_milli if most_milli is None else most_milli) * gpu.count, memory * gpu.count)


def line_of(gpu: GpuRequest) -> dict[str, str]:
    """Return the limits that the operator writes into the Pod of a SharePod, so that quotas count it. Memory is left
    out if it is not set."""
    amounts = carried(gpu)
    return {MILLI: str(amounts.milli), **({} if gpu.memory is None else {MEMORY: str(amounts.mib)})}
