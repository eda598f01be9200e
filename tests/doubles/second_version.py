"""Second version of SharePod and GPUNode, `v1test`: stands for the version that the API will have one day, or has had.

Beside `v1alpha1`, the hub, each kind has a field of another name, one that is two fields in the other version, and one
field that only one of the two versions knows.

| v1alpha1 | v1test |
|---|---|
| SharePod `spec.gpu.request` | `spec.gpu.guaranteed` |
| SharePod `spec.gpu.memory: 4Gi` | `spec.gpu.memoryAmount: 4`, `spec.gpu.memoryUnit: Gi` |
| SharePod `spec.gpu.latency` | none |
| none | SharePod `spec.gpu.team` |
| GPUNode `spec.tenants[].requestMilli` | `spec.tenants[].guaranteedMilli` |
| GPUNode `spec.tenants[].namespace`, `podName` | `spec.tenants[].pod: NAMESPACE/NAME` |
| GPUNode `spec.tenants[].latency` | none |
| none | GPUNode `spec.tenants[].rank` |
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from sharepod.api.units import UnitError, parse_quantity
from sharepod.api.versions.kind_versions import VERSIONS, KindVersions, Version

Json = dict[str, Any]

NAME = "v1test"
API_VERSION = f"sharepod.dev/{NAME}"

_QUANTITY = re.compile(r"(0|[1-9][0-9]{0,15})(Ki|Mi|Gi|Ti|)")


def kinds(*, stored: str = "v1alpha1", hub_served: bool = True, served: bool = True) -> dict[str, KindVersions]:
    """SharePod and GPUNode with both versions, other kinds as they are."""
    further = {
        "SharePod": Version(
            name=NAME,
            to_hub=_sharepod_to_hub,
            from_hub=_sharepod_from_hub,
            definition=_sharepod_definition,
            served=served,
        ),
        "GPUNode": Version(
            name=NAME,
            to_hub=_gpunode_to_hub,
            from_hub=_gpunode_from_hub,
            definition=_gpunode_definition,
            served=served,
        ),
    }
    return {
        kind: replace(versions, further=(further[kind],), stored=stored, hub_served=hub_served)
        if kind in further
        else versions
        for kind, versions in VERSIONS.items()
    }


def _gpu(body: Json) -> Iterator[Json]:
    spec = body.get("spec")
    gpu = spec.get("gpu") if isinstance(spec, dict) else None
    if isinstance(gpu, dict):
        yield gpu


def _rows(body: Json) -> Iterator[Json]:
    spec = body.get("spec")
    rows = spec.get("tenants") if isinstance(spec, dict) else None
    yield from (row for row in (rows if isinstance(rows, list) else []) if isinstance(row, dict))


def _rename(fields: Json, old: str, new: str) -> None:
    """Rename a field; one that has the new name already is not of this version."""
    fields.pop(new, None)
    if old in fields:
        fields[new] = fields.pop(old)


def _sharepod_from_hub(body: Json) -> Json:
    for gpu in _gpu(body):
        _rename(gpu, "request", "guaranteed")
        for other in ("latency", "team", "memoryAmount", "memoryUnit"):
            gpu.pop(other, None)
        memory = gpu.pop("memory", None)
        try:
            found = _QUANTITY.fullmatch(memory) if isinstance(memory, str) else None
            if found is not None:
                gpu |= {"memoryAmount": int(found[1]), "memoryUnit": found[2]}
            elif isinstance(memory, int | str) and not isinstance(memory, bool):
                gpu |= {"memoryAmount": int(parse_quantity(memory)), "memoryUnit": ""}
        except UnitError:
            pass  # v1test cannot say it: it is kept
        gpu.setdefault("memoryUnit", "")
    return body


def _sharepod_to_hub(body: Json) -> Json:
    for gpu in _gpu(body):
        _rename(gpu, "guaranteed", "request")
        for other in ("latency", "team", "memory"):
            gpu.pop(other, None)
        amount, unit = gpu.pop("memoryAmount", None), gpu.pop("memoryUnit", "")
        if isinstance(amount, int) and not isinstance(amount, bool):
            memory = f"{amount}{unit}"
            if _QUANTITY.fullmatch(memory):
                gpu["memory"] = memory
        gpu["latency"] = "Normal"
    return body


def _gpunode_from_hub(body: Json) -> Json:
    for row in _rows(body):
        _rename(row, "requestMilli", "guaranteedMilli")
        for other in ("latency", "rank", "pod"):
            row.pop(other, None)
        namespace, pod = row.pop("namespace", None), row.pop("podName", "")
        if isinstance(namespace, str) and isinstance(pod, str):
            row["pod"] = f"{namespace}/{pod}"
    return body


def _gpunode_to_hub(body: Json) -> Json:
    for row in _rows(body):
        _rename(row, "guaranteedMilli", "requestMilli")
        for other in ("latency", "rank", "namespace", "podName"):
            row.pop(other, None)
        pod = row.pop("pod", None)
        if isinstance(pod, str) and "/" in pod:
            row["namespace"], _slash, row["podName"] = pod.partition("/")
    return body


def _sharepod_definition(entry: Json) -> Json:
    spec = entry["schema"]["openAPIV3Schema"]["properties"]["spec"]
    spec.pop("x-kubernetes-validations", None)
    gpu = spec["properties"]["gpu"]
    gpu.pop("x-kubernetes-validations", None)
    fields = gpu["properties"]
    _rename(fields, "request", "guaranteed")
    del fields["memory"], fields["latency"]
    fields |= {
        "memoryAmount": {"type": "integer", "format": "int64", "minimum": 1, "maximum": 1 << 50},
        "memoryUnit": {"type": "string", "enum": ["Ki", "Mi", "Gi", "Ti", ""], "default": ""},
        "team": {"type": "string", "maxLength": 63},
    }
    return entry


def _gpunode_definition(entry: Json) -> Json:
    row = entry["schema"]["openAPIV3Schema"]["properties"]["spec"]["properties"]["tenants"]["items"]
    row.pop("x-kubernetes-validations", None)
    fields = row["properties"]
    _rename(fields, "requestMilli", "guaranteedMilli")
    del fields["namespace"], fields["podName"], fields["latency"]
    fields |= {
        "pod": {"type": "string", "maxLength": 320},
        "rank": {"type": "integer", "format": "int32", "minimum": 0, "maximum": 9},
    }
    renamed = {"requestMilli": "guaranteedMilli", "namespace": "pod"}
    row["required"] = [renamed.get(name, name) for name in row["required"]]
    return entry
