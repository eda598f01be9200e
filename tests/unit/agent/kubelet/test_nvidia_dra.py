"""A node on which NVIDIA's own DRA driver allocates GPUs takes no tenants."""

from __future__ import annotations

import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from sharepod.agent.cluster.run import readiness
from sharepod.agent.cluster.status_report import ReadyReason
from sharepod.agent.kubelet.nvidia_dra import nvidia_dra_socket
from sharepod.api.gpunode import Pool

pytestmark = pytest.mark.promise("security-dra-driver")


@pytest.fixture
def root() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="shp-") as made:
        (Path(made) / "plugins_registry").mkdir()
        yield Path(made)


def listening(root: Path, name: str) -> socket.socket:
    """Return a socket with this name that listens for the kubelet, as a driver's does."""
    made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    made.bind(str(root / "plugins_registry" / name))
    made.listen(0)
    return made


def ready(root: Path) -> ReadyReason:
    """Return the reason of the condition `AgentReady`, for an agent without any other problem."""
    agent = SimpleNamespace(
        unhealthy=lambda: None,
        held_gpus=SimpleNamespace(pool=Pool.DEDICATED, problem=None),
        settings=SimpleNamespace(kubelet_root=root),
    )
    kubelet = SimpleNamespace(settling=False, problem=None)
    return cast(ReadyReason, readiness(*map(cast_any, (agent, SimpleNamespace(problem=None), kubelet))).reason)


def cast_any(value: object) -> Any:
    return value


@pytest.mark.parametrize("name", ["gpu.nvidia.com-reg.sock", "gpu.nvidia.com-5b6f-reg.sock"])
def test_an_agent_next_to_nvidias_dra_driver_takes_no_tenants_until_the_driver_is_removed(
    root: Path, name: str
) -> None:
    assert ready(root) is ReadyReason.SERVING
    driver = listening(root, name)
    for _ in range(3):  # more connections than the driver accepts, so its queue is full
        assert ready(root) is ReadyReason.DRA_DRIVER_PRESENT
    driver.close()
    assert (root / "plugins_registry" / name).exists()
    assert ready(root) is ReadyReason.SERVING, "the file alone is no driver"


@pytest.mark.parametrize("name", ["gpu.sharepod.dev-reg.sock", "compute-domain.nvidia.com-reg.sock"])
def test_other_drivers_give_no_gpus(root: Path, name: str) -> None:
    with listening(root, name):
        assert nvidia_dra_socket(root) is None


def test_a_node_without_the_folder_has_no_driver(root: Path) -> None:
    assert nvidia_dra_socket(root / "elsewhere") is None
