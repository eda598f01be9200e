"""Requirements of a real node: whether this machine meets them, and how to install missing packages.

Only the standard library, so that `doctor.py` can check before anything is installed. Guarantees: `why_no_node` changes
nothing, and its answer is one line, which tests use as the reason of a skip.
"""

from __future__ import annotations

import ipaddress
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from harness.cache import acquire, cache_dir
from harness.errors import NodeUnavailableError
from harness.process import alive

# Record of the running node; after a kill of a node's supervisor, of that node.
RECORD = Path("/run/sharepod-test-node.json")
CNI_DIRECTORIES = (Path("/usr/lib/cni"), Path("/opt/cni/bin"))
CGROUPS = Path("/sys/fs/cgroup")
_CNI_PLUGINS = ("bridge", "host-local", "loopback")
_PACKAGE_OF = {
    "runc": "runc",
    "busybox": "busybox-static",
    "ip": "iproute2",
    "nsenter": "util-linux",
    "unshare": "util-linux",
    "cc": "gcc",
}
_APT_TIMEOUT = 900.0


def cni_directory() -> Path | None:
    """Return the directory of the CNI plugins."""
    for directory in CNI_DIRECTORIES:
        if all((directory / plugin).exists() for plugin in _CNI_PLUGINS):
            return directory
    return None


def missing_packages() -> list[str]:
    """Return the Debian packages to install before a node can run."""
    missing = {package for program, package in _PACKAGE_OF.items() if shutil.which(program) is None}
    if cni_directory() is None:
        missing.add("containernetworking-plugins")
    if "gcc" in missing:
        missing.add("libc6-dev")
    return sorted(missing)


def foreign_kubelet() -> int | None:
    """Return the pid of a kubelet that does not belong to this harness. None if no such kubelet runs."""
    try:
        record = json.loads(RECORD.read_text())
        if record["supervisor"] is not None and alive(record["supervisor"], record["started"]):
            return None
    except (OSError, ValueError, KeyError):
        pass  # the kubelet belongs to no node of this harness, so it counts as foreign
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if (entry / "comm").read_text() == "kubelet\n":
                    return int(entry.name)
            except OSError:
                continue
    return None


def free_subnet() -> ipaddress.IPv4Network | None:
    """Return the first subnet 10.244.N.0/24 that overlaps no address or route of this machine. None if there is
    none."""
    shown = subprocess.run(["ip", "-json", "-4", "route", "show", "table", "all"], capture_output=True, timeout=10)
    taken = []
    for route in json.loads(shown.stdout or b"[]"):
        if route["dst"] != "default":
            taken.append(ipaddress.IPv4Network(route["dst"], strict=False))
    for third in range(256):
        subnet = ipaddress.IPv4Network(f"10.244.{third}.0/24")
        if not any(subnet.overlaps(other) for other in taken):
            return subnet
    return None


def why_no_node() -> str | None:
    """Return why no real node can run on this machine, in one line; None if it can (packages may be missing)."""
    if os.geteuid() != 0:
        return "a real node needs root"
    if missing := missing_packages():
        if shutil.which("apt-get") is None:
            return f"a real node needs {', '.join(missing)}, and there is no apt-get to install them"
        if "iproute2" in missing or "util-linux" in missing:
            return None  # the following checks use their programs
    if (pid := foreign_kubelet()) is not None:
        return f"a kubelet runs already (process {pid})"
    hierarchies = [CGROUPS] if (CGROUPS / "cgroup.controllers").exists() else [CGROUPS / "memory", CGROUPS / "cpu"]
    for hierarchy in hierarchies:
        if not hierarchy.is_dir() or os.statvfs(hierarchy).f_flag & os.ST_RDONLY:
            return f"a real node needs to make cgroups, and {hierarchy} is read-only or absent"
    probe = ["unshare", "--mount", "--pid", "--fork", "--net", "ip", "link", "add", "probe", "type", "bridge"]
    done = subprocess.run(probe, capture_output=True, text=True, timeout=20)
    if done.returncode != 0:
        return f"a real node needs namespaces and a bridge: {done.stderr.strip().splitlines()[-1:] or done.returncode}"
    if free_subnet() is None:
        return "a real node needs a free subnet among 10.244.0.0/16, and routes cover all of it"
    return None


def why_no_user_namespaces() -> str | None:
    """Return why no Pod on a real node here can have its own user namespace; None if it can."""
    version_text = subprocess.run(["runc", "--version"], capture_output=True, text=True, timeout=20, check=True).stdout
    version = version_text.split()[2]
    major, minor = (int(part) for part in version.split(".")[:2])
    return f"runc {version} has no user namespaces for Pods: 1.2 and newer have" if (major, minor) < (1, 2) else None


def install_packages() -> None:
    """Install the missing requirements of a node; see `install_missing`."""
    install_missing(missing_packages)


def install_packages_of(programs: Mapping[str, str]) -> None:
    """Install the packages of the programs that are not on PATH. `programs`: by program, its package. See
    `install_missing`."""
    install_missing(lambda: sorted({package for name, package in programs.items() if shutil.which(name) is None}))


def install_missing(missing: Callable[[], Sequence[str]]) -> None:
    """Install the packages that `missing` names with apt-get, with a line of progress every 10 s. One process at a
    time: others wait, and then find them installed. Errors: NodeUnavailableError."""
    if not missing():
        return
    lock = acquire(cache_dir() / "packages.lock", what="installing packages", timeout=2 * _APT_TIMEOUT)
    try:
        if packages := missing():
            _install(packages)
        if still := missing():
            raise NodeUnavailableError(f"installed, but their programs are not on PATH: {', '.join(still)}")
    finally:
        os.close(lock)


def _install(missing: Sequence[str]) -> None:
    command = ["apt-get", "install", "--yes", "--no-install-recommends", *missing]
    if _apt(command, "installing " + " ".join(missing)) is not None:
        _apt(["apt-get", "update"], "updating the package lists")
        if (error := _apt(command, "installing " + " ".join(missing))) is not None:
            raise NodeUnavailableError(f"`{' '.join(command)}` failed: {error}")


def _apt(command: list[str], label: str) -> str | None:
    """Run apt-get. Return None if it succeeded, else the last line of its output."""
    environment = dict(os.environ) | {"DEBIAN_FRONTEND": "noninteractive"}
    began = shown = time.monotonic()
    with tempfile.TemporaryFile(mode="w+") as output:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, env=environment
        )
        try:
            while process.poll() is None:
                now = time.monotonic()
                if now - began > _APT_TIMEOUT:
                    return f"no end after {_APT_TIMEOUT:.0f} s"
                if now - shown > 10:
                    shown = now
                    print(f"test node: {label}, {now - began:.0f} s", file=sys.stderr, flush=True)
                time.sleep(0.1)
        finally:
            if process.poll() is None:
                process.kill()
                process.wait(timeout=10)
        output.seek(0)
        last = output.read().strip().splitlines()[-1:]
    return None if process.returncode == 0 else (last[0] if last else f"status {process.returncode}")
