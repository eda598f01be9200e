"""Twenty minutes of random memory calls of several processes: see `tests/hook/life/soak_memory.py`."""

from __future__ import annotations

import sys

from harness.soak import main
from hook.life.soak_memory import WANTED, soak
from hook.world.agent_node import built

if __name__ == "__main__":
    if not built():
        sys.exit("hook or double not built: run `make shim doubles`")
    sys.exit(main("memory", soak, wanted=WANTED))
