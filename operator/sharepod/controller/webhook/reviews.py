"""Review as Kopf is shown it: as much of a new Pod as the claim of its line depends on. Pure.

Kopf keeps something of each object that it is asked about, unless that is new, and compares the whole object with
itself as patched, in time that grows with all that the object says. So it is shown a review of our own making.

Guarantees:
- A patch of the Pod that is left is one of the whole Pod: what is left out stands beside what is patched, never in it.
- What is left has at most `MOST_PARTS` parts, and is the creation of a Pod, whatever was sent.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from sharepod.api.objects import LINE_CLAIM, LINE_LABEL
from sharepod.api.resource_line import MILLI

MOST_PARTS: Final = 512
"""Containers of a Pod, and claims that it and they name, together. No Pod that can run has so many."""
_LISTS = ("containers", "initContainers")
_LONGEST_NAME = 253
_POD = {"group": "", "version": "v1", "resource": "pods"}


class TooManyPartsError(Exception):
    """Pod with more parts than are compared."""


def left_of(review: Any) -> dict[str, Any]:
    """Return what is left of a review. Raises `ValueError` for what is no review of a new Pod, `TooManyPartsError`."""
    request = _map(_map(review).get("request"))
    pod, uid = request.get("object"), request.get("uid")
    asked = (request.get("operation"), request.get("subResource") or "", request.get("resource"))
    if asked != ("CREATE", "", _POD) or not isinstance(pod, Mapping) or not isinstance(uid, str):
        raise ValueError("it is not about a new Pod")
    left = _pod(pod)
    asks = {"uid": uid[:_LONGEST_NAME], "operation": "CREATE", "resource": _POD, "userInfo": {}, "object": left}
    return {"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "request": asks}


def refusal(review: Any) -> dict[str, Any]:
    """Return the answer to a review of a Pod with too many parts."""
    status = {
        "code": 422,
        "message": f"spec.containers: with their claims they are more than {MOST_PARTS}; write fewer",
    }
    response = {"uid": str(review["request"]["uid"])[:_LONGEST_NAME], "allowed": False, "status": status}
    return {"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "response": response}


def _pod(pod: Mapping[str, Any]) -> dict[str, Any]:
    metadata, spec = _map(pod.get("metadata")), _map(pod.get("spec"))
    containers = {name: _list(spec[name]) for name in _LISTS if name in spec}
    claims = _list(spec.get("resourceClaims"))
    named = sum(len(_claims(one)) for listed in containers.values() for one in listed)
    if sum(map(len, containers.values())) + named + len(claims) > MOST_PARTS:
        raise TooManyPartsError
    names = {name: metadata.get(name) for name in ("name", "namespace")}
    left: dict[str, Any] = {name: value[:_LONGEST_NAME] for name, value in names.items() if isinstance(value, str)}
    if isinstance(labels := metadata.get("labels"), Mapping):
        left["labels"] = {name: value for name, value in labels.items() if name == LINE_LABEL}
    held = {"resourceClaims": _names(claims)} if "resourceClaims" in spec else {}
    listed = {name: [_container(one) for one in some] for name, some in containers.items()}
    return {"metadata": left, "spec": {**listed, **held}}


def _container(container: Any) -> dict[str, Any]:
    resources = _map(_map(container).get("resources"))
    if MILLI not in _map(resources.get("limits")):
        return {}
    claims = {"claims": _names(_claims(container))} if "claims" in resources else {}
    return {"resources": {"limits": {MILLI: "1"}, **claims}}


def _claims(container: Any) -> list[Any]:
    return _list(_map(_map(container).get("resources")).get("claims"))


def _names(claims: list[Any]) -> list[dict[str, str]]:
    """Return as many claims, of which only ours has a name."""
    return [{"name": LINE_CLAIM} if _map(one).get("name") == LINE_CLAIM else {} for one in claims]


def _map(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []
