"""Dashboards in Grafana's JSON form: queries, panels and variables.

Guarantees: equal dashboards give equal files; each panel has its own id and its own place on the page.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

_SCHEMA = 39
"""Version of the dashboard schema: Grafana 10.4's. Later Grafanas read it and convert it."""
_COLUMNS, _HEIGHT, _STAT_HEIGHT = 24, 8, 4
_SOURCE = {"type": "prometheus", "uid": "${datasource}"}

_STAT: dict[str, Any] = {
    "graphMode": "area",
    "colorMode": "value",
    "justifyMode": "auto",
    "textMode": "auto",
    "wideLayout": True,
    "orientation": "auto",
    "showPercentChange": False,
    "percentChangeColorMode": "standard",
}
"""Options of a stat panel that Grafana's schema requires, with Grafana's defaults."""


@dataclass(frozen=True)
class Query:
    """Query of a panel. `expr`: in PromQL; `legend`: name of its series in the panel."""

    expr: str
    legend: str = ""


@dataclass(frozen=True)
class Panel:
    """One panel. `kind`: Grafana's panel type; `unit`: Grafana's name of the unit; `width`: in columns of 24 per
    row."""

    title: str
    queries: tuple[Query, ...]
    unit: str = "short"
    kind: str = "timeseries"
    width: int = 12
    stacked: bool = False
    text: str = ""
    """Description of the panel, for a reader who does not know the figure."""


@dataclass(frozen=True)
class Dashboard:
    """One dashboard. `variables`: (name, query that lists the values) of each selector at its top."""

    uid: str
    title: str
    variables: tuple[tuple[str, str], ...]
    panels: tuple[Panel, ...]
    price: bool = False
    """True if the dashboard has an input field for the price of a GPU-hour."""


def places(panels: Sequence[Panel]) -> Iterator[dict[str, int]]:
    """Yield the place of each panel in Grafana's grid: rows are filled from left to right, and are as high as their
    first panel."""
    x = y = height = 0
    for panel in panels:
        own = _STAT_HEIGHT if panel.kind == "stat" else _HEIGHT
        if x + panel.width > _COLUMNS or (x and own != height):
            x, y = 0, y + height
        height = own
        yield {"x": x, "y": y, "w": panel.width, "h": own}
        x += panel.width


def model(dashboard: Dashboard) -> dict[str, Any]:
    """Return a dashboard as the object that Grafana's JSON file contains."""
    panels = [
        _panel(number, panel, place)
        for number, (panel, place) in enumerate(zip(dashboard.panels, places(dashboard.panels), strict=True), 1)
    ]
    return {
        "uid": dashboard.uid,
        "title": dashboard.title,
        "tags": ["sharepod"],
        "schemaVersion": _SCHEMA,
        "editable": True,
        "graphTooltip": 1,
        "refresh": "30s",
        "time": {"from": "now-3h", "to": "now"},
        "templating": {"list": list(_variables(dashboard))},
        "annotations": {"list": []},
        "links": [
            {
                "type": "dashboards",
                "tags": ["sharepod"],
                "title": "SharePod",
                "tooltip": "",
                "icon": "external link",
                "asDropdown": True,
                "includeVars": True,
                "keepTime": True,
                "targetBlank": False,
            }
        ],
        "panels": panels,
    }


def _variables(dashboard: Dashboard) -> Iterator[dict[str, Any]]:
    yield {"name": "datasource", "label": "Prometheus", "type": "datasource", "query": "prometheus"}
    for name, query in dashboard.variables:
        yield {
            "name": name,
            "label": name,
            "type": "query",
            "datasource": _SOURCE,
            "query": {"query": query, "refId": name},
            "definition": query,
            "refresh": 2,
            "includeAll": True,
            "allValue": ".*",
            "multi": True,
            "sort": 1,
        }
    if dashboard.price:
        yield {"name": "price", "label": "price of a GPU-hour", "type": "textbox", "query": "2.50"}


def _panel(number: int, panel: Panel, place: dict[str, int]) -> dict[str, Any]:
    defaults: dict[str, Any] = {"unit": panel.unit}
    options: dict[str, Any] = {}
    if panel.kind == "stat":
        options = _STAT | {"reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False}}
    else:
        defaults["min"] = 0
        defaults["custom"] = {
            "fillOpacity": 60 if panel.stacked else 0,
            "lineWidth": 1,
            "stacking": {"mode": "normal" if panel.stacked else "none", "group": "A"},
        }
        options = {
            "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True, "calcs": []},
            "tooltip": {"mode": "multi", "sort": "desc"},
        }
    return {
        "id": number,
        "type": panel.kind,
        "title": panel.title,
        "description": panel.text,
        "datasource": _SOURCE,
        "gridPos": place,
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "options": options,
        "targets": [
            {"refId": chr(ord("A") + letter), "datasource": _SOURCE, "expr": query.expr, "legendFormat": query.legend}
            for letter, query in enumerate(panel.queries)
        ],
    }
