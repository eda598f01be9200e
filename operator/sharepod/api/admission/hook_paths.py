"""Refusal of container paths by which a Pod would mount something over the tenant's directory or the hook's file. Pure.

A Pod chooses the path of three kinds of mounts: volumes, block devices and termination messages.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sharepod.api.objects import CSI_DRIVER, VOLUME_NAME
from sharepod.api.pods.pod import RESERVED_MOUNT_PATTERN

from .cel import in_force, refuse, text

_LISTS = {"volumeMounts": "mountPath", "volumeDevices": "devicePath"}
TERMINATION = "terminationMessagePath"


def is_reserved(path: str) -> str:
    """Return a CEL condition: whether a path leads to a mount of SharePod."""
    return f"{path}.matches('{RESERVED_MOUNT_PATTERN}')"


def taking(reserved: Callable[[str], str], *, but_of: str | None = None) -> list[tuple[str, str]]:
    """Return, for each kind of path, a CEL condition and a part of the message. The condition is true if the container
    `c` has such a reserved path. The message names field and path, as CEL within a string.

    Args:
        reserved: Returns the CEL condition that a path is reserved.
        but_of: Name of a volume whose mounts are allowed.
    """
    found = []
    for field, path in _LISTS.items():
        other = f"m.name != {text(but_of)} && " if but_of is not None and field == "volumeMounts" else ""
        taken = f"{other}{reserved(f'm.{path}')}"
        entries = f"c.?{field}.orValue([])"
        found.append((f"{entries}.exists(m, {taken})", f".{field}: ' + {entries}.filter(m, {taken})[0].{path} + '"))
    ended = f"c.?{TERMINATION}.orValue('')"
    return [*found, (reserved(ended), f".{TERMINATION}: ' + {ended} + '")]


def hook_paths_policy() -> list[dict[str, Any]]:
    """Return the policy that refuses such container paths, in Pods with claims or with SharePod's volume, from any
    user."""
    rule = {"apiGroups": [""], "apiVersions": ["v1"], "operations": ["CREATE"], "resources": ["pods"]}
    ours = f"object.spec.?volumes.orValue([]).exists(v, v.?csi.?driver.orValue('') == '{CSI_DRIVER}')"
    return in_force(
        "sharepod-hook-paths",
        rule,
        {"may-have-a-share": f"object.spec.?resourceClaims.orValue([]).size() > 0 || {ours}"},
        [
            refuse(
                f"!variables.containers.exists(c, {wrong})",
                f"variables.containers.filter(c, {wrong}).map(c, (object.spec.containers.exists(o, o.name == c.name) ? "
                f"'spec.containers[' : 'spec.initContainers[') + c.name + ']{field} leads to "
                "where SharePod mounts its hook; choose another path')[0]",
            )
            for wrong, field in taking(is_reserved, but_of=VOLUME_NAME)
        ],
        [("containers", "object.spec.containers + object.spec.?initContainers.orValue([])")],
    )
