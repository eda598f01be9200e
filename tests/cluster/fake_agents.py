"""Fake agents of all fake nodes, in one process. They write only what an agent writes to the API server.

A present agent renews its Lease, reports its inventory and applies its node's ledger (`observedGeneration`). It reports
a releasing tenant as drained, unless the test leaves a part of it (`leave_behind`). On a node of pool `device-plugin`
the kubelet assigns a GPU to each bound holder, and to each other pod that requests one.
"""

from __future__ import annotations

import datetime
import threading
import time
from collections.abc import Collection
from contextlib import suppress
from types import TracebackType
from typing import Any, Self

from harness.api import Api, ApiError, Object, Watch

NAMESPACE = "sharepod-system"
GPUNODES = "/apis/sharepod.dev/v1alpha1/gpunodes"
GIB = 1 << 30
LONGEST_S = 60.0
"""Longest wait of a test for a state, in seconds, on two cores with a load of six. The operators of tests check
everything again less often (`resync_interval`), so that no check hides a lost event."""


def gpu_uuid(node: str, index: int) -> str:
    """Return the UUID of a simulated GPU, which differs for each node and index, in NVIDIA's form."""
    number = sum(byte << (8 * place) for place, byte in enumerate(node.encode()[-6:]))
    return f"GPU-{index:08x}-0000-4000-8000-{number:012x}"


class FakeAgents:
    """Fake agents, for a `with` block. Each added node has `gpus` GPUs of `memory` bytes. `pace`: least seconds between
    two writes of one agent; a real agent has 1 s."""

    def __init__(
        self,
        api: Api,
        *,
        gpus: int = 2,
        memory: int = 16 * GIB,
        duration: int = 20,
        renew: float = 1.0,
        pace: float = 0.0,
    ) -> None:
        self._api = api
        self._gpus = gpus
        self._memory = memory
        self._duration = duration
        self._renew = renew
        self._pace = pace
        self._due: dict[str, float] = {}  # node: time from which its agent may write again
        self._behind: set[str] = set()
        self._there: set[str] = set()
        self._namespaces = [NAMESPACE]
        self._left: set[str] = set()
        self._usage: dict[str, Object] = {}
        self._strangers: set[str] = set()
        self._of_plugins: set[str] = set()  # nodes of pool device-plugin
        self._given: dict[str, str] = {}  # GPU: uid of the pod to which the kubelet has assigned it
        self._lock = threading.RLock()
        self._stopped = threading.Event()
        self._watch: Watch | None = None
        self._threads = [
            threading.Thread(target=work, daemon=True) for work in (self._observe, self._beat, self._catch_up)
        ]
        self.failures: list[str] = []

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
            thread.join(timeout=10)

    def start(self, *nodes: str) -> None:
        """Start the agents of these nodes."""
        with self._lock:
            self._there.update(nodes)
        for node in nodes:
            self._beat_once(node)
            self._look(node)

    def also_in(self, namespace: str) -> None:
        """Renew the agents' Leases in this namespace, too."""
        with self._lock:
            self._namespaces.append(namespace)
            nodes = sorted(self._there)
        for node in nodes:
            self._beat_once(node)

    def stop(self, node: str) -> None:
        """Stop the agent of this node: its Lease ends, and it neither reads nor reports anything."""
        with self._lock:
            self._there.discard(node)

    def leave_behind(self, tenant: str) -> None:
        """Report from now on that a process of this tenant has outlived its pod."""
        with self._lock:
            self._left.add(tenant)

    def end(self, tenant: str) -> None:
        """End the remaining processes of this tenant."""
        with self._lock:
            self._left.discard(tenant)
            nodes = sorted(self._there)
        for node in nodes:
            self._look(node)

    def strangers(self, gpus: Collection[str]) -> None:
        """Report a foreign process on each of these GPUs, so that they cannot be shared."""
        with self._lock:
            self._strangers.update(gpus)
            nodes = sorted(self._there)
        for node in nodes:
            self._look(node)

    def report(self, tenant: str, **seen: Any) -> None:
        """Set fields in the agent's report of a tenant from now on (`heldMilli`, `memory`, `connected`, `enforced`,
        ...)."""
        with self._lock:
            self._usage[tenant] = {**self._usage.get(tenant, {}), **seen}
            nodes = sorted(self._there)
        for node in nodes:
            self._look(node)

    # The two threads

    def _observe(self) -> None:
        while not self._stopped.is_set():
            try:
                listed = self._api.get(GPUNODES)
                for item in listed["items"]:
                    self._take(item)
                watch = self._watch = self._api.watch(GPUNODES, resourceVersion=listed["metadata"]["resourceVersion"])
                try:
                    for event in watch:
                        if self._stopped.is_set() or event["type"] == "ERROR":
                            break
                        if event["type"] != "DELETED":
                            self._take(event["object"])
                finally:
                    watch.close()
            except (OSError, ApiError, ValueError) as error:  # the API server does not answer now
                if isinstance(error, ApiError) and error.code not in (404, 409, 410, 429, 500, 503, 504):
                    self.failures.append(str(error))
                self._stopped.wait(0.1)
            except Exception as error:
                if not self._stopped.is_set():
                    self.failures.append(repr(error))
                self._stopped.wait(0.1)

    def _catch_up(self) -> None:
        while self._pace and not self._stopped.wait(0.05):
            with self._lock:
                nodes = [node for node in self._behind if self._due[node] <= time.monotonic()]
            for node in nodes:
                with suppress(OSError):
                    self._look(node)

    def _beat(self) -> None:
        while not self._stopped.wait(self._renew):
            with self._lock:
                nodes = sorted(self._there)
            for node in nodes:
                with suppress(OSError, ApiError):
                    self._beat_once(node)
                    # no watch shows the kubelet's assignments, so they are read again at each renewal of the Lease
                    if node in self._of_plugins:
                        self._look(node)

    def _beat_once(self, node: str) -> None:
        now = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        name = f"sharepod-agent-{node}"
        for namespace in self._namespaces:
            body = {
                "apiVersion": "coordination.k8s.io/v1",
                "kind": "Lease",
                "metadata": {"name": name, "namespace": namespace},
                "spec": {"holderIdentity": node, "renewTime": now, "leaseDurationSeconds": self._duration},
            }
            path = f"/apis/coordination.k8s.io/v1/namespaces/{namespace}/leases/{name}"
            self._api.apply(path, body, manager="agent")

    # Writes of an agent

    def _look(self, node: str) -> None:
        # The lock covers read and report, so that no other thread overwrites this report with older values.
        with self._lock, suppress(ApiError):
            self._report(self._api.get(f"{GPUNODES}/{node}"))

    def _take(self, gpunode: Object) -> None:
        """Report on a version of a GPUNode from the watch. For pool `device-plugin`, read the present version instead:
        the watch's version may be older than the holder's row, and the GPU would be reported as assigned without that
        holder."""
        if gpunode["spec"].get("pool") == "device-plugin":
            self._look(gpunode["metadata"]["name"])
        else:
            self._report(gpunode)

    def _report(self, gpunode: Object) -> None:
        name = gpunode["metadata"]["name"]
        with self._lock:
            if name not in self._there:
                return
            rows = gpunode["spec"].get("tenants") or []
            plugin = gpunode["spec"].get("pool") == "device-plugin"
            (self._of_plugins.add if plugin else self._of_plugins.discard)(name)
            status = {
                "gpus": self._of_plugin(gpunode) if plugin else self._inventory(name),
                "tenants": [self._tenant(row) for row in rows],
                "observedGeneration": gpunode["metadata"]["generation"],
                "simulated": True,
            }
            known = gpunode.get("status") or {}
            if not any(item["type"] == "CDIDevices" for item in known.get("conditions") or ()):
                self._attach_claims(name)
            if all(known.get(key) == value for key, value in status.items()):
                self._behind.discard(name)
                return
            if self._due.get(name, 0.0) > time.monotonic():
                self._behind.add(name)
                return
            self._due[name] = time.monotonic() + self._pace
            self._behind.discard(name)
            try:
                self._api.patch(f"{GPUNODES}/{name}/status", {"status": status})
            except ApiError as error:
                if error.code != 404:
                    self.failures.append(str(error))

    def _attach_claims(self, node: str) -> None:
        """Report that GPUs of the node can be attached by claims, in addition to the operator's conditions."""
        conditions = [
            {"type": "CDIDevices", "status": "True", "reason": "Attachable"},
            {"type": "ClaimsAttach", "status": "True", "reason": "Attached"},
        ]
        body = {
            "apiVersion": "sharepod.dev/v1alpha1",
            "kind": "GPUNode",
            "metadata": {"name": node},
            "status": {"conditions": conditions},
        }
        with suppress(ApiError):
            self._api.apply(f"{GPUNODES}/{node}/status", body, manager="agent")

    def _inventory(self, node: str) -> list[Object]:
        return [self._gpu(gpu_uuid(node, index), index) for index in range(self._gpus)]

    def _of_plugin(self, gpunode: Object) -> list[Object]:
        """Return the GPUs of a node as the kubelet has assigned them to pods, in the order in which the pods were
        bound."""
        name, gpus = gpunode["metadata"]["name"], self._inventory(gpunode["metadata"]["name"])
        pods = self._api.get("/api/v1/pods", fieldSelector=f"spec.nodeName={name}")["items"]
        asking = [pod["metadata"]["uid"] for pod in pods if "nvidia.com/gpu" in str(pod["spec"])]
        mine = {gpu["uuid"] for gpu in gpus}
        self._given = {gpu: uid for gpu, uid in self._given.items() if uid in asking or gpu not in mine}
        for uid in asking:
            free = [gpu["uuid"] for gpu in gpus if gpu["uuid"] not in self._given]
            if uid not in self._given.values() and free:
                self._given[free[0]] = uid
        ours = {row["id"] for row in gpunode["spec"].get("holders") or [] if row["state"] != "Releasing"}
        for gpu in gpus:
            uid = self._given.get(gpu["uuid"])
            gpu |= {"held": uid in ours, "taken": uid is not None and uid not in ours}
            gpu |= {"holder": uid} if uid in ours else {}
        return gpus

    def _gpu(self, uuid: str, index: int) -> Object:
        stranger = uuid in self._strangers
        return {
            "uuid": uuid,
            "index": index,
            "model": "Test GPU",
            "memory": self._memory,
            "health": "Healthy",
            "shareable": not stranger,
            "reason": "process 7 belongs to no tenant" if stranger else "",
            "links": [],
        }

    def _tenant(self, row: Object) -> Object:
        seen = {"id": row["id"], "processes": 0, "memory": 0, "heldMilli": 0, "connected": False, "drained": False}
        seen |= self._usage.get(row["id"], {})
        if row["state"] == "Releasing":
            left = row["id"] in self._left
            seen |= {"drained": not left, "processes": 1 if left else 0}
        return seen


def wait(condition: Any, *, what: str, timeout: float = LONGEST_S, interval: float = 0.05) -> Any:
    """Poll `condition` until its result is true; return the result."""
    deadline = time.monotonic() + timeout
    while not (found := condition()):
        if time.monotonic() > deadline:
            raise AssertionError(f"{what}: not within {timeout:g} s")
        time.sleep(interval)
    return found
