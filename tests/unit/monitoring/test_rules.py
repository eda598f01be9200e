"""examples/monitoring: Prometheus scrapes the served metrics with it, and its rules and alerts keep their promises."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml
from harness.prometheus import promtool
from prometheus_client import generate_latest
from prometheus_client.registry import CollectorRegistry
from sharepod.agent.agent import Agent
from sharepod.agent.devices.inventory import SimulatedInventory
from sharepod.agent.telemetry.collector import AgentCollector
from sharepod.agent.telemetry.families import FAMILIES
from sharepod.controller import metrics
from unit.agent.client import row, settings_in
from unit.agent.program import write_inventory

ROOT = Path(__file__).resolve().parents[3]
DOCUMENTS = {
    document["kind"]: document
    for document in yaml.safe_load_all((ROOT / "examples/monitoring/prometheus-operator.yaml").read_text())
}
GROUPS: list[dict[str, Any]] = DOCUMENTS["PrometheusRule"]["spec"]["groups"]
RULES: list[dict[str, Any]] = [rule for group in GROUPS for rule in group["rules"]]
RECORDED = {rule["record"] for rule in RULES if "record" in rule}
ALERTS = [rule for rule in RULES if "alert" in rule]


def served() -> set[str]:
    """Return the names of the series that operator and agents serve, by their tables of families."""
    text = (ROOT / "docs/settings.md").read_text()
    operators = set(re.findall(r"`(sharepod_(?:operator|namespace)_\w+)` \| (\w+)", text))
    agents = {(name + ("_total" if family.kind == "counter" else ""), family.kind) for name, family in FAMILIES.items()}
    return {
        f"{name}{suffix}"
        for name, kind in operators | agents
        for suffix in (("_bucket", "_sum", "_count") if kind == "histogram" else ("",))
    }


def test_the_pod_monitor_scrapes_both_with_a_token_and_labels_their_node() -> None:
    monitor = DOCUMENTS["PodMonitor"]
    [endpoint] = monitor["spec"]["podMetricsEndpoints"]
    assert endpoint["authorization"]["credentials"] == {"name": DOCUMENTS["Secret"]["metadata"]["name"], "key": "token"}
    assert DOCUMENTS["ClusterRoleBinding"]["roleRef"]["name"] == "sharepod-metrics-reader"
    assert {"sourceLabels": ["__meta_kubernetes_pod_node_name"], "targetLabel": "node"} in endpoint["relabelings"]
    pods = [*yaml.safe_load_all((ROOT / "manifests/operator/deployment.yaml").read_text())]
    pods += [*yaml.safe_load_all((ROOT / "manifests/agent/daemonset.yaml").read_text())]
    names = monitor["spec"]["selector"]["matchExpressions"][0]["values"]
    watched = [pod for pod in pods if pod["kind"] in ("Deployment", "DaemonSet")]
    for pod in (each["spec"]["template"] for each in watched):
        assert pod["metadata"]["labels"]["app.kubernetes.io/name"] in names
        [container] = pod["spec"]["containers"]
        assert endpoint["port"] in [port["name"] for port in container["ports"]]
    assert len(watched) == len(names) == 2


def read_by(query: str) -> set[str]:
    """Return the series of SharePod, and of its recording rules, that a query reads."""
    return set(re.findall(r"[a-z_]+:\w+:\w+|(?<![:\w])sharepod_\w+", query))


def questions() -> list[str]:
    """Return the queries in the page's table of questions."""
    table = (ROOT / "docs/monitoring.md").read_text().partition("## Ten questions")[2].partition("\n## ")[0]
    answers = [line.split(" | ", 1)[1] for line in table.splitlines() if line.startswith("| ") and "?" in line]
    return [query for answer in answers for query in re.findall(r"`([^`]+)`", answer)]


@pytest.mark.parametrize("query", [*(rule["expr"] for rule in RULES), *questions()])
def test_a_query_reads_series_that_are_served_or_recorded(query: str) -> None:
    asked = read_by(query)
    assert asked or "ALERTS" in query
    assert asked <= served() | RECORDED
    assert set(re.findall(r'alertname="(\w+)"', query)) <= {rule["alert"] for rule in ALERTS}


def test_every_alert_has_a_severity_and_a_runbook_that_exists() -> None:
    titles = re.findall(r"^#+ (.*)$", (ROOT / "docs/troubleshooting.md").read_text(), re.MULTILINE)
    anchors = {re.sub(r"[^a-z0-9 ]", "", title.lower()).replace(" ", "-") for title in titles}
    for rule in ALERTS:
        assert rule["labels"]["severity"] in ("info", "warning", "critical")
        page, _, anchor = rule["annotations"]["runbook_url"].partition("#")
        assert page == "https://sharepod.dev/docs/troubleshooting.md"
        assert anchor in anchors, rule["alert"]
    assert len({rule["alert"] for rule in ALERTS}) == len(ALERTS)


@pytest.mark.usefixtures("built_prometheus")
def test_rules_are_valid_and_alerts_fire_when_they_should(tmp_path: Path) -> None:
    rules = tmp_path / "rules.yaml"
    rules.write_text(yaml.safe_dump({"groups": GROUPS}))
    shutil.copy(Path(__file__).with_name("rules_test.yaml"), tmp_path)
    promtool("check", "rules", "--lint=all", "--lint-fatal", str(rules))
    promtool("test", "rules", str(tmp_path / "rules_test.yaml"))


@pytest.mark.usefixtures("built_prometheus")
def test_the_queries_of_the_page_are_valid(tmp_path: Path) -> None:
    asked = [{"record": f"question:{number}", "expr": query} for number, query in enumerate(questions())]
    assert len(asked) >= 10
    page = tmp_path / "page.yaml"
    page.write_text(yaml.safe_dump({"groups": [{"name": "page", "rules": asked}]}))
    promtool("check", "rules", str(page))


@pytest.mark.usefixtures("built_prometheus")
def test_metrics_of_the_operator_pass_promtools_lint() -> None:
    for registry in (metrics.REGISTRY, metrics.LEADERS):
        promtool("check", "metrics", input=generate_latest(registry).decode())


@pytest.mark.usefixtures("built_prometheus")
async def test_metrics_of_the_agent_pass_promtools_lint(tmp_path: Path) -> None:
    write_inventory(tmp_path)
    agent = Agent(settings_in(tmp_path), SimulatedInventory(tmp_path / "inventory.yaml"))
    await agent.start()
    try:
        await agent.take_stock()
        await agent.tenants.apply([row("a")])
        registry = CollectorRegistry()
        registry.register(AgentCollector(agent))
        promtool("check", "metrics", input=generate_latest(registry).decode())
    finally:
        await agent.close()
