"""Dashboards: their files are up to date, and every panel's query returns data."""

from __future__ import annotations

import itertools
import json
import re
import subprocess
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from http import HTTPStatus
from pathlib import Path
from typing import Any

import pytest
import yaml
from dashboards import DASHBOARDS, FOLDER
from grafana import model
from harness.build import built
from harness.prometheus import prometheus, promtool
from harness.releases import DASHBOARD_SCHEMA
from prometheus_client import CollectorRegistry, generate_latest
from sharepod.agent.agent import Agent
from sharepod.agent.devices.inventory import SimulatedInventory
from sharepod.agent.telemetry.collector import AgentCollector
from unit.agent.client import row, settings_in
from unit.agent.program import write_inventory
from unit.monitoring.played import TARGET, families, labels_of_series, serving
from unit.monitoring.test_rules import GROUPS, RULES, questions, read_by

PATIENCE_S = 60.0
SCHEMA = built(DASHBOARD_SCHEMA)
NAMES = sorted(DASHBOARDS)
MODELS: dict[str, dict[str, Any]] = {name: model(dashboard) for name, dashboard in DASHBOARDS.items()}


def queries() -> list[tuple[str, str]]:
    """Return (title, query) of each target, with Grafana's variables replaced."""
    values = {"$__rate_interval": "5m", "$__range": "1h", "$price": "2.5"}
    found: list[tuple[str, str]] = []
    for name in NAMES:
        for panel in MODELS[name]["panels"]:
            for target in panel["targets"]:
                query = target["expr"]
                for variable, value in values.items():
                    query = query.replace(variable, value)
                found.append((f"{name}: {panel['title']}", re.sub(r"\$(namespace|pod|node|gpu)\b", ".*", query)))
    return found


@pytest.mark.parametrize("name", NAMES)
def test_the_file_is_what_the_source_makes(name: str) -> None:
    assert json.loads((FOLDER / f"{name}.json").read_text()) == MODELS[name], "run make dashboards"
    assert {path.stem for path in FOLDER.glob("*.json")} == set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_panels_have_ids_and_places_of_their_own_and_use_only_variables_that_exist(name: str) -> None:
    found = MODELS[name]
    panels = found["panels"]
    assert [panel["id"] for panel in panels] == list(range(1, len(panels) + 1))
    for left, right in itertools.combinations([panel["gridPos"] for panel in panels], 2):
        apart = left["x"] + left["w"] <= right["x"] or right["x"] + right["w"] <= left["x"]
        assert apart or left["y"] + left["h"] <= right["y"] or right["y"] + right["h"] <= left["y"]
    assert all(panel["gridPos"]["x"] + panel["gridPos"]["w"] <= 24 for panel in panels)
    known = {variable["name"] for variable in found["templating"]["list"]} | {"__rate_interval", "__range"}
    assert set(re.findall(r"\$\{?(\w+)", json.dumps(found))) <= known
    for panel in panels:
        assert panel["type"] in ("stat", "timeseries")
        assert panel["targets"]
        assert all(target["datasource"] == panel["datasource"] for target in panel["targets"])
        refs = [target["refId"] for target in panel["targets"]]
        assert len(set(refs)) == len(refs)


@pytest.mark.skipif(not SCHEMA, reason="Grafana's schema is not built: make prometheus")
@pytest.mark.promise("operator-dashboards-schema")
def test_every_field_is_one_of_grafanas_schema_and_none_is_missing(tmp_path: Path) -> None:
    assert SCHEMA is not None
    program = str(SCHEMA / "dashboard-schema")
    files = [str(FOLDER / f"{name}.json") for name in NAMES]
    done = subprocess.run([program, *files], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    broken = json.loads(json.dumps(MODELS[NAMES[0]]))
    broken["panels"][0]["targets"][0]["exprs"] = broken["panels"][0]["targets"][0].pop("expr")
    (tmp_path / "broken.json").write_text(json.dumps(broken))
    done = subprocess.run(
        [program, str(tmp_path / "broken.json")], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 1
    assert "panels[0].targets" in done.stderr


def test_the_uids_of_dashboards_differ() -> None:
    assert len({found["uid"] for found in MODELS.values()}) == len(MODELS)


def test_queries_and_variables_read_labels_that_their_series_have() -> None:
    labels = labels_of_series()
    for rule in RULES:
        if "record" in rule:
            [by] = re.findall(r"^\w+\(?.*?by \(([^)]*)\)", rule["expr"].replace("0.99, ", ""), re.DOTALL)[:1]
            labels[rule["record"]] = {each.strip() for each in by.split(",")} - {"le"}
    labels["ALERTS"] = {"alertname", "alertstate"}
    asked = [query for _, query in queries()]
    for found in MODELS.values():
        for variable in found["templating"]["list"]:
            if variable["type"] == "query":
                series, label = re.fullmatch(r"label_values\((.*), (\w+)\)", variable["definition"]).groups()  # type: ignore[union-attr]
                asked.append(f'{series.partition("{")[0]}{{{label}=""}}')
    for query in asked:
        for series, matchers in re.findall(r"([a-z_]+:\w+:\w+|\b(?:sharepod|ALERTS)\w*)(?:\{([^}]*)\})?", query):
            assert series in labels, query
            assert set(re.findall(r"(\w+)=", matchers)) <= labels[series], query


@pytest.mark.usefixtures("built_prometheus")
def test_every_panel_returns_data_from_a_prometheus(tmp_path: Path) -> None:
    rules = tmp_path / "rules.yaml"
    rules.write_text(yaml.safe_dump({"groups": GROUPS}))
    asked = queries()
    checked = [{"record": f"panel:{number}", "expr": query} for number, (_, query) in enumerate(asked)]
    (tmp_path / "panels.yaml").write_text(yaml.safe_dump({"groups": [{"name": "panels", "rules": checked}]}))
    promtool("check", "rules", str(tmp_path / "panels.yaml"))
    with serving() as target, prometheus(tmp_path, rules, target, TARGET) as url:
        deadline = time.monotonic() + PATIENCE_S
        empty = asked
        while empty and time.monotonic() < deadline:
            empty = [(title, query) for title, query in empty if not returns_data(url, query)]
            time.sleep(0.2)
    assert empty == [], (tmp_path / "prometheus.log").read_text()[-2000:]


def returns_data(url: str, query: str) -> bool:
    try:
        with urllib.request.urlopen(
            f"{url}/api/v1/query?{urllib.parse.urlencode({'query': query})}", timeout=10
        ) as got:
            found = json.load(got)
    except urllib.error.HTTPError as error:
        if error.code == HTTPStatus.SERVICE_UNAVAILABLE:  # Prometheus is starting
            return False
        raise AssertionError(f"{query}: {error.read().decode()}") from None
    except OSError:  # Prometheus does not listen yet
        return False
    return any(value["value"][1] != "NaN" for value in found["data"]["result"])


def test_every_series_of_tenants_and_gpus_is_read_by_a_panel_a_rule_or_a_question() -> None:
    asked = [*(query for _, query in queries()), *(rule["expr"] for rule in RULES), *questions()]
    read = {name for query in asked for name in read_by(query)}
    served = {name for name in families() if name.startswith(("sharepod_tenant_", "sharepod_gpu_"))}
    assert {name for name in served if not any(each.startswith(name) for each in read)} == set()


def metrics_of_a_new_operator() -> str:
    code = "from sharepod.controller import metrics as m; from prometheus_client import generate_latest as g; "
    command = [sys.executable, "-c", f"{code}print(g(m.LEADERS).decode())"]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout


async def test_rates_and_increases_read_series_that_exist_before_their_first_event(tmp_path: Path) -> None:
    """Prometheus counts no increase for the first sample of a series, so a series that begins with its first event
    hides that event."""
    asked = [*(query for _, query in queries()), *(rule["expr"] for rule in RULES)]
    counted = {name for query in asked for name in re.findall(r"(?:rate|increase)\((sharepod_\w+)", query)}
    text = metrics_of_a_new_operator()
    write_inventory(tmp_path)
    agent = Agent(settings_in(tmp_path), SimulatedInventory(tmp_path / "inventory.yaml"))
    await agent.start()
    try:
        await agent.take_stock()
        await agent.tenants.apply([row("a")])
        registry = CollectorRegistry()
        registry.register(AgentCollector(agent))
        text += generate_latest(registry).decode()
    finally:
        await agent.close()
    there = set(re.findall(r"^(sharepod_\w+)", text, re.MULTILINE))
    assert counted - there == set()
