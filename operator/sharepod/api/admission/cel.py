"""The parts that our admission policies are made of. Pure.

A change that touches neither spec nor annotations always passes, and so does every change of an object that is being
deleted: a policy that became stricter must not keep a finalizer from being removed. The API server shows the first
refusal of a policy, so validations stand in the order in which a user should mend.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from sharepod.api.objects import GROUP, VERSION
from sharepod.api.sharepod import PLURAL

Validation = dict[str, str]


def policy(
    name: str, operations: Sequence[str], variables: Iterable[tuple[str, str]], validations: Sequence[Validation]
) -> list[dict[str, Any]]:
    """A policy on SharePods and the binding that puts it in force everywhere."""
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
                "matchConditions": [{"name": "spec-or-annotations-changed", "expression": changed}],
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
    """A validation: refused unless `unless` holds, with what the CEL expression `message` says."""
    return {"expression": unless, "messageExpression": message}


def text(value: str) -> str:
    assert not {"'", "\\"} & set(value), f"{value} would need escapes in CEL"
    return f"'{value}'"


def texts(values: Iterable[str]) -> str:
    return "[" + ", ".join(text(value) for value in values) + "]"
