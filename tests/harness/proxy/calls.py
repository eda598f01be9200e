"""Kubernetes call that an HTTP request makes: its verb, resource, namespace and name.

Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

_VERBS = {"POST": "create", "PUT": "update", "PATCH": "patch", "HEAD": "get"}
_OF_NAMESPACES = ("status", "finalize")
"""Subresources of a Namespace. In `namespaces/a/status` the part after the name is no resource in the namespace."""


@dataclass(frozen=True, slots=True)
class Call:
    """Call of the API server. `resource`: plural name; empty for a path without a resource, such as `/readyz`."""

    verb: str
    """Verb as in RBAC: get, list, watch, create, update, patch, delete, deletecollection."""
    path: str
    query: Mapping[str, str]
    resource: str = ""
    namespace: str = ""
    name: str = ""
    subresource: str = ""

    @property
    def writes(self) -> bool:
        """True if the call changes an object."""
        return self.verb not in ("get", "list", "watch")


def call_of(method: str, path: str, query: Mapping[str, str]) -> Call:
    """Return the call that a request makes. `path`: without the query."""
    parts = [part for part in path.split("/") if part]
    rest = {"api": parts[2:], "apis": parts[3:]}.get(parts[0] if parts else "", [])
    namespace = ""
    if len(rest) > 2 and rest[0] == "namespaces" and rest[2] not in _OF_NAMESPACES:
        namespace, rest = rest[1], rest[2:]
    resource, name, *further = [*rest, "", ""][: max(len(rest), 2)]
    return Call(
        verb=_verb(method, name, query),
        path=path,
        query=dict(query),
        resource=resource,
        namespace=namespace,
        name=name,
        subresource="/".join(further),
    )


def _verb(method: str, name: str, query: Mapping[str, str]) -> str:
    if method == "GET":
        if query.get("watch") in ("true", "1"):
            return "watch"
        return "get" if name else "list"
    if method == "DELETE":
        return "delete" if name else "deletecollection"
    return _VERBS.get(method, method.lower())
