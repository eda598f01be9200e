"""NVIDIA's own device plugin on a real node, with the node's simulated GPUs behind the double of NVML.

The plugin registers with the kubelet as on any node. The Node then has `nvidia.com/gpu`, and a pod that requests one
gets it in NVIDIA_VISIBLE_DEVICES, which the runtime `nvidia` applies.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Mapping
from pathlib import Path

from sharepod.placement.holders import DEVICE_PLUGIN_RESOURCE

from harness.build import own_programs
from harness.cluster import Cluster, wait_until
from harness.errors import HarnessError
from harness.machines import ROOT, RealNode
from harness.releases import DEVICE_PLUGIN, DEVICE_PLUGIN_PROGRAM
from harness.services import Service

LIBNVML = ROOT / "build" / "doubles" / "libnvml"
_CONFIG = "/var/lib/sharepod/device-plugin.json"
_CAPABILITIES = "/proc/driver/nvidia-caps"
_DRIVER_VERSION = "simulated"
"""Driver version that the double of NVML reports."""


def start_device_plugin(
    machine: RealNode,
    name: str = "device-plugin",
    *,
    config: Mapping[str, object] | None = None,
    env: Mapping[str, str] | None = None,
) -> Service:
    """Start the device plugin on the node. Its log is `name`.log of the node.

    `config`: its configuration file, for example with `sharing`. `env`: its settings, such as DEVICE_ID_STRATEGY. With
    MIG_STRATEGY every GPU is divided into two instances.
    """
    program: list[str] = [str(own_programs(DEVICE_PLUGIN) / DEVICE_PLUGIN_PROGRAM)]
    divided = {"FAKE_NVML_MIG_MODE": "1"} if "MIG_STRATEGY" in (env or {}) else {}
    if divided:
        program = _among_capabilities(machine, program)
    if config is not None:
        machine.real.path(_CONFIG).write_text(json.dumps({"version": "v1", **config}))
        program.append(f"--config-file={_CONFIG}")
    settings = {
        "LD_LIBRARY_PATH": str(LIBNVML),
        "FAKE_CUDA_STATE": str(machine.state),
        "FAKE_CUDA_VISIBLE": "all",
        "FAKE_NVML_EVENTS": str(_xids(machine)),
        "DEVICE_DISCOVERY_STRATEGY": "nvml",
        **dict.fromkeys(("CONTAINER_DRIVER_ROOT", "NVIDIA_DRIVER_ROOT", "NVIDIA_DEV_ROOT"), str(_driver_root(machine))),
        "NVIDIA_CDI_HOOK_PATH": "/bin/true",
        **divided,
        **(env or {}),
    }
    return machine.real.start(name, program, env={**os.environ, **settings})


def _among_capabilities(machine: RealNode, program: list[str]) -> list[str]:
    """Return a command that runs a program where /proc contains the files by which the driver grants access to MIG
    instances."""
    minors = machine.directory / "mig-minors"
    lines = [
        f"gpu{gpu}/gi{instance}/{access} {1 + 100 * gpu + 10 * instance + number}"
        for gpu in range(len(machine.gpus))
        for instance in range(7, 9)
        for number, access in enumerate(("access", "ci0/access"))
    ]
    minors.write_text("\n".join(lines) + "\n")
    shell = (
        f"mount -t tmpfs none /proc/driver && mkdir -p {_CAPABILITIES} && cp {minors} {_CAPABILITIES}/mig-minors && "
        'exec "$@"'
    )
    return ["unshare", "--mount", "sh", "-c", shell, "sh", *program]


def report_xid(machine: RealNode, gpu: str, xid: int) -> None:
    """Make the driver report an Xid of a GPU. The device plugin then reports the GPU as unhealthy."""
    with _xids(machine).open("a") as file:
        file.write(f"{gpu} {xid}\n")


def _driver_root(machine: RealNode) -> Path:
    """Return a folder with device nodes and libraries like a driver's. The plugin writes their paths into a CDI
    specification."""
    root = machine.directory / "driver"
    if not root.exists():
        libraries = root / "usr" / "lib64"
        libraries.mkdir(parents=True)
        (root / "dev").mkdir()
        for name in ("nvidiactl", *(f"nvidia{index}" for index in range(len(machine.gpus)))):
            os.mknod(root / "dev" / name, stat.S_IFCHR | 0o666, os.makedev(1, 3))  # as /dev/null
        for name in ("libcuda", "libnvidia-ml"):
            (libraries / f"{name}.so.{_DRIVER_VERSION}").touch()
    return root


def _xids(machine: RealNode) -> Path:
    return machine.directory / "xids"


def await_gpus(cluster: Cluster, node: str, count: int, plugin: Service, *, timeout: float = 60.0) -> None:
    """Wait until a Node has so many GPUs of the device plugin for pods."""

    def known() -> bool:
        status = cluster.api.get(f"/api/v1/nodes/{node}")["status"]
        return int(status.get("allocatable", {}).get(DEVICE_PLUGIN_RESOURCE, 0)) == count

    try:
        wait_until(known, what=f"{count} GPUs of the device plugin", timeout=timeout)
    except HarnessError as error:
        raise HarnessError(f"{plugin.log_tail()}\n{error}") from None
