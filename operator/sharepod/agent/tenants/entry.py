"""Entry of the registry: one applied row of the node's ledger with its tenant's state. Also checks of a row, and the
content of the file `limits`."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from sharepod.agent.devices.inventory import is_gpu_uuid
from sharepod.agent.findings.attribution import TenantProcesses
from sharepod.agent.findings.rules import FindingRules
from sharepod.agent.state.directory import StateDir
from sharepod.api.gpunode import BYPASSES, FindingReason, MemoryIsolation, Mode, Tenant, TenantState

from .served import ServedTenant


@dataclass
class Entry:
    """Applied row, and the state of its tenant."""

    row: Tenant
    rules: FindingRules
    served: ServedTenant | None = None
    """Runtime of a shared tenant. None if its row cannot be served, or was already Releasing when the agent started."""
    directory: Path | None = None
    """The directory to mount into the tenant's pod; None if there is none."""
    unservable: str | None = None
    """Why the row cannot be served, as text; None if it can."""
    unwritten: bool = False
    """True while the disk has not stored the whole directory of the tenant. The row is applied again until it has."""
    left_behind: str | None = None
    """Remains of a tenant in release, as text, by the last reading. None if nothing remains, or if no reading has
    shown it yet."""
    drained: bool = False
    """True once nothing of the released tenant is left. Never reset."""
    seen: TenantProcesses = field(default_factory=TenantProcesses)
    """Processes of the tenant by the last reading."""

    @property
    def settled(self) -> bool:
        """True if the row is fully applied, so that applying it again would change nothing."""
        if self.unwritten:
            return False
        return bool(self.directory is not None or self.unservable or self.left_behind or self.drained)

    @property
    def serving(self) -> ServedTenant | None:
        """Runtime of the tenant if its row is Reserved; None for a tenant in release."""
        return self.served if self.row.state is TenantState.RESERVED else None

    @property
    def enforced(self) -> bool | None:
        """True if the tenant's share is enforced; None if unknown or not served."""
        if self.serving is None:
            return None
        if any(self.rules.stands(reason) for reason in BYPASSES):
            return False
        if self.rules.stands(FindingReason.PROCESSES_NOT_TOLD):
            return None
        return True if self.serving.greeted_ever else None

    @property
    def processes(self) -> frozenset[int]:
        """Pids of the processes that are connected or that the driver reports on the tenant's GPUs."""
        clients = self.served.processes.pids if self.served is not None else frozenset()
        return clients | self.seen.pids


def limits_text(row: Tenant) -> str:
    """Return the content of the file `limits`, as the hook reads it."""
    enforced = int(row.memory_isolation is MemoryIsolation.ENFORCED)
    return "".join(
        f"gpu {gpu} request {row.request_milli} limit {row.limit_milli} memory {row.memory} enforced {enforced}\n"
        for gpu in row.gpus
    )


def not_servable(row: Tenant) -> str | None:
    """Return why a row cannot be served, as text that names the field. None if it can."""
    if not StateDir.serves(row.id):
        return f"id {row.id!r} is not a name of letters, digits, dots, dashes and underscores"
    for gpu in row.gpus:
        if not is_gpu_uuid(gpu):
            return f"gpus: {gpu!r} is not the UUID of a GPU"
    if len(set(row.gpus)) != len(row.gpus):
        return "gpus: the same GPU is listed twice"
    if row.mode is Mode.SHARED and row.request_milli > row.limit_milli:
        return f"requestMilli {row.request_milli} is more than limitMilli {row.limit_milli}"
    return None


def pod_of(row: Tenant) -> str:
    """Return namespace/name of the row's pod, or of its claim if the row names no pod. Log lines show it as `pod`."""
    return f"{row.namespace}/{row.workload}"
