"""Entry point of the program `sharepod-agent`: opens the sockets of the tenants in the state directory, imports the
rest, and runs `program`.

With `--apart`, as in the DaemonSet, the sockets are opened before the slow imports. So tenants can connect soon after a
restart.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from sharepod.agent.state import early_sockets


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program; return its exit status (see `program`)."""
    arguments = sys.argv[1:] if argv is None else argv
    early = early_sockets.EarlySockets()
    if "--apart" in arguments:
        early = early_sockets.listen(arguments, os.environ)
    from . import program  # imports take some tenths of a second

    return program.main(arguments, early)


if __name__ == "__main__":
    sys.exit(main())
