"""The agent in two processes on a faulty node: the driver hangs or is missing, the disk is read-only, the supervisor is
killed.
"""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest
from doubles.gpus import create_state
from hook.world.agent_node import FAKE_NVML
from sharepod import protocol
from unit.agent.apart.test_two_processes import apart, parts
from unit.agent.client import GI, GPU0, GPU1, Client, until
from unit.agent.program import Program, running, tenant_directory, value
from unit.agent.small_disk import small_disk

pytestmark = [
    pytest.mark.skipif(os.geteuid() != 0, reason="only root can take rights away"),
    pytest.mark.skipif(not FAKE_NVML.exists(), reason="not built"),
]

MI = 1 << 20

_WITH_A_LEDGER_ON_DISK = """
import os, sys
from sharepod.agent import main
from sharepod.agent.apart.distant_agent import DistantAgent
del os.environ["SHAREPOD_AGENT_INVENTORY_FILE"]
take_stock = DistantAgent.take_stock
DistantAgent.take_stock = lambda self, *, needed=True: take_stock(self, needed=False)
sys.exit(main.main(["--apart"]))
"""


async def _with_nvml(directory: Path, **changes: str) -> Program:
    return await Program.start(
        directory,
        script=_WITH_A_LEDGER_ON_DISK,
        LD_LIBRARY_PATH=str(FAKE_NVML),
        FAKE_CUDA_STATE=str(directory / "devices"),
        SHAREPOD_AGENT_NVML_TIMEOUT_S="1",
        **changes,
    )


def _plug_in(directory: Path) -> None:
    create_state(directory / "devices", [(gpu, "Simulated", 16 * GI) for gpu in (GPU0, GPU1)])


@pytest.mark.promise("node-driver-hangs")
async def test_a_driver_that_hangs_from_the_start_keeps_no_tenant_waiting(directory: Path) -> None:
    _plug_in(directory)
    stuck = directory / "stuck"
    stuck.touch()
    program = await _with_nvml(directory, FAKE_NVML_HANG=str(stuck))
    await program.logged("tenant is served")
    client = await Client.connect(tenant_directory(directory, "a"))
    assert await client.reserve(GI) == GI
    error = await program.logged("cannot read the inventory", lambda line: "within 1 s" in line["error"])
    assert "dmesg" in error["error"]
    os.kill(parts(program)["privileged"], signal.SIGKILL)
    await program.logged("this agent serves", times=2)
    assert await client.reserve(GI, seq=2) == GI, "while the next privileged process hangs too"
    assert [line for line in program.log if line["event"] == "inventory"] == []
    stuck.unlink()
    assert len((await program.logged("inventory", lambda line: "gpus" in line))["gpus"]) == 2
    client.close()
    assert await program.end() == 0


@pytest.mark.promise("node-inventory-missing")
async def test_a_driver_that_is_missing_at_the_start_is_found_once_it_is_there(directory: Path) -> None:
    program = await _with_nvml(directory)
    await program.logged("tenant is served")
    await program.logged("cannot read the inventory", lambda line: "is the NVIDIA driver installed" in line["error"])
    client = await Client.connect(tenant_directory(directory, "a"))
    assert await client.reserve(GI) == GI
    _plug_in(directory)
    await program.logged("inventory", lambda line: len(line.get("gpus", ())) == 2)
    client.close()
    assert await program.end() == 0


@pytest.mark.promise("node-full-disk")
async def test_an_agent_that_starts_on_a_read_only_disk_says_so_and_serves_once_it_can_write(directory: Path) -> None:
    with small_disk(directory / "state") as disk:
        async with apart(directory) as before:
            assert await before.end() == 0
        with disk.read_only():
            async with running(directory, arguments=["--apart"]) as program:
                trouble = await program.logged("cannot apply the tenants; trying again")
                assert "Read-only file system" in trouble["error"]
                assert program.process.returncode is None
                assert await program.end() == 0
        async with apart(directory) as after:
            (await Client.connect(tenant_directory(directory, "a"))).close()
            assert await after.end() == 0


@pytest.mark.promise("node-handover")
async def test_after_a_supervisor_that_was_killed_under_load_the_next_agent_knows_what_each_process_has(
    directory: Path,
) -> None:
    async with apart(directory) as program:
        client = await Client.connect(tenant_directory(directory, "a"))
        assert await client.reserve(3 * GI) == 3 * GI
        done = 0

        async def load() -> None:
            nonlocal done
            while True:
                assert await client.reserve(MI, seq=2 + done) == MI
                client.send(protocol.Release(0, MI))
                done += 1

        loading = asyncio.create_task(load())
        await until(lambda: done > 100)
        children = parts(program).values()
        program.process.kill()
        await until(lambda: not any(Path(f"/proc/{child}").exists() for child in children))
        loading.cancel()
        await asyncio.gather(loading, return_exceptions=True)
        await program.ended()
        async with apart(directory) as following:
            assert (await following.logged("taken over from the earlier agent"))["processes"] == 1
            _status_code, metrics = await following.get("/metrics")
            assert 0 <= value(metrics, "sharepod_tenant_memory_used_bytes", tenant="a") - 3 * GI <= 2 * MI
            client.close()
            assert await following.end() == 0
