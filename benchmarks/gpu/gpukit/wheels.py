"""The agent's Python packages from the kit's wheels, for the Python that runs the kit.

Wheels for this version of Python are unpacked into a directory of this run.
Nothing is installed, and no workload sees them.
"""

from __future__ import annotations

import platform
import sys
import zipfile
from pathlib import Path


class WheelsError(Exception):
    """Raised if the kit has no wheels for this Python. The message lists the supported versions."""


def fitting(wheels: list[Path], version: tuple[int, int], machine: str) -> list[Path]:
    """Return the wheels that this version of CPython can use, one for each package. Raises `WheelsError` if a package
    has no such wheel."""
    chosen: dict[str, Path] = {}
    for wheel in wheels:
        name, *_, python, abi, where = wheel.stem.split("-")
        if _fits(python, abi, where, version, machine):
            chosen[name] = wheel
    missing = sorted({wheel.name.split("-", 1)[0] for wheel in wheels} - set(chosen))
    if missing:
        there = sorted({wheel.stem.split("-")[-3] for wheel in wheels if wheel.name.startswith(missing[0] + "-")})
        raise WheelsError(
            f"this is Python {version[0]}.{version[1]} on {machine}; the kit has {', '.join(missing)} for "
            f"{', '.join(there)} on x86_64 only; start it with one of these (python3.12 measure.py)"
        )
    return sorted(chosen.values())


def _fits(python: str, abi: str, where: str, version: tuple[int, int], machine: str) -> bool:
    if where != "any" and not all(part.endswith(machine) for part in where.split(".")):
        return False
    if abi == "none":
        return any(tag in ("py3", f"py{version[0]}{version[1]}") for tag in python.split("."))
    if abi == "abi3":
        return any(tag.startswith("cp3") and int(tag[3:]) <= version[1] for tag in python.split("."))
    return abi == f"cp{version[0]}{version[1]}"


def unpack(folder: Path, target: Path) -> Path:
    """Unpack the wheels into `target`, from which the packages can then be imported. Raises `WheelsError`."""
    wheels = sorted(folder.glob("*.whl"))
    if not wheels:
        raise WheelsError(f"{folder} holds no wheels: this is not a whole kit; make it with `make gpu-kit`")
    for wheel in fitting(wheels, sys.version_info[:2], platform.machine()):
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(target)
    return target
