"""Watches the ledgers and the Pods of a cluster and records every broken promise.

Guarantees: every version of every GPUNode is checked, not only the last one. A cut watch resumes after the last seen
version; `gaps` counts how often the API server no longer had the next version.

- A GPU is over-committed when the rows of a ledger assign more than 1000 thousandths of its time, or more than its
  memory.
- A GPU is also over-committed when any of it is assigned while it is `forbidden`.
- A tenant is doubled when two of its Pods were bound to nodes, at the same time or one after the other. In `returning`
  namespaces one after the other is allowed: the next run is another Pod.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, defaultdict
from types import TracebackType
from typing import Self

from cluster.doors import DOOR_LABEL
from cluster.fake_agents import GPUNODES
from harness.api import Api, ApiError, Object, Watch
from sharepod.api.objects import LINE_TENANT, TENANT_LABEL

PODS = "/api/v1/pods"


class Audit:
    """Auditor of a cluster, for a `with` block that begins before the first SharePod is created. `memory`: bytes of
    each GPU."""

    def __init__(self, api: Api, *, memory: int) -> None:
        self._api = api
        self._memory = memory
        self._lock = threading.Lock()
        self._stopped = threading.Event()
        self._watches: dict[str, Watch] = {}
        self._anew: set[str] = set()  # paths of resources that must be listed again
        self._threads = [threading.Thread(target=self._follow, args=(path,), daemon=True) for path in (GPUNODES, PODS)]
        self._listed = threading.Barrier(3)
        self._rows: dict[str, dict[str, Object]] = {}  # node: tenant: row
        self._pods: dict[str, Object] = {}  # uid: Pod
        self.over_committed: dict[str, str] = {}
        """For each GPU: the time and memory that rows assigned when they exceeded the GPU."""
        self.forbidden: set[str] = set()
        """GPUs that must take no tenant: they have a process of no tenant."""
        self.bound: defaultdict[str, set[str]] = defaultdict(set)
        """For each tenant: its Pods that were ever bound to a node."""
        self.returning: set[str] = set()
        """Namespaces whose tenants may have several runs."""
        self._returned: set[str] = set()
        self.reserved: set[str] = set()
        """Tenants that ever had a row in a ledger."""
        self.most: Counter[str] = Counter()
        """For each GPU: the largest number of tenants that it had at the same time."""
        self.longest_silence = 0.0
        """Longest time in seconds in which no tenant got its first row, while the test is `expecting` rows."""
        self.expecting = False
        self._last = time.monotonic()
        self.gaps = 0

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        self._listed.wait(30)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stopped.set()
        self.cut()
        for thread in self._threads:
            thread.join(timeout=10)

    # Queries

    def rows(self) -> list[tuple[str, Object]]:
        """Return (node, row) for each row of all ledgers, read now."""
        with self._lock:
            return [(node, row) for node, rows in self._rows.items() for row in rows.values()]

    def pods(self) -> list[Object]:
        """Return the existing Pods of SharePods, and the plain Pods with a share."""
        with self._lock:
            return list(self._pods.values())

    @property
    def doubled(self) -> list[str]:
        """Return tenants that had more than one bound Pod."""
        with self._lock:
            once = self.bound.keys() - self._returned
            return sorted(tenant for tenant in once if len(self.bound[tenant]) > 1)

    def forget(self) -> None:
        """Forget all observations and list again, because etcd was restored to an older state."""
        with self._lock:
            self.bound.clear()
            self.reserved.clear()
            self._rows.clear()
            self._pods.clear()
            self._last = time.monotonic()
            self.longest_silence = 0.0
        self._anew.update((GPUNODES, PODS))
        self.cut()

    def cut(self) -> None:
        """Cut the watches, as the API server does with a slow reader."""
        for watch in list(self._watches.values()):
            watch.close()

    # Observation

    def _follow(self, path: str) -> None:
        version: str | None = None  # resourceVersion after which a cut watch resumes; None: list first
        first = True
        while not self._stopped.is_set():
            try:
                if version is None or path in self._anew:
                    self._anew.discard(path)
                    listed = self._api.get(path)
                    self.gaps += not first
                    self._begin(path, listed["items"])
                    version = listed["metadata"]["resourceVersion"]
                watch = self._api.watch(path, resourceVersion=version, timeout=3600)
                self._watches[path] = watch
                if first:
                    first = False
                    self._listed.wait(30)
                for event in watch:
                    if event["type"] == "ERROR" or path in self._anew:
                        version = None
                        break
                    version = event["object"]["metadata"]["resourceVersion"]
                    self._see(path, event["object"], deleted=event["type"] == "DELETED")
                watch.close()
            except ApiError:
                version = None
            except OSError:
                pass
            self._stopped.wait(0.1)

    def _begin(self, path: str, items: list[Object]) -> None:
        with self._lock:
            (self._rows if path == GPUNODES else self._pods).clear()
        for item in items:
            self._see(path, item, deleted=False)

    def _see(self, path: str, item: Object, *, deleted: bool) -> None:
        with self._lock:
            if path == GPUNODES:
                self._judge(item, deleted)
                return
            labels, uid = item["metadata"].get("labels", {}), item["metadata"]["uid"]
            tenant = labels.get(TENANT_LABEL) or (uid if DOOR_LABEL in labels else None)
            tenant = uid if tenant == LINE_TENANT else tenant
            if tenant is None:
                return
            if deleted:
                self._pods.pop(uid, None)
            else:
                self._pods[uid] = item
            if item["spec"].get("nodeName"):
                self.bound[tenant].add(uid)
                if item["metadata"]["namespace"] in self.returning:
                    self._returned.add(tenant)

    def _judge(self, gpunode: Object, deleted: bool) -> None:
        name = gpunode["metadata"]["name"]
        rows = [] if deleted else gpunode["spec"].get("tenants") or []
        self._rows[name] = {row["id"]: row for row in rows}
        time_of: Counter[str] = Counter()
        memory_of: Counter[str] = Counter()
        tenants_of: Counter[str] = Counter()
        for row in rows:
            for gpu in row["gpus"]:
                time_of[gpu] += row["requestMilli"]
                memory_of[gpu] += row["memory"]
                tenants_of[gpu] += 1
        for gpu, milli in time_of.items():
            self.most[gpu] = max(self.most[gpu], tenants_of[gpu])
            if milli > 1000 or memory_of[gpu] > self._memory or gpu in self.forbidden:
                self.over_committed[gpu] = (
                    f"{milli} thousandths and {memory_of[gpu]} bytes to {tenants_of[gpu]} tenants"
                )
        if fresh := self._rows[name].keys() - self.reserved:
            now = time.monotonic()
            if self.expecting:
                self.longest_silence = max(self.longest_silence, now - self._last)
            self._last = now
            self.reserved |= fresh
