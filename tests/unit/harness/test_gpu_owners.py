"""The recorder of GPU owners detects two owners of one GPU. Tests on a real node depend on this."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from harness.installation import NAMESPACE
from harness.machines import RealNode
from node.gpu_owners import GpuOwners
from sharepod.agent.kubelet.wire import podresources_pb2 as podresources

GPU = "GPU-5a9e0001-0000-4000-8000-000000000001"


class Node:
    """Node whose device reports how long each SharePod has kept each GPU busy."""

    def __init__(self) -> None:
        self.busy: dict[tuple[str, str], int] = {}
        self.real = SimpleNamespace(cluster=SimpleNamespace(api=None), path=Path)

    def busy_ns(self) -> dict[tuple[str, str], int]:
        return dict(self.busy)


def answer(namespace: str, name: str) -> podresources.ListPodResourcesResponse:
    """Return an answer of the kubelet in which this pod has the GPU."""
    made = podresources.ListPodResourcesResponse()
    container = made.pod_resources.add(name=name, namespace=namespace).containers.add(name="main")
    container.devices.add(resource_name="nvidia.com/gpu", device_ids=[GPU])
    return made


def ledger(state: str, *tenants: str) -> dict[str, Any]:
    """Return a ledger with the GPU in this state, and with these tenants on it."""
    return {"spec": {"holders": [{"uuid": GPU, "state": state}], "tenants": [{"gpus": [each]} for each in tenants]}}


@pytest.fixture
def node() -> Node:
    return Node()


@pytest.fixture
def owners(node: Node) -> GpuOwners:
    return GpuOwners(cast(RealNode, node))


def test_a_sharepod_that_uses_a_gpu_of_a_native_pod_is_an_overlap(node: Node, owners: GpuOwners) -> None:
    for spent, whose in ((100, ("ours", "holder")), (200, ("native", "one")), (200, ("native", "one"))):
        node.busy = {("alpha", GPU): spent}
        owners._take(answer(*whose))
    assert owners.longest_use() == 0.0
    node.busy = {("alpha", GPU): 300}
    owners._take(answer("native", "one"))
    assert [(each.native, each.by) for each in owners.overlaps] == [("native/one", "device")]
    assert owners.longest_use() > 0.0
    assert "native/one and the device" in owners.report()
    assert owners.overlaps_but_of({"native/two"}) == owners.overlaps
    assert owners.overlaps_but_of({"native/one"}) == []


def test_a_holder_is_no_native_pod(node: Node, owners: GpuOwners) -> None:
    owners._take_ledger(ledger("Held", GPU))
    for spent in (100, 200, 300):
        node.busy = {("alpha", GPU): spent}
        owners._take(answer(NAMESPACE, "sharepod-holder-1"))
    assert owners.overlaps == []


@pytest.mark.parametrize(
    ("state", "tenants", "found"),
    [("Held", [GPU], ["ledger"]), ("Held", [], []), ("Releasing", [GPU], [])],
    ids=["held with a tenant", "held without a tenant", "being released"],
)
def test_a_ledger_that_gives_a_native_pods_gpu_to_tenants_is_an_overlap(
    owners: GpuOwners, state: str, tenants: list[str], found: list[str]
) -> None:
    owners._take_ledger(ledger(state, *tenants))
    owners._take(answer("native", "one"))
    assert [each.by for each in owners.overlaps] == found
