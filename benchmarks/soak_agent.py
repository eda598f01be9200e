"""Twenty minutes of random trouble for an agent and its tenants: see `tests/hook/soak_agent.py`."""

from __future__ import annotations

import sys

from harness.soak import main
from hook.agent_node import built
from hook.soak_agent import WANTED, soak

if __name__ == "__main__":
    if not built():
        sys.exit("hook or double not built: run `make shim doubles`")
    sys.exit(main("agent", soak, wanted=WANTED))
