"""Inspection of the machine before any measurement: all requirements of hook and agent.

Each feature is tested by using it, because a container's seccomp profile may forbid features of its kernel.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import platform
import shutil
import socket
import subprocess
import sys
from importlib import metadata
from pathlib import Path

_MEMBARRIER = {"x86_64": 324, "aarch64": 283}
_MEMBARRIER_QUERY = 0
_PRIVATE_EXPEDITED = 1 << 3
_F_ADD_SEALS = 1033
_SEAL_SEAL, _SEAL_SHRINK, _SEAL_GROW, _SEAL_FUTURE_WRITE = 1, 2, 4, 16
_MADV_WIPEONFORK = 18
_SO_PEERPIDFD = 77
_FRAMEWORKS = ("torch", "jax", "cupy-cuda13x", "cupy-cuda12x", "cupy")


def found() -> list[tuple[str, str]]:
    """Return the properties of this machine as lines of (feature, value)."""
    return [
        ("kernel", f"{platform.release()} {platform.machine()}{_sandbox()}"),
        ("processor", f"{_processor()}, {len(os.sched_getaffinity(0))} cores to use"),
        ("user", f"uid {os.getuid()}, {_status('CapEff', 'capabilities ')}"),
        ("seccomp", _seccomp()),
        ("cgroup", _cgroup()),
        ("membarrier", _membarrier()),
        ("memfd seals", _seals()),
        ("SEQPACKET", _seqpacket()),
        ("pidfd", _pidfd()),
        ("MADV_WIPEONFORK", _wipe_on_fork()),
        ("Python", f"{platform.python_version()} at {sys.executable}"),
        *_frameworks(),
        ("nvcc", _nvcc()),
    ]


def _sandbox() -> str:
    try:
        version = Path("/proc/version").read_text()
        dmi = Path("/sys/class/dmi/id/product_name")
        product = dmi.read_text().strip() if dmi.is_file() else ""
    except OSError:
        return ""
    if "gvisor" in version.lower():
        return " (gVisor)"
    return f" ({product})" if product else ""


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.machine()


def _status(field: str, before: str = "") -> str:
    try:
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith(f"{field}:"):
                return before + line.split(":", 1)[1].strip()
    except OSError:
        pass
    return f"{before}unknown"


def _seccomp() -> str:
    modes = {"0": "off", "1": "strict", "2": "a filter is in force"}
    return modes.get(_status("Seccomp"), "unknown") + f"; no new privileges: {_status('NoNewPrivs')}"


def _cgroup() -> str:
    try:
        lines = Path("/proc/self/cgroup").read_text().split()
    except OSError:
        return "unknown"
    version = "version 2" if any(line.startswith("0::") for line in lines) else "version 1"
    limits = []
    for name in ("cpu.max", "memory.max"):
        path = Path("/sys/fs/cgroup") / name
        if path.is_file():
            limits.append(f"{name} {path.read_text().strip()}")
    return ", ".join([version, *limits])


def _failed(error: OSError) -> str:
    return f"NO: {error.strerror or error}"


def _membarrier() -> str:
    libc = ctypes.CDLL(None, use_errno=True)
    number = _MEMBARRIER.get(platform.machine())
    if number is None:
        return "not known for this processor"
    mask = libc.syscall(ctypes.c_long(number), ctypes.c_long(_MEMBARRIER_QUERY), ctypes.c_long(0), ctypes.c_long(0))
    if mask < 0:
        return f"NO: {os.strerror(ctypes.get_errno())}; launches pay a full fence instead"
    if not mask & _PRIVATE_EXPEDITED:
        return "NO: without the private expedited command; launches pay a full fence instead"
    return "yes"


def _seals() -> str:
    try:
        fd = os.memfd_create("sharepod-kit", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    except OSError as error:
        return _failed(error)
    try:
        os.ftruncate(fd, mmap.PAGESIZE)
        with mmap.mmap(fd, mmap.PAGESIZE, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE) as page:
            fcntl.fcntl(fd, _F_ADD_SEALS, _SEAL_SEAL | _SEAL_SHRINK | _SEAL_GROW | _SEAL_FUTURE_WRITE)
            page[0] = 1
        try:
            mmap.mmap(fd, mmap.PAGESIZE, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE).close()
        except (OSError, ValueError):
            return "yes, also against future writing"
        return "NO: sealed, and yet it can be mapped for writing"
    except OSError as error:
        return _failed(error)
    finally:
        os.close(fd)


def _seqpacket() -> str:
    try:
        one, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    except OSError as error:
        return _failed(error)
    with one, other:
        try:
            socket.send_fds(one, [b"page"], [one.fileno()])
            received, fds, _, _ = socket.recv_fds(other, 16, 4)
            for fd in fds:
                os.close(fd)
            other.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
        except OSError as error:
            return _failed(error)
        return "yes, with descriptors and credentials" if received == b"page" and fds else "NO: descriptors are lost"


def _pidfd() -> str:
    try:
        os.close(os.pidfd_open(os.getpid()))
    except OSError as error:
        return _failed(error)
    one, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with one, other:
        try:
            os.close(one.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD))
        except OSError:
            return "yes; not from a socket (Linux 6.5)"
    return "yes, also from a socket"


def _wipe_on_fork() -> str:
    try:
        with mmap.mmap(-1, mmap.PAGESIZE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as page:
            page.madvise(_MADV_WIPEONFORK)
    except OSError as error:
        return _failed(error)
    return "yes"


def _frameworks() -> list[tuple[str, str]]:
    """Return the installed frameworks, from package metadata, because importing one takes seconds."""
    lines = []
    for name in _FRAMEWORKS:
        try:
            lines.append((name, metadata.version(name)))
        except metadata.PackageNotFoundError:
            continue
    return lines or [("frameworks", "none of PyTorch, JAX, CuPy")]


def _nvcc() -> str:
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        return "not there (not needed)"
    try:
        output = subprocess.run([nvcc, "--version"], capture_output=True, text=True, timeout=20, check=False).stdout
    except (OSError, subprocess.TimeoutExpired):
        return f"{nvcc} does not answer"
    return next((line.strip() for line in output.splitlines() if "release" in line), nvcc)
