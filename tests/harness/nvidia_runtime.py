"""Replacement for nvidia-container-runtime: runc, plus the devices that NVIDIA_VISIBLE_DEVICES names.

A separate script (python -IS nvidia_runtime.py CONFIG runc's arguments...); containerd calls it like runc. CONFIG is a
JSON file of the node: `runc` (path), `gpus` (list of `uuid`, `model`), and optionally `libcuda`, `libnvml`,
`nvidia_smi` (files put into the container) and `state` (the simulated devices' shared file).

Guarantees: like NVIDIA's, it reads the variable from the container's own environment at creation. Unset, empty or
`void` changes nothing; `none` gives the driver and no device; `all`, indices and UUIDs give devices. An unknown device
is refused, with the reason where containerd reads it.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

_LIBRARIES = "/usr/lib/x86_64-linux-gnu" if os.uname().machine == "x86_64" else "/usr/lib/aarch64-linux-gnu"
_STATE = "/run/fake-cuda-state"


class UnknownDeviceError(Exception):
    pass


def chosen(asked: str, gpus: list[dict[str, str]]) -> list[dict[str, str]] | None:
    """Return the GPUs that a value of NVIDIA_VISIBLE_DEVICES names. None if the container stays unchanged."""
    if asked in ("", "void"):
        return None
    if asked == "none":
        return []
    if asked == "all":
        return gpus
    by_name = {str(index): gpu for index, gpu in enumerate(gpus)} | {gpu["uuid"]: gpu for gpu in gpus}
    names = [name.strip() for name in asked.split(",") if name.strip()]
    if unknown := [name for name in names if name not in by_name]:
        raise UnknownDeviceError(f"nvidia-container-cli: device error: {unknown[0]}: unknown device")
    return [by_name[name] for name in names]


def inject(spec: dict[str, Any], config: dict[str, Any]) -> bool:
    """Change an OCI spec in place, as the container's environment requires. Return whether it was changed."""
    variables: list[str] = spec["process"].setdefault("env", [])
    environment = dict(variable.split("=", 1) for variable in variables if "=" in variable)
    gpus = chosen(environment.get("NVIDIA_VISIBLE_DEVICES", ""), config["gpus"])
    if gpus is None:
        return False

    def mount(source: str | None, target: str, access: str) -> None:
        if source:
            options = ["rbind", access, "nosuid", "nodev"]
            spec.setdefault("mounts", []).append(
                {"destination": target, "type": "bind", "source": source, "options": options}
            )

    mount(config.get("libcuda"), f"{_LIBRARIES}/libcuda.so.1", "ro")
    mount(config.get("libnvml"), f"{_LIBRARIES}/libnvidia-ml.so.1", "ro")
    mount(config.get("nvidia_smi"), "/usr/bin/nvidia-smi", "ro")
    mount(config.get("state"), _STATE, "rw")
    notes = spec.get("annotations") or {}
    where = ("sandbox-namespace", "sandbox-name", "container-name")
    label = "/".join(notes.get(f"io.kubernetes.cri.{name}", "") for name in where)
    variables += [
        "FAKE_GPUS=" + ";".join(f"{gpu['uuid']}={gpu['model']}" for gpu in gpus),
        f"FAKE_CUDA_STATE={_STATE}",
        f"FAKE_CUDA_VISIBLE={','.join(gpu['uuid'] for gpu in gpus)}",
        f"FAKE_CUDA_LABEL={label}",
        # The simulated devices record each process's pid as its own container sees it. In another container that pid
        # has no meaning, so NVML lists no processes.
        "FAKE_NVML_PROCESSES=none",
    ]
    return True


def _option(arguments: list[str], *names: str) -> str | None:
    for at, argument in enumerate(arguments):
        for name in names:
            if argument == name and at + 1 < len(arguments):
                return arguments[at + 1]
            if argument.startswith(f"{name}="):
                return argument.split("=", 1)[1]
    return None


def main() -> None:
    config = json.loads(Path(sys.argv[1]).read_text())
    arguments = sys.argv[2:]
    bundle = _option(arguments, "--bundle", "-b")
    if "create" in arguments and bundle is not None:
        path = Path(bundle) / "config.json"
        spec = json.loads(path.read_text())
        try:
            if inject(spec, config):
                path.write_text(json.dumps(spec))
        except UnknownDeviceError as error:
            if log := _option(arguments, "--log"):
                with Path(log).open("a") as file:
                    file.write(json.dumps({"level": "error", "msg": str(error)}) + "\n")
            sys.exit(str(error))
    os.execv(config["runc"], [config["runc"], *arguments])


if __name__ == "__main__":
    main()
