"""Pod of a SharePod. Pure: builds the Pod's manifest from a SharePod, then a patch from a Pod and an assignment.

The Pod is created behind a scheduling gate, before it has a share. The patch that opens the gate pins the Pod to its
node and names its GPUs.

Guarantees, for any SharePod:
- kube-scheduler ignores the Pod until its gate is open.
- The Pod is pinned to the assigned node by node affinity, so the scheduler still makes all its own checks.
- Each container and init container sees exactly the assigned GPUs, and has the tenant's directory. They are attached by
  the runtime class, a variable and a CSI volume, or by one ResourceClaim.
- Each container preloads the hook, unless the SharePod is Exclusive.
- If lines are in use, the first container has the resource line of the share, so that ResourceQuota and LimitRange
  count SharePods and plain Pods alike.
- The SharePod is the Pod's controller.
- A SharePod for which this is impossible is refused with `SpecError`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sharepod.api.dialects import asks_for_node, effective, is_dialect
from sharepod.api.gpunode import Mode
from sharepod.api.objects import (
    API_VERSION,
    CSI_DRIVER,
    GPUS_ANNOTATION,
    GROUP,
    JOB_TRACKING,
    NO_GPUS,
    PRELOAD_PATH,
    SHARE_CLAIM,
    SHARE_GATE,
    TAKEN_BACK,
    TENANT_LABEL,
    VOLUME_MOUNT_PATH,
    VOLUME_NAME,
)
from sharepod.api.resource_line import PREFIX, line_of
from sharepod.api.sharepod import KIND, ONE_POD, OWN_FIELDS, REPLICAS, GpuRequest, SpecError

from . import attached_volume
from .attached_volume import VISIBLE_DEVICES
from .copied_annotations import DEFAULT_ANNOTATIONS, is_copied

INJECTION_PATTERN = (
    r"^([^/]+[.])?cdi[.]k8s[.]io/|^((cdi-)?devices|mounts|cdi)[.](nri[.]io|noderesource[.]dev)(/|$)|"
    r"^(devices[.](crio|gke)[.]io|io[.]kubernetes[.]cri-o[.]Devices)(/|$)"
)
"""Pattern of annotations by which a container runtime or its plugins give a pod devices, or folders of its node,
without SharePod. They belong to CDI, to CRI-O, and to NRI's injectors, such as NVIDIA's toolkit
(`cdi-devices.noderesource.dev`) and GKE's."""

GPU_RESOURCE_PATTERN = (
    r"^nvidia[.]com/(gpu([.].*)?|mig-.*)$|^deviceclass[.]resource[.]kubernetes[.]io/(.*[.])?(gpu|mig)[.]nvidia[.]com$"
)
"""Pattern of extended resources that give GPUs without SharePod: of NVIDIA's device plugin (whole GPUs, replicas of
GPUs, MIG slices), and of its DRA driver's classes."""


def _loosely(path: str) -> str:
    """Return a regular expression for a path without its first slash, which also matches spellings such as `//` and
    `/./`."""
    return path[1:].replace(".", "[.]").replace("/", "/([.]?/)*")


RESERVED_MOUNT_PATTERN = (
    rf"(?s)^([.]?/)*((var/([.]?/)*)?{_loosely(VOLUME_MOUNT_PATH)}|{_loosely(PRELOAD_PATH)}|"
    r"proc|dev/([.]?/)*(fd|std(in|out|err)|core))(/.*)?$|^(.*/)?[.][.](/.*)?$"
)
"""Pattern of container paths that lead to the tenant's directory or the hook's file, as a kubelet and a runtime resolve
them. A relative path begins at the root, and `//` and `/./` are `/`. `..` may lead anywhere; so may the symbolic links
below /proc, and a runtime's links in /dev to them."""

LINE_IN_SHAREPOD = "is for plain Pods; remove it: spec.gpu of the SharePod sets the share"

NVIDIA_RUNTIME_PATTERN = r"^nvidia(-.*)?$"
"""Pattern of RuntimeClasses of NVIDIA's runtime. Under such a class, an image can also choose a container's GPUs."""

DEVICE_MOUNTS = "nvidia-container-devices"
"""Part of the mount paths that NVIDIA's runtime, if so configured, reads as names of GPUs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PodSettings:
    """Settings that the cluster's admin makes for all Pods of SharePods. An empty `runtime_class`: the nodes' default
    runtime is NVIDIA's."""

    runtime_class: str = "nvidia"
    tolerations: tuple[Mapping[str, Any], ...] = ({"key": "nvidia.com/gpu", "operator": "Exists"},)
    annotations: tuple[str, ...] = DEFAULT_ANNOTATIONS
    """Patterns of the annotations that are copied from a SharePod to its Pod."""


def requested_pod_spec(sharepod: Mapping[str, Any], settings: PodSettings) -> dict[str, Any]:
    """Return the PodSpec of a SharePod without a node. Placement searches a node that satisfies it.

    Fields that do not belong to a PodSpec are left out, the configured tolerations are added, and `nodeName` with a
    GPUID becomes required node affinity.
    """
    spec: dict[str, Any] = dict(
        sharepod.get("spec") or {}
    )  # so that each change below replaces a value, and none modifies an object of the SharePod
    for name in OWN_FIELDS:
        spec.pop(name, None)
    node_name = spec.pop("nodeName", None)
    if node_name and asks_for_node(sharepod):
        require_node(spec, node_name)
    tolerations = spec.get("tolerations") or []
    missing = [dict(toleration) for toleration in settings.tolerations if toleration not in tolerations]
    if tolerations or missing:
        spec["tolerations"] = [*tolerations, *missing]
    return spec


def build_pod(
    sharepod: Mapping[str, Any],
    settings: PodSettings,
    claim: str | None = None,
    *,
    line: bool = False,
    request: GpuRequest | None = None,
) -> dict[str, Any]:
    """Build the manifest of the Pod for `sharepod` (as the API server returned it), behind its scheduling gate.

    - `claim`: name of the ResourceClaim that attaches the GPUs; None: runtime class and CSI volume do.
    - `line`: True if nodes offer the resources of the line, so that a Pod with the line can be bound.
    - `request`: the SharePod's request, if the SharePod was already read and checked; None: read and check it here.

    Raises `SpecError` where the SharePod contradicts the Pod's needs. Examples are a runtime class of its own, GPUs
    from the device plugin, a volume or mount path with SharePod's name.
    """
    if request is None:
        request = effective(sharepod)
        check_pod_fields(sharepod, settings)
    spec = requested_pod_spec(sharepod, settings)
    gates = [gate for gate in spec.get("schedulingGates") or [] if gate.get("name") != SHARE_GATE]
    spec["schedulingGates"] = [{"name": SHARE_GATE}, *gates]
    if claim is not None:
        _attach_by_claim(spec, settings, claim)
    else:
        _attach_by_volume(spec, settings, hook=request.mode is not Mode.EXCLUSIVE)
    if line and spec.get("containers"):
        spec["containers"][0] = _with_line(spec["containers"][0], request)
    return {"apiVersion": "v1", "kind": "Pod", "metadata": _metadata(sharepod, settings), "spec": spec}


def _attach_by_volume(spec: dict[str, Any], settings: PodSettings, *, hook: bool) -> None:
    """Attach the GPUs by the runtime class, and the tenant's directory by a CSI volume. Changes `spec` in place."""
    if settings.runtime_class:
        spec["runtimeClassName"] = settings.runtime_class
    spec["volumes"] = [*(spec.get("volumes") or []), attached_volume.volume()]
    for field in ("initContainers", "containers"):
        if spec.get(field):
            spec[field] = [_with_gpu(container, hook=hook) for container in spec[field]]


def _attach_by_claim(spec: dict[str, Any], settings: PodSettings, claim: str) -> None:
    """Attach GPUs and the tenant's directory by a claim. Changes `spec` in place. Removes a RuntimeClass for GPUs from
    it, because the claim needs none and the cluster may not have it."""
    own = spec.get("runtimeClassName")
    if own == settings.runtime_class or re.match(NVIDIA_RUNTIME_PATTERN, str(own)):
        spec.pop("runtimeClassName", None)
    spec["resourceClaims"] = [*(spec.get("resourceClaims") or []), {"name": SHARE_CLAIM, "resourceClaimName": claim}]
    for field in ("initContainers", "containers"):
        if spec.get(field):
            spec[field] = [_with_claim(container) for container in spec[field]]


def open_gate(
    uid: str, gates: Sequence[str], affinity: Mapping[str, Any] | None, node: str, uuids: Sequence[str]
) -> list[dict[str, Any]]:
    """Return the JSON Patch that gives a Pod its share: pin it to `node`, name its GPUs, remove the gate.

    The API server refuses the patch if it is another Pod, if the gate is already open, or if the Pod's affinity is no
    longer `affinity`.

    Args:
        uid: UID of the Pod.
        gates: Names of the Pod's scheduling gates, in their order.
        affinity: `spec.affinity` of the Pod; None without one.
        node: Name of the node.
        uuids: UUIDs of the GPUs.
    """
    gate = f"/spec/schedulingGates/{list(gates).index(SHARE_GATE)}"
    spec: dict[str, Any] = {"affinity": affinity or {}}
    require_node(spec, node)
    return [
        {"op": "test", "path": "/metadata/uid", "value": uid},
        {"op": "test", "path": f"{gate}/name", "value": SHARE_GATE},
        {"op": "remove", "path": gate},
        {"op": "add", "path": "/spec/affinity", "value": spec["affinity"]},
        {"op": "add", "path": f"/metadata/annotations/{GPUS_ANNOTATION.replace('/', '~1')}", "value": ",".join(uuids)},
    ]


def mark_taken_back(uid: str, version: int, finalizers: Sequence[str]) -> list[dict[str, Any]]:
    """Return the JSON Patch that withdraws a Pod: once deleted, it stays until `let_go`, and no Job counts it, because
    it never ran. The API server refuses the patch for another version of the Pod. `finalizers`: the Pod's present
    finalizers."""
    kept = [finalizer for finalizer in finalizers if finalizer != JOB_TRACKING]
    return [
        {"op": "test", "path": "/metadata/uid", "value": uid},
        {"op": "test", "path": "/metadata/resourceVersion", "value": str(version)},
        {"op": "add", "path": "/metadata/finalizers", "value": [*kept, TAKEN_BACK]},
    ]


def let_go(uid: str, finalizers: Sequence[str], *, counts: bool) -> list[dict[str, Any]]:
    """Return the JSON Patch that undoes `mark_taken_back`. The API server refuses it if the finalizers have changed.

    `counts`: True if a Job must count the Pod again, because it runs.
    """
    kept = [finalizer for finalizer in finalizers if finalizer not in (TAKEN_BACK, JOB_TRACKING)]
    if counts:
        kept.append(JOB_TRACKING)
    return [
        {"op": "test", "path": "/metadata/uid", "value": uid},
        {"op": "test", "path": "/metadata/finalizers", "value": list(finalizers)},
        {"op": "replace", "path": "/metadata/finalizers", "value": kept},
    ]


def check_pod_fields(sharepod: Mapping[str, Any], settings: PodSettings) -> None:
    """Raise `SpecError` for fields that a Pod with shared GPUs cannot have.

    The admission policy refuses the same at apply, except for the runtime class, which it does not know.
    """
    for name in sharepod["metadata"].get("annotations") or {}:
        if re.match(INJECTION_PATTERN, name):
            raise SpecError(
                f"metadata.annotations[{name}]",
                "would give devices to the pod past SharePod; remove it and use spec.gpu",
            )
    spec = sharepod.get("spec") or {}
    if spec.get(REPLICAS, 1) != 1:
        raise SpecError(f"spec.{REPLICAS}", ONE_POD)
    own = spec.get("runtimeClassName")
    if own and settings.runtime_class and own != settings.runtime_class:
        raise SpecError(
            "spec.runtimeClassName",
            f"{own} would not attach the GPU; remove it (SharePods run with runtime class {settings.runtime_class})",
        )
    if spec.get("ephemeralContainers"):
        raise SpecError(
            "spec.ephemeralContainers", "cannot be set on a new pod; remove it and use kubectl debug once the pod runs"
        )
    for index, volume in enumerate(spec.get("volumes") or []):
        if volume.get("name") == VOLUME_NAME:
            raise SpecError(
                f"spec.volumes[{index}].name", f"{VOLUME_NAME} is the name of SharePod's own volume; choose another"
            )
        if (volume.get("csi") or {}).get("driver") == CSI_DRIVER:
            raise SpecError(
                f"spec.volumes[{index}].csi.driver",
                f"{CSI_DRIVER} is added to the pod automatically; remove this volume",
            )
    for index, entry in enumerate(spec.get("resourceClaims") or []):
        if entry.get("name") == SHARE_CLAIM:
            raise SpecError(
                f"spec.resourceClaims[{index}].name",
                f"{SHARE_CLAIM} is the name of SharePod's own claim; choose another",
            )
    for field in ("initContainers", "containers"):
        for index, container in enumerate(spec.get(field) or []):
            _check_container(f"spec.{field}[{index}]", container)


def _check_container(path: str, container: Mapping[str, Any]) -> None:
    for kind, amounts in (container.get("resources") or {}).items():
        if kind in ("limits", "requests"):
            for resource in amounts or {}:
                if re.match(GPU_RESOURCE_PATTERN, resource):
                    raise SpecError(
                        f"{path}.resources.{kind}[{resource}]",
                        "takes GPUs past SharePod; remove it and write spec.gpu.count, with request or mode: Exclusive",
                    )
                if resource.startswith(PREFIX):
                    raise SpecError(f"{path}.resources.{kind}[{resource}]", LINE_IN_SHAREPOD)
    taken = [
        (f"{path}.{field}[{index}].{at}", entry.get(at, ""))
        for field, at in (("volumeMounts", "mountPath"), ("volumeDevices", "devicePath"))
        for index, entry in enumerate(container.get(field) or [])
    ]
    taken.append((f"{path}.terminationMessagePath", container.get("terminationMessagePath") or ""))
    for field, mounted_at in taken:
        if re.match(RESERVED_MOUNT_PATTERN, mounted_at) or DEVICE_MOUNTS in mounted_at:
            raise SpecError(field, f"{mounted_at} leads to GPUs or to the hook; choose another path")


def require_node(spec: dict[str, Any], node: str) -> None:
    """Require the node `node` by node affinity. Changes `spec` in place.

    `nodeSelectorTerms` are alternatives, so the requirement is added to each of them. An empty term matches no node,
    and stays empty.
    """
    pin = {"key": "metadata.name", "operator": "In", "values": [node]}
    affinity = spec["affinity"] = dict(spec.get("affinity") or {})
    node_affinity = affinity["nodeAffinity"] = dict(affinity.get("nodeAffinity") or {})
    required = node_affinity.get("requiredDuringSchedulingIgnoredDuringExecution") or {}
    terms = required.get("nodeSelectorTerms") or []
    pinned = [
        {**term, "matchFields": [*(term.get("matchFields") or []), pin]} if _selects(term) else term for term in terms
    ]
    node_affinity["requiredDuringSchedulingIgnoredDuringExecution"] = {
        "nodeSelectorTerms": pinned if terms else [{"matchFields": [pin]}],
    }


def _selects(term: Mapping[str, Any]) -> bool:
    return bool(term.get("matchExpressions") or term.get("matchFields"))


def _with_gpu(container: Mapping[str, Any], *, hook: bool) -> dict[str, Any]:
    """Return the container with the GPUs and the tenant's volume. SharePod's variables come first, so that the user's
    variables may refer to them."""
    own = [variable for variable in container.get("env") or [] if variable.get("name") != VISIBLE_DEVICES]
    env = attached_volume.variables([variable.get("name") for variable in own])
    mounts = attached_volume.mounts(hook=hook)
    return {**container, "env": [*env, *own], "volumeMounts": [*(container.get("volumeMounts") or []), *mounts]}


def _with_line(container: Mapping[str, Any], gpu: GpuRequest) -> dict[str, Any]:
    resources = container.get("resources") or {}
    return {**container, "resources": {**resources, "limits": {**(resources.get("limits") or {}), **line_of(gpu)}}}


def _with_claim(container: Mapping[str, Any]) -> dict[str, Any]:
    """Return the container with the claim. NVIDIA_VISIBLE_DEVICES of the user is removed, because it would contradict
    the claim."""
    resources = container.get("resources") or {}
    made = {
        **container,
        "resources": {**resources, "claims": [*(resources.get("claims") or []), {"name": SHARE_CLAIM}]},
    }
    if "env" in container:
        made["env"] = [variable for variable in container["env"] or [] if variable.get("name") != VISIBLE_DEVICES]
    return made


def _metadata(sharepod: Mapping[str, Any], settings: PodSettings) -> dict[str, Any]:
    metadata = sharepod["metadata"]
    labels = {name: value for name, value in (metadata.get("labels") or {}).items() if _copied(name)}
    given = metadata.get("annotations") or {}
    annotations = {name: value for name, value in given.items() if is_copied(name, settings.annotations)}
    return {
        "name": metadata["name"],
        "namespace": metadata["namespace"],
        "labels": {**labels, TENANT_LABEL: metadata["uid"]},
        "annotations": {**annotations, GPUS_ANNOTATION: NO_GPUS},
        "ownerReferences": [
            {
                "apiVersion": API_VERSION,
                "kind": KIND,
                "name": metadata["name"],
                "uid": metadata["uid"],
                "controller": True,
                "blockOwnerDeletion": True,
            }
        ],
    }


def _copied(name: str) -> bool:
    return not (name.startswith(("kubectl.kubernetes.io/", f"{GROUP}/")) or is_dialect(name))
