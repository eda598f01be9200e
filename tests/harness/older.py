"""Package of an older commit, built from git's history, for tests of programs whose versions differ by one."""

from __future__ import annotations

import io
import os
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from harness.errors import HarnessError

ROOT = Path(__file__).resolve().parents[2]
OLDER = "35555fa560"
"""Last commit before four features: several runs of a SharePod, claims, Interactive tenants, version 2 of the
protocol."""
VERSION_2 = "75a627fca9"
"""Last commit before version 3 of the protocol, in which a hook samples its progress and tenants may co-run."""
BEFORE_BUDGETS = "7d9d1aa050"
"""Last commit before GPUStatements, GPUBudgets and preemption."""


def has_older() -> bool:
    """Return whether the history has all of these commits."""
    try:
        return all(_has(commit) for commit in (OLDER, VERSION_2, BEFORE_BUDGETS))
    except FileNotFoundError:
        return False


def _has(commit: str) -> bool:
    asked = ["git", "cat-file", "-e", f"{commit}^{{commit}}"]
    return subprocess.run(asked, cwd=ROOT, capture_output=True, check=False, timeout=30).returncode == 0


NO_OLDER = f"the history has no commit {OLDER}: git fetch --unshallow"


@contextmanager
def older_package(commit: str = OLDER) -> Iterator[Path]:
    """Build the package of an older commit, with its C parts and its hook; this takes 10 s. Yield its folder for
    PYTHONPATH."""
    archive = subprocess.run(["git", "archive", commit], cwd=ROOT, capture_output=True, check=True, timeout=60)
    with tempfile.TemporaryDirectory(prefix="shp-") as at:
        with tarfile.open(fileobj=io.BytesIO(archive.stdout)) as content:
            content.extractall(at, filter="data")
        build = [sys.executable, "setup.py", "--quiet", "build_ext", "--inplace", "build_hook"]
        env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        built = subprocess.run(build, cwd=at, capture_output=True, text=True, check=False, timeout=300, env=env)
        if built.returncode != 0:
            raise HarnessError(f"commit {commit} cannot be built: {built.stderr[-2000:]}")
        yield Path(at) / "operator"
