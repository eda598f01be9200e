"""Plain Pods: reads the resource line of a Pod's containers into the same request as a claim.

The line is `sharepod.dev/gpu-milli` and, optionally, `sharepod.dev/gpu-memory-mib` among a container's limits. Both are
amounts of all GPUs of the Pod together, as ResourceQuota counts them. Annotations of the dialects refine the request.

Guarantees:
- Any Pod with a line becomes a `ClaimRequest` or a `SpecError`; no other exception is raised.
- Every error names the field and the remedy.
- Lines of several containers count as in Kubernetes: the Pod has one share, of the size of its effective request.
- A resource or annotation under SharePod's prefixes is never ignored: an unknown one is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from sharepod.api.bounds import MAX_CONTAINERS, MAX_ITEMS, clipped, quoted
from sharepod.api.claims.claims import ClaimRequest
from sharepod.api.dialects import FIELD_OF, NATIVE_PREFIX, annotations_of, from_annotations, resolved
from sharepod.api.gpunode import Mode
from sharepod.api.objects import LINE_REQUEST, MAX_GPUS
from sharepod.api.resource_line import MEMORY, MILLI, PREFIX, RESOURCES
from sharepod.api.sharepod import GpuRequest, SpecError
from sharepod.api.units import MIB, WHOLE_GPU, Bytes, Milli, UnitError, format_fraction, parse_whole

MAX_MIB = 1 << 30
"""Largest memory of a line, in MiB: a pebibyte, more than the GPUs of any node have together."""

USUAL = {MILLI: 400, MEMORY: 4096}
"""Amount of each resource that messages advise."""

NOT_A_SHARE = (
    "is neither 1 to 1000 (a share of one GPU) nor a multiple of 1000 (whole GPUs); write one of these, or divide it "
    f"among several GPUs by the annotation {NATIVE_PREFIX}count"
)
MEMORY_ALONE = (
    f"stands without {MILLI}; write {MILLI} next to it or remove it (a LimitRange with a default for it gives it to "
    "every container: remove that default)"
)
MEMORY_BY_ANNOTATION = f"a plain Pod sets its memory among its limits; write {MEMORY} there and remove the annotation"
_LISTS = ("containers", "initContainers")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Container:
    """Line of one container. `path`: field of its limits. `memory`: MiB; None: not set."""

    path: str
    milli: int
    memory: int | None
    init: bool
    sidecar: bool


def asks(pod: Mapping[str, Any]) -> bool:
    """Return whether a container of a Pod has a resource under SharePod's prefix, known or not."""
    return any(_ours(amounts) for _, container in _containers(pod) for amounts in _amounts(container))


def lower(pod: Mapping[str, Any]) -> ClaimRequest:
    """Read the line and the annotations of a Pod into a request. Raises `SpecError`."""
    lines = list(_lines(pod))
    if not lines:
        raise SpecError(f"spec.containers: resources.limits[{MILLI}]", 'is required; write thousandths such as "400"')
    without = next((line for line in lines if line.memory is None), None)
    if without is not None and any(line.memory is not None for line in lines):
        text = "is set only in another container of the Pod; write it in each container with a line, or in none"
        raise SpecError(f"{without.path}[{MEMORY}]", text)
    annotated = _annotations(pod)
    milli = _effective(lines, lambda line: line.milli)
    memory = None if without is not None else _effective(lines, lambda line: line.memory or 0)
    return _request(lines[0].path, milli, memory, annotated)


def _request(path: str, milli: int, memory: int | None, annotated: Mapping[str, str]) -> ClaimRequest:
    """Return the request, from the line and the annotations. `path`: limits that an error about the line names."""
    gpu = from_annotations(annotated)
    by_annotation = {FIELD_OF[name]: name for name in annotated}
    count = _count(path, milli, gpu.count if "count" in by_annotation else None)
    each = Milli(milli // count)
    if gpu.mode is Mode.EXCLUSIVE:
        if each != WHOLE_GPU:
            text = (
                f"{milli} on {count} GPUs is not 1000 each, and an Exclusive Pod has whole GPUs; write {1000 * count}"
            )
            raise SpecError(f"{path}[{MILLI}]", f"{text} or remove the annotation {NATIVE_PREFIX}mode")
        if memory is not None:
            text = f"an Exclusive Pod has all memory of its GPUs; remove it or the annotation {NATIVE_PREFIX}mode"
            raise SpecError(f"{path}[{MEMORY}]", text)
        given: dict[str, Any] = {"count": count}
    else:
        given = {"count": count}
        if gpu.request is None:
            given["request"] = each / WHOLE_GPU
        else:
            _refuse_more(by_annotation["request"], Milli(round(gpu.request * WHOLE_GPU)), each, memory)
        if memory is not None:
            given["memory"] = _on_each(path, memory, count)
    request: GpuRequest = resolved(gpu.model_copy(update=given), annotated)
    return ClaimRequest(gpu=request, devices=((LINE_REQUEST, count),), most_milli=each)


def _count(path: str, milli: int, annotated: int | None) -> int:
    """Return the number of GPUs among which the line's thousandths are divided. `annotated`: the number by annotation;
    None: not set."""
    field = f"{path}[{MILLI}]"
    if annotated is None:
        if milli > WHOLE_GPU and milli % WHOLE_GPU:
            raise SpecError(field, f"{milli} {NOT_A_SHARE}")
        count = max(1, milli // WHOLE_GPU)
        if count > MAX_GPUS:
            raise SpecError(field, f"{count} GPUs are more than a node has; write at most {MAX_GPUS * WHOLE_GPU}")
        return count
    if milli % annotated or milli > annotated * WHOLE_GPU:
        text = (
            f"{milli} is no whole number from 1 to 1000 for each of {annotated} GPUs; write a multiple of {annotated}"
        )
        raise SpecError(field, f"{text} up to {annotated * WHOLE_GPU}, or change the annotation {NATIVE_PREFIX}count")
    return annotated


def _on_each(path: str, memory: int, count: int) -> Bytes:
    if memory % count:
        text = f"{memory} MiB cannot be divided evenly among {count} GPUs; write a multiple of {count}"
        raise SpecError(f"{path}[{MEMORY}]", text)
    return Bytes(memory // count * MIB)


def _refuse_more(name: str, asked: Milli, line: Milli, memory: int | None) -> None:
    """Raise `SpecError` if an annotation requests more than the line, or best effort without memory."""
    if asked > line:
        most = format_fraction(line)
        text = f"{format_fraction(asked)} is more than the line has on each GPU, {most}; write {most} or less"
        raise SpecError(f"metadata.annotations[{name}]", text)
    if asked == 0 and memory is None:
        text = f"0 (best effort) needs {MEMORY} next to the line; write more than 0"
        raise SpecError(f"metadata.annotations[{name}]", text)


def _effective(lines: Sequence[_Container], amount: Callable[[_Container], int]) -> int:
    """Return the Pod's effective request, as Kubernetes computes it: the sum over containers and sidecars that run
    together, or the largest sum during the start if that is more."""
    running = sidecars = starting = 0
    for line in lines:
        if not line.init:
            running += amount(line)
        elif line.sidecar:
            sidecars += amount(line)
            starting = max(starting, sidecars)
        else:
            starting = max(starting, sidecars + amount(line))
    return max(starting, sidecars + running)


# Reading


def _annotations(pod: Mapping[str, Any]) -> dict[str, str]:
    """Return the Pod's annotations that belong to a dialect."""
    metadata = pod.get("metadata")
    annotations = (metadata.get("annotations") if isinstance(metadata, Mapping) else None) or {}
    if not isinstance(annotations, Mapping):
        raise SpecError("metadata.annotations", f"is {quoted(annotations)}; write a map")
    if len(annotations) > MAX_ITEMS:
        raise SpecError("metadata.annotations", f"has {len(annotations)} entries; write at most {MAX_ITEMS}")
    annotated = annotations_of({"metadata": {"annotations": annotations}}, without=("memory",))
    for name in sorted(annotated):
        if FIELD_OF[name] == "memory":
            raise SpecError(f"metadata.annotations[{name}]", MEMORY_BY_ANNOTATION)
    return annotated


def _lines(pod: Mapping[str, Any]) -> Iterator[_Container]:
    for kind, container in _containers(pod):
        limits, requests = _amounts(container)
        path = f"spec.{kind}[{clipped(str(container.get('name') or ''), 64)}].resources.limits"
        for name in sorted({*_ours(limits), *_ours(requests)}):
            _refuse_shape(path, name, limits, requests)
        milli, memory = (_amount(path, name, limits) for name in RESOURCES)
        if milli is None and memory is not None:
            raise SpecError(f"{path}[{MEMORY}]", MEMORY_ALONE)
        if milli is not None:
            sidecar = container.get("restartPolicy") == "Always"
            yield _Container(path=path, milli=milli, memory=memory, init=kind == _LISTS[1], sidecar=sidecar)


def _refuse_shape(path: str, name: str, limits: Mapping[str, Any], requests: Mapping[str, Any]) -> None:
    """Raise `SpecError` for a resource that is unknown, or whose limit differs from its request."""
    field = f"{path}[{clipped(name, 64)}]"
    if name not in RESOURCES:
        raise SpecError(field, f"is not known; use {', '.join(RESOURCES)}, or remove it")
    if name not in limits:
        raise SpecError(field, "is required with the request of the same name; write only limits")
    if name in requests and _amount(path, name, requests) != _amount(path, name, limits):
        text = f"{quoted(limits[name])} is not the request, {quoted(requests[name])}; write only limits"
        raise SpecError(field, text)


def _amount(path: str, name: str, amounts: Mapping[str, Any]) -> int | None:
    if name not in amounts:
        return None
    field = f"{path}[{name}]"
    try:
        amount = parse_whole(amounts[name])
    except UnitError as error:
        raise SpecError(field, str(error)) from None
    if amount == 0:
        raise SpecError(field, f"0 asks for nothing; write a whole number such as {USUAL[name]}, or remove it")
    if name == MILLI and amount > MAX_GPUS * WHOLE_GPU:
        raise SpecError(field, f"{amount} is more than the GPUs of a node are; write at most {MAX_GPUS * WHOLE_GPU}")
    if name == MEMORY and amount > MAX_MIB:
        raise SpecError(
            field,
            f"{amount} MiB is more memory than any node's GPUs have; write a number of MiB such as {USUAL[name]}",
        )
    return amount


def _containers(pod: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield containers and init containers, each with the name of its list."""
    spec = pod.get("spec")
    for kind in _LISTS:
        listed = spec.get(kind) if isinstance(spec, Mapping) else None
        for container in islice(listed, MAX_CONTAINERS) if isinstance(listed, list | tuple) else ():
            if isinstance(container, Mapping):
                yield kind, container


def _amounts(container: Mapping[str, Any]) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """Return the limits and the requests of a container."""
    resources = container.get("resources")
    resources = resources if isinstance(resources, Mapping) else {}
    limits, requests = (resources.get(name) for name in ("limits", "requests"))
    return (limits if isinstance(limits, Mapping) else {}), (requests if isinstance(requests, Mapping) else {})


def _ours(amounts: Mapping[str, Any]) -> list[str]:
    return [name for name in islice(amounts, MAX_ITEMS) if isinstance(name, str) and name.startswith(PREFIX)]
