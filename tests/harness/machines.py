"""Node with simulated GPUs. The simulated devices count the time of each program, from which shares are measured.

Programs run in containers on a real node, or, without root, as plain processes under the hook.
"""

from __future__ import annotations

import json
import subprocess
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import yaml
from doubles.gpus import create_state, read_state
from sharepod.api.objects import GPUS_ANNOTATION
from sharepod.api.units import parse_quantity

from harness.cluster import Cluster, wait_until
from harness.errors import HarnessError
from harness.fakes import FakeKubelets
from harness.images import image_with_program
from harness.installation import Installation
from harness.node import Gpu, Node
from harness.node_packages import why_no_node
from harness.services import Service
from harness.shares import WINDOW_S, Shares, measured

ROOT = Path(__file__).resolve().parent.parent.parent
LIBCUDA = ROOT / "build" / "doubles" / "libcuda" / "libcuda.so.1"
LIBNVML = ROOT / "build" / "doubles" / "libnvml" / "libnvidia-ml.so.1"
PROGRAM = ROOT / "build" / "programs" / "launchloop"
IMAGE = "sharepod.test/launchloop:1"
AGENTS = "pgrep -f '[s]harepod-agent'"
"""Shell command that prints the pids of agents, as processes and in containers. The brackets keep the pattern from
matching the command's own shell."""


class Machine(ABC):
    """Node with the GPUs of `inventory` (the agent's YAML). A context manager: everything that it started ends with
    it."""

    node: str

    def __init__(self, cluster: Cluster, inventory: Path) -> None:
        self._cluster = cluster
        self._inventory = inventory
        self._directory = tempfile.TemporaryDirectory(prefix="shp-")
        self.directory = Path(self._directory.name)
        self.directory.chmod(0o755)
        self.gpus: list[dict[str, str]] = yaml.safe_load(inventory.read_text())["gpus"]
        devices = [(gpu["uuid"], gpu["model"], int(parse_quantity(gpu["memory"]))) for gpu in self.gpus]
        self.state = create_state(self.directory / "gpus", devices)

    def say_processes(self, on: Mapping[int, str]) -> None:
        """Let the driver report these processes, by the node's pid. Each is on the GPU with that UUID."""
        self._show(processes=[{"pid": pid, "uuid": uuid} for pid, uuid in on.items()])

    def lose_gpus(self, *uuids: str) -> None:
        """Let the driver report all of the node's GPUs except these."""
        self._show(gpus=[gpu for gpu in self.gpus if gpu["uuid"] not in uuids])

    def _show(self, **parts: object) -> None:
        """Write the driver's report for the agent, with the replaced parts."""
        fresh = self._inventory.with_suffix(".new")
        fresh.write_text(json.dumps({**yaml.safe_load(self._inventory.read_text()), **parts}))
        fresh.rename(self._inventory)

    @abstractmethod
    def start_agent(self, installation: Installation, name: str = "agent") -> Service:
        """Start the node's agent. `name`: name of the service, for a second agent."""

    @abstractmethod
    def follow(self) -> None:
        """Start and end programs so that they match the Pods. Called repeatedly while the demo waits."""

    def busy_ns(self) -> dict[tuple[str, str], int]:
        """Return, by (SharePod, GPU UUID), the busy time in ns that the simulated device has counted for the SharePod
        so far."""
        total: dict[tuple[str, str], int] = {}
        for client in read_state(self.state).clients:
            sharepod = client.label.split("/")[1]
            for gpu, usage in client.usage.items():
                total[sharepod, gpu] = total.get((sharepod, gpu), 0) + usage.busy_ns
        return total

    def shares(self, window_s: float = WINDOW_S) -> Shares:
        """Measure each program's part of each GPU (shares.py) while it has priority over other processes of this
        machine."""
        with self._ahead_of_others():
            return measured(self.busy_ns, window_s=window_s)

    @contextmanager
    def _ahead_of_others(self) -> Iterator[None]:
        """Give programs and agent priority for the processors during the block, if this machine allows that."""
        yield

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def stop(self) -> None:
        self._directory.cleanup()


class RealNode(Machine):
    """Real kubelet with containerd. Needs root. `nvml`: True if NVIDIA's runtime also gives containers NVML."""

    def __init__(self, cluster: Cluster, inventory: Path, name: str = "gpu-node-1", *, nvml: bool = False) -> None:
        super().__init__(cluster, inventory)
        self.real = Node(cluster, name)
        self.node = self.real.name
        try:
            cluster.runtime_class()
            gpus = [Gpu(gpu["uuid"], gpu["model"]) for gpu in self.gpus]
            self.real.set_gpus(gpus, libcuda=LIBCUDA, libnvml=LIBNVML if nvml else None, state=self.state)
            image = image_with_program(IMAGE, PROGRAM, directory=self.directory, injected=[LIBCUDA.name])
            self.real.load_image(image)
        except BaseException:
            self.stop()
            raise

    @staticmethod
    def unavailable() -> str | None:
        """Return why this machine cannot run a real node, in one line. None if it can."""
        return why_no_node()

    def start_agent(self, installation: Installation, name: str = "agent") -> Service:
        return installation.start_agent(self.real, self._inventory, name)

    def await_claim_driver(self, agent: Service) -> None:
        """Wait until the kubelet calls this agent for claims. The status may still contain an earlier agent's reports.

        Otherwise a Pod could fail once, and the kubelet would retry it only after 60 to 90 s.
        """

        def registered() -> bool:
            lines = agent.log.read_text(errors="replace").splitlines()
            return any("registered with the kubelet" in line and "DRAPlugin" in line for line in lines)

        try:
            wait_until(registered, what="the registration for claims", timeout=60)
        except HarnessError as error:
            raise HarnessError(f"{agent.log_tail()}\n{self.real.kubelet_log_tail()}\n{error}") from None

    def follow(self) -> None:
        """Do nothing: the kubelet follows the Pods."""

    @contextmanager
    def _ahead_of_others(self) -> Iterator[None]:
        """Give the Pods' cgroups the greatest weight, and the agent a real-time policy, during the block.

        A GPU is idle while its tenant waits for a processor. All Pods together have the weight of one process of this
        machine. Pods without a CPU request have nearly no weight compared with Pods that have one.
        """
        self.real.weigh_pods_most()
        self._schedule_agent("--rr", 1)
        try:
            yield
        finally:
            self._schedule_agent("--other", 0)

    def _schedule_agent(self, policy: str, priority: int) -> None:
        """Set the kernel's scheduling policy and priority of the agent, if the kernel allows that."""
        each = f"chrt --all-tasks {policy} --pid {priority} $pid || true"
        self.real.run("sh", "-c", f"for pid in $({AGENTS}); do {each}; done")

    def stop(self) -> None:
        self.real.stop()
        super().stop()


class BareMachine(Machine):
    """No kubelet and no containers, so no root: the agent and the programs are processes of this user.

    A double acts as the kubelet towards the API server; the agent, the hook and the sharing are real.
    """

    def __init__(self, cluster: Cluster, inventory: Path, namespace: str) -> None:
        super().__init__(cluster, inventory)
        self._namespace = namespace
        self._tenants = self.directory / "s" / "tenants"
        self._running: dict[tuple[str, str], subprocess.Popen[bytes]] = {}
        (self.node,) = cluster.add_fake_nodes(1, prefix="gpu-node")
        cluster.runtime_class()
        self._kubelets = FakeKubelets(cluster.api).start()

    def start_agent(self, installation: Installation, name: str = "agent") -> Service:
        return installation.start_agent_process(
            self.node, self._inventory, state=self.directory / "s", kubelet_root=self.directory / "k", name=name
        )

    def follow(self) -> None:
        """Start the containers of Running pods as processes, and end the processes of deleted pods."""
        wanted: set[tuple[str, str]] = set()
        for pod in self._cluster.pods(self._namespace):
            if pod["status"].get("phase") != "Running" or "deletionTimestamp" in pod["metadata"]:
                continue
            tenant = pod["metadata"]["ownerReferences"][0]["uid"]
            for container in pod["spec"]["containers"]:
                key = (pod["metadata"]["uid"], container["name"])
                wanted.add(key)
                if key not in self._running:
                    self._running[key] = self._start(pod["metadata"], tenant, container)
        for key in [key for key in self._running if key not in wanted]:
            self._end(self._running.pop(key))

    def _start(self, pod: dict[str, Any], tenant: str, container: dict[str, Any]) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [PROGRAM, *container.get("args", [])],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            env={
                "LD_LIBRARY_PATH": str(LIBCUDA.parent),
                "LD_PRELOAD": str(self._tenants / tenant / "libsharepod.so"),
                "FAKE_CUDA_STATE": str(self.state),
                "FAKE_CUDA_VISIBLE": pod["annotations"][GPUS_ANNOTATION],
                "FAKE_CUDA_LABEL": f"{self._namespace}/{pod['name']}/{container['name']}",
            },
        )

    @staticmethod
    def _end(process: subprocess.Popen[bytes]) -> None:
        process.terminate()
        try:
            process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(timeout=5)

    def stop(self) -> None:
        for process in self._running.values():
            self._end(process)
        self._kubelets.stop()
        super().stop()
