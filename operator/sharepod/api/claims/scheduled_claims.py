"""Claims that kube-scheduler allocates: ResourceClaims of class `scheduler.sharepod.dev`, of nodes of pool `scheduler`.

A claim requests time, limit and memory by `capacity.requests`, with the names of class `sharepod.dev`. kube-scheduler
chooses the device and writes the allocated amounts into the result's `consumedCapacity`.

Guarantees:
- Any results become a `ScheduledShare` or a `SpecError`; no other exception is raised.
- A share equals the results, to the thousandth and the byte. Results with less than a share needs, or more than a row
  can have, are a `SpecError`.
- All requests beyond sizes (affinity, priority and so on) are refused, because kube-scheduler does not support them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sharepod.api.bounds import MAX_ITEMS, MAX_NAME, beyond
from sharepod.api.dialects import is_dialect
from sharepod.api.objects import DEVICE_CLASS, GROUP, MAX_GPUS, SCHEDULER_CLASS, SCHEDULER_DRIVER
from sharepod.api.sharepod import SpecError
from sharepod.api.units import WHOLE_GPU, Bytes, Milli, UnitError, parse_quantity, parse_whole

from .claims import CAPACITIES, LIMIT, MEMORY, TIME

HOLD_RESOURCE = "gpunodes"
"""Resource of the operator's entry in `status.reservedFor`: the GPUNode whose ledger has the claim's row."""

ANNOTATED = (
    f"is not for claims of class {SCHEDULER_CLASS}, which kube-scheduler allocates only by size; remove it, or use "
    f"class {DEVICE_CLASS} on nodes of another pool"
)
"""Message that refuses SharePod's annotations on a claim of this class."""
ADMIN_ACCESS = "goes past every share; leave it out"
SEVERAL = (
    f"has several requests of class {SCHEDULER_CLASS}; all GPUs of a claim have equal shares: write one request with "
    "count, or a claim for each share"
)

_RESULTS = "status.allocation.devices.results"


@dataclass(frozen=True, slots=True)
class ScheduledShare:
    """Share that kube-scheduler has allocated to a claim, of each of `devices`. `memory`: bytes."""

    node: str
    """Pool of the devices, which is the name of their node."""
    devices: tuple[str, ...]
    """Names of the devices."""
    request_milli: Milli
    limit_milli: Milli
    memory: Bytes


def is_scheduled(claim: Mapping[str, Any]) -> bool:
    """Return whether any request of a claim is for this class."""
    return any(asked.get("deviceClassName") == SCHEDULER_CLASS for _, asked in _asked(claim))


def is_hold(entry: Mapping[str, Any]) -> bool:
    """Return whether an entry of `status.reservedFor` is the operator's own."""
    return entry.get("apiGroup") == GROUP and entry.get("resource") == HOLD_RESOURCE


def hold_entry(node: str, uid: str) -> dict[str, str]:
    """Return the operator's entry for a claim with a row in a ledger. `uid`: of the GPUNode."""
    return {"apiGroup": GROUP, "name": node, "resource": HOLD_RESOURCE, "uid": uid}


def fault(claim: Mapping[str, Any]) -> SpecError | None:
    """Return the first part of a claim that kube-scheduler cannot allocate as intended. None if there is none."""
    if (why := beyond(claim)) is not None:
        return SpecError("spec", f"{why}; write a smaller claim")
    metadata = claim.get("metadata")
    annotations = metadata.get("annotations") if isinstance(metadata, Mapping) else None
    for name in sorted(annotations, key=str) if isinstance(annotations, Mapping) else ():
        if is_dialect(str(name)):
            return SpecError(f"metadata.annotations[{str(name)[:MAX_NAME]}]", ANNOTATED)
    of_class = [(number, asked) for number, asked in _asked(claim) if asked.get("deviceClassName") == SCHEDULER_CLASS]
    if any(asked.get("adminAccess") for _, asked in of_class):
        return SpecError("spec.devices.requests", f"adminAccess {ADMIN_ACCESS}")
    if len({number for number, _ in of_class}) > 1:
        return SpecError("spec.devices.requests", SEVERAL)
    return None


def share(results: Sequence[Mapping[str, Any]]) -> ScheduledShare | SpecError | None:
    """Return the share in the results of an allocation, or the fault in them. None if no result is of SharePod's
    driver."""
    mine = [result for result in results if result.get("driver") == SCHEDULER_DRIVER]
    if not mine:
        return None
    try:
        return _share(mine)
    except SpecError as error:
        return error


def _share(results: Sequence[Mapping[str, Any]]) -> ScheduledShare:
    if any(result.get("adminAccess") for result in results):
        raise SpecError(_RESULTS, f"adminAccess {ADMIN_ACCESS}")
    devices = tuple(str(result.get("device") or "")[:MAX_NAME] for result in results)
    if len(set(devices)) != len(devices):
        raise SpecError(_RESULTS, f"name one GPU twice: {SEVERAL}")
    if len(devices) > MAX_GPUS:
        raise SpecError(_RESULTS, f"name {len(devices)} GPUs; a node has {MAX_GPUS} at most")
    nodes = {str(result.get("pool") or "")[:MAX_NAME] for result in results}
    taken = {_taken(result) for result in results}
    if len(nodes) != 1 or len(taken) != 1:
        raise SpecError(_RESULTS, f"differ in node or size: {SEVERAL}")
    amounts = dict(taken.pop())
    time, limit, memory = amounts[TIME], amounts[LIMIT], amounts[MEMORY]
    if not 0 <= time <= limit <= WHOLE_GPU or limit == 0 or memory <= 0:
        text = f"consume {TIME} {time}, {LIMIT} {limit} and {MEMORY} {memory}; write {LIMIT} no less than {TIME}"
        raise SpecError(_RESULTS, text)
    return ScheduledShare(nodes.pop(), devices, Milli(time), Milli(limit), Bytes(memory))


def _taken(result: Mapping[str, Any]) -> tuple[tuple[str, int], ...]:
    """Return the consumed capacity of one result, as (name, amount)."""
    consumed = result.get("consumedCapacity")
    found: list[tuple[str, int]] = []
    for name in CAPACITIES:
        value = consumed.get(name) if isinstance(consumed, Mapping) else None
        if value is None:
            text = f"have no {name} in consumedCapacity: turn on the feature gate DRAConsumableCapacity everywhere"
            raise SpecError(_RESULTS, text)
        try:
            found.append((name, parse_quantity(value) if name == MEMORY else parse_whole(value)))
        except UnitError as error:
            raise SpecError(f"{_RESULTS}.consumedCapacity.{name}", str(error)) from None
    return tuple(found)


def _asked(claim: Mapping[str, Any]) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """Yield (index of the request in the spec, request) for all requests of a claim and their alternatives."""
    spec = claim.get("spec")
    devices = spec.get("devices") if isinstance(spec, Mapping) else None
    requests = devices.get("requests") if isinstance(devices, Mapping) else None
    for number, item in enumerate(requests[:MAX_ITEMS] if isinstance(requests, list) else ()):
        if isinstance(item, Mapping):
            several = item.get("firstAvailable")
            asked = [item.get("exactly"), *(several if isinstance(several, list) else ())]
            yield from ((number, one) for one in asked if isinstance(one, Mapping))
