"""NVML under the hook shows the tenant's limit and use of device memory, as CUDA does. NVIDIA's Python binding queries
it.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hook.world.agent_node import FAKE_CUDA, FAKE_NVML, GI, GPUS, Node, Program, running, tenant, wait_for

MI = 1 << 20

RESERVED = 512 * MI
STRANGER = """
import ctypes, sys
cuda = ctypes.CDLL("libcuda.so.1")
cuda.cuInit(0)
for device in range(3):
    assert cuda.cuCtxCreate_v2(ctypes.byref(ctypes.c_void_p()), 0, device) == 0
    assert cuda.cuMemAlloc_v2(ctypes.byref(ctypes.c_uint64()), ctypes.c_size_t(5 << 30)) == 0
print("there", flush=True)
sys.stdin.read()
"""

ASK = """
import ctypes, json, pynvml, sys
pynvml.nvmlInit()
answers = {}
for index in range(pynvml.nvmlDeviceGetCount()):
    handle = pynvml.nvmlDeviceGetHandleByIndex(index)
    one = pynvml.nvmlDeviceGetMemoryInfo(handle)
    two = pynvml.nvmlDeviceGetMemoryInfo(handle, version=pynvml.nvmlMemory_v2)
    answers[pynvml.nvmlDeviceGetUUID(handle)] = [
        [one.total, one.used, one.free], [two.total, two.used, two.free, two.reserved]]
library = ctypes.CDLL("libnvidia-ml.so.1")
refused = [library.nvmlDeviceGetMemoryInfo(None, None), library.nvmlDeviceGetMemoryInfo_v2(None, None)]
threads = len(__import__("os").listdir("/proc/self/task"))
print(json.dumps({"answers": answers, "refused": refused, "threads": threads}))
"""

ASK_ON_SIGNAL = """
import ctypes, json, pynvml, signal
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
cuda, context = ctypes.CDLL("libcuda.so.1"), ctypes.c_void_p()
assert cuda.cuInit(0) == 0 and cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0) == 0
pynvml.nvmlInit()
while True:
    figures = pynvml.nvmlDeviceGetMemoryInfo(pynvml.nvmlDeviceGetHandleByIndex(0))
    print(json.dumps({"free": figures.free}), flush=True)
    signal.sigwait({signal.SIGUSR1})
"""


@pytest.fixture
def node(tmp_path: Path, double: Path, hook_file: Path) -> Iterator[Node]:
    rows = [
        tenant("a", 0.5, gpus=GPUS[:1]),
        tenant("free", 0.5, gpus=GPUS[1:2], memoryIsolation="None"),
    ]
    with running(tmp_path, *rows, hook_file=str(hook_file)) as node, stranger(node):
        yield node


@contextlib.contextmanager
def stranger(node: Node) -> Iterator[None]:
    """Process of no tenant, with 5 GiB on each of three GPUs."""
    environment = dict(os.environ) | {"LD_LIBRARY_PATH": str(FAKE_CUDA), "FAKE_CUDA_STATE": str(node.state)}
    process = subprocess.Popen(
        [sys.executable, "-S", "-c", STRANGER], env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == b"there\n"
        yield
    finally:
        process.communicate(timeout=20)


def environment(node: Node, tenant_id: str) -> dict[str, str]:
    return dict(os.environ) | {
        "LD_PRELOAD": str(node.path(tenant_id) / "libsharepod.so"),
        "LD_LIBRARY_PATH": f"{FAKE_NVML}:{FAKE_CUDA}",
        "FAKE_CUDA_STATE": str(node.state),
        "FAKE_NVML_RESERVED": str(RESERVED),
        "FAKE_NVML_MIG": "1",
    }


def ask(node: Node, tenant_id: str, program: str = ASK) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=environment(node, tenant_id),
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


@pytest.mark.promise("memory-nvml")
def test_nvml_shows_the_tenants_memory_and_leaves_other_gpus_alone(node: Node) -> None:
    found = ask(node, "a")
    assert found["answers"][GPUS[0]] == [[4 * GI, 0, 4 * GI], [4 * GI, 0, 4 * GI, 0]]
    used = 5 * GI
    untouched = [
        [16 * GI, used + RESERVED, 11 * GI - RESERVED],
        [16 * GI, used, 11 * GI - RESERVED, RESERVED],
    ]
    assert [found["answers"][uuid] for uuid in GPUS[1:3]] == [untouched] * 2, "not limited, and not its own"
    assert len(found["answers"]) == len(GPUS) + 1, "an instance of MIG belongs to no tenant"
    assert found["refused"] == [2, 2], "the driver's own errors stay"


@pytest.mark.promise("memory-nvml")
def test_nvml_shows_what_the_tenants_other_processes_use(node: Node) -> None:
    program = node.launch("a", "--memory", "1G", "--seconds", "60")
    assert program.report()["event"] == "start"
    total, used, free = ask(node, "a")["answers"][GPUS[0]][0]
    assert total == 4 * GI
    assert GI <= used <= GI + 64 * MI
    assert free == total - used
    program.end()


@pytest.mark.promise("memory-nvml-looking")
def test_asking_nvml_does_not_make_a_process_one_that_uses_the_gpu(node: Node) -> None:
    assert ask(node, "a")["threads"] == 1
    node.stop_agent()
    assert "client connected" not in node.log()


@pytest.mark.promise("memory-nvml-agent-away")
def test_without_an_agent_no_memory_is_shown_free_that_may_not_be(node: Node) -> None:
    node.stop_agent()
    assert ask(node, "a")["answers"][GPUS[0]][0] == [4 * GI, 4 * GI, 0]


def test_what_nvml_asks_of_itself_is_its_own(tmp_path: Path, double: Path, hook_file: Path) -> None:
    """NVML's first function calls its second one by name. In that call the hook must return NVML's own byte counts,
    with the memory that the driver reserves.
    """
    with running(tmp_path, tenant("a", 0.5), hook_file=str(hook_file)) as node:
        node.stop_agent()
        assert ask(node, "a")["answers"][GPUS[0]][0] == [4 * GI, RESERVED, 4 * GI - RESERVED]


def test_memory_that_is_not_enforced_is_shown_as_the_driver_does(node: Node) -> None:
    assert ask(node, "free")["answers"][GPUS[1]][0] == [16 * GI, 5 * GI + RESERVED, 11 * GI - RESERVED]


def test_a_program_that_uses_cuda_sees_the_same_by_nvml_and_by_cuda(node: Node) -> None:
    program = """
import ctypes, json, pynvml
cuda = ctypes.CDLL("libcuda.so.1")
context, address = ctypes.c_void_p(), ctypes.c_uint64()
free, total = ctypes.c_size_t(), ctypes.c_size_t()
assert cuda.cuInit(0) == 0 and cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0) == 0
assert cuda.cuCtxSetCurrent(context) == 0 and cuda.cuMemAlloc_v2(ctypes.byref(address), 1 << 20) == 0
assert cuda.cuMemGetInfo_v2(ctypes.byref(free), ctypes.byref(total)) == 0
pynvml.nvmlInit()
one = pynvml.nvmlDeviceGetMemoryInfo(pynvml.nvmlDeviceGetHandleByIndex(0))
print(json.dumps({"cuda": [total.value, free.value], "nvml": [one.total, one.free]}))
"""
    found = ask(node, "a", program)
    assert found["cuda"] == found["nvml"]
    assert found["cuda"][0] == 4 * GI


@pytest.mark.promise("memory-siblings-remembered")
def test_without_an_agent_a_program_that_uses_cuda_sees_its_tenants_use_by_nvml(node: Node) -> None:
    sibling = node.launch("a", "--memory", "1G", "--seconds", "60")
    assert sibling.report()["event"] == "start"
    program = Program([sys.executable, "-c", ASK_ON_SIGNAL], environment(node, "a"))
    try:
        before = program.report()["free"]
        node.stop_agent()
        program.process.send_signal(signal.SIGUSR1)
        assert program.report()["free"] == before
        assert 2 * GI < before <= 3 * GI, "not without the 5 GiB of a process of no tenant"
    finally:
        program.close()
        sibling.end()


def test_a_client_that_only_observes_may_ask_and_nothing_else(node: Node) -> None:
    program = """
import json, socket, sys
from sharepod import protocol as p
def observer():
    s = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    s.connect(sys.argv[1])
    s.send(p.encode(p.Hello(1, 1, observes=True)))
    assert isinstance(p.parse_agent(s.recv(2048)), p.Welcome)
    return s
asking, wanting = observer(), observer()
asking.send(p.encode(p.MemInfo(7, 0, 0)))
answer = p.parse_agent(asking.recv(2048))
wanting.send(p.encode(p.Want(1)))
print(json.dumps([answer.limit, answer.used, len(wanting.recv(2048))]))
"""
    command = [sys.executable, "-c", program, str(node.path("a") / "agent.sock")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=30)
    assert json.loads(done.stdout or done.stderr) == [4 * GI, 0, 0]
    wait_for(lambda: "declared itself an observer" in node.log(), "the complaint")
