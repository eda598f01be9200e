"""python -m images.relock: rewrite the locks from pyproject.toml, by uv.

A lock names each direct or indirect dependency of an image (operator, agent) or of the compilation (build), with its
version and the hashes of its files. Guarantees: no lock contains the address of a package index.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

from images.package import LOCKS

ROOT = LOCKS.parents[2]
_OLDEST_PYTHON = "3.11"
_TIMEOUT = 600.0
_HEADER = "# {}: written by `make locks`, from pyproject.toml.\n"
_OF = {
    "operator": "Packages of the operator's image",
    "agent": "Packages of the agent's image",
    "build": "The compiler's",
}


def main() -> int:
    """Run `python -m images.relock`."""
    builds = tomllib.loads((ROOT / "pyproject.toml").read_text())["build-system"]["requires"]
    with tempfile.TemporaryDirectory() as directory:
        needs = Path(directory) / "build.in"
        needs.write_text("\n".join([*builds, "wheel"]))
        for name, title in _OF.items():
            source = [str(needs)] if name == "build" else ["pyproject.toml", f"--extra={name}"]
            made = Path(directory) / f"{name}.lock"
            argv = [
                *(sys.executable, "-m", "uv", "pip", "compile", "--quiet", "--universal", "--generate-hashes"),
                *("--no-header", "--no-annotate", "--no-emit-index-url", "--no-emit-find-links"),
                *(f"--python-version={_OLDEST_PYTHON}", f"--output-file={made}", *source),
            ]
            subprocess.run(argv, cwd=ROOT, check=True, timeout=_TIMEOUT)
            (LOCKS / f"{name}.lock").write_text(_HEADER.format(title) + made.read_text())
    return 0


if __name__ == "__main__":
    sys.exit(main())
