"""Fetches NVIDIA's wheels of the CUDA releases that the table covers, and unpacks their headers and libcudart in the
cache directory.

Guarantees:
- A wheel in the cache is complete, and is not fetched again.
- If a wheel cannot be fetched, the error names it.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

# The first covered release, and the last one of each major version since. The hook is compiled with the newest one.
RELEASES = ("nvidia-cuda-runtime-cu11==11.8.89", "nvidia-cuda-runtime-cu12==12.9.79", "nvidia-cuda-runtime==13.5.37")
NEWEST = "nvidia-cuda-runtime"


class UnreachableError(RuntimeError):
    """Wheel that is not in the cache and cannot be fetched from the index."""


@dataclass(frozen=True)
class Wheel:
    """Unpacked wheel."""

    name: str
    """Name with version: nvidia_cuda_runtime_cu11-11.8.89."""
    include: Path
    """Directory that contains cuda.h."""
    runtime: Path
    """libcudart.so.*"""


def fetch(requirement: str, cache: Path | None = None) -> Wheel:
    """Return the wheel that pip selects for the requirement. A pinned version that is in the cache is returned without
    a query of the package index.
    """
    folder = cache or _cache()
    name, _, version = requirement.partition("==")
    pinned = folder / f"{name.replace('-', '_')}-{version}"
    if version and pinned.is_dir():
        return _wheel(pinned)
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as draft:
        command = [
            sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps",
            "--only-binary=:all:", "--retries=1", "--timeout=15", f"--dest={draft}", requirement,
        ]  # fmt: skip
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=180)
        except subprocess.TimeoutExpired as error:
            raise UnreachableError(f"{requirement}: the package index did not answer within 180 s") from error
        files = sorted(Path(draft).glob("*.whl"))
        if done.returncode != 0 or not files:
            raise UnreachableError(f"{requirement}: {(done.stderr.strip().splitlines() or ['no wheel'])[-1]}")
        target = folder / "-".join(files[0].name.split("-")[:2])
        unpacked = Path(draft) / "unpacked"
        with zipfile.ZipFile(files[0]) as archive:
            archive.extractall(unpacked)
        if not target.is_dir():
            unpacked.rename(target)
    return _wheel(target)


def _wheel(folder: Path) -> Wheel:
    headers, runtimes = sorted(folder.rglob("cuda.h")), sorted(folder.rglob("libcudart.so.*"))
    if not headers or not runtimes:
        raise UnreachableError(f"{folder}: without cuda.h or libcudart.so; delete it to have it fetched again")
    return Wheel(folder.name, headers[0].parent, runtimes[0])


def _cache() -> Path:
    root = os.environ.get("SHAREPOD_CACHE")
    if root:
        return Path(root).expanduser() / "cuda"
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "sharepod" / "cuda"
