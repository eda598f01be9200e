"""Metrics of the operator, for Prometheus, under `/metrics`.

Guarantees:
- `REGISTRY` has the metrics of every process: its watches, its calls, its CPU and memory.
- `LEADERS` has the metrics of the leader only: a standby does not export them.
"""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector

REGISTRY = CollectorRegistry()
"""Metrics of this process."""
LEADERS = CollectorRegistry()
"""Metrics of the leader."""

ProcessCollector(registry=REGISTRY)
BUILD_INFO = Gauge(
    "sharepod_operator_build_info", "1; the label is the operator's version.", ["version"], registry=REGISTRY
)
try:
    BUILD_INFO.labels(version("sharepod")).set(1)
except PackageNotFoundError:  # the code runs from a tree that is not installed
    BUILD_INFO.labels("unknown").set(1)

LEADER = Gauge("sharepod_operator_leader", "1 while this process holds the Lease and acts, else 0.", registry=REGISTRY)
SHAREPODS = Gauge("sharepod_operator_sharepods", "SharePods by phase.", ["phase"], registry=LEADERS)
WAITING = Gauge("sharepod_operator_waiting", "SharePods, claims and Pods that wait to be placed.", registry=LEADERS)
LONGEST_WAIT_SECONDS = Gauge(
    "sharepod_operator_longest_wait_seconds",
    "Time for which the first of the SharePods, claims and Pods that wait to be placed has waited; 0 if none waits.",
    registry=LEADERS,
)
DECISIONS = Counter("sharepod_operator_decisions", "Placement decisions by outcome.", ["outcome"], registry=LEADERS)
DECISION_SECONDS = Histogram(
    "sharepod_operator_decision_seconds",
    "Duration of one placement decision.",
    buckets=(0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0),
    registry=LEADERS,
)
LEDGER_WRITES = Counter(
    "sharepod_operator_ledger_writes", "Writes to GPUNode.spec by outcome.", ["outcome"], registry=LEADERS
)
LEDGER_CHANGES = Counter(
    "sharepod_operator_ledger_changes", "Rows added, changed or removed by ledger writes.", registry=LEADERS
)
PODS_CREATED = Counter("sharepod_operator_pods_created", "Pods created for SharePods.", registry=LEADERS)
PODS_TAKEN_BACK = Counter(
    "sharepod_operator_pods_taken_back",
    "Pods deleted because kube-scheduler did not bind them within bind_timeout.",
    registry=LEADERS,
)
RUNS_ENDED = Counter(
    "sharepod_operator_runs_ended",
    "Runs of SharePods that ended and are followed by another, by cause.",
    ["cause"],
    registry=LEADERS,
)
RELEASES = Counter(
    "sharepod_operator_releases",
    "Rows removed, by the fact that confirmed that no process of the tenant was left.",
    ["confirmed"],
    registry=LEADERS,
)
SWEPT = Counter(
    "sharepod_operator_swept",
    "Objects removed by a relist because their DELETED event was missed.",
    ["kind"],
    registry=REGISTRY,
)
UNREADABLE = Counter(
    "sharepod_operator_unreadable",
    "Objects that could not be parsed (nested too deep, too large), by attempts; each affects only itself.",
    ["kind"],
    registry=REGISTRY,
)
REPLACED = Counter(
    "sharepod_operator_replaced",
    "Times that all objects of a kind were replaced because the API server's versions went back.",
    ["kind"],
    registry=REGISTRY,
)
API_SECONDS = Histogram(
    "sharepod_operator_api_seconds",
    "Duration of one call of the API server, by verb. Watches are left out.",
    ["verb"],
    buckets=(0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0),
    registry=REGISTRY,
)
API_ERRORS = Counter(
    "sharepod_operator_api_errors",
    "Calls that the API server refused or did not answer, by verb and HTTP status; status `none`: no answer.",
    ["verb", "code"],
    registry=REGISTRY,
)
API_RETRIES = Counter(
    "sharepod_operator_api_retries",
    "Calls retried at the API server's request (Retry-After), by verb and HTTP status.",
    ["verb", "code"],
    registry=REGISTRY,
)
FAILURES = Counter(
    "sharepod_operator_failures", "Failures of work that is tried again, by queue.", ["queue"], registry=LEADERS
)
PLACEHOLDERS = Gauge(
    "sharepod_operator_placeholders",
    "Placeholders, by which shares without room on any node request nodes from an autoscaler.",
    registry=LEADERS,
)
OVERCOMMITS = Gauge(
    "sharepod_operator_overcommits", "GPUs of which a ledger promises more than the GPU has.", registry=LEADERS
)
UNENFORCED = Gauge(
    "sharepod_operator_unenforced",
    "SharePods whose share is not enforced, by their agents' reports.",
    registry=LEADERS,
)
EVICTIONS = Counter(
    "sharepod_operator_evictions",
    "Pods evicted because their share is not enforced, by how; `refused`: tries that a disruption budget forbade.",
    ["how"],
    registry=LEADERS,
)
PREEMPTIONS = Counter(
    "sharepod_operator_preemptions",
    "Preemptions, moves included, by outcome: begun, placed, left (the SharePod waits no longer), refused (by a "
    "disruption budget), protected (only disruption budgets stand in the way), overtaken, stuck, withdrawn (a mover "
    "may no longer be moved).",
    ["outcome"],
    registry=LEADERS,
)
VICTIMS = Counter(
    "sharepod_operator_preemption_victims",
    "Tenants preempted or moved for others, by kind: lowered (request 0), moved (restarted elsewhere), evicted.",
    ["how"],
    registry=LEADERS,
)
MOVES = Counter(
    "sharepod_operator_moves",
    "Moves of tenants by outcome: begun, moved (to the place kept for it), elsewhere (placed on other GPUs), stopped "
    "(before its Pod was evicted), lost (its next Pod has not asked for the place that was kept).",
    ["outcome"],
    registry=LEADERS,
)
_OUTCOMES = {
    DECISIONS: ("placed", "refused", "resized", "resize_refused"),
    EVICTIONS: ("eviction", "delete", "refused"),
    PREEMPTIONS: ("begun", "placed", "left", "refused", "protected", "overtaken", "stuck", "withdrawn"),
    VICTIMS: ("lowered", "moved", "evicted"),
    MOVES: ("begun", "moved", "elsewhere", "stopped", "lost"),
}
for _counter, _outcomes in _OUTCOMES.items():
    for _outcome in _outcomes:
        _counter.labels(_outcome)  # create the series at the start, so that rates include the first event
NAMESPACE_GPU_SECONDS = Counter(
    "sharepod_namespace_gpu_seconds",
    "GPU time of a namespace, by the model of the GPUs and by kind: held, borrowed (part of held beyond the "
    "guarantee), reserved (request x time).",
    ["namespace", "model", "kind"],
    registry=LEADERS,
)
NAMESPACE_MEMORY_SECONDS = Counter(
    "sharepod_namespace_memory_byte_seconds",
    "GPU memory that a namespace has had reserved, x time, by the model of the GPUs.",
    ["namespace", "model"],
    registry=LEADERS,
)
AGENTS_AWAY = Gauge(
    "sharepod_operator_agents_away", "Nodes of the pool whose agent does not renew its Lease.", registry=LEADERS
)
AGENTS_UNREADY = Gauge(
    "sharepod_operator_agents_unready", "GPUNodes whose condition AgentReady is False.", registry=LEADERS
)
WEBHOOK_CERTIFICATE_ENDS = Gauge(
    "sharepod_operator_webhook_certificate_expiry_timestamp_seconds",
    "Time, since 1970, at which the webhook's certificate expires that this process serves; 0 if it serves none.",
    registry=REGISTRY,
)
WEBHOOK_SECRET_MISSING = Gauge(
    "sharepod_operator_webhook_secret_missing",
    "1 while the Secret of the webhook's certificate is missing and the webhook has a port, else 0.",
    registry=REGISTRY,
)
EVENTS_DROPPED = Counter(
    "sharepod_operator_events_dropped", "Events dropped because there were too many.", registry=LEADERS
)
WATCH_AGE_SECONDS = Gauge(
    "sharepod_operator_watch_age_seconds",
    "Time since the last byte of the watch of a kind, or its last opening; nothing is placed above 30.",
    ["kind"],
    registry=REGISTRY,
)
QUEUE_DEPTH = Gauge(
    "sharepod_operator_queue_depth", "Keys that wait in a work queue, or are worked on.", ["queue"], registry=LEADERS
)
QUEUE_AGE_SECONDS = Gauge(
    "sharepod_operator_queue_age_seconds",
    "Time for which the oldest key of a work queue has waited; 0 if none waits.",
    ["queue"],
    registry=LEADERS,
)
APPLY_TO_POD_SECONDS = Histogram(
    "sharepod_operator_apply_to_pod_seconds",
    "Time from a SharePod's arrival until the watch shows its Pod with an open gate; waiting for room included.",
    buckets=(0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0),
    registry=LEADERS,
)

_OF_BUDGET = ["namespace", "budget"]
BUDGET_AMOUNT_SECONDS = Gauge(
    "sharepod_namespace_budget_amount_seconds",
    "GPU-seconds of weight 1 that a GPUBudget has when nothing is spent: amount, or cap with continuous refill.",
    _OF_BUDGET,
    registry=LEADERS,
)
BUDGET_LEFT_SECONDS = Gauge(
    "sharepod_namespace_budget_left_seconds",
    "GPU-seconds of weight 1 that a GPUBudget has left.",
    _OF_BUDGET,
    registry=LEADERS,
)
BUDGET_USED_RATIO = Gauge(
    "sharepod_namespace_budget_used_ratio",
    "Part of a GPUBudget that is used; above 1 where more was charged than the amount.",
    _OF_BUDGET,
    registry=LEADERS,
)
BUDGET_SPENDING_RATIO = Gauge(
    "sharepod_namespace_budget_spending_ratio",
    "GPU-seconds of weight 1 that are charged to a GPUBudget a second, as a mean over about an hour.",
    _OF_BUDGET,
    registry=LEADERS,
)
BUDGET_SPENT = Gauge(
    "sharepod_namespace_budget_spent", "1 while nothing of a GPUBudget is left, else 0.", _OF_BUDGET, registry=LEADERS
)
BUDGET_GONE_SECONDS = Gauge(
    "sharepod_namespace_budget_gone_timestamp_seconds",
    "Time, since 1970, at which nothing of a GPUBudget is left at the present rate; absent if it lasts to its refill.",
    _OF_BUDGET,
    registry=LEADERS,
)
BUDGETS = (
    BUDGET_AMOUNT_SECONDS,
    BUDGET_LEFT_SECONDS,
    BUDGET_USED_RATIO,
    BUDGET_SPENDING_RATIO,
    BUDGET_SPENT,
    BUDGET_GONE_SECONDS,
)
"""Metrics of GPUBudgets."""
NAMESPACE_IDLE = Gauge(
    "sharepod_namespace_idle_reserved_gpus",
    "GPUs' worth of time that SharePods and claims of a namespace have reserved and not held for an hour.",
    ["namespace"],
    registry=LEADERS,
)
