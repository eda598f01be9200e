"""How the hook starts: not without a device, and its thread where the process may run."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from hook.conftest import MakeTenant, Tenant
from hook.world.probe import NO_DEVICE, Probe

WITHOUT_DEVICE = """
import ctypes, os
cuda = ctypes.CDLL("libcuda.so.1")
out = ctypes.c_uint64()
print(cuda.cuInit(0), cuda.cuMemAlloc_v2(ctypes.byref(out), ctypes.c_size_t(8)), cuda.cuCtxSynchronize())
print(len(os.listdir("/proc/self/task")))
"""


@pytest.mark.promise("program-no-device")
def test_where_there_is_no_device_the_hook_starts_nothing_and_says_nothing(make_tenant: MakeTenant) -> None:
    """Not even where the agent has not written what the tenant is granted."""
    tenant = make_tenant(limits=False)
    done = subprocess.run(
        [sys.executable, "-S", "-c", WITHOUT_DEVICE],
        env=tenant.environment(FAKE_CUDA_VISIBLE="void"),
        capture_output=True,
        text=True,
        check=False,
        timeout=20,
    )
    codes, threads = done.stdout.splitlines()
    assert codes.split()[0] == str(NO_DEVICE)
    assert "0" not in codes.split()
    assert (threads, done.stderr) == ("1", "")


def thread_named(probe: Probe, name: str) -> int:
    for task in Path(f"/proc/{probe.pid}/task").iterdir():
        if (task / "comm").read_text().strip() == name:
            return int(task.name)
    raise AssertionError(f"no thread {name}")


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one processor: nothing to choose")
@pytest.mark.promise("program-processors")
def test_the_hooks_thread_runs_where_the_process_may(tenant: Tenant) -> None:
    """The first call comes from a thread that is bound to one processor."""
    agent = tenant.agent()
    probe = tenant.probe()
    probe.ok("pin", min(os.sched_getaffinity(0)), thread="pinned")
    probe.start_cuda(thread="pinned")
    agent.client()
    assert os.sched_getaffinity(thread_named(probe, "sharepod")) == os.sched_getaffinity(probe.pid)
