"""Fixtures of the agent's tests."""

from __future__ import annotations

from pathlib import Path

import pytest
from unit.agent.client import row, settings_in
from unit.agent.program import write_inventory, write_tenants


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    settings_in(tmp_path)
    write_inventory(tmp_path)
    write_tenants(tmp_path, [row("a", 400, 700)])
    return tmp_path
