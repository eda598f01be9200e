"""Metrics of the operator, for Prometheus, under `/metrics`."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

REGISTRY = CollectorRegistry()

LEADER = Gauge("sharepod_operator_leader", "1 while this process holds the Lease and acts, else 0.", registry=REGISTRY)
SHAREPODS = Gauge("sharepod_operator_sharepods", "SharePods by phase.", ["phase"], registry=REGISTRY)
WAITING = Gauge("sharepod_operator_waiting", "SharePods that wait to be placed.", registry=REGISTRY)
DECISIONS = Counter("sharepod_operator_decisions", "Placement decisions by outcome.", ["outcome"], registry=REGISTRY)
DECISION_SECONDS = Histogram(
    "sharepod_operator_decision_seconds",
    "Duration of one placement decision.",
    buckets=(0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0),
    registry=REGISTRY,
)
LEDGER_WRITES = Counter(
    "sharepod_operator_ledger_writes", "Writes to GPUNode.spec by outcome.", ["outcome"], registry=REGISTRY
)
LEDGER_CHANGES = Counter(
    "sharepod_operator_ledger_changes", "Rows added, changed or removed by ledger writes.", registry=REGISTRY
)
PODS_CREATED = Counter("sharepod_operator_pods_created", "Pods created for SharePods.", registry=REGISTRY)
PODS_TAKEN_BACK = Counter(
    "sharepod_operator_pods_taken_back",
    "Pods deleted because kube-scheduler did not bind them within bind_timeout.",
    registry=REGISTRY,
)
RELEASES = Counter(
    "sharepod_operator_releases",
    "Reservations given away, by what confirmed that nothing was left.",
    ["confirmed"],
    registry=REGISTRY,
)
SWEPT = Counter(
    "sharepod_operator_swept", "Objects found gone by a list, of which no watch had told.", ["kind"], registry=REGISTRY
)
FAILURES = Counter(
    "sharepod_operator_failures", "Failures of work that is tried again, by queue.", ["queue"], registry=REGISTRY
)
OVERCOMMITS = Gauge(
    "sharepod_operator_overcommits", "GPUs of which a ledger promises more than the GPU has.", registry=REGISTRY
)
UNENFORCED = Gauge(
    "sharepod_operator_unenforced",
    "SharePods whose share is not enforced, by their agents' reports.",
    registry=REGISTRY,
)
EVICTIONS = Counter(
    "sharepod_operator_evictions",
    "Pods evicted because their share is not enforced, by how; `refused`: tries that a disruption budget forbade.",
    ["how"],
    registry=REGISTRY,
)
AGENTS_AWAY = Gauge(
    "sharepod_operator_agents_away", "Nodes of the pool whose agent does not renew its Lease.", registry=REGISTRY
)
EVENTS_DROPPED = Counter(
    "sharepod_operator_events_dropped", "Events dropped because there were too many.", registry=REGISTRY
)
