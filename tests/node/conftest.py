"""A real node for the tests of this folder. If the machine cannot run one, they are skipped with the reason.

A machine can run one real node at a time. So the fixture has module scope, and other modules may start nodes of their
own.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest
from harness.build import own_programs, programs
from harness.cluster import Cluster
from harness.delivered import deliveries
from harness.node import Node
from harness.node_packages import install_packages, why_no_node
from harness.releases import CONTAINERD, DEVICE_PLUGIN
from node.claim_system import ClaimSystem, system_with_claims

_HERE = Path(__file__).parent
_KEEP_LOGS = bool(os.environ.get("KEEP_LOGS"))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    mine = [item for item in items if _HERE in item.path.parents]
    if mine and (reason := why_no_node()) is not None:
        for item in mine:
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, bool, bool]:
    """Build and install the programs before the timeout of the first test begins: the first build takes minutes. With
    several test workers, only the worker of these tests waits."""
    if item.get_closest_marker("skip") is None:
        _prepare(item.session)
    return (yield)


@functools.cache
def _prepare(session: pytest.Session) -> None:
    mine = [item for item in session.items if _HERE in item.path.parents]
    programs()
    install_packages()
    own_programs(CONTAINERD)
    if any("device_plugin" in getattr(item, "fixturenames", ()) for item in mine):
        own_programs(DEVICE_PLUGIN)
    if any(item.path.name in ("test_installed.py", "test_two_tenants.py") for item in mine):
        deliveries()


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """Return the control plane of the module's node. It runs the controller that marks nodes without heartbeats."""
    with Cluster(node_lifecycle=True, keep_logs=_KEEP_LOGS) as running:
        yield running


@pytest.fixture(scope="module")
def node(cluster: Cluster) -> Iterator[Node]:
    """Return the module's real node, with RuntimeClass `nvidia` and without GPUs (see `Node.set_gpus`)."""
    with Node(cluster, keep_logs=_KEEP_LOGS) as running:
        cluster.runtime_class()
        yield running


@pytest.fixture(scope="module")
def whole(
    request: pytest.FixtureRequest, cluster: Cluster, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ClaimSystem]:
    """Return SharePod on the module's cluster and one real node. The module's SYSTEM has the options of
    `system_with_claims`."""
    with system_with_claims(
        cluster, tmp_path_factory.mktemp("gpus"), **getattr(request.module, "SYSTEM", {})
    ) as system:
        yield system


@pytest.fixture
def system(whole: ClaimSystem) -> Iterator[ClaimSystem]:
    """Return the module's system. After each test all its Pods and claims are deleted."""
    yield whole
    whole.clear()
