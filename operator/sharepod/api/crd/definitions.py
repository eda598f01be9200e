"""CustomResourceDefinitions of the group. Pure: builds manifests from the models and a PodSpec schema.

The API server checks types and enums by the schema, with its own messages. CEL rules check fields against each other,
with SharePod's messages; each states the remedy. The rules are equivalent to `resolve` and `effective` in Python. Rules
that need annotations or iterate over containers cannot be in a CRD; they are in `admission`. Unknown fields are pruned.
"""

from __future__ import annotations

import copy
from typing import Any

from sharepod.api.gpunode import KIND as GPUNODE
from sharepod.api.gpunode import PLURAL as GPUNODES
from sharepod.api.gpunode import GPUNodeSpec, GPUNodeStatus, Pool
from sharepod.api.sharepod import (
    CHANGEABLE,
    MAX_TTL_S,
    ONE_POD,
    OWN_FIELDS,
    REPLICAS,
    TTL,
    Phase,
    SharePodStatus,
)
from sharepod.api.sharepod import KIND as SHAREPOD
from sharepod.api.sharepod import PLURAL as SHAREPODS
from sharepod.api.statement import STATEMENT_KIND, STATEMENT_PLURAL, GPUStatementSpec, GPUStatementStatus

from .gpu_schema import gpu_schema
from .parts import Rule, column, definition, fix, rule
from .schema import Schema, by_key, model_schema

_UNSEEN = {"observedGeneration": -1, "phase": Phase.PENDING.value, "summary": Phase.PENDING.value}
"""Status of a new SharePod before the operator's first step. Tools that use kstatus (Helm, Flux) see by the generation
that the SharePod is in progress. Without it they would take an object without conditions as ready."""
_POD_BOUNDS: dict[str, Schema] = {
    "containers": {"minItems": 1},
    "activeDeadlineSeconds": {"minimum": 1, "maximum": (1 << 31) - 1},
}
"""Bounds of PodSpec fields that the OpenAPI document omits and that every pod must satisfy."""
_REPEATING = frozenset({"env", "ports"})
"""Lists of a container in which a Pod may repeat a key (a port with two names, a variable set twice), although the
OpenAPI document keys them. The lists are immutable, so they need no merging."""


def sharepod_crd(pod_spec: Schema) -> dict[str, Any]:
    """Return the CRD of SharePods. `pod_spec`: from `schema.pod_spec_schema`."""
    spec = copy.deepcopy(pod_spec)
    spec["description"] = f"A PodSpec plus the block gpu. Immutable except {CHANGEABLE}."
    spec["properties"] = {
        "gpu": gpu_schema(),
        REPLICAS: {
            "description": "Always 1. A PodDisruptionBudget reads it through the scale subresource to count SharePods.",
            "type": "integer",
            "format": "int32",
            "default": 1,
            "x-kubernetes-validations": [
                rule("self == 1", ONE_POD),
            ],
        },
        TTL: {
            "description": "Seconds from the SharePod's end to its deletion, with its Pod. Default: it is not "
            "deleted. Changeable at any time.",
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
    status["x-kubernetes-map-type"] = "atomic"  # atomic, because the field has only one writer
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
            column(
                "Progress",
                "string",
                ".status.usage.progress",
                "Work of the last 10 s as a fraction of the work that it would have done with its GPUs to itself",
                priority=1,
            ),
            column("In-use", "string", ".status.usage.memoryShown", "Device memory in use on each GPU", priority=1),
            column("IP", "string", ".status.podIP", priority=1),
            column("Why", "string", '.status.conditions[?(@.type=="Placed")].message', priority=1),
        ],
    )


def _as_a_pod_takes_them(fields: dict[str, Schema]) -> None:
    """Adapt the schema of a PodSpec's fields, in place, where the OpenAPI document differs from what the API server
    accepts."""
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
    by_key(status, "conditions", key="type")
    return definition(
        kind=GPUNODE,
        plural=GPUNODES,
        short="gn",
        scope="Cluster",
        description="The GPUs of one node and the shares that tenants have of them. spec is written only by the "
        "operator, status only by the node's agent.",
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
            column(
                "Why",
                "string",
                '.status.conditions[?(@.type=="AgentReady")].message',
                "Reason why the agent is not ready",
                priority=1,
            ),
            column(
                "Away",
                "string",
                '.status.conditions[?(@.type=="AgentAlive")].message',
                "Reason why the agent's last report is no longer current",
                priority=1,
            ),
            column("Simulated", "boolean", ".status.simulated", priority=1),
            column(
                "Cordoned",
                "string",
                r".metadata.annotations.sharepod\.dev/cordoned",
                "GPUs that take no new tenants",
                priority=1,
            ),
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
        description="GPU time of the namespace of its name, by month and model. The operator writes it.",
        spec=model_schema(GPUStatementSpec),
        # Lists stay atomic: as maps with keys, their managedFields would be larger than their entries.
        status=model_schema(GPUStatementStatus),
        columns=[
            column("Month", "string", ".status.shown.month", "Latest month with GPU time, in UTC"),
            column("Held h", "string", ".status.shown.heldHours", "Hours of one GPU held in that month"),
            column("Reserved h", "string", ".status.shown.reservedHours", "Hours of one GPU reserved in that month"),
            column("Cost", "string", ".status.shown.cost", "Cost of that month at the operator's prices"),
            column("Age", "date", ".metadata.creationTimestamp"),
        ],
    )


def _fix_pod(spec: Schema) -> list[Rule]:
    """Add rules that make the PodSpec immutable, and fix whether there is a gpu block. Return further rules.

    The admission policy compares maps of quantities, because no type of a CRD represents a quantity. It also prevents
    adding and removing PodSpec fields. As one rule of the whole spec, these checks would be evaluated at each write of
    a status, too, and each access to a field walks over the PodSpec's forty fields.
    """
    names = [
        name
        for name, field in spec["properties"].items()
        if name not in OWN_FIELDS and "type" in field.get("additionalProperties", {"type": ""})
    ]
    fix(spec, names, f"(only {CHANGEABLE} can)")
    gpu = "cannot be added to or taken from a SharePod that exists; delete it and create it again"
    return [rule("has(self.gpu) == has(oldSelf.gpu)", gpu, field="gpu")]
