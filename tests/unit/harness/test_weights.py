"""Weights of a node's cgroups: while shares are measured, Pods have priority over everything else on the machine."""

from __future__ import annotations

from pathlib import Path

import pytest
from harness import node_traces


@pytest.mark.parametrize(
    ("unified", "setting", "most"), [(True, "cpu.weight", "10000"), (False, "cpu.shares", "262144")]
)
def test_each_cgroup_from_the_nodes_to_those_named_has_the_greatest_weight(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, unified: bool, setting: str, most: str
) -> None:
    monkeypatch.setattr(node_traces, "CGROUPS", tmp_path)
    top = tmp_path / "node" if unified else tmp_path / "cpu" / "node"
    (top / "kubepods" / "burstable" / "pod").mkdir(parents=True)
    if unified:
        (tmp_path / "cgroup.controllers").touch()
    node_traces.weigh_most("node", "kubepods/burstable")
    assert {path.parent: path.read_text() for path in tmp_path.rglob(setting)} == dict.fromkeys(
        (top, top / "kubepods", top / "kubepods" / "burstable"), most
    )
