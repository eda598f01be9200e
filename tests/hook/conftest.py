"""Fixtures of the tests of the hook: the double of libcuda, the hook itself, tenants with a scripted agent.

Guarantees:
- The double, the hook and the programs are built once per session, into build/.
- No process, socket or file outlives its test.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from doubles.gpus import State, create_state, read_state
from sharepod.protocol import GpuTerms

from hook.world.child import end
from hook.world.hook_build import built_hook
from hook.world.probe import Probe
from hook.world.scripted_agent import ScriptedAgent

if TYPE_CHECKING:
    from hook.world.lifecycle import Life

ROOT = Path(__file__).resolve().parents[2]
BUILD = ROOT / "build"
GPU_0 = "GPU-10000000-0000-4000-8000-000000000000"
GPU_1 = "GPU-10000000-0000-4000-8000-000000000001"
MIB = 1 << 20
DEVICE_MEMORY = 1024 * MIB
TENANT_MEMORY = 256 * MIB


_BESIDE_OTHERS = {
    "doubles/test_libcuda_calls.py",
    "doubles/test_libcuda_memory.py",
    "doubles/test_libcuda_sharing.py",
    "doubles/test_libnvml.py",
    "test_gpu_kit.py",
    "life/test_randomlife.py",
    "life/test_soak_memory.py",
    "memory/test_arrays.py",
    "memory/test_contexts.py",
    "memory/test_exported.py",
    "memory/test_graph_memory.py",
    "memory/test_limit.py",
    "memory/test_memory.py",
    "memory/test_memory_table.py",
    "memory/test_nvml.py",
    "memory/test_pools.py",
    "memory/test_refused.py",
    "memory/test_shareable_pools.py",
    "memory/test_shared.py",
    "memory/test_virtual.py",
    "process/test_error_codes.py",
    "process/test_file.py",
    "process/test_loading.py",
    "process/test_portable.py",
    "process/test_resolution.py",
    "process/test_table.py",
    "time/test_capture.py",
    "time/test_handles.py",
    "time/test_regimes.py",
    "time/test_work.py",
}
"""Files (relative to this folder) whose tests do not measure time: other tests may run at the same time."""

_IN_PAIRS = {
    "memory/test_importers.py",
    "memory/test_truth.py",
    "process/test_admission.py",
    "process/test_devices.py",
    "process/test_ends.py",
    "process/test_ends_between.py",
    "process/test_harmless.py",
    "process/test_life.py",
    "process/test_skew.py",
    "process/test_start.py",
    "time/test_crossings.py",
    "time/test_graphs.py",
    "time/test_orders.py",
    "time/test_queue.py",
    "time/test_samples.py",
}
"""Files (relative to this folder) whose tests mostly wait, for a scripted agent or for a short time, and use a small
part of one processor: one other test may run at the same time.
"""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests of the hook `alone`. Exceptions: files whose tests may run with any others have no mark; files
    whose tests may run with one other test have the mark `paired`.
    """
    here = Path(__file__).parent
    absent = [file for file in _BESIDE_OTHERS | _IN_PAIRS if not (here / file).is_file()]
    assert not absent, f"{__file__} names files that are not there: {absent}"
    for item in items:
        if here in item.path.parents and (file := str(item.path.relative_to(here))) not in _BESIDE_OTHERS:
            item.add_marker(pytest.mark.alone)
            if file in _IN_PAIRS:
                item.add_marker(pytest.mark.paired)


@pytest.fixture(scope="session")
def double() -> Path:
    """Folder of the simulated libcuda.so.1. Builds it, and the programs of the tests, if they are out of date."""
    command = ["make", "-C", str(ROOT / "tests" / "doubles"), f"PYTHON={sys.executable}"]
    BUILD.mkdir(exist_ok=True)
    with (BUILD / "doubles.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # several workers may build at the same time
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return BUILD / "doubles" / "libcuda"


@pytest.fixture(scope="session")
def hook_file() -> Path:
    """File of the hook as it ships."""
    return built_hook(BUILD / "hook" / "libsharepod.so")


@pytest.fixture(scope="session")
def hasty_hook_file() -> Path:
    """Hook with short timeouts: 1 s for the file `limits` to appear, 1.5 s for memory without an agent, 0.5 s until a
    silent agent counts as absent. Only two threads get slots of their own.
    """
    define = "SHAREPOD_START_WAIT_MS=1000,SHAREPOD_MEMORY_WAIT_MS=1500,SHAREPOD_PING_MS=500,SHAREPOD_GATE_SLOTS=2"
    return built_hook(BUILD / "hook-hasty" / "libsharepod.so", define=define)


def terms(
    gpu: str = GPU_0,
    *,
    request: int = 500,
    limit: int = 1000,
    memory: int = TENANT_MEMORY,
    enforced: bool = True,
    context_kib: int = 0,
) -> GpuTerms:
    uuid = bytes.fromhex(gpu.removeprefix("GPU-").replace("-", ""))
    return GpuTerms(uuid, request, limit, memory, enforced, context_kib)


@dataclass
class Tenant:
    """Directory of one tenant as the agent makes it, and the programs and agents that a test runs in it."""

    directory: Path
    state: Path
    double: Path
    gpus: tuple[GpuTerms, ...]
    agents: list[ScriptedAgent] = field(default_factory=list)
    _ends: list[Callable[[], None]] = field(default_factory=list)

    def write_limits(self) -> None:
        lines = [
            f"gpu {gpu} request {gpu_terms.request_milli} limit {gpu_terms.limit_milli} memory {gpu_terms.memory} "
            f"enforced {int(gpu_terms.enforced)}\n"
            for gpu, gpu_terms in ((_uuid(gpu_terms.uuid), gpu_terms) for gpu_terms in self.gpus)
        ]
        draft = self.directory / "limits.new"
        draft.write_text("# what this tenant was granted\n" + "".join(lines))
        draft.replace(self.directory / "limits")

    def environment(self, label: str = "tenant", *, double: Path | None = None, **more: str) -> dict[str, str]:
        """Return the environment of a program under the hook. `double`: folder of another simulated libcuda.so.1."""
        return {
            "PATH": os.environ["PATH"],
            "LD_PRELOAD": str(self.directory / "libsharepod.so"),
            "LD_LIBRARY_PATH": str(double or self.double),
            "FAKE_CUDA_STATE": str(self.state),
            "FAKE_CUDA_LABEL": label,
            **more,
        }

    def agent(self, *, grace_ms: int = 1000) -> ScriptedAgent:
        agent = ScriptedAgent(self.directory, self.gpus, grace_ms=grace_ms)
        self._ends.append(agent.close)
        self.agents.append(agent)
        return agent

    def probe(
        self, label: str = "tenant", *, double: Path | None = None, more: Mapping[str, str] | None = None, **named: str
    ) -> Probe:
        probe = Probe(self.environment(label, double=double, **named) | dict(more or {}))
        self._ends.append(probe.close)
        return probe

    def loop(
        self,
        *arguments: str,
        label: str = "tenant",
        double: Path | None = None,
        under: tuple[str, ...] = (),
        **more: str,
    ) -> subprocess.Popen[str]:
        """Run launchloop, started through the programs `under`. It ends with the test at the latest."""
        program = [*(str(BUILD / "programs" / name) for name in (*under, "launchloop")), *arguments]
        process = subprocess.Popen(
            program, stdout=subprocess.PIPE, text=True, env=self.environment(label, double=double, **more)
        )
        self._ends.append(lambda: end(process))
        return process

    def read(self) -> State:
        return read_state(self.state)

    def submitted(self, label: str = "tenant") -> int:
        return sum(
            usage.submitted
            for client in self.read().clients
            if client.label == label
            for usage in client.usage.values()
        )

    def until(self, condition: Callable[[], bool], what: str, timeout: float = 10) -> None:
        deadline = time.monotonic() + timeout
        while not condition():
            assert time.monotonic() < deadline, f"waited {timeout} s in vain for {what}"
            time.sleep(0.002)

    def end(self) -> None:
        """End all processes and agents that were started for the tenant, the newest first."""
        for close in reversed(self._ends):
            close()


def _uuid(raw: bytes) -> str:
    text = raw.hex()
    return f"GPU-{text[:8]}-{text[8:12]}-{text[12:16]}-{text[16:20]}-{text[20:]}"


def last_report(process: subprocess.Popen[str], timeout: float = 30) -> dict[str, Any]:
    """Wait for launchloop's end and return its last report. AssertionError if it failed."""
    output, _ = process.communicate(timeout=timeout)
    assert process.returncode == 0, output
    report: dict[str, Any] = json.loads(output.splitlines()[-1])
    return report


MakeTenant = Callable[..., Tenant]


@pytest.fixture
def make_tenant(tmp_path: Path, double: Path, hook_file: Path, hasty_hook_file: Path) -> Iterator[MakeTenant]:
    """Function that makes tenants on one set of two simulated GPUs.

    Its arguments are the tenant's GPUs; `hasty`: use `hasty_hook_file`; `limits`: write the file `limits`.
    """
    state = create_state(
        tmp_path / "gpus", [(GPU_0, "Simulated GPU", DEVICE_MEMORY), (GPU_1, "Simulated GPU", DEVICE_MEMORY)]
    )
    tenants: list[Tenant] = []

    def make(*gpus: GpuTerms, hasty: bool = False, limits: bool = True) -> Tenant:
        directory = tmp_path / f"t{len(tenants)}"
        directory.mkdir()
        shutil.copy2(hasty_hook_file if hasty else hook_file, directory / "libsharepod.so")
        tenant = Tenant(directory, state, double, gpus or (terms(),))
        if limits:
            tenant.write_limits()
        tenants.append(tenant)
        return tenant

    yield make
    for tenant in reversed(tenants):
        tenant.end()


@pytest.fixture
def tenant(make_tenant: MakeTenant) -> Tenant:
    """Tenant with half of the first GPU's time and 256 MiB of its memory."""
    return make_tenant()


@pytest.fixture
def lives() -> Iterator[list[Life]]:
    """Runs of the program lifecycle. Each run ends with the test."""
    started: list[Life] = []
    yield started
    for life in started:
        life.close()
