"""NVIDIA's own device plugin on a real node, with the node's simulated GPUs behind the double of NVML.

The plugin registers with the kubelet as on any node: the Node has `nvidia.com/gpu`, and a pod that asks for one gets
it in NVIDIA_VISIBLE_DEVICES, which the runtime `nvidia` follows.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping

from sharepod.placement.holders import DEVICE_PLUGIN_RESOURCE

from harness.build import own_programs
from harness.cluster import Cluster, wait_until
from harness.errors import HarnessError
from harness.machines import ROOT, RealNode
from harness.releases import DEVICE_PLUGIN, DEVICE_PLUGIN_PROGRAM
from harness.services import Service

LIBNVML = ROOT / "build" / "doubles" / "libnvml"
_CONFIG = "/var/lib/sharepod/device-plugin.json"


def start_device_plugin(
    machine: RealNode,
    name: str = "device-plugin",
    *,
    config: Mapping[str, object] | None = None,
    env: Mapping[str, str] | None = None,
) -> Service:
    """Start the device plugin; its log is `name`.log of the node.

    `config`: its configuration file, such as `sharing`. `env`: its settings, such as DEVICE_ID_STRATEGY. Its watch for
    Xids is off: the double of NVML has no events.
    """
    program: list[str] = [str(own_programs(DEVICE_PLUGIN) / DEVICE_PLUGIN_PROGRAM)]
    if config is not None:
        machine.real.path(_CONFIG).write_text(json.dumps({"version": "v1", **config}))
        program.append(f"--config-file={_CONFIG}")
    settings = {
        "LD_LIBRARY_PATH": str(LIBNVML),
        "FAKE_CUDA_STATE": str(machine.state),
        "FAKE_CUDA_VISIBLE": "all",
        "DP_DISABLE_HEALTHCHECKS": "all",
        "DEVICE_DISCOVERY_STRATEGY": "nvml",
        **(env or {}),
    }
    return machine.real.start(name, program, env={**os.environ, **settings})


def await_gpus(cluster: Cluster, node: str, count: int, plugin: Service, *, timeout: float = 60.0) -> None:
    """Wait until a Node has so many GPUs of the device plugin for pods."""

    def known() -> bool:
        status = cluster.api.get(f"/api/v1/nodes/{node}")["status"]
        return int(status.get("allocatable", {}).get(DEVICE_PLUGIN_RESOURCE, 0)) == count

    try:
        wait_until(known, what=f"{count} GPUs of the device plugin", timeout=timeout)
    except HarnessError as error:
        raise HarnessError(f"{plugin.log_tail()}\n{error}") from None
