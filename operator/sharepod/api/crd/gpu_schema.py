"""Schema of the block `spec.gpu` of a SharePod, with CEL rules for single fields and between fields.

The rules are equivalent to `resolve` and `effective` in Python; each message states the remedy.
"""

from __future__ import annotations

from typing import Any

from sharepod.api.bounds import MAX_QUANTITY
from sharepod.api.dialects import MAX_LISTED, MAX_MEMORY, MIN_MEMORY, UUID_PATTERN, UUID_SHAPE
from sharepod.api.gpunode import CoRunningPolicy, Latency, MemoryIsolation, Mode
from sharepod.api.objects import MAX_GPUS
from sharepod.api.sharepod import CHANGEABLE, LABEL_PATTERN, MUTABLE, PlacementPolicy

from .parts import STAYS, Rule, fix, rule
from .schema import Schema


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
                "description": "Limit of device memory on each GPU, such as 4Gi. Default: request x the GPU's memory.",
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
                "Enforced, or None: memory is counted, and no allocation is refused.",
                [*MemoryIsolation],
                MemoryIsolation.ENFORCED,
            ),
            "latency": _choice(
                "Normal, or Interactive: when the pod wakes with guaranteed time left, neighbours hand the GPU over "
                "after the running kernel. A GPU takes interactive_per_gpu (operator's setting, default 1) such "
                "SharePods.",
                [*Latency],
                Latency.NORMAL,
            ),
            "coRunning": _choice(
                "Allow, or Deny: no other tenant runs on the GPU during this SharePod's turns, even if the agent's "
                "setting sharing is Concurrent.",
                [*CoRunningPolicy],
                CoRunningPolicy.ALLOW,
            ),
            "group": _label(
                "Tenants of the namespace with the same value get their turns together on each node. Use it for "
                "ranks of one training. None: in no group, even as the Pod of an indexed Job.",
                labels,
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
                "description": "Whether it may be restarted on other GPUs to free a place for a waiting SharePod of "
                "the same or a higher priority. Default: only with request 0 and restartPolicy Always, instead of an "
                "eviction. A SharePod with restartPolicy Never is not moved.",
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
            # The tolerance is far less than a thousandth and far more than the error of a binary float.
            f"self <= 0.0 || self > 1.0 || ({nearest} >= 1.0 && "
            f"self * 1000.0 - {nearest} < 0.001 && {nearest} - self * 1000.0 < 0.001)",
            "is finer than a thousandth of a GPU; write at most three decimals",
            expression=(
                "'%s is finer than a thousandth of a GPU; write at most three decimals, such as %s'"
                f".format([self, (self < 0.001 ? 1.0 : {nearest}) / 1000.0])"
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
            "an Exclusive SharePod has the whole GPU to itself; leave latency out or use mode: Shared",
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
            "!has(self.limit) || !has(self.request) || self.limit >= self.request || self.request > 1.0",
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
    """Add rules to the fields of the gpu block that make it immutable except `MUTABLE`. Return further rules."""
    names = [name for name in schema["properties"] if name not in MUTABLE]
    allowed = f"(only {CHANGEABLE} can)"
    fix(schema, names, allowed)
    kept = " && ".join(f"has(self.{name}) == has(oldSelf.{name})" for name in names)
    which = "".join(f"has(self.{name}) != has(oldSelf.{name}) ? '{name}' : " for name in names)
    text = f"cannot be added or removed {allowed}; delete the SharePod and create it again"
    return [rule(f"{STAYS} || ({kept})", f"a field {text}", expression=f"({which}'a field') + ' {text}'")]
