"""Views of plain Pods and claims that wait for a share.

Guarantees:
- A share is listed once: a Pod's resource line and the claim of that line are one workload, and so are a SharePod, its
  Pod and its Pod's claim.
- No workload with a row in a ledger, or with an allocated claim, is listed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from datetime import datetime

from kubectl_sharepod.kubectl import Json
from kubectl_sharepod.views import Fleet, Share, Workload, age_s, condition, mapping, rows, text
from kubectl_sharepod.wanted import LINE_CLAIM, Wanted, claim_of_line, claims_of, has_line, of_claim, of_line

WAITS = "Waits"
"""State of a waiting workload whose Pod has no reason."""
_CLASSES = ("sharepod.dev", "scheduler.sharepod.dev")
_MADE = ("sharepod", "line")
"""Names of the request in claims without a size: of a SharePod's Pod, and of a resource line."""


def waiting(pods: Iterable[Json], claims: Iterable[Json], fleet: Fleet | None, now: datetime) -> Iterator[Workload]:
    """Yield the waiting plain Pods and claims as workloads.

    Args:
        pods: pending Pods without a node.
        claims: claims of the namespaces that `named` has for these Pods.
        fleet: None: the ledgers are not known. A Pod whose annotation names its GPUs has a share then.
        now: time for the ages.
    """
    own = [pod for pod in pods if _may_wait(pod)]
    uids = {} if fleet is None else fleet.by_uid
    placed = {(one.namespace, one.name) for one in uids.values() if one.kind == "Claim"}
    for pod in own:
        namespace = text(pod, "metadata", "namespace")
        labelled = "sharepod.dev/line" in mapping(mapping(pod.get("metadata")).get("labels"))
        wanted = of_line(pod, namespace) if labelled else None
        has_share = (
            text(pod, "metadata", "uid") in uids
            or (namespace, claim_of_line(pod)) in placed
            or (fleet is None and _names_gpus(pod))
        )
        if wanted is not None and not has_share:
            yield _view("Pod", pod, wanted, pod, now)
    users = named(own)
    for claim in claims:
        user = users.get((text(claim, "metadata", "namespace"), text(claim, "metadata", "name")))
        allocated = mapping(mapping(claim.get("status")).get("allocation"))
        if user and not allocated and text(claim, "metadata", "uid") not in uids and _asks(claim):
            yield _view("Claim", claim, of_claim(claim, "") or Wanted(0, None), user, now)


def named(pods: Iterable[Json]) -> dict[tuple[str, str], Json]:
    """Return the oldest of the waiting plain Pods that name a claim, by the claim's namespace and name. The claims of
    resource lines are left out."""
    found: dict[tuple[str, str], Json] = {}
    for pod in sorted(filter(_may_wait, pods), key=lambda one: text(one, "metadata", "creationTimestamp")):
        line = LINE_CLAIM if has_line(pod) else ""
        for entry, name in claims_of(pod):
            if entry != line:
                found.setdefault((text(pod, "metadata", "namespace"), name), pod)
    return found


def _view(kind: str, item: Json, wanted: Wanted, pod: Json, now: datetime) -> Workload:
    """Return a Pod or a claim as a workload that waits since the creation of the Pod `pod`."""
    scheduled = condition(mapping(pod.get("status")), "PodScheduled")
    return Workload(
        kind=kind,
        namespace=text(item, "metadata", "namespace"),
        name=text(item, "metadata", "name"),
        uid=text(item, "metadata", "uid"),
        share=Share(wanted.request_milli, wanted.limit_milli, wanted.memory),
        exclusive=wanted.exclusive,
        state=text(scheduled, "reason") or WAITS,
        waiting_s=age_s(mapping(pod.get("metadata")).get("creationTimestamp"), now) or 0,
        message=text(scheduled, "message"),
        affinity=wanted.affinity,
        anti_affinity=wanted.anti_affinity,
        exclusion=wanted.exclusion,
    )


def _may_wait(pod: Json) -> bool:
    """Return whether a Pod is a plain Pod without a node. A SharePod's Pod has the id of its tenant as a label."""
    metadata = mapping(pod.get("metadata"))
    plain = mapping(metadata.get("labels")).get("sharepod.dev/tenant", "line") == "line"
    return plain and not metadata.get("deletionTimestamp") and not text(pod, "spec", "nodeName")


def _names_gpus(pod: Json) -> bool:
    """Return whether the operator has written GPUs into the annotation of a Pod."""
    return text(pod, "metadata", "annotations", "sharepod.dev/gpus") not in ("", "void")


def _asks(claim: Json) -> bool:
    """Return whether a claim requests a share by itself. The claims of SharePods and of resource lines have no size."""
    requests = rows(mapping(mapping(claim.get("spec")).get("devices")).get("requests"))
    if mapping(claim.get("metadata")).get("deletionTimestamp") or not any(_of_class(one) for one in requests):
        return False
    made = text(requests[0], "name") in _MADE and not mapping(requests[0].get("exactly")).get("capacity")
    return not (made and len(requests) == 1)


def _of_class(request: Json) -> bool:
    asked = (mapping(request.get("exactly")), *rows(request.get("firstAvailable")))
    return any(text(one, "deviceClassName") in _CLASSES for one in asked)
