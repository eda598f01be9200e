"""Process attribution: sorts the GPU processes of one reading by the tenant that they belong to. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from sharepod.agent.devices.inventory import Process, Reading, UtilizationSample


@dataclass
class TenantProcesses:
    """GPU processes of one tenant in one reading."""

    memory: dict[str, dict[int, int]] = field(default_factory=dict)
    """Device memory in bytes, by GPU UUID and pid."""
    utilization: dict[str, float] = field(default_factory=dict)
    """Part of the time (0 to 1) in which kernels of the tenant ran, by GPU UUID. A GPU is missing if other tenants used
    it too and the driver does not report utilization by process."""

    busy: dict[str, dict[int, float]] = field(default_factory=dict)
    """Part of the time (0 to 1) in which kernels of each process ran, by GPU UUID and pid. A GPU is missing if the
    driver does not report this by process."""

    samples: dict[str, list[UtilizationSample]] = field(default_factory=dict)
    """Utilization samples of the tenant's processes, by GPU UUID. A GPU without samples is missing."""

    @property
    def pids(self) -> frozenset[int]:
        """Pids of the tenant's processes on all of its GPUs."""
        return frozenset(pid for by_pid in self.memory.values() for pid in by_pid)


@dataclass(frozen=True)
class Attribution:
    """Every GPU process of one reading, attributed to its tenant or to none."""

    tenants: Mapping[str, TenantProcesses]
    """Processes of each tenant, by tenant id. A tenant without processes is missing."""
    foreign: Mapping[str, tuple[int, ...]]
    """Sorted pids of the processes that belong to no tenant, by GPU UUID."""

    def of(self, tenant_id: str) -> TenantProcesses:
        """Return the tenant's processes, which may be none."""
        return self.tenants.get(tenant_id) or TenantProcesses()


def attribute(reading: Reading, owner_of: Callable[[Process], str | None]) -> Attribution:
    """Attribute every process of a reading. `owner_of` returns the tenant id of a process, None for a foreign one."""
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
            if process.utilization is not None:
                tenants[owner].busy.setdefault(process.uuid, {})[process.pid] = process.utilization
            if process.samples:
                tenants[owner].samples.setdefault(process.uuid, []).extend(process.samples)
    for uuid, owners in on.items():
        for owner, processes in owners.items():
            utilization = _utilization(processes, alone=len(owners) == 1, whole=reading.utilization.get(uuid))
            if owner is not None and utilization is not None:
                tenants[owner].utilization[uuid] = utilization
    return Attribution(tenants, {uuid: tuple(sorted(pids)) for uuid, pids in foreign.items()})


def _utilization(processes: list[Process], *, alone: bool, whole: float | None) -> float | None:
    """Return the utilization of a GPU by one owner's processes, None if unknown.

    If the owner is `alone` on the GPU, the result is at most the utilization of the `whole` GPU, and at most the sum
    over its processes: others may have just exited.
    """
    each = [process.utilization for process in processes if process.utilization is not None]
    total = min(1.0, sum(each)) if len(each) == len(processes) else None
    if not alone or whole is None:
        return total
    return whole if total is None else min(whole, total)
