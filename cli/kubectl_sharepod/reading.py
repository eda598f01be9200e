"""Reads of the API server that several commands share, within the user's rights."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from functools import partial

from kubectl_sharepod.kubectl import ForbiddenError, Json, Kubectl, KubectlError, NotFoundError, at_once, both, path
from kubectl_sharepod.views import Fleet, FreeShares, Workload, fleet, free_shares, mapping, now, rows, sharepod, text
from kubectl_sharepod.waiting import named, waiting
from kubectl_sharepod.wanted import CLAIMS

SYSTEM = "sharepod-system"
"""Namespace of SharePod's operator and agents."""

NODES_HIDDEN = (
    "You may not list GPUNodes, so GPUs, and claims and plain Pods with a share, are missing here. An administrator "
    "can bind the ClusterRole sharepod-gpunode-view to you."
)
_PODS_HIDDEN = (
    "You may not list Pods, so waiting plain Pods and claims are missing here. The ClusterRole view has the right."
)
_CLAIMS_HIDDEN = (
    "You may not list ResourceClaims, so waiting claims are missing here. The ClusterRole view has the right."
)
_PENDING = "fieldSelector=status.phase%3DPending,spec.nodeName%3D"
"""Selector of Pods without a node. The label of resource lines is no selector, because Pods with claims lack it."""
_MOST_LISTS = 8
"""Largest number of namespaces whose claims are listed one by one. In a large cluster, a list of all claims takes a
second, although most of them are allocated."""
_NODES_FORBIDDEN = (
    "you may not list GPUNodes. An administrator can bind the ClusterRole sharepod-gpunode-view to you; `kubectl "
    "sharepod free` shows free shares without it."
)
_CORDONED = "/api/v1/nodes?fieldSelector=spec.unschedulable%3Dtrue"
_CORDONS_HIDDEN = "You may not list Nodes, so GPUs of cordoned nodes count as free here."
_NOT_PUBLISHED = "The free shares by model are not published in this cluster either."


class NotInstalledError(KubectlError):
    """Absence of SharePod's kinds in the API server."""


@dataclass(frozen=True)
class Seen:
    """Workloads in scope, with a share or waiting for one. `fleet`: None if the user may not list GPUNodes."""

    found: tuple[Workload, ...]
    fleet: Fleet | None
    notes: tuple[str, ...] = ()
    """Kinds that the user may not list, as sentences."""


@dataclass(frozen=True)
class Scope:
    """Namespace that a command reads. `namespace`: None: all namespaces."""

    kubectl: Kubectl
    namespace: str | None


def gpus(kubectl: Kubectl) -> Fleet:
    """Return the GPUs of the cluster. Raise `KubectlError`."""
    found, cordoned = both(lambda: gpunodes(kubectl), lambda: listed(kubectl, _CORDONED))
    seen = fleet(found, cordoned or ())
    return seen if cordoned is not None else replace(seen, notes=(_CORDONS_HIDDEN,))


def gpunodes(kubectl: Kubectl) -> list[Json]:
    """Return the GPUNodes of the cluster. Raise `KubectlError`."""
    try:
        return kubectl.items(path("gpunodes"))
    except ForbiddenError:
        raise ForbiddenError(_NODES_FORBIDDEN) from None
    except NotFoundError:
        raise NotInstalledError("SharePod is not installed in this cluster: it has no GPUNodes") from None


def listed(kubectl: Kubectl, where: str) -> list[Json] | None:
    """Return the objects of a list; None if the user may not read it. Raise `KubectlError`."""
    try:
        return kubectl.items(where)
    except ForbiddenError:
        return None


def published_free(kubectl: Kubectl) -> list[FreeShares]:
    """Return the free shares by model and pool that the operator publishes in a ConfigMap. Raise `KubectlError`."""
    try:
        found = kubectl.get(path("configmaps", SYSTEM, "sharepod-free", group="/api/v1"))
    except (ForbiddenError, NotFoundError):
        raise ForbiddenError(f"{NODES_HIDDEN} {_NOT_PUBLISHED}") from None
    try:
        items = json.loads(text(mapping(found.get("data")), "free.json"))
    except ValueError:
        raise KubectlError("The operator has not published the free shares yet; try again in some seconds") from None
    return [free_shares(item) for item in rows(items)]


def gpus_if_allowed(kubectl: Kubectl, *, cordons: bool = True) -> Fleet | None:
    """Return the GPUs of the cluster; None if the user may not list them. Raise `KubectlError`.

    `cordons`: whether to read which nodes are cordoned.
    """
    try:
        return gpus(kubectl) if cordons else fleet(gpunodes(kubectl))
    except ForbiddenError:
        return None


def sharepods(scope: Scope) -> list[Workload]:
    """Return the SharePods in scope. Raise `KubectlError`."""
    try:
        found = scope.kubectl.items(path("sharepods", scope.namespace))
    except NotFoundError:
        raise NotInstalledError("SharePod is not installed in this cluster: it has no SharePods") from None
    moment = now()
    return [sharepod(item, moment) for item in found]


def workloads(scope: Scope, *, cordons: bool = True) -> Seen:
    """Return all workloads in scope, and the GPUs if the user may list them. Raise `KubectlError`.

    `cordons`: whether to read which nodes are cordoned.

    Usage is taken from the GPUNodes, where it is newer than in the SharePods. Waiting workloads are in no GPUNode.
    """
    (pods, known), (pending, claims, unseen) = both(
        lambda: both(lambda: sharepods(scope), lambda: gpus_if_allowed(scope.kubectl, cordons=cordons)),
        lambda: _pending(scope),
    )
    tenants = {} if known is None else dict(known.by_uid)
    found: list[Workload] = []
    for pod in pods:
        tenant = tenants.pop(pod.uid, None)
        found.append(pod if tenant is None else _both(pod, tenant))
    found += [one for one in tenants.values() if scope.namespace in (None, one.namespace)]
    found += waiting(pending, claims, known, now())
    found.sort(key=lambda one: (one.namespace, one.node, one.indexes, one.name))
    return Seen(tuple(found), known, (*([NODES_HIDDEN] if known is None else []), *unseen))


def _pending(scope: Scope) -> tuple[list[Json], list[Json], list[str]]:
    """Return the Pods in scope that have no node, the claims of the namespaces where such a Pod names one, and notes
    about kinds that the user may not list. Raise `KubectlError`."""
    try:
        pods = scope.kubectl.items(f"{path('pods', scope.namespace, group='/api/v1')}?{_PENDING}")
    except ForbiddenError:
        return [], [], [_PODS_HIDDEN]
    except NotFoundError:
        return [], [], []
    places: list[str | None] = list(dict.fromkeys(namespace for namespace, _ in named(pods)))
    if not places:
        return pods, [], []
    if len(places) > _MOST_LISTS:
        places = [None]
    try:
        lists = at_once(*(partial(scope.kubectl.items, path("resourceclaims", one, group=CLAIMS)) for one in places))
    except ForbiddenError:
        return pods, [], [_CLAIMS_HIDDEN]
    except NotFoundError:
        return pods, [], []
    return pods, [claim for found in lists for claim in found], []


def _both(pod: Workload, tenant: Workload) -> Workload:
    """Return a SharePod with the usage that the GPUNode reports of the same tenant."""
    return replace(
        pod,
        used_milli=tenant.used_milli,
        progress_milli=tenant.progress_milli,
        memory_used=tenant.memory_used,
        held_s=tenant.held_s,
        counted_since=tenant.counted_since,
        message=pod.message or tenant.message,
    )
