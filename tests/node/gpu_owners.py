"""Record of the pods and tenants that have each GPU of a node: by each answer of the kubelet, each version of the
ledger and the simulated device's own count.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Collection
from dataclasses import dataclass
from types import TracebackType
from typing import Self

import grpc
from harness.api import Object, Watch
from harness.installation import NAMESPACE
from harness.machines import RealNode
from sharepod.agent.kubelet.plugin_pods import HELD_INTERVAL_S, TIMEOUT_S, by_gpu
from sharepod.agent.kubelet.wire import podresources_pb2 as podresources
from sharepod.api.objects import HOLDER_PREFIX

CLOSED_WITHIN_S = HELD_INTERVAL_S + TIMEOUT_S
"""Seconds after which no tenant may use a GPU that a holder has lost: the agent's interval between two questions to the
kubelet, plus the longest time for the answer."""
_GPUNODES = "/apis/sharepod.dev/v1alpha1/gpunodes"
_SOCKET = "/var/lib/kubelet/pod-resources/kubelet.sock"
_PERIOD_S = 0.05


@dataclass(frozen=True)
class Overlap:
    """GPU with two owners: the kubelet reported it for a native pod while a SharePod used it, or while the ledger had
    tenants on it."""

    gpu: str
    native: str
    by: str
    """Second owner's record: `device` or `ledger`."""
    since: float
    """Time of the kubelet's first report of the native pod, on the monotonic clock."""
    seconds: float


class GpuOwners:
    """Recorder of the owners of a node's GPUs; a context manager."""

    def __init__(self, machine: RealNode) -> None:
        self._machine = machine
        self._api = machine.real.cluster.api
        self._stopped = threading.Event()
        self._lock = threading.Lock()
        self._watch: Watch | None = None
        self._threads = [threading.Thread(target=work, daemon=True) for work in (self._ask, self._follow)]
        self._shared: frozenset[str] = frozenset()
        """GPUs that are held and have tenants by the ledger's newest version."""
        self._native: dict[str, tuple[str, float]] = {}
        """For each GPU: its native pod, and the time since which the kubelet reports it."""
        self._busy: dict[tuple[str, str], int] = {}
        self._found: dict[tuple[str, str, str], Overlap] = {}
        self.answers = 0
        """Number of the kubelet's answers so far."""
        self.versions = 0
        """Number of versions of the ledger so far."""

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stopped.set()
        if self._watch is not None:
            self._watch.close()
        for thread in self._threads:
            thread.join(timeout=15)

    @property
    def overlaps(self) -> list[Overlap]:
        """Return the moments at which a GPU had two owners."""
        with self._lock:
            return list(self._found.values())

    def overlaps_but_of(self, heirs: Collection[str]) -> list[Overlap]:
        """Return the overlaps, except overlaps of the native pods `heirs`: they got their GPU by a fault after which a
        short overlap is allowed."""
        return [each for each in self.overlaps if each.native not in heirs]

    def longest_use(self) -> float:
        """Return the longest time in seconds for which a SharePod used a GPU of a native pod."""
        return max((each.seconds for each in self.overlaps if each.by == "device"), default=0.0)

    def report(self) -> str:
        """Return a readable summary: how much was compared, and the overlaps."""
        found = [f"{each.gpu}: {each.native} and the {each.by} for {each.seconds:.2f} s" for each in self.overlaps]
        compared = f"{self.answers} answers of the kubelet and {self.versions} versions of the ledger compared"
        return "\n".join([compared, f"GPUs with two owners: {len(found)}", *found])

    def _ask(self) -> None:
        """Query the kubelet and the device until stopped. While the kubelet is away there is no answer."""
        with grpc.insecure_channel(f"unix:{self._machine.real.path(_SOCKET)}") as channel:
            lister = channel.unary_unary(
                "/v1.PodResourcesLister/List",
                request_serializer=podresources.ListPodResourcesRequest.SerializeToString,
                response_deserializer=podresources.ListPodResourcesResponse.FromString,
            )
            while not self._stopped.wait(_PERIOD_S):
                try:
                    answer = lister(podresources.ListPodResourcesRequest(), timeout=5)
                except grpc.RpcError:
                    continue
                self._take(answer)

    def _take(self, answer: podresources.ListPodResourcesResponse) -> None:
        given = {gpu: pod for gpu, pod in by_gpu(answer).items() if not _is_holder(pod.namespace, pod.name)}
        busy, now = self._machine.busy_ns(), time.monotonic()
        with self._lock:
            self.answers += 1
            natives = {gpu: f"{pod.namespace}/{pod.name}" for gpu, pod in given.items()}
            self._native = {
                gpu: self._native[gpu] if self._native.get(gpu, ("", 0.0))[0] == name else (name, now)
                for gpu, name in natives.items()
            }
            for (name, gpu), spent in busy.items():
                if gpu in self._native and spent > self._busy.get((name, gpu), spent):
                    self._overlap(gpu, "device", now)
            for gpu in self._shared & self._native.keys():
                self._overlap(gpu, "ledger", now)
            self._busy = busy

    def _overlap(self, gpu: str, by: str, now: float) -> None:
        native, since = self._native[gpu]
        self._found[gpu, native, by] = Overlap(gpu, native, by, since, now - since)

    def _follow(self) -> None:
        while not self._stopped.is_set():
            try:
                self._watch = self._api.watch(_GPUNODES, timeout=60)
                for event in self._watch:
                    if event["type"] in ("ADDED", "MODIFIED"):
                        self._take_ledger(event["object"])
            except OSError:
                continue

    def _take_ledger(self, gpunode: Object) -> None:
        spec = gpunode["spec"]
        held = {row.get("uuid") for row in spec.get("holders") or [] if row["state"] == "Held"}
        used = {gpu for row in spec.get("tenants") or [] for gpu in row["gpus"]}
        with self._lock:
            self.versions += 1
            self._shared = frozenset(held & used)


def _is_holder(namespace: str, name: str) -> bool:
    return namespace == NAMESPACE and name.startswith(HOLDER_PREFIX)
