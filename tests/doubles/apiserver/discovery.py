"""API discovery: the groups, versions and resources of the double. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from .kinds import Json, Kind

_VERBS = ["create", "delete", "get", "list", "patch", "update", "watch"]
_NAMED = (
    Kind("/apis/apiextensions.k8s.io/v1", "customresourcedefinitions", "CustomResourceDefinition", namespaced=False),
)
"""Kinds that discovery lists although the double does not serve them. Kopf begins no watch before discovery has all of
them.
"""


def answer(path: str, kinds: Sequence[Kind]) -> Json | None:
    """Return the answer to a discovery request. None if the path is no discovery path."""
    kinds = (*kinds, *_NAMED)
    versions = sorted({kind.api_version for kind in kinds if "/" in kind.api_version})
    if path == "/version":
        return {"major": "1", "minor": "36", "gitVersion": "v1.36.0"}
    if path == "/api":
        return {"versions": ["v1"]}
    if path == "/apis":
        return {"groups": [_group(*version.split("/")) for version in versions]}
    resources = [
        {"name": kind.plural, "singularName": "", "kind": kind.kind, "namespaced": kind.namespaced, "verbs": _VERBS}
        for kind in kinds
        if kind.prefix == path
    ]
    return {"resources": resources} if resources else None


def _group(name: str, version: str) -> Json:
    served = {"groupVersion": f"{name}/{version}", "version": version}
    return {"name": name, "versions": [served], "preferredVersion": served}
