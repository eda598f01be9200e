"""Control planes for the tests of this folder: one shared by the session, and separate ones on request."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from cluster import operator_world
from cluster.claims_world import serves_claims
from cluster.operator_world import World
from cluster.shared_cluster import SharedCluster
from cluster.weather.world import Weather, bad_weather
from harness.build import programs
from harness.cluster import Cluster
from harness.installation import install

_KEEP_LOGS = bool(os.environ.get("KEEP_LOGS"))
_HERE = Path(__file__).parent


def pytest_collection_finish(session: pytest.Session) -> None:
    """Build the Kubernetes programs before the timeout of the first test begins: the first build takes minutes."""
    if not session.config.option.collectonly and any(_HERE in item.path.parents for item in session.items):
        programs()


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    """Return the session's cluster. Tests share it, so each test uses its own namespaces and cluster-wide names."""
    with Cluster(keep_logs=_KEEP_LOGS) as running:
        yield running


@pytest.fixture
def cluster_factory() -> Iterator[Callable[..., Cluster]]:
    """Start clusters that end with the test: cluster_factory(**options of Cluster)."""
    started: list[Cluster] = []

    def start(**options: Any) -> Cluster:
        started.append(Cluster(keep_logs=_KEEP_LOGS, **options))
        return started[-1]

    yield start
    for running in reversed(started):
        running.stop()


@pytest.fixture(autouse=True)
def operators_run() -> None:
    """Start the operators before each test, so that a test that failed after it had killed its operator affects no
    other test."""
    for world in operator_world.OPEN:
        world.revive_operator()


@pytest.fixture(scope="session")
def shared_cluster() -> Iterator[SharedCluster]:
    """Return the cluster on which files run their worlds one after another. Other folders that import this fixture get
    the same one."""
    with _shared_cluster() as shared:
        yield shared


_shared_cluster = functools.cache(SharedCluster)


@pytest.fixture(scope="module")
def world(request: pytest.FixtureRequest, shared_cluster: SharedCluster) -> Iterator[World]:
    """Return the file's world with an acting operator. Claims are installed if the file sets WORLD_HAS_CLAIMS."""
    with shared_cluster.world() as running:
        if getattr(request.module, "WORLD_HAS_CLAIMS", False):
            if not serves_claims(running.api):
                pytest.skip("the API server does not serve resource.k8s.io/v1")
            running.installation.install_claims()
        yield running


@pytest.fixture(scope="module")
def sky() -> Iterator[Weather]:
    """Return the file's cluster, with an operator whose connection passes a fault-injecting proxy."""
    with bad_weather() as running:
        yield running


@pytest.fixture
def weather(sky: Weather) -> Iterator[Weather]:
    """Return the file's cluster without faults and with a running operator, at the beginning of each test."""
    sky.clear()
    yield sky
    sky.proxy.clear()


@pytest.fixture(scope="session")
def server() -> Iterator[Cluster]:
    """Return a control plane for the tests of admission: all of manifests/ except the workloads. No Pod is scheduled
    here."""
    with Cluster(scheduler=False) as cluster:
        cluster.await_service_account("default", "default")
        install(cluster)
        yield cluster


@pytest.fixture(scope="session")
def alice(server: Cluster) -> Path:
    """Return the kubeconfig of a user who may edit namespace default."""
    server.kubectl("create", "rolebinding", "alice", "--clusterrole=edit", "--user=alice", "--namespace=default")
    return server.user_kubeconfig("alice")
