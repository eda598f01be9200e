"""Say how long `make demo` will take on this machine, before anything is installed or built: python3 demo/minutes.py

Guarantees: it changes nothing, asks no network, and needs the standard library only.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from harness import build, releases  # noqa: E402  it is found through the line above
from harness.assets import VARIABLE  # noqa: E402
from harness.errors import HarnessError  # noqa: E402
from harness.node_packages import why_no_node  # noqa: E402


@dataclass(frozen=True)
class Step:
    """Something to do before the demo. `takes`: as a person says it."""

    what: str
    takes: str


def steps(root: Path, to_build: tuple[str, ...], *, containerd: bool) -> list[Step]:
    """Return what has to be done once before the demo runs.

    Args:
        root: root of the repository.
        to_build: programs of the test cluster.
        containerd: the real node's containerd has to be built.
    """
    found = []
    if not (root / ".venv" / "installed").exists():
        found.append(Step("Python packages into .venv", "about a minute"))
    if not all((root / "build" / mark).exists() for mark in ("shim.built", "doubles.built")):
        found.append(Step("hook, test doubles and programs, compiled", "about a minute"))
    if to_build:
        found.append(
            Step(f"Kubernetes {releases.KUBERNETES} from source: {', '.join(to_build)}", releases.USUAL_DURATION)
        )
    if containerd:
        found.append(Step(f"{releases.CONTAINERD.name} from source, for the real node", releases.CONTAINERD.duration))
    return found


def main() -> int:
    try:
        to_build = build.to_build(os.environ)
    except HarnessError as error:
        print(error, file=sys.stderr)
        return 1
    containerd = why_no_node() is None and build.built(releases.CONTAINERD) is None
    first = steps(ROOT, to_build, containerd=containerd)
    if not first:
        print("make demo: about one minute")
        return 0
    print("make demo: the first run installs and builds, later runs take about one minute")
    for step in first:
        print(f"  {step.what}: {step.takes}")
    print("  the demo itself: about one minute", flush=True)
    if to_build and not os.environ.get(VARIABLE):
        print(f"  (with binaries of setup-envtest, set {VARIABLE}: see CONTRIBUTING.md)", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
