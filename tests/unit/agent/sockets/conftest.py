"""Fixtures for the tests of sockets: two tenants that are served."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from sharepod.agent.settings import AgentSettings
from sharepod.agent.tenants.registry import TenantRegistry
from unit.agent.client import row, settings_in, tenants_with


@pytest.fixture
def settings(tmp_path: Path) -> AgentSettings:
    return settings_in(tmp_path)


@pytest_asyncio.fixture
async def tenants(settings: AgentSettings) -> AsyncIterator[TenantRegistry]:
    async with tenants_with(settings, [row("a", 400, 700), row("b", 600)]) as tenants:
        yield tenants
