"""SharePod: a PodSpec plus a request for GPUs.

`GpuSpec` is the block `spec.gpu` as users write it. `GpuRequest` is that block with defaults filled and numbers as
integers. The rest of `spec` is a PodSpec. It is passed through unread, except for fields that placement needs.

Docstrings of models become descriptions in the CRD.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Annotated

from pydantic import Field

from .bounds import MAX_CONDITIONS, MAX_COUNT, MAX_FIELD, MAX_MESSAGE, clipped
from .consumption import MAX_COUNTER
from .gpunode import CoRunningPolicy, Latency, MemoryIsolation, Mode, SchedulingLabels
from .objects import MAX_GPUS, Condition, Model
from .units import MIB, WHOLE_GPU, Bytes, Milli, UnitError, format_fraction, parse_fraction, parse_quantity

KIND = "SharePod"
PLURAL = "sharepods"

TTL = "ttlSecondsAfterFinished"
"""Field of `spec` next to `gpu` and the PodSpec: seconds after its end at which a SharePod is deleted."""
MAX_TTL_S = (1 << 31) - 1
REPLICAS = "replicas"
"""Field of `spec` next to `gpu` and the PodSpec. It is always 1, so that a PodDisruptionBudget can count SharePods."""
ONE_POD = "a SharePod is one pod; create as many SharePods as you need pods"
OWN_FIELDS = ("gpu", REPLICAS, TTL)
"""Fields of `spec` that do not belong to the PodSpec."""

MUTABLE = ("request", "limit", "memory", "movable")
"""Fields of the gpu block, and their annotations, that may change while the SharePod lives."""
CHANGEABLE = ", ".join(f"gpu.{field}" for field in MUTABLE) + f" and {TTL}"
"""All fields of `spec` that may change, as text for messages and documentation."""

LABEL_PATTERN = r"^[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?$"

NO_GROUP = "None"
"""Value of `group`, in any case of letters, by which a tenant is in no group although its controller implies one."""

LabelField = Annotated[str, Field(pattern=LABEL_PATTERN)]
Total = Annotated[int, Field(ge=0, le=MAX_COUNTER)]


class PlacementPolicy(StrEnum):
    """Preference among the GPUs that fit a request."""

    BINPACK = "Binpack"
    SPREAD = "Spread"


class SpecError(ValueError):
    """Error about an invalid field of a SharePod. `field`: its path. `message`: the fault and the remedy. Both are cut
    to a bounded length, because they quote users' text."""

    def __init__(self, field: str, message: str) -> None:
        field, message = clipped(field, MAX_FIELD), clipped(message, MAX_MESSAGE - MAX_FIELD)
        super().__init__(f"{field}: {message}")
        self.field = field
        self.message = message


class GpuSpec(Model):
    """The block `spec.gpu` as users write it."""

    request: float | int | None = None
    limit: float | int | None = 1
    memory: str | int | None = None
    count: Annotated[int, Field(ge=1, le=MAX_GPUS)] = 1
    mode: Mode = Mode.SHARED
    memory_isolation: MemoryIsolation = MemoryIsolation.ENFORCED
    latency: Latency = Latency.NORMAL
    co_running: CoRunningPolicy = CoRunningPolicy.ALLOW
    group: LabelField | None = None
    affinity: LabelField | None = None
    anti_affinity: LabelField | None = None
    exclusion: LabelField | None = None
    placement: PlacementPolicy = PlacementPolicy.BINPACK
    uuids: Annotated[tuple[str, ...], Field(max_length=64)] = ()
    models: Annotated[tuple[str, ...], Field(max_length=64)] = ()
    movable: bool | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuRequest:
    """Request of a tenant for a share of each of its `count` GPUs.

    - `request_milli`, `limit_milli`: thousandths of each GPU's time.
    - `memory`: bytes on each; None: request x the GPU's memory.
    - `group`: tenants of the namespace that are granted together; `NO_GROUP`: none, even by default; None: the default.
    - `movable`: whether the operator may restart the tenant elsewhere to free its place for another request; None: only
      if it would otherwise be preempted.
    """

    request_milli: Milli
    limit_milli: Milli
    memory: Bytes | None
    count: int = 1
    mode: Mode = Mode.SHARED
    memory_isolation: MemoryIsolation = MemoryIsolation.ENFORCED
    latency: Latency = Latency.NORMAL
    co_running: CoRunningPolicy = CoRunningPolicy.ALLOW
    group: str | None = None
    labels: SchedulingLabels = field(default_factory=SchedulingLabels)
    placement: PlacementPolicy = PlacementPolicy.BINPACK
    uuids: tuple[str, ...] = ()
    models: tuple[str, ...] = ()
    movable: bool | None = None

    def memory_on(self, capacity: int) -> Bytes:
        """Return the bytes to reserve on a GPU that has `capacity` bytes for tenants. Default: the same fraction as of
        the time, in whole MiB."""
        if self.mode is Mode.EXCLUSIVE:
            return Bytes(capacity)
        if self.memory is not None:
            return self.memory
        proportion = capacity * self.request_milli // WHOLE_GPU
        return Bytes(proportion - proportion % MIB if proportion < capacity else capacity)


def resolve(gpu: GpuSpec) -> GpuRequest:
    """Fill the defaults of a gpu block and check it, also by rules that no schema can express. Admission checks the
    same by CEL. Raises `SpecError`, which names the field."""

    def fraction(name: str, value: float | int) -> Milli:
        try:
            return parse_fraction(value)
        except UnitError as error:
            raise SpecError(f"spec.gpu.{name}", str(error)) from None

    memory: Bytes | None = None
    if gpu.memory is not None:
        try:
            memory = parse_quantity(gpu.memory)
        except UnitError as error:
            raise SpecError("spec.gpu.memory", str(error)) from None
        if memory == 0:
            raise SpecError("spec.gpu.memory", "0 bytes hold nothing; leave the field out or write a size such as 4Gi")

    if gpu.mode is Mode.EXCLUSIVE:
        part = gpu.limit if gpu.limit is not None and fraction("limit", gpu.limit) != WHOLE_GPU else None
        for name, value in (("request", gpu.request), ("limit", part), ("memory", gpu.memory)):
            if value is not None:
                raise SpecError(
                    f"spec.gpu.{name}",
                    "an Exclusive SharePod has the whole GPU; leave the field out or use mode: Shared",
                )
        if gpu.latency is Latency.INTERACTIVE:
            raise SpecError(
                "spec.gpu.latency",
                "an Exclusive SharePod has the whole GPU to itself; leave the field out or use mode: Shared",
            )
        request, limit = WHOLE_GPU, WHOLE_GPU
    else:
        if gpu.request is None:
            raise SpecError(
                "spec.gpu.request",
                "is required; write the fraction of a GPU's time to guarantee, such as 0.4, or use mode: Exclusive",
            )
        request = fraction("request", gpu.request)
        limit = WHOLE_GPU if gpu.limit is None else fraction("limit", gpu.limit)
        if limit == 0:
            raise SpecError("spec.gpu.limit", "0 would never run; write at least 0.001 or leave the field out")
        if limit < request:
            least = format_fraction(request)
            raise SpecError(
                "spec.gpu.limit", f"{format_fraction(limit)} is less than the request {least}; write {least} or more"
            )
        if request == 0 and memory is None:
            raise SpecError("spec.gpu.memory", "is required with request 0 (best effort); write a size such as 4Gi")
        if request == 0 and gpu.latency is Latency.INTERACTIVE:
            raise SpecError(
                "spec.gpu.latency",
                "Interactive spends guaranteed time, and request is 0; write a request such as 0.3, "
                "or leave latency out",
            )
    return GpuRequest(
        request_milli=request,
        limit_milli=limit,
        memory=memory,
        count=gpu.count,
        mode=gpu.mode,
        memory_isolation=gpu.memory_isolation,
        latency=gpu.latency,
        co_running=gpu.co_running,
        group=gpu.group,
        labels=SchedulingLabels(affinity=gpu.affinity, anti_affinity=gpu.anti_affinity, exclusion=gpu.exclusion),
        placement=gpu.placement,
        uuids=gpu.uuids,
        models=gpu.models,
        movable=gpu.movable,
    )


class Phase(StrEnum):
    """Phase of a SharePod."""

    PENDING = "Pending"
    """No GPU yet; condition `Placed` has the reason."""
    PLACED = "Placed"
    """The share is reserved; the pod is being created or has not started."""
    RUNNING = "Running"
    SUCCEEDED = "Succeeded"
    FAILED = "Failed"


class RestartPolicy(StrEnum):
    """`spec.restartPolicy`, as a Pod has it: decides whether another run follows an ended run."""

    ALWAYS = "Always"
    ON_FAILURE = "OnFailure"
    NEVER = "Never"


class AssignedGpu(Model):
    """GPU of which the SharePod has a share."""

    uuid: str
    """UUID of the GPU."""
    index: int
    """Index of the GPU on its node."""
    model: str
    """Name of the model."""


class GrantedShare(Model):
    """Share in the ledger. It may differ from the spec while a raise waits."""

    request_milli: int
    """Guaranteed time of each GPU, in thousandths."""
    limit_milli: int
    """Largest part of each GPU's time that it may use, in thousandths."""
    memory: int
    """Memory on each GPU, in bytes."""


class ShownShare(Model):
    """Share as kubectl get shows it: the granted one or, while nothing is granted, the requested one."""

    request: str
    """Guaranteed fraction of each GPU's time."""
    limit: str
    """Largest fraction of each GPU's time that it may use."""
    memory: str
    """Memory on each GPU."""


class Usage(Model):
    """Use of each GPU."""

    held_milli: int
    """Part of the last 10 s in which it held each GPU, in thousandths."""
    memory: int
    """Device memory in use, in bytes."""
    shown: str = ""
    """The time as kubectl get shows it."""
    memory_shown: str = ""
    """The memory in use as kubectl get shows it."""
    progress: str | None = None
    """Work of the last 10 s as a fraction of the work possible with its GPUs to itself."""


class GpuTotals(Model):
    """GPU time and memory usage, each GPU counted."""

    held_seconds: Total = 0
    """GPU time held, in seconds of one GPU."""
    borrowed_seconds: Total = 0
    """Part of heldSeconds beyond the guaranteed time."""
    reserved_seconds: Total = 0
    """GPU time reserved, in seconds of one GPU."""
    memory_mebibyte_seconds: Total = 0
    """GPU memory reserved x time, in MiB x s."""


class SharePodConsumption(GpuTotals):
    """Totals of a SharePod over all of its runs, as its agents have counted them."""

    since: str
    """Time at which the totals were 0: the start of the first share."""
    counted_since: str
    """Time at which the agent began to count for the last share. Identifies that count."""
    former: GpuTotals = GpuTotals()
    """Part of the totals from earlier shares."""


CONDITION_PLACED = "Placed"
CONDITION_ENFORCED = "Enforced"
CONDITION_GPU_HEALTHY = "GPUHealthy"
"""Present once one of the SharePod's GPUs has failed."""
CONDITION_POD_READY = "PodReady"
CONDITION_RESIZED = "Resized"
CONDITION_READY = "Ready"
"""The one condition to wait for: True while the SharePod's Pod is ready, and once it has succeeded."""
CONDITION_RECONCILING = "Reconciling"
"""Present, and True, while the SharePod progresses and needs nothing from its owner."""
CONDITION_STALLED = "Stalled"
"""Present, and True, while the SharePod cannot progress without a change by a user."""


class LastEnd(Model):
    """End of the last run that was, or will be, followed by another."""

    pod_uid: Annotated[str, Field(alias="podUID", max_length=64)]
    """UID of the Pod of that run."""
    node: str | None = None
    """Node of that run."""
    cause: str = ""
    """Cause of the end: Drained, Deleted, ContainerFailed and so on."""
    message: str = ""
    """Explanation of the cause."""
    ended_at: str | None = None
    """Time of the end."""
    retry_at: str | None = None
    """Earliest start of the next run."""
    attempts: Annotated[int, Field(ge=0, le=MAX_COUNT)] = 0
    """Consecutive runs that ended too early to reset the back-off."""
    restarts: Annotated[int, Field(ge=0, le=MAX_COUNT)] = 0
    """Restarts of containers, and replacements of the Pod, until the end of that run."""


class KeptPlace(Model):
    """Place that is reserved for a SharePod while it is moved."""

    node: Annotated[str, Field(max_length=253)]
    """Node of the place."""
    gpus: Annotated[tuple[str, ...], Field(max_length=MAX_GPUS)]
    """UUIDs of its GPUs there."""
    priority: int = 0
    """Priority for which the place is reserved."""


class SharePodStatus(Model):
    """Status of a SharePod, written only by the operator."""

    phase: Annotated[str, Field(max_length=64)] = Phase.PENDING
    """Pending, Placed, Running, Succeeded or Failed; newer operators may add phases. Only shown: no decision uses
    it."""
    node: str | None = None
    """Node of its share."""
    gpus: Annotated[tuple[AssignedGpu, ...], Field(max_length=MAX_GPUS)] = ()
    """GPUs of which it has a share."""
    gpu_indexes: str | None = None
    """Indexes of its GPUs, as kubectl get shows them: `0,1`."""
    summary: str | None = None
    """STATUS as kubectl get shows it: that of the Pod, or the reason why no Pod runs."""
    ready_containers: str | None = None
    """READY as kubectl get shows it: `1/2`."""
    pod_ip: Annotated[str | None, Field(alias="podIP")] = None
    """Address of its Pod."""
    replicas: Annotated[int, Field(ge=0, le=1)] = 0
    """For the scale subresource: 1 while it has a Pod with a share, else 0."""
    pod_name: str | None = None
    """Name of its Pod."""
    pod_uid: Annotated[str | None, Field(alias="podUID")] = None
    """UID of its Pod; absent between two runs. While it is set, a missing Pod means that the run has ended."""
    start_time: str | None = None
    """Time at which the kubelet accepted the Pod of the current run."""
    end_time: str | None = None
    """Time at which the SharePod ended; no further run follows."""
    restarts: Annotated[int, Field(ge=0, le=MAX_COUNT)] = 0
    """Restarts of containers and replacements of the Pod, over all runs."""
    last_end: LastEnd | None = None
    """End of the last run that is, or will be, followed by another."""
    moves_to: KeptPlace | None = None
    """GPUs that are reserved for the next run while the operator moves the SharePod."""
    granted: GrantedShare | None = None
    """Share in the ledger; it may differ from the spec while a change waits."""
    share: ShownShare | None = None
    """Share as kubectl get shows it."""
    usage: Usage | None = None
    """Use of its GPUs."""
    consumed: SharePodConsumption | None = None
    """GPU time and memory of all runs, at the last write; final once the share is released."""
    conditions: Annotated[tuple[Condition, ...], Field(max_length=MAX_CONDITIONS)] = ()
    """Conditions: Ready, Placed, PodReady, Enforced and others."""
    observed_generation: int | None = None
    """Generation of the spec that the status describes."""

    def dump(self) -> dict[str, object]:
        """Return the status in its API form. An empty `gpus` is left out: it would have no field owner."""
        return {key: value for key, value in super().dump().items() if key != "gpus" or value}

    @property
    def ended(self) -> bool:
        """True once the SharePod has finally ended: `endTime` is set.

        For a status without condition Ready, which is older than `endTime`, the phase decides.
        """
        return self.end_time is not None or (self._ready is None and self.phase in (Phase.SUCCEEDED, Phase.FAILED))

    @property
    def succeeded(self) -> bool:
        """True if the SharePod, which has ended, has succeeded."""
        return self._ready.status == "True" if self._ready is not None else self.phase == Phase.SUCCEEDED

    @property
    def _ready(self) -> Condition | None:
        return next((item for item in self.conditions if item.type == CONDITION_READY), None)

    @property
    def former_pod(self) -> str | None:
        """UID of the Pod of the last run that another run follows or will follow. None if there is no such run."""
        return self.last_end.pod_uid if self.last_end is not None else None
