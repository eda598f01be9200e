"""Placeholder Pod: makes a cluster autoscaler add the node that a share needs. Pure.

Guarantees:
- A placeholder has the node requirements and the resource line of the share's Pod, and no claim, volume or gate.
- kube-scheduler never handles a placeholder, because it names a scheduler that does not exist.
- In an autoscaler's simulation a placeholder fits no node with tenants. The free sum of such a node does not show how
  it is split between GPUs, and the operator has already found that the share does not fit there.
- A share that a new node could not take gets no placeholder.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from sharepod.api.gpunode import Pool
from sharepod.api.objects import (
    GROUP,
    LINE_LABEL,
    PLACEHOLDER_FOR_ANNOTATION,
    PLACEHOLDER_LABEL,
    PLACEHOLDER_PREFIX,
    PLACEHOLDER_SCHEDULER,
    PLACEHOLDER_SPEC_ANNOTATION,
    POOL_LABEL,
    TENANT_LABEL,
)
from sharepod.api.pods.holder_pod import idle_container
from sharepod.api.resource_line import MEMORY, MILLI, carried
from sharepod.placement.state.types import NodeRequirement, NodeSelectorTerm, PlacementRequest, Refusal, Resources

HOSTNAME = "kubernetes.io/hostname"
_OF_DAEMON_SET = "pod-template-generation"
"""Label that only the DaemonSet controller gives its Pods."""
_PER_NAMESPACE_CAP = "ExclusionCap"
"""Name of an obstacle that a new node does not remove: the namespace already keeps others from as many GPUs as the
setting `max_excluded_gpus` allows."""
_LEAST = {"cpu": "1m", "memory": "1Mi"}
"""Requests of a placeholder if the share's Pod requests no cpu or memory. Small, as a placeholder never runs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlaceholderSettings:
    """Settings of placeholder Pods. `with_line`: True if nodes advertise the resources of the resource line."""

    namespace: str
    image: str
    priority_class: str
    with_line: bool


def new_node_helps(request: PlacementRequest, refusal: Refusal) -> bool:
    """Return True if a new node could fit a refused share.

    Return False for a share that names its nodes. Also return False if it names GPUs, models or an affinity group,
    because no label of a future node promises these.
    """
    asked = [one.gpu for one in (request, *request.siblings)]
    if any(gpu.uuids or gpu.models or gpu.labels.affinity is not None for gpu in asked):
        return False
    if any(obstacle.what == _PER_NAMESPACE_CAP for obstacle in refusal.obstacles):
        return False
    if HOSTNAME in request.pod.node_selector:
        return False
    terms = request.pod.node_affinity_terms
    return not terms or any(True for _ in _open_terms(terms))


def placeholder_name(tenant: str) -> str:
    """Return the name of a tenant's placeholder. It is derived from the tenant only, so that another leader finds the
    existing placeholder.
    """
    return f"{PLACEHOLDER_PREFIX}{tenant}"


def placeholder_pod(request: PlacementRequest, settings: PlaceholderSettings) -> dict[str, Any]:
    """Return the manifest of the placeholder of a share that a new node could take."""
    needs = request.pod
    amounts = _amounts(request, with_line=settings.with_line)
    container = idle_container("placeholder", settings.image, amounts)
    of_pool = {
        "key": POOL_LABEL,
        "operator": "In",
        "values": sorted(pool.value for pool in Pool if pool is not Pool.SCHEDULER),
    }
    terms = [[*map(_requirement, term), of_pool] for term in _open_terms(needs.node_affinity_terms)] or [[of_pool]]
    required = {"nodeSelectorTerms": [{"matchExpressions": expressions} for expressions in terms]}
    spec: dict[str, Any] = {
        "affinity": {
            "nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": required},
            "podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [*_beside_nobody()]},
        },
        "automountServiceAccountToken": False,
        "containers": [container],
        "enableServiceLinks": False,
        "nodeSelector": dict(needs.node_selector),
        "priorityClassName": settings.priority_class,
        "restartPolicy": "Always",
        "schedulerName": PLACEHOLDER_SCHEDULER,
        "terminationGracePeriodSeconds": 0,
        "tolerations": [{name: value for name, value in _toleration(one) if value} for one in needs.tolerations],
    }
    digest = hashlib.sha256(json.dumps(spec, sort_keys=True).encode()).hexdigest()[:16]
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": placeholder_name(str(request.tenant)),
            "namespace": settings.namespace,
            "labels": {PLACEHOLDER_LABEL: str(request.tenant), "app.kubernetes.io/part-of": GROUP.partition(".")[0]},
            "annotations": {
                PLACEHOLDER_FOR_ANNOTATION: f"{request.namespace}/{request.name}",
                PLACEHOLDER_SPEC_ANNOTATION: digest,
            },
        },
        "spec": spec,
    }


def unschedulable(request: PlacementRequest) -> dict[str, Any]:
    """Return the status by which a Pod shows that a scheduler has found no node. Autoscalers react to it."""
    text = f"no node has room for the share of GPUs that {request.namespace}/{request.name} waits for"
    return {"conditions": [{"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": text}]}


def _amounts(request: PlacementRequest, *, with_line: bool) -> dict[str, str]:
    """Return the resources that the share's Pod requests from the node, with one resource line for all its shares."""
    taken: Resources = request.pod.resources
    amounts = dict(_LEAST)
    if taken.cpu_milli:
        amounts["cpu"] = f"{taken.cpu_milli}m"
    if taken.memory:
        amounts["memory"] = str(taken.memory)
    amounts |= {name: str(amount) for name, amount in sorted(taken.extended.items())}
    if with_line:
        lines = [carried(one.gpu) for one in (request, *request.siblings)]
        line = {MILLI: sum(one.milli for one in lines), MEMORY: sum(one.mib for one in lines)}
        amounts |= {name: str(amount) for name, amount in line.items() if amount}
    return amounts


def _open_terms(terms: tuple[NodeSelectorTerm, ...]) -> Iterator[tuple[NodeRequirement, ...]]:
    """Yield the requirements of each term, without requirements on node names. Leave out the terms that only nodes with
    given names can meet.
    """
    for term in terms:
        names = [one for one in term.expressions if one.key == HOSTNAME]
        if not term.fields and all(one.operator in ("NotIn", "Exists") for one in names):
            yield tuple(one for one in term.expressions if one.key != HOSTNAME)


def _requirement(one: NodeRequirement) -> dict[str, Any]:
    return {"key": one.key, "operator": one.operator, **({"values": list(one.values)} if one.values else {})}


def _toleration(one: Any) -> Iterator[tuple[str, str]]:
    return ((name, getattr(one, name)) for name in ("key", "operator", "value", "effect"))


def _beside_nobody() -> Iterator[Mapping[str, Any]]:
    """Yield anti-affinity terms that keep a placeholder from nodes with Pods of SharePods or Pods with a resource line.

    Pods of DaemonSets do not count. Cluster Autoscaler copies these to its model of a new node, so it would otherwise
    find that no new node helps.
    """
    of_no_daemon_set = {"key": _OF_DAEMON_SET, "operator": "DoesNotExist"}
    for label in (TENANT_LABEL, LINE_LABEL):
        yield {
            "labelSelector": {"matchExpressions": [{"key": label, "operator": "Exists"}, of_no_daemon_set]},
            "namespaceSelector": {},
            "topologyKey": HOSTNAME,
        }
