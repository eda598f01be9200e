"""Policy on plain Pods with a resource line where the cluster has no claims: refuses invalid lines, and lines without a
volume. Pure.

The policy `sharepod-tenant-label`, which every cluster has, checks that the volume is attached in the required form.
"""

from __future__ import annotations

from typing import Any

from sharepod.api.objects import LINE_TENANT, NO_GPUS, PLAIN_PODS_POLICY, TENANT_LABEL, VOLUME_NAME
from sharepod.api.resource_line import MILLI

from .cel import refuse, text
from .line_containers import past_the_line
from .line_policies import DISABLED, OPT_OUT_LABEL, limit_field, no_node, policy_object, refusals

_IS_LINE = f"object.metadata.?labels[?{text(TENANT_LABEL)}].orValue('') == {text(LINE_TENANT)}"


def refusing_policy() -> list[dict[str, Any]]:
    """Return the policy, with its binding."""
    binding = {"policyName": PLAIN_PODS_POLICY, "validationActions": ["Deny"]}
    line = limit_field(MILLI, "variables.asking[0]")
    attached = [
        no_node(),
        refuse(
            f"request.operation != 'CREATE' || variables.asking.size() == 0 || {_IS_LINE}",
            f"{line}was not turned into a share, and the Pod would run without a GPU; remove the label "
            f"{OPT_OUT_LABEL}={DISABLED} of the namespace if it has it, else ask an admin to apply "
            "manifests/plain-volume'",
        ),
        *past_the_line(VOLUME_NAME),
    ]
    spec = refusals(or_also=_IS_LINE, made_with=NO_GPUS, attached=attached)
    return [
        policy_object("ValidatingAdmissionPolicy", PLAIN_PODS_POLICY, spec),
        policy_object("ValidatingAdmissionPolicyBinding", PLAIN_PODS_POLICY, binding),
    ]
