"""The hook, built from the sources of this tree if they are newer than the file."""

from __future__ import annotations

import fcntl
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
BUILD = ROOT / "build"
_BUILD_S = 120
"""Longest time for a build in seconds: ten times as long as on a slow machine."""


def built_hook(target: Path, *, define: str = "") -> Path:
    """Return `target`, built if it is out of date.

    Args:
        target: File of the hook.
        define: Macros of the build, separated by commas.
    """
    BUILD.mkdir(exist_ok=True)
    with (BUILD / "hook.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # several workers may build at the same time
        return _built(target, define)


def _built(target: Path, define: str) -> Path:
    sources = [ROOT / "setup.py", Path(__file__), *(ROOT / "shim").rglob("*.[ch]"), *(ROOT / "shim").rglob("*.def")]
    if target.is_file() and target.stat().st_mtime > max(source.stat().st_mtime for source in sources):
        return target
    command = [sys.executable, "setup.py", "--quiet", "build_hook", f"--target={target}"]
    if define:
        command.append(f"--define={define}")
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=_BUILD_S)
    assert done.returncode == 0, done.stdout + done.stderr
    return target
