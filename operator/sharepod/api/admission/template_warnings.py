"""Warnings about Deployments, StatefulSets, DaemonSets, Jobs and CronJobs whose Pod template has an invalid resource
line, so that admission would refuse its Pods. Pure.

Guarantees:
- The rules for new plain Pods (`line_policies.refusals`) are applied to the template.
- No object is refused: kubectl prints the messages, and the object is stored.
- A change that leaves the spec as it is causes no warning.
"""

from __future__ import annotations

import re
from typing import Any

from .line_containers import past_the_line
from .line_policies import no_node, policy_object, refusals

NAME = "sharepod-templates"
_TEMPLATE = "(object.kind == 'CronJob' ? object.spec.jobTemplate.spec.template : object.spec.template)"
_PARTS = {"metadata.?": "?metadata.?", "spec.": "spec."}
"""Beginning of a path in a Pod -> the same in a Pod template, whose metadata may be absent."""
_KINDS = {"apps": ["deployments", "statefulsets", "daemonsets"], "batch": ["jobs", "cronjobs"]}


def template_policies() -> list[dict[str, Any]]:
    """Return the policy, with its binding."""
    of_pods = refusals(or_also="false", made_with="", attached=[no_node(), *past_the_line()])
    conditions = [
        {"name": one["name"], "expression": _of_template(one["expression"], _TEMPLATE)}
        for one in of_pods["matchConditions"]
        if "oldObject" not in one["expression"]
    ]
    changed = "request.operation == 'CREATE' || object.spec != oldObject.spec"
    spec = {
        "failurePolicy": "Ignore",
        "matchConstraints": {
            "resourceRules": [
                {"apiGroups": [group], "apiVersions": ["v1"], "operations": ["CREATE", "UPDATE"], "resources": kinds}
                for group, kinds in _KINDS.items()
            ]
        },
        "matchConditions": [{"name": "new-or-changed", "expression": changed}, *conditions],
        "variables": [
            {"name": "template", "expression": _TEMPLATE},
            *({**one, "expression": _of_template(one["expression"])} for one in of_pods["variables"]),
        ],
        "validations": [
            {
                "expression": _of_template(rule["expression"]),
                "messageExpression": "'the Pods of this ' + object.kind + ' would be refused: ' + "
                f"({_of_template(rule['messageExpression'])})",
            }
            for rule in of_pods["validations"]
            if "oldObject" not in rule["expression"]
        ],
    }
    binding = {"policyName": NAME, "validationActions": ["Warn"]}
    return [
        policy_object("ValidatingAdmissionPolicy", NAME, spec),
        policy_object("ValidatingAdmissionPolicyBinding", NAME, binding),
    ]


def _of_template(expression: str, template: str = "variables.template") -> str:
    """Return a CEL expression about a new Pod, rewritten as one about a Pod template."""
    about = re.sub(r"object\.(metadata\.\?|spec\.)", lambda found: f"{template}.{_PARTS[found[1]]}", expression)
    return about.replace("request.operation == 'CREATE'", "true").replace("request.operation != 'CREATE'", "false")
