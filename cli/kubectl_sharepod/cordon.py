"""`cordon`, `uncordon` and `drain` of one GPU.

Guarantees:
- If two users change GPUs of one node at the same time, both changes are kept.
- `drain` evicts only Pods that may be moved and have room on other GPUs, and obeys their PodDisruptionBudgets. It names
  each tenant that stays. It does not compare labels, taints and other resources of nodes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from kubectl_sharepod.commands import find
from kubectl_sharepod.kubectl import ConflictError, Json, Kubectl, KubectlError, path
from kubectl_sharepod.output import Column, Page
from kubectl_sharepod.reading import gpus
from kubectl_sharepod.views import CORDONED, Gpu, Workload, cordoned_of, mapping, quantity, rows, text, texts
from kubectl_sharepod.wanted import Wanted
from kubectl_sharepod.why import group_of, obstacle

_TRIES = 5
"""Number of writes after which a conflict is reported. A retry usually succeeds, because agents write the status of a
GPUNode at most once a second."""
_MOVABLE = "sharepod.dev/gpu-movable"
_SCHEDULER = "scheduler"
_CLAIMS = "/apis/resource.k8s.io/v1"
_CORE = "/api/v1"


def cordon(kubectl: Kubectl, place: str, *, undo: bool = False) -> Page:
    """Exclude a GPU from new tenants. `undo`: True: admit new tenants again. Raise `KubectlError`."""
    gpu = find(gpus(kubectl).gpus, place)
    _write(kubectl, gpu, undo=undo)
    count = len(gpu.tenants)
    advice = f"; `kubectl sharepod drain {gpu.place}` evicts tenants that may be moved and have room elsewhere"
    stay = "" if undo or not count else f"; {count} tenant{' stays' if count == 1 else 's stay'}{advice}"
    return Page(
        before=[f"gpu {gpu.place} ({gpu.uuid}) {'uncordoned' if undo else f'cordoned{stay}'}"],
        items=lambda: [{"gpu": gpu.uuid, "place": gpu.place, "cordoned": not undo}],
        names=[gpu.place],
    )


def drain(kubectl: Kubectl, place: str) -> Page:
    """Cordon a GPU, and evict the Pods of its tenants that may be moved and have room elsewhere. The exit status is 1
    if a tenant stays. Raise `KubectlError`."""
    known = gpus(kubectl).gpus
    gpu = find(known, place)
    _write(kubectl, gpu, undo=False)
    fleet = [replace(each, why="cordoned") if each.uuid == gpu.uuid else each for each in known]
    if gpu.pool == _SCHEDULER:  # kube-scheduler places its tenants again, on GPUs of the same pool only
        fleet = [replace(each, pool="" if each.pool == _SCHEDULER else _SCHEDULER) for each in fleet]
    lines: list[list[str]] = []
    for tenant in gpu.tenants:
        try:
            pod, wanted = _movable_pod(kubectl, tenant)
            after = _moved(fleet, tenant, wanted)
            if pod is None:
                answer = "stays: it may not be moved (movable: true, or the annotation sharepod.dev/gpu-movable)"
            elif after is None:
                answer = "stays: no room elsewhere"
            else:
                kubectl.evict(tenant.namespace, pod)
                fleet, answer = after, "evicted"
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


def _movable_pod(kubectl: Kubectl, tenant: Workload) -> tuple[str | None, Wanted]:
    """Return the name of a tenant's Pod, and the share that its next Pod requests. The name is None if the tenant may
    not be moved. Raise `KubectlError`."""
    labels = (tenant.namespace, tenant.affinity, tenant.anti_affinity, tenant.exclusion)
    share, count = tenant.share, len(tenant.gpus)
    wanted = Wanted(share.request_milli, share.memory, count, tenant.exclusive, (), (), *labels)
    if tenant.kind == "SharePod":
        item = kubectl.get(path("sharepods", tenant.namespace, tenant.name))
        spec = mapping(item.get("spec"))
        asked = mapping(spec.get("gpu"))
        if asked:
            memory, uuids, models = quantity(asked.get("memory")), texts(asked.get("uuids")), texts(asked.get("models"))
            wanted = replace(wanted, memory=memory, uuids=uuids, models=models)
        movable = True if _says_movable(item) else asked.get("movable")
        policy = text(spec, "restartPolicy") or "Always"
        return (tenant.name if may_move(movable, policy, share.request_milli) else None), wanted
    name = tenant.name
    if tenant.kind == "Claim":
        claim = kubectl.get(path("resourceclaims", tenant.namespace, tenant.name, group=_CLAIMS))
        users = [text(user, "name") for user in rows(mapping(claim.get("status")).get("reservedFor"))]
        if not _says_movable(claim) or len(users) != 1:
            return None, wanted
        name = users[0]
    pod = kubectl.get(path("pods", tenant.namespace, name, group=_CORE))
    owned = any(owner.get("controller") is True for owner in rows(mapping(pod.get("metadata")).get("ownerReferences")))
    return (name if owned and (tenant.kind == "Claim" or _says_movable(pod)) else None), wanted


def _moved(gpus: Sequence[Gpu], tenant: Workload, wanted: Wanted) -> list[Gpu] | None:
    """Return GPUs as they are once a tenant has moved to the fullest ones of a node that have room for it. None if no
    node has room. `wanted`: share that the tenant requests."""
    freed = [replace(gpu, tenants=tuple(one for one in gpu.tenants if one.uid != tenant.uid)) for gpu in gpus]
    wanted = replace(wanted, group=group_of(freed, wanted))
    fits = [gpu for gpu in freed if not obstacle(gpu, wanted)]
    for node in sorted({gpu.node for gpu in fits}):
        here = sorted((gpu for gpu in fits if gpu.node == node), key=lambda gpu: gpu.free_milli)[: wanted.count]
        if len(here) == wanted.count:
            taken = {gpu.uuid for gpu in here}
            return [replace(gpu, tenants=(*gpu.tenants, tenant)) if gpu.uuid in taken else gpu for gpu in freed]
    return None


def _says_movable(item: Json) -> bool:
    return text(mapping(mapping(item.get("metadata")).get("annotations")), _MOVABLE) == "true"
