"""Tests of this folder run on a virtual clock."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

from unit.virtual_time import VirtualTimeLoop


def pytest_asyncio_loop_factories() -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    """Return the one event loop of these tests."""
    return {"virtual-time": VirtualTimeLoop}
