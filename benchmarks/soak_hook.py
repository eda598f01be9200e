"""Random life under the hook for twenty minutes: no launch without a token, no hang, no broken capture."""

from __future__ import annotations

import sys
from pathlib import Path

from harness.soak import Run, main
from hook.life.randomlife import WANTED, soak

HOOK = Path(__file__).resolve().parents[1] / "operator" / "sharepod" / "agent" / "hook" / "libsharepod.so"


def run(run: Run) -> dict[str, int]:
    return soak(run, HOOK)


if __name__ == "__main__":
    sys.exit(main("hook", run, wanted=WANTED))
