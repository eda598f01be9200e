"""GPUs of the device plugin are open to tenants only while a holder of SharePod has them (HG1, HG2)."""

from __future__ import annotations

import pytest
from sharepod.agent.devices.held_gpus import HeldGpus, PluginPod
from sharepod.api.gpunode import Gpu, Health, HolderState, PluginHolder, Pool
from unit.agent.client import GPU0, GPU1

OURS = "sharepod-system"
HOLDER = PluginHolder(id="uid-1", pod_name="sharepod-holder-1", state=HolderState.HELD, uuid=GPU0)
ITS_POD = PluginPod(OURS, "sharepod-holder-1")
GPUS = [Gpu(uuid=uuid, index=index, model="m", memory=1) for index, uuid in enumerate((GPU0, GPU1))]


class Node:
    def __init__(self) -> None:
        self.reported: list[frozenset[str] | None] = []
        self.gpus = HeldGpus(OURS, self.reported.append)


@pytest.fixture
def node() -> Node:
    return Node()


def test_in_a_dedicated_pool_every_gpu_is_open_whatever_the_kubelet_says(node: Node) -> None:
    node.gpus.know_pods({GPU0: PluginPod("team", "one")}, None)
    node.gpus.know_ledger(Pool.DEDICATED, ())
    assert node.reported == []
    assert [node.gpus.mark(gpu) for gpu in GPUS] == GPUS


@pytest.mark.promise("node-held-first")
def test_a_gpu_is_open_once_ledger_and_kubelet_report_its_holder(node: Node) -> None:
    node.gpus.know_ledger(Pool.DEVICE_PLUGIN, (HOLDER,))
    assert node.reported == [frozenset()]
    node.gpus.know_pods({GPU0: ITS_POD, GPU1: PluginPod("team", "one")}, None)
    assert node.reported[-1] == frozenset({GPU0})
    held, taken = (node.gpus.mark(gpu) for gpu in GPUS)
    assert (held.held, held.holder, held.taken) == (True, "uid-1", False)
    assert (taken.held, taken.holder, taken.taken) == (False, None, True)
    assert node.gpus.native() == {GPU1: PluginPod("team", "one")}


@pytest.mark.promise("node-plugin-health")
def test_a_gpu_omitted_by_the_plugin_is_unhealthy_and_stays_open_to_its_tenants(
    node: Node,
) -> None:
    node.gpus.know_ledger(Pool.DEVICE_PLUGIN, (HOLDER,))
    node.gpus.know_pods({GPU0: ITS_POD}, None, {GPU1})
    ill, well = (node.gpus.mark(gpu) for gpu in GPUS)
    assert (ill.health, ill.offered, ill.held) == (Health.UNHEALTHY, False, True)
    assert "NVIDIA's device plugin no longer offers it" in ill.reason
    assert (well.health, well.offered, well.reason) == (Health.HEALTHY, True, "")
    assert node.reported[-1] == frozenset({GPU0})
    own_word = GPUS[0].model_copy(update={"health": Health.UNHEALTHY, "reason": "Xid 79"})
    assert node.gpus.mark(own_word).reason == "Xid 79"


@pytest.mark.promise("node-plugin-health")
def test_a_plugin_that_offers_nothing_is_absent_and_shows_no_health(node: Node) -> None:
    node.gpus.know_ledger(Pool.DEVICE_PLUGIN, (HOLDER,))
    node.gpus.know_pods({GPU0: ITS_POD}, None, frozenset())
    assert {node.gpus.mark(gpu).health for gpu in GPUS} == {Health.HEALTHY}


@pytest.mark.promise("node-held-first")
@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ({}, None),
        (None, "the kubelet does not answer"),
        ({GPU0: PluginPod("team", "sharepod-holder-1")}, None),
        ({GPU0: PluginPod(OURS, "sharepod-holder-2")}, None),
        ({GPU0: ITS_POD}, "the device plugin offers replicas"),
    ],
    ids=["given back", "unknown", "a holder's name elsewhere", "a holder of no ledger", "replicas"],
)
def test_a_gpu_is_closed_at_once_that_no_holder_is_seen_to_have(
    node: Node, given: dict[str, PluginPod] | None, problem: str | None
) -> None:
    node.gpus.know_ledger(Pool.DEVICE_PLUGIN, (HOLDER,))
    node.gpus.know_pods({GPU0: ITS_POD}, None)
    node.gpus.know_pods(given, problem)
    assert node.reported[-1] == frozenset()


@pytest.mark.promise("node-held-first")
def test_a_gpu_is_closed_when_its_holder_is_being_released(node: Node) -> None:
    node.gpus.know_ledger(Pool.DEVICE_PLUGIN, (HOLDER,))
    node.gpus.know_pods({GPU0: ITS_POD}, None)
    node.gpus.know_ledger(Pool.DEVICE_PLUGIN, (HOLDER.model_copy(update={"state": HolderState.RELEASING}),))
    assert node.reported[-1] == frozenset()
    assert node.gpus.native() == {}, "a holder is no native pod"
