"""Fixtures for the tests of the reconcilers."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from unit.controller.acting_world import World, acting_world


@pytest.fixture
async def world() -> AsyncIterator[World]:
    async with acting_world() as made:
        yield made
