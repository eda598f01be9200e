"""Invalid SharePod with the texts of its refusal, and manifest parts that several of these SharePods share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

CONTAINER: Mapping[str, Any] = {"name": "main", "image": "cuda", "command": ["sleep", "1"]}


def nested(levels: int) -> dict[str, Any]:
    """Return maps nested this many levels deep."""
    value: dict[str, Any] = {}
    for _ in range(levels):
        value = {"a": value}
    return value


@dataclass(frozen=True)
class Case:
    """Invalid SharePod. The refusal must contain `names`, the field, and `mend`, the remedy."""

    title: str
    names: str
    mend: str
    gpu: Mapping[str, Any] | None = None
    annotations: Mapping[str, str] = field(default_factory=dict)
    pod: Mapping[str, Any] = field(default_factory=dict)
    container: Mapping[str, Any] = field(default_factory=dict)

    def manifest(self, name: str = "malformed") -> dict[str, Any]:
        """Return the SharePod as a user would apply it."""
        metadata: dict[str, Any] = {"name": name, "namespace": "default"}
        if self.annotations:
            metadata["annotations"] = dict(self.annotations)
        spec: dict[str, Any] = {"containers": [{**CONTAINER, **self.container}], **self.pod}
        if self.gpu is not None:
            spec["gpu"] = dict(self.gpu)
        return {"apiVersion": "sharepod.dev/v1alpha1", "kind": "SharePod", "metadata": metadata, "spec": spec}


UUID = "GPU-0a1b2c3d-0000-0000-0000-000000000001"
SHARE = {"request": 0.4}
