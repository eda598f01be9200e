"""Content of the browser page, as the JSON that the page's script draws.

Guarantees:
- Figures and texts equal the output of `top`, `gpus` and `who`, because they have the same source.
- GPUs are included only if the user may list GPUNodes, waiting SharePods only from the namespaces in scope.
- A figure of the last hour is left out if neither an object nor an earlier read contains it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from datetime import datetime
from statistics import fmean

from kubectl_sharepod.commands import WORKLOAD_COLUMNS, top_of, workload_cells
from kubectl_sharepod.kubectl import Json
from kubectl_sharepod.output import duration, fraction, size
from kubectl_sharepod.reading import Seen
from kubectl_sharepod.views import Fleet, Gpu, Workload

HOUR_S = 3600
_COUNTERS_EVERY_S = 60
"""Seconds between two samples of the counters of GPU time. Agents report these about once a minute, so more frequent
samples would be equal."""
_LEAST_S = 60
"""Shortest time in seconds for which a mean of the last hour is shown."""
_POINTS = 360
"""Largest number of points of the curve, one every 10 s. A new point replaces the oldest."""


class History:
    """Figures of the last hour: of all GPUs from the reads so far, of each workload from its counter of GPU time."""

    def __init__(self, every_s: float) -> None:
        self._every_s = max(every_s, HOUR_S / _POINTS)
        self._points: deque[tuple[float, int, int, int]] = deque()
        self._counters: deque[tuple[float, Mapping[str, int]]] = deque()

    def add(self, at: float, found: Sequence[Workload], fleet: Fleet | None) -> None:
        """Add the objects of one read. `at`: time of the read in seconds since 1970."""
        if not self._points or at - self._points[-1][0] >= self._every_s:
            tenants = _tenants(found) if fleet is None else fleet.workloads
            asked = sum(_each(one) * one.share.request_milli for one in tenants)
            used = sum(_each(one) * (one.used_milli or 0) for one in tenants)
            self._points.append((at, asked, used, sum(one.waiting_s is not None for one in found)))
        if not self._counters or at - self._counters[-1][0] >= _COUNTERS_EVERY_S:
            every = (*found, *(() if fleet is None else fleet.workloads))
            self._counters.append((at, {one.uid: one.held_s for one in every if one.held_s is not None}))
        while self._points[0][0] < at - HOUR_S:
            self._points.popleft()
        while self._counters[0][0] < at - HOUR_S:
            self._counters.popleft()

    def share(self, one: Workload, at: float) -> str:
        """Return the part of the last hour for which a workload held each of its GPUs, and the time for which this is
        known, as text such as `0.4 (25m)`. `-` if it is not known."""
        if one.held_s is None:
            return "-"
        since, before = _seconds(one.counted_since), 0
        if since is None or since < at - HOUR_S:
            known = ((then, held[one.uid]) for then, held in self._counters if one.uid in held)
            since, before = next(known, (at, 0))
        length = at - since
        if length < _LEAST_S or one.held_s < before:
            return "-"
        part = (one.held_s - before) / length / _each(one)
        return f"{fraction(round(1000 * min(1.0, part)))} ({duration(round(length))})"

    def curve(self) -> Json:
        """Return the points of the last hour, each (time, requested thousandths of GPUs, used thousandths, number of
        waiting workloads), and the mean of the used thousandths as text."""
        return {
            "points": [list(point) for point in self._points],
            "mean": fraction(round(fmean(point[2] for point in self._points))) if self._points else "-",
        }


def content(seen: Seen, history: History, moment: datetime, namespace: str | None) -> Json:
    """Return the content for one read, which must have been added to `history` already."""
    at, titles = moment.timestamp(), [column.title for column in WORKLOAD_COLUMNS]
    found, fleet = seen.found, seen.fleet
    table = top_of(seen, namespace)
    waiting = sorted((one for one in found if one.waiting_s is not None), key=lambda one: -(one.waiting_s or 0))
    return {
        "at": at,
        "summary": list(table.before),
        "notes": [*table.notes, *(f"{node}: {fault}" for node, fault in (fleet.cordon_faults if fleet else ()))],
        "hidden": fleet is None,
        "columns": ["NAMESPACE", *titles[:-1], "LAST-HOUR", titles[-1]],
        "waiting": [
            {
                "who": f"{one.namespace}/{'' if one.kind == 'SharePod' else f'{one.kind.lower()}/'}{one.name}",
                "asks": fraction(one.share.request_milli),
                "memory": size(one.share.memory),
                "waits": duration(one.waiting_s),
                "why": one.message or one.state,
            }
            for one in waiting
        ],
        "gpus": [] if fleet is None else [_gpu(gpu, history, at) for gpu in fleet.gpus],
        "workloads": [_tenant(one, history, at) for one in _tenants(found)] if fleet is None else [],
        "curve": history.curve(),
    }


def _gpu(gpu: Gpu, history: History, at: float) -> Json:
    room = gpu.free
    return {
        "uuid": gpu.uuid,
        "node": gpu.node,
        "index": gpu.index,
        "model": gpu.model,
        "pool": gpu.pool,
        "why": gpu.why,
        "memory": size(gpu.memory),
        "free": fraction(room.request_milli) if room else "0",
        "freeMemory": size(room.memory) if room else "0Mi",
        "tenants": [_tenant(one, history, at) for one in gpu.tenants],
    }


def _tenant(one: Workload, history: History, at: float) -> Json:
    *cells, why = workload_cells(one)
    return {
        "namespace": one.namespace,
        "name": one.name,
        "asked": one.share.request_milli,
        "got": one.used_milli,
        "cells": [one.namespace, *cells, history.share(one, at), why],
    }


def _tenants(found: Sequence[Workload]) -> list[Workload]:
    """Return the workloads with a share, that is, neither waiting nor ended."""
    return [one for one in found if one.waiting_s is None and not one.ended]


def _each(one: Workload) -> int:
    """Return the number of GPUs of a workload, at least 1."""
    return max(1, len(one.gpus))


def _seconds(time: str) -> float | None:
    try:
        return datetime.fromisoformat(time).timestamp()
    except ValueError:
        return None
