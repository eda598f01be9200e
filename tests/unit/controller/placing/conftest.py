"""Fixtures of this folder: tests run on a virtual clock."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

from unit.virtual_time import VirtualTimeLoop


def pytest_asyncio_loop_factories() -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    """Return the only event loop for these tests, by name."""
    return {"virtual-time": VirtualTimeLoop}
