"""`cordon`, `uncordon` and `drain` of one GPU.

Guarantees:
- If two users change GPUs of one node at the same time, both changes are kept.
- `drain` evicts only Pods that may be moved, and obeys their PodDisruptionBudgets. It names each tenant that stays.
"""

from __future__ import annotations

from kubectl_sharepod.commands import find
from kubectl_sharepod.kubectl import ConflictError, Json, Kubectl, KubectlError, path
from kubectl_sharepod.output import Column, Page
from kubectl_sharepod.reading import gpus
from kubectl_sharepod.views import CORDONED, Gpu, Workload, cordoned_of, mapping, rows, text

_TRIES = 5
"""Number of writes after which a conflict is reported. A retry usually succeeds, because agents write the status of a
GPUNode at most once a second."""
_MOVABLE = "sharepod.dev/gpu-movable"
_CLAIMS = "/apis/resource.k8s.io/v1"
_CORE = "/api/v1"


def cordon(kubectl: Kubectl, place: str, *, undo: bool = False) -> Page:
    """Exclude a GPU from new tenants. `undo`: True: admit new tenants again. Raise `KubectlError`."""
    gpu = find(gpus(kubectl).gpus, place)
    _write(kubectl, gpu, undo=undo)
    count = len(gpu.tenants)
    advice = f"; `kubectl sharepod drain {gpu.place}` evicts tenants that may be moved"
    stay = "" if undo or not count else f"; {count} tenant{' stays' if count == 1 else 's stay'}{advice}"
    return Page(
        before=[f"gpu {gpu.place} ({gpu.uuid}) {'uncordoned' if undo else f'cordoned{stay}'}"],
        items=lambda: [{"gpu": gpu.uuid, "place": gpu.place, "cordoned": not undo}],
        names=[gpu.place],
    )


def drain(kubectl: Kubectl, place: str) -> Page:
    """Cordon a GPU, and evict the Pods of its tenants that may be moved. The exit status is 1 if a tenant stays. Raise
    `KubectlError`."""
    gpu = find(gpus(kubectl).gpus, place)
    _write(kubectl, gpu, undo=False)
    lines: list[list[str]] = []
    for tenant in gpu.tenants:
        try:
            pod = _movable_pod(kubectl, tenant)
            if isinstance(pod, str):
                kubectl.evict(tenant.namespace, pod)
                answer = "evicted"
            else:
                answer = "stays: it may not be moved (movable: true, or the annotation sharepod.dev/gpu-movable)"
        except KubectlError as error:
            answer = f"stays: {error}"
        lines.append([tenant.namespace, tenant.kind, tenant.name, answer])
    return Page(
        before=[f"gpu {gpu.place} ({gpu.uuid}) cordoned"],
        columns=[
            Column("NAMESPACE", grows=True),
            Column("KIND"),
            Column("NAME", grows=True),
            Column("ANSWER", grows=True),
        ],
        rows=lines,
        items=lambda: [dict(zip(("namespace", "kind", "name", "answer"), line, strict=True)) for line in lines],
        names=[f"{line[1].lower()}/{line[2]}" for line in lines],
        empty="no tenant is on it",
        status=1 if any(line[3] != "evicted" for line in lines) else 0,
    )


def _write(kubectl: Kubectl, gpu: Gpu, *, undo: bool) -> None:
    """Add the GPU to, or remove it from, the annotation of its GPUNode. Retry if the GPUNode has changed since the
    read."""
    for attempt in range(_TRIES):
        gpunode = kubectl.get(path("gpunodes", name=gpu.node))
        others = [each for each in cordoned_of(gpunode) if each.lower() not in (gpu.uuid.lower(), str(gpu.index))]
        listed = others if undo else [*others, gpu.uuid]
        version = text(gpunode, "metadata", "resourceVersion")
        annotations = {CORDONED: ",".join(listed) or None}
        try:
            kubectl.merge(
                "gpunodes.sharepod.dev",
                "default",
                gpu.node,
                {"metadata": {"resourceVersion": version, "annotations": annotations}},
            )
        except ConflictError:
            if attempt + 1 == _TRIES:
                raise
        else:
            return


def may_move(movable: bool | None, restart_policy: str, request_milli: int) -> bool:
    """Return whether a SharePod may be moved. The operator has the same rule (`movers_seen.most_above`)."""
    if restart_policy == "Never" or movable is False:
        return False
    return movable is True or (request_milli == 0 and restart_policy == "Always")


def _movable_pod(kubectl: Kubectl, tenant: Workload) -> str | None:
    """Return the name of a tenant's Pod; None if the tenant may not be moved. Raise `KubectlError`."""
    if tenant.kind == "SharePod":
        item = kubectl.get(path("sharepods", tenant.namespace, tenant.name))
        spec = mapping(item.get("spec"))
        movable = True if _says_movable(item) else mapping(spec.get("gpu")).get("movable")
        policy = text(spec, "restartPolicy") or "Always"
        return tenant.name if may_move(movable, policy, tenant.share.request_milli) else None
    name = tenant.name
    if tenant.kind == "Claim":
        claim = kubectl.get(path("resourceclaims", tenant.namespace, tenant.name, group=_CLAIMS))
        users = [text(user, "name") for user in rows(mapping(claim.get("status")).get("reservedFor"))]
        if not _says_movable(claim) or len(users) != 1:
            return None
        name = users[0]
    pod = kubectl.get(path("pods", tenant.namespace, name, group=_CORE))
    owned = any(owner.get("controller") is True for owner in rows(mapping(pod.get("metadata")).get("ownerReferences")))
    return name if owned and (tenant.kind == "Claim" or _says_movable(pod)) else None


def _says_movable(item: Json) -> bool:
    return text(mapping(mapping(item.get("metadata")).get("annotations")), _MOVABLE) == "true"
