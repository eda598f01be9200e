"""Real node for a test cluster: containerd, runc, a bridge network and this version's kubelet, on this machine.

Everything runs in the node's own mount and process-id namespaces, under a supervisor that is its process 1. In them the
usual paths are the node's (/var/lib/kubelet, /var/lib/sharepod, /run/containerd, ...), mounts are shared as on a real
node (Bidirectional propagation works), and "the host's processes" are the node's. The network namespace is the
machine's: the kubelet reaches the API server on loopback, and a test reaches pods by their address.

Guarantees:
- The kubelet has only the rights of system:node:NAME; no part of it is anonymous.
- When the node ends in any way, the kernel ends every process in it, including shims and containers, and with the last
  one all its mounts. Then the bridge, the cgroups and the files are removed.
- The next start removes what a killed supervisor left.
- One node per machine, by a lock.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from harness import images, nvidia_cdi, nvidia_runtime, relay
from harness.api import ApiError
from harness.build import own_programs
from harness.cache import acquire
from harness.cluster import Cluster, free_ports, wait_until
from harness.commands import command
from harness.components import LOOPBACK, SERVICE_ADDRESS
from harness.errors import HarnessError, NodeUnavailableError, StartError
from harness.node_files import PAUSE_IMAGE, NodeLayout, cni_config, containerd_config, kubelet_config
from harness.node_packages import cni_directory, free_subnet, install_packages, why_no_node
from harness.node_traces import (
    LOCK,
    OWN_DIRECTORIES,
    clean_what_was_left,
    make_cgroup,
    undo_commands,
    weigh_most,
    write_record,
)
from harness.releases import CONTAINERD
from harness.services import Service, Services

BASE_IMAGE = "sharepod.test/base:1"
CUDA_IMAGE = "docker.io/nvidia/cuda:12.9.1-base-ubuntu24.04"

_BRIDGE = "shp0"
_BRIDGE_MAC = "02:73:68:70:00:01"
"""MAC address of the bridge. Without a fixed address the bridge takes the lowest address of its ports. When the pod of
that port ends, the bridge's address changes, and the other pods reach neither node nor API server until their neighbour
entries expire, up to 45 s later."""
_START_TIMEOUT = 90.0
# A bind mount belongs to the peer group of its source. Making it private and then shared gives it a group of its own.
# Otherwise mounts beneath it would appear a second time beneath its source.
_ENTER = """
set -e
state=$1
shift
own() {
    mount --bind "$1" "$2"
    mount --make-private "$2"
    mount --make-shared "$2"
}
mount --make-rshared /
own "$state" "$state"
for directory in DIRECTORIES; do
    mkdir -p "$state/root$directory"
    own "$state/root$directory" "$directory"
done
exec "$@"
""".replace("DIRECTORIES", " ".join(OWN_DIRECTORIES))


@dataclass(frozen=True)
class Gpu:
    """A simulated GPU as the container runtime knows it."""

    uuid: str
    model: str


class Node:
    """A running node of `cluster`; use it as a context manager, or `stop` it before the cluster.

    `labels`: of the Node. `kubelet_settings`: further fields of KubeletConfiguration. `keep_logs`: leave `logs` when
    stopping. `wait`: seconds to wait for another node on this machine to end. `detached`: outlive this process.

    Errors: NodeUnavailableError (one line: a reason to skip), StartError.
    """

    def __init__(
        self,
        cluster: Cluster,
        name: str = "real-0",
        *,
        labels: Mapping[str, str] | None = None,
        kubelet_settings: Mapping[str, Any] | None = None,
        keep_logs: bool = False,
        wait: float = 120.0,
        detached: bool = False,
    ) -> None:
        if (reason := why_no_node()) is not None:
            raise NodeUnavailableError(reason)
        install_packages()
        self._containerd = own_programs(CONTAINERD)
        self.cluster = cluster
        self.name = name
        self.keep_logs = keep_logs
        try:
            lock = acquire(LOCK, what="running the machine's one real node", timeout=wait)
        except HarnessError as error:
            raise NodeUnavailableError(str(error)) from None
        try:
            clean_what_was_left()
            self._layout = _plan(name)
            self.state = self._layout.state
            undo = undo_commands(self._layout)
            write_record(self.state, undo)
            paths = [str(self.state), *OWN_DIRECTORIES]
            for directory in OWN_DIRECTORIES:
                Path(directory).mkdir(parents=True, exist_ok=True)
            enter = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
            prefix = [*enter, "sh", "-c", _ENTER, "enter", str(self.state)]
            self.services = Services(self.state, detached=detached, prefix=prefix, lock_fd=lock)
        finally:
            os.close(lock)  # from here on the supervisor holds the lock
        self.logs = self.services.logs
        try:
            for argv in [*undo, *(["umount", "--recursive", "--lazy", path] for path in paths)]:
                self.services.undo(*argv)
            write_record(self.state, undo, supervisor=self.services.pid)
            self._start(labels or {}, kubelet_settings or {})
        except StartError as error:
            self.stop(keep_logs=True)
            error.logs = self.logs
            raise
        except BaseException:
            self.stop()
            raise

    def _start(self, labels: Mapping[str, str], settings: Mapping[str, Any]) -> None:
        layout = self._layout
        self._write_files(settings)
        make_cgroup(layout.cgroup)
        command("ip", "link", "add", layout.bridge, "address", _BRIDGE_MAC, "type", "bridge")
        command("ip", "address", "add", f"{layout.address}/{layout.subnet.prefixlen}", "dev", layout.bridge)
        command("ip", "link", "set", layout.bridge, "up")
        config = self.state / "containerd.toml"
        containerd = self.services.start("containerd", [self._containerd / "containerd", "--config", config], grace=0.0)
        self._await(containerd, lambda: self._ctr("version", check=False).returncode == 0)
        self._load_own_images()
        self._kubelet_command: list[str | Path] = [
            self.cluster.bin / "kubelet",
            f"--config={self.state / 'kubelet.json'}",
            f"--kubeconfig={self._kubeconfig}",
            f"--hostname-override={self.name}",
            f"--node-ip={layout.address}",
            f"--node-labels={','.join(f'{key}={value}' for key, value in labels.items())}",
            "--root-dir=/var/lib/kubelet",
        ]
        self._kubelet_starts = 0
        self._kubelet = self._start_kubelet()
        self._await(self._kubelet, self._is_ready)
        if not self.cluster.node_lifecycle:  # no controller runs that would remove the taint which every new Node has
            self.cluster.api.patch(f"/api/v1/nodes/{self.name}", {"spec": {"taints": None}})

    def _start_kubelet(self) -> Service:
        self._kubelet_starts += 1
        name = "kubelet" if self._kubelet_starts == 1 else f"kubelet-{self._kubelet_starts}"
        return self.services.start(name, self._kubelet_command, grace=0.0)

    def kubelet_log_tail(self, lines: int = 60) -> str:
        """Return the last lines of the kubelet's log, under a heading that names the file."""
        return self._kubelet.log_tail(lines)

    def restart_kubelet(self, while_down: Callable[[], object] = lambda: None) -> None:
        """Kill the kubelet and start it again; containers continue to run. `while_down`: called while no kubelet
        runs."""
        self._kubelet.stop()
        while_down()
        self._kubelet = self._start_kubelet()

    def signal_kubelet(self, number: signal.Signals) -> None:
        """Send the kubelet a signal."""
        self._kubelet.signal(number)

    def _write_files(self, settings: Mapping[str, Any]) -> None:
        layout = self._layout
        self._kubeconfig = self.cluster.user_kubeconfig(f"system:node:{self.name}", groups=["system:nodes"])
        serving = self.cluster.authority.issue(
            f"kubelet-{self.name}", f"system:node:{self.name}", addresses=[layout.address, self.name]
        )
        layout.cni.mkdir()
        layout.containerd_socket.parent.mkdir()
        (layout.cni / "10-bridge.conflist").write_text(cni_config(layout))
        (self.state / "containerd.toml").write_text(containerd_config(layout))
        (self.state / "resolv.conf").write_text("nameserver 192.0.2.53\n")
        (self.state / "kubelet.json").write_text(
            kubelet_config(layout, ca=self.cluster.ca, serving=serving, settings=settings)
        )
        self._nvidia_smi = images.compile_static("nvidia-smi", self.state)
        script = Path(nvidia_runtime.__file__).resolve()
        runtime = [sys.executable, "-IS", str(script), str(self.state / "nvidia.json")]
        layout.nvidia_runtime.write_text(f'#!/bin/sh\nexec {shlex.join(runtime)} "$@"\n')
        layout.nvidia_runtime.chmod(0o755)
        self.set_gpus([])

    def _load_own_images(self) -> None:
        pause = images.compile_static("pause", self.state)
        made = [
            images.make_image(PAUSE_IMAGE, {"/pause": pause}, directory=self.state, entrypoint=["/pause"]),
            images.make_image(BASE_IMAGE, images.base_files(), directory=self.state),
        ]
        for image in made:
            self.load_image(image)
            image.unlink()
        self.tag_image(BASE_IMAGE, CUDA_IMAGE)

    def _is_ready(self) -> bool:
        with suppress(ApiError):
            conditions = self.cluster.api.get(f"/api/v1/nodes/{self.name}")["status"].get("conditions", [])
            return any(each["type"] == "Ready" and each["status"] == "True" for each in conditions)
        return False

    def _await(self, service: Service, condition: Any) -> None:
        def ended_or_holds() -> bool:
            return not service.running() or condition()

        try:
            wait_until(ended_or_holds, what=f"{service.name} ready", timeout=_START_TIMEOUT, interval=0.1)
        except HarnessError as error:
            raise StartError(f"{error}\n{service.log_tail()}") from None
        if (status := service.status()) is not None:
            raise StartError(f"{service.name} ended with status {status}\n{service.log_tail()}")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def stop(self, *, keep_logs: bool | None = None) -> None:
        """Delete the Node and its Pods, end every process of the node, and remove everything that the node has created
        on the machine."""
        self.services.end(keep_logs=self.keep_logs if keep_logs is None else keep_logs)
        with suppress(OSError, HarnessError):  # the cluster may have ended already; the steps below are still needed
            self.cluster.api.delete(f"/api/v1/nodes/{self.name}")
            pods = self.cluster.api.get("/api/v1/pods", fieldSelector=f"spec.nodeName={self.name}")["items"]
            for pod in pods:
                where = pod["metadata"]
                with suppress(ApiError):
                    path = f"/api/v1/namespaces/{where['namespace']}/pods/{where['name']}"
                    self.cluster.api.delete(path, grace=0)

    # Its processes

    @property
    def address(self) -> str:
        """Return the node's IPv4 address on its bridge."""
        return self._layout.address

    def path(self, inside: str | Path) -> Path:
        """Return the path by which this process reaches a path of the node (through /proc, until the node ends)."""
        return Path(f"/proc/{self.services.pid}/root") / str(inside).lstrip("/")

    def start(
        self,
        name: str,
        argv: Sequence[str | Path],
        *,
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        grace: float = 5.0,
    ) -> Service:
        """Start a process on the node, as a DaemonSet with hostPID does. It ends with the node.

        Its log is logs/NAME.log. `env`: its whole environment (None: this process's). `grace`: seconds from SIGTERM to
        SIGKILL. The result's `pid` is the pid in the node's namespace.
        """
        return self.services.start(name, argv, env=env, cwd=cwd, grace=grace)

    def run(
        self,
        *argv: str | Path,
        input: str | None = None,  # noqa: A002  as subprocess.run calls it
        check: bool = True,
        timeout: float = 30.0,
        env: Mapping[str, str] | None = None,
    ) -> subprocess.CompletedProcess[str]:
        """Run a command on the node to its end. Raises CommandError if it fails (with `check`), or after `timeout`
        seconds."""
        enter = ["nsenter", "--target", str(self.services.pid), "--mount", "--pid", "--"]
        return command(*enter, *argv, input=input, check=check, timeout=timeout, env=env)

    def weigh_pods_most(self) -> None:
        """Give the cgroups of all Pods the greatest weight for processors. The kubelet resets it each minute."""
        weigh_most(self._layout.cgroup, "kubepods/besteffort", "kubepods/burstable")

    def load_image(self, archive: Path) -> None:
        """Import a docker-archive (see `harness.images`) or an OCI archive.

        Pods use the image with imagePullPolicy IfNotPresent or Never.
        """
        self._ctr("images", "import", archive, timeout=60.0)

    def tag_image(self, name: str, another: str) -> None:
        """Give an image of the node a second name. Names are complete:
        docker.io/nvidia/cuda:12.9.1-base-ubuntu24.04."""
        self._ctr("images", "tag", name, another)

    def serve_api(self) -> None:
        """Let pods reach the API server by the address of Service `kubernetes`, as in any cluster."""
        command("ip", "address", "add", f"{SERVICE_ADDRESS}/32", "dev", self._layout.bridge)
        port = self.cluster.server.rpartition(":")[2]
        script = Path(relay.__file__).resolve()
        self.services.start("relay", [sys.executable, "-IS", script, SERVICE_ADDRESS, relay.HTTPS, LOOPBACK, port])

    def _ctr(self, *argv: str | Path, check: bool = True, timeout: float = 30.0) -> subprocess.CompletedProcess[str]:
        socket = self._layout.containerd_socket
        return self.run(
            self._containerd / "ctr", "--address", socket, "--namespace", "k8s.io", *argv, check=check, timeout=timeout
        )

    # GPUs

    def set_gpus(
        self,
        gpus: Sequence[Gpu],
        *,
        libcuda: Path | None = None,
        libnvml: Path | None = None,
        state: Path | None = None,
    ) -> None:
        """Set the GPUs that the runtime `nvidia` gives to containers created from now on, and their CDI devices.

        `libcuda`, `libnvml`: put into the containers as libcuda.so.1 and, by the runtime, as libnvidia-ml.so.1.
        `state`: the simulated devices' shared file, which every user must be able to write. It is mounted writable into
        the containers, and their variables FAKE_CUDA_STATE, FAKE_CUDA_VISIBLE and FAKE_CUDA_LABEL
        (NAMESPACE/POD/CONTAINER) are set.
        """
        config = {
            "runc": shutil.which("runc"),
            "gpus": [asdict(gpu) for gpu in gpus],
            "nvidia_smi": str(self._nvidia_smi),
            "libcuda": None if libcuda is None else str(libcuda.resolve()),
            "libnvml": None if libnvml is None else str(libnvml.resolve()),
            "state": None if state is None else str(state.resolve()),
        }
        _replace(self.state / "nvidia.json", config)
        markers = self.state / "gpus"
        markers.mkdir(exist_ok=True)
        for gpu in gpus:
            (markers / gpu.uuid).touch()
        specification = nvidia_cdi.specification([gpu.uuid for gpu in gpus], markers, libcuda=libcuda, state=state)
        _replace(self.state / "root/run/cdi/nvidia.json", specification)


def _replace(path: Path, content: Mapping[str, Any]) -> None:
    fresh = path.with_suffix(".new")
    fresh.write_text(json.dumps(content))
    fresh.rename(path)


def _plan(name: str) -> NodeLayout:
    subnet, plugins = free_subnet(), cni_directory()
    if subnet is None or plugins is None:
        raise NodeUnavailableError("there is no free subnet among 10.244.0.0/16" if plugins else "no CNI plugins")
    state = Path(tempfile.mkdtemp(prefix="shp-"))
    state.chmod(0o711)  # root of a Pod's user namespace has no rights here, but must reach the files of its container
    shown = command("stat", "--file-system", "--format=%T", state).stdout.strip()
    (port,) = free_ports(1)
    return NodeLayout(
        name=name,
        state=state,
        bridge=_BRIDGE,
        subnet=subnet,
        cni_plugins=plugins,
        cgroup=state.name,
        snapshotter="native" if shown == "overlayfs" else "overlayfs",  # an overlay cannot be mounted on an overlay
        nvidia_runtime=state / "nvidia-container-runtime",
        kubelet_port=port,
    )
