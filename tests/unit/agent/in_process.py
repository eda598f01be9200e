"""An agent in the process of the test, on a simulated inventory."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from sharepod.agent.agent import Agent
from sharepod.agent.devices.inventory import SimulatedInventory
from unit.agent.client import settings_in


@contextlib.asynccontextmanager
async def started(directory: Path, **changes: Any) -> AsyncIterator[Agent]:
    settings = settings_in(directory, **changes)
    agent = Agent(settings, SimulatedInventory(directory / "inventory.yaml"))
    await agent.start()
    await agent.take_stock()
    try:
        yield agent
    finally:
        await agent.close()
