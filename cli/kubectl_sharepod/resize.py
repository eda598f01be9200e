"""`resize`: changes the share of a running workload."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from decimal import Decimal, DecimalException
from functools import partial

from kubectl_sharepod.kubectl import ForbiddenError, Json, Kubectl, KubectlError, UsageError, path
from kubectl_sharepod.output import EXIT_FORBIDDEN, Page
from kubectl_sharepod.views import condition, mapping, rows, text, whole
from kubectl_sharepod.wanted import CLAIMS, claim_of_line, has_line

WAIT_S = 10
"""Seconds for which the command waits for the operator's answer in the status."""
_PAUSE_S = 0.3
_SHAREPODS = "sharepods.sharepod.dev"
_REQUEST = "sharepod.dev/gpu-request"
_SELECT = "?fieldSelector="
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
        return _annotate(kubectl, namespace, kind, name, _fraction(request), pause)
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


@dataclass(frozen=True)
class _Seen:
    """Answer of the operator about a Pod with a line, or about a claim. `request_milli`: None: not known. `refusal`:
    text of the last refusal, and the object that has it. `hidden`: right that the user lacks to read the answer."""

    request_milli: int | None = None
    refusal: tuple[str, str] = ("", "")
    hidden: str = ""


def _annotate(
    kubectl: Kubectl, namespace: str, kind: str, name: str, request: str, pause: Callable[[float], None]
) -> Page:
    """Write the request into the annotation of a Pod or claim; return the operator's answer. Raise `KubectlError`."""
    pod = kind == "pod"
    plural, group = ("pods", "/api/v1") if pod else ("resourceclaims", CLAIMS)
    item = kubectl.get(path(plural, namespace, name, group=group))
    claim = "" if pod else name
    if pod:
        _check_line(item, name)
        claim = claim_of_line(item)
    allocated = rows(mapping(mapping(mapping(item.get("status")).get("allocation")).get("devices")).get("results"))
    node = text(item, "spec", "nodeName") if pod else text(next(iter(allocated), {}), "pool")
    read = partial(_of_row, kubectl, item, node)
    if claim:
        read = partial(_of_claim, kubectl, path("resourceclaims", namespace, claim, group=CLAIMS))
    former = read().refusal if node else ("", "")
    resource = "pod" if pod else "resourceclaims.v1.resource.k8s.io"
    kubectl.merge(resource, namespace, name, {"metadata": {"annotations": {_REQUEST: request}}})
    if not node:
        return Page(before=[f"{kind}/{name} has no share yet; it waits for one with request {request}"])
    seen = _Seen()
    for _ in range(round(WAIT_S / _PAUSE_S)):
        seen = read()
        if seen.request_milli == int(Decimal(request) * 1000):
            return Page(before=[f"{kind}/{name}: request {request}"])
        if seen.refusal not in (former, ("", "")):
            break
        pause(_PAUSE_S)
    refusal, changed = seen.refusal[0], seen.refusal != former
    if refusal and (changed or seen.request_milli is not None):  # the operator does not repeat an equal refusal
        return Page(before=[f"{kind}/{name} keeps its share: {refusal}"], status=1)
    silent = f"{kind}/{name}: the operator has not answered within {WAIT_S} s"
    if seen.hidden:
        silent = f"{kind}/{name}: request {request} is written; you may not read the answer: {seen.hidden}"
    return Page(before=[silent], status=EXIT_FORBIDDEN if seen.hidden else 1)


def _check_line(pod: Json, name: str) -> None:
    """Raise `UsageError` unless the annotation of a Pod changes its share: a resource line has its request."""
    owners = rows(mapping(pod.get("metadata")).get("ownerReferences"))
    if owner := next((text(one, "name") for one in owners if one.get("kind") == "SharePod"), ""):
        raise UsageError(f"pod/{name} belongs to SharePod {owner}; write `kubectl sharepod resize {owner}`")
    if not has_line(pod):
        raise UsageError(f"pod/{name} has no resource line; write NAME of its SharePod, or claim/NAME of its claim")


def _of_claim(kubectl: Kubectl, where: str) -> _Seen:
    try:
        status = mapping(kubectl.get(where).get("status"))
    except ForbiddenError as error:
        return _Seen(hidden=str(error))
    for device in rows(status.get("devices")):
        request = whole(mapping(device.get("data")).get("requestMilli"))
        if request is not None:
            resized = condition(device, "Resized")
            return _Seen(request, (text(resized, "message"), "") if text(resized, "status") == "False" else ("", ""))
    return _Seen()


def _of_row(kubectl: Kubectl, pod: Json, node: str) -> _Seen:
    """Return the answer about a Pod without a claim: its row in the ledger, and its Events."""
    name, uid, hidden = text(pod, "metadata", "name"), text(pod, "metadata", "uid"), ""
    request, events = None, list[Json]()
    try:
        tenants = rows(mapping(kubectl.get(path("gpunodes", name=node)).get("spec")).get("tenants"))
        request = next((whole(one.get("requestMilli")) for one in tenants if text(one, "id") == uid), None)
    except ForbiddenError as error:
        hidden = str(error)
    selector = f"involvedObject.kind%3DPod,involvedObject.name%3D{name},reason%3DResizeRefused"
    with suppress(ForbiddenError):
        listed = kubectl.get(path("events", text(pod, "metadata", "namespace"), group="/api/v1") + _SELECT + selector)
        events = rows(listed.get("items"))
    last = max(events, key=lambda one: text(one, "metadata", "creationTimestamp"), default={})
    return _Seen(request, (text(last, "message"), text(last, "metadata", "uid")), hidden)


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
