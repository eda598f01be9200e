"""Print the duration of `make demo` or `make play` on this machine, before anything is installed or built.

python3 demo/minutes.py demo|play

Guarantees: it changes nothing, uses no network, and needs only the standard library.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "manifests")]

from harness import build, releases  # noqa: E402  it is found through the line above
from harness.assets import VARIABLE  # noqa: E402
from harness.errors import HarnessError  # noqa: E402
from harness.node_packages import why_no_node  # noqa: E402
from images.roots import roots_to_make, why_no_images  # noqa: E402

USUAL = {"demo": "about a minute and a quarter", "play": "about 40 seconds until it is open"}
"""Usual durations on two cores, when everything has been built before."""


@dataclass(frozen=True)
class Step:
    """Preparation that the demo needs. `takes`: its duration as text."""

    what: str
    takes: str


def steps(root: Path, to_build: tuple[str, ...], *, containerd: bool, images: bool) -> list[Step]:
    """Return the preparations that are still to be made.

    Args:
        root: Root of the repository.
        to_build: Programs of the test cluster that must be built.
        containerd: True if the containerd of the real node must be built.
        images: True if the Debian roots of SharePod's images must be made.
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
    if images:
        found.append(Step("Debian packages and wheels of SharePod's images", "two to three minutes"))
    return found


def main() -> int:
    (_, name) = sys.argv
    try:
        to_build = build.to_build(os.environ)
    except HarnessError as error:
        print(error, file=sys.stderr)
        return 1
    node = why_no_node() is None
    containerd = node and build.built(releases.CONTAINERD) is None
    images = name == "play" and node and why_no_images() is None and roots_to_make()
    first = steps(ROOT, to_build, containerd=containerd, images=images)
    if not first:
        print(f"make {name}: {USUAL[name]}")
        return 0
    print(f"make {name}: the first run installs and builds, later runs take {USUAL[name]}")
    for step in first:
        print(f"  {step.what}: {step.takes}")
    print(f"  make {name} itself: {USUAL[name]}", flush=True)
    if to_build or containerd:
        print("  (packages and hook are made while Go builds)")
    if to_build and not os.environ.get(VARIABLE):
        print(f"  (with binaries of setup-envtest, set {VARIABLE}: see CONTRIBUTING.md)", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
