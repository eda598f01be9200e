"""Admission policies for rules that a CRD cannot express: on containers, and on the object before the change. Pure.

They refuse at `kubectl apply` the same as `check_pod_fields` does later, and every change of an immutable field. Each
message names the field and the remedy. `request_policy` has the rules for annotations.
"""

from __future__ import annotations

from typing import Any

from sharepod.api.bounds import MAX_ITEMS
from sharepod.api.dialects import KEYS
from sharepod.api.objects import CSI_DRIVER, SHARE_CLAIM, VOLUME_NAME
from sharepod.api.pods.pod import (
    DEVICE_MOUNTS,
    GPU_RESOURCE_PATTERN,
    INJECTION_PATTERN,
    LINE_IN_SHAREPOD,
)
from sharepod.api.resource_line import PREFIX
from sharepod.api.sharepod import CHANGEABLE, MUTABLE, TTL

from .cel import Validation, policy, refuse, text, texts
from .hook_paths import is_reserved, taking

_AMOUNTS = ("limits", "requests")


def pod_fields_policy() -> list[dict[str, Any]]:
    """Return the policy that refuses fields that a Pod with shared GPUs cannot have: GPUs from elsewhere, and the name
    and mounts of SharePod's volume."""
    path, device = "'spec.containers[' + c.name + ']", f"k.matches('{INJECTION_PATTERN}')"

    plugin = f"r.matches('{GPU_RESOURCE_PATTERN}')"
    plugins = "takes GPUs past SharePod; remove it and write spec.gpu.count, with request or mode: Exclusive"

    def resources(kind: str, which: str, wrong: str) -> Validation:
        amounts = f"c.?resources.?{kind}.orValue({{}})"
        taken = f"{amounts}.exists(r, {which})"
        return refuse(
            f"!variables.containers.exists(c, {taken})",
            f"variables.containers.filter(c, {taken}).map(c, {path}.resources.{kind}[' + "
            f"{amounts}.filter(r, {which})[0] + ']: {wrong}')[0]",
        )

    taken = taking(lambda at: f"({at}.contains('{DEVICE_MOUNTS}') || {is_reserved(at)})")
    return policy(
        "sharepod-pod-fields",
        ["CREATE", "UPDATE"],
        [
            ("containers", "object.spec.containers + object.spec.?initContainers.orValue([])"),
            ("volumes", "object.spec.?volumes.orValue([])"),
            ("annotations", "object.metadata.?annotations.orValue({})"),
            (
                "devices",
                f"size(variables.annotations) > {MAX_ITEMS} ? [] : variables.annotations.filter(k, {device})",
            ),
        ],
        [
            refuse(
                "variables.devices.size() == 0",
                "'metadata.annotations[' + variables.devices[0] + ']: would give devices to the pod past SharePod; "
                "remove it and use spec.gpu'",
            ),
            resources("limits", plugin, plugins),
            resources("requests", plugin, plugins),
            resources("limits", f"r.startsWith({text(PREFIX)})", LINE_IN_SHAREPOD),
            resources("requests", f"r.startsWith({text(PREFIX)})", LINE_IN_SHAREPOD),
            refuse(
                f"!variables.volumes.exists(v, v.name == '{VOLUME_NAME}')",
                f"'spec.volumes: {VOLUME_NAME} is the name of the volume that SharePod adds; choose another'",
            ),
            refuse(
                f"!object.spec.?resourceClaims.orValue([]).exists(r, r.name == '{SHARE_CLAIM}')",
                f"'spec.resourceClaims: {SHARE_CLAIM} is the name of the claim that SharePod adds; choose another'",
            ),
            refuse(
                f"!variables.volumes.exists(v, v.?csi.?driver.orValue('') == '{CSI_DRIVER}')",
                "'spec.volumes[' + variables.volumes.filter(v, "
                f"v.?csi.?driver.orValue('') == '{CSI_DRIVER}')[0].name + ']: "
                f"{CSI_DRIVER} is added to the pod automatically; remove this volume'",
            ),
            *(
                refuse(
                    f"!variables.containers.exists(c, {wrong})",
                    f"variables.containers.filter(c, {wrong}).map(c, {path}{field} leads to GPUs or to the hook; "
                    "choose another path')[0]",
                )
                for wrong, field in taken
            ),
        ],
        suspect=_suspect(),
    )


SUSPECT = {
    "annotations": (
        "cdi.k8s.io/",
        ".nri.io",
        ".noderesource.dev",
        "devices.crio.io",
        "devices.gke.io",
        "cri-o.Devices",
    ),
    "resources": ("nvidia.com", PREFIX),
    "mounts": ("sharepod", "ld.so.preload", DEVICE_MOUNTS, "..", "proc", "fd", "std", "core"),
}
"""By kind: texts of which each annotation, resource or mount path that a rule refuses contains at least one. Searching
for them is cheaper than the rules' patterns, so it runs first."""


def _suspect() -> str:
    """Return a CEL condition that holds for each SharePod that names something of SharePod, of NVIDIA or of a device
    injector."""

    def suspect(kind: str, value: str) -> str:
        return " || ".join(f"{value}.contains({text(part)})" for part in SUSPECT[kind])

    annotations = "object.metadata.?annotations.orValue({})"
    amounts = [f"c.?resources.?{kind}.orValue({{}}).exists(r, {suspect('resources', 'r')})" for kind in _AMOUNTS]
    mounted = " || ".join(wrong for wrong, _field in taking(lambda at: f"({suspect('mounts', at)})"))
    return (
        f"(size({annotations}) <= {MAX_ITEMS} && {annotations}.exists(k, {suspect('annotations', 'k')})) || "
        f"(object.spec.containers + object.spec.?initContainers.orValue([])).exists(c, {' || '.join(amounts)} || "
        f"{mounted}) || object.spec.?volumes.orValue([]).exists(v, v.name == '{VOLUME_NAME}' || "
        f"v.?csi.?driver.orValue('') == '{CSI_DRIVER}') || "
        f"object.spec.?resourceClaims.orValue([]).exists(r, r.name == '{SHARE_CLAIM}')"
    )


def immutability_policy() -> list[dict[str, Any]]:
    """Return the policy that refuses every change of a SharePod's spec and request, except of the fields in
    `CHANGEABLE`."""
    fixed = [name for key in KEYS if key.field not in MUTABLE for name in key.annotations]
    differs = (
        "{new}.filter(k, {which} && !(k in {old} && {new}[k] == {old}[k])) + {old}.filter(k, {which} && !(k in {new}))"
    )
    gpu, old_gpu = "dyn(object.spec.?gpu.orValue({}))", "dyn(oldObject.spec.?gpu.orValue({}))"
    return policy(
        "sharepod-immutable",
        ["UPDATE"],
        [
            (
                "fields",
                differs.format(new="dyn(object.spec)", old="dyn(oldObject.spec)", which=f"!(k in ['gpu', '{TTL}'])"),
            ),
            ("gpu", differs.format(new=gpu, old=old_gpu, which=f"!(k in {texts(MUTABLE)})")),
            ("annotations", "object.metadata.?annotations.orValue({})"),
            ("oldAnnotations", "oldObject.metadata.?annotations.orValue({})"),
            (
                "present",
                differs.format(
                    new="variables.annotations", old="variables.oldAnnotations", which=f"k in {texts(fixed)}"
                ),
            ),
        ],
        [
            refuse(
                "has(object.spec.gpu) == has(oldObject.spec.gpu)",
                "'spec.gpu: cannot be added to or taken from a SharePod that exists; delete it and create it again'",
            ),
            refuse(
                "variables.fields.size() == 0",
                "'spec.' + variables.fields[0] + ': cannot be changed (only "
                f"{CHANGEABLE} can); delete the SharePod and create it again'",
            ),
            refuse(
                "variables.gpu.size() == 0",
                "'spec.gpu.' + variables.gpu[0] + ': cannot be changed (only "
                f"{CHANGEABLE} can); delete the SharePod and create it again'",
            ),
            refuse(
                "variables.present.size() == 0",
                "'metadata.annotations[' + variables.present[0] + ']: cannot be changed (only "
                f"{CHANGEABLE} can); delete the SharePod and create it again'",
            ),
        ],
    )
