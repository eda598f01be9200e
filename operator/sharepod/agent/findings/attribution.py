"""What one reading of the inventory shows of each tenant, and of nobody's processes. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from sharepod.agent.devices.inventory import Process, Reading


@dataclass
class TenantProcesses:
    """Of one tenant, by UUID of the GPU. `memory`: bytes by pid; `busy`: the part of the time in which kernels of its
    processes ran; a GPU is missing there where nobody can tell."""

    memory: dict[str, dict[int, int]] = field(default_factory=dict)
    utilization: dict[str, float] = field(default_factory=dict)

    @property
    def pids(self) -> frozenset[int]:
        """Its processes, on whatever GPU."""
        return frozenset(pid for by_pid in self.memory.values() for pid in by_pid)


@dataclass(frozen=True)
class Attribution:
    """`foreign`: by UUID, the processes that are no tenant's."""

    tenants: Mapping[str, TenantProcesses]
    foreign: Mapping[str, tuple[int, ...]]

    def of(self, tenant_id: str) -> TenantProcesses:
        """What was seen of this tenant, which may be nothing."""
        return self.tenants.get(tenant_id) or TenantProcesses()


def attribute(reading: Reading, owner_of: Callable[[Process], str | None]) -> Attribution:
    """Attributes every process of a reading."""
    tenants: dict[str, TenantProcesses] = {}
    foreign: dict[str, list[int]] = {}
    on: dict[str, dict[str | None, list[Process]]] = {}
    for process in reading.processes:
        owner = owner_of(process)
        on.setdefault(process.uuid, {}).setdefault(owner, []).append(process)
        if owner is None:
            foreign.setdefault(process.uuid, []).append(process.pid)
        else:
            by_pid = tenants.setdefault(owner, TenantProcesses()).memory.setdefault(process.uuid, {})
            by_pid[process.pid] = by_pid.get(process.pid, 0) + process.memory
    for uuid, owners in on.items():
        for owner, processes in owners.items():
            utilization = _utilization(processes, alone=len(owners) == 1, whole=reading.utilization.get(uuid))
            if owner is not None and utilization is not None:
                tenants[owner].utilization[uuid] = utilization
    return Attribution(tenants, {uuid: tuple(sorted(pids)) for uuid, pids in foreign.items()})


def _utilization(processes: list[Process], *, alone: bool, whole: float | None) -> float | None:
    """Of processes of one owner; who is alone on a GPU is as busy as the GPU is."""
    if alone and whole is not None:
        return whole
    told = [process.utilization for process in processes if process.utilization is not None]
    return min(1.0, sum(told)) if len(told) == len(processes) else None
