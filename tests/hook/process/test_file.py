"""The file that ships is small, has the same bytes wherever it is built, and is hardened like the programs that load
it.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from hook.conftest import ROOT

KIB = 1 << 10
SIZE_MOST = 288 * KIB
"""Largest size in bytes. The file has about 278 KiB: 190 KiB of code, 50 KiB of tables for unwinding the stack."""
HEADERS = subprocess.run(
    [sys.executable, str(ROOT / "shim" / "cuda_headers.py")], capture_output=True, text=True, check=True, timeout=30
).stdout.strip()


def read(*command: str | Path) -> str:
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, check=True, timeout=30)
    return done.stdout


def built_in(folder: Path) -> Path:
    """Build the hook from a copy of its sources and of the headers in `folder`."""
    shutil.copytree(ROOT / "shim", folder / "shim", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(HEADERS, folder / "headers")
    for native in (ROOT / "operator" / "sharepod").rglob("native"):  # setup.py requires these folders
        shutil.copytree(native, folder / native.relative_to(ROOT))
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy2(ROOT / name, folder)
    target = folder / "built" / "libsharepod.so"
    command = [sys.executable, "setup.py", "--quiet", "build_hook", f"--target={target}"]
    environment = {**os.environ, "CUDA_INCLUDE": str(folder / "headers")}
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return target


@pytest.mark.promise("program-reproducible")
def test_it_has_the_same_bytes_wherever_it_is_built(tmp_path: Path) -> None:
    one, other = (built_in(tmp_path / name) for name in ("here", "there/and/deeper"))
    assert one.read_bytes() == other.read_bytes()
    assert one.with_name("libsharepod.so.debug").read_bytes() == other.with_name("libsharepod.so.debug").read_bytes()


def test_debuggers_find_what_it_was_stripped_of_beside_it(hook_file: Path) -> None:
    assert hook_file.stat().st_size < SIZE_MOST
    sections = read("readelf", "-SW", hook_file)
    assert ".gnu_debuglink" in sections
    assert ".debug_info" not in sections
    debug = hook_file.with_name("libsharepod.so.debug")
    assert ".debug_info" in read("readelf", "-SW", debug)
    ids = [re.findall(r"Build ID: (\w+)", read("readelf", "-n", file)) for file in (hook_file, debug)]
    assert ids[0] == ids[1] != []


def test_its_tables_are_read_only_and_its_jumps_are_marked(hook_file: Path) -> None:
    assert "BIND_NOW" in read("readelf", "-dW", hook_file)
    assert "GNU_RELRO" in read("readelf", "-lW", hook_file)
    marks = {"x86_64": "x86 feature: IBT, SHSTK", "aarch64": "AArch64 feature: BTI, PAC"}
    assert marks[platform.machine()] in read("readelf", "-n", hook_file)
