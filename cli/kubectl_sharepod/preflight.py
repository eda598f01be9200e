"""`preflight`: checks whether SharePod can be installed in a cluster. The command only reads, and needs nothing of
SharePod in the cluster.

If the user has no right to make a check, the result is a warning that names the missing right.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from enum import StrEnum
from functools import partial

from kubectl_sharepod.kubectl import ForbiddenError, Json, Kubectl, NotFoundError, at_once
from kubectl_sharepod.output import GREEN, RED, YELLOW, Column, Page
from kubectl_sharepod.views import mapping, rows, text

POOLS = ("dedicated", "device-plugin", "scheduler")
OLDEST, CLAIMS, LINES = (1, 30), (1, 34), (1, 36)
"""Oldest Kubernetes versions for SharePods, for claims, and for resource lines of plain Pods, which need a policy."""
_POOL = "sharepod.dev/pool"
_WHOLE = re.compile(r"nvidia[.]com/(gpu([.].*)?|mig-.*)")
_INJECTING = re.compile(
    r"([^/]+[.])?cdi[.]k8s[.]io/|((cdi-)?devices|mounts|cdi)[.](nri[.]io|noderesource[.]dev)(/|$)|"
    r"(devices[.](crio|gke)[.]io|io[.]kubernetes[.]cri-o[.]Devices)(/|$)"
)
"""Annotations through which a container runtime injects devices, as in the policy sharepod-gpus-past-sharepod."""
_KINDS = {
    "Pod": "/api/v1/pods",
    "Deployment": "/apis/apps/v1/deployments",
    "DaemonSet": "/apis/apps/v1/daemonsets",
    "StatefulSet": "/apis/apps/v1/statefulsets",
    "Job": "/apis/batch/v1/jobs",
    "CronJob": "/apis/batch/v1/cronjobs",
}
_ARCHITECTURES = ("amd64", "arm64")
_NAMED = 5
"""Largest number of objects that a finding names."""


class Verdict(StrEnum):
    """Verdict of a check."""

    OK = "ok"
    WARNING = "warning"
    FAILED = "failed"


@dataclass(frozen=True)
class Finding:
    """Result of one check. `detail`: facts and, unless they are ok, advice."""

    check: str
    verdict: Verdict
    detail: str


def preflight(kubectl: Kubectl) -> Page:
    """Return the findings of all checks. The exit status is 1 if any check failed."""
    checks: list[Callable[[Kubectl], list[Finding]]] = [_version, _runtime, _nodes, _others, _workloads]
    found = [one for some in at_once(*(_guarded(check, kubectl) for check in checks)) for one in some]
    colours = {Verdict.OK: GREEN, Verdict.WARNING: YELLOW, Verdict.FAILED: RED}
    return Page(
        columns=[Column("CHECK"), Column("VERDICT"), Column("DETAIL")],
        rows=[[one.check, one.verdict, one.detail] for one in found],
        colours=[colours[one.verdict] for one in found],
        items=lambda: [asdict(one) for one in found],
        names=[one.check for one in found if one.verdict is not Verdict.OK],
        status=int(any(one.verdict is Verdict.FAILED for one in found)),
    )


def refused_by(pod: Json, metadata: Json) -> str:
    """Return why the policy sharepod-gpus-past-sharepod would refuse a PodSpec. Empty if the policy would accept it.
    `metadata`: metadata of the same Pod or template."""
    containers = [*rows(pod.get("containers")), *rows(pod.get("initContainers"))]
    limits = [mapping(mapping(one.get("resources")).get("limits")) for one in containers]
    whole = any(_WHOLE.fullmatch(name) and str(amount) != "0" for one in limits for name, amount in one.items())
    if text(pod, "runtimeClassName").startswith("nvidia") and not whole:
        return f"runtimeClassName {text(pod, 'runtimeClassName')} without nvidia.com/gpu"
    for name in mapping(metadata.get("annotations")):
        if _INJECTING.match(name) and not (whole and name.startswith("devices.gke.io")):
            return f"annotation {name}"
    for container in containers:
        for variable in rows(container.get("env")):
            seen = "valueFrom" in variable or text(variable, "value") not in ("", "void", "none")
            if text(variable, "name") == "NVIDIA_VISIBLE_DEVICES" and seen and not whole:
                return f"NVIDIA_VISIBLE_DEVICES in container {text(container, 'name')}"
        if any("nvidia-container-devices" in text(mount, "mountPath") for mount in rows(container.get("volumeMounts"))):
            return f"mount of nvidia-container-devices in container {text(container, 'name')}"
    return ""


def _guarded(check: Callable[[Kubectl], list[Finding]], kubectl: Kubectl) -> Callable[[], list[Finding]]:
    def guarded() -> list[Finding]:
        try:
            return check(kubectl)
        except ForbiddenError as error:
            return [Finding(check.__name__.strip("_"), Verdict.WARNING, f"not checked: {error}")]

    return guarded


def _version(kubectl: Kubectl) -> list[Finding]:
    answer = kubectl.get("/version")
    numbers = re.match(r"v(\d+)\.(\d+)", text(answer, "gitVersion"))
    version = (int(numbers[1]), int(numbers[2])) if numbers else (0, 0)
    shown = text(answer, "gitVersion")
    if version < OLDEST:
        return [Finding("version", Verdict.FAILED, f"Kubernetes {shown}; SharePod needs 1.30 or newer")]
    found = [Finding("version", Verdict.OK, f"Kubernetes {shown}")]
    try:
        kubectl.get("/apis/resource.k8s.io/v1")
        served = True
    except NotFoundError:
        served = False
    if version < CLAIMS or not served:
        detail = "the API server does not serve resource.k8s.io/v1: leave out manifests/claims; plain Pods use "
        found.append(Finding("claims", Verdict.WARNING, detail + "manifests/plain-volume"))
    elif version < LINES:
        detail = "turn on the feature gate DRAConsumableCapacity of API server and scheduler before manifests/claims; "
        found.append(Finding("claims", Verdict.WARNING, detail + "plain Pods use manifests/plain-webhook"))
    else:
        found.append(Finding("claims", Verdict.OK, "manifests/claims and manifests/plain can be applied"))
    return found


def _runtime(kubectl: Kubectl) -> list[Finding]:
    try:
        handler = text(kubectl.get("/apis/node.k8s.io/v1/runtimeclasses/nvidia"), "handler")
    except NotFoundError:
        detail = "there is no RuntimeClass nvidia: install NVIDIA's container toolkit on the GPU nodes, and create it"
        return [Finding("runtime", Verdict.FAILED, detail)]
    return [Finding("runtime", Verdict.OK, f"RuntimeClass nvidia, handler {handler}")]


def _nodes(kubectl: Kubectl) -> list[Finding]:
    found: list[Finding] = []
    gpu_nodes = 0
    for node in kubectl.items("/api/v1/nodes"):
        name, labels = text(node, "metadata", "name"), mapping(mapping(node.get("metadata")).get("labels"))
        status = mapping(node.get("status"))
        info = mapping(status.get("nodeInfo"))
        pool = text(labels, _POOL)
        plugin = str(mapping(status.get("allocatable")).get("nvidia.com/gpu", "0")) != "0"
        if not (pool or plugin or text(labels, "nvidia.com/gpu.present")):
            continue
        gpu_nodes += 1
        problems = []
        if _POOL in labels and pool not in POOLS:
            problems.append(f"label {_POOL}={pool} is unknown: use {', '.join(POOLS)}")
        if plugin and pool in ("dedicated", "scheduler"):
            problems.append(f"NVIDIA's device plugin offers its GPUs: use {_POOL}=device-plugin, or remove the plugin")
        if plugin and not pool:
            problems.append(f"NVIDIA's device plugin offers its GPUs: label it {_POOL}=device-plugin to share them")
        if text(info, "architecture") not in _ARCHITECTURES:
            problems.append(f"architecture {text(info, 'architecture')}: use amd64 or arm64")
        verdict = Verdict.WARNING if problems else Verdict.OK
        runtime = text(info, "containerRuntimeVersion")
        detail = "; ".join(problems) or f"{text(info, 'kubeletVersion')}, {runtime}, {text(info, 'osImage')}"
        found.append(Finding(f"node {name}", verdict, detail))
    if not gpu_nodes:
        detail = f"no node has GPUs by label or device plugin: label GPU nodes {_POOL}=dedicated after the installation"
        found.append(Finding("nodes", Verdict.WARNING, detail))
    return found


def _others(kubectl: Kubectl) -> list[Finding]:
    """Return findings about other software that allocates GPUs through DeviceClasses."""
    try:
        classes = [text(one, "metadata", "name") for one in kubectl.items("/apis/resource.k8s.io/v1/deviceclasses")]
    except NotFoundError:
        classes = []
    foreign = [name for name in classes if "nvidia.com" in name]
    if not foreign:
        return [Finding("others", Verdict.OK, "no DeviceClass of NVIDIA's DRA driver")]
    detail = f"DeviceClass {', '.join(foreign)}: keep NVIDIA's DRA driver off nodes with the label {_POOL}"
    return [Finding("others", Verdict.WARNING, detail)]


def _workloads(kubectl: Kubectl) -> list[Finding]:
    """Return findings about Pods and templates that SharePod's policies would refuse."""
    free = {"kube-system", "sharepod-system"}
    for one in kubectl.items("/api/v1/namespaces"):
        if mapping(mapping(one.get("metadata")).get("labels")).get("sharepod.dev/system") == "true":
            free.add(text(one, "metadata", "name"))
    lists = at_once(*(partial(kubectl.items, path) for path in _KINDS.values()))
    by_namespace: dict[str, list[str]] = {}
    for kind, item in ((kind, item) for kind, items in zip(_KINDS, lists, strict=True) for item in items):
        namespace = text(item, "metadata", "namespace")
        owned = kind in ("Pod", "Job") and rows(mapping(item.get("metadata")).get("ownerReferences"))
        if namespace in free or owned:
            continue
        for metadata, spec in _pod_specs(kind, item):
            if reason := refused_by(spec, metadata):
                by_namespace.setdefault(namespace, []).append(f"{kind} {text(item, 'metadata', 'name')} ({reason})")
    if not by_namespace:
        return [Finding("workloads", Verdict.OK, "no Pod or template that the policies refuse")]
    return [
        Finding(
            f"namespace {namespace}",
            Verdict.WARNING,
            f"the policies would refuse {'; '.join(names[:_NAMED])}{_more(len(names))}: request nvidia.com/gpu or a "
            "share, or label the namespace sharepod.dev/system=true",
        )
        for namespace, names in sorted(by_namespace.items())
    ]


def _pod_specs(kind: str, item: Json) -> Iterator[tuple[Json, Json]]:
    """Yield (metadata, PodSpec) of a Pod, or of a workload's template."""
    spec = mapping(item.get("spec"))
    if kind == "CronJob":
        spec = mapping(mapping(spec.get("jobTemplate")).get("spec"))
    template = item if kind == "Pod" else mapping(spec.get("template"))
    yield mapping(template.get("metadata")), mapping(template.get("spec"))


def _more(count: int) -> str:
    return f" and {count - _NAMED} more" if count > _NAMED else ""
