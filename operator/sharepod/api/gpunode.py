"""GPUNode: inventory and ledger of one node, in one object.

`spec` is what the operator wants and is written by the operator alone: a row in `spec.tenants` *is* the reservation.
`status` is what the node's agent saw and is written by that agent alone.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

from pydantic import Field

from .objects import API_VERSION, MAX_GPUS, MAX_TENANTS, Condition, Model

KIND = "GPUNode"
PLURAL = "gpunodes"

CONDITION_AGENT_READY = "AgentReady"
"""In a GPUNode's status, written by its agent: False while it cannot serve new tenants."""

MilliField = Annotated[int, Field(ge=0, le=1000)]


class Mode(StrEnum):
    SHARED = "Shared"
    EXCLUSIVE = "Exclusive"


class MemoryIsolation(StrEnum):
    ENFORCED = "Enforced"
    NONE = "None"


class Pool(StrEnum):
    DEDICATED = "dedicated"
    DEVICE_PLUGIN = "device-plugin"


class TenantState(StrEnum):
    RESERVED = "Reserved"
    """The share belongs to this tenant, whether its pod exists yet or not."""
    RELEASING = "Releasing"
    """The pod is gone or terminal; the share is given away once the agent has seen that nothing of the tenant is
    left.
    """


class Health(StrEnum):
    HEALTHY = "Healthy"
    UNHEALTHY = "Unhealthy"


class SchedulingLabels(Model):
    """The three labels that placement goes by, as the SharePod had them. They act within the namespace."""

    affinity: str | None = None
    anti_affinity: str | None = None
    exclusion: str | None = None


class Tenant(Model):
    """A reservation: one row of the ledger. `gpus` holds UUIDs; the shares and `memory` (bytes) are of each of them."""

    id: str
    namespace: str
    pod_name: str
    state: TenantState = TenantState.RESERVED
    gpus: Annotated[tuple[str, ...], Field(min_length=1, max_length=MAX_GPUS)]
    request_milli: MilliField
    limit_milli: MilliField
    memory: Annotated[int, Field(ge=0)]
    memory_isolation: MemoryIsolation = MemoryIsolation.ENFORCED
    mode: Mode = Mode.SHARED
    labels: SchedulingLabels = SchedulingLabels()


class HolderState(StrEnum):
    PENDING = "Pending"
    HELD = "Held"
    RELEASING = "Releasing"


class PluginHolder(Model):
    """A pod of ours that takes one GPU from NVIDIA's device plugin. `uuid` is unknown until the kubelet has given it
    one.
    """

    id: str
    state: HolderState
    uuid: str | None = None


class GPUNodeSpec(Model):
    pool: Pool = Pool.DEDICATED
    tenants: Annotated[tuple[Tenant, ...], Field(max_length=MAX_TENANTS)] = ()
    holders: Annotated[tuple[PluginHolder, ...], Field(max_length=MAX_GPUS)] = ()


class Link(Model):
    """A connection to another GPU of the node; `kind` in NVML's topology words (`NVLINK`, `PIX`, `PXB`, `PHB`,
    `NODE`, `SYS`).
    """

    uuid: str
    kind: str


class Gpu(Model):
    """One physical GPU as the agent saw it. `memory`: bytes that tenants can have (NVML's total less reserved)."""

    uuid: str
    index: Annotated[int, Field(ge=0)]
    model: str
    memory: Annotated[int, Field(ge=0)]
    health: Health = Health.HEALTHY
    numa_node: int | None = None
    links: tuple[Link, ...] = ()
    shareable: bool = True
    reason: str = ""
    """Why it is not shareable or not healthy; empty where it is both."""
    held: bool | None = None
    """In pool `device-plugin`: whether PodResources shows it as held by our holder."""


class FindingReason(StrEnum):
    """What an agent can find out about a tenant that it is to be told."""

    PROCESS_WITHOUT_HOOK = "ProcessWithoutHook"
    """A process of it uses a GPU and has never connected: nothing limits it."""
    BUSY_BEYOND_HELD = "BusyBeyondHeld"
    """Its processes keep a GPU busy for far more time than it held."""
    MEMORY_BEYOND_TRACKED = "MemoryBeyondTracked"
    """The driver counts far more memory of its processes than their allocations explain."""
    OVERTAKEN = "Overtaken"
    """It was overtaken several times within a minute, because its work did not end with its turn."""
    PROCESSES_NOT_TOLD = "ProcessesNotTold"
    """The driver does not say which processes are on its GPUs, so that nobody can tell."""


class Finding(Model):
    """One of them, with the figures of when it began. It stands for as long as it is so."""

    reason: FindingReason
    message: Annotated[str, Field(max_length=1024)]


class TenantStatus(Model):
    """What the agent saw of one tenant. `memory`: bytes in use; `held_milli`: token time over the last 10 s, in
    thousandths.
    """

    id: str
    processes: Annotated[int, Field(ge=0)] = 0
    memory: Annotated[int, Field(ge=0)] = 0
    held_milli: Annotated[int, Field(ge=0)] = 0
    connected: bool = False
    """A hook of this tenant has connected since it was published."""
    enforced: bool | None = None
    """True once a hook has connected, False when a process uses the GPU that never did or is busy far beyond what it
    held, None before any CUDA call and where the driver does not tell.
    """
    findings: Annotated[tuple[Finding, ...], Field(max_length=8)] = ()
    drained: bool = False
    """Only meaningful while the row is Releasing: volume unpublished, cgroup empty, no process on the GPU."""


class GPUNodeStatus(Model):
    gpus: Annotated[tuple[Gpu, ...], Field(max_length=MAX_GPUS)] = ()
    tenants: Annotated[tuple[TenantStatus, ...], Field(max_length=MAX_TENANTS)] = ()
    conditions: tuple[Condition, ...] = ()
    observed_generation: int | None = None
    agent_version: str | None = None
    gpu_count: Annotated[int, Field(ge=0)] = 0
    tenant_count: Annotated[int, Field(ge=0)] = 0
    """Rows of the ledger that the agent has in force."""
    reserved: str = ""
    """Of each GPU, by index, the fraction of its time that is reserved: `1,0.5`. For `kubectl get`."""
    simulated: bool = False
    """The inventory comes from a file: there is no GPU behind it."""


def manifest(name: str, spec: GPUNodeSpec) -> dict[str, object]:
    """A GPUNode as it is created, without status."""
    return {"apiVersion": API_VERSION, "kind": KIND, "metadata": {"name": name}, "spec": spec.dump()}
