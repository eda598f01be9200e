"""Parts that CustomResourceDefinitions share: the frame, printer columns, CEL rules."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sharepod.api.objects import GROUP, VERSION

from .schema import Schema

Rule = dict[str, str]

STAYS = "self == oldSelf"
"""Rule for a field that keeps the value with which it was created."""


def definition(
    *,
    kind: str,
    plural: str,
    short: str,
    scope: str,
    description: str,
    spec: Schema,
    status: Schema,
    columns: list[dict[str, Any]],
    subresources: dict[str, Any] | None = None,
    categories: list[str] | None = None,
) -> dict[str, Any]:
    """Return a CRD with one version."""
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{plural}.{GROUP}"},
        "spec": {
            "group": GROUP,
            "names": {
                "kind": kind,
                "listKind": f"{kind}List",
                "plural": plural,
                "singular": kind.lower(),
                "shortNames": [short],
                **({"categories": categories} if categories else {}),
            },
            "scope": scope,
            "versions": [
                {
                    "name": VERSION,
                    "served": True,
                    "storage": True,
                    "subresources": subresources or {"status": {}},
                    "additionalPrinterColumns": columns,
                    "schema": {
                        "openAPIV3Schema": {
                            "description": description,
                            "type": "object",
                            "properties": {
                                "apiVersion": {"type": "string"},
                                "kind": {"type": "string"},
                                "metadata": {"type": "object"},
                                "spec": spec,
                                "status": status,
                            },
                            "required": ["spec"],
                        }
                    },
                }
            ],
        },
    }


def column(name: str, kind: str, path: str, description: str = "", *, priority: int = 0) -> dict[str, Any]:
    """Return a column that kubectl get prints; a column of priority 1 only with -o wide."""
    result: dict[str, Any] = {"name": name, "type": kind, "jsonPath": path}
    if description:
        result["description"] = description
    if priority:
        result["priority"] = priority
    return result


def rule(rule: str, message: str, *, expression: str = "", field: str = "", reason: str = "") -> Rule:
    """Return a CEL rule. `expression`: CEL of the message, which may quote values. `message`: used without it."""
    result = {"rule": rule, "message": message}
    if expression:
        result["messageExpression"] = expression
    if field:
        result["fieldPath"] = f".{field}"
    if reason:
        result["reason"] = reason
    return result


def fix(schema: Schema, names: Sequence[str], allowed: str) -> None:
    """Make fields of an object immutable, by a rule for each.

    The API server evaluates rules at each write, including status writes. A rule of a field costs nothing while the
    field is absent.
    """
    for name in names:
        rules = schema["properties"][name].setdefault("x-kubernetes-validations", [])
        rules.append(rule(STAYS, f"cannot be changed {allowed}; delete the SharePod and create it again"))
