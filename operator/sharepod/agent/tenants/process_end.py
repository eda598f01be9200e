"""Kill of a tenant's process, by the administrator's policy (`unenforced_policy`).

Guarantee: no other process is killed, whatever the driver reports and however often pids are reused.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

EndProcess = Callable[[str, int, Callable[[int], bool]], bool]
"""Kills a process of a tenant. Arguments: tenant id, pid, predicate whether the process that has a pid now is the
tenant's. Returns whether it was killed, or is being killed."""


def end_here(_tenant_id: str, pid: int, is_the_tenants: Callable[[int], bool]) -> bool:
    """Kill a process if it is the tenant's; return whether it was killed.

    Args:
        _tenant_id: the tenant.
        pid: the process, in the agent's PID namespace.
        is_the_tenants: predicate whether the process that has a pid now is the tenant's. It is called once a pidfd
        holds the process: the signal reaches that process or none.
    """
    try:
        descriptor = os.pidfd_open(pid)
    except OSError:  # the process has exited, or its pid is of another namespace
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
