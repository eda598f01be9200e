"""The double of NVML reports the processes' use of the simulated devices, and the agent's inventory reads it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from doubles.gpus import create_state
from hook.conftest import BUILD, DEVICE_MEMORY, GPU_0, GPU_1, MIB
from hook.world.probe import Probe

READ = """
import asyncio, json, pathlib, sys
from sharepod.agent.devices.nvml import NvmlInventory
reading = asyncio.run(NvmlInventory(20.0).read())
pathlib.Path(sys.argv[1]).write_text(json.dumps({
    "gpus": [[gpu.uuid, gpu.memory, gpu.health, gpu.model] for gpu in reading.gpus],
    "processes": [[process.pid, process.uuid, process.memory] for process in reading.processes],
    "unread": sorted(reading.unread),
}))
"""


@pytest.mark.parametrize(("visible", "seen"), [("all", [GPU_0, GPU_1]), (GPU_1, [GPU_1])])
def test_the_agents_inventory_reads_the_simulated_devices(
    tmp_path: Path, double: Path, visible: str, seen: list[str]
) -> None:
    state = create_state(
        tmp_path / "gpus", [(gpu, "Simulated GPU", DEVICE_MEMORY) for gpu in (GPU_0, GPU_1)], context_bytes=3 * MIB
    )
    environment = os.environ | {
        "LD_LIBRARY_PATH": f"{double}:{BUILD / 'doubles' / 'libnvml'}",
        "FAKE_CUDA_STATE": str(state),
        "FAKE_CUDA_VISIBLE": visible,
        "CUDA_VISIBLE_DEVICES": "0",
        "FAKE_NVML_RESERVED": str(64 * MIB),
    }
    probe = Probe(environment)
    killed = Probe(environment)
    try:
        for one in (probe, killed):
            one.start_cuda()
            one.ok("alloc", 5 * MIB)
        killed.kill()
        answer = tmp_path / "answer"
        done = subprocess.run(
            [sys.executable, "-c", READ, str(answer)],
            env=environment,
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )
        assert done.returncode == 0, done.stderr
        answer_of = json.loads(answer.read_text())
        capacity = DEVICE_MEMORY - 64 * MIB
        assert answer_of["gpus"] == [[gpu, capacity, "Healthy", "Simulated GPU"] for gpu in seen]
        assert answer_of["processes"] == [[probe.pid, seen[0], 8 * MIB]]
        assert answer_of["unread"] == []
    finally:
        probe.close()
        killed.close()
