"""CDI specification of simulated GPUs, in place of the output of `nvidia-ctk cdi generate` for real GPUs.

Pure. A container with such a device has the driver's library, and a marker of each of its GPUs in place of device
nodes. Variables of the container do not choose its devices.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

KIND = "nvidia.com/gpu"
LIBRARIES = "/usr/lib/x86_64-linux-gnu" if os.uname().machine == "x86_64" else "/usr/lib/aarch64-linux-gnu"
_STATE = "/run/fake-cuda-state"
_DEVICES = "/run/fake-cuda-devices"


def specification(uuids: Sequence[str], markers: Path, *, libcuda: Path | None, state: Path | None) -> dict[str, Any]:
    """Return the specification of the GPUs, named by index and by UUID.

    Args:
        uuids: the GPUs, by index.
        markers: folder of the node with a file for each UUID.
        libcuda: put into containers as libcuda.so.1.
        state: the simulated devices' shared file.
    """
    files = [(libcuda, f"{LIBRARIES}/libcuda.so.1", "ro"), (state, _STATE, "rw")]
    mounts = [_mount(source, target, access) for source, target, access in files if source is not None]
    # As in NVIDIA's specification: with the value `void`, NVIDIA's runtime adds no devices by the variable.
    env = ["NVIDIA_VISIBLE_DEVICES=void", f"FAKE_CUDA_STATE={_STATE}", f"FAKE_CUDA_DEVICES={_DEVICES}"]
    devices = [
        {"name": name, "containerEdits": {"mounts": [_mount(markers / uuid, f"{_DEVICES}/{uuid}", "ro")]}}
        for index, uuid in enumerate(uuids)
        for name in (str(index), uuid)
    ]
    return {"cdiVersion": "0.6.0", "kind": KIND, "containerEdits": {"env": env, "mounts": mounts}, "devices": devices}


def _mount(source: Path, target: str, access: str) -> dict[str, Any]:
    return {"hostPath": str(source.resolve()), "containerPath": target, "options": ["rbind", access, "nosuid", "nodev"]}
