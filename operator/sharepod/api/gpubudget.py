"""GPUBudget: an amount of GPU time that namespaces share for a period, and the effect of spending it.

Guarantees:
- `spec` is written by cluster admins, `status` only by the operator.
- A budget covers its own namespace. A budget in the operator's namespace covers the namespaces that its selector
  matches.

Docstrings of models become descriptions in the CRD.
"""

from __future__ import annotations

import re
from decimal import Decimal
from enum import StrEnum
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from .bounds import MAX_CONDITIONS
from .objects import Condition, Model

KIND = "GPUBudget"
PLURAL = "gpubudgets"

CONDITION_IN_FORCE = "InForce"
"""Condition of a GPUBudget: False while it lacks some of the selected namespaces; the message has the reason."""
CONDITION_WITHIN_BUDGET = "WithinBudget"
"""Condition of a GPUBudget: False while the budget is spent."""
CONDITION_GONE_EARLY = "GoneEarly"
"""Condition of a GPUBudget: True while the budget, at the current rate, will be spent before its refill."""

MAX_GPU_SECONDS = 1_000_000_000_000
"""Largest amount in GPU-seconds: a thousand GPUs for thirty years. As millionths of a GPU-second it fits into 63
bits."""
MAX_MODELS = 64
"""Most GPU models with a weight in one budget."""
MAX_NAMESPACES = 256
"""Most namespaces of one budget: bounds the size of its status."""
MAX_TAKEN = 4096
"""Most namespace and model pairs in the account of one budget. With the longest names they take 1.1 MB; etcd takes 1.5
MiB."""
LARGEST_WEIGHT = 1000
"""Largest weight of a model."""
MAX_AMOUNT = 4 * 10**18
"""Largest amount in millionths of a GPU-second. Well below 2^63, even if an API server rounds it as a float."""

GPU_TIME_PATTERN = r"^([1-9][0-9]{0,7}([.][0-9]{1,2})?|0[.](0[1-9]|[1-9][0-9]?))h$"
"""Pattern of hours above 0 and below 10^8. A hundredth of an hour is 36 s, so two decimals are whole seconds."""
GPU_TIME_RULE = "gpuTime is hours of one GPU, above 0 and below 10^8, with at most 2 decimals; write 1000h or 0.5h"
AMOUNT_RULE = "exactly one of gpuTime and gpuSeconds is needed; write gpuTime: 1000h, or gpuSeconds: 3600000"


def _gpu_time(text: str | None) -> str | None:
    if text is not None and re.fullmatch(GPU_TIME_PATTERN, text) is None:
        raise ValueError(GPU_TIME_RULE)
    return text


AmountField = Annotated[int, Field(ge=0, le=MAX_AMOUNT)]
TimeField = Annotated[int, Field(ge=0, le=1 << 53)]
TextTimeField = Annotated[str, Field(max_length=32)]


class BudgetPeriod(StrEnum):
    """Period of a budget, in UTC: a day, a week from Monday, a month from its first day."""

    DAY = "Day"
    WEEK = "Week"
    MONTH = "Month"


class Refill(StrEnum):
    """Refill of a budget: the whole amount at the start of each period, or continuously, up to a cap."""

    PERIOD_START = "PeriodStart"
    CONTINUOUS = "Continuous"


class ChargeBy(StrEnum):
    """Charge of a budget: by the time for which GPUs were held, or by the reserved part of GPUs."""

    HELD = "Held"
    RESERVED = "Reserved"


class WhenSpent(StrEnum):
    """Effect of a spent budget: running at low priority, waiting of new SharePods, or only a notice."""

    BORROW = "Borrow"
    QUEUE = "Queue"
    NOTIFY = "Notify"


class ModelWeight(Model):
    """Weight of the time of one model of GPU."""

    model: Annotated[str, Field(min_length=1, max_length=96)]
    """Model of the GPU as GPUNodes show it, such as `NVIDIA A100-SXM4-80GB`."""
    weight: Annotated[float, Field(ge=0, le=LARGEST_WEIGHT)]
    """Seconds charged for one second of a GPU of this model, to 3 decimals. Models that are not listed weigh 1."""

    @property
    def weight_milli(self) -> int:
        """The weight in thousandths."""
        return round(self.weight * 1000)


class SelectorRequirement(Model):
    """Requirement on a label of a namespace."""

    key: Annotated[str, Field(min_length=1, max_length=317)]
    """Key of the label."""
    operator: Literal["In", "NotIn", "Exists", "DoesNotExist"]
    """In, NotIn, Exists or DoesNotExist."""
    values: Annotated[tuple[Annotated[str, Field(max_length=63)], ...], Field(max_length=MAX_NAMESPACES)] = ()
    """Values, for In and NotIn."""

    def holds(self, labels: dict[str, str]) -> bool:
        """Return whether a namespace's labels meet the requirement. As elsewhere in Kubernetes, NotIn also holds where
        the label is absent."""
        if self.operator in ("In", "NotIn"):
            return (labels.get(self.key) in self.values) == (self.operator == "In")
        return (self.key in labels) == (self.operator == "Exists")


class NamespaceSelector(Model):
    """Selector of namespaces by label; all of its requirements hold."""

    match_labels: Annotated[dict[str, str], Field(max_length=16, default_factory=dict)]
    """Labels that a namespace has. `kubernetes.io/metadata.name` is its name."""
    match_expressions: Annotated[tuple[SelectorRequirement, ...], Field(max_length=16)] = ()
    """Requirements on labels."""

    def matches(self, labels: dict[str, str]) -> bool:
        """Return whether a namespace with these labels is selected. An empty selector selects all."""
        same = all(labels.get(key) == value for key, value in self.match_labels.items())
        return same and all(requirement.holds(labels) for requirement in self.match_expressions)


class GPUBudgetSpec(Model):
    """Budget of GPU time, written by cluster admins."""

    namespace_selector: NamespaceSelector | None = None
    """Namespaces that share the budget, by label; only for a budget in the operator's namespace. Default: the budget's
    own namespace."""
    gpu_time: Annotated[str | None, AfterValidator(_gpu_time), Field(max_length=12)] = None
    """Amount for each period, in hours of one GPU of weight 1, such as 1000h or 0.5h; instead of gpuSeconds."""
    gpu_seconds: Annotated[int | None, Field(ge=1, le=MAX_GPU_SECONDS)] = None
    """Amount for each period, in seconds of one GPU of weight 1; instead of gpuTime."""
    period: BudgetPeriod = BudgetPeriod.MONTH
    """Day, Week (from Monday) or Month, in UTC."""
    refill: Refill = Refill.PERIOD_START
    """PeriodStart: the whole amount at the start of each period, and the rest is lost. Continuous: the amount is spread
    evenly over the period, and unused time is saved up to cap."""
    cap: Annotated[int | None, Field(ge=1, le=MAX_GPU_SECONDS)] = None
    """Maximum saved with refill Continuous, in GPU-seconds. Default: the amount."""
    charge_by: ChargeBy = ChargeBy.RESERVED
    """Reserved: request x time, whether used or not. Held: the time for which GPUs were held, including borrowed
    time."""
    when_spent: WhenSpent = WhenSpent.BORROW
    """Borrow: SharePods continue at borrowPriority. Queue: running ones continue, new ones wait. Notify: no change."""
    borrow_priority: Annotated[int, Field(ge=-(2**31), le=1_000_000_000)] = -1000
    """With Borrow: highest priority of SharePods while the budget is spent."""
    models: Annotated[tuple[ModelWeight, ...], Field(max_length=MAX_MODELS)] = ()
    """Weights of models of GPU; others weigh 1."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if (self.gpu_time is None) == (self.gpu_seconds is None):
            raise ValueError(AMOUNT_RULE)
        if self.cap is not None and self.refill is not Refill.CONTINUOUS:
            raise ValueError(CAP_RULE)
        return self

    @property
    def amount_seconds(self) -> int:
        """The amount for each period, in GPU-seconds."""
        if self.gpu_time is None:
            assert self.gpu_seconds is not None  # `_check` has required one of the two
            return self.gpu_seconds
        return int(Decimal(self.gpu_time.removesuffix("h")) * 3600)


CAP_RULE = "cap is for refill Continuous; remove it, or set refill: Continuous"
PRIORITY_RULE = "borrowPriority is for whenSpent Borrow; remove it, or set whenSpent: Borrow"
VALUES_RULE = "In and NotIn need values; Exists and DoesNotExist take none"
WEIGHT_RULE = "has more than 3 decimals; write at most 3"


class ChargedTotal(Model):
    """Total of one namespace and model, up to which it is charged."""

    namespace: Annotated[str, Field(min_length=1, max_length=63)]
    """Namespace."""
    model: Annotated[str, Field(max_length=96)] = ""
    """Model of GPU. Empty: the namespace has used no GPU yet; later use is charged."""
    held_milliseconds: AmountField = 0
    """GPU time held."""
    reserved_milliseconds: AmountField = 0
    """GPU time reserved."""


class BudgetBooks(Model):
    """Account of the budget, from which the operator continues after a restart. Amounts in millionths of a GPU-second,
    times in milliseconds since 1970."""

    period_start: TimeField
    """Start of the period that is charged."""
    at: TimeField
    """Time up to which consumption is charged."""
    held: AmountField = 0
    """GPU time held in the period, weighted."""
    reserved: AmountField = 0
    """GPU time reserved in the period, weighted."""
    credit: AmountField = 0
    """With refill Continuous: the remaining amount."""
    spent: bool = False
    """True from the moment when nothing is left until enough is refilled."""
    announced: Annotated[int, Field(ge=0, le=100)] = 0
    """Highest percentage that an Event has announced in this period."""
    usage: AmountField = 0
    """Decaying usage that orders the queue."""
    spending: AmountField = 0
    """Usage that decays within an hour; the rate is computed from it."""
    since: TimeField
    """Time since which usage and spending are counted."""
    taken: Annotated[tuple[ChargedTotal, ...], Field(max_length=MAX_TAKEN)] = ()
    """Totals up to which consumption is charged."""


class BudgetShown(Model):
    """Amounts in hours of one GPU, for kubectl get."""

    amount_hours: Annotated[str, Field(max_length=32)]
    """Amount for each period."""
    left_hours: Annotated[str, Field(max_length=32)]
    """Remaining hours."""


class GPUBudgetStatus(Model):
    """Spent and remaining GPU time, written only by the operator. Amounts in GPU-seconds of weight 1."""

    observed_generation: int | None = None
    """Generation of the spec that the status describes."""
    namespaces: Annotated[tuple[str, ...], Field(max_length=MAX_NAMESPACES)] = ()
    """Namespaces that the budget covers."""
    period_start: TextTimeField | None = None
    """Start of the period."""
    period_end: TextTimeField | None = None
    """End of the period."""
    shown: BudgetShown | None = None
    """Amount and remaining time in hours, for kubectl get."""
    held: AmountField = 0
    """GPU time held in the period."""
    reserved: AmountField = 0
    """GPU time reserved in the period."""
    left: AmountField = 0
    """Remaining amount."""
    percent: Annotated[int, Field(ge=0, le=1_000_000)] = 0
    """Used part of the budget; above 100 if more was charged than the amount."""
    rate: Annotated[str, Field(max_length=32)] = ""
    """Mean number of GPUs charged over about an hour."""
    gone_at: TextTimeField | None = None
    """Time at which the budget will be spent at this rate; absent if it is refilled before."""
    refill_at: TextTimeField | None = None
    """Time at which a spent budget counts again; absent if it is not spent."""
    conditions: Annotated[tuple[Condition, ...], Field(max_length=MAX_CONDITIONS)] = ()
    """InForce, WithinBudget and GoneEarly."""
    books: BudgetBooks | None = None
    """Account of the budget, for the operator."""
