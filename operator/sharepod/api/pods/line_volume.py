"""Volume of a resource line: the parts that the webhook adds to a plain Pod with a line, in a cluster without claims.
Pure.

`manifests/plain-volume` installs the webhook. The policy `sharepod-tenant-label` refuses a Pod that has the tenant
label without these additions.

Guarantees:
- A Pod that has all additions stays unchanged, so the mutation is idempotent.
- Nothing in a Pod is removed or changed: additions come after existing entries.
- A container without a line sees no GPU, whatever its image sets.
- No content of a Pod causes an exception.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sharepod.api.dialects import FIELD_OF
from sharepod.api.gpunode import Mode
from sharepod.api.objects import (
    GPUS_ANNOTATION,
    LINE_LABEL,
    LINE_TENANT,
    NO_GPUS,
    SHARE_GATE,
    TENANT_LABEL,
    VOLUME_NAME,
)
from sharepod.api.resource_line import MILLI

from . import attached_volume

_LISTS = ("containers", "initContainers")
_LABELS = {LINE_LABEL: "true", TENANT_LABEL: LINE_TENANT}


def with_volume(pod: Mapping[str, Any], runtime_class: str) -> dict[str, Any]:
    """Return a merge patch that attaches the share of a Pod's line by a CSI volume, behind a scheduling gate. It is
    empty for a Pod without a line, or with all additions.

    `runtime_class`: RuntimeClass for Pods with GPUs; empty if the nodes' default runtime is NVIDIA's.
    """
    spec, metadata = _map(pod.get("spec")), _map(pod.get("metadata"))
    if not any(_asks(one) for name in _LISTS for one in _list(spec.get(name))):
        return {}
    annotations = _map(metadata.get("annotations"))
    hook = not _exclusive(annotations)
    lists = {name: [_attached(one, hook=hook) for one in _list(spec.get(name))] for name in _LISTS}
    changed: dict[str, Any] = {name: made for name, made in lists.items() if made != _list(spec.get(name))}
    for name, own in (("schedulingGates", {"name": SHARE_GATE}), ("volumes", attached_volume.volume())):
        known = _list(spec.get(name))
        if own["name"] not in _names(known):
            changed[name] = [*known, own]
    if runtime_class and not spec.get("runtimeClassName"):
        changed["runtimeClassName"] = runtime_class
    labels = _map(metadata.get("labels"))
    added: dict[str, Any] = {}
    if missing := {name: value for name, value in _LABELS.items() if labels.get(name) != value}:
        added["labels"] = missing
    if GPUS_ANNOTATION not in annotations:
        added["annotations"] = {GPUS_ANNOTATION: NO_GPUS}
    return {**({"metadata": added} if added else {}), **({"spec": changed} if changed else {})}


def _attached(container: Any, *, hook: bool) -> Any:
    """Return a container with its share if it has a line, else a container without GPU."""
    if not isinstance(container, Mapping):
        return container
    env, mounted = _list(container.get("env")), _list(container.get("volumeMounts"))
    named = _names(env)
    made: dict[str, Any] = {}
    if attached_volume.VISIBLE_DEVICES not in named:
        added = attached_volume.variables(named) if _asks(container) else [attached_volume.no_gpus()]
        made["env"] = [*env, *added]
    if _asks(container) and VOLUME_NAME not in _names(mounted):
        made["volumeMounts"] = [*mounted, *attached_volume.mounts(hook=hook)]
    return {**container, **made}


def _exclusive(annotations: Mapping[str, Any]) -> bool:
    """Return whether an annotation requests mode Exclusive, which needs no hook."""
    return any(FIELD_OF.get(name) == "mode" and value == Mode.EXCLUSIVE for name, value in annotations.items())


def _asks(container: Any) -> bool:
    return MILLI in _map(_map(_map(container).get("resources")).get("limits"))


def _names(items: list[Any]) -> list[Any]:
    return [_map(one).get("name") for one in items]


def _map(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _list(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) else []
