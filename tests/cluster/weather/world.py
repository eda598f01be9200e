"""World of the operator whose connection to the API server passes a fault-injecting proxy.

Guarantees: only the operator meets the faults; kubelets, agents and the test use the API server directly. The operator
lists by itself only every ten minutes, so that no full list hides a fault.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from cluster.fake_agents import GPUNODES, FakeAgents
from cluster.operator_world import World, wait
from harness.api import Object
from harness.cluster import Cluster
from harness.fakes import FakeKubelets
from harness.proxy import Call, FaultProxy
from sharepod.api.objects import TENANT_LABEL

SHAREPODS = "/apis/sharepod.dev/v1alpha1/sharepods"

TIMES = {
    "SHAREPOD_BIND_TIMEOUT": "30",
    "SHAREPOD_RESYNC_INTERVAL": "600",
    "SHAREPOD_LOG_LEVEL": "debug",
    "SHAREPOD_LOG_FORMAT": "console",
}
"""Settings of the operator. All other settings, in particular of its Lease, have their defaults, as in a real
cluster."""
AGENT_LEASE = 20
"""Duration of the agents' Leases in seconds: the default of a real agent."""
START_LIMIT = 60.0
"""Seconds within which a started operator must act."""
KINDS = ("sharepods", "gpunodes", "nodes", "pods", "leases")
"""Kinds that the operator watches."""
WHOLE_NODE = {"request": 1.0, "count": 2}
"""Request of all GPUs of a node."""


class Weather:
    """Operator behind a proxy, and the world around it."""

    def __init__(self, world: World, proxy: FaultProxy) -> None:
        self.world = world
        self.proxy = proxy

    def start(self) -> None:
        """Start the operator and wait until it acts."""
        self.world.start_operator()
        wait(self.acts, what="an operator that acts", timeout=START_LIMIT)

    def acts(self) -> bool:
        """Return whether the operator leads and watches all kinds."""
        return self.world.metric("sharepod_operator_leader") == 1.0 and self.watched(*KINDS)

    def watched(self, *resources: str) -> bool:
        """Return whether the proxy has a watch of the operator for each of these kinds."""
        return all(self.proxy.watches(kinds(kind)) for kind in resources)

    def clear(self) -> None:
        """Remove all faults, and wait for an operator that leads and watches all kinds. If the present one does not, it
        is replaced."""
        self.proxy.clear()
        operator = self.world.operator
        if operator is not None and operator.running():
            if self.acts():
                return
            operator.stop(0.0)
        self.start()

    def sees_all(self) -> bool:
        """Return whether the operator has as many SharePods in its cache as the API server."""
        return self.world.metric("sharepod_operator_sharepods") == len(self.world.api.get(SHAREPODS)["items"])

    def runs(self) -> bool:
        """Return True; AssertionError with the end of the log if the operator's process has ended."""
        operator = self.world.operator
        assert operator is not None
        status = operator.status()
        assert status is None, f"the operator ended with status {status}\n{operator.log_tail(30)}"
        return True

    def place(self, prefix: str, nodes: int = 1, *, pool: str = "dedicated") -> tuple[str, list[str]]:
        """Return a namespace and nodes, all named after `prefix`, that no other SharePod uses."""
        return self.world.cluster.namespace(prefix), self.world.nodes(prefix, nodes, pool=pool)

    def empty(self) -> None:
        """Delete all SharePods, and wait until their Pods and shares are deleted, too."""
        listed = self.world.api.get(SHAREPODS)["items"]
        for namespace in {item["metadata"]["namespace"] for item in listed}:
            self.world.api.delete(self.world.path(namespace))
        wait(self._is_empty, what="a cluster without SharePods", timeout=90)

    def _is_empty(self) -> bool:
        pods = self.world.api.get("/api/v1/pods", labelSelector=TENANT_LABEL)["items"]
        ledgers = self.world.api.get(GPUNODES)["items"]
        return not (
            pods or self.world.api.get(SHAREPODS)["items"] or any(node["spec"].get("tenants") for node in ledgers)
        )

    def outlast(self, seconds: float) -> None:
        """Let a fault last; AssertionError as soon as the operator's process ends."""
        end = time.monotonic() + seconds
        wait(lambda: self.runs() and time.monotonic() >= end, what="the end of a fault", timeout=seconds + 30)

    def running(self, namespace: str, name: str, *, limit: float, since: float) -> float:
        """Wait until a SharePod runs; return the seconds since `since`, monotonic seconds."""
        self.world.phase(namespace, name, "Running", timeout=limit)
        return time.monotonic() - since

    @contextmanager
    def controllers_paused(self) -> Iterator[None]:
        """Stop Kubernetes' own controllers: a namespace in deletion keeps its objects."""
        services = self.world.cluster.services
        services.ask(do="signal", name="kube-controller-manager", number=int(signal.SIGSTOP))
        try:
            yield
        finally:
            services.ask(do="signal", name="kube-controller-manager", number=int(signal.SIGCONT))


def of_tenants(call: Call) -> bool:
    """Return whether the call reads Pods of tenants. The operator's other watch of Pods excludes them by its label
    selector."""
    return call.resource == "pods" and not call.query.get("labelSelector", "").startswith("!")


def kinds(*resources: str) -> Callable[[Call], bool]:
    """Return a condition that holds for calls about these kinds."""
    return lambda call: call.resource in resources


def report(fault: str, measured: float, unit: str = "s") -> None:
    """Print the delay of a fault; pytest shows it with -s or -rP."""
    print(f"{fault}: {measured:.1f} {unit}", file=sys.stderr)


def message(seen: Object, kind: str) -> str:
    """Return the message of a condition; empty without one."""
    found = (seen.get("status") or {}).get("conditions") or []
    return next((str(item.get("message") or "") for item in found if item["type"] == kind), "")


@contextmanager
def bad_weather(
    *,
    times: Mapping[str, str] = TIMES,
    start: bool = True,
    agent_lease: int = AGENT_LEASE,
    agent_renew: float = 1.0,
    pace: float = 0.0,
) -> Iterator[Weather]:
    """Start a separate cluster with SharePod installed, and the operator behind a proxy. `start`: True if the operator
    is started. Other arguments: as of `a_world`."""
    with (
        Cluster(keep_logs=bool(os.environ.get("KEEP_LOGS"))) as cluster,
        FaultProxy(cluster) as proxy,
        FakeKubelets(cluster.api) as kubelets,
        FakeAgents(cluster.api, duration=agent_lease, renew=agent_renew, pace=pace) as agents,
    ):
        world = World(cluster, kubelets, agents, times)
        token = cluster.service_account_token("sharepod-system", "sharepod-operator")
        world.times = {**times, "SHAREPOD_KUBECONFIG": str(proxy.kubeconfig(token))}
        weather = Weather(world, proxy)
        if start:
            weather.start()
        yield weather
