"""Update rules of ResourceClaims: changes that the API server refuses, and fields that it drops. Pure.

Guarantees, as of Kubernetes 1.36:
- The spec never changes. An allocation is added and removed as a whole.
- A claim is reserved only while it is allocated.
- `status.devices` has entries only of allocated devices; entries of other devices are dropped.
"""

from __future__ import annotations

from typing import Any, TypeAlias

from .errors import invalid

Json: TypeAlias = dict[str, Any]


def stored(before: Json | None, after: Json) -> Json:
    """Return the claim as the API server stores it. Raises `Refused` (422)."""
    name = after["metadata"]["name"]
    if before is not None and before.get("spec") != after.get("spec"):
        raise invalid(f'ResourceClaim.resource.k8s.io "{name}" is invalid: spec: Invalid value: field is immutable')
    status = {key: value for key, value in (after.get("status") or {}).items() if value is not None}
    was = ((before or {}).get("status") or {}).get("allocation")
    now = status.get("allocation")
    if was is not None and now is not None and was != now:
        raise invalid(f'ResourceClaim "{name}" is invalid: status.allocation: Invalid value: field is immutable')
    if status.get("reservedFor") and now is None:
        raise invalid(f'ResourceClaim "{name}" is invalid: status.reservedFor: Forbidden: must be allocated')
    known, allocated = _devices(was), _devices(now)
    kept = [entry for entry in status.get("devices") or () if _device(entry) not in known - allocated]
    if foreign := [entry for entry in kept if _device(entry) not in allocated]:
        raise invalid(f'ResourceClaim "{name}" is invalid: status.devices: Invalid value: {foreign[0]["device"]}')
    status.pop("devices", None)
    return {**after, "status": {**status, **({"devices": kept} if kept else {})}}


def _devices(allocation: Json | None) -> set[tuple[str, str, str]]:
    return {_device(result) for result in ((allocation or {}).get("devices") or {}).get("results") or ()}


def _device(entry: Json) -> tuple[str, str, str]:
    return entry["driver"], entry["pool"], entry["device"]
