"""Reduction of reviews for Kopf: keeps only the parts of a new Pod on which the claim or volume for its resource line
depends. Pure.

Kopf compares the whole reviewed object with its patched version, which takes longer for large objects. It also stores a
part of each object that is not new. So Kopf gets a reduced review, always in the form of a creation.

Guarantees:
- A patch of the reduced Pod is valid for the whole Pod, because parts that a patch changes are not reduced.
- A reduced review for a claim has at most `MOST_PARTS` parts. For a volume it has at most `MOST_CONTAINERS` containers
  and `MOST_LISTED` other parts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from sharepod.api.bounds import MAX_CONTAINERS
from sharepod.api.dialects import FIELD_OF
from sharepod.api.objects import GPUS_ANNOTATION, LINE_CLAIM, LINE_LABEL, SHARE_GATE, TENANT_LABEL, VOLUME_NAME
from sharepod.api.pods.attached_volume import DRIVER_CAPABILITIES, VISIBLE_DEVICES
from sharepod.api.resource_line import MILLI

MOST_PARTS: Final = 512
"""Largest number of containers and claims in sum, counting each claim that a container names. No Pod that can run has
more."""
MOST_LISTED: Final = 2048
"""For a volume: largest number of variables and mounts of all containers, and volumes and gates of the Pod, in sum."""
MOST_CONTAINERS: Final = 2 * MAX_CONTAINERS
"""For a volume: largest number of containers. Each of them is patched, which takes Kopf a millisecond."""
_LISTS = ("containers", "initContainers")
_OF_POD: Final = {"schedulingGates": (SHARE_GATE,), "volumes": (VOLUME_NAME,)}
"""For a volume: lists of a Pod that are patched, with the names of SharePod's entries."""
_OF_CONTAINER: Final = {"env": (VISIBLE_DEVICES, DRIVER_CAPABILITIES), "volumeMounts": (VOLUME_NAME,)}
"""For a volume: lists of a container that are patched, with the names of SharePod's entries."""
_ANNOTATIONS: Final = frozenset({GPUS_ANNOTATION, *(name for name, field in FIELD_OF.items() if field == "mode")})
_LONGEST_NAME = 253
_POD = {"group": "", "version": "v1", "resource": "pods"}


class TooManyPartsError(Exception):
    """Error for a Pod with more parts than a reduced review may have."""


def left_of(review: Any, *, volume: bool = False) -> dict[str, Any]:
    """Return the reduced review. Raises `ValueError` for anything except a review of a new Pod, and
    `TooManyPartsError`.

    `volume`: True: keep the parts on which a volume depends. False: keep the parts on which a claim depends.
    """
    request = _map(_map(review).get("request"))
    pod, uid = request.get("object"), request.get("uid")
    asked = (request.get("operation"), request.get("subResource") or "", request.get("resource"))
    if asked != ("CREATE", "", _POD) or not isinstance(pod, Mapping) or not isinstance(uid, str):
        raise ValueError("it is not about a new Pod")
    left = _pod(pod, _by_volume if volume else _by_claim)
    asks = {"uid": uid[:_LONGEST_NAME], "operation": "CREATE", "resource": _POD, "userInfo": {}, "object": left}
    return {"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "request": asks}


def refusal(review: Any, *, volume: bool = False) -> dict[str, Any]:
    """Return the answer that refuses a Pod with too many parts."""
    text = f"with their claims they are more than {MOST_PARTS}"
    if volume:
        text = f"they are more than {MOST_CONTAINERS}, or have more than {MOST_LISTED} variables and mounts"
    status = {"code": 422, "message": f"spec.containers: {text}; write fewer"}
    response = {"uid": str(review["request"]["uid"])[:_LONGEST_NAME], "allowed": False, "status": status}
    return {"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "response": response}


def _pod(pod: Mapping[str, Any], held: Callable[[Mapping[str, Any]], dict[str, Any]]) -> dict[str, Any]:
    metadata = _map(pod.get("metadata"))
    names = {name: metadata.get(name) for name in ("name", "namespace")}
    left: dict[str, Any] = {name: value[:_LONGEST_NAME] for name, value in names.items() if isinstance(value, str)}
    if isinstance(labels := metadata.get("labels"), Mapping):
        left["labels"] = {name: value for name, value in labels.items() if name in (LINE_LABEL, TENANT_LABEL)}
    if isinstance(written := metadata.get("annotations"), Mapping):
        left["annotations"] = {name: value for name, value in written.items() if name in _ANNOTATIONS}
    return {"metadata": left, "spec": held(_map(pod.get("spec")))}


def _by_claim(spec: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parts of a Pod's spec on which the claim for its resource line depends."""
    containers = {name: _list(spec[name]) for name in _LISTS if name in spec}
    claims = _list(spec.get("resourceClaims"))
    named = sum(len(_claims(one)) for listed in containers.values() for one in listed)
    if sum(map(len, containers.values())) + named + len(claims) > MOST_PARTS:
        raise TooManyPartsError
    held = {"resourceClaims": _names(claims, (LINE_CLAIM,))} if "resourceClaims" in spec else {}
    return {**{name: [_container(one) for one in some] for name, some in containers.items()}, **held}


def _container(container: Any) -> dict[str, Any]:
    resources = _map(_map(container).get("resources"))
    if MILLI not in _map(resources.get("limits")):
        return {}
    claims = {"claims": _names(_claims(container), (LINE_CLAIM,))} if "claims" in resources else {}
    return {"resources": {"limits": {MILLI: "1"}, **claims}}


def _claims(container: Any) -> list[Any]:
    return _list(_map(_map(container).get("resources")).get("claims"))


def _by_volume(spec: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parts of a Pod's spec on which the volume for its resource line depends."""
    containers = {name: [_map(one) for one in _list(spec[name])] for name in _LISTS if name in spec}
    parts = sum(len(_list(one.get(name))) for some in containers.values() for one in some for name in _OF_CONTAINER)
    parts += sum(len(_list(spec.get(name))) for name in _OF_POD)
    if parts > MOST_LISTED or sum(map(len, containers.values())) > MOST_CONTAINERS:
        raise TooManyPartsError
    left: dict[str, Any] = {name: _names(_list(spec[name]), own) for name, own in _OF_POD.items() if name in spec}
    if "runtimeClassName" in spec:
        left["runtimeClassName"] = str(spec["runtimeClassName"] or "")[:_LONGEST_NAME]
    return {**{name: [_listing(one) for one in some] for name, some in containers.items()}, **left}


def _listing(container: Mapping[str, Any]) -> dict[str, Any]:
    left: dict[str, Any] = {
        name: _names(_list(container[name]), own) for name, own in _OF_CONTAINER.items() if name in container
    }
    if MILLI in _map(_map(container.get("resources")).get("limits")):
        left["resources"] = {"limits": {MILLI: "1"}}
    return left


def _names(items: list[Any], own: tuple[str, ...]) -> list[dict[str, str]]:
    """Return as many items, of which only those named in `own` keep their name. So the indexes in a patch stay
    valid."""
    names = (_map(one).get("name") for one in items)
    return [{"name": name} if isinstance(name, str) and name in own else {} for name in names]


def _map(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []
