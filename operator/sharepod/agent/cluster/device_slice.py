"""ResourceSlice of a node of pool `scheduler`: its GPUs as devices of which kube-scheduler allocates shares. Pure.

Guarantees:
- A device is named by its GPU's UUID, as in a claim that the operator allocates.
- kube-scheduler can allocate no more of a GPU than the ledger accepts: time, memory, and number of rows.
- A claim without a size gets a whole GPU, never less.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sharepod.api.claims.claims import LIMIT, MEMORY, TIME
from sharepod.api.gpunode import Gpu
from sharepod.api.objects import MAX_TENANTS, SCHEDULER_DRIVER, device_name
from sharepod.api.units import WHOLE_GPU
from sharepod.kube import Json

API_VERSION = "resource.k8s.io/v1"
KIND = "ResourceSlice"
TENANTS = "tenants"
"""Name of the capacity that bounds the number of shares of a GPU. Each share consumes one, so ledgers keep within
`MAX_TENANTS`."""

_MIB = 1 << 20
_TEXT_MAX = 64
"""Most characters of an attribute's text; the API server accepts no longer one."""


def slice_name(node: str) -> str:
    """Return the name of the ResourceSlice of a node."""
    return f"{SCHEDULER_DRIVER}-{node}"


def slice_names(node: str, node_uid: str | None) -> list[str]:
    """Return the names of a node's ResourceSlice: the preferred name, and a name to use if that is taken.

    The second name of a node is never the preferred name of another.
    """
    return [slice_name(node), *([f"{SCHEDULER_DRIVER}.{node_uid}-{node}"] if node_uid else [])]


def is_of_node(found: Mapping[str, Any], node: str) -> bool:
    """Return whether a ResourceSlice belongs to a node."""
    spec = found["spec"]
    return bool(spec["driver"] == SCHEDULER_DRIVER and spec.get("nodeName") == node)


def slice_spec(node: str, gpus: Sequence[Gpu], generation: int) -> Json:
    """Return the spec of a node's ResourceSlice. kube-scheduler uses only the pool's highest `generation`."""
    rows = MAX_TENANTS // max(1, len(gpus))
    return {
        "driver": SCHEDULER_DRIVER,
        "nodeName": node,
        "pool": {"name": node, "generation": generation, "resourceSliceCount": 1},
        "devices": [_device(gpu, rows) for gpu in gpus if gpu.memory >= _MIB],
    }


def slice_body(node: str, node_uid: str, spec: Json, name: str | None = None) -> Json:
    """Return the ResourceSlice to create, owned by the Node. `name`: None for the preferred name."""
    owner = {"apiVersion": "v1", "kind": "Node", "name": node, "uid": node_uid}
    return {
        "apiVersion": API_VERSION,
        "kind": KIND,
        "metadata": {"name": name or slice_name(node), "ownerReferences": [owner]},
        "spec": spec,
    }


def says_the_same(one: Mapping[str, object], other: Mapping[str, object]) -> bool:
    """Return whether two specs are equal, apart from `pool`, which has the generation."""
    return {**one, "pool": None} == {**other, "pool": None}


def shares_devices(spec: Mapping[str, object]) -> bool:
    """Return True if the API server has stored the fields that let several claims share a device.

    Without the feature gate the API server drops these fields. kube-scheduler would then allocate the whole GPU to the
    first claim, whatever its size.
    """
    devices = spec.get("devices")
    return all(
        isinstance(device, Mapping) and device.get("allowMultipleAllocations") is True
        for device in (devices if isinstance(devices, list) else ())
    )


def _device(gpu: Gpu, rows: int) -> Json:
    memory = gpu.memory // _MIB
    return {
        "name": device_name(gpu.uuid),
        "allowMultipleAllocations": True,
        "attributes": {
            "uuid": {"string": gpu.uuid[:_TEXT_MAX]},
            "model": {"string": gpu.model[:_TEXT_MAX]},
        },
        "capacity": {
            TIME: _capacity(str(WHOLE_GPU), least="0", most=str(WHOLE_GPU), step="1", default=str(WHOLE_GPU)),
            # A capacity that is never used up: it only passes the claim's limit on to the ledger.
            LIMIT: _capacity(
                str(WHOLE_GPU * MAX_TENANTS), least="1", most=str(WHOLE_GPU), step="1", default=str(WHOLE_GPU)
            ),
            MEMORY: _capacity(f"{memory}Mi", least="1Mi", most=f"{memory}Mi", step="1Mi", default=f"{memory}Mi"),
            TENANTS: _capacity(str(rows), least="1", most="1", step=None, default="1"),
        },
    }


def _capacity(value: str, *, least: str, most: str, step: str | None, default: str) -> Json:
    chosen = {"min": least, "max": most, **({"step": step} if step is not None else {})}
    return {"value": value, "requestPolicy": {"default": default, "validRange": chosen}}
