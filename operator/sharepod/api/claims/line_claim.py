"""Claim of a resource line: the webhook's additions to a plain Pod with a line. Pure.

The MutatingAdmissionPolicy of `manifests/plain` does the same in CEL; a test compares the two.

Guarantees:
- A Pod that has all additions stays unchanged, so the mutation is idempotent.
- Nothing in a Pod is removed, and nothing is changed except for the additions.
- No content of a Pod causes an exception.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sharepod.api.objects import LINE_CLAIM, LINE_LABEL
from sharepod.api.resource_line import MILLI

_LISTS = ("containers", "initContainers")


def with_claim(pod: Mapping[str, Any]) -> dict[str, Any]:
    """Return a merge patch that gives a Pod the claim of its line. It is empty for a Pod without a line, or with the
    claim.

    The patch adds one claim from the namespace's template, its name in each container with a line, and the label of
    such Pods.
    """
    spec = _map(pod.get("spec"))
    lists = {name: [_naming(one) for one in _list(spec.get(name))] for name in _LISTS}
    if not any(_asks(one) for containers in lists.values() for one in containers):
        return {}
    changed: dict[str, Any] = {
        name: containers for name, containers in lists.items() if containers != _list(spec.get(name))
    }
    claims = _list(spec.get("resourceClaims"))
    if not any(_map(one).get("name") == LINE_CLAIM for one in claims):
        changed["resourceClaims"] = [*claims, {"name": LINE_CLAIM, "resourceClaimTemplateName": LINE_CLAIM}]
    patch: dict[str, Any] = {"spec": changed} if changed else {}
    if _map(_map(pod.get("metadata")).get("labels")).get(LINE_LABEL) != "true":
        patch["metadata"] = {"labels": {LINE_LABEL: "true"}}
    return patch


def _naming(container: Any) -> Any:
    """Return a container that names the claim, if it has a line; else the container as it is."""
    if not _asks(container):
        return container
    resources = _map(container.get("resources"))
    claims = _list(resources.get("claims"))
    if any(_map(one).get("name") == LINE_CLAIM for one in claims):
        return container
    return {**container, "resources": {**resources, "claims": [*claims, {"name": LINE_CLAIM}]}}


def _asks(container: Any) -> bool:
    return MILLI in _map(_map(_map(container).get("resources")).get("limits"))


def _map(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _list(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) else []
