"""`resize`: changes the share of a running workload."""

from __future__ import annotations

import time
from collections.abc import Callable
from decimal import Decimal, DecimalException

from kubectl_sharepod.kubectl import Json, Kubectl, KubectlError, UsageError, path
from kubectl_sharepod.output import Page
from kubectl_sharepod.views import condition, mapping, rows, text, whole

WAIT_S = 10
"""Seconds for which the command waits for the operator's answer in the status."""
_PAUSE_S = 0.3
_SHAREPODS = "sharepods.sharepod.dev"
_REQUEST = "sharepod.dev/gpu-request"
_LEAST = Decimal("0.001")
"""Smallest fraction of a GPU above 0, because the operator counts thousandths."""


def resize(
    kubectl: Kubectl,
    namespace: str,
    kind: str,
    name: str,
    *,
    request: str | None,
    limit: str | None,
    memory: str | None,
    pause: Callable[[float], None] = time.sleep,
) -> Page:
    """Change request, limit or memory in the workload's object; return the operator's answer. Put the former values of
    a SharePod back if the change is refused, because its next run would request the refused share. Raise
    `KubectlError`.

    A Pod with a resource line and a claim can change only the request, and only up to the request that they had at
    first.
    """
    if request is None and limit is None and memory is None:
        raise UsageError("nothing to change; add --request, --limit or --memory")
    if kind != "sharepod":
        if request is None or limit is not None or memory is not None:
            raise UsageError(f"a {kind} takes --request only; its limit and memory stay as granted")
        resource = "pod" if kind == "pod" else "resourceclaims.v1.resource.k8s.io"
        kubectl.merge(resource, namespace, name, {"metadata": {"annotations": {_REQUEST: _fraction(request)}}})
        return Page(before=[f"{kind}/{name}: request {request} is asked for; `kubectl describe` shows refusals"])
    item = kubectl.get(path("sharepods", namespace, name))
    if "gpu" not in mapping(item.get("spec")):
        raise KubectlError(f"SharePod {name} is written with annotations; edit them with kubectl annotate --overwrite")
    change: Json = {}
    for field, value in (("request", request), ("limit", limit)):
        if value is not None:
            change[field] = float(_fraction(value))
    if memory is not None:
        change["memory"] = memory
    before = mapping(mapping(item.get("spec")).get("gpu"))
    before = {field: before[field] for field in change if field in before}
    kubectl.merge(_SHAREPODS, namespace, name, {"spec": {"gpu": change}})
    for _ in range(round(WAIT_S / _PAUSE_S)):
        item = kubectl.get(path("sharepods", namespace, name))
        status = mapping(item.get("status"))
        generation = whole(mapping(item.get("metadata")).get("generation")) or 0
        seen = (whole(status.get("observedGeneration")) or 0) >= generation
        if seen and text(condition(status, "Resized"), "status") != "Unknown":
            break
        pause(_PAUSE_S)
    else:
        answer = f"the operator has not answered within {WAIT_S} s; the spec keeps the change"
        return Page(before=[f"sharepod/{name}: {answer}"], status=1)
    resized, share = condition(status, "Resized"), mapping(status.get("share"))
    if text(resized, "status") == "False":
        now = mapping(mapping(item.get("spec")).get("gpu"))
        kept = f"sharepod/{name} keeps its share; {_put_back(kubectl, namespace, name, change, before, now)}"
        return Page(before=[f"{kept}: {text(resized, 'message')}"], status=1)
    placed = condition(status, "Placed")
    if text(placed, "reason") == "Invalid":
        return Page(before=[f"sharepod/{name} cannot be placed: {text(placed, 'message')}"], status=1)
    parts = [f"{field} {text(share, field)}" for field in ("request", "limit", "memory") if text(share, field)]
    return Page(before=[f"sharepod/{name}: {', '.join(parts)}"])


def _put_back(kubectl: Kubectl, namespace: str, name: str, change: Json, before: Json, now: Json) -> str:
    """Give the changed fields their former values, unless another user has changed one of them since. Return what the
    spec has now, as text. `now`: `spec.gpu` that the operator has answered."""
    if any(now.get(field) != value for field, value in change.items()):
        return "the spec stays, because it has changed again"
    steps: list[Json] = [{"op": "test", "path": f"/spec/gpu/{field}", "value": now[field]} for field in change]
    for field in change:
        new = {"op": "replace", "value": before[field]} if field in before else {"op": "remove"}
        steps.append({"path": f"/spec/gpu/{field}"} | new)
    try:
        kubectl.edit(_SHAREPODS, namespace, name, steps)
    except KubectlError as error:
        return f"the spec could not be put back ({error})"
    return "the spec is as before"


def _fraction(value: str) -> str:
    """Return a fraction as decimal text. `400m` and `40%` are 0.4. Raise `UsageError` if it is no fraction of a GPU."""
    power = {"m": -3, "%": -2}.get(value[-1:], 0)
    try:
        number = Decimal(value[:-1] if power else value).scaleb(power)
        valid = number == 0 or _LEAST <= number <= 1  # raises for NaN
    except DecimalException:
        valid = False
    if not valid:
        raise UsageError(f"{value} is no fraction of a GPU; write 0, or a number from {_LEAST} to 1, such as 0.4")
    return f"{number:f}"


def pod_of(kubectl: Kubectl, namespace: str, kind: str, name: str) -> tuple[str, str]:
    """Return (name of a workload's Pod, its default container). Raise `KubectlError` if it has none.

    The default container of a SharePod is the first in its spec, because admission may add others before it in the Pod.
    Empty: kubectl chooses.
    """
    if kind == "pod":
        return name, ""
    if kind != "sharepod":
        raise UsageError(f"a {kind} may have several Pods; write pod/NAME")
    item = kubectl.get(path("sharepods", namespace, name))
    pod = text(item, "status", "podName")
    if not pod:
        raise KubectlError(f"SharePod {name} has no Pod; `kubectl sharepod why {name}` shows the reason")
    annotated = text(item, "metadata", "annotations", "kubectl.kubernetes.io/default-container")
    first = next(iter(rows(mapping(item.get("spec")).get("containers"))), {})
    return pod, annotated or text(first, "name")
