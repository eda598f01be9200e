"""The GPU kit runs from its archive on a bare machine, resumes after it was killed, and leaves no process running.

The tests use the double, and a Python that has none of the agent's packages.
"""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
import tomllib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from hook.world.agent_node import ROOT

KIT = ROOT / "benchmarks" / "gpu"
SOURCES = (KIT / "bundle.py", KIT / "gpukit" / "wheels.py")
DEADLINE_S = 300.0


def _module(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"kit_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


bundle, wheels = (_module(path) for path in SOURCES)


def _python() -> str:
    """Return the path of a Python without installed packages: 3.12, for which the kit is made, or else the Python on
    which this virtual environment is based."""
    found = shutil.which("python3.12")
    if found is not None:
        printed = subprocess.run([found, "-c", "import venv"], capture_output=True, timeout=20, check=False)
        if printed.returncode == 0:
            return found
    return str(getattr(sys, "_base_executable", sys.executable))


@pytest.fixture(scope="module")
def kit(double: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Kit, unpacked from its archive in a clean directory."""
    target = tmp_path_factory.mktemp("made") / "gpu-kit"
    try:
        size = bundle.bundle(target)
    except bundle.BundleError as error:
        if "cannot be had" in str(error) or "has not given" in str(error):
            pytest.skip(f"no package index: {str(error)[:200]}")
        raise
    assert size <= 60 << 20
    clean = tmp_path_factory.mktemp("clean")
    with tarfile.open(target.with_name("gpu-kit.tar.gz")) as archive:
        archive.extractall(clean, filter="data")
    return clean / "sharepod-gpu-kit"


@pytest.fixture
def place() -> Iterator[Path]:
    """Short directory in which the kit may create its directories."""
    with tempfile.TemporaryDirectory(prefix="kit-", dir="/tmp") as place:
        yield Path(place)


def _start(kit: Path, place: Path, *arguments: str) -> subprocess.Popen[str]:
    command = [_python(), str(kit / "measure.py"), "--fake", "--seconds", "0.5", "--rounds", "1", *arguments]
    environment = {"PATH": "/usr/bin:/bin", "TMPDIR": str(place)}
    return subprocess.Popen(
        command, cwd=place, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def _run(kit: Path, place: Path, *arguments: str) -> tuple[int, str]:
    process = _start(kit, place, *arguments)
    try:
        printed, _ = process.communicate(timeout=DEADLINE_S)
    finally:
        process.kill()
        process.wait()
    return process.returncode, printed


def _of(kit: Path) -> list[str]:
    """Return the processes that run a program of the kit."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            command = path.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if str(kit) in command:
            found.append(command)
    return found


def _until_gone(kit: Path) -> None:
    deadline = time.monotonic() + 20
    while left := _of(kit):
        assert time.monotonic() < deadline, left
        time.sleep(0.05)


def _cells(place: Path) -> dict[str, dict[str, object]]:
    path = place / "results-fake" / "results.json"
    cells: dict[str, dict[str, object]] = json.loads(path.read_text())["cells"] if path.is_file() else {}
    return cells


def test_a_killed_run_leaves_nothing_running_and_the_next_one_goes_on_to_whole_tables(kit: Path, place: Path) -> None:
    first = _start(kit, place)
    try:
        deadline = time.monotonic() + DEADLINE_S
        while len(_cells(place)) < 6:
            assert time.monotonic() < deadline
            assert first.poll() is None, first.communicate()[0]
            time.sleep(0.05)
    finally:
        first.kill()
        first.communicate()
    _until_gone(kit)
    before = _cells(place)
    status, printed = _run(kit, place)
    assert status == 0, printed
    assert "Measured on the fake driver" in printed
    assert "not measured yet" not in printed
    assert "FAILED" not in printed
    after = _cells(place)
    assert {key: after[key] for key in before} == before
    assert after["checks/symbols"]["unnamed"] == after["checks/symbols"]["unwrapped"] == []
    assert after["checks/symbols under the hook"]["hook"] == after["checks/symbols"]["answers"]
    assert after["checks/captures under the hook"]["broken"] == 0
    for way in ("cuMemAlloc", "cuMemAllocAsync", "cuMemCreate, cuMemMap", "memory nodes of graphs"):
        eaten = after[f"memory/{way} (driver API)"]
        assert eaten["taken"] == eaten["limit"] == eaten["counted"] == eaten["driver"] == eaten["total"], way
    assert after["slices/captures"]["broken"] == 0
    assert after["slices/two"]["run_us"] != [[], []]
    assert {len(str(after[f"gaps/ranks/{how}"]["rates"]).split(",")) for how in ("bare", "concurrent")} == {2}
    assert "p50_ms" in after["gap waits/notebooks + busy/concurrent"]
    assert after["seen/30:70"]["surcharged"] == [0, 0]
    assert "30:70" in printed.partition("### (d) The token and NVML")[2]
    assert list(place.glob("sharepod-*")) == []
    assert printed.index("### (f)") < printed.index("### (a)")
    assert "### (c)" in (place / "results-fake" / "tables.md").read_text()
    _until_gone(kit)


def test_a_workload_that_cannot_start_is_said_with_its_last_words(kit: Path, place: Path) -> None:
    status, printed = _run(kit, place, "--table", "memory", "--python", "/bin/false")
    assert status == 1
    assert re.search(r"cuMemAlloc.*FAILED: memory-driver_memory\S* has ended", printed), printed
    assert _of(kit) == []


def test_results_of_another_gpu_are_not_gone_on_with(kit: Path, place: Path) -> None:
    folder = place / "results-fake"
    folder.mkdir()
    (folder / "results.json").write_text(json.dumps({"about": {"gpu": "GPU-other"}, "cells": {}}))
    status, printed = _run(kit, place)
    assert status == 2
    assert "gpu 'GPU-other', now" in printed
    assert "--fresh" in printed
    assert list(place.glob("sharepod-*")) == []


def test_without_a_driver_it_says_so_in_one_line(kit: Path, place: Path) -> None:
    if Path("/dev/nvidiactl").exists():
        pytest.skip("there is an NVIDIA driver here")
    command = [_python(), str(kit / "measure.py")]
    done = subprocess.run(
        command, cwd=place, env={"PATH": "/usr/bin:/bin"}, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "no CUDA driver" in done.stderr


def test_the_kits_wheels_are_of_the_versions_that_the_project_pins() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    pins = {
        (bundle._normal(name), version)
        for line in (*project["dependencies"], *project["optional-dependencies"]["agent"])
        for name, _, version in [line.partition("==")]
    }
    in_kit = bundle._pinned()
    names = {name for name, _ in in_kit}
    assert {pin for pin in pins if pin[0] in names} <= in_kit
    left_out = {name for name, _ in pins} - names
    # the agent imports these packages only in mode `cluster`
    assert left_out == {"grpcio", "protobuf", "kubernetes", "httptools", "orjson"}


@pytest.mark.parametrize(
    ("wheel", "version", "fits"),
    [
        ("yarl-1.0-py3-none-any.whl", (3, 13), True),
        ("yarl-1.0-cp312-cp312-manylinux_2_17_x86_64.manylinux2014_x86_64.whl", (3, 12), True),
        ("yarl-1.0-cp312-cp312-manylinux_2_17_x86_64.manylinux2014_x86_64.whl", (3, 11), False),
        ("yarl-1.0-cp312-cp312-manylinux_2_17_aarch64.whl", (3, 12), False),
        ("yarl-1.0-cp38-abi3-manylinux2014_x86_64.whl", (3, 12), True),
        ("yarl-1.0-cp313-abi3-manylinux2014_x86_64.whl", (3, 12), False),
        ("yarl-1.0-cp313-cp313t-manylinux2014_x86_64.whl", (3, 13), False),
    ],
)
def test_a_wheel_is_used_only_by_a_python_that_it_was_built_for(
    wheel: str, version: tuple[int, int], fits: bool
) -> None:
    if fits:
        assert wheels.fitting([Path(wheel)], version, "x86_64") == [Path(wheel)]
    else:
        with pytest.raises(wheels.WheelsError, match=rf"this is Python 3\.{version[1]} on x86_64"):
            wheels.fitting([Path(wheel)], version, "x86_64")
