"""Plugin pods: pods to which NVIDIA's device plugin has given a whole GPU, as the kubelet's pod resources socket
reports them.

Guarantees:
- PP1 last-word: while no kubelet listens, its last answer stays valid, because a kubelet that does not run allocates no
  GPU.
- While a kubelet listens and does not answer, its last answer stays valid for a minute, because it may allocate GPUs.
- Devices of the plugin that are not whole GPUs (replicas of time slicing, MIG) are attributed to no pod. `problem`
  names them.
- If the kubelet lists a GPU for two pods, the GPU is attributed to neither, and so to no holder.
- If the plugin offers no GPU, the health of its GPUs is unknown: a stopped plugin, and a plugin whose GPUs have all
  failed, look alike.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

import grpc
import structlog

from sharepod.agent.devices.held_gpus import PluginPod
from sharepod.agent.devices.inventory import is_gpu_uuid
from sharepod.agent.kubelet.wire import podresources_pb2 as podresources
from sharepod.api.pods.pod import GPU_RESOURCE_PATTERN

log = structlog.get_logger(__name__)

INTERVAL_S = 5.0
"""Seconds between two requests, and so until the metrics of a new pod begin."""
HELD_INTERVAL_S = 1.0
"""Seconds between two requests while tenants use GPUs of the device plugin. If a holder loses its GPU, the GPU is
closed to tenants within this time plus the time of an answer."""
TIMEOUT_S = 5.0
"""Seconds that the kubelet may take for one answer."""
STANDS_S = 60.0
"""Seconds for which the last answer of a listening kubelet is valid: longer than a busy kubelet delays an answer."""
_VENDOR = "nvidia.com/"
_OF_PLUGIN = re.compile(GPU_RESOURCE_PATTERN)
"""Resources of NVIDIA's device plugin. Other resources under `nvidia.com/` are no GPUs: its network operator's are
network cards, whose ids are PCI addresses."""
_GPU_IDS = ("GPU-", "MIG-")
"""Prefixes of the ids of GPUs and of their parts. Ids stay if an admin renames the resource."""
_SEVERAL = PluginPod("", "several pods")
"""Placeholder for the pod of a GPU that the kubelet lists for several pods. It is no holder, so such a GPU is closed to
tenants."""
_NAMED = 3
"""Most device ids that a message names."""


KnowPods = Callable[[Mapping[str, PluginPod] | None, str | None, frozenset[str]], None]
"""Callback after each reading. Its arguments: the pod of each GPU, the reason why GPUs of the device plugin cannot be
shared, and the GPUs that the plugin offers."""


class PluginPods:
    """Plugin pods of this node, kept up to date by `run`."""

    def __init__(self, kubelet_root: Path) -> None:
        self._socket = kubelet_root / "pod-resources" / "kubelet.sock"
        self._asked_at: float | None = None
        self._failing: str | None = None
        self._not_whole: tuple[str, ...] = ()
        self.given: Mapping[str, PluginPod] | None = None
        """Pod of each allocated GPU of the plugin, by UUID; None while unknown."""
        self.offered: frozenset[str] = frozenset()
        """UUIDs of the whole GPUs that the plugin offers as healthy, allocated or not."""

    async def run(self, known: KnowPods, interval_s: Callable[[], float]) -> None:
        """Read the plugin's pods from the kubelet at intervals, until cancelled. After each reading, call `known` with
        `given`, `problem` and `offered`.
        """
        while True:
            await self.ask()
            known(self.given, self.problem, self.offered)
            await asyncio.sleep(interval_s())

    @property
    def problem(self) -> str | None:
        """Reason, for a message, why GPUs of the device plugin cannot be shared. None if they can."""
        if self.given is None:
            return (
                f"the kubelet does not report the GPUs of pods ({self._failing or 'it was not asked yet'}); check "
                f"the kubelet and the agent's mount of {self._socket.parent}"
            )
        if self._not_whole:
            named = ", ".join(self._not_whole[:_NAMED])
            return (
                f"NVIDIA's device plugin offers devices that are no whole GPUs ({named}): SharePod does not share GPUs "
                f"that time slicing, MPS or MIG divides already; turn that off on this node, or take the node from "
                f"SharePod"
            )
        return None

    @property
    def offers(self) -> bool:
        """True if, by the last answer, NVIDIA's device plugin offers GPUs of the node to pods, whole or in parts."""
        return bool(self.offered or self._not_whole)

    async def ask(self) -> None:
        """Read the plugin's pods from the kubelet once, and store the answer or the failure."""
        now = asyncio.get_running_loop().time()
        try:
            given, offered = await self._list()
        except grpc.RpcError as error:
            self._say(f"{error.code().name}: {error.details()}")
            if error.code() is not grpc.StatusCode.UNAVAILABLE:
                self._expire(now)
            return
        if given is None or offered is None:
            self._say("its answer cannot be read")
            self._expire(now)
            return
        self._asked_at, self._failing = now, None
        self.given, self._not_whole = by_gpu(given), not_whole(offered.devices)
        self.offered = whole(offered.devices)

    def _expire(self, now: float) -> None:
        """Drop the last answer if it is older than `STANDS_S`."""
        if self._asked_at is None or now - self._asked_at > STANDS_S:
            self.given = None

    def _say(self, why: str) -> None:
        if self._failing is None:
            log.info("kubelet does not report the GPUs of pods", socket=str(self._socket), error=why)
        self._failing = why

    async def _list(
        self,
    ) -> tuple[podresources.ListPodResourcesResponse | None, podresources.AllocatableResourcesResponse | None]:
        """Return (devices of each pod, devices that the kubelet can allocate). None for an answer that cannot be
        read."""
        async with grpc.aio.insecure_channel(f"unix:{self._socket}") as channel:
            pods = channel.unary_unary(
                "/v1.PodResourcesLister/List",
                request_serializer=podresources.ListPodResourcesRequest.SerializeToString,
                response_deserializer=podresources.ListPodResourcesResponse.FromString,
            )
            offered = channel.unary_unary(
                "/v1.PodResourcesLister/GetAllocatableResources",
                request_serializer=podresources.AllocatableResourcesRequest.SerializeToString,
                response_deserializer=podresources.AllocatableResourcesResponse.FromString,
            )
            first, second = await asyncio.gather(
                pods(podresources.ListPodResourcesRequest(), timeout=TIMEOUT_S),
                offered(podresources.AllocatableResourcesRequest(), timeout=TIMEOUT_S),
            )
            return first, second


def by_gpu(answer: podresources.ListPodResourcesResponse) -> dict[str, PluginPod]:
    """Return the pod of each whole GPU, by UUID. `_SEVERAL` for a GPU with more than one pod. Replicas and parts of
    GPUs are left out."""
    found: dict[str, PluginPod] = {}
    for pod in answer.pod_resources:
        for container in pod.containers:
            for devices in container.devices:
                if _is_of_plugin(devices):
                    owner = PluginPod(pod.namespace, pod.name)
                    for gpu in filter(is_gpu_uuid, devices.device_ids):
                        found[gpu] = owner if found.get(gpu, owner) == owner else _SEVERAL
    return found


def not_whole(offered: Iterable[podresources.ContainerDevices]) -> tuple[str, ...]:
    """Return the ids of the plugin's devices that are no whole GPUs."""
    return tuple(sorted(each for each in _ids(offered) if not is_gpu_uuid(each)))


def whole(offered: Iterable[podresources.ContainerDevices]) -> frozenset[str]:
    """Return the UUIDs of the plugin's devices that are whole GPUs."""
    return frozenset(each for each in _ids(offered) if is_gpu_uuid(each))


def _is_of_plugin(devices: podresources.ContainerDevices) -> bool:
    """Return whether these are devices of NVIDIA's device plugin."""
    name = devices.resource_name
    ids = name.startswith(_VENDOR) and any(each.startswith(_GPU_IDS) for each in devices.device_ids)
    return ids or _OF_PLUGIN.match(name) is not None


def _ids(offered: Iterable[podresources.ContainerDevices]) -> Iterator[str]:
    for devices in offered:
        if _is_of_plugin(devices):
            yield from devices.device_ids
