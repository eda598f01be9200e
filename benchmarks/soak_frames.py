"""Ten million frames of fuzz against the part of the agent that parses them: see `tests/property/soak_frames.py`."""

from __future__ import annotations

import sys

from harness.soak import main
from property.soak_frames import WANTED, soak
from sharepod import logs

if __name__ == "__main__":
    logs.configure("error", "console")
    sys.exit(main("frames", soak, wanted={**WANTED, "short": 0}))
