"""What NVML says of device memory under the hook: the tenant's view, as CUDA's, by the real Python binding."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hook.agent_node import FAKE_CUDA, GI, GPUS, Node, running, tenant, wait_for

MI = 1 << 20
FOREIGN = "GPU-99999999-0000-0000-0000-000000000009"

# As much of NVML as the binding needs: devices of 16 GiB, 5 of them used by whoever, half a GiB the driver's own.
FAKE_NVML = """
#include <stdio.h>
#include <string.h>
#define GI (1ull << 30)
static const char *const uuids[] = {%s};
int nvmlInitWithFlags(unsigned flags) { return flags != 0; }
int nvmlInit_v2(void) { return 0; }
int nvmlShutdown(void) { return 0; }
const char *nvmlErrorString(int result) { return result == 13 ? "Function Not Found" : "error"; }
int nvmlDeviceGetCount_v2(unsigned *count) { *count = sizeof uuids / sizeof *uuids; return 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned i, void **device) { *device = (void *)&uuids[i]; return 0; }
int nvmlDeviceGetUUID(void *device, char *text, unsigned size) {
    return snprintf(text, size, "%%s", *(const char **)device) < (int)size ? 0 : 7;
}
struct v1 { unsigned long long total, free, used; };
struct v2 { unsigned version; unsigned long long total, reserved, free, used; };
int nvmlDeviceGetMemoryInfo(void *device, struct v1 *memory) {
    if (device == NULL || memory == NULL) return 2;
    *memory = (struct v1){16 * GI, 11 * GI, 5 * GI};
    return 0;
}
int nvmlDeviceGetMemoryInfo_v2(void *device, struct v2 *memory) {
    if (device == NULL || memory == NULL) return 2;
    if (memory->version != 0x02000028) return 25;
    *memory = (struct v2){memory->version, 16 * GI, GI / 2, 21 * GI / 2, 5 * GI};
    return 0;
}
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


@pytest.fixture(scope="module")
def nvml(tmp_path_factory: pytest.TempPathFactory, double: Path) -> Path:
    """The folder of a fake NVML."""
    folder = tmp_path_factory.mktemp("nvml")
    uuids = ", ".join(f'"{uuid}"' for uuid in (*GPUS[:2], FOREIGN, "MIG-10000000-0000-0000-0000-000000000001"))
    (folder / "nvml.c").write_text(FAKE_NVML % uuids)
    command = ["cc", "-shared", "-fPIC", "-Wl,-soname,libnvidia-ml.so.1", "-o", str(folder / "libnvidia-ml.so.1")]
    subprocess.run([*command, str(folder / "nvml.c")], check=True, timeout=60)
    return folder


@pytest.fixture
def node(tmp_path: Path, hook_file: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Node]:
    rows = [
        tenant("a", 0.5, gpus=GPUS[:1]),
        tenant("free", 0.5, gpus=GPUS[1:2], memoryIsolation="None"),
    ]
    with running(tmp_path, *rows, hook_file=str(hook_file)) as node:
        yield node


def ask(node: Node, nvml: Path, tenant_id: str, program: str = ASK) -> dict[str, Any]:
    environment = dict(os.environ) | {
        "LD_PRELOAD": str(node.path(tenant_id) / "libsharepod.so"),
        "LD_LIBRARY_PATH": f"{nvml}:{FAKE_CUDA}",
    }
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 0, done.stderr
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def test_nvml_shows_the_tenants_memory_and_leaves_other_gpus_alone(node: Node, nvml: Path) -> None:
    found = ask(node, nvml, "a")
    assert found["answers"][GPUS[0]] == [[4 * GI, 0, 4 * GI], [4 * GI, 0, 4 * GI, 0]]
    untouched = [[16 * GI, 5 * GI, 11 * GI], [16 * GI, 5 * GI, 21 * GI // 2, GI // 2]]
    assert [found["answers"][uuid] for uuid in (*GPUS[1:2], FOREIGN)] == [untouched] * 2
    assert found["refused"] == [2, 2], "the driver's own errors stay"


def test_nvml_shows_what_the_tenants_other_processes_use(node: Node, nvml: Path) -> None:
    program = node.launch("a", "--memory", "1G", "--seconds", "60")
    assert program.report()["event"] == "start"
    total, used, free = ask(node, nvml, "a")["answers"][GPUS[0]][0]
    assert total == 4 * GI
    assert GI <= used <= GI + 64 * MI
    assert free == total - used
    program.end()


def test_asking_nvml_does_not_make_a_process_one_that_uses_the_gpu(node: Node, nvml: Path) -> None:
    assert ask(node, nvml, "a")["threads"] == 1
    node.stop_agent()
    assert "client connected" not in node.log()


def test_without_an_agent_no_memory_is_shown_free_that_may_not_be(node: Node, nvml: Path) -> None:
    node.stop_agent()
    assert ask(node, nvml, "a")["answers"][GPUS[0]][0] == [4 * GI, 4 * GI, 0]


def test_memory_that_is_not_enforced_is_shown_as_the_driver_does(node: Node, nvml: Path) -> None:
    assert ask(node, nvml, "free")["answers"][GPUS[1]][0] == [16 * GI, 5 * GI, 11 * GI]


def test_a_program_that_uses_cuda_sees_the_same_by_nvml_and_by_cuda(node: Node, nvml: Path) -> None:
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
    os.environ["FAKE_CUDA_STATE"] = str(node.state)
    try:
        found = ask(node, nvml, "a", program)
    finally:
        del os.environ["FAKE_CUDA_STATE"]
    assert found["cuda"] == found["nvml"]
    assert found["cuda"][0] == 4 * GI


def test_a_client_that_only_observes_may_ask_and_nothing_else(node: Node) -> None:
    program = """
import json, socket, sys
from sharepod import protocol as p
def observer():
    s = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    s.connect(sys.argv[1])
    s.send(p.encode(p.Hello(1, 1, observes=True)))
    assert isinstance(p.parse_daemon(s.recv(2048)), p.Welcome)
    return s
asking, wanting = observer(), observer()
asking.send(p.encode(p.MemInfo(7, 0, 0)))
answer = p.parse_daemon(asking.recv(2048))
wanting.send(p.encode(p.Want(1)))
print(json.dumps([answer.limit, answer.used, len(wanting.recv(2048))]))
"""
    command = [sys.executable, "-c", program, str(node.path("a") / "agent.sock")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=30)
    assert json.loads(done.stdout or done.stderr) == [4 * GI, 0, 0]
    wait_for(lambda: "only observes" in node.log(), "the complaint")
