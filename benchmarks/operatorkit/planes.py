"""The two control planes of the benchmark, with the same interface.

Guarantees:
- Each node is ready, and has eight GPUs and an agent that renews its Lease.
- Only the operator's calls are counted: by audit log on the real control plane, by user agent on the double.
- Everything ends with the `with` block.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

from cluster.fake_agents import FakeAgents
from cluster.plain_world import install_plain
from harness.api import Api
from harness.cluster import Cluster, free_ports, wait_until
from harness.fakes import FakeKubelets
from harness.installation import NAMESPACE, Installation
from results import ROOT

from operatorkit.process import server_cpu

GPUS = 8
"""GPUs of a node: the usual number in large servers."""
_READY_S = 60.0
_STOP_S = 20.0
_LEASE_S = 180
"""Duration of an agent's Lease on the real control plane, in seconds. It is long, because one process renews all
Leases, one after the other."""
_OPERATOR = (
    "system:serviceaccount",
    NAMESPACE,
    "sharepod-operator",
)


class Plane(Protocol):
    """Control plane with nodes, agents and one operator."""

    name: str
    kubeconfig: Path

    def start_operator(self, wrapper: list[str] | None = None) -> None:
        """Start an operator. `wrapper`: program to run in place of `sharepod-operator`."""
        ...

    def stop_operator(self) -> None:
        """End the operator by SIGTERM, and wait until it has ended."""
        ...

    def namespace(self, name: str) -> str:
        """Create a namespace."""
        ...

    def calls(self) -> Counter[str]:
        """Return the operator's calls so far by verb and resource."""
        ...

    @property
    def pid(self) -> int:
        """Process id of the operator."""
        ...

    @property
    def probe(self) -> str:
        """URL that the operator answers immediately unless its event loop is busy."""
        ...


class MemoryPlane:
    """API server double in a separate process, which also simulates scheduler, kubelets and agents."""

    name = "in memory"

    def __init__(self, nodes: int, **settings: str) -> None:
        self._nodes = nodes
        self._settings = settings
        self._stack = ExitStack()
        self._operator: subprocess.Popen[bytes] | None = None
        self._ports = (0, 0)

    def __enter__(self) -> Self:
        folder = Path(self._stack.enter_context(tempfile.TemporaryDirectory(prefix="shp-")))
        (port,) = free_ports(1)
        self._url = f"http://127.0.0.1:{port}"
        self.kubeconfig = folder / "kubeconfig"
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "c",
            "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u"}}],
            "clusters": [{"name": "c", "cluster": {"server": self._url}}],
            "users": [{"name": "u", "user": {"token": "t"}}],
        }
        self.kubeconfig.write_text(json.dumps(config))
        self.log = folder / "operator.log"
        arguments = ["--port", str(port), "--nodes", str(self._nodes), "--gpus", str(GPUS)]
        self.server = subprocess.Popen(
            [sys.executable, "-m", "doubles.apiserver", *arguments], cwd=ROOT, env=_environment()
        )
        self._stack.callback(_end, self.server)
        self._stack.callback(self.stop_operator)
        wait_until(lambda: self.ask("calls") is not None, what="the API server double", timeout=_READY_S)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def start_operator(self, wrapper: list[str] | None = None, identity: str = "operator") -> None:
        self._ports = (health, metrics) = tuple(free_ports(2))  # type: ignore[assignment]
        settings = {
            "SHAREPOD_KUBECONFIG": str(self.kubeconfig),
            "SHAREPOD_IDENTITY": identity,
            "SHAREPOD_BIND_ADDRESS": "127.0.0.1",
            "SHAREPOD_HEALTH_PORT": str(health),
            "SHAREPOD_METRICS_PORT": str(metrics),
        }
        program = wrapper or [str(Path(sys.executable).parent / "sharepod-operator")]
        with self.log.open("ab") as log:
            self._operator = subprocess.Popen(
                program, cwd=ROOT, env=_environment() | settings | self._settings, stderr=log, stdout=log
            )

    def stop_operator(self) -> None:
        if self._operator is not None:
            _end(self._operator)
            self._operator = None

    @contextmanager
    def standby(self) -> Iterator[None]:
        """Start a second operator, which stands by. After the block, the first operator has ended, and the second is
        the operator of the plane."""
        first, former_ports = self._operator, self._ports
        assert first is not None
        self.start_operator(identity=f"after-{first.pid}")
        second, ports = self._operator, self._ports
        wait_until(lambda: _answers(self.probe), what="a standby that has listed everything", timeout=_READY_S)
        self._operator, self._ports = first, former_ports
        try:
            yield
        finally:
            _end(first)
            self._operator, self._ports = second, ports

    def namespace(self, name: str) -> str:
        return name

    def calls(self) -> Counter[str]:
        found: Counter[str] = Counter()
        for key, count in (self.ask("calls") or {}).items():
            who, _, what = key.partition(" ")
            if who != "benchmark":
                found[what] += count
        return found

    def ask(self, what: str) -> Any:
        """Send a query to the double itself. Return None if it does not answer."""
        try:
            with urllib.request.urlopen(f"{self._url}/double/{what}", timeout=120) as answer:
                return json.loads(answer.read())
        except OSError:
            return None

    def signal(self, number: signal.Signals) -> None:
        """Send the operator a signal."""
        os.kill(self.pid, number)

    @property
    def pid(self) -> int:
        assert self._operator is not None
        return self._operator.pid

    @property
    def probe(self) -> str:
        return f"http://127.0.0.1:{self._ports[0]}/readyz"


class RealPlane:
    """etcd, API server, scheduler and controller manager. No machines exist for the nodes.

    `kubelets`: True if Pods are reported as running; False: Pods are only bound. `doors`: True if `manifests/claims`
    and `manifests/plain` are applied.
    """

    name = "real"

    def __init__(self, nodes: int, *, kubelets: bool = False, doors: bool = False, **settings: str) -> None:
        self._nodes = nodes
        self._doors = doors
        self._settings = settings
        self._kubelets = kubelets
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        folder = Path(self._stack.enter_context(tempfile.TemporaryDirectory(prefix="shp-")))
        policy, self._audit = folder / "audit.yaml", folder / "audit.log"
        rules = [{"level": "Metadata", "users": [":".join(_OPERATOR)]}, {"level": "None"}]
        content = {"apiVersion": "audit.k8s.io/v1", "kind": "Policy", "omitStages": ["RequestReceived"], "rules": rules}
        policy.write_text(json.dumps(content))
        flags = [f"--audit-policy-file={policy}", f"--audit-log-path={self._audit}", "--audit-log-mode=batch"]
        self.cluster = self._stack.enter_context(Cluster(apiserver_args=flags))
        api: Api = self.cluster.api
        if self._kubelets:
            self._stack.enter_context(FakeKubelets(api))
        agents = self._stack.enter_context(
            FakeAgents(api, gpus=GPUS, memory=80 << 30, duration=_LEASE_S, renew=_LEASE_S / 3, pace=1.0)
        )
        self.kubeconfig = self.cluster.kubeconfig
        self._installation = Installation(self.cluster)
        self.cluster.runtime_class()
        if self._doors:
            install_plain(self.cluster)
        labels = {"sharepod.dev/pool": "dedicated"}
        nodes = self.cluster.add_fake_nodes(self._nodes, labels=labels, cpu="640", memory="2560Gi", pods=500)
        self.start_operator()
        ledgers = "/apis/sharepod.dev/v1alpha1/gpunodes"
        wait_until(lambda: len(api.get(ledgers)["items"]) == len(nodes), what="all GPUNodes", timeout=_READY_S * 5)
        agents.start(*nodes)
        time.sleep(3)  # the operator checks the agents' Leases each second
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def start_operator(self, wrapper: list[str] | None = None) -> None:
        assert wrapper is None, "the real control plane runs the operator as it is"
        self._service = self._installation.start_operator(env=self._settings)

    def stop_operator(self) -> None:
        self._service.signal(signal.SIGTERM)
        self._service.wait(_STOP_S)

    def namespace(self, name: str) -> str:
        return self.cluster.namespace(name)

    def calls(self) -> Counter[str]:
        time.sleep(2)  # the audit log is written in batches
        found: Counter[str] = Counter()
        with self._audit.open() as lines:
            for line in lines:
                event = json.loads(line)
                about = event.get("objectRef")
                if about is None:  # a discovery request, which has no object
                    continue
                part = f"/{about['subresource']}" if about.get("subresource") else ""
                found[f"{event['verb']} {about['resource']}{part}"] += 1
        return found

    def server_cpu(self) -> float:
        """Return the API server's processor time so far, in seconds."""
        return server_cpu(self.cluster)

    @property
    def pid(self) -> int:
        return self._service.pid

    @property
    def probe(self) -> str:
        return f"http://127.0.0.1:{self._installation.health_ports['operator']}/readyz"


def _environment() -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("SHAREPOD_")}
    return {**kept, "PYTHONPATH": "tests:benchmarks"}


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5):
            return True
    except OSError:
        return False


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a process that the benchmark has started: by SIGTERM, and by SIGKILL if it does not end in time."""
    process.terminate()
    try:
        process.wait(_STOP_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait(_STOP_S)
