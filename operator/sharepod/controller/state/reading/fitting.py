"""Fitting: reduces an object to the fields that facts use, each with the expected type and within its limits.

Guarantees:
- The result has the shape that was asked for, whatever the object contains. Parts that do not fit are left out.
- The work is bounded by the shape, however large the object is.
- An object that fits loses only fields that the shape does not name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import islice
from typing import Any, TypeAlias

from sharepod.api.bounds import MAX_CONTAINERS, MAX_ITEMS, MAX_MESSAGE
from sharepod.api.units import UnitError, parse_cpu, parse_quantity

Shape: TypeAlias = Callable[[Any], Any]
"""Returns the part of a value that fits the shape. None if no part fits."""

MAX_LIST = MAX_CONTAINERS
"""Number of entries of a list that are read: containers, their statuses, conditions, terms."""


def text(value: Any) -> str | None:
    """Fit a string: cut it off at `MAX_MESSAGE` characters."""
    return value[:MAX_MESSAGE] if isinstance(value, str) else None


def flag(value: Any) -> bool | None:
    """Fit a boolean."""
    return value if isinstance(value, bool) else None


def whole(value: Any) -> int | None:
    """Fit an integer of 64 bits."""
    is_whole = isinstance(value, int) and not isinstance(value, bool) and -(1 << 63) <= value < 1 << 63
    return value if is_whole else None


def texts(value: Any) -> dict[str, str]:
    """Fit a map of strings to strings. Other entries are dropped."""
    if not isinstance(value, Mapping):
        return {}
    some = islice(value.items(), MAX_ITEMS)
    return {key: entry for key, entry in some if isinstance(key, str) and isinstance(entry, str)}


def cpu_and_memory(value: Any) -> dict[str, Any]:
    """Return the CPU and memory of a map of resource amounts, each only if it is readable."""
    found: dict[str, Any] = {}
    for name, parse in (("cpu", parse_cpu), ("memory", parse_quantity)):
        try:
            if isinstance(value, Mapping) and name in value:
                parse(value[name])
                found[name] = value[name]
        except UnitError:
            continue
    return found


def fields(**shapes: Shape) -> Shape:
    """Return the shape of a map with these fields. Other fields are dropped."""

    def fit(value: Any) -> dict[str, Any] | None:
        if not isinstance(value, Mapping):
            return None
        found = {name: shape(value[name]) for name, shape in shapes.items() if name in value}
        return {name: item for name, item in found.items() if item is not None}

    return fit


def listed(shape: Shape) -> Shape:
    """Return the shape of a list: its first `MAX_LIST` entries that fit."""

    def fit(value: Any) -> list[Any] | None:
        if not isinstance(value, list | tuple):
            return None
        return [item for item in map(shape, islice(value, MAX_LIST)) if item is not None]

    return fit


_RESOURCES = fields(requests=cpu_and_memory, limits=cpu_and_memory)
_CONTAINERS = listed(fields(name=text, restartPolicy=text, resources=_RESOURCES))
_REQUIREMENTS = listed(fields(key=text, operator=text, values=listed(text)))
_TERMS = fields(
    nodeSelectorTerms=listed(fields(matchFields=_REQUIREMENTS, matchExpressions=_REQUIREMENTS)),
)
_STATE = fields(
    waiting=fields(reason=text, message=text),
    terminated=fields(reason=text, message=text, exitCode=whole, finishedAt=text),
)
_STATUSES = listed(fields(name=text, state=_STATE, restartCount=whole))
CONDITIONS: Shape = listed(fields(type=text, status=text, reason=text, message=text))

METADATA: Shape = fields(
    uid=text,
    name=text,
    namespace=text,
    resourceVersion=text,
    generation=whole,
    creationTimestamp=text,
    deletionTimestamp=text,
    deletionGracePeriodSeconds=whole,
    finalizers=listed(text),
    labels=texts,
    annotations=texts,
    ownerReferences=listed(fields(kind=text, uid=text, name=text, controller=flag)),
)

POD: Shape = fields(
    metadata=METADATA,
    spec=fields(
        nodeName=text,
        restartPolicy=text,
        schedulerName=text,
        schedulingGates=listed(fields(name=text)),
        priority=whole,
        preemptionPolicy=text,
        terminationGracePeriodSeconds=whole,
        nodeSelector=texts,
        resourceClaims=listed(fields(name=text, resourceClaimName=text)),
        tolerations=listed(fields(key=text, operator=text, value=text, effect=text, tolerationSeconds=whole)),
        affinity=fields(nodeAffinity=fields(requiredDuringSchedulingIgnoredDuringExecution=_TERMS)),
        containers=_CONTAINERS,
        initContainers=_CONTAINERS,
        resources=_RESOURCES,
        overhead=cpu_and_memory,
    ),
    status=fields(
        phase=text,
        reason=text,
        message=text,
        startTime=text,
        podIP=text,
        conditions=CONDITIONS,
        initContainerStatuses=_STATUSES,
        containerStatuses=_STATUSES,
    ),
)
"""Shape of a Pod: the fields from which its facts are read."""
