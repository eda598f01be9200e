"""What the operator counts, for Prometheus, under `/metrics`."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

REGISTRY = CollectorRegistry()

LEADER = Gauge("sharepod_operator_leader", "1 while this process holds the Lease and acts.", registry=REGISTRY)
SHAREPODS = Gauge("sharepod_operator_sharepods", "SharePods by phase.", ["phase"], registry=REGISTRY)
WAITING = Gauge("sharepod_operator_waiting", "SharePods that wait for a place.", registry=REGISTRY)
DECISIONS = Counter("sharepod_operator_decisions", "Placement decisions by outcome.", ["outcome"], registry=REGISTRY)
DECISION_SECONDS = Histogram(
    "sharepod_operator_decision_seconds",
    "Time that one placement decision took.",
    buckets=(0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0),
    registry=REGISTRY,
)
LEDGER_WRITES = Counter(
    "sharepod_operator_ledger_writes", "Writes to GPUNode.spec by outcome.", ["outcome"], registry=REGISTRY
)
LEDGER_CHANGES = Counter(
    "sharepod_operator_ledger_changes", "Rows added, changed or removed by ledger writes.", registry=REGISTRY
)
PODS_CREATED = Counter("sharepod_operator_pods_created", "Pods made for SharePods.", registry=REGISTRY)
PODS_TAKEN_BACK = Counter(
    "sharepod_operator_pods_taken_back", "Pods deleted because they were not bound in time.", registry=REGISTRY
)
RELEASES = Counter(
    "sharepod_operator_releases", "Reservations given away by what confirmed the end.", ["confirmed"], registry=REGISTRY
)
SWEPT = Counter("sharepod_operator_swept", "Objects whose end no watch had told of.", ["kind"], registry=REGISTRY)
FAILURES = Counter(
    "sharepod_operator_failures", "Work that failed and is tried again, by queue.", ["queue"], registry=REGISTRY
)
OVERCOMMITS = Gauge(
    "sharepod_operator_overcommits", "GPUs of which a ledger promises more than there is.", registry=REGISTRY
)
UNENFORCED = Gauge(
    "sharepod_operator_unenforced", "SharePods whose share is not enforced, as their agents say.", registry=REGISTRY
)
EVICTIONS = Counter(
    "sharepod_operator_evictions",
    "Pods evicted because their share is not enforced, by how; `refused` is a try that a disruption budget forbade.",
    ["how"],
    registry=REGISTRY,
)
AGENTS_AWAY = Gauge(
    "sharepod_operator_agents_away", "Nodes of the pool whose agent does not renew its Lease.", registry=REGISTRY
)
EVENTS_DROPPED = Counter(
    "sharepod_operator_events_dropped", "Events not written because they were too many.", registry=REGISTRY
)
