"""How the hook starts: only if there is a device. Its thread may run where the process may, and as promptly as other
threads.
"""

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
    """Without a device the hook does not even wait for the agent's file `limits`."""
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
    """The first CUDA call, which starts the hook thread, comes from a thread that is bound to one processor."""
    agent = tenant.agent()
    probe = tenant.probe()
    probe.ok("pin", min(os.sched_getaffinity(0)), thread="pinned")
    probe.start_cuda(thread="pinned")
    agent.client()
    assert os.sched_getaffinity(thread_named(probe, "sharepod")) == os.sched_getaffinity(probe.pid)


def may_raise() -> bool:
    """Return whether a thread of this process may lower its nice value."""
    return subprocess.run(["nice", "-n", "-1", "true"], capture_output=True, check=False).stderr == b""


@pytest.mark.skipif(not may_raise(), reason="nice values can only be raised here")
@pytest.mark.promise("program-niceness")
def test_the_hooks_thread_does_not_run_behind_all_others(tenant: Tenant) -> None:
    """The first CUDA call, which starts the hook thread, comes from a thread that runs only when no other thread does
    (SCHED_IDLE).
    """
    agent = tenant.agent()
    probe = tenant.probe()
    probe.ok("sink", 19, thread="last")
    probe.start_cuda(thread="last")
    agent.client()
    thread = thread_named(probe, "sharepod")
    assert os.sched_getscheduler(thread) == os.SCHED_OTHER
    assert os.getpriority(os.PRIO_PROCESS, thread) == 0
