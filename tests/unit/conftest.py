"""Fixtures: an API server with scripted answers, and a connection to it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from sharepod.kube import Connection
from unit.scripted_server import Scripted, kubeconfig, scripted_server


@pytest.fixture
async def scripted() -> AsyncIterator[Scripted]:
    async with scripted_server() as script:
        yield script


@pytest.fixture
async def api(scripted: Scripted, tmp_path: Path) -> AsyncIterator[Connection]:
    connected = await Connection.open(kubeconfig(tmp_path, scripted.url, token="first"), "sharepod-agent/test")
    yield connected
    await connected.close()
