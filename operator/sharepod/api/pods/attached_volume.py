"""Attachment of a share by a CSI volume: what a Pod and its containers must contain for it. Pure.

The operator adds these parts to the Pods of SharePods. In a cluster without claims, admission adds them to plain Pods
with a resource line.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from sharepod.api.objects import (
    CSI_DRIVER,
    GPUS_ANNOTATION,
    NO_GPUS,
    PRELOAD_FILE,
    PRELOAD_PATH,
    VOLUME_MOUNT_PATH,
    VOLUME_NAME,
)

VISIBLE_DEVICES = "NVIDIA_VISIBLE_DEVICES"
DRIVER_CAPABILITIES = "NVIDIA_DRIVER_CAPABILITIES"
DEFAULT_CAPABILITIES = "compute,utility"
GPUS_FIELD = f"metadata.annotations['{GPUS_ANNOTATION}']"
"""Field of the Pod from which a container's variable takes the GPUs when the container starts."""


def volume() -> dict[str, Any]:
    """Return the entry of the Pod's volumes."""
    return {"name": VOLUME_NAME, "csi": {"driver": CSI_DRIVER, "readOnly": True}}


def mounts(*, hook: bool) -> list[dict[str, Any]]:
    """Return the mounts of a container with a share. `hook`: True if it preloads the hook."""
    found = [{"name": VOLUME_NAME, "mountPath": VOLUME_MOUNT_PATH, "readOnly": True}]
    if hook:
        found.append({"name": VOLUME_NAME, "mountPath": PRELOAD_PATH, "subPath": PRELOAD_FILE, "readOnly": True})
    return found


def variables(named: Iterable[str]) -> list[dict[str, Any]]:
    """Return the environment variables by which NVIDIA's runtime attaches the GPUs. `named`: variables of the
    container, of which the driver capabilities take precedence."""
    found: list[dict[str, Any]] = [{"name": VISIBLE_DEVICES, "valueFrom": {"fieldRef": {"fieldPath": GPUS_FIELD}}}]
    if DRIVER_CAPABILITIES not in named:
        found.append({"name": DRIVER_CAPABILITIES, "value": DEFAULT_CAPABILITIES})
    return found


def no_gpus() -> dict[str, Any]:
    """Return the variable by which NVIDIA's runtime attaches no GPU to a container, whatever its image sets."""
    return {"name": VISIBLE_DEVICES, "value": NO_GPUS}
