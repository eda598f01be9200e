"""Commands that only read. Each returns a page: a table, with its rows as JSON objects."""

from __future__ import annotations

import difflib
import json
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Any

from kubectl_sharepod.kubectl import ForbiddenError, Json, KubectlError, NotFoundError, UsageError, path
from kubectl_sharepod.output import RED, YELLOW, Column, Page, duration, fraction, hours, size
from kubectl_sharepod.reading import Scope, Seen, gpus, published_free, workloads
from kubectl_sharepod.views import WHOLE_MILLI, FreeShares, Gpu, Workload, mapping, rows, text, whole


def top(scope: Scope) -> Page:
    """Return the workloads: requested share, used share, progress, memory, and waiting time."""
    return top_of(workloads(scope, cordons=False), scope.namespace)


def top_of(seen: Seen, namespace: str | None) -> Page:
    """Return the page of `top` from objects that were read."""
    found, fleet = seen.found, seen.fleet
    before: list[str] = []
    if fleet is not None:
        busy = sum(WHOLE_MILLI - gpu.free_milli for gpu in fleet.gpus)
        waiting = sum(one.waiting_s is not None for one in found)
        nodes = len({gpu.node for gpu in fleet.gpus})
        before.append(
            f"{counted(len(fleet.gpus), 'GPU')} on {counted(nodes, 'node')}, {fraction(busy)} requested; "
            f"{counted(waiting, 'workload')} {'waits' if waiting == 1 else 'wait'}"
        )
    return Page(
        columns=[*_place(namespace), *WORKLOAD_COLUMNS],
        rows=[[*([one.namespace] if namespace is None else []), *workload_cells(one)] for one in found],
        colours=[YELLOW if one.waiting_s is not None else RED if one.message else "" for one in found],
        items=lambda: [asdict(one) for one in found],
        names=[f"{one.kind.lower()}/{one.name}" for one in found],
        before=before,
        empty=("No SharePod" if fleet is None else "No workload has or wants a GPU")
        + (f" in namespace {namespace}" if namespace else ""),
        notes=seen.notes,
    )


def all_gpus(scope: Scope) -> Page:
    """Return all GPUs, each with its number of tenants and its free share."""
    fleet = gpus(scope.kubectl)
    return Page(
        columns=[
            Column("NODE"),
            Column("GPU", right=True),
            Column("MODEL", grows=True),
            Column("POOL", wide=True),
            Column("TENANTS", right=True),
            Column("FREE", right=True),
            Column("MEMORY", right=True),
            Column("FREE-MEMORY", right=True),
            Column("UUID", wide=True),
            Column("WHY", grows=True),
        ],
        rows=[
            [
                gpu.node,
                str(gpu.index),
                gpu.model,
                gpu.pool,
                str(len(gpu.tenants)),
                fraction(0 if gpu.free is None else gpu.free.request_milli),
                size(gpu.memory),
                size(0 if gpu.free is None else gpu.free.memory),
                gpu.uuid,
                gpu.why,
            ]
            for gpu in fleet.gpus
        ],
        colours=[RED if gpu.why else "" for gpu in fleet.gpus],
        items=lambda: [_gpu_item(gpu) for gpu in fleet.gpus],
        names=[gpu.place for gpu in fleet.gpus],
        after=[f"{node}: {fault}" for node, fault in fleet.cordon_faults],
        notes=fleet.notes,
        empty="No node reports a GPU. Label a GPU node with sharepod.dev/pool=dedicated",
    )


def free(scope: Scope) -> Page:
    """Return the free shares by GPU model and node pool, with the largest share that fits on one GPU.

    For a user who may not list GPUNodes, these are the totals that the operator publishes.
    """
    notes: Sequence[str] = ()
    try:
        fleet = gpus(scope.kubectl)
    except ForbiddenError:
        found = published_free(scope.kubectl)
    else:
        found, notes = [_free_of(*group) for group in _by_model_and_pool(fleet.gpus)], fleet.notes
    titles = ("GPUS", "UNUSED", "FREE", "LARGEST-SHARE", "WITH-MEMORY")
    return Page(
        columns=[Column("MODEL", grows=True), Column("POOL"), *(Column(title, right=True) for title in titles)],
        rows=[
            [
                one.model,
                one.pool,
                str(one.gpus),
                str(one.unused),
                fraction(one.free_milli),
                fraction(one.largest.request_milli if one.largest else 0),
                size(one.largest.memory if one.largest else 0),
            ]
            for one in found
        ],
        items=lambda: [asdict(one) for one in found],
        names=once(one.model for one in found),
        empty="No node reports a GPU",
        notes=notes,
    )


def _by_model_and_pool(found: Iterable[Gpu]) -> list[tuple[str, str, list[Gpu]]]:
    groups: dict[tuple[str, str], list[Gpu]] = defaultdict(list)
    for gpu in found:
        groups[gpu.model, gpu.pool].append(gpu)
    return [(model, pool, members) for (model, pool), members in sorted(groups.items())]


def _free_of(model: str, pool: str, members: Sequence[Gpu]) -> FreeShares:
    room = [gpu.free for gpu in members if gpu.free is not None]
    return FreeShares(
        model=model,
        pool=pool,
        gpus=len(members),
        unused=sum(gpu.free is not None and not gpu.tenants for gpu in members),
        free_milli=sum(share.request_milli for share in room),
        largest=max(room, key=lambda share: (share.request_milli, share.memory or 0), default=None),
    )


def who(scope: Scope, place: str) -> Page:
    """Return the tenants of one GPU. `place`: NODE:INDEX, the GPU's UUID, or its beginning."""
    gpu = find(gpus(scope.kubectl).gpus, place)
    return Page(
        columns=[Column("NAMESPACE", grows=True), *WORKLOAD_COLUMNS],
        rows=[[tenant.namespace, *workload_cells(tenant)] for tenant in gpu.tenants],
        items=lambda: [asdict(tenant) for tenant in gpu.tenants],
        names=[f"{tenant.kind.lower()}/{tenant.name}" for tenant in gpu.tenants],
        before=[f"{gpu.place} {gpu.model} {gpu.uuid}", *([gpu.why] if gpu.why else [])],
        empty="The GPU has no tenants",
    )


def bill(scope: Scope, month: str | None) -> Page:
    """Return the GPU hours of namespaces in a month such as 2026-01. `month`: None: the last month with any GPU
    hours."""
    try:
        statements = scope.kubectl.items(path("gpustatements"))
    except NotFoundError:
        raise KubectlError("the cluster has no GPUStatements; install SharePod's CRDs") from None
    except ForbiddenError:
        raise ForbiddenError(
            "you may not list GPUStatements, which a ClusterRole such as that of examples/bill/bill.yaml allows; "
            "`kubectl sharepod budget` shows the budgets of your namespace"
        ) from None
    lines: list[tuple[str, str, str, Json]] = []
    for item in statements:
        namespace = text(item, "metadata", "name")
        if scope.namespace in (None, namespace):
            for one in rows(mapping(item.get("status")).get("months")):
                lines += [(text(one, "month"), namespace, text(of, "model"), of) for of in rows(one.get("models"))]
    wanted = month or max((line[0] for line in lines), default="")
    chosen = sorted((line for line in lines if line[0] == wanted), key=lambda line: line[:3])
    titles = ("HELD-HOURS", "BORROWED", "RESERVED-HOURS", "MEMORY-GIB-HOURS")
    return Page(
        columns=[
            *(Column(title, grows=title == "MODEL") for title in ("MONTH", "NAMESPACE", "MODEL")),
            *(Column(title, right=True) for title in titles),
        ],
        rows=[
            [
                *line[:3],
                *(hours(whole(line[3].get(key)) or 0) for key in _BILLED),
                f"{(whole(line[3].get('memoryMebibyteSeconds')) or 0) / 1024 / 3600:.2f}",
            ]
            for line in chosen
        ],
        items=lambda: [{"month": line[0], "namespace": line[1], **line[3]} for line in chosen],
        names=once(line[1] for line in chosen),
        empty=f"No GPU time is recorded{' in ' + wanted if wanted else ''}",
    )


def budget(scope: Scope) -> Page:
    """Return the budgets: amount, used and remaining part, and when each will be spent."""
    try:
        found = scope.kubectl.items(path("gpubudgets", scope.namespace))
    except NotFoundError:
        raise KubectlError("the cluster has no GPUBudgets; install SharePod's CRDs") from None
    lines: list[list[str]] = []
    for item in found:
        spec, status = mapping(item.get("spec")), mapping(item.get("status"))
        shown, left = mapping(status.get("shown")), whole(status.get("left"))
        spent = left == 0
        lines.append(
            [
                *([text(item, "metadata", "namespace")] if scope.namespace is None else []),
                text(item, "metadata", "name"),
                text(spec, "period") or "Month",
                text(shown, "amountHours") or "-",
                text(shown, "leftHours") or "-",
                f"{whole(status.get('percent')) or 0}%",
                text(status, "rate") or "-",
                text(status, "refillAt") if spent else text(status, "goneAt") or "-",
                text(spec, "whenSpent") or "Borrow",
            ]
        )
    titles = ("HOURS", "LEFT", "USED", "RATE")
    return Page(
        columns=[
            *_place(scope.namespace),
            Column("NAME", key=True),
            Column("PERIOD"),
            *(Column(title, right=True) for title in titles),
            Column("GONE-OR-REFILLED-AT"),
            Column("WHEN-SPENT"),
        ],
        rows=lines,
        items=lambda: [
            {"metadata": _named(item), "spec": item.get("spec"), "status": item.get("status")} for item in found
        ],
        names=[f"gpubudget/{text(item, 'metadata', 'name')}" for item in found],
        empty="No budget" + (f" in namespace {scope.namespace}" if scope.namespace else ""),
    )


def explain(reason: str | None) -> Page:
    """Return the meaning of a reason in conditions and findings. `reason`: None: all reasons."""
    known: dict[str, str] = reasons()
    if reason is None:
        return Page(
            columns=[Column("REASON"), Column("MEANING", grows=True)],
            rows=[[name, meaning] for name, meaning in sorted(known.items())],
            items=lambda: [{"reason": name, "meaning": meaning} for name, meaning in sorted(known.items())],
            names=sorted(known),
        )
    found = next((name for name in known if name.lower() == reason.lower()), None)
    if found is None:
        near = difflib.get_close_matches(reason, known, n=3, cutoff=0.5)
        advice = f"; did you mean {' or '.join(near)}?" if near else "; `kubectl sharepod explain` lists all"
        raise UsageError(f"no reason {reason!r} is known{advice}")
    return Page(
        before=[f"{found}: {known[found]}"], items=lambda: [{"reason": found, "meaning": known[found]}], names=[found]
    )


def reasons() -> dict[str, str]:
    """Return the meaning of each reason. The texts come from docs/reference.md."""
    from importlib.resources import files  # here, because most commands need no reasons

    found: dict[str, str] = json.loads(files(__package__).joinpath("reasons.json").read_text(encoding="utf-8"))
    return found


_BILLED = ("heldMilliseconds", "borrowedMilliseconds", "reservedMilliseconds")
WORKLOAD_COLUMNS = (
    Column("KIND"),
    Column("NAME", key=True),
    Column("STATE"),
    Column("NODE", grows=True),
    Column("GPU"),
    Column("REQUEST", right=True),
    Column("LIMIT", right=True),
    Column("USED", right=True),
    Column("PROGRESS", right=True),
    Column("MEMORY", right=True),
    Column("IN-USE", right=True),
    Column("WAITS", right=True),
    Column("WHY", wide=True),
)


def workload_cells(one: Workload) -> list[str]:
    """Return the cells of a workload for `WORKLOAD_COLUMNS`."""
    return [
        one.kind,
        one.name,
        one.state,
        one.node or "-",
        one.indexes or "-",
        fraction(one.share.request_milli),
        fraction(one.share.limit_milli),
        fraction(one.used_milli),
        fraction(one.progress_milli),
        size(one.share.memory),
        size(one.memory_used),
        duration(one.waiting_s),
        one.message,
    ]


def _place(namespace: str | None) -> list[Column]:
    return [Column("NAMESPACE", grows=True)] if namespace is None else []


_LEAST_OF_UUID = len("GPU-")
"""Number of characters with which every UUID begins. An argument that is not longer names no GPU, even if there is only
one GPU."""


def find(found: Iterable[Gpu], place: str) -> Gpu:
    """Return the GPU at a place: NODE:INDEX, or the beginning of a UUID. Raise `KubectlError` unless exactly one
    fits."""
    begins = place.lower() if len(place) > _LEAST_OF_UUID else None
    fitting = [gpu for gpu in found if gpu.place == place or (begins and gpu.uuid.lower().startswith(begins))]
    if len(fitting) == 1:
        return fitting[0]
    if fitting:
        raise KubectlError(f"{len(fitting)} GPUs begin with {place}; write more of the UUID")
    raise KubectlError(f"no GPU {place!r}; write NODE:INDEX or a UUID, as `kubectl sharepod gpus -o wide` prints them")


def _gpu_item(gpu: Gpu) -> dict[str, Any]:
    room = gpu.free
    return asdict(gpu) | {"free_milli": room.request_milli if room else 0, "free_memory": room.memory if room else 0}


def _named(item: Json) -> Json:
    return {"namespace": text(item, "metadata", "namespace"), "name": text(item, "metadata", "name")}


def once(names: Iterable[str]) -> list[str]:
    """Return the names that are not empty, each once."""
    return list(dict.fromkeys(filter(None, names)))


def counted(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"
