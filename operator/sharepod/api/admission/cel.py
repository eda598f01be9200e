"""Building blocks of our admission policies in CEL. Pure.

Guarantees:
- A change that touches neither spec nor annotations always passes, and so does every change of an object that is being
  deleted: a policy that became stricter must not keep a finalizer from being removed.
- A policy on SharePods is evaluated only for objects that may break one of its rules. The API server works out each
  message of a policy that is evaluated, also where every rule holds.
- Validations keep their order. The API server shows the first refusal of a policy, so they stand in the order in which
  a user should fix them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from sharepod.api.objects import GROUP, VERSION
from sharepod.api.sharepod import PLURAL

Validation = dict[str, str]


def policy(
    name: str,
    operations: Sequence[str],
    variables: Iterable[tuple[str, str]],
    validations: Sequence[Validation],
    *,
    suspect: str = "true",
) -> list[dict[str, Any]]:
    """Return a policy on SharePods and the binding that puts it into effect everywhere.

    Args:
        name: Name of both.
        operations: Operations that are looked at.
        variables: Names and expressions that validations use.
        validations: The rules.
        suspect: Expression without variables, cheaper than the rules, that is true of each object that breaks one.
    """
    changed = (
        "request.operation == 'CREATE' || (!has(object.metadata.deletionTimestamp) && "
        "(object.spec != oldObject.spec || "
        "object.metadata.?annotations.orValue({}) != oldObject.metadata.?annotations.orValue({})))"
    )
    metadata = {"name": name}
    return [
        {
            "apiVersion": "admissionregistration.k8s.io/v1",
            "kind": "ValidatingAdmissionPolicy",
            "metadata": metadata,
            "spec": {
                "failurePolicy": "Fail",
                "matchConstraints": {
                    "resourceRules": [
                        {
                            "apiGroups": [GROUP],
                            "apiVersions": [VERSION],
                            "operations": list(operations),
                            "resources": [PLURAL],
                        }
                    ]
                },
                "matchConditions": [
                    {"name": "spec-or-annotations-changed", "expression": changed},
                    *([{"name": "may-break-a-rule", "expression": suspect}] if suspect != "true" else []),
                ],
                "variables": [{"name": variable, "expression": expression} for variable, expression in variables],
                "validations": list(validations),
            },
        },
        {
            "apiVersion": "admissionregistration.k8s.io/v1",
            "kind": "ValidatingAdmissionPolicyBinding",
            "metadata": metadata,
            "spec": {"policyName": name, "validationActions": ["Deny"]},
        },
    ]


def refuse(unless: str, message: str) -> Validation:
    """Return a validation that refuses unless `unless` holds, with the value of the CEL expression `message`."""
    return {"expression": unless, "messageExpression": message}


def listed(path: str) -> str:
    """Return the CEL list at an optional path; empty where it is absent or null, as claims without requests have it."""
    found = f"{path}.orValue([])"
    return f"(dyn({found}) == null ? [] : {found})"


def text(value: str) -> str:
    """Return a CEL string."""
    assert not {"'", "\\"} & set(value), f"{value} would need escapes in CEL"
    return f"'{value}'"


def texts(values: Iterable[str]) -> str:
    """Return a CEL list of strings."""
    return "[" + ", ".join(text(value) for value in values) + "]"
