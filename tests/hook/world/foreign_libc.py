"""Foreign C libraries and machines: how to build programs for them, and how to run the programs.

A `Land` that is not available gives a reason of one line for the skipped test. Nothing is installed: an old C library
is unpacked into the cache directory, from a package of the distribution's previous release.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from harness.cache import acquire, cache_dir

OLD_RELEASE = "bullseye"  # glibc 2.31: libpthread and libdl are separate libraries, as in every version before 2.34
_KEYRING = Path("/usr/share/keyrings/debian-archive-keyring.gpg")
_TIMEOUT = 120.0


class MissingError(Exception):
    """`Land` that is not available on this machine. The message has one line."""


@dataclass(frozen=True)
class Land:
    """C library or machine, with the way to compile and run a program for it."""

    compiler: tuple[str, ...]
    last: tuple[str, ...]
    """Last arguments of the compiler: the libraries to link."""
    run: Callable[[Path, dict[str, str]], list[str]]
    """Function that returns the command which runs a program there, with exactly this environment."""
    own_hook: bool = False
    """Whether the hook must be built with that compiler; otherwise the normal hook file is used."""


def musl() -> Land:
    """Return Debian's musl. MissingError if it is not installed."""
    compiler = _needs("musl-gcc", "musl-tools")
    return Land((compiler,), (), lambda program, environment: [*_only(environment), str(program)])


def old_glibc() -> Land:
    """Return the glibc of the previous release. MissingError if it cannot be downloaded."""
    if platform.machine() != "x86_64":
        raise MissingError("an old glibc is fetched for x86-64 only")
    libraries = _old_libraries()
    names = ("libc.so.6", "libpthread.so.0", "libdl.so.2", "ld-linux-x86-64.so.2")
    last = ("-nodefaultlibs", "-Wl,--no-as-needed", *(str(libraries / name) for name in names), "-lgcc")

    def run(program: Path, environment: dict[str, str]) -> list[str]:
        path = f"{environment['LD_LIBRARY_PATH']}:{libraries}"
        preload = ["--preload", environment["LD_PRELOAD"]] if "LD_PRELOAD" in environment else []
        more = {name: value for name, value in environment.items() if name not in ("LD_LIBRARY_PATH", "LD_PRELOAD")}
        return [*_only(more), str(libraries / names[-1]), "--library-path", path, *preload, str(program)]

    return Land(("gcc",), last, run)


def arm64() -> Land:
    """Return an arm64 Debian, by a cross compiler and user-mode emulation. MissingError if these are not installed."""
    if platform.machine() != "x86_64":
        raise MissingError("arm64 is emulated on x86-64 only")
    compiler = _needs("aarch64-linux-gnu-gcc", "gcc-aarch64-linux-gnu libc6-dev-arm64-cross")
    emulator = _needs("qemu-aarch64", "qemu-user")

    def run(program: Path, environment: dict[str, str]) -> list[str]:
        set_there = [part for name, value in environment.items() for part in ("-E", f"{name}={value}")]
        return [*_only({}), emulator, "-L", "/usr/aarch64-linux-gnu", *set_there, str(program)]

    return Land((compiler,), (), run, own_hook=True)


def _only(environment: dict[str, str]) -> list[str]:
    return ["env", "-i", *(f"{name}={value}" for name, value in environment.items())]


def _needs(program: str, packages: str) -> str:
    path = shutil.which(program)
    if path is None:
        raise MissingError(f"there is no {program} here (Debian: apt install {packages})")
    return path


def _old_libraries() -> Path:
    if shutil.which("apt-get") is None or shutil.which("dpkg-deb") is None:
        raise MissingError("an old glibc comes from a Debian package, and there is no apt-get here")
    cache_dir().mkdir(parents=True, exist_ok=True)
    folder = cache_dir() / f"libc-{OLD_RELEASE}"
    lock = acquire(cache_dir() / "libc.lock", what="fetching an old C library", timeout=4 * _TIMEOUT)
    try:
        if not folder.is_dir():
            _fetch(folder)
    finally:
        os.close(lock)
    return folder / "lib" / "x86_64-linux-gnu"


def _fetch(folder: Path) -> None:
    """Download and unpack libc6. Package lists and status are separate, so the machine's packages are not changed."""
    draft = folder.with_suffix(".new")
    shutil.rmtree(draft, ignore_errors=True)
    for part in ("lists/partial", "cache/archives/partial"):
        (draft / part).mkdir(parents=True)
    (draft / "status").touch()
    shown = _apt(["indextargets", "--format", "$(SITE)", "Created-By: Packages"], draft)
    sites = sorted({line for line in shown.splitlines() if line.rstrip("/").endswith("/debian")})
    if not sites:
        raise MissingError("an old glibc comes from a Debian package, and this machine has no Debian mirror")
    signed = f" [signed-by={_KEYRING}]" if _KEYRING.exists() else ""
    (draft / "sources.list").write_text(f"deb{signed} {sites[0]} {OLD_RELEASE} main\n")
    own = [
        *("-o", f"Dir::Etc::sourcelist={draft / 'sources.list'}", "-o", "Dir::Etc::sourceparts=-"),
        *("-o", f"Dir::State::lists={draft / 'lists'}", "-o", f"Dir::Cache={draft / 'cache'}"),
        *("-o", f"Dir::State::status={draft / 'status'}", "-o", "APT::Sandbox::User=root"),
    ]
    _apt([*own, "update"], draft)
    _apt([*own, "download", "libc6"], draft)
    packages = list(draft.glob("libc6_*.deb"))
    if not packages:
        raise MissingError(f"the package libc6 of {OLD_RELEASE} cannot be downloaded here")
    unpacked = draft / "unpacked"
    subprocess.run(["dpkg-deb", "-x", str(packages[0]), str(unpacked)], check=True, timeout=_TIMEOUT)
    unpacked.rename(folder)
    shutil.rmtree(draft)


def _apt(arguments: list[str], where: Path) -> str:
    try:
        done = subprocess.run(
            ["apt-get", "--quiet", *arguments], cwd=where, capture_output=True, text=True, timeout=_TIMEOUT
        )
    except subprocess.TimeoutExpired:
        raise MissingError(f"an old glibc cannot be fetched: apt-get did not end within {_TIMEOUT:g} s") from None
    if done.returncode != 0:
        output = (done.stderr.strip() or done.stdout.strip()).splitlines()[-1:]
        raise MissingError(f"an old glibc cannot be fetched: {output}")
    return done.stdout
