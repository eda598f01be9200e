"""End of a tenant's process, by the node's administrator's policy.

Guarantee: no process of anyone else is ended, whatever the driver says and however often pids are used again.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

EndProcess = Callable[[str, int, Callable[[int], bool]], bool]
"""Ends a process of a tenant: tenant id, pid, question whether the process that has a pid now is the tenant's. Returns
whether it was ended, or is being ended."""


def end_here(_tenant_id: str, pid: int, is_the_tenants: Callable[[int], bool]) -> bool:
    """Kill a process if it is the tenant's; return whether it was killed.

    Args:
        _tenant_id: the tenant.
        pid: the process, in the agent's PID namespace.
        is_the_tenants: question whether the process that has a pid now is the tenant's. It is asked once the process
            is held by a descriptor: the signal reaches that process or none.
    """
    try:
        descriptor = os.pidfd_open(pid)
    except OSError:  # it has ended, or the driver tells a pid of another namespace
        return False
    try:
        if not is_the_tenants(pid):
            return False
        signal.pidfd_send_signal(descriptor, signal.SIGKILL)
    except OSError:
        return False
    finally:
        os.close(descriptor)
    return True
