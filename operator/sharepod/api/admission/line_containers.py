"""Validations against containers that evade their Pod's resource line: other GPUs, a part of its claim, a mount over
the hook. Pure.

The validations belong to the policies on Pods with a resource line, and use the variables `containers` and `asking` of
these policies.
"""

from __future__ import annotations

from sharepod.api.objects import LINE_CLAIM
from sharepod.api.pods.pod import GPU_RESOURCE_PATTERN
from sharepod.api.resource_line import MILLI

from .cel import Validation, refuse, text
from .hook_paths import is_reserved, taking

_MADE = "request.operation != 'CREATE' || variables.asking.size() == 0"
"""CEL expression that is true if nothing needs a check: the Pod has no line, or this is an update, which can change
only images."""


def past_the_line(own_volume: str | None = None) -> list[Validation]:
    """Return validations that refuse GPUs from elsewhere, a part of the line's claim, and a mount over the hook, in any
    container.

    `own_volume`: name of the volume that mounts the hook; None if a claim mounts it.
    """
    plugin = f"r.matches('{GPU_RESOURCE_PATTERN}')"
    limits = "c.?resources.?limits.orValue({})"
    part = f"r.name == {text(LINE_CLAIM)} && r.?request.orValue('') != ''"
    return [
        _none(
            f"{limits}.exists(r, {plugin})",
            f".resources.limits[' + {limits}.filter(r, {plugin})[0] + ']: takes GPUs past SharePod; remove it, or "
            f"write {MILLI} as n times 1000 for whole GPUs'",
        ),
        _none(
            f"c.?resources.?claims.orValue([]).exists(r, {part})",
            f".resources.claims[{LINE_CLAIM}].request: the claim of a line is had as a whole; remove it'",
        ),
        *(
            _none(wrong, f"{field} leads to where SharePod mounts its hook; choose another path'")
            for wrong, field in taking(is_reserved, but_of=own_volume)
        ),
    ]


def _none(wrong: str, message: str) -> Validation:
    """Return a validation that refuses a Pod if `wrong` holds for a container `c`. `message`: the text after its
    name."""
    listed = "(object.spec.containers.exists(o, o.name == c.name) ? 'containers[' : 'initContainers[')"
    return refuse(
        f"{_MADE} || !variables.containers.exists(c, {wrong})",
        f"variables.containers.filter(c, {wrong}).map(c, 'spec.' + {listed} + c.name + ']{message})[0]",
    )
