"""The table of network traffic in docs/install.md, compared with the manifests."""

from __future__ import annotations

import re
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[3]
FILES = {"operator": ("operator/deployment.yaml", "line-webhook/operator.yaml"), "agent": ("agent/daemonset.yaml",)}


def test_the_table_of_network_traffic_has_each_port_of_operator_and_agent() -> None:
    page = (ROOT / "docs" / "install.md").read_text().partition("\n### Network traffic\n")[2].partition("\n### ")[0]
    for part, files in FILES.items():
        found = [yaml.safe_load((ROOT / "manifests" / name).read_text()) for name in files]
        containers = [one for item in found for one in item["spec"]["template"]["spec"]["containers"]]
        ports = {str(port["containerPort"]) for one in containers for port in one["ports"]}
        (row,) = re.findall(rf"^\| {part} \|.*$", page, re.MULTILINE)
        assert set(re.findall(r"\d+", row)) == ports
