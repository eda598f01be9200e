"""The hook and the dynamic loader's locks: no CUDA call waits for a thread that loads a library."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from hook.conftest import Tenant
from hook.world.probe import NOT_INITIALIZED

SOURCE = Path(__file__).with_name("loading") / "constructor.c"
LOADING = "import ctypes, sys; ctypes.CDLL('libcuda.so.1'); ctypes.CDLL(sys.argv[1]); print('loaded')"


@pytest.mark.promise("program-fork")
def test_a_child_that_is_forked_while_a_library_is_loaded_does_not_wait_for_ever(tenant: Tenant) -> None:
    tenant.agent()
    probe = tenant.probe()
    probe.start_cuda()
    assert probe.call("fork_while_loading").code == NOT_INITIALIZED


def test_a_constructor_may_call_cuda_beside_the_first_call(tenant: Tenant, double: Path, tmp_path: Path) -> None:
    library = tmp_path / "constructor.so"
    flags = ["-O1", "-Wall", "-Werror", "-fPIC", "-shared", "-pthread", f"-L{double}"]
    subprocess.run(["cc", *flags, "-o", str(library), str(SOURCE), "-l:libcuda.so.1"], check=True)
    tenant.agent()
    done = subprocess.run(
        [sys.executable, "-S", "-c", LOADING, str(library)],
        env=tenant.environment(),
        capture_output=True,
        text=True,
        check=True,
        timeout=30,
    )
    assert done.stdout == "loaded\n"
