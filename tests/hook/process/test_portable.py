"""One file for every C library: the hook in programs of an old glibc, of musl, and on arm64.

test_harmless.py checks which symbols the hook takes from a C library. Here the hook runs with each C library that is
available on this machine.
"""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from hook.conftest import BUILD, ROOT, Tenant
from hook.world.foreign_libc import Land, MissingError, arm64, musl, old_glibc
from sharepod.protocol import Drained, Want

SOURCES = Path(__file__).parents[1]
HEADERS = subprocess.run(
    [sys.executable, str(ROOT / "shim" / "cuda_headers.py")], capture_output=True, text=True, check=True
).stdout.strip()
FLAGS = ["-std=c11", "-D_GNU_SOURCE", "-D__CUDA_API_VERSION_INTERNAL", "-O1", "-fPIC", "-isystem", HEADERS]


def reach(land: Callable[[], Land]) -> Land:
    try:
        return land()
    except MissingError as missing:
        pytest.skip(str(missing))


def compile_for(land: Land, target: Path, *arguments: str) -> None:
    command = [*land.compiler, *FLAGS, *arguments, "-o", str(target), *land.last]
    subprocess.run(command, check=True, timeout=120)


def hook_for(land: Land, hook_file: Path) -> Path:
    if not land.own_hook:
        return hook_file
    return cross_compiled(land.compiler[0])


@functools.cache
def cross_compiled(compiler: str) -> Path:
    target = BUILD / f"hook-{Path(compiler).name}" / "libsharepod.so"
    tools = {"CC": compiler} | {tool.upper(): compiler.replace("-gcc", f"-{tool}") for tool in ("nm", "objcopy")}
    command = [sys.executable, "setup.py", "--quiet", "build_hook", f"--target={target}"]
    subprocess.run(command, cwd=ROOT, env={**os.environ, **tools}, check=True, capture_output=True, timeout=120)
    return target


@pytest.mark.parametrize("land", [musl, old_glibc, arm64])
def test_a_program_without_cuda_notices_nothing_there(
    land: Callable[[], Land], hook_file: Path, tmp_path: Path
) -> None:
    there = reach(land)
    hook = hook_for(there, hook_file)
    compile_for(there, tmp_path / "plain", str(SOURCES / "programs" / "plain.c"))

    def facts(**environment: str) -> str:
        command = there.run(tmp_path / "plain", {"LD_LIBRARY_PATH": str(tmp_path), **environment})
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30)
        assert done.stderr == ""
        return done.stdout

    alone = facts()
    assert '"hook": 0' in alone
    for bind in ({}, {"LD_BIND_NOW": "1"}):
        assert facts(LD_PRELOAD=str(hook), **bind) == alone.replace('"hook": 0', '"hook": 1')


@pytest.mark.parametrize("land", [musl, old_glibc, arm64])
@pytest.mark.parametrize("way", ["symbol", "dlsym"])
def test_launches_wait_for_the_token_there(
    land: Callable[[], Land], way: str, tenant: Tenant, hook_file: Path, tmp_path: Path
) -> None:
    there = reach(land)
    shutil.copy2(hook_for(there, hook_file), tenant.directory / "libsharepod.so")
    driver, program = tmp_path / "libcuda.so.1", tmp_path / "launches"
    hollow = SOURCES.parent / "doubles" / "hollow" / "libcuda.c"
    compile_for(there, driver, "-shared", "-Wl,-soname,libcuda.so.1", str(hollow))
    compile_for(
        there, program, str(SOURCES / "world" / "foreign" / "launches.c"), "-L", str(tmp_path), "-l:libcuda.so.1"
    )
    agent = tenant.agent()
    environment = {"LD_LIBRARY_PATH": str(tmp_path), "LD_PRELOAD": str(tenant.directory / "libsharepod.so")}
    command = [*there.run(program, environment), way]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            client = agent.client()
            agent.next_frame(client, Want)
            process.stdin.write("\n")
            process.stdin.flush()
            assert int(process.stdout.readline()) == 0
            agent.grant(client, 50)
            drained = agent.next_frame(client, Drained)
            process.stdin.write("\n")
            process.stdin.flush()
            assert 0 < int(process.stdout.readline()) <= drained.launches
        finally:
            process.kill()


def test_its_jumps_are_marked_on_arm64() -> None:
    compiler = reach(arm64).compiler[0]
    readelf = compiler.replace("-gcc", "-readelf")
    notes = subprocess.run(
        [readelf, "-n", str(cross_compiled(compiler))], capture_output=True, text=True, check=True, timeout=30
    )
    assert "AArch64 feature: BTI, PAC" in notes.stdout
