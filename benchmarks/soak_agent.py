"""Twenty minutes of random trouble for an agent and its tenants: see `tests/hook/life/soak_agent.py`."""

from __future__ import annotations

import sys

from harness.soak import main
from hook.life.soak_agent import WANTED, soak
from hook.world.agent_node import built

if __name__ == "__main__":
    if not built():
        sys.exit("hook or double not built: run `make shim doubles`")
    sys.exit(main("agent", soak, wanted=WANTED))
