"""Admission of plain Pods with a resource line, by claims. One policy gives each Pod its claim, one refuses invalid
lines, and one keeps other users from such claims. Pure.

The messages are nearly the messages of `plain_pods.lower`, from the same tables. Sums over init containers with a line
are left to `lower`, whose refusal is an Event on the Pod.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sharepod.api.dialects import FIELD_OF, KEYS, NATIVE_PREFIX
from sharepod.api.gpunode import Latency
from sharepod.api.objects import (
    DEVICE_CLASS,
    GPUS_ANNOTATION,
    GROUP,
    LINE_CLAIM,
    LINE_LABEL,
    LINE_REQUEST,
    LINE_TENANT,
    MAX_GPUS,
    PLACEHOLDER_LABEL,
    PLAIN_PODS_POLICY,
    SHARE_GATE,
    TENANT_LABEL,
)
from sharepod.api.pods.plain_pods import MAX_MIB, MEMORY_ALONE, MEMORY_BY_ANNOTATION, NOT_A_SHARE, USUAL
from sharepod.api.resource_line import MEMORY, MILLI, PREFIX, RESOURCES

from .cel import Validation, fraction, listed, number, refuse, text, texts
from .line_containers import past_the_line
from .request import annotation_variables, few, known, once, readable

CLAIMS_NAME = "sharepod-line-claims"
OPT_OUT_LABEL = f"{GROUP}/plain-pods"
"""Label of a namespace. With the value `disabled`, resource lines of its Pods give no share."""
DISABLED = "disabled"

NOT_OPTED_OUT = {"matchExpressions": [{"key": OPT_OUT_LABEL, "operator": "NotIn", "values": [DISABLED]}]}

API = "admissionregistration.k8s.io/v1"
_CONTAINERS = "object.spec.containers + object.spec.?initContainers.orValue([])"
_LIMITS = "c.?resources.?limits.orValue({})"
_ASKS = f"({text(MILLI)} in {_LIMITS})"
OF_NO_SHAREPOD = f"object.metadata.?labels[?{text(TENANT_LABEL)}].orValue({text(LINE_TENANT)}) == {text(LINE_TENANT)}"
"""CEL expression: true for a Pod without a SharePod's tenant label, which only the operator can set."""
_OF_NO_PLACEHOLDER = f"!({text(PLACEHOLDER_LABEL)} in object.metadata.?labels.orValue({{}}))"
"""CEL expression: true for a Pod without the label of placeholders, which only the operator can set. Placeholders have
a line and no claim."""
PATCHES_LEDGER = f"authorizer.group({text(GROUP)}).resource('gpunodes').check('patch').allowed()"
_MOST = {MILLI: MAX_GPUS * 1000, MEMORY: MAX_MIB}
_MUTABLE = [name for name, field in FIELD_OF.items() if field == "request"]


def asks(name: str) -> str:
    """Return a CEL expression that is true if the container `c` names this resource among its limits."""
    return f"({text(name)} in {_LIMITS})"


def plain_pod_mutation() -> list[dict[str, Any]]:
    """Return the policy that gives Pods with a line their claims, and its binding."""
    selected = {"policyName": PLAIN_PODS_POLICY, "matchResources": {"namespaceSelector": NOT_OPTED_OUT}}
    return [
        policy_object("MutatingAdmissionPolicy", PLAIN_PODS_POLICY, _translation()),
        policy_object("MutatingAdmissionPolicyBinding", PLAIN_PODS_POLICY, selected),
    ]


def refusing_policies() -> list[dict[str, Any]]:
    """Return the policies, with bindings, that refuse Pods with an invalid line or without its claim, and protect these
    claims."""
    everywhere: dict[str, Any] = {"policyName": PLAIN_PODS_POLICY}
    return [
        policy_object("ValidatingAdmissionPolicy", PLAIN_PODS_POLICY, _refused_without_claim()),
        policy_object(
            "ValidatingAdmissionPolicyBinding", PLAIN_PODS_POLICY, everywhere | {"validationActions": ["Deny"]}
        ),
        policy_object("ValidatingAdmissionPolicy", CLAIMS_NAME, _kept_claims()),
        policy_object(
            "ValidatingAdmissionPolicyBinding", CLAIMS_NAME, {"policyName": CLAIMS_NAME, "validationActions": ["Deny"]}
        ),
    ]


def policy_object(kind: str, name: str, spec: Mapping[str, Any]) -> dict[str, Any]:
    return {"apiVersion": API, "kind": kind, "metadata": {"name": name}, "spec": dict(spec)}


def _rules(group: str, version: str, operations: list[str], *resources: str) -> dict[str, Any]:
    rule = {"apiGroups": [group], "apiVersions": [version], "operations": operations, "resources": list(resources)}
    return {"resourceRules": [rule]}


def _translation() -> dict[str, Any]:
    """Return the spec of the policy that adds a claim, names it in each container with a line, and labels the Pod."""
    labelled = f"metadata: Object.metadata{{labels: {{{text(LINE_LABEL)}: 'true'}}}}"

    def with_claim(field: str, containers: str) -> str:
        container = f"Object.spec.{field}"
        claims = f"{container}.resources.claims{{name: {text(LINE_CLAIM)}}}"
        resources = f"{container}.resources{{claims: [{claims}]}}"
        return f"{field}: {containers}.filter(c, {_ASKS}).map(c, {container}{{name: c.name, resources: {resources}}})"

    claim = f"Object.spec.resourceClaims{{name: {text(LINE_CLAIM)}, resourceClaimTemplateName: {text(LINE_CLAIM)}}}"
    parts = [
        f"resourceClaims: [{claim}]",
        with_claim("containers", "object.spec.containers"),
        with_claim("initContainers", "object.spec.?initContainers.orValue([])"),
    ]
    return {
        "failurePolicy": "Fail",
        "reinvocationPolicy": "IfNeeded",
        "matchConstraints": _rules("", "v1", ["CREATE"], "pods"),
        "matchConditions": translated_pods(),
        "mutations": [
            {
                "patchType": "ApplyConfiguration",
                "applyConfiguration": {"expression": f"Object{{{labelled}, spec: Object.spec{{{', '.join(parts)}}}}}"},
            }
        ],
    }


def translated_pods() -> list[dict[str, str]]:
    """Return the match conditions of Pods to which admission adds a claim for their line."""
    other = (
        f"object.spec.?resourceClaims.orValue([]).exists(r, r.name == {text(LINE_CLAIM)} && "
        f"r.?resourceClaimTemplateName.orValue('') != {text(LINE_CLAIM)})"
    )
    return [*line_pods(), {"name": "name-is-free", "expression": f"!{other}"}]


def line_pods(of_no_sharepod: str = OF_NO_SHAREPOD) -> list[dict[str, str]]:
    """Return the match conditions of Pods with a line that belong to no SharePod and are no placeholders."""
    return [
        {"name": "has-a-line", "expression": f"({_CONTAINERS}).exists(c, {_ASKS})"},
        {"name": "of-no-sharepod", "expression": of_no_sharepod},
        {"name": "no-placeholder", "expression": _OF_NO_PLACEHOLDER},
    ]


def _refused_without_claim() -> dict[str, Any]:
    """Return the spec of the policy that refuses invalid lines and annotations, and lines without a claim."""
    from_template = (
        "object.spec.?resourceClaims.orValue([]).exists(r, "
        f"r.?resourceClaimTemplateName.orValue('') == {text(LINE_CLAIM)})"
    )
    return refusals(or_also=from_template, made_with="", attached=_translated())


def refusals(*, or_also: str, made_with: str, attached: list[Validation]) -> dict[str, Any]:
    """Return the spec of a policy that refuses invalid lines and annotations.

    Args:
        or_also: CEL expression for Pods to check without a line.
        made_with: Value of the annotation with the GPUs in a new Pod.
        attached: Validations of the attaching claim or volume.
    """
    ours = f"k.startsWith({text(PREFIX)})"
    with_line = f"{_LIMITS}.exists(k, {ours}) || c.?resources.?requests.orValue({{}}).exists(k, {ours})"
    changed = (
        "request.operation == 'CREATE' || (!has(object.metadata.deletionTimestamp) && "
        "object.metadata.?annotations.orValue({}) != oldObject.metadata.?annotations.orValue({}))"
    )
    return {
        "failurePolicy": "Fail",
        "matchConstraints": _rules("", "v1", ["CREATE", "UPDATE"], "pods"),
        "matchConditions": [
            {"name": "has-a-line", "expression": f"({_CONTAINERS}).exists(c, {with_line}) || {or_also}"},
            {"name": "of-no-sharepod", "expression": OF_NO_SHAREPOD},
            {"name": "no-placeholder", "expression": _OF_NO_PLACEHOLDER},
            {"name": "new-or-annotations-changed", "expression": changed},
        ],
        "variables": [{"name": name, "expression": expression} for name, expression in _variables()],
        "validations": [
            *_lines(),
            *few(),
            known(without=("memory",)),
            once(),
            _no_memory_annotation(),
            *readable(),
            *_sizes(),
            *_exclusive(),
            *_refined(),
            *_operators(made_with),
            *attached,
            _left_out(),
        ],
    }


def _variables() -> list[tuple[str, str]]:
    in_init = f"object.spec.?initContainers.orValue([]).exists(c, {_ASKS})"
    of = "int(variables.annotations[variables.count[0]])"
    request = fraction("variables.annotations[variables.request[0]]")
    return [
        *annotation_variables(),
        ("containers", _CONTAINERS),
        ("asking", f"variables.containers.filter(c, {_ASKS})"),
        ("inMemory", f"variables.containers.filter(c, {text(MEMORY)} in {_LIMITS})"),
        ("simple", f"variables.asking.size() > 0 && !{in_init}"),
        ("milli", f"variables.simple ? variables.asking.map(c, {_amount(MILLI)}.asInteger()).sum() : 1"),
        ("mib", f"variables.simple ? variables.inMemory.map(c, {_amount(MEMORY)}.asInteger()).sum() : 0"),
        ("whole", "variables.milli > 1000 && variables.milli % 1000 == 0 ? variables.milli / 1000 : 1"),
        ("gpus", f"variables.count.size() > 0 ? {of} : variables.whole"),
        ("each", f"variables.request.size() > 0 ? {request} * 1000.0 : double(variables.milli / variables.gpus)"),
    ]


def _amount(name: str) -> str:
    """Return a CEL expression: the quantity of this resource in the limits of the container `c`."""
    return f"quantity(string({_LIMITS}[{text(name)}]))"


def _beyond(name: str) -> str:
    """Return a CEL condition: whether the container `c` requests more of this resource than any node has."""
    return f"{_amount(name)}.isGreaterThan(quantity('{_MOST[name]}'))"


def limit_field(name: str, container: str) -> str:
    """Return a CEL expression for a resource's path in a container's limits. `container`: CEL expression of it."""
    kind = f"(object.spec.containers.exists(o, o.name == {container}.name) ? 'containers[' : 'initContainers[')"
    return f"'spec.' + {kind} + {container}.name + '].resources.limits[{name}]: "


def _lines() -> list[Validation]:
    """Return the validations of lines within a single container."""
    unknown = f"k, k.startsWith({text(PREFIX)}) && !(k in {texts(RESOURCES)})"
    here = f"c.?resources.?limits.orValue({{}}).exists({unknown})"
    bad = f"variables.containers.filter(c, {here})"
    alone = f"variables.inMemory.filter(c, !{_ASKS})"
    known_resources = ", ".join(RESOURCES)
    without = f"variables.asking.filter(c, !({text(MEMORY)} in {_LIMITS}))"
    zero = {
        name: f"variables.{which}.filter(c, {_amount(name)}.asInteger() == 0)"
        for name, which in ((MILLI, "asking"), (MEMORY, "inMemory"))
    }
    more = {  # compared as quantities, because a larger amount may not fit into an integer of CEL
        name: f"variables.{which}.filter(c, {_beyond(name)})"
        for name, which in ((MILLI, "asking"), (MEMORY, "inMemory"))
    }

    def written(name: str) -> str:
        return number(f"{more[name]}[0].resources.limits[{text(name)}]")

    return [
        refuse(
            f"{bad}.size() == 0",
            f"'spec.containers[' + {bad}[0].name + '].resources.limits[' + "
            f"{bad}[0].resources.limits.filter({unknown})[0] + ']: is not known; use {known_resources}, or remove it'",
        ),
        refuse(f"{alone}.size() == 0", f"{limit_field(MEMORY, f'{alone}[0]')}{MEMORY_ALONE}'"),
        refuse(
            f"{more[MILLI]}.size() == 0",
            f"{limit_field(MILLI, f'{more[MILLI]}[0]')}' + {written(MILLI)} + ' is more than the GPUs of a node are; "
            f"write at most {MAX_GPUS * 1000}'",
        ),
        refuse(
            f"{more[MEMORY]}.size() == 0",
            f"{limit_field(MEMORY, f'{more[MEMORY]}[0]')}' + {written(MEMORY)} + ' MiB is more memory than any node "
            "has on its GPUs; write a number of MiB such as 4096'",
        ),
        *(
            refuse(
                f"{some}.size() == 0",
                f"{limit_field(name, f'{some}[0]')}0 asks for nothing; write a whole number such as {USUAL[name]}, or "
                "remove it'",
            )
            for name, some in zero.items()
        ),
        refuse(
            f"variables.inMemory.size() == 0 || {without}.size() == 0",
            f"{limit_field(MEMORY, f'{without}[0]')}is set only in another container; write it in each with a line, "
            "or in none'",
        ),
    ]


def _no_memory_annotation() -> Validation:
    return refuse(
        "variables.memory.size() == 0",
        f"'metadata.annotations[' + variables.memory[0] + ']: {MEMORY_BY_ANNOTATION}'",
    )


def _sizes() -> list[Validation]:
    """Return validations that refuse sizes that no number of GPUs has."""
    line, memory = limit_field(MILLI, "variables.asking[0]"), limit_field(MEMORY, "variables.inMemory[0]")
    return [
        refuse(
            "!variables.simple || variables.count.size() > 0 || variables.milli <= 1000 || variables.milli % 1000 == 0",
            f"{line}' + string(variables.milli) + ' {NOT_A_SHARE}'",
        ),
        refuse(
            f"!variables.simple || variables.gpus <= {MAX_GPUS} || variables.asking.exists(c, {_beyond(MILLI)})",
            f"{line}' + string(variables.gpus) + ' GPUs are more than a node has; write at most {MAX_GPUS * 1000}'",
        ),
        refuse(
            "!variables.simple || variables.count.size() == 0 || "
            "(variables.milli % variables.gpus == 0 && variables.milli <= variables.gpus * 1000)",
            f"{line}' + string(variables.milli) + ' is no whole number from 1 to 1000 for each of ' + "
            "string(variables.gpus) + ' GPUs; write a multiple of ' + string(variables.gpus) + ' up to ' + "
            f"string(variables.gpus * 1000) + ', or change the annotation {NATIVE_PREFIX}count'",
        ),
        refuse(
            "!variables.simple || variables.mib % variables.gpus == 0",
            f"{memory}' + string(variables.mib) + ' MiB cannot be divided evenly among ' + string(variables.gpus) + "
            "' GPUs; write a multiple of ' + string(variables.gpus)",
        ),
    ]


def _exclusive() -> list[Validation]:
    """Return validations that refuse fields that an Exclusive Pod cannot have."""
    line, memory = limit_field(MILLI, "variables.asking[0]"), limit_field(MEMORY, "variables.inMemory[0]")
    mode = f"the annotation {NATIVE_PREFIX}mode"
    return [
        refuse(
            "!variables.exclusive || !variables.simple || variables.milli == variables.gpus * 1000",
            f"{line}' + string(variables.milli) + ' on ' + string(variables.gpus) + ' GPUs is not 1000 each, and an "
            f"Exclusive Pod has whole GPUs; write ' + string(variables.gpus * 1000) + ' or remove {mode}'",
        ),
        refuse(
            "!variables.exclusive || variables.inMemory.size() == 0",
            f"{memory}an Exclusive Pod has all memory of its GPUs; remove it or {mode}'",
        ),
        *(
            refuse(
                f"!variables.exclusive || variables.{field}.size() == 0{unless}",
                f"'metadata.annotations[' + variables.{field}[0] + ']: an Exclusive Pod has whole GPUs; remove it or "
                f"{mode}'",
            )
            for field, unless in (
                ("request", ""),
                ("limit", f" || {fraction('variables.annotations[variables.limit[0]]')} == 1.0"),
                ("latency", f" || variables.annotations[variables.latency[0]] != '{Latency.INTERACTIVE}'"),
            )
        ),
    ]


def _refined() -> list[Validation]:
    """Return validations that refuse annotations that contradict the line."""
    request, limit = (f"variables.annotations[variables.{field}[0]]" for field in ("request", "limit"))
    return [
        refuse(
            "!variables.simple || variables.request.size() == 0 || "
            f"{fraction(request)} * 1000.0 <= double(variables.milli / variables.gpus) + 0.001",
            f"'metadata.annotations[' + variables.request[0] + ']: ' + {request} + ' is more than the line has on each "
            "GPU, ' + string(variables.milli / variables.gpus) + ' thousandths; write that or less'",
        ),
        refuse(
            f"variables.request.size() == 0 || {fraction(request)} > 0.0 || variables.inMemory.size() > 0",
            "'metadata.annotations[' + variables.request[0] + ']: 0 (best effort) needs "
            f"{MEMORY} next to the line; write more than 0'",
        ),
        refuse(
            f"variables.request.size() == 0 || {fraction(request)} > 0.0 || "
            f"!variables.latency.exists(k, variables.annotations[k] == '{Latency.INTERACTIVE}')",
            "'metadata.annotations[' + variables.latency[0] + ']: Interactive spends guaranteed time, and ' + "
            "variables.request[0] + ' is 0; write a request such as 0.3, or remove it'",
        ),
        refuse(
            f"!variables.simple || variables.limit.size() == 0 || {fraction(limit)} * 1000.0 >= variables.each - 0.001",
            f"'metadata.annotations[' + variables.limit[0] + ']: ' + {limit} + ' is less than the request ' + "
            "string(variables.each / 1000.0) + '; write that or more'",
        ),
        refuse(
            "!variables.simple || variables.uuids.all(k, variables.annotations[k].split(',').size() >= variables.gpus)",
            "'metadata.annotations[' + variables.uuids[0] + ']: names fewer GPUs than the line has; name at least ' + "
            "string(variables.gpus) + ', or none'",
        ),
    ]


def _operators(made_with: str) -> list[Validation]:
    """Return validations that refuse fields of the operator, and changes without effect."""
    now, before = (f"{one}.metadata.?annotations.orValue({{}})" for one in ("object", "oldObject"))
    gpus = f"[?{text(GPUS_ANNOTATION)}].orValue('')"
    fixed = texts(name for key in KEYS for name in key.annotations if name not in _MUTABLE)
    differs = f"!(k in {now} && k in {before} && {now}[k] == {before}[k])"
    changed = f"({now}.filter(k, k in {fixed} && {differs}) + {before}.filter(k, k in {fixed} && {differs}))"
    return [
        refuse(
            f"object.metadata.?annotations{gpus} == (request.operation == 'CREATE' ? '{made_with}' : "
            f"oldObject.metadata.?annotations{gpus}) || {PATCHES_LEDGER}",
            f"'metadata.annotations[{GPUS_ANNOTATION}]: names the GPUs that the Pod has a share of, and is written "
            "only by the operator; remove it'",
        ),
        refuse(
            f"request.operation != 'UPDATE' || {changed}.size() == 0",
            f"'metadata.annotations[' + {changed}[0] + ']: cannot be changed (only {NATIVE_PREFIX}request can); delete "
            "the Pod and create it again'",
        ),
    ]


def _left_out() -> Validation:
    """Return the validation that refuses a line in a namespace with `OPT_OUT_LABEL`, also with the claim in the
    manifest."""
    label = f"namespaceObject.metadata.?labels[?{text(OPT_OUT_LABEL)}].orValue('')"
    return refuse(
        f"request.operation != 'CREATE' || variables.asking.size() == 0 || {label} != {text(DISABLED)}",
        f"{limit_field(MILLI, 'variables.asking[0]')}gives no share in namespace ' + request.namespace + ': remove its "
        f"label {OPT_OUT_LABEL}={DISABLED}, or use another namespace'",
    )


def _translated() -> list[Validation]:
    """Return validations that refuse a Pod with a line and no claim for it, and any other use of a line's claim."""
    entries = "object.spec.?resourceClaims.orValue([])"
    name = text(LINE_CLAIM)
    mine = f"r.name == {name} && r.?resourceClaimTemplateName.orValue('') == {name}"
    unnamed = f"variables.asking.filter(c, !c.?resources.?claims.orValue([]).exists(r, r.name == {name}))"
    line = limit_field(MILLI, "variables.asking[0]")
    return [
        no_node(),
        refuse(
            "request.operation != 'CREATE' || variables.asking.size() == 0 || "
            f"!object.spec.?schedulingGates.orValue([]).exists(g, g.name == {text(SHARE_GATE)})",
            f"'spec.schedulingGates[{SHARE_GATE}]: is opened only for Pods of SharePods; remove it: a Pod with "
            f"{MILLI} waits for its claim'",
        ),
        refuse(
            f"variables.asking.size() == 0 || !{entries}.exists(r, r.name == {name} && !({mine}))",
            f"'spec.resourceClaims[{LINE_CLAIM}]: is the name of the claim that a Pod with {MILLI} gets; use another "
            "name'",
        ),
        refuse(
            f"variables.asking.size() > 0 || !{entries}.exists(r, r.?resourceClaimTemplateName.orValue('') == {name})",
            f"'spec.resourceClaims: resourceClaimTemplateName {LINE_CLAIM} is only for Pods with {MILLI}; write "
            f"resources.limits[{MILLI}], or use another template'",
        ),
        refuse(
            f"{entries}.filter(r, r.?resourceClaimTemplateName.orValue('') == {name}).all(r, {mine})",
            f"'spec.resourceClaims: a claim from template {LINE_CLAIM} is added once, as {LINE_CLAIM}; remove it'",
        ),
        refuse(
            f"variables.asking.size() == 0 || ({entries}.exists(r, {mine}) && {unnamed}.size() == 0)",
            f"{line}was not turned into a claim, and the Pod would run without a GPU; remove the label "
            f"{OPT_OUT_LABEL}={DISABLED} of the namespace if it has it, else ask an admin to apply manifests/plain'",
        ),
        *past_the_line(),
    ]


def no_node() -> Validation:
    """Return the validation that refuses a Pod with a line that names its node."""
    return refuse(
        "request.operation != 'CREATE' || variables.asking.size() == 0 || object.spec.?nodeName.orValue('') == ''",
        "'spec.nodeName: would go past placement and the scheduler; remove it and use a nodeSelector on "
        "kubernetes.io/hostname'",
    )


def _kept_claims() -> dict[str, Any]:
    """Return the policy spec that reserves lines' claims: their template's name for one without sizes, each claim for
    the Pod that owns it."""
    template = "object.kind == 'ResourceClaimTemplate'"
    requests = listed(f"({template} ? object.spec.?spec : object.?spec).?devices.?requests")
    sizeless = (
        f"{requests}.size() == 1 && {requests}.all(r, r.name == {text(LINE_REQUEST)} && "
        f"r.?exactly.?deviceClassName.orValue('') == {text(DEVICE_CLASS)} && "
        "r.?exactly.?capacity.?requests.orValue({}).size() == 0)"
    )
    owners = "{}.metadata.?ownerReferences.orValue([]).filter(o, o.?controller.orValue(false)).map(o, o.uid)"
    now, before = owners.format("object"), owners.format("oldObject")
    reserved = "{}.?status.?reservedFor.orValue([])"
    strangers = (
        f"{reserved.format('object')}.filter(r, !(r.uid in {now}) && "
        f"!{reserved.format('oldObject')}.exists(o, o.uid == r.uid))"
    )
    return {
        "failurePolicy": "Fail",
        "matchConstraints": _rules(
            "resource.k8s.io",
            "v1",
            ["CREATE", "UPDATE"],
            "resourceclaimtemplates",
            "resourceclaims",
            "resourceclaims/status",
        ),
        "matchConditions": [
            {
                "name": "of-a-line",
                "expression": f"({template} && object.metadata.name == {text(LINE_CLAIM)}) || ({sizeless})",
            }
        ],
        "validations": [
            refuse(
                f"!({template}) || request.operation != 'CREATE' || ({sizeless})",
                f"'metadata.name: {LINE_CLAIM} is the template of Pods with {MILLI}; use another name'",
            ),
            refuse(
                f"{template} || request.operation != 'UPDATE' || {now}.all(o, o in {before})",
                "'metadata.ownerReferences: the claim belongs to the Pod whose line it is for; write another claim'",
            ),
            refuse(
                f"{template} || request.operation != 'UPDATE' || {strangers}.size() == 0",
                f"'status.reservedFor: the claim is for the Pod whose line it was made for, and not for ' + "
                f"{strangers}[0].name + '; write resources.limits[{MILLI}] in that Pod'",
            ),
        ],
    }
