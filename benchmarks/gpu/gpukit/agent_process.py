"""The agent as a process of the kit: `sharepod-agent`, which also ends when its standard input ends.

So no agent keeps running when the kit is killed.
"""

from __future__ import annotations

import os
import signal
import sys
import threading

from sharepod.agent.main import main


def _end_with_the_kit() -> None:
    sys.stdin.read()
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    threading.Thread(target=_end_with_the_kit, daemon=True).start()
    sys.exit(main([]))
