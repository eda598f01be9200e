"""Views: GPUs and workloads, read from the API server's objects for output.

If a field is missing in an object, or has another form than expected, it is empty in the view. So an unusual object
affects only its own line of the output.

Classes with thousands of objects are not frozen, because a frozen dataclass takes three times as long to make.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import cached_property
from typing import Any

from kubectl_sharepod.kubectl import Json, printable

CORDONED = "sharepod.dev/cordoned"
"""Annotation of a GPUNode that lists the GPUs which take no new tenants."""
WHOLE_MILLI = 1000
"""Thousandths of one GPU's time."""


@dataclass(slots=True)
class Share:
    """Share on each GPU: time in thousandths, memory in bytes."""

    request_milli: int = 0
    limit_milli: int = WHOLE_MILLI
    memory: int | None = None
    """None: the request names no memory, and none is granted yet."""


@dataclass(slots=True)
class Workload:
    """Tenant of GPUs, or a workload that waits for a place."""

    kind: str
    """SharePod, Claim or Pod: kind of the object that requests the share."""
    namespace: str
    name: str
    share: Share
    uid: str = ""
    node: str = ""
    gpus: tuple[str, ...] = ()
    """UUIDs of its GPUs."""
    indexes: str = ""
    """Indexes of its GPUs on the node, such as `0,1`."""
    exclusive: bool = False
    used_milli: int | None = None
    """Part of the last 10 s for which it held a GPU, in thousandths. None: not known."""
    progress_milli: int | None = None
    """Work in the last 10 s, in thousandths of the work that it would have done alone. None: not known."""
    memory_used: int | None = None
    held_s: int | None = None
    """GPU time held since `counted_since`, in seconds of one GPU. None: not known."""
    counted_since: str = ""
    state: str = ""
    """`Running`, or the reason why it does not run, as one word."""
    ended: bool = False
    waiting_s: int | None = None
    """Seconds since its creation, if it waits for a place; else None."""
    message: str = ""
    """Reason why it has no place, or what its agent has found."""
    affinity: str = ""
    anti_affinity: str = ""
    exclusion: str = ""


@dataclass
class Gpu:
    """GPU of a node, with its tenants."""

    node: str
    uuid: str
    index: int
    model: str
    memory: int
    """Bytes available to tenants."""
    pool: str
    why: str = ""
    """Reason why it takes no new tenants. Empty: it takes new tenants."""
    tenants: tuple[Workload, ...] = ()
    cordoned: bool = False
    """True if an administrator has excluded the GPU, or its node, from new tenants."""

    @cached_property
    def free_milli(self) -> int:
        """Thousandths of the GPU's time that no tenant has reserved."""
        return max(0, WHOLE_MILLI - sum(tenant.share.request_milli for tenant in self.tenants))

    @cached_property
    def free_memory(self) -> int:
        """Bytes of the GPU's memory that no tenant has reserved."""
        return max(0, self.memory - sum(tenant.share.memory or 0 for tenant in self.tenants))

    @cached_property
    def free(self) -> Share | None:
        """Largest share that a new tenant can get. None: the GPU takes no new tenants."""
        if self.why or any(tenant.exclusive for tenant in self.tenants) or not self.free_memory:
            return None
        return Share(self.free_milli, WHOLE_MILLI, self.free_memory)

    @property
    def place(self) -> str:
        """Node and index, in the form that `who` takes."""
        return f"{self.node}:{self.index}"


@dataclass(frozen=True)
class FreeShares:
    """Free shares on the GPUs of one model and pool. `unused`: number of GPUs without a tenant. `largest`: largest
    share that fits on one GPU."""

    model: str
    pool: str
    gpus: int
    unused: int
    free_milli: int
    largest: Share | None


@dataclass(frozen=True)
class Fleet:
    """GPUs of the cluster, with their tenants and problems."""

    gpus: tuple[Gpu, ...] = ()
    problems: tuple[tuple[str, str], ...] = ()
    """(name of a node, problem that a condition of its GPUNode reports)."""
    cordon_faults: tuple[tuple[str, str], ...] = ()
    """(name of a node, advice about an entry in the annotation `sharepod.dev/cordoned` that names no GPU of the
    node)."""
    by_uid: Mapping[str, Workload] = field(default_factory=dict)
    """Tenants, by the uid of their SharePod, claim or Pod."""
    notes: tuple[str, ...] = ()
    """Notes on what the user may not see of it."""

    @property
    def workloads(self) -> tuple[Workload, ...]:
        """All tenants, each once."""
        return tuple(self.by_uid.values())


def fleet(gpunodes: Iterable[Json], nodes: Iterable[Json] = ()) -> Fleet:
    """Return the GPUs in these GPUNodes. `nodes`: Nodes, of which at least the cordoned ones."""
    shut = {text(one, "metadata", "name") for one in nodes if mapping(one.get("spec")).get("unschedulable") is True}
    gpus: list[Gpu] = []
    problems: list[tuple[str, str]] = []
    faults: list[tuple[str, str]] = []
    by_uid: dict[str, Workload] = {}
    for item in gpunodes:
        node = text(item, "metadata", "name")
        spec, status = mapping(item.get("spec")), mapping(item.get("status"))
        seen = {text(one, "id"): one for one in rows(status.get("tenants"))}
        devices = {text(one, "uuid"): one for one in rows(status.get("gpus"))}
        tenants = [_tenant(row, seen.get(text(row, "id"), {}), node, devices) for row in rows(spec.get("tenants"))]
        by_uid.update((tenant.uid, tenant) for tenant in tenants)
        problems += [(node, problem) for problem in _problems(status)]
        on: dict[str, list[Workload]] = defaultdict(list)
        for tenant in tenants:
            for uuid in tenant.gpus:
                on[uuid].append(tenant)
        silent, cordoned = _silent(status), cordoned_of(item)
        faults += [(node, fault) for fault in cordon_faults(cordoned, devices.values())]
        for device in devices.values():
            here = tuple(on.get(text(device, "uuid"), ()))
            gpu = _gpu(node, text(spec, "pool") or "dedicated", device, here, silent, cordoned)
            gpus.append(replace(gpu, why=gpu.why or "node cordoned", cordoned=True) if node in shut else gpu)
    return Fleet(tuple(sorted(gpus, key=lambda gpu: (gpu.node, gpu.index))), tuple(problems), tuple(faults), by_uid)


def free_shares(item: Json) -> FreeShares:
    """Return one entry of the free shares that the operator publishes."""
    largest = mapping(item.get("largest"))
    return FreeShares(
        model=text(item, "model"),
        pool=text(item, "pool"),
        gpus=whole(item.get("gpus")) or 0,
        unused=whole(item.get("unused")) or 0,
        free_milli=whole(item.get("freeMilli")) or 0,
        largest=Share(whole(largest.get("requestMilli")) or 0, WHOLE_MILLI, whole(largest.get("memory")))
        if largest
        else None,
    )


def sharepod(item: Json, now: datetime) -> Workload:
    """Return a SharePod as a workload. `now`: time for the age of a waiting one."""
    metadata, spec, status = (mapping(item.get(key)) for key in ("metadata", "spec", "status"))
    asked, granted, shown = mapping(spec.get("gpu")), mapping(status.get("granted")), mapping(status.get("share"))
    usage, consumed = mapping(status.get("usage")), mapping(status.get("consumed"))
    placed = condition(status, "Placed")
    ended = bool(status.get("endTime"))
    waits = text(placed, "status") != "True" and not ended
    enforced = condition(status, "Enforced")
    findings = text(enforced, "message") if text(enforced, "status") == "False" else ""
    return Workload(
        kind="SharePod",
        namespace=text(metadata, "namespace"),
        name=text(metadata, "name"),
        uid=text(metadata, "uid"),
        share=Share(
            whole(granted.get("requestMilli")) or milli(shown.get("request", asked.get("request"))) or 0,
            whole(granted.get("limitMilli")) or milli(shown.get("limit", asked.get("limit"))) or WHOLE_MILLI,
            whole(granted.get("memory")) or quantity(shown.get("memory")),
        ),
        node=text(status, "node"),
        gpus=tuple(text(gpu, "uuid") for gpu in rows(status.get("gpus"))),
        indexes=text(status, "gpuIndexes"),
        exclusive=text(asked, "mode") == "Exclusive",
        used_milli=whole(usage.get("heldMilli")),
        progress_milli=milli(usage.get("progress")),
        memory_used=whole(usage.get("memory")),
        held_s=whole(consumed.get("heldSeconds")),
        counted_since=text(consumed, "since"),
        state=text(status, "summary") or text(status, "phase") or "Pending",
        ended=ended,
        waiting_s=age_s(metadata.get("creationTimestamp"), now) if waits else None,
        message=text(placed, "message") if waits else findings,
    )


def condition(status: Mapping[str, Any], kind: str) -> Json:
    """Return the condition of this type; empty if there is none."""
    return next((one for one in rows(status.get("conditions")) if one.get("type") == kind), {})


def mapping(value: object) -> Json:
    """Return a value that is a JSON object; an empty one for any other value."""
    return value if isinstance(value, dict) else {}


def rows(value: object) -> list[Json]:
    """Return the JSON objects in a list; none for any other value."""
    return [one for one in value if isinstance(one, dict)] if isinstance(value, list) else []


def texts(value: object) -> tuple[str, ...]:
    """Return the strings in a list; none for any other value."""
    return tuple(one for one in value if isinstance(one, str)) if isinstance(value, list) else ()


def text(item: Mapping[str, Any], key: str, *nested: str) -> str:
    """Return the string under a key, or under nested keys, without characters that control a terminal; empty if there
    is none."""
    value: object = item.get(key)
    for inner in nested:
        value = value.get(inner) if isinstance(value, dict) else None
    if not isinstance(value, str):
        return ""
    return value if value.isprintable() else printable(value).replace("\n", " ")


def whole(value: object) -> int | None:
    """Return a value that is an integer; None for any other value."""
    return value if type(value) is int else None  # not True, whose type is bool


def quantity(value: object) -> int | None:
    """Return a quantity of Kubernetes, such as `4Gi`, as an integer; None for any other value."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    digits = str(value).strip()
    scale = next((1 << power for unit, power in _UNITS.items() if digits.endswith(unit)), 0)
    digits = digits[:-2] if scale else digits
    if not scale:
        scale = next((10**power for unit, power in _DECIMAL.items() if digits.endswith(unit)), 0)
        digits = digits[:-1] if scale else digits
    try:
        return int(float(digits) * (scale or 1))
    except (ValueError, OverflowError):
        return None


def age_s(created: object, now: datetime) -> int | None:
    """Return the seconds since an RFC 3339 time; None for any other value."""
    try:
        return max(0, int((now - datetime.fromisoformat(str(created))).total_seconds()))
    except (ValueError, TypeError):
        return None


def now() -> datetime:
    """Return the present time."""
    return datetime.now(UTC)


def _tenant(row: Json, seen: Json, node: str, devices: Mapping[str, Json]) -> Workload:
    uid, pod, claim = text(row, "id"), text(row, "podName"), text(row, "claim", "name")
    kind = "Claim" if not pod else "Pod" if uid == text(row, "podUID") else "SharePod"
    gpus = texts(row.get("gpus"))
    findings = [text(finding, "message") for finding in rows(seen.get("findings"))]
    released = text(row, "state") == "Releasing"
    affinity, anti_affinity, exclusion = scheduling_labels(mapping(row.get("labels")))
    return Workload(
        kind=kind,
        namespace=text(row, "namespace"),
        name=pod or claim,
        uid=uid,
        share=Share(
            whole(row.get("requestMilli")) or 0, whole(row.get("limitMilli")) or WHOLE_MILLI, whole(row.get("memory"))
        ),
        node=node,
        gpus=gpus,
        indexes=",".join(str(devices[uuid].get("index", "?")) if uuid in devices else "?" for uuid in gpus),
        exclusive=text(row, "mode") == "Exclusive",
        used_milli=whole(seen.get("heldMilli")),
        progress_milli=whole(seen.get("progressMilli")),
        memory_used=whole(seen.get("memory")),
        held_s=whole(seen.get("heldSeconds")),
        counted_since=text(seen, "countedSince"),
        state="Releasing" if released else "Running" if seen.get("processes") else "Reserved",
        message=" ".join(findings),
        affinity=affinity,
        anti_affinity=anti_affinity,
        exclusion=exclusion,
    )


def scheduling_labels(block: Json, prefix: str = "") -> tuple[str, str, str]:
    """Return (affinity, anti-affinity, exclusion) from a block such as `spec.gpu`, or from annotations. `prefix`:
    prefix of the annotations, whose names are hyphenated."""
    if not block:
        return "", "", ""
    anti_affinity = "anti-affinity" if prefix else "antiAffinity"
    return text(block, f"{prefix}affinity"), text(block, f"{prefix}{anti_affinity}"), text(block, f"{prefix}exclusion")


def cordoned_of(gpunode: Json) -> list[str]:
    """Return the UUIDs and indexes of the GPUs of a node that an administrator has cordoned."""
    listed = text(mapping(mapping(gpunode.get("metadata")).get("annotations")), CORDONED)
    return [part.strip() for part in listed.split(",") if part.strip()]


def cordon_faults(cordoned: Iterable[str], devices: Collection[Json]) -> list[str]:
    """Return a message for each entry of the cordon annotation that names no GPU of the node."""
    known = {name for one in devices for name in (text(one, "uuid").lower(), str(whole(one.get("index"))))}
    wrong = sorted({one for one in cordoned if one.lower() not in known}) if devices else []
    indexes = ", ".join(sorted((str(whole(one.get("index"))) for one in devices), key=lambda one: (len(one), one)))
    return [
        f"annotation {CORDONED}: {one!r} is no GPU of the node, so it cordons none; "
        f"write an index ({indexes}) or a UUID"
        for one in wrong
    ]


def _gpu(
    node: str, pool: str, device: Json, tenants: tuple[Workload, ...], silent: str, cordoned: Collection[str]
) -> Gpu:
    why = text(device, "reason")
    if not why and (device.get("shareable") is False or text(device, "health") == "Unhealthy"):
        why = "unhealthy"
    if not why and device.get("taken") is True:
        why = "NVIDIA's device plugin gave it to another Pod"
    listed = text(device, "uuid").lower() in map(str.lower, cordoned) or str(whole(device.get("index"))) in cordoned
    return Gpu(
        node=node,
        uuid=text(device, "uuid"),
        index=whole(device.get("index")) or 0,
        model=text(device, "model"),
        memory=whole(device.get("memory")) or 0,
        pool=pool,
        why=why or silent or ("cordoned" if listed else ""),
        tenants=tenants,
        cordoned=listed,
    )


def _silent(status: Json) -> str:
    """Return why the agent of a node cannot serve new tenants. Empty if it can."""
    for kind in ("AgentAlive", "AgentReady", "HookLoads"):
        found = condition(status, kind)
        if text(found, "status") == "False":
            return text(found, "message") or kind
    injects = condition(status, "EnvInjection")
    return text(injects, "message") if text(injects, "reason") == "DefaultRuntimeInjects" else ""


def _problems(status: Json) -> list[str]:
    """Return the problems that the conditions of a GPUNode report."""
    return [
        f"{text(found, 'type')}: {text(found, 'message') or text(found, 'reason')}"
        for found in rows(status.get("conditions"))
        if _FAULTS.get(text(found, "type")) == text(found, "status")
    ]


_NEEDED = ("AgentAlive", "AgentReady", "CDIDevices", "ClaimsAttach", "HookLoads", "OwnNodeOnly")
_FAULTS = dict.fromkeys(_NEEDED, "False") | {"DevicePluginPresent": "True"}
"""Status of each condition that means a problem for an administrator, by the condition's type."""


def milli(value: object) -> int | None:
    """Return a fraction, such as `0.4`, `400m` or `40%`, in thousandths; None for any other value."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    digits = str(value).strip()
    scale = {"m": 1, "%": WHOLE_MILLI // 100}.get(digits[-1:], WHOLE_MILLI)
    try:
        return round(float(digits if scale == WHOLE_MILLI else digits[:-1]) * scale)
    except (ValueError, OverflowError):
        return None


_UNITS = {"Ki": 10, "Mi": 20, "Gi": 30, "Ti": 40, "Pi": 50}
_DECIMAL = {"k": 3, "M": 6, "G": 9, "T": 12, "P": 15}
