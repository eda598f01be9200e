"""`why`: shows why a workload has no GPU: its conditions and Events, and an obstacle for each GPU that the user may
see.

The operator decides. The table of GPUs compares only size, model, UUID, mode and scheduling labels with the GPUs and
their tenants. It ignores the nodes' labels, taints and resources. The command advises a change only if the operator's
answer contains none that the operator has checked.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial

from kubectl_sharepod.kubectl import (
    UNKNOWN_KIND,
    ForbiddenError,
    Json,
    Kubectl,
    NotFoundError,
    UsageError,
    both,
    path,
)
from kubectl_sharepod.output import GREEN, Column, Page, fraction, size
from kubectl_sharepod.reading import NODES_HIDDEN, NotInstalledError, gpus_if_allowed
from kubectl_sharepod.views import (
    WHOLE_MILLI,
    Fleet,
    Gpu,
    Share,
    Workload,
    condition,
    mapping,
    quantity,
    rows,
    scheduling_labels,
    sharepod,
    text,
    texts,
    whole,
)
from kubectl_sharepod.views import now as present
from kubectl_sharepod.wanted import CLAIMS, Wanted, claim_of_line, of_claim, of_line

LEAST_MEMORY = 1 << 30
"""Bytes of memory below which the command advises no share. A CUDA context alone takes about 0.5 GiB."""
_EVENTS = 8
"""Number of newest Events that are shown."""
_KINDS = {"sharepod": "SharePod", "pod": "Pod", "claim": "Claim"}
_CHECKED = "would fit now"
"""End of advice that the operator has checked by a decision."""


def why(kubectl: Kubectl, namespace: str, kind: str, name: str) -> Page:
    """Return a page that shows why a workload has no place, or which one it has. `kind`: sharepod, pod or claim. Raise
    `KubectlError`.

    The exit status is 1 while it has no place.
    """
    read = {"sharepod": _sharepod, "pod": _pod, "claim": _claim}[kind]
    found, fleet = both(partial(read, kubectl, namespace, name), partial(gpus_if_allowed, kubectl))
    subject = {"kind": _KINDS[kind], "namespace": namespace, "name": name}
    if found.placed:
        where = f": {found.where}" if found.where else ""
        return Page(
            before=[f"{kind}/{name} has its share{where}", *found.lines],
            items=lambda: [subject | {"placed": True} | _holding(found, fleet, namespace)],
            names=[f"{kind}/{name}"],
        )
    if found.instead:
        return Page(
            before=[f"{kind}/{name} {found.instead}", *found.lines],
            items=lambda: [subject | {"placed": False, "reasons": [found.instead]}],
            names=[f"{kind}/{name}"],
            status=1,
        )
    wanted, change = found.wanted, ""
    page_rows: list[list[str]] = []
    items: list[Json] = []
    after: list[str] = []
    if fleet is not None and wanted is not None:
        wanted = replace(wanted, group=group_of(fleet.gpus, wanted))
        for gpu in fleet.gpus:
            problem = obstacle(gpu, wanted)
            room = gpu.free
            page_rows.append(
                [
                    gpu.node,
                    str(gpu.index),
                    gpu.model,
                    fraction(room.request_milli if room else 0),
                    size(room.memory if room else 0),
                    problem or "fits",
                ]
            )
            items.append({"node": gpu.node, "index": gpu.index, "uuid": gpu.uuid, "why": problem})
        if not any(_CHECKED in line for line in found.lines):
            change = smallest_change(fleet.gpus, wanted)
        if change:
            after.append(f"Smallest change that a GPU has room for: {change}")
    return Page(
        columns=[
            Column("NODE", grows=True),
            Column("GPU", right=True),
            Column("MODEL", grows=True),
            Column("FREE", right=True),
            Column("FREE-MEMORY", right=True),
            Column("WHY-NOT", grows=True),
        ],
        rows=page_rows,
        colours=["" if item["why"] else GREEN for item in items],
        items=lambda: [
            subject
            | {
                "placed": False,
                "reasons": [line.strip() for line in found.lines],
                "wanted": asdict(wanted) if wanted else None,
                "gpus": items,
                "smallest_change": change,
            }
        ],
        names=[f"{kind}/{name}"],
        before=[f"{kind}/{name} has no share yet", *found.lines],
        after=after,
        notes=[NODES_HIDDEN] if fleet is None else fleet.notes,
        status=1,
    )


def _holding(found: _Found, fleet: Fleet | None, namespace: str) -> Json:
    """Return node, GPUs and share of a placed workload: as its GPUNode has them, else as its own object has them."""
    for tenant in fleet.workloads if fleet is not None else ():
        if tenant.namespace == namespace and {tenant.uid, f"{tenant.kind}/{tenant.name}"} & set(found.tenants):
            return _held(tenant)
    return found.held or {"node": "", "gpus": [], "indexes": "", "share": None}


def _held(tenant: Workload) -> Json:
    share = asdict(tenant.share)
    return {"node": tenant.node, "gpus": list(tenant.gpus), "indexes": tenant.indexes, "share": share}


def obstacle(gpu: Gpu, wanted: Wanted) -> str:
    """Return why the share does not fit on a GPU. Empty if it fits."""
    if gpu.why:
        return gpu.why
    if wanted.uuids and gpu.uuid not in wanted.uuids:
        return "not one of the UUIDs that it asks for"
    if wanted.models and gpu.model not in wanted.models:
        return "not one of the models that it asks for"
    if gpu.pool == "scheduler":
        return "kube-scheduler gives out shares of this node: claims of class scheduler.sharepod.dev"
    if wanted.exclusive and gpu.tenants:
        return f"it asks for a whole GPU, and this one has {len(gpu.tenants)} tenants"
    if any(tenant.exclusive for tenant in gpu.tenants):
        return "an Exclusive tenant has it"
    if labels := _label_obstacle(gpu, wanted):
        return labels
    lacks = []
    if gpu.free_milli < wanted.request_milli:
        lacks.append(f"time: {fraction(gpu.free_milli)} free, {fraction(wanted.request_milli)} requested")
    if gpu.free_memory < wanted.memory_on(gpu):
        lacks.append(f"memory: {size(gpu.free_memory)} free, {size(wanted.memory_on(gpu))} requested")
    return "; ".join(lacks)


def _label_obstacle(gpu: Gpu, wanted: Wanted) -> str:
    """Return which scheduling label keeps the share off a GPU. Empty if none does."""
    if wanted.group and gpu.uuid not in wanted.group:
        return f"its affinity group {wanted.affinity} is on other GPUs"
    own = (wanted.namespace, wanted.exclusion) if wanted.exclusion else None
    kept = {(tenant.namespace, tenant.exclusion) if tenant.exclusion else None for tenant in gpu.tenants}
    if kept - {own}:
        return f"it has tenants without the exclusion label {own[1]}" if own else "an exclusion label keeps it"
    apart = (wanted.namespace, wanted.anti_affinity)
    if wanted.anti_affinity and apart in [(tenant.namespace, tenant.anti_affinity) for tenant in gpu.tenants]:
        return f"a tenant with its anti-affinity label {wanted.anti_affinity} is on it"
    return ""


def group_of(gpus: Iterable[Gpu], wanted: Wanted) -> tuple[str, ...]:
    """Return the UUIDs of the GPUs on which the share's affinity group is."""
    own = (wanted.namespace, wanted.affinity)
    members = (gpu for gpu in gpus if own in [(tenant.namespace, tenant.affinity) for tenant in gpu.tenants])
    return tuple(gpu.uuid for gpu in members) if wanted.affinity else ()


def smallest_change(gpus: Iterable[Gpu], wanted: Wanted) -> str:
    """Return the change that makes the share fit, and keeps the largest part of it. Empty if none helps, or none is
    needed."""
    by_node: dict[str, list[Gpu]] = {}
    smallest = replace(wanted, request_milli=0, memory=0)
    for gpu in gpus:
        if not wanted.exclusive and not obstacle(gpu, smallest):
            by_node.setdefault(gpu.node, []).append(gpu)
    changes = [change for node in by_node.values() for change in _changes(node, wanted)]
    if not changes or any(kept == 1.0 for kept, _text in changes):
        return ""
    return max(changes)[1]


def _changes(gpus: Sequence[Gpu], wanted: Wanted) -> Iterator[tuple[float, str]]:
    """Yield (part of the request that remains, text) of each change that makes the share fit on a node."""
    if len(gpus) < wanted.count:
        return
    time = sorted(min(wanted.request_milli, _time_beside(gpu, wanted)) for gpu in gpus)[-wanted.count]
    memory = sorted(_memory_beside(gpu, wanted) for gpu in gpus)[-wanted.count]
    node = gpus[0].node
    if wanted.request_milli and time:
        yield time / wanted.request_milli, f"request {fraction(time)} (node {node})"
    asked = max(wanted.memory_on(gpu) for gpu in gpus)
    rounded = memory * 10 // (1 << 30) * (1 << 30) // 10
    if asked and rounded >= min(LEAST_MEMORY, asked):
        yield min(1.0, rounded / asked), f"memory {size(rounded)} (node {node})"


def _time_beside(gpu: Gpu, wanted: Wanted) -> int:
    """Return the thousandths of time that the share could have on a GPU with its requested memory. 0 if the memory is
    not free."""
    if wanted.memory is not None:
        return gpu.free_milli if gpu.free_memory >= wanted.memory else 0
    return min(gpu.free_milli, gpu.free_memory * WHOLE_MILLI // gpu.memory if gpu.memory else 0)


def _memory_beside(gpu: Gpu, wanted: Wanted) -> int:
    """Return the bytes of memory that the share could have on a GPU with its requested time. 0 if the time is not
    free."""
    return gpu.free_memory if gpu.free_milli >= wanted.request_milli else 0


@dataclass(frozen=True)
class _Found:
    """State of a workload, from its object and its Events."""

    placed: bool
    lines: tuple[str, ...]
    wanted: Wanted | None
    where: str = ""
    """GPUs and share, if it is placed: the message of the operator's condition."""
    instead: str = ""
    """Why the workload needs no place. Empty if it needs one."""
    tenants: tuple[str, ...] = ()
    """Uid, or kind and name, by which a GPUNode may list it."""
    held: Json | None = None
    """Node, GPUs and share, as far as its object has them."""


def _sharepod(kubectl: Kubectl, namespace: str, name: str) -> _Found:
    try:
        item = kubectl.get(path("sharepods", namespace, name))
    except NotFoundError as error:
        if UNKNOWN_KIND in str(error):
            raise NotInstalledError("SharePod is not installed in this cluster: it has no SharePods") from None
        raise NotFoundError(f"{error}; for a Pod write pod/{name}, for a claim claim/{name}") from None
    status, spec = mapping(item.get("status")), mapping(mapping(item.get("spec")).get("gpu"))
    lines = [
        f"  {text(one, 'type')}: {text(one, 'reason')}: {text(one, 'message')}"
        for one in rows(status.get("conditions"))
        if text(one, "status") == "False" and text(one, "type") != "Ready"
    ]
    if not status:
        lines = ["  The operator has not answered yet. If this lasts: kubectl sharepod doctor"]
    if status.get("endTime"):
        ready = condition(status, "PodReady")
        return _Found(False, (), None, instead=f"has ended: {text(ready, 'reason')}: {text(ready, 'message')}")
    place = condition(status, "Placed")
    placed = text(place, "status") == "True"
    seen = sharepod(item, present())
    wanted = Wanted(
        seen.share.request_milli,
        quantity(spec.get("memory")),
        whole(spec.get("count")) or 1,
        seen.exclusive,
        texts(spec.get("uuids")),
        texts(spec.get("models")),
        namespace,
        *scheduling_labels(spec),
    )
    return _Found(placed, tuple(lines), wanted, text(place, "message"), tenants=(seen.uid,), held=_held(seen))


def _pod(kubectl: Kubectl, namespace: str, name: str) -> _Found:
    item, events = both(
        lambda: kubectl.get(path("pods", namespace, name, group="/api/v1")),
        lambda: _events(kubectl, namespace, "Pod", name),
    )
    if not requests_gpus(item):
        return _Found(False, (), None, instead="requests no share of a GPU")
    scheduled = condition(mapping(item.get("status")), "PodScheduled")
    placed = text(scheduled, "status") == "True" or bool(text(item, "spec", "nodeName"))
    lines = [] if placed else [f"  PodScheduled: {text(scheduled, 'reason')}: {text(scheduled, 'message')}"]
    listed = text(item, "metadata", "annotations", "sharepod.dev/gpus")
    gpus = [one for one in listed.split(",") if one not in ("", "void")]
    return _Found(
        placed,
        (*lines, *(() if placed else events)),
        of_line(item, namespace),
        tenants=(text(item, "metadata", "uid"), f"Claim/{claim_of_line(item)}", f"SharePod/{name}"),
        held={"node": text(item, "spec", "nodeName"), "gpus": gpus, "indexes": "", "share": None},
    )


def requests_gpus(pod: Json) -> bool:
    """Return whether a Pod requests GPUs of SharePod: by a resource line, a claim, a volume or its owner."""
    spec, metadata = mapping(pod.get("spec")), mapping(pod.get("metadata"))
    named = [spec.get("containers"), spec.get("initContainers"), spec.get("volumes"), metadata.get("ownerReferences")]
    return bool(spec.get("resourceClaims")) or "sharepod.dev" in json.dumps(named)


def _claim(kubectl: Kubectl, namespace: str, name: str) -> _Found:
    item, events = both(
        lambda: kubectl.get(path("resourceclaims", namespace, name, group=CLAIMS)),
        lambda: _events(kubectl, namespace, "ResourceClaim", name),
    )
    status = mapping(item.get("status"))
    placed = bool(mapping(status.get("allocation")))
    results = rows(mapping(mapping(status.get("allocation")).get("devices")).get("results"))
    granted = mapping(next((one.get("data") for one in rows(status.get("devices"))), None))
    share = Share(*(whole(granted.get(key)) or 0 for key in ("requestMilli", "limitMilli", "memory")))
    return _Found(
        placed,
        () if placed else tuple(events),
        of_claim(item, namespace),
        tenants=(text(item, "metadata", "uid"),),
        held={
            "node": text(next(iter(results), {}), "pool"),
            "gpus": [text(one, "device") for one in results],
            "indexes": "",
            "share": asdict(share) if granted else None,
        },
    )


def _events(kubectl: Kubectl, namespace: str, kind: str, name: str) -> list[str]:
    """Return the newest Events about an object as lines. Equal texts appear once."""
    selector = f"involvedObject.kind%3D{kind},involvedObject.name%3D{name}"
    try:
        found = kubectl.get(path("events", namespace, group="/api/v1") + f"?fieldSelector={selector}")
    except ForbiddenError:
        return ["  You may not list Events, which have the reason."]
    dated = sorted(rows(found.get("items")), key=lambda one: text(one, "lastTimestamp") or text(one, "eventTime"))
    lines = dict.fromkeys(f"  {text(one, 'reason')}: {text(one, 'message')}" for one in reversed(dated))
    return list(lines)[:_EVENTS]


def target(written: str) -> tuple[str, str]:
    """Return (kind, name) for `NAME`, `pod/NAME` or `claim/NAME`. Raise `UsageError` for any other text."""
    kind, slash, name = written.partition("/")
    if not slash and written:
        return "sharepod", written
    kinds = {"sharepod": "sharepod", "shp": "sharepod", "sharepods": "sharepod", "pod": "pod", "po": "pod"}
    kinds |= {"pods": "pod", "claim": "claim", "resourceclaim": "claim", "resourceclaims": "claim"}
    if kind.lower() not in kinds or not name or "/" in name:
        raise UsageError(f"{written} names no workload; write NAME (a SharePod), pod/NAME or claim/NAME")
    return kinds[kind.lower()], name
