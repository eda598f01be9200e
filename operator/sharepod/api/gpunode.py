"""GPUNode: the ledger and the inventory of one node, in one object.

Guarantees:
- `spec` is written only by the operator. A row in `spec.tenants` *is* the reservation.
- `status` is written only by the node's agent.

Docstrings of models become descriptions in the CRD.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from enum import StrEnum
from typing import Annotated, Any

from pydantic import Field, model_validator

from .bounds import MAX_BYTES, MAX_CONDITIONS, MAX_COUNT, MAX_GROUP
from .consumption import MAX_CONSUMPTION, Consumption, TimestampField
from .objects import API_VERSION, CORDONED_ANNOTATION, MAX_GPUS, MAX_TENANTS, Condition, Model, Text

KIND = "GPUNode"
PLURAL = "gpunodes"

CONDITION_AGENT_READY = "AgentReady"
"""Condition of a GPUNode: False while its agent cannot serve new tenants."""
CONDITION_CDI_DEVICES = "CDIDevices"
"""Condition of a GPUNode: True while its agent can attach every GPU by a resource claim, as CDI devices."""
CONDITION_OWN_NODE = "OwnNodeOnly"
"""Condition of a GPUNode: False while the API server would let its agent write for other nodes."""
CONDITION_HOOK_LOADS = "HookLoads"
"""Condition of a GPUNode: False while a container set up like a tenant's does not load the hook there."""
CONDITION_ENV_INJECTION = "EnvInjection"
"""Condition of a GPUNode: True while its node's default runtime gives GPUs to containers with
NVIDIA_VISIBLE_DEVICES."""
CONDITION_CLAIMS_ATTACH = "ClaimsAttach"
"""Condition of a GPUNode: True while a test container with a claim got the claim's devices, False while it did not."""
CLAIMS_ATTACH_STARTING = "Starting"
"""Reason of the condition ClaimsAttach while the test container has not had time to run."""
CONDITION_SLICES_PUBLISHED = "SlicesPublished"
"""Condition of a GPUNode of pool `scheduler`: True while its agent publishes its GPUs, in a ResourceSlice."""
SLICES_WITHDRAWN = "Withdrawn"
"""Reason of the condition SlicesPublished once a node that leaves pool `scheduler` no longer publishes a device."""
ENV_INJECTION_ACCEPTED = "Accepted"
"""Reason of the condition EnvInjection if the administrator has accepted it by a setting: the node takes tenants
nevertheless."""

MilliField = Annotated[int, Field(ge=0, le=1000)]
BytesField = Annotated[int, Field(ge=0, le=MAX_BYTES)]
CountField = Annotated[int, Field(ge=0, le=MAX_COUNT)]


class Mode(StrEnum):
    """Mode of a SharePod: a share of its GPUs, or whole GPUs that no other tenant uses."""

    SHARED = "Shared"
    EXCLUSIVE = "Exclusive"


class MemoryIsolation(StrEnum):
    """Effect of the memory limit: allocations beyond it are refused, or only counted."""

    ENFORCED = "Enforced"
    NONE = "None"


class Latency(StrEnum):
    """Wait of a waking tenant for its GPUs: for the end of the neighbour's turn (Normal), or of its running kernel
    (Interactive)."""

    NORMAL = "Normal"
    INTERACTIVE = "Interactive"


class CoRunningPolicy(StrEnum):
    """Policy on other tenants running on a tenant's GPUs during its turns."""

    ALLOW = "Allow"
    DENY = "Deny"


class Pool(StrEnum):
    """Owner of a node's GPUs: SharePod (dedicated); NVIDIA's device plugin, from which holders take them; or SharePod,
    with shares allocated by kube-scheduler."""

    DEDICATED = "dedicated"
    DEVICE_PLUGIN = "device-plugin"
    SCHEDULER = "scheduler"


class TenantState(StrEnum):
    """State of a row in the ledger."""

    RESERVED = "Reserved"
    """The share belongs to this tenant. Its Pod may not exist yet."""
    RELEASING = "Releasing"
    """The pod was deleted or is terminal. The share is released once the agent has confirmed that nothing of the tenant
    is left."""


class Health(StrEnum):
    """Health of a GPU, as its agent reports it."""

    HEALTHY = "Healthy"
    UNHEALTHY = "Unhealthy"


class SchedulingLabels(Model):
    """Labels of a tenant that placement uses. They act within its namespace."""

    affinity: str | None = None
    """Tenants with the same value share their GPUs."""
    anti_affinity: str | None = None
    """Tenants with the same value have different GPUs."""
    exclusion: str | None = None
    """The GPUs take only tenants with the same value."""


class ClaimReference(Model):
    """ResourceClaim in the tenant's namespace."""

    name: Annotated[str, Field(min_length=1, max_length=253)]
    """Name of the ResourceClaim."""
    uid: Annotated[str, Field(min_length=1, max_length=64)]
    """UID of the ResourceClaim."""


class Tenant(Model):
    """Reservation of one tenant: one row of the ledger."""

    id: str
    """UID of the tenant's SharePod, or of its ResourceClaim, or of a plain Pod that has neither."""
    namespace: str
    """Namespace of the tenant."""
    pod_name: str = ""
    """Name of the Pod that the share is reserved for; empty for a ResourceClaim of a user."""
    pod_uid: Annotated[str | None, Field(alias="podUID", max_length=64)] = None
    """UID of the Pod that the share is reserved for."""
    claim: ClaimReference | None = None
    """ResourceClaim by which the GPUs are attached; without it, by a CSI volume."""
    state: TenantState = TenantState.RESERVED
    """Reserved, or Releasing: the share is released once the agent has confirmed that nothing of the tenant is left."""
    gpus: Annotated[tuple[str, ...], Field(min_length=1, max_length=MAX_GPUS)]
    """UUIDs of the GPUs."""
    request_milli: MilliField
    """Guaranteed time of each GPU, in thousandths."""
    limit_milli: MilliField
    """Largest part of each GPU's time that the tenant may use, in thousandths."""
    memory: BytesField
    """Memory on each GPU, in bytes."""
    memory_isolation: MemoryIsolation = MemoryIsolation.ENFORCED
    """Enforced, or None: memory is counted, and no allocation is refused."""
    mode: Mode = Mode.SHARED
    """Shared, or Exclusive: no other tenant has these GPUs."""
    latency: Latency = Latency.NORMAL
    """Normal, or Interactive: neighbours hand the GPU over after the running kernel."""
    co_running: CoRunningPolicy = CoRunningPolicy.ALLOW
    """Allow: other tenants may run during this tenant's turns, if the agent's setting sharing is Concurrent. Deny: the
    tenant takes exclusive turns."""
    group: Annotated[str | None, Field(max_length=MAX_GROUP)] = None
    """Group of the tenant within its namespace: members get their turns together. Absent: no group."""
    labels: SchedulingLabels = SchedulingLabels()
    """Labels that placement uses."""

    @property
    def workload(self) -> str:
        """Name of its Pod; `claim/NAME` if the row names no Pod."""
        return self.pod_name or (f"claim/{self.claim.name}" if self.claim is not None else "")


class HolderState(StrEnum):
    """State of a holder."""

    PENDING = "Pending"
    """The holder's Pod exists. The agent has not yet seen which GPU the kubelet allocated to it."""
    HELD = "Held"
    """The holder has the GPU `uuid`, which takes tenants."""
    RELEASING = "Releasing"
    """The holder's GPU has no tenants left and takes no new ones. It returns to the device plugin."""


class PluginHolder(Model):
    """Pod that takes one GPU from NVIDIA's device plugin."""

    id: str
    """UID of the Pod."""
    pod_name: Annotated[str, Field(max_length=253)] = ""
    """Name of the Pod, in the operator's namespace."""
    state: HolderState
    """Pending, Held or Releasing."""
    uuid: str | None = None
    """UUID of the GPU; absent until the kubelet has allocated one."""


class GPUNodeSpec(Model):
    """Ledger of the node, written only by the operator."""

    pool: Pool = Pool.DEDICATED
    """dedicated: SharePod has all GPUs. device-plugin: SharePod has the GPUs that NVIDIA's device plugin gave to its
    holders. scheduler: SharePod has all GPUs, and kube-scheduler allocates the shares."""
    leaving: bool = False
    """The node is leaving pool scheduler: its agent no longer publishes devices."""
    tenants: Annotated[tuple[Tenant, ...], Field(max_length=MAX_TENANTS)] = ()
    """Reservations, one row for each tenant."""
    holders: Annotated[tuple[PluginHolder, ...], Field(max_length=MAX_GPUS)] = ()
    """Pods that take GPUs from NVIDIA's device plugin."""


def cordoned(annotations: Mapping[str, str]) -> frozenset[str]:
    """Return the GPUs that a GPUNode's annotation cordons: UUIDs in lower case, and indexes as text."""
    listed = annotations.get(CORDONED_ANNOTATION, "").split(",", MAX_GPUS)[:MAX_GPUS]
    return frozenset(part.strip().lower() for part in listed if part.strip())


def unknown_cordons(listed: Collection[str], gpus: Collection[Gpu]) -> list[str]:
    """Return the entries of `cordoned` that name no GPU of the node. Empty while its GPUs are unknown."""
    known = {name for gpu in gpus for name in (gpu.uuid.lower(), str(gpu.index))}
    return sorted(set(listed) - known) if gpus else []


class Link(Model):
    """Connection to another GPU of the node."""

    uuid: str
    """UUID of the other GPU."""
    kind: Text
    """NVLINK, PIX, PXB, PHB, NODE or SYS, as in NVML's topology."""


class Gpu(Model):
    """Physical GPU, as the agent reports it."""

    uuid: Text
    """UUID of the GPU."""
    index: CountField
    """Index of the GPU on its node."""
    model: Text
    """Name of the model, as NVML has it."""
    memory: BytesField
    """Bytes that tenants can use: NVML's total less the reserved part."""
    health: Health = Health.HEALTHY
    """Healthy or Unhealthy."""
    numa_node: Annotated[int | None, Field(ge=-1, le=MAX_COUNT)] = None
    """NUMA node; -1 or absent: unknown."""
    links: Annotated[tuple[Link, ...], Field(max_length=MAX_GPUS)] = ()
    """Connections to the other GPUs of the node."""
    shareable: bool = True
    """The GPU takes tenants."""
    reason: Text = ""
    """Why the GPU is not shareable or not healthy; empty if it is both."""
    held: bool | None = None
    """In pool `device-plugin`: whether PodResources shows the GPU as allocated to a holder of SharePod."""
    holder: Annotated[str | None, Field(max_length=64)] = None
    """Id of that holder, as in its row of the ledger."""
    taken: bool | None = None
    """In pool `device-plugin`: the device plugin has allocated the GPU to a pod that is no holder of SharePod."""
    offered: bool | None = None
    """In pool `device-plugin`: false if the device plugin does not offer the GPU to pods, as for a GPU that it
    considers unhealthy."""

    def is_cordoned(self, listed: Collection[str]) -> bool:
        """Return whether `listed`, the result of `cordoned`, names this GPU."""
        return self.uuid.lower() in listed or str(self.index) in listed

    @model_validator(mode="before")
    @classmethod
    def _known_health(cls, value: Any) -> Any:
        """Make a GPU unshareable if its health is unknown here (from a newer agent)."""
        health = value.get("health") if isinstance(value, dict) else None
        if not isinstance(health, str) or health in tuple(Health):
            return value
        unknown = f"its agent reports the health {health[:64]}, which this operator does not know"
        return {**value, "health": Health.HEALTHY, "shareable": False, "reason": unknown}


class FindingReason(StrEnum):
    """Kind of finding: a fact about a tenant, found by an agent, that its owner should know."""

    PROCESS_WITHOUT_HOOK = "ProcessWithoutHook"
    """A process of the tenant uses a GPU and has never connected: it is not limited."""
    HOOK_REPLACED = "HookReplaced"
    """A process of the tenant uses a GPU without the mounted preload file, or has connected without the hook in its
    mappings."""
    BUSY_BEYOND_HELD = "BusyBeyondHeld"
    """The tenant's processes keep a GPU busy for far more time than the tenant held it."""
    MEMORY_BEYOND_TRACKED = "MemoryBeyondTracked"
    """The driver counts far more memory of the tenant's processes than their allocations explain."""
    MEMORY_BEYOND_LIMIT = "MemoryBeyondLimit"
    """The tenant has more device memory than its limit: the driver took it, or a hook reports it."""
    OVERTAKEN = "Overtaken"
    """The tenant was overtaken several times within a minute: its work did not end with its turn."""
    MEMORY_REFUSED = "MemoryRefused"
    """An allocation of the tenant was refused within the last minute, because of its memory limit."""
    PROCESSES_NOT_TOLD = "ProcessesNotTold"
    """The driver does not report which processes use the tenant's GPUs, so other findings cannot be made."""


BYPASSES = (FindingReason.PROCESS_WITHOUT_HOOK, FindingReason.HOOK_REPLACED, FindingReason.BUSY_BEYOND_HELD)
"""Findings by which a tenant's share counts as not enforced, the gravest first."""
OFFENCES = (*BYPASSES, FindingReason.MEMORY_BEYOND_LIMIT)
"""Findings on which the policies for unenforced shares act: the tenant uses more than its share, or could."""


class Finding(Model):
    """Finding about a tenant, as measured when it began. It stays while its cause lasts."""

    reason: Annotated[str, Field(pattern=r"^[A-Za-z][A-Za-z0-9]*$", max_length=64)]
    """Kind of finding, in one word; newer agents may add kinds."""
    message: Annotated[Text, Field(max_length=1024)]
    """The finding, its usual cause, and the fix."""


class TenantStatus(Model):
    """Tenant, as the agent reports it."""

    id: str
    """Id of the tenant, as in its row."""
    processes: CountField = 0
    """Processes that the tenant has on its GPUs."""
    memory: BytesField = 0
    """Device memory in use, in bytes."""
    held_milli: CountField | None = None
    """Part of the last 10 s in which it held the token, in thousandths. Absent until a hook has been connected for
    10 s."""
    progress_milli: CountField | None = None
    """Work of the last 10 s, in thousandths of the work possible with its GPUs to itself. Absent as heldMilli is."""
    counted_since: TimestampField | None = None
    """Time at which the following totals were 0: the start of the reservation. Restarts of the agent reset nothing."""
    held_seconds: Annotated[int | None, Field(ge=0)] = None
    """GPU time held, in seconds of one GPU."""
    borrowed_seconds: Annotated[int | None, Field(ge=0)] = None
    """Part of heldSeconds beyond the guaranteed time."""
    reserved_seconds: Annotated[int | None, Field(ge=0)] = None
    """GPU time reserved, in seconds of one GPU."""
    memory_mebibyte_seconds: Annotated[int | None, Field(ge=0)] = None
    """GPU memory reserved x time, in MiB x s."""
    connected: bool = False
    """A hook of this tenant has connected since it was published."""
    enforced: bool | None = None
    """Whether the share is enforced. True: a hook has connected. False: a process uses the GPU without the mounted
    hook, or keeps it busy far longer than the tenant held it. Absent: no CUDA call yet, or the driver lists no
    processes."""
    findings: Annotated[tuple[Finding, ...], Field(max_length=8)] = ()
    """Findings about the tenant."""
    drained: bool = False
    """True: volume unpublished, cgroup empty, no process on the GPU. Only used while the row is Releasing."""


class GPUNodeStatus(Model):
    """Inventory of the node and state of its tenants, written only by the node's agent."""

    gpus: Annotated[tuple[Gpu, ...], Field(max_length=MAX_GPUS)] = ()
    """GPUs of the node."""
    tenants: Annotated[tuple[TenantStatus, ...], Field(max_length=MAX_TENANTS)] = ()
    """Tenants of the node."""
    conditions: Annotated[tuple[Condition, ...], Field(max_length=MAX_CONDITIONS)] = ()
    """Conditions of the node's agent."""
    observed_generation: int | None = None
    """Generation of the ledger that the agent has applied."""
    agent_version: Text | None = None
    """Version of the agent."""
    gpu_count: CountField = 0
    """Number of GPUs."""
    tenant_count: CountField = 0
    """Rows of the ledger that the agent has applied."""
    reserved: str = ""
    """Reserved fraction of each GPU's time, by index: `1,0.5`. For `kubectl get`."""
    simulated: bool = False
    """The inventory comes from a file: there is no GPU behind it."""
    consumption: Annotated[tuple[Consumption, ...], Field(max_length=MAX_CONSUMPTION)] = ()
    """GPU usage of the tenants of each namespace on this node, by model, in counters that only grow."""
    consumption_at: TimestampField | None = None
    """Time of the counters in consumption."""


def manifest(name: str, spec: GPUNodeSpec) -> dict[str, object]:
    """Return the manifest to create a GPUNode from. It has no status."""
    return {"apiVersion": API_VERSION, "kind": KIND, "metadata": {"name": name}, "spec": spec.dump()}
