"""Assignment of the GPUs of NVIDIA's device plugin to Pods, as the kubelet reports it."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest
import pytest_asyncio
from sharepod.agent.devices.held_gpus import PluginPod
from sharepod.agent.kubelet.plugin_pods import PluginPods, by_gpu, not_whole
from sharepod.agent.kubelet.wire import podresources_pb2 as podresources
from sharepod.agent.kubelet.wire.rpc import UnixServer, service
from unit.agent.client import GPU0, GPU1

ONE = PluginPod("team", "one")


class Kubelet:
    """Kubelet that gives these answers on its pod resources socket."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.gives = listed(one=GPU0)
        self.offers = [GPU0, GPU1]
        self.fails = False
        self.answering = asyncio.Event()
        """While this is not set, the kubelet does not answer."""
        self.answering.set()
        lister = service(
            podresources.DESCRIPTOR,
            "PodResourcesLister",
            {"List": self._list, "GetAllocatableResources": self._allocatable},
        )
        self.server = UnixServer(root / "pod-resources" / "kubelet.sock", lister)

    async def _list(self, _: object) -> podresources.ListPodResourcesResponse:
        await self.answering.wait()
        if self.fails:
            raise RuntimeError("no answer")
        return self.gives

    async def _allocatable(self, _: object) -> podresources.AllocatableResourcesResponse:
        answer = podresources.AllocatableResourcesResponse()
        answer.devices.add(resource_name="nvidia.com/gpu", device_ids=self.offers)
        answer.devices.add(resource_name="example.com/nic", device_ids=["nic0"])
        return answer


@pytest_asyncio.fixture
async def kubelet() -> AsyncIterator[Kubelet]:
    with tempfile.TemporaryDirectory(prefix="shp-") as root:
        there = Kubelet(Path(root))
        yield there
        # also after a failure: otherwise gRPC waits for minutes until the server is garbage-collected
        await there.server.stop(0)


def listed(**gpus: str) -> podresources.ListPodResourcesResponse:
    answer = podresources.ListPodResourcesResponse()
    for pod, device in gpus.items():
        container = answer.pod_resources.add(name=pod, namespace="team").containers.add(name="main")
        container.devices.add(resource_name="nvidia.com/gpu", device_ids=[device])
        container.devices.add(resource_name="example.com/nic", device_ids=[GPU1])
    return answer


def test_only_whole_gpus_of_nvidias_plugin_belong_to_a_pod() -> None:
    assert by_gpu(listed(one=GPU0, two=f"{GPU1}::3")) == {GPU0: ONE}


def test_a_gpu_of_two_pods_is_neither_ones() -> None:
    both = listed(one=GPU0, two=GPU0)
    assert by_gpu(both)[GPU0] not in (ONE, PluginPod("team", "two"))
    assert by_gpu(listed(one=GPU0, two=GPU1)) == {GPU0: ONE, GPU1: PluginPod("team", "two")}


async def test_a_kubelet_that_was_never_connected_has_reported_nothing(kubelet: Kubelet) -> None:
    pods = PluginPods(kubelet.root)
    await pods.ask()
    assert pods.given is None
    assert "does not report the GPUs of pods (UNAVAILABLE" in (pods.problem or "")


@pytest.mark.promise("node-held-believed")
async def test_the_kubelets_last_answer_is_valid_while_it_is_away(kubelet: Kubelet) -> None:
    pods = PluginPods(kubelet.root)
    await kubelet.server.start()
    await pods.ask()
    assert (pods.given, pods.problem) == ({GPU0: ONE}, None)
    kubelet.fails = True
    await pods.ask()
    assert pods.given == {GPU0: ONE}, "a failure is not an answer"
    await kubelet.server.stop(0)
    await pods.ask()
    assert pods.given == {GPU0: ONE}, "a stopped kubelet assigns no GPU"


@pytest.mark.promise("node-held-believed")
async def test_a_kubelet_that_listens_and_fails_is_believed_for_a_minute(
    kubelet: Kubelet, monkeypatch: pytest.MonkeyPatch
) -> None:
    pods = PluginPods(kubelet.root)
    await kubelet.server.start()
    await pods.ask()
    kubelet.fails = True
    monkeypatch.setattr("sharepod.agent.kubelet.plugin_pods.STANDS_S", -1.0)
    await pods.ask()
    assert pods.given is None


@pytest.mark.promise("node-held-believed")
async def test_a_kubelet_that_hangs_is_believed_for_a_minute_and_heard_again_once_it_answers(
    kubelet: Kubelet, monkeypatch: pytest.MonkeyPatch
) -> None:
    pods = PluginPods(kubelet.root)
    await kubelet.server.start()
    await pods.ask()
    kubelet.answering.clear()
    with monkeypatch.context() as hanging:
        hanging.setattr("sharepod.agent.kubelet.plugin_pods.TIMEOUT_S", 0.05)
        await pods.ask()
        assert pods.given == {GPU0: ONE}
        monkeypatch.setattr("sharepod.agent.kubelet.plugin_pods.STANDS_S", -1.0)
        await pods.ask()
    assert pods.given is None
    assert "DEADLINE_EXCEEDED" in (pods.problem or "")
    kubelet.answering.set()
    await pods.ask()
    assert (pods.given, pods.problem) == ({GPU0: ONE}, None)


@pytest.mark.promise("node-held-believed")
async def test_an_answer_that_cannot_be_read_is_no_answer(kubelet: Kubelet, monkeypatch: pytest.MonkeyPatch) -> None:
    async def garble(*_: object) -> bytes:
        return b"\xff\xff\xff"

    garbled = grpc.method_handlers_generic_handler(
        "v1.PodResourcesLister",
        {name: grpc.unary_unary_rpc_method_handler(garble) for name in ("List", "GetAllocatableResources")},
    )
    server = UnixServer(kubelet.root / "pod-resources" / "kubelet.sock", garbled)
    pods = PluginPods(kubelet.root)
    await server.start()
    await pods.ask()
    assert pods.given is None
    assert "does not report the GPUs of pods" in (pods.problem or "")
    await server.stop(0)


@pytest.mark.promise("node-whole-gpus")
@pytest.mark.parametrize("device", [f"{GPU1}::0", "MIG-10000000-0000-0000-0000-000000000001"])
async def test_devices_that_are_no_whole_gpus_are_refused_and_named(kubelet: Kubelet, device: str) -> None:
    pods = PluginPods(kubelet.root)
    kubelet.offers = [GPU0, device]
    await kubelet.server.start()
    await pods.ask()
    assert f"devices that are no whole GPUs ({device})" in (pods.problem or "")
    kubelet.offers = [GPU0, GPU1]
    await pods.ask()
    assert pods.problem is None


@pytest.mark.promise("operator-scheduler-pool-device-plugin")
@pytest.mark.parametrize("devices", [[GPU0], [f"{GPU1}::0"]])
async def test_a_plugin_that_offers_whole_gpus_or_parts_of_them_is_known(kubelet: Kubelet, devices: list[str]) -> None:
    pods = PluginPods(kubelet.root)
    kubelet.offers = devices
    await kubelet.server.start()
    assert not pods.offers
    await pods.ask()
    assert pods.offers
    kubelet.offers = []
    await pods.ask()
    assert not pods.offers


@pytest.mark.promise("node-plugin-health")
async def test_a_gpu_that_the_plugin_calls_unhealthy_is_not_among_those_that_it_offers(kubelet: Kubelet) -> None:
    pods = PluginPods(kubelet.root)
    offers: asyncio.Queue[frozenset[str]] = asyncio.Queue()
    await kubelet.server.start()
    running = asyncio.create_task(pods.run(lambda given, problem, offered: offers.put_nowait(offered), lambda: 0.01))
    assert await offers.get() == frozenset((GPU0, GPU1))
    kubelet.offers = [GPU1]
    while (offered := await offers.get()) == frozenset((GPU0, GPU1)):
        pass
    running.cancel()
    assert offered == frozenset((GPU1,))
    assert (pods.given, pods.problem) == ({GPU0: ONE}, None), "its pod keeps it, and the others can be shared"


@pytest.mark.promise("node-whole-gpus")
@pytest.mark.parametrize(
    ("resource", "device"),
    [("example.com/nic", "nic0"), ("nvidia.com/hostdev", "0000:3b:00.2"), ("nvidia.com/rdma_shared_device_a", "0")],
)
def test_devices_other_than_gpus_are_ignored(resource: str, device: str) -> None:
    answer = podresources.AllocatableResourcesResponse()
    answer.devices.add(resource_name=resource, device_ids=[device])
    assert not_whole(answer.devices) == ()


@pytest.mark.promise("node-whole-gpus")
@pytest.mark.parametrize(
    ("resource", "device"),
    [
        ("nvidia.com/mig-1g.5gb", "MIG-10000000-0000-0000-0000-000000000001"),
        ("nvidia.com/gpu.shared", f"{GPU1}::0"),
        ("nvidia.com/gpu", "tegra"),
        ("nvidia.com/a100-shared", f"{GPU1}::0"),
    ],
)
def test_parts_of_gpus_are_named_whatever_their_resource_is_called(resource: str, device: str) -> None:
    answer = podresources.AllocatableResourcesResponse()
    answer.devices.add(resource_name=resource, device_ids=[device])
    assert not_whole(answer.devices) == (device,)


def test_the_kubelets_numbers_are_spoken() -> None:
    # field numbers of pod resources v1: PodResources name 1, namespace 2, containers 3; ContainerDevices resource_name
    # 1, device_ids 2
    raw = (
        b"\x0a\x17" + b"\x0a\x01p\x12\x01n" + b"\x1a\x0f" + b"\x0a\x01c" + b"\x12\x0a\x0a\x01r\x12\x01x\x1a\x02\x0a\x00"
    )
    [pod] = podresources.ListPodResourcesResponse.FromString(raw).pod_resources
    assert (pod.name, pod.namespace, list(pod.containers[0].devices[0].device_ids)) == ("p", "n", ["x"])
