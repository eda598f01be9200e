"""Facts that every object has, and readers for values of any content, as users and servers write them.

Guarantees:
- No function raises for user input, unless its docstring states that.
- Reading takes bounded time, whatever the size of the object.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

from sharepod.api.bounds import MAX_NAME, quoted
from sharepod.api.resource_line import RESOURCES
from sharepod.controller.state.reading.compact import once_in_all
from sharepod.controller.state.reading.fitting import MAX_LIST, POD
from sharepod.controller.state.reading.timestamps import seconds
from sharepod.placement.state.needs import NeedsError, pod_resources
from sharepod.placement.state.types import Resources

Json = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectFacts:
    """Facts that every object has. `version`: its resourceVersion as a number."""

    uid: str
    name: str
    namespace: str
    version: int


def texts_of(value: object) -> tuple[str, ...]:
    """Return the strings among the first `MAX_LIST` entries of a list. Empty for any other value."""
    return tuple(item for item in islice(value, MAX_LIST) if isinstance(item, str)) if isinstance(value, list) else ()


def common(metadata: Json) -> dict[str, Any]:
    """Return the fields of `ObjectFacts`. Raises `KeyError` for metadata without uid or name."""
    return {
        "uid": once_in_all(str(metadata["uid"])),
        "name": once_in_all(str(metadata["name"])),
        "namespace": once_in_all(str(metadata.get("namespace") or "")),
        "version": whole_number(metadata.get("resourceVersion")),
    }


def started(metadata: Json, status: Json) -> str:
    """Return the time at which the kubelet accepted a Pod, as RFC 3339 text. Empty before.

    The result is never earlier than the Pod's creation. Among equal tenants the youngest is preempted first, and a user
    who can write the status could otherwise set an early start.
    """
    taken, created = str(status.get("startTime") or ""), str(metadata.get("creationTimestamp") or "")
    taken_s, created_s = seconds(taken), seconds(created)
    return created if taken_s is not None and created_s is not None and taken_s < created_s else taken


def text_of(value: object) -> str:
    """Return a string; empty for None. Raises `TypeError` for any other value."""
    if value is not None and not isinstance(value, str):
        raise TypeError(f"{quoted(value)} is not a text")
    return value or ""


def whole_number(value: object) -> int:
    """Return an integer, also from its text form. 0 for any other value."""
    try:
        return int(str(value)[:20])
    except ValueError:
        return 0


def grace_s(spec: Json) -> int:
    """Return the grace period in a Pod's spec, in seconds."""
    period = spec.get("terminationGracePeriodSeconds")
    return 30 if period is None else whole_number(period)


def controller_of(metadata: Json, kind: str | None) -> str | None:
    """Return the uid of an object's controller, if it has one of kind `kind` (None: any kind). None otherwise."""
    for owner in maps(metadata.get("ownerReferences")):
        if owner.get("controller") and kind in (None, owner.get("kind")):
            return str(owner.get("uid") or "")[:MAX_NAME]
    return None


def mapping(value: object) -> Json:
    """Return a value that is a map. An empty map for any other value."""
    # dict is tested first, because testing for an abstract class takes longer
    return value if isinstance(value, (dict, Mapping)) else {}


def maps(value: object, most: int = MAX_LIST) -> Iterator[Json]:
    """Yield the maps among the first `most` entries of a list. Nothing for any other value."""
    if isinstance(value, list | tuple):
        yield from [item for item in value[:most] if isinstance(item, (dict, Mapping))]


def without_line(resources: Resources) -> Resources:
    """Return resources without the resource line, which the ledger counts."""
    extended = resources.extended
    if not any(name in extended for name in RESOURCES):
        return resources
    others = {name: amount for name, amount in extended.items() if name not in RESOURCES}
    return replace(resources, extended=others)


def resources_of(spec: Json) -> Resources:
    """Return the sum of a Pod's resource requests, as far as they are readable. The API server accepts amounts, and
    numbers of containers, that no node can run."""
    try:
        return pod_resources(spec)
    except Exception:  # noqa: S110 - it is read again, container by container
        pass
    try:
        return pod_resources((POD({"spec": spec}) or {}).get("spec") or {})
    except NeedsError:
        return Resources()
