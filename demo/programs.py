"""Build the programs that `make demo` and `make play` need: Kubernetes, and containerd for a real node.

python3 demo/programs.py

`make` runs it while packages are installed and the hook is compiled: Go fetches modules and links on one processor.

Guarantees: it needs only the standard library, and does nothing if all is built.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tests")]

from harness import build, releases  # noqa: E402  it is found through the line above
from harness.errors import HarnessError  # noqa: E402
from harness.node_packages import why_no_node  # noqa: E402


def main() -> int:
    try:
        kubernetes = [releases.CURRENT] if build.to_build(os.environ) else []
        containerd = [releases.CONTAINERD] if why_no_node() is None else []
        build.build_missing(*kubernetes, *containerd)
    except HarnessError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
