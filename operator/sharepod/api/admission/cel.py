"""Building blocks of SharePod's admission policies in CEL. Pure.

Guarantees:
- A change of neither spec nor annotations always passes, and so does every change of an object that is being deleted. A
  policy that became stricter must not keep a finalizer from being removed.
- A policy on SharePods is evaluated only for objects that may break one of its rules. The reason: the API server
  computes each message of an evaluated policy, even if every rule holds.
- Validations keep their order. The API server shows the first refusal of a policy, so they are in the order in which a
  user should fix them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from sharepod.api.objects import GROUP, VERSION
from sharepod.api.sharepod import PLURAL

Validation = dict[str, str]

CLAIMS_RULE: Mapping[str, Any] = {
    "apiGroups": ["resource.k8s.io"],
    "apiVersions": ["v1"],
    "operations": ["CREATE", "UPDATE"],
    "resources": ["resourceclaims", "resourceclaimtemplates"],
}
"""Rule of a policy on claims and templates."""
NEW_OR_ANNOTATED = (
    "request.operation == 'CREATE' || (!has(object.metadata.deletionTimestamp) && "
    "object.metadata.?annotations.orValue({}) != oldObject.metadata.?annotations.orValue({}))"
)
"""Expression that is true for an object that is new, or whose annotations change: its spec cannot change."""


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
        operations: Operations that are checked.
        variables: Names and expressions that validations use.
        validations: The rules.
        suspect: Expression without variables, cheaper than the rules, that is true for each object that breaks one.
    """
    changed = (
        "request.operation == 'CREATE' || (!has(object.metadata.deletionTimestamp) && "
        "(object.spec != oldObject.spec || "
        "object.metadata.?annotations.orValue({}) != oldObject.metadata.?annotations.orValue({})))"
    )
    rule = {
        "apiGroups": [GROUP],
        "apiVersions": [VERSION],
        "operations": list(operations),
        "resources": [PLURAL],
    }
    conditions = {"spec-or-annotations-changed": changed}
    if suspect != "true":
        conditions["may-break-a-rule"] = suspect
    return in_force(name, rule, conditions, validations, variables)


def in_force(
    name: str,
    rule: Mapping[str, Any],
    conditions: Mapping[str, str],
    validations: Sequence[Validation],
    variables: Iterable[tuple[str, str]] | None = None,
) -> list[dict[str, Any]]:
    """Return a policy on the objects of one rule and the binding that puts it into effect everywhere.

    Args:
        name: Name of both.
        rule: Kinds and operations that are checked.
        conditions: Expressions by name, without variables, that are true for each object that may break a rule.
        validations: The rules.
        variables: Names and expressions that validations use; None: there are none.
    """
    metadata = {"name": name}
    spec: dict[str, Any] = {
        "failurePolicy": "Fail",
        "matchConstraints": {"resourceRules": [dict(rule)]},
        "matchConditions": [{"name": key, "expression": expression} for key, expression in conditions.items()],
    }
    if variables is not None:
        spec["variables"] = [{"name": variable, "expression": expression} for variable, expression in variables]
    spec["validations"] = list(validations)
    return [
        {
            "apiVersion": "admissionregistration.k8s.io/v1",
            "kind": "ValidatingAdmissionPolicy",
            "metadata": metadata,
            "spec": spec,
        },
        {
            "apiVersion": "admissionregistration.k8s.io/v1",
            "kind": "ValidatingAdmissionPolicyBinding",
            "metadata": metadata,
            "spec": {"policyName": name, "validationActions": ["Deny"]},
        },
    ]


def refuse(unless: str, message: str) -> Validation:
    """Return a validation that refuses an object unless the expression `unless` is true. `message`: CEL expression of
    the refusal's text."""
    return {"expression": unless, "messageExpression": message}


def listed(path: str) -> str:
    """Return the CEL list at an optional path; empty if it is absent or null, as in claims without requests."""
    found = f"{path}.orValue([])"
    return f"(dyn({found}) == null ? [] : {found})"


def fraction(value: str) -> str:
    """Return the CEL number of a text that matches `FRACTION_PATTERN`; `value`: a CEL expression."""
    digits = f"{value}.replace('m', '').replace('%', '')"
    return f"(double({digits}) / ({value}.endsWith('m') ? 1000.0 : {value}.endsWith('%') ? 100.0 : 1.0))"


def text(value: str) -> str:
    """Return a CEL string."""
    assert not {"'", "\\"} & set(value), f"{value} would need escapes in CEL"
    return f"'{value}'"


def texts(values: Iterable[str]) -> str:
    """Return a CEL list of strings."""
    return "[" + ", ".join(text(value) for value in values) + "]"
