"""`doctor`: problems of an installed SharePod: nodes and their labels, GPUs, roll-outs of operator and agent, and
SharePods that need an administrator. The command only reads.

All reads run at the same time. A kind that the user may not list is not checked, and a note names it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime
from difflib import get_close_matches
from functools import partial

from kubectl_sharepod.commands import counted, once
from kubectl_sharepod.kubectl import Json, Kubectl, at_once, path
from kubectl_sharepod.output import Column, Page
from kubectl_sharepod.preflight import POOLS
from kubectl_sharepod.reading import SYSTEM, gpunodes, listed
from kubectl_sharepod.views import Fleet, age_s, condition, fleet, mapping, now, rows, text, whole

_PREFIX = "sharepod.dev/"
_LABELS = (f"{_PREFIX}pool", f"{_PREFIX}max-held-gpus")
"""Labels of Nodes that SharePod reads."""
_LISTS = {
    "Nodes": "/api/v1/nodes",
    "SharePods": path("sharepods"),
    "Deployments": "/apis/apps/v1/deployments?labelSelector=app.kubernetes.io/name%3Dsharepod-operator",
    "DaemonSets": "/apis/apps/v1/daemonsets?labelSelector=app.kubernetes.io/name%3Dsharepod-agent",
    "RuntimeClasses": "/apis/node.k8s.io/v1/runtimeclasses",
    "Events": f"/api/v1/namespaces/{SYSTEM}/events?fieldSelector=reason%3DFailedCreate",
}
_RELEASE_S = 120
"""Seconds after which a release is a problem. Normally a release ends a few seconds after the Pod's end."""


def doctor(kubectl: Kubectl) -> Page:
    """Return the problems of the installation, of which an administrator must know. The exit status is 1 if there are
    any."""
    reads = [partial(listed, kubectl, where) for where in _LISTS.values()]
    ledgers, nodes, sharepods, deployments, daemonsets, classes, events = at_once(partial(gpunodes, kubectl), *reads)
    hidden = [
        kind
        for kind, found in zip(_LISTS, (nodes, sharepods, deployments, daemonsets, classes, events), strict=True)
        if found is None
    ]
    seen = fleet(ledgers or (), nodes or ())
    lines = [*_of_fleet(seen), *_of_labels(nodes or ())]
    lines += [("", one) for one in _of_rollouts("Deployment", "operator", deployments, events or ())]
    lines += [("", one) for one in _of_rollouts("DaemonSet", "agent", daemonsets, events or ())]
    if classes is not None:
        lines += [("", one) for one in _of_runtime(daemonsets or (), classes)]
    lines += [("", one) for one in _of_sharepods(sharepods or (), ledgers or (), now())]
    unique = sorted(set(lines))
    return Page(
        columns=[Column("NODE"), Column("PROBLEM", grows=True)],
        rows=[list(line) for line in unique],
        items=lambda: [{"node": node, "problem": problem} for node, problem in unique],
        names=once(node for node, _problem in unique),
        empty=f"{counted(len(seen.gpus), 'GPU')}: no problem found",
        notes=[f"You may not list {', '.join(hidden)}, so {'they' if hidden[1:] else hidden[0]} are not checked."]
        if hidden
        else [],
        status=1 if unique else 0,
    )


def _of_fleet(seen: Fleet) -> Iterator[tuple[str, str]]:
    yield from (*seen.problems, *seen.cordon_faults)
    yield from ((gpu.node, f"GPU {gpu.index}: {gpu.why}") for gpu in seen.gpus if gpu.why and not gpu.cordoned)
    if not seen.gpus:
        yield "", "no node reports a GPU: label a GPU node with sharepod.dev/pool=dedicated"


def _of_labels(nodes: Iterable[Json]) -> Iterator[tuple[str, str]]:
    """Yield (Node, problem) for each label of SharePod with an unknown key, and each unknown pool."""
    for node in nodes:
        name, labels = text(node, "metadata", "name"), mapping(mapping(node.get("metadata")).get("labels"))
        for key in (key for key in labels if key.startswith(_PREFIX)):
            if key not in _LABELS:
                yield name, f"label {key} is unknown and has no effect; did you mean {_near(key, _LABELS)}?"
            elif key == _LABELS[0] and labels[key] not in POOLS:
                pool = text(labels, key)
                yield name, f"label {key}={pool} names no pool; did you mean {_near(pool, POOLS)}?"


def _near(written: str, known: Sequence[str]) -> str:
    return get_close_matches(written.lower(), known, n=1, cutoff=0.0)[0]


def _of_rollouts(kind: str, part: str, found: Sequence[Json] | None, events: Iterable[Json]) -> Iterator[str]:
    """Yield what a Deployment or DaemonSet lacks: Pods that are ready, or Pods of its newest version. `found`: None if
    unknown."""
    if found is not None and not found:
        yield f"no {kind} sharepod-{part}: apply SharePod's manifests or chart again"
    for item in found or ():
        status, name = mapping(item.get("status")), text(item, "metadata", "name")
        if kind == "Deployment":
            asked = whole(mapping(item.get("spec")).get("replicas"))
            wanted, ready, newest = 1 if asked is None else asked, status.get("readyReplicas"), "updatedReplicas"
        else:
            wanted = whole(status.get("desiredNumberScheduled")) or 0
            ready, newest = status.get("numberReady"), "updatedNumberScheduled"
        ready, updated = whole(ready) or 0, whole(status.get(newest)) or 0
        if min(ready, updated) >= wanted:
            continue
        cause = text(condition(status, "ReplicaFailure"), "message") or _last_failure(name, events)
        yield (
            f"{kind} {text(item, 'metadata', 'namespace')}/{name}: of {counted(wanted, 'Pod')}, {ready} ready and "
            f"{updated} of the newest version; {cause or 'if this lasts, read kubectl describe and logs of its Pods'}"
        )


def _last_failure(name: str, events: Iterable[Json]) -> str:
    """Return the newest failure to create a Pod of a Deployment or DaemonSet; empty if there is none."""
    own = [one for one in events if text(one, "involvedObject", "name").startswith(name)]
    last = max(own, key=lambda one: text(one, "lastTimestamp") or text(one, "eventTime"), default=None)
    return f"FailedCreate: {text(last, 'message')}" if last else ""


def _of_runtime(daemonsets: Iterable[Json], classes: Iterable[Json]) -> Iterator[str]:
    """Yield each RuntimeClass that an agent names and the cluster lacks. Pods with a share name the same one."""
    known = {text(one, "metadata", "name") for one in classes}
    for item in daemonsets:
        name = text(item, "spec", "template", "spec", "runtimeClassName")
        if name and name not in known:
            yield (
                f"no RuntimeClass {name}: no agent or Pod with a share can be created; create it, as NVIDIA's GPU "
                "Operator or container toolkit does"
            )


def _of_sharepods(sharepods: Iterable[Json], ledgers: Iterable[Json], at: datetime) -> Iterator[str]:
    """Yield the number of SharePods with a refused Pod, and of shares with a slow release, each with an example."""
    releasing = _releasing(ledgers)
    refused: list[tuple[str, str]] = []
    for item in sharepods:
        status, uid = mapping(item.get("status")), text(item, "metadata", "uid")
        name = f"{text(item, 'metadata', 'namespace')}/{text(item, 'metadata', 'name')}"
        reasons = {text(one, "reason"): one for one in rows(status.get("conditions"))}
        if "PodForbidden" in reasons and not status.get("endTime"):
            refused.append((name, f"PodForbidden: {text(reasons['PodForbidden'], 'message')}"))
        since = text(item, "metadata", "deletionTimestamp") or text(reasons.get("Releasing", {}), "lastTransitionTime")
        if since or uid in releasing:
            releasing[uid] = name, since or text(status, "endTime") or releasing[uid][1]
    slow = [
        (name, f"Releasing for more than {_RELEASE_S // 60} minutes; see its Pod, and the node's agent")
        for name, since in releasing.values()
        if (age_s(since, at) or 0) > _RELEASE_S
    ]
    for noun, found in (("SharePod", refused), ("share", slow)):
        if found:
            name, problem = min(found)
            yield f"{counted(len(found), noun)}, such as {name}: {problem}"


def _releasing(ledgers: Iterable[Json]) -> dict[str, tuple[str, str]]:
    """Return for each row that is being released, by its tenant: name, and the time of its ledger's last write. The row
    has no time of its own, and is at least as old."""
    found: dict[str, tuple[str, str]] = {}
    for item in ledgers:
        writes = rows(mapping(item.get("metadata")).get("managedFields"))
        last = max((text(one, "time") for one in writes if "f:spec" in mapping(one.get("fieldsV1"))), default="")
        for row in rows(mapping(item.get("spec")).get("tenants")):
            if text(row, "state") == "Releasing":
                name = text(row, "podName") or text(row, "claim", "name")
                found[text(row, "id")] = f"{text(row, 'namespace')}/{name}", last
    return found
