"""Makes the GPU kit: the directory `build/gpu-kit`, and `build/gpu-kit.tar.gz` of at most 60 MiB.

The kit is complete: hook, agent, the agent's Python packages as wheels for each of PYTHONS, workloads, runner, and the
fake driver to try the kit without a GPU. It runs on x86-64 with CPython of one of these versions, and for most
workloads PyTorch. The agent's C modules are compiled once, against CPython's stable ABI.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import json
import os
import runpy
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
TARGET = ROOT / "build" / "gpu-kit"
NAME = "sharepod-gpu-kit"
PYTHONS = ("3.11", "3.12", "3.13")
MOST_BYTES = 60 << 20
_PLATFORMS = ("manylinux2014_x86_64", "manylinux_2_17_x86_64", "manylinux_2_28_x86_64")
_PARTS = ("api", "timeshare", "protocol", "web", "agent")
"""Packages of `sharepod` that the agent consists of. Modules directly in `sharepod`, such as logs and tasks, are copied
too."""
_MODULES = (
    "shim/wire_build.py",
    "operator/sharepod/agent/sockets/native/frame_reader_build.py",
    "operator/sharepod/agent/native/timed_wait_build.py",
)
"""Scripts that describe how the agent's C modules are built."""
_DOWNLOAD_S = 300


class BundleError(Exception):
    """Raised if the kit cannot be made. The message names the missing part."""


def main() -> int:
    """Make the kit. Return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", type=Path, default=TARGET, help=f"the kit's directory; default: {TARGET}")
    target: Path = parser.parse_args().target.resolve()
    try:
        size = bundle(target)
    except BundleError as error:
        print(f"gpu-kit: {error}", file=sys.stderr)
        return 1
    print(f"{target}.tar.gz: {size / (1 << 20):.1f} MiB; on a machine with a GPU: unpack it, python3 {NAME}/measure.py")
    return 0


def bundle(target: Path) -> int:
    """Replace the directory and the archive. Return the archive's size in bytes. Raises `BundleError`."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".gpu-kit-", dir=target.parent) as made:
        kit = Path(made) / NAME
        kit.mkdir()
        shutil.copy2(HERE / "measure.py", kit)
        shutil.copy2(HERE / "README.md", kit)
        shutil.copy2(ROOT / "LICENSE", kit)
        for part in ("gpukit", "workloads"):
            _copy_sources(HERE / part, kit / part)
        _copy_agent(kit / "lib")
        _copy_fake(kit / "fake")
        _wheels(kit / "wheels")
        (kit / "kit.json").write_text(json.dumps(_about(), indent=1) + "\n")
        archive = Path(made) / "kit.tar.gz"
        with tarfile.open(archive, "w:gz") as tar:
            tar.add(kit, NAME, filter=_plain)
        size = archive.stat().st_size
        if size > MOST_BYTES:
            raise BundleError(f"the kit has {size / (1 << 20):.1f} MiB; more than {MOST_BYTES >> 20} MiB are not meant")
        shutil.rmtree(target, ignore_errors=True)
        kit.rename(target)
        archive.replace(target.with_name(f"{target.name}.tar.gz"))
    return size


def _plain(member: tarfile.TarInfo) -> tarfile.TarInfo:
    member.uid = member.gid = 0
    member.uname = member.gname = "root"
    return member


def _copy_sources(source: Path, target: Path) -> None:
    shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__", "native", "*.so", "*.c", "*.o"))


def _copy_agent(lib: Path) -> None:
    """Copy the parts of the package `sharepod` that the agent needs, with the hook, its C modules, and its version."""
    package = ROOT / "operator" / "sharepod"
    hook = package / "agent" / "hook" / "libsharepod.so"
    if not hook.is_file():
        raise BundleError("the hook is not built; run `make shim`")
    (lib / "sharepod").mkdir(parents=True)
    for module in package.glob("*.py"):
        shutil.copy2(module, lib / "sharepod")
    for part in _PARTS:
        _copy_sources(package / part, lib / "sharepod" / part)
    (lib / "sharepod" / "agent" / "hook").mkdir(exist_ok=True)
    shutil.copy2(hook, lib / "sharepod" / "agent" / "hook")
    for script in _MODULES:
        _compile(ROOT / script, lib)
    described = lib / f"sharepod-{_version()}.dist-info"
    described.mkdir()
    (described / "METADATA").write_text(f"Metadata-Version: 2.1\nName: sharepod\nVersion: {_version()}\n")


def _compile(script: Path, lib: Path) -> None:
    """Compile the C module of a cffi script, for this CPython and all later ones. This works because cffi's own header
    uses the limited API by default."""
    with tempfile.TemporaryDirectory() as made:
        extension = runpy.run_path(str(script))["ffi"].distutils_extension(made, verbose=False)
        compiler = shlex.split(os.environ.get("CC") or "cc")
        command = [
            *compiler, *extension.extra_compile_args, "-O2", "-shared", "-fPIC", "-DPy_LIMITED_API=0x030b0000",
            f"-I{sysconfig.get_path('include')}", *(f"-I{folder}" for folder in extension.include_dirs),
            *extension.sources, "-o", str(lib.joinpath(*extension.name.split("."))) + ".abi3.so",
        ]  # fmt: skip
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
        if done.returncode:
            raise BundleError(f"{extension.name} does not compile: {done.stderr.strip()[-2000:]}")


def _copy_fake(target: Path) -> None:
    """Copy the simulated driver and the module that reads its state."""
    libraries = sorted((ROOT / "build" / "doubles" / "libcuda").glob("*.so*"))
    if not libraries:
        raise BundleError("the fake driver is not built; run `make doubles`")
    target.mkdir()
    for path in (*libraries, ROOT / "tests" / "doubles" / "gpus.py"):
        shutil.copy2(path, target)


def _wheels(target: Path) -> None:
    """Copy the wheels that wheels.txt names, for every Python of the kit, from a cache, into which missing ones are
    downloaded."""
    cache = Path(os.environ.get("SHAREPOD_CACHE") or Path.home() / ".cache" / "sharepod") / "gpu-kit-wheels"
    pinned = _pinned()
    for version in PYTHONS:
        folder = cache / version
        if set(_packages(folder.glob("*.whl"))) != pinned:
            _download(folder, version)
        have = set(_packages(folder.glob("*.whl")))
        if have != pinned:
            raise BundleError(f"{folder} and wheels.txt differ in these wheels: {sorted(have ^ pinned)}")
    target.mkdir()
    for wheel in sorted(cache.glob("*/*.whl")):
        if wheel.parent.name in PYTHONS and not (target / wheel.name).exists():
            shutil.copy2(wheel, target)


def _download(folder: Path, version: str) -> None:
    print(f"gpu-kit: wheels for Python {version} (once)", file=sys.stderr, flush=True)
    shutil.rmtree(folder, ignore_errors=True)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".wheels-", dir=folder.parent) as made:
        command = [
            sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps",
            "--only-binary=:all:", "--implementation=cp", f"--python-version={version}",
            *(f"--platform={platform}" for platform in _PLATFORMS),
            "--dest", made, "--requirement", str(HERE / "wheels.txt"),
        ]  # fmt: skip
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=_DOWNLOAD_S, check=False)
        except subprocess.TimeoutExpired:
            raise BundleError(f"the package index has not given the wheels within {_DOWNLOAD_S} s") from None
        if done.returncode:
            raise BundleError(f"the wheels for Python {version} cannot be had: {done.stderr.strip()[-2000:]}")
        Path(made).rename(folder)
        Path(made).mkdir()


def _pinned() -> set[tuple[str, str]]:
    pins = set()
    for line in (HERE / "wheels.txt").read_text().splitlines():
        requirement = line.partition("#")[0].strip()
        if requirement:
            name, _, version = requirement.partition("==")
            pins.add((_normal(name), version))
    return pins


def _packages(wheels: Iterable[Path]) -> list[tuple[str, str]]:
    return [(_normal(wheel.name.split("-")[0]), wheel.name.split("-")[1]) for wheel in wheels]


def _normal(name: str) -> str:
    return name.lower().replace("-", "_").replace(".", "_")


def _version() -> str:
    for line in (ROOT / "pyproject.toml").read_text().splitlines():
        if line.startswith("version = "):
            return str(ast.literal_eval(line.partition("=")[2].strip()))
    raise BundleError("pyproject.toml has no version")


def _about() -> dict[str, str]:
    """Return what the kit was made from. `hook`: hash of the hook's sources, which the hook also sends to the agent."""
    sys.path.insert(0, str(HERE.parent))
    from results import commit

    hook = ROOT / "operator" / "sharepod" / "agent" / "hook" / "libsharepod.so"
    return {
        "commit": commit(),
        "hook": hashlib.sha256(hook.read_bytes()).hexdigest(),
        "made": time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime()),
        "version": _version(),
    }


if __name__ == "__main__":
    sys.exit(main())
