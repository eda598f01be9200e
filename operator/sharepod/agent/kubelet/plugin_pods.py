"""Plugin pods: pods that have a whole GPU from NVIDIA's device plugin. Their utilization is measured beside tenants'.

Guarantees:
- The kubelet's pod resources socket is asked at intervals; no answer of it is needed by anything else.
- While the kubelet does not answer, its last answer is valid for a minute.
- Without the socket there are no plugin pods.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import grpc
import structlog

from sharepod.agent.devices.inventory import is_gpu_uuid
from sharepod.agent.kubelet.wire import podresources_pb2 as podresources

log = structlog.get_logger(__name__)

INTERVAL_S = 5.0
"""Seconds between two questions: a pod's metrics begin at most this late."""
TIMEOUT_S = 5.0
"""Seconds that one answer may take."""
STANDS_S = 60.0
"""Seconds for which the last answer is valid: longer than a restart of the kubelet takes."""
_RESOURCE = "nvidia.com/"
"""Prefix of the resources that NVIDIA's device plugin offers."""


@dataclass(frozen=True)
class PluginPod:
    """Pod with a GPU from the device plugin."""

    namespace: str
    name: str


class PluginPods:
    """Plugin pods of this node, kept up to date by `run`."""

    def __init__(self, kubelet_root: Path) -> None:
        self._socket = kubelet_root / "pod-resources" / "kubelet.sock"
        self._asked_at: float | None = None
        self._failing = False
        self.by_gpu: Mapping[str, PluginPod] = {}
        """By GPU UUID."""

    async def run(self, known: Callable[[Mapping[str, PluginPod]], None]) -> None:
        """Ask at intervals until cancelled; call `known` with the pods each time."""
        while True:
            await self.ask()
            known(self.by_gpu)
            await asyncio.sleep(INTERVAL_S)

    async def ask(self) -> None:
        """Ask once and update `by_gpu`."""
        now = asyncio.get_running_loop().time()
        if not await asyncio.to_thread(self._socket.is_socket):
            self.by_gpu = {}
            return
        try:
            self.by_gpu = by_gpu(await self._list())
        except grpc.RpcError as error:
            if not self._failing:
                log.warning("kubelet does not tell which pod has which GPU", socket=str(self._socket), error=str(error))
            self._failing = True
            if self._asked_at is None or now - self._asked_at > STANDS_S:
                self.by_gpu = {}
            return
        self._asked_at, self._failing = now, False

    async def _list(self) -> podresources.ListPodResourcesResponse:
        async with grpc.aio.insecure_channel(f"unix:{self._socket}") as channel:
            call = channel.unary_unary(
                "/v1.PodResourcesLister/List",
                request_serializer=podresources.ListPodResourcesRequest.SerializeToString,
                response_deserializer=podresources.ListPodResourcesResponse.FromString,
            )
            answer: podresources.ListPodResourcesResponse = await call(
                podresources.ListPodResourcesRequest(), timeout=TIMEOUT_S
            )
            return answer


def by_gpu(answer: podresources.ListPodResourcesResponse) -> dict[str, PluginPod]:
    """Return the pod of each GPU, by UUID. A GPU that the plugin shares in replicas is left out."""
    found: dict[str, PluginPod] = {}
    for pod in answer.pod_resources:
        for container in pod.containers:
            for devices in container.devices:
                if devices.resource_name.startswith(_RESOURCE):
                    owner = PluginPod(pod.namespace, pod.name)
                    found.update((each, owner) for each in devices.device_ids if is_gpu_uuid(each))
    return found
