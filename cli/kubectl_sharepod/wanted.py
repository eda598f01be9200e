"""Requests of plain Pods and claims: the share that a resource line or a claim asks for, on each GPU."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from kubectl_sharepod.kubectl import Json
from kubectl_sharepod.views import WHOLE_MILLI, Gpu, mapping, milli, quantity, rows, scheduling_labels, text, whole

CLAIMS = "/apis/resource.k8s.io/v1"
LINE_CLAIM = "sharepod"
"""Name by which a Pod refers to the claim of its resource line."""
_PREFIX = "sharepod.dev/gpu-"


@dataclass(frozen=True)
class Wanted:
    """Requested share, on each of `count` GPUs of one node."""

    request_milli: int
    memory: int | None
    """Bytes. None: the same part of the GPU's memory as the request is of the GPU's time."""
    count: int = 1
    exclusive: bool = False
    uuids: tuple[str, ...] = ()
    models: tuple[str, ...] = ()
    namespace: str = ""
    """Namespace of the workload. Scheduling labels count only within a namespace."""
    affinity: str = ""
    anti_affinity: str = ""
    exclusion: str = ""
    limit_milli: int = WHOLE_MILLI
    group: tuple[str, ...] = ()
    """UUIDs of the GPUs that its affinity group has. Empty if the group has none."""

    def memory_on(self, gpu: Gpu) -> int:
        """Return the bytes of memory that the share needs on a GPU."""
        if self.exclusive:
            return gpu.memory
        return self.memory if self.memory is not None else gpu.memory * self.request_milli // WHOLE_MILLI


def has_line(pod: Json) -> bool:
    """Return whether a Pod has a resource line."""
    return _effective(pod, "sharepod.dev/gpu-milli") > 0


def claims_of(pod: Json) -> Iterator[tuple[str, str]]:
    """Yield (entry of the Pod's spec, name of its claim) of each claim of a Pod that exists."""
    made = rows(mapping(pod.get("status")).get("resourceClaimStatuses"))
    names = {text(one, "name"): text(one, "resourceClaimName") for one in made}
    for one in rows(mapping(pod.get("spec")).get("resourceClaims")):
        entry = text(one, "name")
        if name := text(one, "resourceClaimName") or names.get(entry, ""):
            yield entry, name


def claim_of_line(pod: Json) -> str:
    """Return the name of the claim that a Pod has for its resource line. Empty if it has none."""
    listed = rows(mapping(pod.get("status")).get("resourceClaimStatuses"))
    return next((text(one, "resourceClaimName") for one in listed if one.get("name") == LINE_CLAIM), "")


def of_line(pod: Json, namespace: str) -> Wanted | None:
    """Return the share that the resource line of a Pod requests. None if it has no line."""
    time, memory = _effective(pod, "sharepod.dev/gpu-milli"), _effective(pod, "sharepod.dev/gpu-memory-mib")
    if not time:
        return None
    annotated = mapping(mapping(pod.get("metadata")).get("annotations"))
    count = quantity(annotated.get(f"{_PREFIX}count")) or max(1, time // WHOLE_MILLI)
    exclusive = annotated.get(f"{_PREFIX}mode") == "Exclusive"
    labels = scheduling_labels(annotated, _PREFIX)
    asked, limit = milli(annotated.get(f"{_PREFIX}request")), milli(annotated.get(f"{_PREFIX}limit"))
    return Wanted(
        time // count if asked is None else asked,
        (memory << 20) // count if memory else None,
        count,
        exclusive,
        (),
        (),
        namespace,
        *labels,
        limit_milli=WHOLE_MILLI if limit is None else limit,
    )


def of_claim(claim: Json, namespace: str) -> Wanted | None:
    """Return the share that a claim requests. None if it has no size."""
    annotated = mapping(mapping(claim.get("metadata")).get("annotations"))
    first = mapping(next(iter(rows(mapping(mapping(claim.get("spec")).get("devices")).get("requests"))), {}))
    exactly = mapping(first.get("exactly"))
    asked = mapping(mapping(exactly.get("capacity")).get("requests"))
    time, limit, lowered = (
        quantity(asked.get("timeMilli")),
        quantity(asked.get("limitMilli")),
        milli(annotated.get(f"{_PREFIX}request")),
    )
    exclusive = annotated.get(f"{_PREFIX}mode") == "Exclusive"
    if time is None and not exclusive:
        return None
    return Wanted(
        WHOLE_MILLI if exclusive or time is None else time if lowered is None else lowered,
        quantity(asked.get("memory")),
        whole(exactly.get("count")) or 1,
        exclusive,
        (),
        (),
        namespace,
        *scheduling_labels(annotated, _PREFIX),
        limit_milli=WHOLE_MILLI if limit is None else limit,
    )


def _effective(pod: Json, resource: str) -> int:
    """Return a Pod's effective request of a resource, as Kubernetes computes it: the sum of containers and sidecars or,
    if larger, an init container with the sidecars started before it."""

    def limit(container: Json) -> int:
        return quantity(mapping(mapping(container.get("resources")).get("limits")).get(resource)) or 0

    spec = mapping(pod.get("spec"))
    sidecars = largest = 0
    for container in rows(spec.get("initContainers")):
        if text(container, "restartPolicy") == "Always":
            sidecars += limit(container)
        else:
            largest = max(largest, sidecars + limit(container))
    return max(largest, sidecars + sum(limit(container) for container in rows(spec.get("containers"))))
