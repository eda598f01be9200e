"""Control planes for the tests of this folder: one shared by the session, and as many of their own as they ask for."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from harness.build import programs
from harness.cluster import Cluster

_KEEP_LOGS = bool(os.environ.get("KEEP_LOGS"))


def pytest_collection_finish(session: pytest.Session) -> None:
    """Build the programs before the first test's clock starts: the first time it takes minutes."""
    here = Path(__file__).parent
    if not session.config.option.collectonly and any(here in item.path.parents for item in session.items):
        programs()


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    """The session's cluster. Tests share it: each uses namespaces and cluster-wide names of its own."""
    with Cluster(keep_logs=_KEEP_LOGS) as running:
        yield running


@pytest.fixture
def cluster_factory() -> Iterator[Callable[..., Cluster]]:
    """Starts clusters that end with the test: cluster_factory(**options of Cluster)."""
    started: list[Cluster] = []

    def start(**options: Any) -> Cluster:
        started.append(Cluster(keep_logs=_KEEP_LOGS, **options))
        return started[-1]

    yield start
    for running in reversed(started):
        running.stop()
