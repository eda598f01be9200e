"""Grafana dashboards of SharePod, the one source of dashboards/*.json: make dashboards

Panels read the metrics of operator and agents, and the recording rules of prometheus-operator.yaml.
"""

from __future__ import annotations

import json
from pathlib import Path

from grafana import Dashboard, Panel, Query, model

FOLDER = Path(__file__).with_name("dashboards")


def _stat(title: str, expr: str, unit: str = "short", text: str = "") -> Panel:
    return Panel(title, (Query(expr),), unit, "stat", 4, text=text)


_TEAM = 'namespace=~"$namespace"'
_GPU = 'node=~"$node", gpu=~"$gpu"'
_POD = 'namespace=~"$namespace", pod=~"$pod"'
_RATE = "[$__rate_interval]"


def _hours(kind: str) -> str:
    series = f'namespace_model_kind:sharepod_namespace_gpu_seconds:max{{{_TEAM}, kind="{kind}"}}'
    return f"sum(increase({series}[$__range])) / 3600"


_WAITS = f"sharepod_tenant_wait_seconds_bucket{{{_POD}}}"

CLUSTER = Dashboard(
    "sharepod-cluster",
    "SharePod / Cluster",
    (),
    (
        _stat("GPUs", "count(sharepod_gpu_healthy)"),
        _stat(
            "GPU time free",
            "sum(sharepod_gpu_free_ratio * sharepod_gpu_shareable)",
            text="GPUs' worth of time that no tenant has reserved, on GPUs that can be shared",
        ),
        _stat("Workloads that wait", "max(sharepod_operator_waiting)"),
        _stat("Longest wait", "max(sharepod_operator_longest_wait_seconds)", "s"),
        _stat("Agents away or not ready", "max(sharepod_operator_agents_away) + max(sharepod_operator_agents_unready)"),
        _stat("Alerts", 'count(ALERTS{alertname=~"SharePod.*", alertstate="firing"}) or vector(0)'),
        Panel(
            "GPUs in use by namespace",
            (Query("namespace:sharepod_tenant_held_seconds:rate5m", "{{namespace}}"),),
            stacked=True,
        ),
        Panel(
            "GPUs reserved by namespace",
            (Query("namespace:sharepod_tenant_request_ratio:sum", "{{namespace}}"),),
            stacked=True,
        ),
        Panel(
            "Time of all GPUs by use",
            (Query("sum by (use) (node_gpu_use:sharepod_gpu_time_seconds:rate5m)", "{{use}}"),),
            stacked=True,
            text="gap: several tenants hold and none has work; anticipated: kept for a tenant that pauses",
        ),
        Panel(
            "Memory of all GPUs",
            (
                Query("sum(sharepod_gpu_memory_bytes)", "there"),
                Query("sum(sharepod_gpu_memory_bytes) - sum(sharepod_gpu_free_memory_bytes)", "reserved"),
                Query("sum(sharepod_tenant_memory_used_bytes)", "used"),
            ),
            "bytes",
        ),
        Panel(
            "Work that co-running gets done, 1: as in turns",
            (Query("node_gpu:sharepod_tenant_co_run_gain:ratio5m", "{{node}} {{gpu}}"),),
            "none",
        ),
        Panel(
            "From apply to an open gate, 95 % within",
            (
                Query(
                    "histogram_quantile(0.95, sum by (le) (rate(sharepod_operator_apply_to_pod_seconds_bucket[5m])))",
                    "p95",
                ),
            ),
            "s",
        ),
        Panel(
            "Placement decisions a second",
            (Query(f"sum by (outcome) (rate(sharepod_operator_decisions_total{_RATE}))", "{{outcome}}"),),
        ),
        Panel(
            "Preemptions and moves an hour",
            (
                Query("sum by (outcome) (increase(sharepod_operator_preemptions_total[1h]))", "preemption {{outcome}}"),
                Query("sum by (outcome) (increase(sharepod_operator_moves_total[1h]))", "move {{outcome}}"),
            ),
        ),
    ),
)

TEAM = Dashboard(
    "sharepod-team",
    "SharePod / Team",
    (("namespace", "label_values(sharepod_namespace_gpu_seconds_total, namespace)"),),
    (
        _stat(
            "GPU-hours held in this time",
            _hours("held"),
            "none",
        ),
        _stat(
            "GPU-hours reserved in this time",
            _hours("reserved"),
            "none",
        ),
        _stat(
            "Cost of the held hours",
            f"$price * {_hours('held')}",
            "none",
            text="At the price of a GPU-hour above. GPUStatements have the exact hours for a bill",
        ),
        _stat("Budget used", f"max(sharepod_namespace_budget_used_ratio{{{_TEAM}}})", "percentunit"),
        _stat("Budget left", f"sum(sharepod_namespace_budget_left_seconds{{{_TEAM}}})", "s"),
        _stat("Reserved GPUs that idle", f"sum(sharepod_namespace_idle_reserved_gpus{{{_TEAM}}})", "none"),
        Panel(
            "GPUs: reserved and in use",
            (
                Query(f"namespace:sharepod_tenant_request_ratio:sum{{{_TEAM}}}", "{{namespace}} reserved"),
                Query(f"namespace:sharepod_tenant_held_seconds:rate5m{{{_TEAM}}}", "{{namespace}} in use"),
            ),
        ),
        Panel(
            "Charged to budgets, GPUs",
            (Query(f"sharepod_namespace_budget_spending_ratio{{{_TEAM}}}", "{{namespace}}/{{budget}}"),),
        ),
        Panel(
            "GPUs in use by workload",
            (
                Query(
                    f"sum by (namespace, pod) (namespace_pod_gpu:sharepod_tenant_held_seconds:rate5m{{{_TEAM}}})",
                    "{{pod}}",
                ),
            ),
            stacked=True,
        ),
        Panel(
            "Waiting for turns, part of the time",
            (
                Query(
                    f"max by (namespace, pod) (namespace_pod_gpu:sharepod_tenant_waited_seconds:rate5m{{{_TEAM}}})",
                    "{{pod}}",
                ),
            ),
            "percentunit",
        ),
        Panel(
            "Memory in use, part of the limit",
            (
                Query(
                    f"sharepod_tenant_memory_used_bytes{{{_TEAM}}} / sharepod_tenant_memory_limit_bytes{{{_TEAM}}}",
                    "{{pod}} {{gpu}}",
                ),
            ),
            "percentunit",
        ),
        Panel(
            "Refused allocations an hour",
            (Query(f"sum by (pod) (increase(sharepod_tenant_denied_allocations_total{{{_TEAM}}}[1h]))", "{{pod}}"),),
        ),
    ),
    price=True,
)

GPU = Dashboard(
    "sharepod-gpu",
    "SharePod / Node and GPU",
    (
        ("node", "label_values(sharepod_gpu_healthy, node)"),
        ("gpu", 'label_values(sharepod_gpu_healthy{node=~"$node"}, gpu)'),
    ),
    (
        _stat("Tenants", f"sum(sharepod_gpu_tenants{{{_GPU}}})"),
        _stat("Time free", f"sum(sharepod_gpu_free_ratio{{{_GPU}}})", "percentunit"),
        _stat("Memory free", f"sum(sharepod_gpu_free_memory_bytes{{{_GPU}}})", "bytes"),
        _stat("Healthy", f"min(sharepod_gpu_healthy{{{_GPU}}})"),
        _stat("Shareable", f"min(sharepod_gpu_shareable{{{_GPU}}})"),
        _stat("Foreign processes", f"sum(sharepod_gpu_foreign_processes{{{_GPU}}})"),
        Panel(
            "Tenants that held the GPU, part of the time",
            (Query(f"namespace_pod_gpu:sharepod_tenant_held_seconds:rate5m{{{_GPU}}}", "{{namespace}}/{{pod}}"),),
            "percentunit",
            width=24,
            stacked=True,
            text="Above 100 % tenants co-run. Single turns: kubectl sharepod trace",
        ),
        Panel(
            "Held together with others, part of the time",
            (
                Query(
                    f"sum by (namespace, pod) (rate(sharepod_tenant_co_run_seconds_total{{{_GPU}}}{_RATE}))",
                    "{{namespace}}/{{pod}}",
                ),
            ),
            "percentunit",
        ),
        Panel(
            "Work that co-running gets done, 1: as in turns",
            (Query(f"node_gpu:sharepod_tenant_co_run_gain:ratio5m{{{_GPU}}}", "{{gpu}}"),),
            "none",
        ),
        Panel(
            "Time of the GPU by use",
            (Query(f"sum by (use) (node_gpu_use:sharepod_gpu_time_seconds:rate5m{{{_GPU}}})", "{{use}}"),),
            "percentunit",
            stacked=True,
        ),
        Panel(
            "Busy by NVML",
            (
                Query(f"sharepod_gpu_busy_ratio{{{_GPU}}}", "GPU {{index}}"),
                Query(f"sharepod_tenant_busy_ratio{{{_GPU}}}", "{{namespace}}/{{pod}}"),
            ),
            "percentunit",
        ),
        Panel(
            "Memory by tenant",
            (
                Query(f"sharepod_tenant_memory_used_bytes{{{_GPU}}}", "{{namespace}}/{{pod}}"),
                Query(f"sum by (gpu) (sharepod_gpu_memory_bytes{{{_GPU}}})", "there"),
            ),
            "bytes",
        ),
        Panel("Tenants that co-run", (Query(f"sharepod_gpu_co_runners{{{_GPU}}}", "GPU {{index}}"),)),
        Panel(
            "Ends of co-running an hour, by reason",
            (Query(f"sum by (reason) (increase(sharepod_gpu_co_runs_ended_total{{{_GPU}}}[1h]))", "{{reason}}"),),
        ),
        Panel(
            "Xids that the driver has reported",
            (Query(f"sharepod_gpu_xids_total{{{_GPU}}}", "{{node}} GPU {{index}} Xid {{xid}}"),),
            text="A counter: each step is an Xid. Its increase would leave out the first Xid of each number",
        ),
    ),
)

WORKLOAD = Dashboard(
    "sharepod-workload",
    "SharePod / Workload",
    (
        ("namespace", "label_values(sharepod_tenant_request_ratio, namespace)"),
        ("pod", 'label_values(sharepod_tenant_request_ratio{namespace=~"$namespace"}, pod)'),
    ),
    (
        _stat("Request", f"max(sharepod_tenant_request_ratio{{{_POD}}})", "percentunit"),
        _stat("Held in the last 10 s", f"max(sharepod_tenant_usage_ratio{{{_POD}}})", "percentunit"),
        _stat("Waits, 99 % within", f"max(namespace_pod:sharepod_tenant_wait_seconds:p99_5m{{{_POD}}})", "s"),
        _stat("Memory limit", f"max(sharepod_tenant_memory_limit_bytes{{{_POD}}})", "bytes"),
        _stat(
            "Refused allocations in an hour", f"sum(increase(sharepod_tenant_denied_allocations_total{{{_POD}}}[1h]))"
        ),
        _stat("Enforced", f"min(sharepod_tenant_enforced{{{_POD}}})"),
        Panel(
            "GPU time: request, limit, held, waited",
            (
                Query(f"max by (gpu) (sharepod_tenant_request_ratio{{{_POD}}})", "request"),
                Query(f"max by (gpu) (sharepod_tenant_limit_ratio{{{_POD}}})", "limit"),
                Query(f"namespace_pod_gpu:sharepod_tenant_held_seconds:rate5m{{{_POD}}}", "held"),
                Query(f"namespace_pod_gpu:sharepod_tenant_waited_seconds:rate5m{{{_POD}}}", "waited"),
            ),
            "percentunit",
        ),
        Panel(
            "Waits for turns",
            tuple(
                Query(f"histogram_quantile({part}, sum by (le) (rate({_WAITS}{_RATE})))", name)
                for part, name in ((0.5, "half within"), (0.99, "99 % within"))
            ),
            "s",
        ),
        Panel(
            "Memory",
            (
                Query(f"sharepod_tenant_memory_used_bytes{{{_POD}}}", "used"),
                Query(f"sharepod_tenant_memory_limit_bytes{{{_POD}}}", "limit"),
            ),
            "bytes",
        ),
        Panel(
            "Co-running: time held with others, and progress in it",
            (
                Query(f"sum(rate(sharepod_tenant_co_run_seconds_total{{{_POD}}}{_RATE}))", "held with others"),
                Query(f"sum(rate(sharepod_tenant_co_run_progress_seconds_total{{{_POD}}}{_RATE}))", "progress"),
            ),
            "percentunit",
        ),
        Panel("Turns a second", (Query(f"sum(rate(sharepod_tenant_grants_total{{{_POD}}}{_RATE}))", "turns"),)),
        Panel(
            "Turns that were lost, an hour",
            (
                Query(
                    f"sum(increase(sharepod_tenant_overtaken_total{{{_POD}}}[1h]))", "kernels beyond the grace period"
                ),
                Query(f"sum(increase(sharepod_tenant_suspended_total{{{_POD}}}[1h]))", "no processor time"),
                Query(f"sum(increase(sharepod_tenant_throttled_total{{{_POD}}}[1h]))", "too many frames"),
            ),
        ),
        Panel(
            "Charged for kernels without the token",
            (Query(f"sum(rate(sharepod_tenant_surcharged_seconds_total{{{_POD}}}{_RATE}))", "part of the time"),),
            "percentunit",
        ),
        Panel(
            "Work in flight while it holds alone, and busy by NVML",
            (
                Query(f"sharepod_tenant_in_flight_ratio{{{_POD}}}", "in flight"),
                Query(f"sharepod_tenant_busy_ratio{{{_POD}}}", "busy"),
            ),
            "percentunit",
        ),
    ),
)

DASHBOARDS = {"cluster": CLUSTER, "team": TEAM, "node-and-gpu": GPU, "workload": WORKLOAD}


def main() -> None:
    """Write the files."""
    FOLDER.mkdir(exist_ok=True)
    for name, dashboard in DASHBOARDS.items():
        (FOLDER / f"{name}.json").write_text(json.dumps(model(dashboard), indent=1) + "\n")


if __name__ == "__main__":
    main()
