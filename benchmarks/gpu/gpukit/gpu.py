"""The measured GPU: a real one, or the fake driver's.

The real GPU is read by a separate program with a time limit, the fake driver's state from its shared file. A GPU
without NVML can be measured, too; the memory use of its processes is then unknown.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

_READING_S = 30.0
_FAKE_UUID = "GPU-f0000000-0000-4000-8000-000000000001"
_FAKE_MEMORY = 16 << 30


class GpuError(Exception):
    """Raised if no GPU can be measured. The message lists the attempts."""


@dataclass(frozen=True)
class Use:
    """Device memory in use, in bytes: in total, and by process if the driver reports processes. Keys are the pids that
    the driver reports."""

    device: int
    processes: Mapping[int, int] | None


class Gpu:
    """A real GPU. `inventory`: description of the GPU for the agent if there is no NVML, else None."""

    fake = False

    def __init__(self, kit: Path, site: Path, index: int) -> None:
        self._command = [sys.executable, str(kit / "gpukit" / "nvml_reading.py")]
        self._site = site
        self.index = index
        self.driver = "unknown"
        self.inventory: list[dict[str, Any]] | None = None
        self.trouble = ""
        try:
            reading = self._nvml()
        except GpuError as error:
            self.trouble = str(error)
            reading = self._probe(kit)
            self.inventory = reading["gpus"]
        gpus = reading["gpus"]
        if index >= len(gpus):
            raise GpuError(f"there is no GPU {index}; the driver shows {len(gpus)}")
        self.driver = str(reading.get("driver", "unknown"))
        self.uuid = str(gpus[index]["uuid"])
        self.model = str(gpus[index]["model"])
        self.memory = int(gpus[index]["memory"])
        if gpus[index].get("mig"):
            raise GpuError(f"GPU {index} is in MIG mode; such a GPU is not shared")

    def environment(self, label: str) -> dict[str, str]:
        """Return the environment of a program on this GPU. `label`: name of the program, for the fake driver."""
        return {"CUDA_VISIBLE_DEVICES": self.uuid}

    def use(self) -> Use | None:
        """Return the memory in use now. None if it is unknown."""
        try:
            gpu = self._nvml()["gpus"][self.index]
        except GpuError:
            return None
        listed = gpu["processes"]
        if listed is None:
            return Use(gpu["used"], None)
        return Use(gpu["used"], {int(pid): used for pid, used in listed.items() if used is not None})

    def _nvml(self) -> dict[str, Any]:
        return _json_of(self._command, {"PYTHONPATH": str(self._site), "PATH": "/usr/bin:/bin"} | _loader_path())

    def _probe(self, kit: Path) -> dict[str, Any]:
        reading = _json_of([sys.executable, str(kit / "workloads" / "driver_probe.py")], _loader_path())
        if not reading["gpus"]:
            raise GpuError("the CUDA driver shows no GPU")
        return reading


class FakeGpu:
    """One device of the fake driver in the kit's `fake` folder."""

    fake = True
    driver = "fake"
    model = "Fake"
    uuid = _FAKE_UUID
    memory = _FAKE_MEMORY
    index = 0
    trouble = "the fake driver has no NVML"

    def __init__(self, folder: Path, state: Path) -> None:
        if not (folder / "libcuda.so.1").is_file():
            raise GpuError(f"there is no fake driver in {folder}; make the kit with `make gpu-kit`")
        self._folder = folder
        self._state = state
        self._books = _load(folder / "gpus.py")
        self._books.create_state(state, [(self.uuid, self.model, self.memory)])
        self.inventory = [{"uuid": self.uuid, "index": 0, "model": self.model, "memory": self.memory}]

    def environment(self, label: str) -> dict[str, str]:
        """Return the environment of a program on this GPU. `label`: name of the program in the records of the fake
        driver."""
        return {
            "LD_LIBRARY_PATH": str(self._folder),
            "FAKE_CUDA_STATE": str(self._state),
            "FAKE_CUDA_VISIBLE": self.uuid,
            "FAKE_CUDA_LABEL": label,
            "FAKE_CUDA_SLICE_US": "1024",
            "FAKE_CUDA_SWITCH_US": "91",
        }

    def use(self) -> Use | None:
        """Return the memory in use now, by the records of the fake driver."""
        by_pid = {
            client.pid: client.usage[self.uuid].memory
            for client in self._books.read_state(self._state).clients
            if client.alive
        }
        return Use(sum(by_pid.values()), by_pid)


AnyGpu = Gpu | FakeGpu


def _loader_path() -> dict[str, str]:
    import os

    path = os.environ.get("LD_LIBRARY_PATH")
    return {"LD_LIBRARY_PATH": path} if path else {}


def _json_of(command: list[str], environment: dict[str, str]) -> dict[str, Any]:
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=_READING_S, check=False)
    except subprocess.TimeoutExpired:
        raise GpuError(f"the driver has not answered within {_READING_S:.0f} s; see `dmesg`") from None
    if done.returncode:
        words = done.stderr.strip().splitlines() or [f"{command[-1]} ended with {done.returncode}"]
        raise GpuError(words[-1])
    reading: dict[str, Any] = json.loads(done.stdout)
    return reading


def _load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location("simulated_gpus", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["simulated_gpus"] = module
    spec.loader.exec_module(module)
    return module
