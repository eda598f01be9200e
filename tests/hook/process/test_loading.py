"""The hook and the dynamic linker: no CUDA call waits for a thread that loads a library, and the hook does not use a
library after the program has unloaded it.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from hook.conftest import Tenant
from hook.world.probe import NOT_INITIALIZED, SUCCESS
from sharepod.protocol import Drained

SOURCES = Path(__file__).with_name("loading")
LOADING = "import ctypes, sys; ctypes.CDLL('libcuda.so.1'); ctypes.CDLL(sys.argv[1]); print('loaded')"
CALLING = """
import _ctypes, ctypes, sys, time

def loaded(path):
    with open("/proc/self/maps") as maps:
        return any(path in line for line in maps)

for turn in range(3):
    library = ctypes.CDLL(sys.argv[1])
    print(library.work(3), flush=True)
    _ctypes.dlclose(library._handle)
    assert not loaded(sys.argv[1])
    if turn:
        time.sleep(0.12)  # the hook returns the token
print("done", flush=True)
"""


def built(name: str, double: Path, directory: Path) -> str:
    """Build a library that needs libcuda. Return its path."""
    library = directory / f"{name}.so"
    flags = ["-O1", "-Wall", "-Werror", "-fPIC", "-shared", "-pthread", f"-L{double}"]
    subprocess.run(["cc", *flags, "-o", str(library), str(SOURCES / f"{name}.c"), "-l:libcuda.so.1"], check=True)
    return str(library)


def output(tenant: Tenant, program: str, *arguments: str) -> list[str]:
    """Run a Python program under the hook. Return the lines that it prints."""
    done = subprocess.run(
        [sys.executable, "-S", "-c", program, *arguments],
        env=tenant.environment(),
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.promise("program-fork")
def test_a_child_that_is_forked_while_a_library_is_loaded_does_not_wait_for_ever(tenant: Tenant) -> None:
    tenant.agent()
    probe = tenant.probe()
    probe.start_cuda()
    assert probe.call("fork_while_loading").code == NOT_INITIALIZED


@pytest.mark.promise("program-fork")
def test_a_child_that_is_forked_while_a_library_is_loaded_starts_cuda(tenant: Tenant) -> None:
    """The parent has looked up a function of libcuda, but has not called any."""
    tenant.agent()
    probe = tenant.probe()
    probe.ok("load")
    assert probe.call("fork_while_loading", "cuInit").code == SUCCESS


def test_a_constructor_may_call_cuda_beside_the_first_call(tenant: Tenant, double: Path, tmp_path: Path) -> None:
    tenant.agent()
    assert output(tenant, LOADING, built("constructor", double, tmp_path)) == ["loaded"]


def test_a_library_that_has_called_cuda_may_be_unloaded_while_its_kernels_run(
    tenant: Tenant, double: Path, tmp_path: Path
) -> None:
    """libcuda was loaded only because this library needs it. The hook drains the kernels after the library is
    unloaded.
    """
    agent = tenant.agent()
    agent.on_want = lambda client: agent.next_grant(20, metered=True)
    assert output(tenant, CALLING, built("caller", double, tmp_path)) == ["2", "2", "2", "done"]
    assert tenant.submitted() == 9
    assert sum(frame.launches for client in agent.clients for frame in agent.frames(client, Drained)) == 9
