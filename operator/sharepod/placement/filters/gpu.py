"""GPU filters, in KubeShare's order: exclusion and anti-affinity, then time and memory.

The engine applies affinity before these filters, because affinity names the GPUs. Each filter decides whether a GPU
passes, and words the reason for a group of GPUs that do not pass. `static` filters do not depend on the tenants of the
GPU. Messages never name another namespace's labels or objects.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from sharepod.api.gpunode import Latency, Mode
from sharepod.api.units import format_fraction
from sharepod.placement.state.accounts import GpuAccount
from sharepod.placement.state.exclusions import HALF_A_GPU
from sharepod.placement.state.types import PlacementRequest, label_key
from sharepod.placement.wording import counted, grouped, size_down, size_up, some_of

Passes = Callable[[GpuAccount], bool]
Explain = Callable[[Sequence[GpuAccount]], str]


@dataclass(frozen=True, slots=True)
class GpuFilter:
    """One check of GPUs for one request. `name`: the obstacle as one CamelCase word. `explain` words why these GPUs (at
    least one) do not pass."""

    name: str
    passes: Passes
    explain: Explain


def static(request: PlacementRequest) -> tuple[GpuFilter, ...]:
    """Return the filters that do not depend on tenants: the GPU is among the requested ones, and large enough."""
    filters = []
    if request.gpu.uuids:
        filters.append(_listed(request))
    if request.gpu.models:
        filters.append(_of_model(request))
    if request.gpu.memory is not None and request.gpu.mode is Mode.SHARED:
        filters.append(_large_enough(request))
    return tuple(filters)


def dynamic(request: PlacementRequest) -> tuple[GpuFilter, ...]:
    """Return the filters that depend on the GPU's state and tenants. Filters that this request always passes are left
    out."""
    filters = [_available(request), _held(request), _not_reserved_for_head(request)]
    if request.gpu.mode is Mode.EXCLUSIVE:
        return (*filters, _empty(request))
    filters += [_shared(request), _same_exclusion(request), *within_cap(request)]
    if request.gpu.labels.anti_affinity is not None:
        filters.append(_anti_affinity(request))
    if request.gpu.latency is Latency.INTERACTIVE:
        filters.append(_takes_interactive(request))
    return (*filters, _has_time(request), _has_memory(request))


def _listed(request: PlacementRequest) -> GpuFilter:
    uuids = frozenset(request.gpu.uuids)

    def explain(gpus: Sequence[GpuAccount]) -> str:
        return f"{_gpus(gpus, 'is', 'are')} not among spec.gpu.uuids"

    return GpuFilter("Uuids", lambda gpu: gpu.state.uuid in uuids, explain)


def _of_model(request: PlacementRequest) -> GpuFilter:
    models = frozenset(request.gpu.models)

    def explain(gpus: Sequence[GpuAccount]) -> str:
        there = some_of(gpu.state.model for gpu in gpus)
        return f"{_gpus(gpus, 'is', 'are')} of no model among spec.gpu.models ({there})"

    return GpuFilter("Model", lambda gpu: gpu.state.model in models, explain)


def _large_enough(request: PlacementRequest) -> GpuFilter:
    asked = request.gpu.memory or 0

    def explain(gpus: Sequence[GpuAccount]) -> str:
        largest = min(gpus, key=lambda gpu: (-gpu.state.memory, gpu.node, gpu.index))
        has = f"largest: {size_down(largest.state.memory)}, {largest.name}; asked {size_up(asked)}"
        return f"{_gpus(gpus, 'has', 'have')} too little memory even when empty ({has})"

    return GpuFilter("TooSmall", lambda gpu: gpu.state.memory >= asked, explain)


def _available(request: PlacementRequest) -> GpuFilter:
    def explain(gpus: Sequence[GpuAccount]) -> str:
        return grouped(
            ((gpu.name, f"cannot be shared because {gpu.state.reason or 'its agent says so'}") for gpu in gpus), "GPU"
        )

    return GpuFilter("Unavailable", lambda gpu: gpu.state.available, explain)


def _held(request: PlacementRequest) -> GpuFilter:
    def explain(gpus: Sequence[GpuAccount]) -> str:
        return f"{_gpus(gpus, 'is', 'are')} with NVIDIA's device plugin and no holder has them"

    return GpuFilter("NotHeld", lambda gpu: gpu.state.held, explain)


def _not_reserved_for_head(request: PlacementRequest) -> GpuFilter:
    def explain(gpus: Sequence[GpuAccount]) -> str:
        return f"{_gpus(gpus, 'is', 'are')} kept for the SharePod that has waited longest"

    return GpuFilter("Kept", lambda gpu: gpu.head_tenant is None or not gpu.kept_from(request), explain)


def _empty(request: PlacementRequest) -> GpuFilter:
    def explain(gpus: Sequence[GpuAccount]) -> str:
        return f"{_gpus(gpus, 'has', 'have')} tenants and mode Exclusive takes wholly free GPUs"

    return GpuFilter("Tenants", lambda gpu: not gpu.tenants, explain)


def _shared(request: PlacementRequest) -> GpuFilter:
    def explain(gpus: Sequence[GpuAccount]) -> str:
        return f"{_gpus(gpus, 'is', 'are')} taken whole by an Exclusive SharePod"

    return GpuFilter("TakenWhole", lambda gpu: not gpu.exclusive, explain)


def _same_exclusion(request: PlacementRequest) -> GpuFilter:
    """Return the filter that passes a GPU without tenants, and a GPU whose tenants all have the request's exclusion
    label. For a request without a label, no tenant may have one."""
    label = request.gpu.labels.exclusion
    wanted = {label_key(request.namespace, label)}

    def explain(gpus: Sequence[GpuAccount]) -> str:
        if label is None:
            return f"{_gpus(gpus, 'is', 'are')} kept by an exclusion label"
        return f'{_gpus(gpus, "has", "have")} tenants without the exclusion label "{label}"'

    return GpuFilter("Exclusion", lambda gpu: not gpu.tenants or gpu.exclusions == wanted, explain)


def within_cap(request: PlacementRequest) -> tuple[GpuFilter, ...]:
    """Return the filter of the cap on GPUs from which a namespace may exclude others (state/exclusions.py). Empty if
    the request excludes no tenant, or requests so much time that the cap does not count."""
    asked, namespace = request.gpu, request.namespace
    if asked.labels.exclusion is None or asked.request_milli >= HALF_A_GPU:
        return ()
    own = {label_key(namespace, asked.labels.exclusion)}

    def explain(gpus: Sequence[GpuAccount]) -> str:
        excluded = gpus[0].excluded
        half = format_fraction(HALF_A_GPU)
        return (
            f'{_gpus(gpus, "is", "are")} not given to an exclusion label of namespace "{namespace}", which keeps '
            f"{counted(excluded.of(namespace), 'GPU')} with less than {half} of its time requested and asks for "
            f"{asked.count} more, and the operator's setting max_excluded_gpus allows {excluded.most}: set "
            f"spec.gpu.request {half} or more, leave out spec.gpu.exclusion, use the label of a GPU that the namespace "
            "keeps and that has room, or ask an administrator"
        )

    return (
        GpuFilter("ExclusionCap", lambda gpu: gpu.exclusions == own or gpu.excluded.has_room_for(request), explain),
    )


def _anti_affinity(request: PlacementRequest) -> GpuFilter:
    key = label_key(request.namespace, request.gpu.labels.anti_affinity)

    def explain(gpus: Sequence[GpuAccount]) -> str:
        label = request.gpu.labels.anti_affinity
        return f'{_gpus(gpus, "has", "have")} a SharePod of the anti-affinity label "{label}" already'

    return GpuFilter("AntiAffinity", lambda gpu: key not in gpu.anti_affinity, explain)


def _takes_interactive(request: PlacementRequest) -> GpuFilter:
    def explain(gpus: Sequence[GpuAccount]) -> str:
        return f"{_gpus(gpus, 'has', 'have')} as many SharePods of latency Interactive as a GPU takes"

    return GpuFilter("Interactive", lambda gpu: not gpu.interactive_full, explain)


def _has_time(request: PlacementRequest) -> GpuFilter:
    asked = request.gpu.request_milli

    def explain(gpus: Sequence[GpuAccount]) -> str:
        most = min(gpus, key=lambda gpu: (-gpu.free_milli, gpu.node, gpu.index))
        free = f"most free: {format_fraction(max(most.free_milli, 0))} of {most.name}; asked {format_fraction(asked)}"
        return f"{_gpus(gpus, 'has', 'have')} too little time free ({free})"

    return GpuFilter("Time", lambda gpu: asked <= gpu.free_milli, explain)


def _has_memory(request: PlacementRequest) -> GpuFilter:
    fixed = request.gpu.memory
    asked_on = request.gpu.memory_on

    def explain(gpus: Sequence[GpuAccount]) -> str:
        most = min(gpus, key=lambda gpu: (-gpu.free_memory, gpu.node, gpu.index))
        asked = size_up(asked_on(most.state.memory))
        if fixed is None:
            asked += f", {format_fraction(request.gpu.request_milli)} of its memory, as spec.gpu.memory is not set"
        free = f"most free: {size_down(max(most.free_memory, 0))} of {most.name}; asked {asked}"
        return f"{_gpus(gpus, 'has', 'have')} too little memory free ({free})"

    if fixed is not None:
        return GpuFilter("Memory", lambda gpu: fixed <= gpu.free_memory, explain)
    return GpuFilter("Memory", lambda gpu: asked_on(gpu.state.memory) <= gpu.free_memory, explain)


def _gpus(gpus: Sequence[GpuAccount], one: str, many: str) -> str:
    return f"{counted(len(gpus), 'GPU')} {one if len(gpus) == 1 else many}"
