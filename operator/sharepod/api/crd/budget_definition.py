"""CustomResourceDefinition of GPUBudgets. Pure: returns a manifest made from the models."""

from __future__ import annotations

from typing import Any

from sharepod.api.gpubudget import (
    AMOUNT_RULE,
    CAP_RULE,
    GPU_TIME_PATTERN,
    GPU_TIME_RULE,
    KIND,
    PLURAL,
    PRIORITY_RULE,
    VALUES_RULE,
    WEIGHT_RULE,
    BudgetPeriod,
    ChargeBy,
    GPUBudgetSpec,
    GPUBudgetStatus,
    Refill,
    WhenSpent,
)

from .parts import column, definition, rule
from .schema import by_key, model_schema


def gpubudget_crd() -> dict[str, Any]:
    """Return the CRD of GPUBudgets."""
    spec = model_schema(GPUBudgetSpec)
    fields = spec["properties"]
    by_key(spec, "models", key="model")
    fields["models"]["items"]["properties"]["weight"]["x-kubernetes-validations"] = [
        rule(
            "self * 1000.0 - double(int(self * 1000.0 + 0.5)) < 0.000001 && "
            "double(int(self * 1000.0 + 0.5)) - self * 1000.0 < 0.000001",
            WEIGHT_RULE,
        ),
    ]
    fields["gpuTime"]["x-kubernetes-validations"] = [rule(f"self.matches('{GPU_TIME_PATTERN}')", GPU_TIME_RULE)]
    expressions = fields["namespaceSelector"]["properties"]["matchExpressions"]
    expressions["x-kubernetes-list-type"] = "atomic"
    expressions["items"]["x-kubernetes-validations"] = [
        rule("(self.operator in ['In', 'NotIn']) == (has(self.values) && size(self.values) > 0)", VALUES_RULE),
    ]
    for name, value in (
        ("period", BudgetPeriod.MONTH),
        ("refill", Refill.PERIOD_START),
        ("chargeBy", ChargeBy.RESERVED),
        ("whenSpent", WhenSpent.BORROW),
    ):
        fields[name]["default"] = value.value
    spec["x-kubernetes-validations"] = [
        rule("has(self.gpuTime) != has(self.gpuSeconds)", AMOUNT_RULE, field="gpuTime"),
        rule("!has(self.cap) || self.refill == 'Continuous'", CAP_RULE, field="cap"),
        rule("!has(self.borrowPriority) || self.whenSpent == 'Borrow'", PRIORITY_RULE, field="borrowPriority"),
    ]
    status = model_schema(GPUBudgetStatus)
    by_key(status, "conditions", key="type")
    status["properties"]["books"]["properties"]["taken"]["x-kubernetes-list-type"] = "atomic"
    return definition(
        kind=KIND,
        plural=PLURAL,
        short="gbu",
        scope="Namespaced",
        description="An amount of GPU time that namespaces share for a period. spec is written by cluster admins, "
        "status only by the operator.",
        spec=spec,
        status=status,
        columns=[
            column("Hours", "string", ".status.shown.amountHours", "Hours of one GPU for each period"),
            column("Period", "string", ".spec.period"),
            column("Used%", "integer", ".status.percent", "Part of the budget that is used, in percent"),
            column("Left", "string", ".status.shown.leftHours", "Hours of one GPU that are left"),
            column("Rate", "string", ".status.rate", "GPUs' worth of time charged at present"),
            column("Gone at", "string", ".status.goneAt", "When nothing is left, at this rate", priority=1),
            column("Within", "string", '.status.conditions[?(@.type=="WithinBudget")].status', "Something is left"),
            column("In force", "string", '.status.conditions[?(@.type=="InForce")].status'),
            column("When spent", "string", ".spec.whenSpent", priority=1),
            column("Refill", "string", ".spec.refill", priority=1),
            column("Age", "date", ".metadata.creationTimestamp"),
        ],
    )
