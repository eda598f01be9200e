"""CustomResourceDefinitions of the group. Pure: the models and a PodSpec schema in, manifests out.

The API server checks types and enums by the schema, in its own words, and fields that only make sense together by CEL
rules, in ours; each rule says what to write instead. The rules say the same as `resolve` and `effective` in Python.
Rules that need annotations or walk containers cannot stand in a CRD: `admission` has them. Nothing unknown is kept.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

from sharepod.api.bounds import MAX_QUANTITY
from sharepod.api.dialects import MAX_LISTED, MAX_MEMORY, MIN_MEMORY, UUID_PATTERN, UUID_SHAPE
from sharepod.api.gpunode import KIND as GPUNODE
from sharepod.api.gpunode import PLURAL as GPUNODES
from sharepod.api.gpunode import GPUNodeSpec, GPUNodeStatus, Latency, MemoryIsolation, Mode, Pool
from sharepod.api.objects import GROUP, MAX_GPUS, VERSION
from sharepod.api.sharepod import KIND as SHAREPOD
from sharepod.api.sharepod import (
    LABEL_PATTERN,
    MAX_TTL_S,
    MUTABLE,
    ONE_POD,
    OWN_FIELDS,
    REPLICAS,
    TTL,
    Phase,
    PlacementPolicy,
    SharePodStatus,
)
from sharepod.api.sharepod import PLURAL as SHAREPODS
from sharepod.api.statement import STATEMENT_KIND, STATEMENT_PLURAL, GPUStatementSpec, GPUStatementStatus

from .schema import Schema, by_key, model_schema

Rule = dict[str, str]

STAYS = "self == oldSelf"
"""Rule of a field that stays as it was created."""
_UNSEEN = {"observedGeneration": -1, "phase": Phase.PENDING.value, "summary": Phase.PENDING.value}
"""Status of a SharePod that no operator has looked at yet. By the generation, tools that go by kstatus (Helm, Flux) see
that it is on its way; without it they take what has no conditions for ready."""
_POD_BOUNDS: dict[str, Schema] = {
    "containers": {"minItems": 1},
    "activeDeadlineSeconds": {"minimum": 1, "maximum": (1 << 31) - 1},
}
"""Bounds of a PodSpec's fields that its OpenAPI document does not say and without which no pod is made."""
_REPEATING = frozenset({"env", "ports"})
"""Lists of a container in which a Pod may have a key twice (a port under two names, a variable said again), although
their document has them by key. None of them changes, so nothing has to be merged."""


def sharepod_crd(pod_spec: Schema) -> dict[str, Any]:
    """Return the CRD of SharePods. `pod_spec`: from `schema.pod_spec_schema`."""
    spec = copy.deepcopy(pod_spec)
    mutable = listed([f"gpu.{field}" for field in MUTABLE] + [TTL])
    spec["description"] = f"A PodSpec plus the block gpu. Immutable except {mutable}."
    spec["properties"] = {
        "gpu": gpu_schema(),
        REPLICAS: {
            "description": "Always 1. With it the SharePod has the scale subresource, by which a PodDisruptionBudget "
            "counts it.",
            "type": "integer",
            "format": "int32",
            "default": 1,
            "x-kubernetes-validations": [
                rule("self == 1", ONE_POD),
            ],
        },
        TTL: {
            "description": "Seconds after its end at which the SharePod is deleted, with its Pod. Default: never. "
            "It may be changed at any time.",
            "type": "integer",
            "format": "int32",
            "minimum": 0,
            "maximum": MAX_TTL_S,
        },
        **{
            name: {"description": f"As of a Pod: kubectl explain pod.spec.{name}.", **field}
            for name, field in spec["properties"].items()
            if name not in OWN_FIELDS
        },
    }
    _as_a_pod_takes_them(spec["properties"])
    spec["x-kubernetes-validations"] = _fix_pod(spec)
    status = model_schema(SharePodStatus)
    status["default"] = dict(_UNSEEN)
    by_key(status, "conditions", key="type")
    by_key(status, "gpus", key="uuid")
    return definition(
        kind=SHAREPOD,
        plural=SHAREPODS,
        short="shp",
        scope="Namespaced",
        description="A pod that shares GPUs: a guaranteed fraction of each GPU's time and a limit on its memory.",
        spec=spec,
        status=status,
        subresources={
            "status": {},
            "scale": {"specReplicasPath": f".spec.{REPLICAS}", "statusReplicasPath": ".status.replicas"},
        },
        categories=["all"],
        columns=[
            column("Ready", "string", ".status.readyContainers", "Containers that are ready, and all"),
            column("Status", "string", ".status.summary", "The pod's status, or why there is none that runs"),
            column("Restarts", "integer", ".status.restarts", "Times that containers or the pod were started again"),
            column("Used", "string", ".status.usage.shown", "Part of the last 10 s in which it held each GPU"),
            column("Request", "string", ".status.share.request", "Guaranteed fraction of each GPU's time"),
            column(
                "Limit",
                "string",
                ".status.share.limit",
                "Largest fraction of each GPU's time that the SharePod may use",
            ),
            column("Memory", "string", ".status.share.memory", "Memory on each GPU"),
            column("Node", "string", ".status.node"),
            column("GPU", "string", ".status.gpuIndexes", "Indexes of the SharePod's GPUs on the node"),
            column("Age", "date", ".metadata.creationTimestamp"),
            column("IP", "string", ".status.podIP", priority=1),
            column("Why", "string", '.status.conditions[?(@.type=="Placed")].message', priority=1),
        ],
    )


def _as_a_pod_takes_them(fields: dict[str, Schema]) -> None:
    """Change the fields of a PodSpec, in place, where its document says less or more than the API server does."""
    for name in fields.keys() & _POD_BOUNDS.keys():
        fields[name] |= _POD_BOUNDS[name]
    for containers in fields.keys() & {"containers", "initContainers"}:
        own = fields[containers]["items"].get("properties", {})
        for name in own.keys() & _REPEATING:
            own[name].pop("x-kubernetes-list-map-keys", None)
            own[name]["x-kubernetes-list-type"] = "atomic"


def gpunode_crd() -> dict[str, Any]:
    """Return the CRD of GPUNodes."""
    spec = model_schema(GPUNodeSpec)
    by_key(spec, "tenants", key="id")
    by_key(spec, "holders", key="id")
    spec["properties"]["tenants"]["items"]["x-kubernetes-validations"] = [
        rule("self.requestMilli <= self.limitMilli", "requestMilli is more than limitMilli", field="requestMilli"),
    ]
    spec["properties"]["pool"]["default"] = Pool.DEDICATED.value
    status = model_schema(GPUNodeStatus)
    by_key(status, "gpus", key="uuid")
    by_key(status, "gpus", "links", key="uuid")
    by_key(status, "tenants", key="id")
    by_key(status, "consumption", key="series")
    by_key(status, "conditions", key="type")
    return definition(
        kind=GPUNODE,
        plural=GPUNODES,
        short="gn",
        scope="Cluster",
        description="The GPUs of one node and the shares that tenants have of them. spec is written by the operator "
        "alone, status by the node's agent alone.",
        spec=spec,
        status=status,
        columns=[
            column("Pool", "string", ".spec.pool"),
            column("Model", "string", ".status.gpus[0].model", "Model of the node's first GPU"),
            column("GPUs", "integer", ".status.gpuCount"),
            column("Reserved", "string", ".status.reserved", "Reserved fraction of each GPU's time"),
            column("Tenants", "integer", ".status.tenantCount"),
            column("Ready", "string", '.status.conditions[?(@.type=="AgentReady")].status'),
            column("Agent", "string", ".status.agentVersion", "Version of the node's agent"),
            column("Simulated", "boolean", ".status.simulated", priority=1),
            column("Age", "date", ".metadata.creationTimestamp"),
        ],
    )


def gpustatement_crd() -> dict[str, Any]:
    """Return the CRD of GPUStatements."""
    return definition(
        kind=STATEMENT_KIND,
        plural=STATEMENT_PLURAL,
        short="gst",
        scope="Cluster",
        description="What the namespace of its name has had of GPUs, by month and model. The operator writes it.",
        spec=model_schema(GPUStatementSpec),
        # Lists stay atomic: by key, the list of who manages which entry would be larger than the entries.
        status=model_schema(GPUStatementStatus),
        columns=[
            column("Age", "date", ".metadata.creationTimestamp"),
        ],
    )


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
    """Return a CRD of one version."""
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


def listed(names: Sequence[str]) -> str:
    """Return names as a sentence has them: `a, b and c`."""
    return f"{', '.join(names[:-1])} and {names[-1]}"


def column(name: str, kind: str, path: str, description: str = "", *, priority: int = 0) -> dict[str, Any]:
    """Return a column that kubectl get prints; one of priority 1 only with -o wide."""
    result: dict[str, Any] = {"name": name, "type": kind, "jsonPath": path}
    if description:
        result["description"] = description
    if priority:
        result["priority"] = priority
    return result


def rule(rule: str, message: str, *, expression: str = "", field: str = "", reason: str = "") -> Rule:
    """Return a CEL rule. `message` is shown where `expression`, which may quote values, is missing or fails."""
    result = {"rule": rule, "message": message}
    if expression:
        result["messageExpression"] = expression
    if field:
        result["fieldPath"] = f".{field}"
    if reason:
        result["reason"] = reason
    return result


def gpu_schema() -> Schema:
    """Return the schema of `spec.gpu`."""
    labels = "letters, digits, '.', '_' and '-', beginning and ending with a letter or digit"
    schema: Schema = {
        "description": "Request for a share of one or more GPUs.",
        "type": "object",
        "properties": {
            "request": {
                "description": "Guaranteed fraction of each GPU's time, 0 to 1, to 3 decimals. 0 is best effort: idle "
                "time only, and memory is required. Required unless mode is Exclusive.",
                "type": "number",
                "x-kubernetes-validations": _fraction_rules("request"),
            },
            "limit": {
                "description": "Largest fraction of each GPU's time that the SharePod may use, request to 1; with 1 it "
                "may use all idle time.",
                "type": "number",
                "default": 1,
                "x-kubernetes-validations": [
                    *_fraction_rules("limit"),
                    rule("self != 0.0", "0 would never run; write at least 0.001 or leave the field out"),
                ],
            },
            "memory": {
                "description": "Memory on each GPU, a quantity such as 4Gi. Default: request x the GPU's memory.",
                "x-kubernetes-int-or-string": True,
                "maxLength": MAX_QUANTITY,
                "x-kubernetes-validations": _memory_rules(),
            },
            "count": {
                "description": "Number of distinct GPUs, all on one node.",
                "type": "integer",
                "format": "int32",
                "minimum": 1,
                "maximum": MAX_GPUS,
                "default": 1,
            },
            "mode": _choice("Shared, or Exclusive: whole GPUs that no other tenant uses.", [*Mode], Mode.SHARED),
            "memoryIsolation": _choice(
                "Enforced, or None: memory is accounted but no allocation is refused.",
                [*MemoryIsolation],
                MemoryIsolation.ENFORCED,
            ),
            "latency": _choice(
                "Normal, or Interactive: when the pod wakes with guaranteed time left, neighbours hand the GPU over "
                "after the kernel that runs. A GPU takes one Interactive SharePod, or as many as the operator's "
                "setting says.",
                [*Latency],
                Latency.NORMAL,
            ),
            "affinity": _label(
                "SharePods with this label in the namespace go to the same GPU (or GPUs), or wait.", labels
            ),
            "antiAffinity": _label("SharePods with this label in the namespace go to different GPUs.", labels),
            "exclusion": _label("The GPU takes only SharePods of the namespace with the same exclusion label.", labels),
            "placement": _choice(
                "Binpack fills GPUs that are in use first; Spread takes the GPUs with the most free time.",
                [*PlacementPolicy],
                PlacementPolicy.BINPACK,
            ),
            "uuids": {
                "description": "Only these GPUs, by UUID.",
                "type": "array",
                "maxItems": MAX_LISTED,
                "x-kubernetes-list-type": "set",
                "items": {
                    "type": "string",
                    "maxLength": 64,
                    "x-kubernetes-validations": [
                        rule(
                            f"self.matches('{UUID_PATTERN}')",
                            f"is not the UUID of a GPU; write it as nvidia-smi -L prints it, {UUID_SHAPE}",
                        )
                    ],
                },
            },
            "models": {
                "description": "Only GPUs of these models, as the node's GPUNode names them.",
                "type": "array",
                "maxItems": MAX_LISTED,
                "x-kubernetes-list-type": "set",
                "items": {"type": "string", "minLength": 1, "maxLength": 96},
            },
            "movable": {
                "description": "Whether it may be restarted on other GPUs where that makes room for one that waits, of "
                "its own or a higher priority. Default: only where it would be evicted otherwise, and only with "
                "request 0 and restartPolicy Always. With restartPolicy Never it stays in any case.",
                "type": "boolean",
            },
        },
    }
    schema["x-kubernetes-validations"] = [*_together_rules(), *_fix_gpu(schema)]
    return schema


def _choice(description: str, choices: list[Any], default: Any) -> Schema:
    return {
        "description": description,
        "type": "string",
        "enum": [str(choice) for choice in choices],
        "default": str(default),
    }


def _label(description: str, allowed: str) -> Schema:
    named = rule(f"self.matches('{LABEL_PATTERN}')", f"is not a label; write up to 63 {allowed}")
    return {"description": description, "type": "string", "maxLength": 63, "x-kubernetes-validations": [named]}


def _fraction_rules(field: str) -> list[Rule]:
    whole = "int(self) + (self > double(int(self)) ? 1 : 0)"
    share = f"double(int(self * 1000.0 / double({whole}) + 0.999)) / 1000.0"
    nearest = "double(int(self * 1000.0 + 0.5))"
    return [
        rule(
            "self >= 0.0 && self <= 1.0",
            "is not a fraction of a GPU; write 0 to 1, such as 0.4",
            expression=(
                "self < 0.0 ? '%s is negative; write a fraction of a GPU, 0 to 1, such as 0.4'.format([self]) : "
                f"self > {MAX_GPUS}.0 ? "
                "'%s is far more than one GPU; write 0 to 1 (40 percent is 0.4)'.format([self]) : "
                f"'%s is more than one GPU; use count: %d with {field} %s'.format([self, {whole}, {share}])"
            ),
        ),
        rule(
            # The tolerance is far below a thousandth and far above the error of a binary float.
            f"self < 0.0 || self > 1.0 || (self * 1000.0 - {nearest} < 0.001 && {nearest} - self * 1000.0 < 0.001)",
            "is finer than a thousandth of a GPU; write at most three decimals",
            expression=(
                "'%s is finer than a thousandth of a GPU; write at most three decimals, such as %s'"
                f".format([self, {nearest} / 1000.0])"
            ),
        ),
    ]


def _memory_rules() -> list[Rule]:
    unread = "is not a quantity; write a size such as 4Gi, 512Mi or a number of bytes"
    small = f"is less than {MIN_MEMORY}; write a size with its unit, such as 4Gi"
    return [
        rule("type(self) == int || isQuantity(self)", unread, expression=f"'\"%s\" {unread}'.format([self])"),
        rule(
            "type(self) == int ? self >= 1048576 : "
            f"(!isQuantity(self) || quantity(self).compareTo(quantity('{MIN_MEMORY}')) >= 0)",
            small,
            expression=f"'%s {small}'.format([self])",
        ),
        rule(
            f"type(self) == int || !isQuantity(self) || quantity(self).compareTo(quantity('{MAX_MEMORY}')) <= 0",
            "is more memory than any GPU has; write a size such as 4Gi",
        ),
    ]


def _together_rules() -> list[Rule]:
    shared = "self.mode != 'Exclusive'"
    return [
        *(
            rule(
                f"{shared} || !has(self.{field})" + (f" || self.{field} == 1.0" if field == "limit" else ""),
                f"an Exclusive SharePod has the whole GPU; leave {field} out or use mode: Shared",
                field=field,
                reason="FieldValueForbidden",
            )
            for field in ("request", "limit", "memory")
        ),
        rule(
            f"{shared} || self.latency == 'Normal'",
            "an Exclusive SharePod has the whole GPU and waits for nobody; leave latency out or use mode: Shared",
            field="latency",
            reason="FieldValueForbidden",
        ),
        rule(
            "self.latency == 'Normal' || !has(self.request) || self.request != 0.0",
            "Interactive spends guaranteed time, and request is 0; write a request such as 0.3, or leave latency out",
            field="latency",
            reason="FieldValueForbidden",
        ),
        rule(
            f"!({shared}) || has(self.request)",
            "write the fraction of a GPU's time to guarantee, such as 0.4, or use mode: Exclusive",
            field="request",
            reason="FieldValueRequired",
        ),
        rule(
            "!has(self.limit) || !has(self.request) || self.limit >= self.request",
            "is less than the request; write the request or more",
            expression="'%s is less than the request %s; write that or more'.format([self.limit, self.request])",
            field="limit",
        ),
        rule(
            "!has(self.request) || self.request != 0.0 || has(self.memory)",
            "is required with request 0 (best effort); write a size such as 4Gi",
            field="memory",
            reason="FieldValueRequired",
        ),
        rule(
            "!has(self.uuids) || size(self.uuids) == 0 || size(self.uuids) >= self.count",
            "names fewer GPUs than count; name at least as many, or none",
            expression=(
                "'names %d GPUs but count is %d; name at least %d, or none'"
                ".format([size(self.uuids), self.count, self.count])"
            ),
            field="uuids",
        ),
    ]


def _fix_gpu(schema: Schema) -> list[Rule]:
    """Let all of the gpu block but `MUTABLE` stay as it was created: add rules to its fields, return those beside."""
    names = [name for name in schema["properties"] if name not in MUTABLE]
    allowed = f"(only {listed(MUTABLE)} can)"
    _fix(schema, names, allowed)
    kept = " && ".join(f"has(self.{name}) == has(oldSelf.{name})" for name in names)
    which = "".join(f"has(self.{name}) != has(oldSelf.{name}) ? '{name}' : " for name in names)
    text = f"cannot be added or removed {allowed}; delete the SharePod and create it again"
    return [rule(f"{STAYS} || ({kept})", f"a field {text}", expression=f"({which}'a field') + ' {text}'")]


def _fix_pod(spec: Schema) -> list[Rule]:
    """Let the gpu block stay and the PodSpec as it was created: add rules to its fields, return those beside.

    CEL cannot compare a map of quantities, because no type of a CRD stands for a quantity: the admission policy does.
    It also keeps fields of the PodSpec from coming and going. A rule of the whole spec would be worked out at each
    write of a status too, and costs a part of it: each access to a field walks over the forty that a PodSpec has.
    """
    names = [
        name
        for name, field in spec["properties"].items()
        if name not in OWN_FIELDS and "type" in field.get("additionalProperties", {"type": ""})
    ]
    _fix(spec, names, f"(only {listed([f'gpu.{field}' for field in MUTABLE] + [TTL])} can)")
    gpu = "cannot be added to or taken from a SharePod that exists; delete it and create it again"
    return [rule("has(self.gpu) == has(oldSelf.gpu)", gpu, field="gpu")]


def _fix(schema: Schema, names: Sequence[str], allowed: str) -> None:
    """Let fields of an object not change: add a rule to each.

    The API server works out all rules at each write, of a status too. A rule of a field costs only where the field is.
    """
    for name in names:
        rules = schema["properties"][name].setdefault("x-kubernetes-validations", [])
        rules.append(rule(STAYS, f"cannot be changed {allowed}; delete the SharePod and create it again"))
