"""The operator on a test cluster: a separate process under its own ServiceAccount, with simulated kubelets and agents.

The operator's intervals and timeouts are short. Each test uses its own nodes, which its SharePods select, so that the
tests of one file share one cluster.
"""

from __future__ import annotations

import json
import os
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Any

from cluster.fake_agents import GIB, GPUNODES, LONGEST_S, FakeAgents, gpu_uuid, wait
from harness.api import ApiError, Object
from harness.cluster import Cluster
from harness.fakes import FakeKubelets
from harness.installation import Installation
from harness.services import Service

TIMES = {
    "SHAREPOD_ANNOTATIONS": '["test.sharepod.dev/*", "example.com/*"]',
    "SHAREPOD_BIND_TIMEOUT": "3",
    "SHAREPOD_HOLDER_IDLE": "1",
    "SHAREPOD_HOLDER_PENDING": "4",
    "SHAREPOD_RESYNC_INTERVAL": "600",
    "SHAREPOD_USAGE_INTERVAL": "1",
    "SHAREPOD_AGENT_DURATION": "3",
    "SHAREPOD_LEASE_DURATION": "6",
    "SHAREPOD_RENEW_DEADLINE": "3",
    "SHAREPOD_RETRY_PERIOD": "0.5",
    "SHAREPOD_WRITE_TIMEOUT": "2",
    "SHAREPOD_LOG_LEVEL": "debug",
    "SHAREPOD_LOG_FORMAT": "console",
}
AGENT_LEASE = 3
OPEN: list[World] = []
"""Worlds that `a_world` has created and that have not ended."""


class World:
    """Operator with its cluster. A test that needs another operator calls `stop_operator` and `start_operator`."""

    def __init__(
        self, cluster: Cluster, kubelets: FakeKubelets, agents: FakeAgents, times: Mapping[str, str] = TIMES
    ) -> None:
        self.cluster = cluster
        self.times = times
        self.api = cluster.api
        self.kubelets = kubelets
        self.agents = agents
        self.installation = Installation(cluster)
        cluster.runtime_class()
        self.operator: Service | None = None

    # The operator's process

    def start_operator(self, name: str = "operator", **env: str) -> Service:
        self.operator = self.installation.start_operator(name, env={**self.times, **env})
        return self.operator

    def revive_operator(self) -> None:
        """Start an operator, and wait until it acts, if the last started operator has ended."""
        if self.operator is None or self.operator.running():
            return
        self.start_operator()
        wait(lambda: self.metric("sharepod_operator_leader") == 1.0, what="the next operator to lead", timeout=60)

    def metric(self, name: str, operator: str = "operator") -> float:
        """Return a metric of an operator, summed over its labels. 0 while the operator does not answer."""
        try:
            url = f"http://127.0.0.1:{self.installation.ports[operator]}/metrics"
            with urllib.request.urlopen(url, timeout=5) as answer:
                lines = answer.read().decode().splitlines()
        except OSError:
            return 0.0
        return sum(float(line.split()[-1]) for line in lines if line.partition("{")[0].split()[:1] == [name])

    def ready(self, operator: str) -> bool:
        """Return whether an operator is ready: whether it has listed every kind."""
        try:
            port = self.installation.health_ports[operator]
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/readyz", timeout=5):
                return True
        except OSError:
            return False

    # Nodes

    def nodes(
        self, prefix: str, count: int = 1, *, agents: bool = True, pool: str = "dedicated", **options: Any
    ) -> list[str]:
        """Create nodes PREFIX-0 and so on, labelled `test=PREFIX`, of two GPUs with 16Gi each, and their agents."""
        labels = {"sharepod.dev/pool": pool, "test": prefix}
        names = self.cluster.add_fake_nodes(count, labels=labels, prefix=prefix, **options)
        for name in names:
            self.cluster.wait_for(f"{GPUNODES}/{name}", bool, what=f"GPUNode {name}")
        if agents:
            self.agents.start(*names)
        return names

    def rows(self, node: str) -> list[Object]:
        """Return the rows in the ledger of a node."""
        rows: list[Object] = self.api.get(f"{GPUNODES}/{node}")["spec"].get("tenants") or []
        return rows

    def row(self, node: str, name: str) -> Object | None:
        """Return the row of the SharePod with this name. None if there is none."""
        return next((row for row in self.rows(node) if row["podName"] == name), None)

    # SharePods

    def apply(
        self,
        namespace: str,
        name: str,
        gpu: Mapping[str, Any] | None = None,
        *,
        on: str | None = None,
        annotations: Mapping[str, str] | None = None,
        labels: Mapping[str, str] | None = None,
        **spec: Any,
    ) -> Object:
        """Create a SharePod that requests `gpu`, on nodes labelled `test=ON`. Return it."""
        body: Object = {
            "apiVersion": "sharepod.dev/v1alpha1",
            "kind": "SharePod",
            "metadata": {"name": name, "annotations": dict(annotations or {}), "labels": dict(labels or {})},
            "spec": {
                "restartPolicy": "Never",
                "containers": [{"name": "main", "image": "test", "resources": {"requests": {"cpu": "100m"}}}],
                **({"gpu": dict(gpu)} if gpu is not None else {}),
                **({"nodeSelector": {"test": on}} if on is not None else {}),
                **spec,
            },
        }
        return self.api.create(self.path(namespace), body)

    @staticmethod
    def path(namespace: str, name: str | None = None) -> str:
        collection = f"/apis/sharepod.dev/v1alpha1/namespaces/{namespace}/sharepods"
        return collection if name is None else f"{collection}/{name}"

    def sharepod(self, namespace: str, name: str) -> Object:
        found: Object = self.api.get(self.path(namespace, name))
        return found

    def delete(self, namespace: str, name: str) -> None:
        self.api.delete(self.path(namespace, name))

    def pod(self, namespace: str, name: str) -> Object | None:
        with suppress(ApiError):
            found: Object = self.api.get(f"/api/v1/namespaces/{namespace}/pods/{name}")
            return found
        return None

    def until(
        self, namespace: str, name: str, condition: Callable[[Object], Any], *, what: str, timeout: float = LONGEST_S
    ) -> Object:
        """Poll a SharePod until `condition` holds of it."""
        seen: Object = {}

        def holds() -> bool:
            nonlocal seen
            seen = self.sharepod(namespace, name)
            return bool(condition(seen))

        try:
            wait(holds, what=f"{namespace}/{name}: {what}", timeout=timeout)
        except AssertionError as error:
            log = self.operator.log_tail(40) if self.operator is not None else ""
            raise AssertionError(f"{error}; last seen: {json.dumps(seen)[:3000]}\n{log}") from None
        return seen

    def await_untouched(self, namespace: str, pods: Mapping[str, str], count: int) -> list[str]:
        """Wait until `count` of the SharePods still have their first Pod, and return their names. `pods`: UID of each
        SharePod's first Pod. A preempted SharePod loses its Pod only after its share.
        """

        def untouched() -> list[str]:
            return [name for name, uid in pods.items() if self.sharepod(namespace, name)["status"].get("podUID") == uid]

        wait(lambda: len(untouched()) == count, what=f"{count} SharePods of {len(pods)} with their Pods")
        return untouched()

    def phase(self, namespace: str, name: str, phase: str, *, timeout: float = LONGEST_S) -> Object:
        """Wait until the SharePod has this phase; return it."""
        return self.until(
            namespace, name, lambda seen: (seen.get("status") or {}).get("phase") == phase, what=phase, timeout=timeout
        )

    def condition(
        self,
        namespace: str,
        name: str,
        kind: str,
        *,
        status: str,
        reason: str | None = None,
        timeout: float = LONGEST_S,
    ) -> str:
        """Wait for a condition; return its message."""

        def holds(seen: Object) -> bool:
            found = condition_of(seen, kind)
            return bool(found) and found["status"] == status and reason in (None, found["reason"])

        seen = self.until(namespace, name, holds, what=f"{kind}={status} {reason or ''}", timeout=timeout)
        return str(condition_of(seen, kind).get("message") or "")

    def events(self, namespace: str, name: str) -> list[tuple[str, str]]:
        """Return (reason, note) of each Event about an object."""
        items = self.api.get(f"/apis/events.k8s.io/v1/namespaces/{namespace}/events")["items"]
        return [(item["reason"], item.get("note", "")) for item in items if item["regarding"]["name"] == name]

    def event(self, namespace: str, name: str, reason: str = "", *, note: str = "") -> str:
        """Wait for an Event about an object, with a reason and a part of its note; return the note. The operator writes
        Events after the status.
        """

        def notes() -> list[str]:
            seen = self.events(namespace, name)
            return [text for found, text in seen if reason in ("", found) and note in text]

        return str(wait(notes, what=f"an Event {reason} {note} about {namespace}/{name}")[-1])


def condition_of(seen: Object, kind: str) -> Object:
    conditions = (seen.get("status") or {}).get("conditions") or []
    return next((item for item in conditions if item["type"] == kind), {})


@contextmanager
def a_world(
    *,
    times: Mapping[str, str] = TIMES,
    agent_lease: int = AGENT_LEASE,
    agent_renew: float = 0.5,
    pace: float = 0.0,
    on: AbstractContextManager[Cluster] | None = None,
) -> Iterator[World]:
    """Start a cluster with SharePod installed and an acting operator.

    Args:
        times: Settings of the operator.
        agent_lease: Duration of the agents' Leases, in seconds. `agent_renew`, `pace`: as `renew`, `pace` of
            FakeAgents.
        on: Existing cluster instead of a new one.
    """
    with (
        on or Cluster(keep_logs=bool(os.environ.get("KEEP_LOGS"))) as cluster,
        FakeKubelets(cluster.api) as kubelets,
        FakeAgents(cluster.api, duration=agent_lease, renew=agent_renew, pace=pace) as agents,
    ):
        world = World(cluster, kubelets, agents, times)
        world.start_operator()
        OPEN.append(world)
        try:
            yield world
        finally:
            OPEN.remove(world)
        assert not kubelets.failures, kubelets.failures[:3]
        assert not agents.failures


__all__ = ["GIB", "GPUNODES", "OPEN", "World", "a_world", "condition_of", "gpu_uuid", "wait"]
