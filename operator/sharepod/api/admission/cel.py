"""Building blocks of SharePod's admission policies in CEL. Pure.

Guarantees:
- An update that leaves spec and annotations as they are always passes, and so does every update of an object that is
  being deleted. Otherwise a stricter policy could keep a finalizer from being removed.
- A policy on SharePods is evaluated only for objects that may break one of its rules. The reason: the API server
  computes each message of an evaluated policy, even if every rule holds.
- Validations keep their order. The API server shows only the first refusal of a policy, so they are in the order in
  which a user should fix faults.
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
"""Match rule of a policy on claims and claim templates."""
NEW_OR_ANNOTATED = (
    "request.operation == 'CREATE' || (!has(object.metadata.deletionTimestamp) && "
    "object.metadata.?annotations.orValue({}) != oldObject.metadata.?annotations.orValue({}))"
)
"""CEL expression that is true if an object is new or its annotations change. For objects whose spec is immutable."""


def policy(
    name: str,
    operations: Sequence[str],
    variables: Iterable[tuple[str, str]],
    validations: Sequence[Validation],
    *,
    suspect: str = "true",
) -> list[dict[str, Any]]:
    """Return a policy on SharePods, and its binding for all namespaces.

    Args:
        name: Name of the policy and of the binding.
        operations: Operations that are checked.
        variables: Names and expressions that validations use.
        suspect: CEL expression without variables, cheaper than the rules, that is true for each object that breaks one.
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
    """Return a policy on the objects of one match rule, and its binding for all namespaces.

    Args:
        name: Name of the policy and of the binding.
        rule: Kinds and operations that are checked.
        conditions: Expressions by name, without variables, that are true for each object that may break a rule.
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
    """Return a validation that refuses an object unless the CEL expression `unless` is true. `message`: CEL expression
    of the refusal's text."""
    return {"expression": unless, "messageExpression": message}


def listed(path: str) -> str:
    """Return a CEL expression for the list at an optional path; empty if absent or null, as in claims without
    requests."""
    found = f"{path}.orValue([])"
    return f"(dyn({found}) == null ? [] : {found})"


def fraction(value: str) -> str:
    """Return a CEL expression for the number in a text that matches `FRACTION_PATTERN`. `value`: CEL expression of the
    text."""
    digits = f"{value}.replace('m', '').replace('%', '')"
    return f"(double({digits}) / ({value}.endsWith('m') ? 1000.0 : {value}.endsWith('%') ? 100.0 : 1.0))"


def number(value: str) -> str:
    """Return a CEL expression for the text of a quantity as a number, because the API server has changed 0.4 into 400m
    and 17000 into 17k. `value`: CEL expression of the quantity."""
    amount = f"quantity(string({value}))"
    return f"({amount}.isInteger() ? string({amount}.asInteger()) : string({amount}.asApproximateFloat()))"


def text(value: str) -> str:
    """Return a CEL string literal."""
    assert not {"'", "\\"} & set(value), f"{value} would need escapes in CEL"
    return f"'{value}'"


def texts(values: Iterable[str]) -> str:
    """Return a CEL list of string literals."""
    return "[" + ", ".join(text(value) for value in values) + "]"
